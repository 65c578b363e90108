"""Texts of S15."""

WORDS = {
    "title": ("RNN and CNN next to attention", "RNN、CNN 与注意力的比较"),
    "question": (
        "How much does the last output still depend on a token far back, and what has to be computed for it?",
        "最后一个输出还在多大程度上依赖很远以前的词元？为此要计算什么？",
    ),
    "look": (
        "In an RNN the gradient passes through every step between two tokens and shrinks in each: at distance 64 "
        "nothing is left. Gates (LSTM) slow this down. A stack of convolutions sees a fixed distance and not a "
        "token further. Attention has a path of one step to every token: the gradient at distance 128 is about as "
        "large as at distance 2. An RNN takes n steps one after another; attention takes one, for n²·d operations "
        "instead of n·d². All of them use the same weights for every token. The times are of this machine, when "
        "you ran it.",
        "RNN 的梯度要穿过两个词元之间的每一步，每一步都会变小：距离 64 时已经什么都不剩。门控（LSTM）让它变慢一些。"
        "一叠卷积只能看到固定的距离，再远一个词元也看不到。注意力到任何词元都只有一步，距离 128 处的梯度与距离 2 处"
        "差不多大。RNN 要依次走 n 步；注意力只要一步，运算量是 n²·d 而不是 n·d²。它们对每个词元都用同样的权重。时间是"
        "在你这台机器上运行时测得的。",
    ),
    "reach": ("gradient of the last output, relative to distance 0", "最后一个输出的梯度，以距离 0 为 1"),
    "distance": ("distance", "距离"),
    "compared": ("one layer over {tokens} tokens of width {width}", "一层，{tokens} 个词元，维度 {width}"),
    "rnn": ("RNN", "RNN"),
    "lstm": ("LSTM", "LSTM"),
    "cnn": ("CNN, 4 layers of 3", "CNN，4 层，核宽 3"),
    "attention": ("attention, causal", "注意力（因果）"),
    "steps": ("steps that follow each other", "必须依次进行的步数"),
    "path": ("path from the first token to the last", "首尾词元之间的路径"),
    "none": ("none", "无"),
    "cost": ("operations, in order of size", "运算量级"),
    "parameters": ("parameters", "参数"),
    "shared": ("the same weights for", "权重共享于"),
    "every_token": ("every token", "每个词元"),
    "seconds": ("forward, measured", "前向，实测"),
    "uses": ("typical uses", "典型用途"),
    "uses_rnn": ("short signals", "短信号"),
    "uses_lstm": ("streams, speech", "流式、语音"),
    "uses_cnn": ("images, local patterns", "图像、局部模式"),
    "uses_attention": ("language, long range", "语言、长距离"),
}
