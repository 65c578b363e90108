"""The labels of the figures in Chinese. Figures are drawn in English; `translate` goes over a finished one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# English as a figure has it, with a {name} for each number; what an experiment's words.json has is not repeated here.
LABELS = {
    # in several figures
    "a guess": "随机猜测",
    "entry": "分量",
    "head": "头",
    "head {head}": "头 {head}",
    "key": "键",
    "key {key}": "键 {key}",
    "largest difference": "最大差",
    "loss (nats)": "损失（nat）",
    "mean": "均值",
    "no scaling": "不缩放",
    "query": "查询",
    "right answers": "答对的比例",
    "scaled": "缩放后",
    "weight": "权重",
    "weights": "权重",
    # E1
    "weights, scaled by √4": "权重，除以 √4 后",
    "outputs, scaled": "输出，除以 √4 后",
    "Both tokens reach both outputs: no entry is zero": "两个词元都进入两个输出：没有一个分量是 0",
    # E2
    "first entry of the query": "查询的第一维",
    "second entry": "第二维",
    "the queries of both heads": "两个头的查询",
    "weights, head {head}": "权重，头 {head}",
    "One input, two heads: other queries, other weights": "同一输入，两个头：查询不同，权重也不同",
    # E3
    "score": "分数",
    "share of {pairs} pairs": "在 {pairs} 对中的比例",
    "as it is: standard deviation {deviation}": "原样：标准差 {deviation}",
    "divided by √{width}: standard deviation {deviation}": "除以 √{width}：标准差 {deviation}",
    "A dot product of width {width} has variance {raw}; divided by √{root}, {scaled}": (
        "维度为 {width} 的点积，方差是 {raw}；除以 √{root} 后是 {scaled}"
    ),
    # E4
    "keys, from the heaviest": "键，按权重从大到小",
    "all weights of one query": "一个查询的全部权重",
    "scores divided by √{width}": "分数先除以 √{width}",
    "entropy\n(nats)": "熵\n（nat）",
    "slope of softmax\n(× 100)": "softmax 斜率\n（× 100）",
    "over {queries} queries": "{queries} 个查询",
    "Without the scale one key takes {raw} of the weight; with it, {scaled}": (
        "不缩放时，一个键占去 {raw} 的权重；缩放后是 {scaled}"
    ),
    # E5
    "masks.causal(): query i sees keys 0 … i": "masks.causal()：查询 i 看见键 0 … i",
    "triu(k=1) taken for what to keep: only later keys": "把 triu(k=1) 误当作“保留”：只看见后面的键",
    "One matrix read two ways: the past, or only the future": "同一个矩阵的两种读法：看过去，或者只看未来",
    # E6
    "head {head}, all tokens": "头 {head}，全部词元",
    "head {head}, causal": "头 {head}，因果",
    "The same sentence in two heads, whole and causal: every row sums to 1": (
        "同一句话在两个头里，看全句与加因果掩码：每行之和都是 1"
    ),
    # E7
    "cannot\nrun": "无法\n运行",
    "what the layer is, and what it was trained on": "是什么层，用什么训练",
    "fixed weights,\nanswer always at one place": "固定权重，\n答案总在同一位置",
    "fixed weights,\nanswer anywhere": "固定权重，\n答案位置不定",
    "queries and keys,\nanswer always at one place": "查询与键，\n答案总在同一位置",
    "queries, keys and positions,\nanswer always at one place": "查询、键加位置编码，\n答案总在同一位置",
    "as trained ({tokens} tokens)": "与训练时相同（{tokens} 个词元）",
    "answer at another place": "答案换位置",
    "Fixed weights learn a place; queries and keys learn what to look for": (
        "固定权重学到的是位置；查询与键学到的是要找什么"
    ),
    # E8
    "n: keys that share one head's weight": "n：平分一个头的权重的键数",
    "cosine with each of their values": "与其中每个值的余弦",
    "averaging blurs": "平均会模糊",
    "measured": "实测",
    "heads (total width {width} throughout)": "头数（总维度都是 {width}）",
    "facts read from the output": "从输出中读出的信息",
    "in any order": "不论次序",
    "A head that averages {keys} keys resembles each by {likeness}; {heads} heads tell them apart": (
        "一个头平均 {keys} 个键，与每个值的余弦只有 {likeness}；{heads} 个头能把它们分开"
    ),
    # E9
    "output": "输出",
    "The same seed gives the same weights and outputs, bit for bit": "同一种子给出同样的权重和输出，逐位相同",
    # E10
    "GPT-3's width": "GPT-3 的维度",
    "parameters of a layer": "一层的参数量",
    "counted in a built layer": "建出一层，实际计数",
    "4·d_model, as a note has it": "4·d_model（笔记）",
    "At d_model = 512 a layer has {counted} parameters, not {noted}": (
        "d_model = 512 时一层有 {counted} 个参数，而不是 {noted}"
    ),
    # E11
    "head 0 of {heads}": "{heads} 个头中的头 0",
    "The first token's weights: one head, and the first of {heads}; each row sums to 1": (
        "第一个词元的权重：单头，以及 {heads} 个头中的第一个；每行之和都是 1"
    ),
    # E12
    "layer": "层",
    "Some heads have a role: share of sentences where a word looks most at the right one": (
        "有些头有分工：在多大比例的句子里，一个词最关注的正是该关注的词"
    ),
    # E13
    "operations": "运算量",
    "attention: n²·d": "注意力：n²·d",
    "recurrent: n·d²": "循环层：n·d²",
    "Twice the tokens: four times the operations of attention, twice those of an RNN": (
        "词元加倍：注意力的运算变为四倍，RNN 的变为两倍"
    ),
    # E14
    "2020, window": "2020，窗口",
    "2020, linear": "2020，线性",
    "2024, fused": "2024，融合",
    "2024, latent": "2024，潜在",
    "share (pairs, state, memory, cache)": "比例（配对、状态、内存、缓存）",
    "What each step saves, as a share of what came before": "每一步省下多少：与之前相比还剩的比例",
    # X1
    "all alike: ln {keys}": "完全均匀：ln {keys}",
    "nats, mean over rows": "nat，各行均值",
    "mean over rows": "各行均值",
    "largest weight": "最大权重",
    "mean size": "平均大小",
    "gradient that reaches the scores": "传到分数上的梯度",
    "divided by √d_k": "除以 √d_k",
    "Without √d_k attention hardens as heads grow wider; with it, it does not": (
        "没有 √d_k，头的维度越大，权重越集中到一个键上；有了它就不会"
    ),
    # X2
    "same width, same parameters": "维度相同，参数量相同",
    "one head: both at once": "一个头：两边都看",
    "two heads: the first": "两个头：第一个",
    "two heads: the second": "两个头：第二个",
    "Two relations at once: one head gets {one} right, two heads {two}": (
        "同时需要两种关系：一个头答对 {one}，两个头答对 {two}"
    ),
    # X3
    "causal": "因果",
    "inverted": "反了",
    "inverted: sees only the future": "反了：只看得见未来",
    "nobody who cannot see the future gets below this": "看不见未来，就不可能低于这条线",
    "step": "步",
    "in training": "训练时",
    "mask": "掩码",
    "right symbols": "符号的正确率",
    "when it has to generate": "生成时",
    "The inverted mask trains to a loss of {loss} and then generates no better than a guess": (
        "掩码反了：训练损失降到 {loss}，生成时却不比随机猜测好"
    ),
    # X4
    "rounding of float64": "float64 的舍入误差",
    "“dog bites man”, “man bites dog”": "“dog bites man” 与 “man bites dog”",
    "Without positions a shuffled input gives the shuffled output; with them it does not": (
        "没有位置编码，打乱输入只会得到打乱的输出；有了位置编码就不同了"
    ),
    # X5
    "direction": "方向",
    "cosine of the angle between them": "夹角的余弦",
    "two heads of a drawn layer": "随机生成的一层中的两个头",
    "orthogonal": "正交",
    "Nothing makes the heads' subspaces orthogonal": "没有任何机制让各头的子空间正交",
    # M20
    "all scores lower by {lower}": "全部分数降低 {lower}",
    "Only softmax gives shares that sum to 1, whatever the scores, and can be learned from": (
        "不论分数如何，只有 softmax 给出总和为 1 的份额，又能从中学习"
    ),
    # M21
    "length of what is added, mean": "贡献的长度，平均",
    "the output, their sum": "输出，即各头之和",
    "What each of {heads} heads adds can be looked at by itself": "{heads} 个头各自的贡献都可以单独查看",
    # S15
    "distance in tokens": "距离（词元）",
    "gradient, relative to distance 0": "梯度，以距离 0 为 1",
    "A gradient fades with distance in an RNN, ends in a CNN, and stays level in attention": (
        "梯度随距离的变化：在 RNN 中逐渐消失，在 CNN 中戛然而止，在注意力中保持平稳"
    ),
}


def translate(figure: Figure, words: Mapping[str, str]) -> None:
    """Every label of a figure that is among these words, or among the labels above, in Chinese."""
    from matplotlib.text import Text

    known = {**words, **LABELS}
    for drawn in figure.findobj(Text):
        assert isinstance(drawn, Text)
        drawn.set_text(in_chinese(drawn.get_text(), known))
        drawn.set_fontweight("normal")  # many Chinese fonts have no bold, and matplotlib would say so
    for axes in figure.axes:  # a tick gets its text from the axis again whenever it is drawn
        for axis in (axes.xaxis, axes.yaxis):
            names = [tick.get_text() for tick in axis.get_ticklabels()]
            said = [in_chinese(name, known) for name in names]
            if said != names:
                axis.set_ticks(axis.get_ticklocs(), said)


def in_chinese(label: str, words: Mapping[str, str]) -> str:
    """The first of the words that fits the label, its numbers filled in; a label that none fits stays as it is."""
    for english, chinese in words.items():
        if found := pattern(english).fullmatch(label):
            return chinese.format(**found.groupdict())
    return label


def pattern(english: str) -> re.Pattern[str]:
    """What a text with {names} for numbers looks like when they are filled in."""
    parts = [(re.escape(said), name) for said, name, *_ in Formatter().parse(english)]
    return re.compile("".join(said + (rf"(?P<{name}>[-\d .%]+)" if name else "") for said, name in parts))
