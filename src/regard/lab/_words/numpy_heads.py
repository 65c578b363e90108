"""Texts of E11."""

WORDS = {
    "title": ("NumPy from scratch: one head and many", "从零用 NumPy：单头与多头"),
    "question": (
        "Ten tokens of width 64 go through attention written in NumPy. Which shapes appear on the way?",
        "10 个维度为 64 的词元经过用 NumPy 写成的注意力，途中出现哪些形状？",
    ),
    "look": (
        "Eight heads are eight narrow views of the same width: [10, 64] becomes [8, 10, 8], every head has a "
        "matrix of weights [10, 10] of its own, and concatenation brings back [10, 64]. Every row of weights sums "
        "to 1. The numbers are `regard.reference`'s, which every fast path is tested against.",
        "8 个头是同一向量的 8 个窄视角：[10, 64] 变成 [8, 10, 8]，每个头都有自己的 [10, 10] 权重矩阵，拼接后又回到 "
        "[10, 64]。每一行权重的总和都是 1。这些数字来自 `regard.reference`，所有快速路径都与它比对测试。",
    ),
    "claim": (
        "“8 heads are 8 matrices of (64, 64)” at d_model = 512",
        "“8 个头就是 8 个 (64, 64) 的矩阵”（d_model = 512）",
    ),
    "right": (
        "W_i^Q is of 512 × 64: it reads the whole width and writes 64.",
        "W_i^Q 是 512 × 64：读入全部维度，写出 64 维。",
    ),
    "why": ("A head projects the whole token; only its result is narrow.", "每个头投影的是整个词元，窄的只是结果。"),
    "shapes": ("shapes", "形状"),
    "one": ("one head", "单头"),
    "many": ("{heads} heads", "{heads} 个头"),
    "query": ("Q = X W^Q", "Q = X W^Q"),
    "query_heads": ("Q, split", "Q，拆分后"),
    "scores": ("Q Kᵀ / √d_k", "Q Kᵀ / √d_k"),
    "weights": ("softmax", "softmax"),
    "heads": ("weights · V", "权重 · V"),
    "concat": ("concatenated", "拼接后"),
    "output": ("· W^O", "· W^O"),
    "row": ("weights of the first token", "第一个词元的权重"),
    "total": ("sum", "总和"),
}
