"""Texts of a bill, English and Chinese side by side."""

from __future__ import annotations

import re

# Names and notes that a bill holds as data, in English: what they are in Chinese.
_PHRASES = [
    (r"^layer$", "层"),
    (r"^encoder layer$", "编码器层"),
    (r"^decoder layer$", "解码器层"),
    (r"^(M[HQ]A|GQA), (\d+) heads?", r"\1，\2 个头"),
    (r"^MLA, latent (\d+)", r"MLA，潜向量 \1"),
    (r"^rolling, window (\d+)", r"滚动，窗口 \1"),
    (r", (\d+) sinks", r"，\1 个 sink"),
    (r", target \+ source", "，目标 + 源"),
    (r", int8$", "，int8"),
    (r"^a decoder of (\d+) layers", r"\1 层的解码器"),
    (r"^(\S+) with (.+)$", r"\1（\2）"),
    (
        r"^activations are those without dropout, whose draws are kept too$",
        "激活值不含 dropout；使用 dropout 时还要保留其抽样",
    ),
    (r"^length (\d+) is beyond (max_tokens=\d+): ", r"长度 \1 超过 \2："),
    (r"the model has learned no positions there$", "模型没有学过那里的位置"),
    (r"the model was made for no more$", "模型不是为更长的输入设计的"),
    (r"^source_length (\d+) is beyond (max_frames=\d+)$", r"源长度 \1 超过 \2"),
    (r"^assumed: ", "假设："),
    (r"(\d+) words \(--vocab\); ", r"\1 个词（--vocab）；"),
    (r"a feed-forward of (\d+) \(--ff-dim\); ", r"前馈维度 \1（--ff-dim）；"),
    (
        r"rotary positions, RMS norms, no biases, and an output layer that is the token embedding$",
        "旋转位置编码、RMS 归一化、没有偏置，输出层即词元嵌入",
    ),
]


def named(said: str, lang: str) -> str:
    """A name or a note of a bill in a language."""
    for pattern, chinese in _PHRASES if lang == "zh" else ():
        said = re.sub(pattern, chinese, said)
    return said


WORDS = {
    "head": ("{name}: {parameters} parameters, {bytes} in {dtype}", "{name}：{parameters} 个参数，{dtype} 占 {bytes}"),
    "active": (
        "{active} parameters are active for a token: {some} of {count} experts",
        "每个词元激活 {active} 个参数：{count} 个专家中的 {some} 个",
    ),
    "item": ("1 item", "1 条"),
    "items": ("{count} items", "{count} 条"),
    "runs": (
        "{items} of {length} tokens{source}; kept for the backward pass on {device}",
        "{items}，每条 {length} 个词元{source}；为反向传播保留（{device}）",
    ),
    "source": (" from {length}", "，源文 {length} 个"),
    "parameters": ("parameters", "参数"),
    "forward": ("forward", "前向"),
    "backward": ("backward", "反向"),
    "kept": ("kept", "保留"),
    "eager": ("eager", "eager"),
    "fused": ("fused", "融合"),
    "embeddings": ("embeddings", "嵌入"),
    "norms": ("norms", "归一化"),
    "attention projections": ("attention projections", "注意力投影"),
    "attention": ("attention", "注意力"),
    "feed-forward": ("feed-forward", "前馈"),
    "head part": ("head", "输出层"),
    "loss": ("loss", "损失"),
    "in all": ("in all", "合计"),
    "one": ("one {layer}", "单个{layer}"),
    "whose": (
        'Eager is regard\'s own backend="eager", whose weights are kept in float32. The textbook formula, 34 b s h + '
        "5 b s^2 a bytes per layer (half precision, dropout), gives {textbook}.",
        'eager 指 regard 自己的 backend="eager"，其权重以 float32 保留。教科书公式每层 34·b·s·h + 5·b·s²·a 字节'
        "（半精度，含 dropout），得 {textbook}。",
    ),
    "pairs": (
        "Pairs that the mask keeps only: {forward} forward, {backward} backward.",
        "只计掩码保留的配对：前向 {forward}，反向 {backward}。",
    ),
    "again": (
        "Layers computed again: {flops} more, {kept} kept, {peak} at the peak.",
        "重新计算各层：多 {flops}，保留 {kept}，峰值 {peak}。",
    ),
    "cache": ("cache", "缓存"),
    "per layer": ("per layer", "每层"),
    "in int8": ("in int8", "int8"),
    "of the weights": ("of the weights", "相对权重"),
    "own": (
        "This one ({kind}): {token} per token and layer, {layer} per layer, {total} in all.",
        "本配置（{kind}）：每词元每层 {token}，每层 {layer}，合计 {total}。",
    ),
    "more": ("attention costs more FLOPs than {other}", "注意力的 FLOP 超过{other}"),
    "everything else": ("everything else", "其余全部"),
    "larger": ("the cache is larger than the weights", "缓存大于权重"),
    "by pairs": (" ({length} by the pairs that the mask keeps)", "（按掩码保留的配对：{length}）"),
    "from": ("From length {where}: {what}.", "长度从 {where} 起：{what}。"),
    "never": ("Never: {what}.", "从不：{what}。"),
    "note": ("Note: {note}.", "注：{note}。"),
    "peak": (
        "On {device} at its peak: {forward} forward, {backward} backward; {recomputed} more to compute layers again.",
        "{device} 以峰值运行：前向 {forward}，反向 {backward}；重新计算各层另需 {recomputed}。",
    ),
    "wrote": ("wrote {file}", "已写入 {file}"),
    "plot": (
        "{name}, {items}, {dtype}; the grey line is length {length}",
        "{name}，{items}，{dtype}；灰线为长度 {length}",
    ),
    "plot length": ("length, in tokens", "长度（词元）"),
    "plot pairs": ("attention, pairs that the mask keeps", "注意力，只计掩码保留的配对"),
    "plot flops": ("forward FLOPs of a token", "每个词元的前向 FLOP"),
    "plot eager": ("eager attention", "eager 注意力"),
    "plot fused": ("fused attention", "融合注意力"),
    "plot again": ("layers computed again, at the peak", "重新计算各层，峰值"),
    "plot weights": ("weights", "权重"),
    "plot kept": ("bytes kept for the backward pass", "为反向传播保留的字节"),
    "plot cache": ("bytes of the cache", "缓存的字节"),
    "plot int8": ("{kind}, int8", "{kind}，int8"),
    "never length": ("never", "从不"),
}
