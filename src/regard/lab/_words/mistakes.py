"""Texts of X5."""

WORDS = {
    "title": ("Ten statements of notes, computed again", "笔记里的十个说法，重新计算"),
    "question": (
        "Notes on attention copy numbers and sentences from each other. Which of them hold?",
        "关于注意力的笔记互相抄录数字和句子。哪些站得住脚？",
    ),
    "look": (
        "None of these does, and each takes one line to check. Scores of width 512 have a standard deviation of "
        "22.6, so a third of them lie beyond it. A softmax needs at least two numbers to say anything. Matrices of "
        "twice the width have four times the numbers. Two heads of a layer are neither orthogonal nor equal, and "
        "what joins them is linear. That a single attention matrix overfits was never measured in those notes.",
        "没有一个成立，而且每个都只要一行就能验证。维度 512 时分数的标准差是 22.6，所以约三分之一落在它之外。"
        "softmax 至少要两个数才有意义。维度加倍，矩阵的元素变成四倍。一层中的两个头既不正交也不相同，把它们合起来的"
        "运算是线性的。至于单个注意力矩阵会过拟合，那些笔记从来没有测量过。",
    ),
    "claim": ("The left column of the table, as notes have it.", "见表格左列，笔记如此。"),
    "right": ("The right column, computed.", "见表格右列，计算所得。"),
    "why": (
        "Each is one line of Python; `lab.mistakes()` holds the numbers.",
        "每个都是一行 Python；数字在 `lab.mistakes()` 中。",
    ),
    "both": ("what is stated, and what is so", "说法与事实"),
    "stated": ("stated", "说法"),
    "found": ("computed", "计算所得"),
    "softmax": ("softmax([2.3, 9.1, 0.5]) = [.002, .995, .003]", "softmax([2.3, 9.1, 0.5]) = [.002, .995, .003]"),
    "range": ("unscaled scores at d_k = 512 lie within ±22", "d_k = 512 时未缩放的分数在 ±22 之内"),
    "of_range": ("standard deviation {deviation}; {outside} lie beyond", "标准差 {deviation}；{outside} 在此之外"),
    "single": (
        "softmax(22) of a single number is close to 1 because 22 is large",
        "单个数的 softmax(22) 接近 1，因为 22 很大",
    ),
    "causal": ("a causal mask, drawn with the wrong cells", "画错格子的因果掩码"),
    "width": ("a larger d_model grows the matrices linearly", "d_model 变大，矩阵线性增长"),
    "of_width": ("twice the width: {grown} times the parameters", "维度加倍：参数变为 {grown} 倍"),
    "matrices": ("8 heads: 8 matrices of (64, 64)", "8 个头：8 个 (64, 64) 的矩阵"),
    "orthogonal": ("h orthogonal subspaces", "h 个正交子空间"),
    "of_angles": ("cosines from {least} to {most}", "余弦从 {least} 到 {most}"),
    "shared": ("heads share weights", "各头共享权重"),
    "of_shared": ("{shared} equal numbers in two heads", "两个头中相等的数：{shared} 个"),
    "linear": ("W^O combines the heads non-linearly", "W^O 对各头做非线性组合"),
    "of_linear": (
        "linear: out(a+b) − out(a) − out(b) is {bent}, rounding",
        "线性：out(a+b) − out(a) − out(b) 为 {bent}，舍入误差",
    ),
    "overfits": ("one 64 × 64 attention matrix overfits", "单个 64 × 64 的注意力矩阵会过拟合"),
    "of_overfits": ("stated without a measurement", "没有测量的说法"),
}
