// What the walk says in addition to the texts that it shares with the command, in English and Chinese.

import EXAMPLES from "../../../src/regard/_walk/examples.json";
import LAYER from "../../../src/regard/_walk/layer.json";
import type { Two } from "../words";

/** What each step says: the command prints the same. */
export const layer = LAYER as unknown as Record<keyof typeof LAYER, Two>;

export const residual: Two = ["Residual", "残差连接"];
export const residual_says: Two = ["The layer does not replace its input: it adds to it. What attention found is a correction.", "这一层不替换输入，而是加在输入上：注意力找到的是一个修正量。"];
export const normed: Two = ["LayerNorm", "层归一化"];
export const normed_says: Two = ["Every row is moved to mean 0 and stretched to variance 1, so that numbers keep their size from layer to layer.", "把每一行平移到均值 0、缩放到方差 1，使数值在层与层之间保持大小。"];
export const between: Two = [" ", ""]; // two sentences
export const follow: Two = ["Point at a word to follow its lines.", "指向一个词即可看到它的连线。"];
export const title: Two = ["Multi-head attention, step by step", "多头注意力，一步一步看"];
export const intro: Two = ["Every number on this page is computed here. Change a switch, and all of it is computed again.", "本页的每个数都在这里算出。改变任何开关，全部重新计算。"];
export const untrained: Two = [" Nothing is trained, so who looks at whom has no meaning yet: the arithmetic is that of any model.", "这里没有经过训练，所以谁关注谁还没有含义；但计算过程与真实模型完全相同。"];
export const contents: Two = ["Steps", "步骤"];
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
export const legend: Two = ["Orange is positive, blue negative, green a share of attention; stronger is larger.", "橙色为正，蓝色为负，绿色为注意力份额；颜色越浓数值越大。"];
export const exercises: Two = ["Now change this", "动手改一改"];
export const attempt: Two = ["Try it", "试一试"];
export const answer: Two = ["Answer", "答案"];
export const examples: Two = ["Worked examples", "现成例子"];
export const cross: Two = ["Look at another text (cross attention)", "改看另一段文本（交叉注意力）"];
export const both: Two = ["causal, window {n}", "因果 + 窗口 {n}"];
export const matrix: Two = ["matrix", "矩阵"];
export const input_model: Two = ["What this layer is given: the vectors that the model has made so far, one row for each token.", "这一层得到的输入：模型到目前为止算出的向量，每个词元一行。"];

/** Exercises: what to change, what to ask, and what is true. `{name}` is filled with numbers that the page computes. */
export const EXERCISES = [
  { change: { mask: "causal" }, asks: ["Switch the causal mask on. What does the first word look at?", "打开因果掩码。第一个词看谁？"], answer: ["Only itself: it has nothing before it, so its weight is {first}. Every later word shares its attention among itself and what came before.", "只看自己：它前面没有别的词，所以权重是 {first}。后面的每个词把注意力分给自己和前面的词。"] },
  { change: { scale: false, width: 16, heads: 1 }, asks: ["Make the vectors wide (16, one head) and leave out the division by √d_k. Are the weights sharper or softer?", "把向量变宽（16，一个头），去掉除以 √d_k。权重变得更尖还是更平？"], answer: ["Sharper: the mean of each word's largest weight is {sharp}; with the division it is {soft}. At real widths it would be close to 1, and hardly any gradient would pass.", "更尖：每个词最大权重的平均是 {sharp}；除以 √d_k 后是 {soft}。在真实的宽度下它会接近 1，梯度几乎传不过去。"] },
  { change: { positions: false, mask: "none" }, asks: ["Take the positions away, and use a sentence that has one word twice. How do the two rows of weights differ?", "去掉位置编码，用一个有重复词的句子。这两行权重有什么不同？"], answer: ["Not at all (largest difference {twins}): without positions the same word is the same vector, and attention cannot tell one place from another.", "完全相同（最大差 {twins}）：没有位置编码时，同一个词就是同一个向量，注意力分不清它们在哪里。"] },
  { change: { heads: 4 }, asks: ["Go from one head to four. Does the output become larger, or the layer get more parameters?", "从一个头改成四个头。输出会变大吗？这一层的参数会变多吗？"], answer: ["Neither: the output stays {rows} × {width}, and the four matrices have 4 · {width}² = {parameters} numbers whatever the heads. Only the softmax is taken in four pieces.", "都不会：输出仍是 {rows} × {width}，四个矩阵共 4 · {width}² = {parameters} 个数，与头数无关。只是 softmax 分四份来做。"] },
  { change: { mask: "window" }, asks: ["Let every word look at its neighbours only. How many weights are not 0?", "让每个词只看相邻的词。有多少个权重不是 0？"], answer: ["{kept} of {pairs} in each head: the cost of a window grows with the length, not with its square.", "每个头 {pairs} 个中的 {kept} 个：窗口注意力的开销随长度增长，而不是随长度的平方。"] },
] as const;

/** What the numbers of an example are. */
export const input = EXAMPLES.input as unknown as Two;
