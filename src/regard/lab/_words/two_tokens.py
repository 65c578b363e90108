"""Texts of E1."""

WORDS = {
    "title": ("Two tokens, by hand", "两个词元，手算一遍"),
    "question": (
        "x1 = [1,0,1,0] and x2 = [0,1,0,1] attend to each other, with identity projections. What comes out?",
        "x1 = [1,0,1,0] 与 x2 = [0,1,0,1] 互相注意，投影都取单位矩阵。结果是什么？",
    ),
    "look": (
        "The scores are 2 and 0, so the weights are e²/(e²+1) = 0.8808 and 0.1192. Each output is that mixture of "
        "the two tokens. Divided by √4 = 2, the scores are 1 and 0, and the weights move together: 0.7311 and 0.2689.",
        "分数是 2 和 0，所以权重是 e²/(e²+1) = 0.8808 与 0.1192，输出就是两个词元按这个比例的混合。除以 √4 = 2 之后分"
        "数变成 1 和 0，权重随之靠拢：0.7311 与 0.2689。",
    ),
    "claim": (
        "A widely copied note prints the outputs with zeros for their small entries.",
        "一份流传很广的笔记把输出中较小的分量印成了 0。",
    ),
    "right": (
        "The outputs are [0.8808, 0.1192, 0.8808, 0.1192] and its mirror image.",
        "输出是 [0.8808, 0.1192, 0.8808, 0.1192]，另一个与它左右对调。",
    ),
    "why": (
        "A softmax never gives exactly 0 to a finite score: the other token keeps 11.92 % of the weight, and its "
        "ones arrive as 0.1192.",
        "softmax 不会给有限的分数恰好 0 的权重：另一个词元仍占 11.92 %，它的 1 到了输出里就是 0.1192。",
    ),
    "scores": ("scores x·xᵀ", "分数 x·xᵀ"),
    "weights": ("weights, no scaling", "权重，不缩放"),
    "scaled_weights": ("weights, scores divided by √4", "权重，分数先除以 √4"),
    "out": ("outputs, no scaling", "输出，不缩放"),
    "scaled_out": ("outputs, scores divided by √4", "输出，分数先除以 √4"),
    "entry": ("entry {number}", "第 {number} 维"),
}
