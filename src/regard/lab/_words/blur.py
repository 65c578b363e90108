"""Texts of E8."""

WORDS = {
    "title": ("Averaging blurs; heads sharpen", "平均会模糊，多头来变清"),
    "question": (
        "A head returns an average. What is left of its parts, and what do more heads change?",
        "一个头给出的是平均值。各部分还剩下多少？多几个头又有什么不同？",
    ),
    "look": (
        "The average of n unrelated values resembles each of them by 1/√n only. One head that fetches 8 facts returns "
        "their mean: most of them can still be recognised in it, but not which belongs where. With 8 heads of an "
        "eighth of the width each, every fact arrives alone. The total width, and so the number of parameters, is "
        "the same. X2 shows it in trained layers.",
        "n 个互不相关的值的平均，与其中每一个的余弦相似度只有 1/√n。一个头去取 8 条信息，得到的是它们的平均："
        "多数还能认出来，但分不清哪条属于哪里。换成 8 个头、每个头维度为八分之一，每条信息都单独送达。"
        "总维度不变，参数量也就不变。训练出来的层也是如此，见 X2。",
    ),
    "blurs": ("one head, n keys with equal weight", "一个头，n 个键权重相等"),
    "shared": ("n", "n"),
    "likeness": ("cosine with each value", "与每个值的余弦"),
    "expected": ("1/√n", "1/√n"),
    "sharpens": ("{facts} facts to fetch at once", "同时取 {facts} 条信息"),
    "heads": ("heads", "头数"),
    "width": ("width of a head", "每头维度"),
    "each": ("facts a head", "每头信息数"),
    "found": ("read, in any order", "读出（不论次序）"),
    "named": ("each in its place", "各归其位"),
}
