"""Texts of E9."""

WORDS = {
    "title": ("From scratch in NumPy, reproducible", "用 NumPy 从零开始，可复现"),
    "question": (
        "Four tokens of width 3 with random 3×3 projections: what does attention from scratch give, and can it be "
        "repeated?",
        "四个维度为 3 的词元，投影是随机的 3×3 矩阵：从零实现的注意力给出什么？能重复吗？",
    ),
    "look": (
        "regard.reference writes the formulas out in NumPy; regard.attention gives the same numbers. Projections are "
        "drawn once, by a seed, so that a second run is bit for bit the first.",
        "regard.reference 用 NumPy 把公式逐步写出；regard.attention 得到同样的数。投影由种子一次生成，所以第二次运行"
        "与第一次逐位相同。",
    ),
    "claim": (
        "A widely copied NumPy version draws new random projections inside every call.",
        "一份流传很广的 NumPy 代码在每次调用里都重新随机生成投影矩阵。",
    ),
    "right": (
        "Projections are parameters: they are made once and kept. The last table shows how far two draws are apart.",
        "投影是参数：应当生成一次并保留。最后一张表给出两次抽样结果相差多少。",
    ),
    "why": (
        "A layer that forgets its weights between calls cannot be trained, saved or compared with anything.",
        "两次调用之间就忘掉权重的层，既不能训练，也不能保存，更无从比较。",
    ),
    "weights": ("weights, seed {seed}", "权重，种子 {seed}"),
    "out": ("outputs", "输出"),
    "differences": ("largest difference to the first run", "与第一次运行的最大差"),
    "again": ("a second run with the same seed", "同一种子再运行一次"),
    "redrawn": ("projections drawn anew, as in the note", "像笔记那样重新生成投影"),
    "fast": ("regard.attention", "regard.attention"),
}
