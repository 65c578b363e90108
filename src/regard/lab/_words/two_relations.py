"""Texts of X2."""

WORDS = {
    "title": ("Two relations at once: one head against many", "同时需要两种关系：单头与多头"),
    "question": (
        "Every token must name the symbol before it and the symbol after it. Can one head do that?",
        "每个词元要同时说出它前一个和后一个符号。一个头做得到吗？",
    ),
    "look": (
        "One head has one row of weights, so it has to look both ways at once and average: it knows the two symbols "
        "and not which is which, so that its loss stays near ln 2 = 0.69. Two heads look one way each, and all is "
        "right. The number of parameters is the same. (What is read from the layer is linear, as W^O is; layers "
        "above could undo a part of the blur.)",
        "一个头只有一行权重，只好两边都看再取平均：它知道是哪两个符号，却分不清谁前谁后，所以损失停在 ln 2 = 0.69 附"
        "近。两个头各看一边，就全对了。参数量完全一样。（从这一层的读出是线性的，和 W^O 一样；更高的层可以挽回一部分"
        "模糊。）",
    ),
    "task": (
        "{symbols} symbols, {length} tokens, one layer of width 32",
        "{symbols} 种符号，{length} 个词元，一层，维度 32",
    ),
    "heads": ("heads", "头数"),
    "share": ("right answers", "答对的比例"),
    "loss": ("loss (nats)", "损失（nat）"),
    "parameters": ("parameters of the layer", "该层参数量"),
}
