"""Texts of X3."""

WORDS = {
    "title": ("Inverted masks: what goes wrong, seen", "掩码反了：亲眼看看会出什么错"),
    "question": (
        "E5's mistake, a mask read the wrong way round, raises no error. What does a model learn with it?",
        "E5 中的错误（把掩码的含义读反）不会报错。用它训练，模型会学到什么？",
    ),
    "look": (
        "Sequences are six random symbols, then the same six again. Under the inverted mask every token sees the "
        "very symbol it is asked for: the loss falls to 0, below what is possible without seeing the future. When "
        "the model has to generate, there is no future to read, and it guesses. A loss that is too good is the sign "
        "to look for. The last row of such a mask has nothing to attend to: a plain softmax gives NaN, −1e9 gives "
        "equal weight to every forbidden key (and in float16, where it is −inf, NaN again); regard gives zeros.",
        "序列是六个随机符号，再原样重复一遍。掩码反了，每个词元都能看见自己要预测的那个符号：损失降到 0，低于“看不见"
        "未来”所能达到的下限。到了生成的时候，没有未来可看，模型只能随机猜测。损失好得过分，就是该警觉的信号。这种掩码的"
        "最后一行没有任何可看的键：普通的 softmax 得到 NaN；用 −1e9 则给每个被禁止的键相同的权重（在 float16 里 −1e9 "
        "就是 −inf，又是 NaN）；regard 给出 0。",
    ),
    "claim": (
        "Code that is widely copied writes −1e9 into the scores that a mask forbids.",
        "一段流传很广的代码把被掩码禁止的分数写成 −1e9。",
    ),
    "right": (
        "A forbidden key has weight 0, and a query without any permitted key gets zeros.",
        "被禁止的键权重应为 0；一个可看的键都没有的查询应得到 0。",
    ),
    "why": (
        "−1e9 is a number like any other: where all scores are −1e9, the softmax takes them for equals. And float16 "
        "ends at 65 504.",
        "−1e9 也只是个普通的数：如果一行全是 −1e9，softmax 就把它们一视同仁。而且 float16 最大只到 65 504。",
    ),
    "trained": ("trained for {steps} steps, then left to generate", "训练 {steps} 步，然后让它生成"),
    "loss": ("training loss (nats)", "训练损失（nat）"),
    "generated": ("right when generating", "生成时的正确率"),
    "causal": ("causal mask", "因果掩码"),
    "inverted": ("inverted mask", "反了的掩码"),
    "possible": ("least possible loss; a guess", "损失的下限；随机猜测的正确率"),
    "padding": ("a padding mask, inverted", "填充掩码反了"),
    "on_padding": ("weight that goes to padding", "落在填充上的权重"),
    "empty": ("a row with nothing to attend to", "没有任何可看的键的一行"),
    "weight": ("weight of each key", "每个键的权重"),
    "infinity": ("plain softmax, −inf", "普通 softmax，−inf"),
    "billion": ("plain softmax, −1e9", "普通 softmax，−1e9"),
    "half": ("the same in float16", "同上，float16"),
    "sdpa": ("torch's scaled_dot_product_attention", "torch 的 scaled_dot_product_attention"),
    "regard": ("regard.attention", "regard.attention"),
}
