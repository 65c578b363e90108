"""Texts of E2."""

WORDS = {
    "title": ("Two heads, two views of one input", "两个头，同一输入的两个视角"),
    "question": (
        "Two tokens of width 4 and two heads of width 2, with the projections written out. What are the queries?",
        "两个维度为 4 的词元，两个维度为 2 的头，投影矩阵全部给出。查询各是多少？",
    ),
    "look": (
        "The heads see the same tokens from two sides: head 1 sets x1 and x2 apart along its second entry, head 2 "
        "along its first. So their weights differ. One product with the matrices side by side gives the same "
        "numbers. (The note has no W^K and W^V; to go on to the output, each head uses its W^Q for them too.)",
        "两个头从两个方向看同样的词元：头 1 主要用第二维把 x1 和 x2 分开，头 2 主要用第一维，因此权重也不同。把两个矩"
        "阵并排成一个，再做一次乘法，得到的数完全一样。（笔记没有给出 W^K 和 W^V；为了算到输出，这里每个头的 W^K、"
        "W^V 都取它自己的 W^Q。）",
    ),
    "claim": (
        "A widely copied note prints other numbers for both Q1 and Q2.",
        "一份流传很广的笔记给出的 Q1 和 Q2 都是另外的数。",
    ),
    "right": (
        "Q1 = [[0, 1.45], [−0.95, −0.45]] and Q2 = [[2.05, −0.5], [−0.27, 0.94]].",
        "应为 Q1 = [[0, 1.45], [−0.95, −0.45]]，Q2 = [[2.05, −0.5], [−0.27, 0.94]]。",
    ),
    "why": (
        "Multiply one out: the first entry of Q1 is 1·0.1 + 0.5·(−0.2) + (−1)·1 + 2·0.5 = 0.",
        "乘开一个就清楚了：Q1 的第一个数是 1·0.1 + 0.5·(−0.2) + (−1)·1 + 2·0.5 = 0。",
    ),
    "q1": ("Q1 = X·W1", "Q1 = X·W1"),
    "q2": ("Q2 = X·W2", "Q2 = X·W2"),
    "weights1": ("weights of head 1", "头 1 的权重"),
    "weights2": ("weights of head 2", "头 2 的权重"),
    "concat": ("both heads, side by side", "两个头的输出并排"),
    "output": ("output, after W^O", "乘以 W^O 之后的输出"),
}
