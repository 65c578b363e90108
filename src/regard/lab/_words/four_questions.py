"""Texts of E13."""

WORDS = {
    "title": ("Four questions about attention", "关于注意力的四个问题"),
    "question": (
        "Why is it faster than an RNN? Which complexity? Self against cross? Why positions?",
        "为什么比 RNN 快？复杂度是多少？自注意力与交叉注意力有何区别？为什么需要位置编码？",
    ),
    "look": (
        "Faster: an RNN has to finish one token before the next, n steps in a row; attention is one step for all, "
        "which a parallel machine does at once (`regard lab S15` measures more). Complexity: twice the tokens are "
        "four times the operations, n²·d, where an RNN's n·d² double; below n = d attention is the cheaper one. "
        "Self and cross: the same call; Q comes from one text, K and V from the same or from another, so the "
        "weights are [5, 5] or [5, 7]. Positions: without them a shuffled input gives the shuffled output, to "
        "rounding; with them it does not.",
        "为什么更快：RNN 必须处理完一个词元才能处理下一个，要依次走 n 步；注意力对所有词元只要一步，并行机器可以同"
        "时完成（`regard lab S15` 有更多测量）。复杂度：词元加倍，运算变为四倍，即 n²·d；RNN 的 n·d² 只加倍；n 小于"
        " d 时注意力更省。自注意力与交叉注意力：是同一个调用；Q 来自一个文本，K 和 V 来自同一个或另一个文本，所以权"
        "重是 [5, 5] 或 [5, 7]。位置：没有位置编码时，打乱输入只会得到打乱的输出（差别只是舍入误差）；有了位置编码"
        "就不同了。",
    ),
    "faster": ("why faster: {tokens} tokens", "为什么更快：{tokens} 个词元"),
    "one_by_one": ("steps one after another", "必须依次进行的步数"),
    "rnn": ("RNN", "RNN"),
    "attention": ("attention", "注意力"),
    "complexity": ("which complexity: operations", "复杂度：运算量"),
    "length": ("tokens", "词元数"),
    "grown": ("grown", "增长"),
    "recurrent": ("recurrent", "循环层"),
    "kinds": ("self against cross: the matrix of weights", "自注意力与交叉注意力：权重矩阵"),
    "shape": ("shape", "形状"),
    "self": ("self: 5 tokens look at themselves", "自注意力：5 个词元看自己"),
    "cross": ("cross: 5 tokens look at 7", "交叉注意力：5 个词元看 7 个"),
    "positions": ("why positions: what shuffling the input changes", "为什么需要位置：打乱输入的影响"),
    "changes": ("largest difference", "最大差"),
    "none": ("no positions", "没有位置编码"),
    "sinusoidal": ("sinusoidal positions", "正弦位置编码"),
}
