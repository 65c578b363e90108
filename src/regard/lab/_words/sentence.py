"""Texts of E6."""

WORDS = {
    "title": ('"The cat sat on the mat.", token by token', "逐词看 “The cat sat on the mat.”"),
    "question": ("What does attention do to a sentence, word by word?", "注意力对一句话逐词做了什么？"),
    "look": (
        "Every row is one word's question to all words, itself included, and sums to 1. The two heads ask differently. "
        "Under the causal mask the first word sees itself alone, so its weight is exactly 1. The layer is drawn by a "
        "seed, not "
        'trained: this shows the mechanism, not a meaning. Every step with its numbers: regard walk "The cat sat on '
        'the mat."; a trained model: regard look minilm.',
        "每一行是一个词向所有词（包括它自己）发出的提问，行和为 1；两个头问法不同。在因果掩码下，第一个词只看得见自己，"
        "权重恰好是 1。这一层由随机种子生成，没有训练过：看到的是机制，不是语义。想看每一步的数字："
        'regard walk "The cat sat on the mat."；想看训练好的模型：regard look minilm。',
    ),
    "heaviest": ("the heaviest key of each word", "每个词权重最大的键"),
    "causal": ("the same, causal", "同上，加因果掩码"),
    "head": ("head {number}", "头 {number}"),
    "entropy": ("entropy", "熵"),
}
