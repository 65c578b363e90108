"""Texts of a bill, English and Chinese side by side."""

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
    "one": ("one {layer}", "单个 {layer}"),
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
    "never length": ("never", "从不"),
}
