"""Texts of E10."""

WORDS = {
    "title": ("The parameters of a layer: 4·d_model²", "一层的参数量：4·d_model²"),
    "question": (
        "How many parameters does multi-head attention have, and do more heads mean more?",
        "多头注意力有多少参数？头多了参数会变多吗？",
    ),
    "look": (
        "Layers are built and counted. Four square matrices, W^Q, W^K, W^V and W^O, make 4·d_model². The number of "
        "heads changes nothing: more heads are narrower ones. Biases add 4·d_model, which is little.",
        "这里真的把层建出来再数。四个方阵 W^Q、W^K、W^V、W^O 合起来是 4·d_model²。头数不影响总数：头多了，每个头就窄"
        "了。偏置只多出 4·d_model，很少。",
    ),
    "claim": ("A widely copied note prints 4·d_model for a layer.", "一份流传很广的笔记写的是每层 4·d_model。"),
    "right": (
        "4·d_model². At d_model = 512: 1 048 576, not 2 048.",
        "4·d_model²。当 d_model = 512 时是 1 048 576，而不是 2 048。",
    ),
    "why": (
        "Each of the four matrices maps d_model numbers to d_model numbers, so each has d_model² entries. The square "
        "got lost.",
        "四个矩阵都把 d_model 个数变成 d_model 个数，各有 d_model² 个元素。笔记漏掉了平方。",
    ),
    "counted": ("counted", "实际计数"),
    "noted": ("4·d_model (the note)", "4·d_model（笔记）"),
    "by_width": ("a layer without biases", "不带偏置的一层"),
    "by_heads": ("d_model = 512", "d_model = 512"),
    "heads": ("heads", "头数"),
    "biases": ("8, with biases", "8，带偏置"),
}
