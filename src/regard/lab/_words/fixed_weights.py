"""Texts of E7."""

WORDS = {
    "title": ("Fixed learned weights instead of queries and keys", "用固定的可学习权重代替查询与键"),
    "question": (
        "Why not simply learn a table of weights, one for each pair of places?",
        "为什么不干脆学一张权重表，每对位置一个权重？",
    ),
    "look": (
        "Tokens are things with a name and a colour; the last one asks for the colour of a name. Trained with the "
        "answer always at place 2, the table answers well until the answer stands elsewhere: then it guesses. "
        "Trained with the answer anywhere, it can only average. For longer inputs it has no weights at all. Queries "
        "and keys learn to match names, so place and length do not matter. The last row is a warning: given "
        "positions as well, attention learns the place in part, because that also worked in training.",
        "每个词元是一样东西，有名字和颜色；最后一个词元问某个名字的颜色。训练时答案总在位置 2，权重表答得很好；答案一"
        "换位置，它就只能随机猜测。若训练时答案位置不定，它只能取平均。输入更长时，它干脆没有对应的权重。查询与键学到的是"
        "“按名字匹配”，所以位置和长度都不要紧。最后一行是个提醒：如果再加上位置编码，注意力也会部分地记住位置，因为在"
        "训练中这样也管用。",
    ),
    "answers": ("right answers (a guess: {chance})", "答对的比例（随机猜测：{chance}）"),
    "trained": ("as trained", "与训练时相同"),
    "moved": ("answer moved", "答案换位置"),
    "longer": ("{longer} tokens", "{longer} 个词元"),
    "cannot": ("cannot run", "无法运行"),
    "fixed": ("fixed weights, answer always at place 2", "固定权重，答案总在位置 2"),
    "fixed_anywhere": ("fixed weights, answer anywhere", "固定权重，答案位置不定"),
    "qkv": ("queries and keys, answer always at place 2", "查询与键，答案总在位置 2"),
    "qkv_positions": ("queries, keys and positions, likewise", "查询、键加位置编码，同上"),
}
