"""Texts of M20."""

WORDS = {
    "title": ("Why softmax", "为什么用 softmax"),
    "question": (
        "Scores say how well keys fit a query. Why not use them as weights, or take the best key alone?",
        "分数说明键与查询的匹配程度。为什么不直接把分数当权重，或者只取最匹配的那个键？",
    ),
    "look": (
        "Scores are unbounded and may be negative: as weights they sum to anything, and when all of them are lower "
        "by the same amount, which changes nothing about who fits, their signs turn. The best alone keeps its "
        "weight, but its slope is 0: nothing can be learned from it. Softmax gives shares between 0 and 1 that sum "
        "to 1, the same when all scores move together, with a slope everywhere: a weighted mean of values, read as "
        "“how much”.",
        "分数没有上下界，也可能为负：当作权重时，总和可以是任何数；全部分数一起降低同样的值（谁更匹配并没有变），正"
        "负号就翻转了。只取最大的一个，权重不变，但斜率为 0，学不到任何东西。softmax 给出 0 到 1 之间、总和为 1 的"
        "份额，全部分数一起平移时不变，而且处处有斜率：这样才能做值的加权平均，并读作“关注多少”。",
    ),
    "claim": (
        "A note prints softmax([2.3, 9.1, 0.5]) = [0.002, 0.995, 0.003].",
        "一份笔记写道：softmax([2.3, 9.1, 0.5]) = [0.002, 0.995, 0.003]。",
    ),
    "right": ("It is [0.00111, 0.99870, 0.00018].", "应为 [0.00111, 0.99870, 0.00018]。"),
    "why": (
        "e^(2.3 − 9.1) = 0.00111 and e^(0.5 − 9.1) = 0.00018, divided by their sum with 1.",
        "e^(2.3 − 9.1) = 0.00111，e^(0.5 − 9.1) = 0.00018，再除以它们与 1 之和。",
    ),
    "weights": ("weights made of the scores", "由分数得到的权重"),
    "lowered": ("the same, all scores lower by {lower}", "全部分数降低 {lower} 之后"),
    "slopes": ("slope of the best key's weight, by each score", "最匹配的键的权重对各分数的导数"),
    "total": ("sum", "总和"),
    "raw": ("the scores themselves", "分数本身"),
    "argmax": ("the best alone (argmax)", "只取最大（argmax）"),
    "softmax": ("softmax", "softmax"),
}
