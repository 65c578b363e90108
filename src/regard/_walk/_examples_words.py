"""What the worked examples say, in English and in Chinese."""

from __future__ import annotations

from regard._display.texts import Catalogue

EXAMPLES: Catalogue = {
    "lab": (
        "The whole experiment, with its figure: `regard lab {name}`.",
        "完整的实验和图：`regard lab {name}`。",
    ),
    "other_draw": (
        "Its draws are other ones (torch's, and NumPy's here), so the last digits differ.",
        "那里用 torch 抽样，这里用 NumPy，所以末位数字会有差别。",
    ),
    "seed": ("Random numbers are drawn from seed {seed}.", "随机数由种子 {seed} 生成。"),
    "input": ("The numbers of the example: one row for each token.", "例子给出的数：每个词元一行。"),
    "raw": ("unscaled", "未缩放"),
    "scaled": ("divided by √d_k", "除以 √d_k"),
    "E1.title": ("E1 · Two tokens, by hand", "E1 · 两个词元，手算一遍"),
    "E1.intro": (
        "x1 = [1, 0, 1, 0] and x2 = [0, 1, 0, 1], identity projections, no scaling. Notes that copy this example print "
        "0 for the small weight; it is {small}, and every token keeps a little of the other.",
        "x1 = [1, 0, 1, 0]，x2 = [0, 1, 0, 1]，投影为单位矩阵，不缩放。一些流传的笔记把小的权重写成 0；"
        "正确值是 {small}，每个词元都保留了一点对方的信息。",
    ),
    "E1.scaled.title": ("The same with scaling", "同样的例子，加上缩放"),
    "E1.scaled.says": (
        "Divided by √4 = 2 the scores are 1 and 0 in place of 2 and 0, and the weights are less extreme.",
        "除以 √4 = 2 之后，分数由 2 和 0 变为 1 和 0，权重就不那么极端了。",
    ),
    "E2.title": ("E2 · Two heads, by hand", "E2 · 两个头，手算一遍"),
    "E2.intro": (
        "Two tokens, two heads with d_k = 2. The example gives W^Q of both heads and W^O; keys and values are made "
        "with the same matrices here (W^K = W^V = W^Q), so that every number can be checked by hand. The Q of both "
        "heads that the copied notes print are wrong; step 3 has them right. (Heads are counted from 0: head 0 has the "
        "example's first matrix.)",
        "两个词元，两个头，d_k = 2。例子给出了两个头的 W^Q 以及 W^O；键和值在这里用同样的矩阵"
        "（W^K = W^V = W^Q），这样每个数都能手算核对。流传的笔记里两个头的 Q 都算错了；第 3 步是正确结果。"
        "（这里的头从 0 数起：头 0 用的是例子中的第一个矩阵。）",
    ),
    "E3.title": ("E3 · Why the scores are divided by √d_k: their variance", "E3 · 为什么要除以 √d_k：分数的方差"),
    "E3.draw.title": ("Random queries and keys", "随机的查询和键"),
    "E3.draw.says": (
        "Every number is drawn from a normal distribution with mean 0 and variance 1; d_k = {head_dim}.",
        "每个数都取自均值为 0、方差为 1 的正态分布；d_k = {head_dim}。",
    ),
    "E3.raw.title": ("Scores without scaling", "不缩放的分数"),
    "E3.raw.says": (
        "Each score is a sum of {head_dim} products of variance 1: the variances add up to about {head_dim}. The "
        "{count} scores shown here have a variance of {variance}.",
        "每个分数是 {head_dim} 个方差为 1 的乘积之和：方差相加约为 {head_dim}。这里显示的 {count} 个分数，"
        "方差是 {variance}。",
    ),
    "E3.scaled.title": ("Scores divided by √d_k", "除以 √d_k 的分数"),
    "E3.scaled.says": (
        "Dividing by √{head_dim} divides the variance by {head_dim}: it is {variance} now. (That is a variance of "
        "about 1, and not scores between -1 and 1, as a note says.)",
        "除以 √{head_dim}，方差就除以 {head_dim}：现在是 {variance}。（缩放使方差约为 1，并不像有的笔记所说的那样"
        "使分数落在 -1 到 1 之间。）",
    ),
    "E3.table.title": ("At other widths", "换成其他维度"),
    "E3.table.says": (
        "The variance of {pairs} scores, measured at each width: without scaling it grows with d_k, with scaling it "
        "does not.",
        "在每种维度下测量 {pairs} 个分数的方差：不缩放时随 d_k 增长，缩放后不变。",
    ),
    "E4.title": ("E4 · Without scaling, softmax saturates", "E4 · 不缩放，softmax 就会饱和"),
    "E4.scores.title": ("Scores, unscaled and scaled", "未缩放与缩放后的分数"),
    "E4.scores.says": (
        "{queries} random queries, {keys} random keys, d_k = {head_dim}; the first {shown} queries are shown. The "
        "colours have one scale: divided by √d_k the scores come close to each other.",
        "{queries} 个随机查询，{keys} 个随机键，d_k = {head_dim}；图中是前 {shown} 个查询。两幅图用同一颜色标度："
        "除以 √d_k 之后，分数彼此接近。",
    ),
    "E4.weights.title": ("Their weights", "对应的权重"),
    "E4.weights.says": (
        "Unscaled, almost all the weight goes to one key in each row; scaled, a query can look at several.",
        "不缩放时，每一行几乎全部权重都给了一个键；缩放后，一个查询可以同时关注多个键。",
    ),
    "E4.table.title": ("What it does to learning", "对学习的影响"),
    "E4.table.says": (
        "Means over {queries} queries: the largest weight, the entropy in nats (ln {keys} = {most} would be even), and "
        "the derivative of a weight by its own score, p(1-p), which carries the gradient. Where softmax saturates, "
        "hardly any gradient comes through.",
        "对 {queries} 个查询取平均：最大权重、熵（单位 nat，完全均匀时为 ln {keys} = {most}）、"
        "以及权重对自身分数的导数 p(1-p)，梯度要经过它传递。softmax 饱和时，几乎没有梯度能传过去。",
    ),
    "E4.largest": ("largest weight", "最大权重"),
    "E4.entropy": ("entropy", "熵"),
    "E4.gradient": ("p(1-p)", "p(1-p)"),
    "E5.title": ("E5 · The causal mask, right and inverted", "E5 · 因果掩码：正确的与弄反的"),
    "E5.intro": (
        "There are two conventions for a boolean mask: True = may look (here, and in scaled_dot_product_attention) and "
        "True = forbidden (torch.nn.MultiheadAttention). A widely copied note builds triu(k=1), which marks what is "
        "forbidden, and uses it where True means may look. Both are computed here.",
        "布尔掩码有两种约定：True = 可以看（这里以及 scaled_dot_product_attention），True = 禁止看"
        "（torch.nn.MultiheadAttention）。一份流传很广的笔记用 triu(k=1) 标出禁止的位置，却用在 True 表示可以看的地方。"
        "下面把两种都算一遍。",
    ),
    "E5.inverted.title": ("The mask inverted", "弄反的掩码"),
    "E5.inverted.says": (
        "triu(k=1) taken as may look: every token sees only what comes after it, not even itself, and the last one "
        "sees nothing at all.",
        "把 triu(k=1) 当作可以看：每个词元只看得到它后面的词元，连自己也看不到，最后一个词元什么都看不到。",
    ),
    "E5.wrong.title": ("The weights it gives", "由此得到的权重"),
    "E5.wrong.says": (
        "Everything above the diagonal: a model trained so reads the answer from the future. The last row has nothing "
        "to look at and is 0 here; with -1e9 in place of -∞ it would be even, {even} for each key, and nobody would "
        "notice.",
        "权重全在对角线上方：这样训练的模型是在偷看未来的答案。最后一行没有可看的词元，这里是 0；如果用 -1e9 代替 -∞，"
        "它会变成均匀的 {even}，不会有人发现错误。",
    ),
    "E6.title": ("E6 · The cat sat on the mat.", "E6 · The cat sat on the mat.（猫坐在垫子上。）"),
    "E7.title": ("E7 · Fixed weights in place of queries and keys", "E7 · 用固定权重代替查询和键"),
    "E7.intro": (
        "What if the weights were a learned table, one number for each pair of positions, and not made from queries "
        "and keys? Here such a table (random, softmax by row) stands beside attention.",
        "如果权重是一张学来的表，每对位置一个数，而不是由查询和键算出，会怎样？这里把这样的表（随机数，按行 softmax）"
        "与注意力放在一起比较。",
    ),
    "E7.fixed.title": ("A fixed table of weights", "固定的权重表"),
    "E7.fixed.says": (
        "It never looks at the words: both sentences get the same weights. Largest difference between the two: {same}.",
        "它从不看词的内容：两个句子得到相同的权重。两者的最大差异：{same}。",
    ),
    "E7.first": ("first sentence", "第一句"),
    "E7.second": ("second sentence", "第二句"),
    "E7.attention.title": ("Attention", "注意力"),
    "E7.attention.says": (
        "Weights made from queries and keys follow the content: with other words they are others. Largest difference: "
        "{other}.",
        "由查询和键算出的权重随内容而变：换了词，权重也不同。最大差异：{other}。",
    ),
    "E7.length.title": ("A longer sentence", "更长的句子"),
    "E7.length.says": (
        "With {long} tokens the table of [{short}, {short}] has no row or column for the last {missing}: it would have "
        "to be trained again. Queries and keys are made token by token, so attention has weights for any length.",
        "有 {long} 个词元时，[{short}, {short}] 的表里没有最后 {missing} 个词元的行和列，只能重新训练。"
        "查询和键是逐个词元算出的，所以注意力适用于任意长度。",
    ),
    "E8.title": ("E8 · One head and many: averaging blurs", "E8 · 一个头与多个头：平均会变模糊"),
    "E8.intro": (
        "One head has one set of weights for each token. To follow two relations at once it must average them; two "
        "heads need not.",
        "一个头对每个词元只有一组权重。要同时关注两种关系，它只能取平均；两个头就不必。",
    ),
    "E8.many.title": ("Two heads", "两个头"),
    "E8.many.says": (
        "Each head has its own weights. Their mean entropy is {each} nats.",
        "每个头有自己的权重。它们的平均熵为 {each} nat。",
    ),
    "E8.mean.title": ("Both in one: the average of their weights", "合成一个：权重取平均"),
    "E8.mean.says": (
        "A single head that had to serve both relations would hold something like this mean. Its entropy is {mean} "
        "nats: never less than the mean of the two, because entropy is concave. Sharp heads, averaged, are blurred.",
        "如果用一个头同时兼顾两种关系，得到的就类似这个平均值。它的熵为 {mean} nat：由于熵是凹函数，"
        "它不会小于两个头的平均熵。清晰的权重一平均就模糊了。",
    ),
    "E8.panel": ("mean of the heads", "各头的平均"),
    "E9.title": ("E9 · From scratch: four tokens, three numbers each", "E9 · 从零实现：四个词元，每个三个数"),
    "E9.intro": (
        "The input [[.1, .2, .3], [.4, .5, .6], [.7, .8, .9], [.5, .2, .4]] with 3 × 3 projections drawn once from "
        "seed {seed}. (A copied version draws new ones at every call, so that nothing can be reproduced.)",
        "输入 [[.1, .2, .3], [.4, .5, .6], [.7, .8, .9], [.5, .2, .4]]，3 × 3 投影矩阵由种子 {seed} 一次性生成。"
        "（有的版本每次调用都重新生成，结果无法复现。）",
    ),
    "E10.title": ("E10 · The parameters of a layer", "E10 · 一层有多少参数"),
    "E10.matrices.title": ("The four matrices", "四个矩阵"),
    "E10.matrices.says": (
        "W^Q, W^K, W^V and W^O of the walked layer, d_model = {width}: {each} numbers each, {total} in all.",
        "演示所用的这一层的 W^Q、W^K、W^V 和 W^O，d_model = {width}：每个 {each} 个数，共 {total} 个。",
    ),
    "E10.heads.title": ("Other numbers of heads", "换成其他头数"),
    "E10.heads.says": (
        "The heads share the same columns among them: more heads are narrower heads, and the count does not change.",
        "各个头分享同样的列：头越多，每个头越窄，参数总数不变。",
    ),
    "E10.widths.title": ("Other widths", "换成其他维度"),
    "E10.widths.says": (
        "Counted in the matrices themselves: 4·d_model² (without biases). A copied note prints 4·d_model, which is the "
        "row below it.",
        "直接数矩阵中的元素：4·d_model²（不含偏置）。一份笔记写成了 4·d_model，即最下面一行。",
    ),
    "E10.count": ("parameters", "参数个数"),
    "E10.width_of_head": ("d_k", "d_k"),
    "E10.head_count": ("heads = {heads}", "头数 = {heads}"),
    "E10.linear": ("4·d_model", "4·d_model"),
}
