"""Texts of X1."""

WORDS = {
    "title": ("Without √d_k, as d_k grows", "没有 √d_k，而 d_k 越来越大"),
    "question": (
        "E4 looks at one width. How do entropy, largest weight and gradient change from width 1 to 2048?",
        "E4 只看一个维度。从维度 1 到 2048，熵、最大权重和梯度怎样变化？",
    ),
    "look": (
        "With the scale the three curves soon stay level. Without it the entropy falls towards 0, one key takes all, "
        "and less and less gradient reaches the scores: at d_k = 2048 less than a tenth. Where a weight is nearly 0 "
        "or 1, learning stops.",
        "缩放之后，三条曲线很快就变平。不缩放，熵一路降向 0，一个键独占权重，传到分数上的梯度也越来越小：d_k = 2048 "
        "时不到十分之一。权重接近 0 或 1 的地方，学习也就停了。",
    ),
    "sizes": ("{keys} keys, normal data", "{keys} 个键，正态数据"),
    "entropy_raw": ("entropy", "熵"),
    "entropy_scaled": ("scaled", "缩放后"),
    "largest_raw": ("largest", "最大权重"),
    "largest_scaled": ("scaled", "缩放后"),
    "gradient_raw": ("gradient", "梯度"),
    "gradient_scaled": ("scaled", "缩放后"),
}
