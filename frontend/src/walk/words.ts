// What the walk says, in English and Chinese. Formulas are the same in both.

import EXAMPLES from "../../../src/regard/_walk/examples.json";
import type { Two } from "../words";

export interface Told { title: Two; formula: string; says: Two }

export const STEPS: Record<string, Told> = {
  input: { title: ["Input", "输入"], formula: "", says: EXAMPLES.input as unknown as Two },
  tokens: { title: ["Tokens", "词元"], formula: "", says: ["The text is cut into tokens, here words and signs, and each gets a number: its place in the vocabulary. From here on the layer sees numbers only.", "把文本切成词元，这里是单词、标点或单个汉字；每个词元得到一个编号，即它在词表中的位置。从这里起，这一层只看得到数字。"] },
  embeddings: { title: ["Embeddings", "词嵌入"], formula: "E = table[number]", says: ["Every number picks a row of a table: a vector that stands for the word. The same word gets the same vector wherever it stands. Here the table is random; a trained model has learned it.", "用编号从嵌入表中取出一行：这个向量就代表这个词。同一个词不论出现在哪里，取到的向量都一样。这里的表是随机的，训练好的模型则是学到的。"] },
  positions: { title: ["Positions", "位置编码"], formula: "X = E + P,  P(p, 2i) = sin(p / 10000^(2i/d)),  P(p, 2i+1) = cos(same)", says: ["Attention by itself knows no order. So every position adds its own pattern of sines and cosines to the vector that stands there.", "注意力本身不知道先后顺序。因此给每个位置加上一组各不相同的正弦、余弦值。"] },
  projections: { title: ["Queries, keys, values", "查询、键、值"], formula: "Q = X W^Q,  K = X W^K,  V = X W^V", says: ["Three matrices turn every vector into three: what it looks for (query), what it can be found by (key), and what it gives (value).", "三个矩阵把每个向量变成三个：它在找什么（查询）、别人凭什么找到它（键）、它能给出什么（值）。"] },
  split: { title: ["Heads", "多头"], formula: "d_k = d_model / h", says: ["Each vector is cut into as many pieces as there are heads. Every head works on its own piece, and so can look for something of its own.", "把每个向量切成与头数相同的几段。每个头只处理自己的一段，因此可以各找各的。"] },
  raw: { title: ["Scores", "得分"], formula: "S = Q Kᵀ", says: ["Every query meets every key: their dot product says how well they fit. Row = who looks, column = who is looked at.", "每个查询与每个键做点积，表示两者有多匹配。行 = 谁在看，列 = 被看的词元。"] },
  scores: { title: ["Scale", "缩放"], formula: "S / √d_k", says: ["Dot products grow with the width. Divided by √d_k they keep their size, and the softmax that follows does not become all or nothing.", "点积会随宽度变大。除以 √d_k 可以保持大小，使后面的 softmax 不至于非此即彼。"] },
  mask: { title: ["Mask", "掩码"], formula: "forbidden scores become −∞", says: ["A mask says who may look at whom. What is forbidden gets −∞, and so a weight of exactly 0.", "掩码规定谁可以看谁。被禁止的得分变成 −∞，于是权重恰好为 0。"] },
  attention: { title: ["Weights", "权重"], formula: "A[i, j] = exp(S[i, j]) / Σ_k exp(S[i, k])", says: ["The softmax turns every row into shares that add up to 1: this is attention. Point at a word to follow its lines.", "softmax 把每一行变成和为 1 的份额：这就是注意力。指向一个词即可看到它的连线。"] },
  heads: { title: ["What each head gives", "每个头的输出"], formula: "H = A V", says: ["Every token gets the mean of the values, weighted by its shares.", "每个词元得到以其份额加权的值的平均。"] },
  concat: { title: ["Side by side again", "拼接"], formula: "C = Concat(H₀, H₁, …)", says: ["What the heads gave is put side by side: as wide as the input was.", "把各个头的输出并排拼起来：与输入一样宽。"] },
  output: { title: ["Output", "输出"], formula: "Y = C W^O", says: ["One more matrix mixes what the heads found.", "再用一个矩阵把各个头找到的东西混合起来。"] },
  residual: { title: ["Residual", "残差连接"], formula: "R = X + Y", says: ["The layer does not replace its input: it adds to it. What attention found is a correction.", "这一层不替换输入，而是加在输入上：注意力找到的是一个修正量。"] },
  normed: { title: ["LayerNorm", "层归一化"], formula: "N = (R − mean) / √(variance + ε)", says: ["Every row is moved to mean 0 and stretched to variance 1, so that numbers keep their size from layer to layer.", "把每一行平移到均值 0、缩放到方差 1，使数值在层与层之间保持大小。"] },
};

export const title: Two = ["Multi-head attention, step by step", "多头注意力，一步一步看"];
export const intro: Two = ["Every number on this page is computed here. Change a switch, and all of it is computed again.", "本页的每个数都在这里算出。改变任何开关，全部重新计算。"];
export const untrained: Two = [" Nothing is trained, so who looks at whom has no meaning yet: the arithmetic is that of any model.", "这里没有经过训练，所以谁关注谁还没有含义；但计算过程与真实模型完全相同。"];
export const sentence: Two = ["Your sentence", "你的句子"];
export const heads: Two = ["Heads", "头数"];
export const width: Two = ["Width d_model", "宽度 d_model"];
export const scale: Two = ["Divide by √d_k", "除以 √d_k"];
export const positions: Two = ["Add positions", "加位置编码"];
export const mask: Two = ["Mask", "掩码"];
export const none: Two = ["none", "无"];
export const causal: Two = ["causal", "因果"];
export const window: Two = ["window {n}", "窗口 {n}"];
export const yes: Two = ["yes", "是"];
export const no: Two = ["no", "否"];
export const seed: Two = ["Seed", "随机种子"];
export const cut: Two = ["Only the first {n} tokens are shown.", "只显示前 {n} 个词元。"];
export const by_hand: Two = ["By hand", "手算一个数"];
export const head: Two = ["head {n}", "头 {n}"];
export const position: Two = ["position", "位置"];
export const number: Two = ["number", "编号"];
export const legend: Two = ["Orange is positive, blue negative, green a share of attention; stronger is larger.", "橙色为正，蓝色为负，绿色为注意力份额；颜色越浓数值越大。"];
export const exercises: Two = ["Now change this", "动手改一改"];
export const attempt: Two = ["Try it", "试一试"];
export const answer: Two = ["Answer", "答案"];
export const examples: Two = ["Worked examples", "现成例子"];
export const cross: Two = ["Look at another text (cross attention)", "改看另一段文本（交叉注意力）"];
export const both: Two = ["causal, window {n}", "因果 + 窗口 {n}"];
export const matrix: Two = ["matrix", "矩阵"];
export const range: Two = ["{low} to {high}", "{low} 到 {high}"];
export const unscaled: Two = ["Left out here: the scores stay as they are.", "这里省去了：得分保持原样。"];
export const unmasked: Two = ["Nothing is forbidden here: everyone may look at everyone.", "这里没有禁止任何位置：谁都可以看谁。"];
export const one_head: Two = ["There is one head: nothing to put together.", "只有一个头：没有需要拼接的。"];
export const tokens_given: Two = ["The model's own tokenizer cut the text; each token has its number in the model's vocabulary.", "模型自己的分词器把文本切成词元；每个词元在模型的词表中有一个编号。"];
export const input_model: Two = ["What this layer is given: the vectors that the model has made so far, one row for each token.", "这一层得到的输入：模型到目前为止算出的向量，每个词元一行。"];

/** Exercises: what to change, what to ask, and what is true. `{name}` is filled with numbers that the page computes. */
export const EXERCISES = [
  { change: { mask: "causal" }, asks: ["Switch the causal mask on. What does the first word look at?", "打开因果掩码。第一个词看谁？"], answer: ["Only itself: it has nothing before it, so its weight is {first}. Every later word shares its attention among itself and what came before.", "只看自己：它前面没有别的词，所以权重是 {first}。后面的每个词把注意力分给自己和前面的词。"] },
  { change: { scale: false, width: 16, heads: 1 }, asks: ["Make the vectors wide (16, one head) and leave out the division by √d_k. Are the weights sharper or softer?", "把向量变宽（16，一个头），去掉除以 √d_k。权重变得更尖还是更平？"], answer: ["Sharper: the mean of each word's largest weight is {sharp}; with the division it is {soft}. At real widths it would be close to 1, and hardly any gradient would pass.", "更尖：每个词最大权重的平均是 {sharp}；除以 √d_k 后是 {soft}。在真实的宽度下它会接近 1，梯度几乎传不过去。"] },
  { change: { positions: false, mask: "none" }, asks: ["Take the positions away, and use a sentence that has one word twice. How do the two rows of weights differ?", "去掉位置编码，用一个有重复词的句子。这两行权重有什么不同？"], answer: ["Not at all (largest difference {twins}): without positions the same word is the same vector, and attention cannot tell one place from another.", "完全相同（最大差 {twins}）：没有位置编码时，同一个词就是同一个向量，注意力分不清它们在哪里。"] },
  { change: { heads: 4 }, asks: ["Go from one head to four. Does the output become larger, or the layer get more parameters?", "从一个头改成四个头。输出会变大吗？这一层的参数会变多吗？"], answer: ["Neither: the output stays {rows} × {width}, and the four matrices have 4 · {width}² = {parameters} numbers whatever the heads. Only the softmax is taken in four pieces.", "都不会：输出仍是 {rows} × {width}，四个矩阵共 4 · {width}² = {parameters} 个数，与头数无关。只是 softmax 分四份来做。"] },
  { change: { mask: "window" }, asks: ["Let every word look at its neighbours only. How many weights are not 0?", "让每个词只看相邻的词。有多少个权重不是 0？"], answer: ["{kept} of {pairs} in each head: the cost of a window grows with the length, not with its square.", "每个头 {pairs} 个中的 {kept} 个：窗口注意力的开销随长度增长，而不是随长度的平方。"] },
] as const;
