"""What the walkthrough says, in English and in Chinese."""

from __future__ import annotations

from regard._display.texts import Catalogue

STEPS: Catalogue = {
    "title.self": ("Multi-head attention, step by step", "多头注意力，一步一步看"),
    "title.cross": ("Cross attention, step by step", "交叉注意力，一步一步看"),
    "title.model": ("Multi-head attention in {model}, step by step", "{model} 中的多头注意力，一步一步看"),
    "sizes": (
        "Tokens: {queries}; width d_model = {width}; heads: {heads}, each d_k = {head_dim} wide.",
        "词元：{queries} 个；维度 d_model = {width}；头：{heads} 个，每个头的维度 d_k = {head_dim}。",
    ),
    "sizes.cross": (
        "Tokens that look: {queries}, that are looked at: {keys}; width d_model = {width}; heads: {heads}, each "
        "d_k = {head_dim} wide.",
        "查询一方的词元：{queries} 个，被看一方的词元：{keys} 个；维度 d_model = {width}；头：{heads} 个，"
        "每个头的维度 d_k = {head_dim}。",
    ),
    "drawn": (
        "The vectors and matrices are random, drawn from seed {seed}: the arithmetic is that of any model, but nothing "
        "is trained, so who looks at whom has no meaning yet. `--model minilm` walks through trained weights.",
        "这里的向量和矩阵是由随机种子 {seed} 生成的：计算过程与真实模型完全相同，但没有经过训练，"
        "所以谁关注谁还没有含义。用 `--model minilm` 可以看训练好的权重。",
    ),
    "trained": (
        "The weights are trained: layer {layer}, counted from 0, of the {layers} in {model}. Largest difference "
        "between this walk (float64) and the model's own layer (float32): {difference}.",
        "权重是训练好的：{model} 共 {layers} 层，这里是第 {layer} 层（从 0 数起）。这里的结果（float64）"
        "与模型该层自身的结果（float32）最多相差 {difference}。",
    ),
    "changed": (
        "The model was trained without {options}: this is what its layer would do with it.",
        "模型训练时没有使用 {options}：这里展示的是加上它之后该层会怎样计算。",
    ),
    "legend": (
        "Colours: {negative} negative, {positive} positive, {weight} a share of attention (0 to 1). "
        "A stronger colour is a larger number, whatever its sign.",
        "颜色：{negative} 负数，{positive} 正数，{weight} 注意力权重（0 到 1）。颜色越浓，数值（不计正负）越大。",
    ),
    "negative": ("blue", "蓝色"),
    "positive": ("orange", "橙色"),
    "weight": ("green", "绿色"),
    "shades": (
        "Shades ░▒▓█: the fuller a cell, the larger its number (without its sign).",
        "深浅 ░▒▓█：格子填得越满，数值（不计正负）越大。",
    ),
    "by_hand": ("By hand: ", "手算一个数："),
    "pair": ("head {head}, {query} → {key}", "头 {head}，{query} → {key}"),
    "head": ("head {head}", "头 {head}"),
    "of_head": ("{name}, head {head}", "{name}，头 {head}"),
    "cell_mean": (
        "; each cell is the mean of up to {rows} × {columns} numbers",
        "；每格是至多 {rows} × {columns} 个数的平均值",
    ),
    "range": ("{low} to {high}", "{low} 到 {high}"),
    "more": (
        "… and {count} more, in the page (`--html`) and in `--json`.",
        "……还有 {count} 个，见网页（`--html`）和 `--json`。",
    ),
    "computing": ("computing every step", "正在计算每一步"),
    "loading": ("loading {model}", "正在加载 {model}"),
    "text": ("text", "文本"),
    "wrote": ("wrote {file}", "已写入 {file}"),
    "strongest": ("Who looks at whom most", "谁最关注谁"),
    "nothing": ("nothing", "无"),
    "rows_and_columns": (
        "Row = who looks (query), column = who is looked at (key).",
        "行 = 谁在看（查询），列 = 被看的词元（键）。",
    ),
    "position": ("position", "位置"),
    "number": ("number", "编号"),
    "tokens.title": ("Tokens", "词元"),
    "tokens.says": (
        "The text is cut into tokens, here words and signs, and each gets a number: its place in the vocabulary. From "
        "here on the layer sees numbers only. (Capitals do not count: The and the are one word.)",
        "把文本切成词元（token），这里是单词、标点或单个汉字；每个词元得到一个编号，即它在词表中的位置。"
        "从这里起，这一层只看得到数字。（不区分大小写：The 与 the 是同一个词。）",
    ),
    "tokens.model": (
        "The model's own tokenizer cuts the text into pieces that are in its vocabulary, and adds its special tokens. "
        "From here on the model sees numbers only.",
        "模型自带的分词器把文本切成词表中有的片段，并加上特殊词元。从这里起，模型只看得到编号。",
    ),
    "input.title": ("Input", "输入"),
    "embeddings.title": ("Embeddings", "词嵌入"),
    "embeddings.formula": ("E = table[number]", "E = 嵌入表[编号]"),
    "embeddings.says": (
        "Every number picks a row of a table: a vector of d_model numbers that stands for the word. The same word gets "
        "the same vector wherever it stands.",
        "用编号从嵌入表中取出一行：这个 d_model 维的向量就代表这个词。同一个词不论出现在哪里，取到的向量都一样。",
    ),
    "positions.title": ("Positions", "位置编码"),
    "positions.formula": (
        "X = E + P,  P(p, 2i) = sin(p / 10000^(2i/d)),  P(p, 2i+1) = cos(same)",
        "X = E + P,  P(p, 2i) = sin(p / 10000^(2i/d)),  P(p, 2i+1) = cos(同上)",
    ),
    "positions.says": (
        "Attention by itself knows no order: shuffle the tokens, and the results are the same, shuffled. So every "
        "position adds its own pattern of sines and cosines to the vector that stands there.",
        "注意力本身不知道先后顺序：把词元打乱，结果只是跟着打乱。因此给每个位置加上一组各不相同的正弦、余弦值。",
    ),
    "model_input.title": ("Embeddings and positions", "词嵌入与位置编码"),
    "model_input.says": (
        "Token, position and token type each pick a learned vector; their sum, normalised (LayerNorm), enters the "
        "first layer.",
        "词元、位置和句段类型各取一个学习得到的向量，相加后做层归一化（LayerNorm），再送入第一层。",
    ),
    "model_layer.title": ("Input of layer {layer}", "第 {layer} 层的输入"),
    "model_layer.says": (
        "The layers before this one have already mixed the tokens: a row no longer stands for a word alone, but for "
        "the word in its sentence.",
        "前面的各层已经让词元互相交换过信息：每一行不再只代表单个词，而是代表句子中的这个词。",
    ),
    "projections.title": ("Queries, keys and values", "查询、键和值"),
    "projections.says": (
        "Three matrices make three vectors of each token: a query (what it looks for), a key (what it can be found by) "
        "and a value (what it passes on).",
        "三个矩阵把每个词元变成三个向量：查询 Q（我在找什么）、键 K（别人凭什么找到我）、值 V（我能提供什么）。",
    ),
    "projections.cross": (
        "Queries come from the first text, keys and values from the second: the first text asks, the second answers.",
        "查询来自第一段文本，键和值来自第二段文本：第一段提问，第二段回答。",
    ),
    "projections.identity": (
        "Here the three matrices are the identity, so queries, keys and values are the input itself.",
        "这里三个矩阵都是单位矩阵，所以查询、键、值就是输入本身。",
    ),
    "split.title": ("Heads", "拆分成多个头"),
    "split.says": (
        "The columns of Q, K and V are dealt out to {heads} heads, d_k = {head_dim} each. Every head compares tokens "
        "in its own small space, so each can look for something else. No number changes.",
        "把 Q、K、V 的列分给 {heads} 个头，每个头 d_k = {head_dim} 列。每个头在自己的小空间里比较词元，"
        "可以各自关注不同的关系。数值本身没有变化。",
    ),
    "split.one": (
        "There is one head, so nothing is cut: it has all the columns, d_k = {head_dim}.",
        "只有一个头，不需要拆分：它拥有全部的列，d_k = {head_dim}。",
    ),
    "raw_scores.title": ("Scores", "注意力分数"),
    "raw_scores.says": (
        "The dot product of a query with a key says how well the two match: the larger, the better.",
        "查询与键的点积表示两者有多匹配：数值越大，越匹配。",
    ),
    "scores.title": ("Scaling", "缩放"),
    "scores.says": (
        "A sum of d_k products spreads like √d_k, and large scores would let softmax give everything to one key. "
        "Divided by √d_k = {root}, they keep the same spread at any width.",
        "d_k 个乘积之和的波动随 √d_k 增大；分数过大时，softmax 会把几乎全部权重给一个键。除以 √d_k = {root}，"
        "无论维度多大，分数的波动都保持不变。",
    ),
    "scores.off": (
        "Scaling is switched off: the scores stay as they are. With it they would be divided by √d_k = {root}.",
        "这里关闭了缩放：分数保持原样。若开启，则要除以 √d_k = {root}。",
    ),
    "mask.title": ("Mask", "掩码"),
    "mask.none": (
        "No mask: every query may look at every key, and the scores stay as they are.",
        "没有掩码：每个查询都可以看到所有的键，分数保持不变。",
    ),
    "mask.causal": (
        "Causal: a token may look at itself and at what came before it, never ahead. Forbidden scores become -∞, and "
        "softmax turns those into exactly 0.",
        "因果掩码：词元只能看自己和前面的词元，不能看后面的。被禁止的分数变成 -∞，softmax 之后正好是 0。",
    ),
    "mask.window": (
        "Window: a token may look {window} to either side, and at itself. Forbidden scores become -∞, and softmax "
        "turns those into exactly 0.",
        "窗口掩码：词元只能看自己以及左右各 {window} 个词元。被禁止的分数变成 -∞，softmax 之后正好是 0。",
    ),
    "mask.both": (
        "Causal and window: a token may look at itself and at the {window} before it. Forbidden scores become -∞, and "
        "softmax turns those into exactly 0.",
        "因果掩码加窗口：词元只能看自己以及前面 {window} 个词元。被禁止的分数变成 -∞，softmax 之后正好是 0。",
    ),
    "mask.formula": ("S[i, j] = -∞  where i may not look at j", "S[i, j] = -∞（i 不能看 j 时）"),
    "mask.panel": ("who may look at whom (■ = may)", "谁可以看谁（■ = 可以）"),
    "weights.title": ("Attention weights", "注意力权重"),
    "weights.says": (
        "Softmax turns every row into shares that add up to 1: the exponential of each score, divided by the sum of "
        "its row. These are the attention weights.",
        "softmax 把每一行变成总和为 1 的比例：每个分数取指数，再除以这一行的总和。这就是注意力权重。",
    ),
    "heads.title": ("Each head's result", "各个头的输出"),
    "heads.says": (
        "Every token collects the values of the tokens it looks at, mixed in the shares that its weights give.",
        "每个词元按照权重的比例，把所关注词元的值混合在一起。",
    ),
    "concat.title": ("Concatenation", "拼接"),
    "concat.says": (
        "The results of the heads are put side by side again: back to one row for each token.",
        "把各个头的结果重新并排拼在一起：每个词元又是一整行。",
    ),
    "concat.one": ("One head: there is nothing to put together.", "只有一个头：不需要拼接。"),
    "output.title": ("Output", "输出"),
    "output.says": (
        "A last matrix W^O mixes what the heads found. Every token leaves as wide as it came, but its vector now "
        "carries something of the others. (In a Transformer it is then added to the input, the residual, and "
        "normalised.)",
        "最后一个矩阵 W^O 把各个头的发现融合起来。每个词元出来时与进来时一样宽，但向量里已经带有其他词元的信息。"
        "（在 Transformer 中，接着与输入相加，即残差连接，再做归一化。）",
    ),
    "output.identity": (
        "This example has no output matrix (W^O is the identity), so the output is what the head found.",
        "这个例子没有输出矩阵（W^O 是单位矩阵），所以输出就是头的结果。",
    ),
}
