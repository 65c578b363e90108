"""Texts of E3."""

WORDS = {
    "title": ("Why √d_k: the variance of a dot product", "为什么是 √d_k：点积的方差"),
    "question": (
        "How large do the scores q·k get when the entries of q and k are standard normal?",
        "当 q 和 k 的各分量服从标准正态分布时，分数 q·k 会有多大？",
    ),
    "look": (
        "A dot product is a sum of d_k products, each with variance 1, so its variance is d_k. Divided by √d_k it is "
        "1, whatever the width. Variances divide by N (population variance); `--json` has all digits.",
        "点积是 d_k 个乘积之和，每个乘积的方差为 1，所以点积的方差就是 d_k；除以 √d_k 之后，无论维度多少，方差都是 1。"
        "这里的方差除以 N（总体方差）；全部数字见 `--json`。",
    ),
    "pairs": ("{pairs} pairs of width {head_dim}", "{pairs} 对向量，维度 {head_dim}"),
    "variance": ("variance", "方差"),
    "expected": ("expected", "理论值"),
    "raw": ("q·k", "q·k"),
    "scaled": ("q·k / √{head_dim}", "q·k / √{head_dim}"),
}
