"""What the table of a recording says, in English and in Chinese."""

from __future__ import annotations

WORDS: dict[str, tuple[str, str]] = {
    "layer": ("layer", "层"),
    "calls": ("calls", "调用"),
    "entropy": ("entropy", "熵"),
    "first": ("first\nkey", "首键\n占比"),
    "first_value": ("its\nvalue", "其值\n占比"),
    "distance": ("≈\ndistance", "≈\n距离"),
    "module": ("module", "模块"),
    "most attended": ("most attended", "最受关注"),
    "heads": ("heads", "注意力头"),
    "self": ("self", "自注意力"),
    "cross": ("cross", "交叉注意力"),
    "first-token": ("first-token", "首词元"),
    "previous-token": ("previous-token", "前一词元"),
    "local": ("local", "局部"),
    "broad": ("broad", "广泛"),
    "missed": (
        "{count} calls have no statistics ({reason}), the first in {path}",
        "{count} 次调用没有统计量（{reason}），第一次在 {path}",
    ),
    "alone": (
        "{count} calls have value lengths ‖v‖, as no output projection was seen to read their output, the first in "
        "{path}",
        "{count} 次调用的值长度为 ‖v‖，因为没有看到读取其输出的输出投影，第一次在 {path}",
    ),
    "unseen": (
        "{count} calls have no value lengths, as their values were not seen, the first in {path}",
        "{count} 次调用没有值长度，因为没有看到它们的值，第一次在 {path}",
    ),
    "nan": (
        "{count} calls have heads with NaN in weights or values, which the numbers leave out, the first in {path}",
        "{count} 次调用中有些头的权重或值含 NaN，各数字不计这些头，第一次在 {path}",
    ),
    "value_note": (
        "its value: the first key's share of weight × length of the value (value_mass)",
        "其值占比：权重 × 值的长度之和中，首键所占的份额（value_mass）",
    ),
    "thresholds": (
        "first-token: at least {first:.0%} of the weight on the first key seen; previous-token: at least "
        "{previous:.0%} on the key just before the query; local: at least {local:.0%} within {near} tokens (of {keys} "
        "keys or more); broad: entropy at least {broad:.0%} of the largest possible. The first that fits names the "
        "head.",
        "首词元：至少 {first:.0%} 的权重落在看得到的第一个键上；前一词元：至少 {previous:.0%} 落在查询的前一个键上；"
        "局部：至少 {local:.0%} 落在 {near} 个词元以内（键不少于 {keys} 个）；广泛：熵至少为最大可能值的 {broad:.0%}。"
        "按顺序第一个满足的决定名称。",
    ),
}
