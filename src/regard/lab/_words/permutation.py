"""Texts of X4."""

WORDS = {
    "title": ("Attention does not know the order", "注意力不知道先后顺序"),
    "question": (
        "Shuffle the tokens of an input. Does anything but the order of the output change?",
        "把输入的词元打乱。除了输出的顺序，还会有别的变化吗？",
    ),
    "look": (
        "Without positions, no: the difference is rounding, and “dog bites man” has the same mean output as “man "
        "bites dog”. This is permutation equivariance. Any position encoding ends it, added (sinusoidal), turned in "
        "(rotary) or as a bias (ALiBi); so does a causal mask, which is a rule about order too. ALiBi counts "
        "distances and no directions: without a causal mask, a sentence read backwards is the same to it.",
        "没有位置编码时，没有变化：差别只是舍入误差，“dog bites man” 与 “man bites dog” 的平均输出相同，这就是置换等"
        "变性。任何位置编码都会打破它，不论是相加的（正弦）、旋转的（RoPE）还是作为偏置的（ALiBi）；因果掩码也会，因"
        "为它本身就是关于先后的规则。ALiBi 只看距离，不看方向：若不配合因果掩码，倒着读的句子在它看来完全一样。",
    ),
    "differences": ("largest difference, float64", "最大差，float64"),
    "shuffled": ("{tokens} tokens, shuffled", "{tokens} 个词元打乱"),
    "sentences": ("dog bites man / man bites dog", "dog bites man / man bites dog"),
    "none": ("no positions", "没有位置编码"),
    "sinusoidal": ("sinusoidal", "正弦位置编码"),
    "rotary": ("rotary", "旋转位置编码"),
    "alibi": ("ALiBi", "ALiBi"),
    "causal": ("causal mask, no positions", "因果掩码，没有位置编码"),
}
