"""What the worked examples say, in English and in Chinese."""

from __future__ import annotations

from regard._display.texts import Catalogue

EXAMPLES: Catalogue = {
    "measured": ("What was computed", "计算结果"),
    "look": ("What to look at", "看什么"),
    "note": ("What a widely copied note gets wrong", "流传笔记中的错误"),
    "right": ("Right: {said}", "正确：{said}"),
    "seed": ("Random numbers are drawn from seed {seed}.", "随机数由种子 {seed} 生成。"),
    "input": ("The numbers of the example: one row for each token.", "例子给出的数：每个词元一行。"),
    "E1.title": ("E1 · Two tokens, by hand", "E1 · 两个词元，手算一遍"),
    "E1.intro": (
        "x1 = [1, 0, 1, 0] and x2 = [0, 1, 0, 1], identity projections, no scaling. Notes that copy this example print "
        "0 for the small weight; it is {small}, and every token keeps a little of the other.",
        "x1 = [1, 0, 1, 0]，x2 = [0, 1, 0, 1]，投影为单位矩阵，不缩放。一些流传的笔记把小的权重写成 0；"
        "正确值是 {small}，每个词元都保留了一点对方的信息。",
    ),
    "E1.scaled.title": ("The same with scaling", "同样的例子，加上缩放"),
    "E1.scaled.says": (
        "Divided by √4 = 2 the scores are 1 and 0 in place of 2 and 0, and the weights are less extreme.",
        "除以 √4 = 2 之后，分数由 2 和 0 变为 1 和 0，权重就不那么极端了。",
    ),
    "E2.title": ("E2 · Two heads, by hand", "E2 · 两个头，手算一遍"),
    "E2.intro": (
        "Two tokens, two heads with d_k = 2. The example gives W^Q of both heads and W^O; keys and values are made "
        "with the same matrices here (W^K = W^V = W^Q), so that every number can be checked by hand. The Q of both "
        "heads that the copied notes print are wrong; step 3 has them right. (Heads are counted from 0: head 0 has the "
        "example's first matrix.)",
        "两个词元，两个头，d_k = 2。例子给出了两个头的 W^Q 以及 W^O；键和值在这里用同样的矩阵"
        "（W^K = W^V = W^Q），这样每个数都能手算核对。流传的笔记里两个头的 Q 都算错了；第 3 步是正确结果。"
        "（这里的头从 0 数起：头 0 用的是例子中的第一个矩阵。）",
    ),
    "E6.title": ("E6 · The cat sat on the mat.", "E6 · The cat sat on the mat.（猫坐在垫子上。）"),
    "E9.title": ("E9 · From scratch: four tokens, three numbers each", "E9 · 从零实现：四个词元，每个三个数"),
    "E9.intro": (
        "The input [[.1, .2, .3], [.4, .5, .6], [.7, .8, .9], [.5, .2, .4]] with 3 × 3 projections drawn once from "
        "seed {seed}. (A copied version draws new ones at every call, so that nothing can be reproduced.)",
        "输入 [[.1, .2, .3], [.4, .5, .6], [.7, .8, .9], [.5, .2, .4]]，3 × 3 投影矩阵由种子 {seed} 一次性生成。"
        "（有的版本每次调用都重新生成，结果无法复现。）",
    ),
}
