"""Texts of E4."""

WORDS = {
    "title": ("No scaling: softmax saturates", "不缩放：softmax 饱和"),
    "question": (
        "What do scores of variance 512 do to a softmax over 64 keys?",
        "方差为 512 的分数会把 64 个键上的 softmax 变成什么样？",
    ),
    "look": (
        "Without the scale one key takes nearly all the weight, the entropy is close to 0, and the slope of the "
        "softmax, through which every gradient passes, is nine times smaller. (Seed 0. Other draws move the second "
        "digit: seeds 0 to 9 give a largest weight of 0.91 to 0.94 without the scale.)",
        "不缩放时，一个键几乎占去全部权重，熵接近 0；而梯度都要经过的 softmax 斜率只剩九分之一。（种子为 0。换一"
        "次抽样，第二位数字会动：种子 0 到 9 的最大权重在 0.91 到 0.94 之间。）",
    ),
    "claim": (
        "A widely copied note says that dividing by √d_k brings the scores into [−1, 1].",
        "一份流传很广的笔记说，除以 √d_k 会把分数压到 [−1, 1] 之内。",
    ),
    "right": (
        "It makes their variance 1. About a third of them stay outside [−1, 1]; the last row of the table counts them.",
        "它只是让分数的方差变成 1。仍有大约三分之一的分数落在 [−1, 1] 之外，表格最后一行就是数出来的比例。",
    ),
    "why": (
        "Division by a constant bounds nothing. A normal variable of variance 1 is beyond ±1 in 31.7 % of cases.",
        "除以一个常数并不能限定范围。方差为 1 的正态变量有 31.7 % 的机会超出 ±1。",
    ),
    "sizes": ("d_k = {head_dim}, {keys} keys, normal data", "d_k = {head_dim}，{keys} 个键，正态数据"),
    "raw": ("no scaling", "不缩放"),
    "scaled": ("divided by √{head_dim}", "除以 √{head_dim}"),
    "largest": ("largest weight of a row, mean", "每行最大权重的均值"),
    "entropy": ("entropy of a row, mean (nats)", "每行熵的均值（nat）"),
    "slope": ("slope of softmax p·(1−p), mean", "softmax 斜率 p·(1−p) 的均值"),
    "outside": ("share of scores outside [−1, 1]", "落在 [−1, 1] 之外的分数比例"),
}
