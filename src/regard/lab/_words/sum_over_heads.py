"""Texts of M21."""

WORDS = {
    "title": ("The output is a sum over heads", "输出是各头之和"),
    "question": (
        "Heads are concatenated and multiplied by W^O. What does one head add?",
        "各头拼接之后乘以 W^O。单独一个头贡献了什么？",
    ),
    "look": (
        "Concat(head_1 … head_h) W^O = Σ head_i W_i^O, where W_i^O is the block of rows of W^O that meets head i: "
        "the two differ by rounding. So what a head adds is a vector for each token that can be looked at by "
        "itself, and leaving the head out takes away exactly that.",
        "Concat(head_1 … head_h) W^O = Σ head_i W_i^O，其中 W_i^O 是 W^O 中与第 i 个头相乘的那几行：两者只差舍入误"
        "差。因此每个头给每个词元贡献的是一个可以单独查看的向量；去掉这个头，减少的恰好就是它。",
    ),
    "claim": (
        "“W^O combines the heads non-linearly”, “the heads live in orthogonal subspaces”",
        "“W^O 对各头做非线性组合”，“各头位于正交的子空间”",
    ),
    "right": (
        "W^O is a matrix: the combination is linear, a sum. Nothing makes the subspaces orthogonal.",
        "W^O 是矩阵：组合是线性的，就是求和。没有任何机制让子空间正交。",
    ),
    "why": (
        "A matrix product is linear in its blocks of rows; `regard lab X5` measures the angles.",
        "矩阵乘积对行分块是线性的；`regard lab X5` 测量了这些夹角。",
    ),
    "checks": (
        "largest difference, heads of {head_dim}, d_model = {width}",
        "最大差，每头维度 {head_dim}，d_model = {width}",
    ),
    "difference": ("Concat(heads) W^O against Σ head_i W_i^O", "Concat(heads) W^O 与 Σ head_i W_i^O"),
    "without": ("without a head, against the output less what it adds", "去掉一个头，与输出减去它的贡献"),
    "adds": ("what each head adds to a token", "每个头给一个词元的贡献"),
    "head": ("head", "头"),
    "size": ("length, mean", "长度，平均"),
    "whole": ("the output", "输出"),
}
