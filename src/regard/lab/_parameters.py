"""E10: the parameters of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from regard._display.units import whole
from regard.lab import _draw
from regard.lab._result import Result, Table, Words, parameter_count
from regard.nn import MultiHeadAttention

WIDTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288)
HEADS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Parameters(Result):
    widths: tuple[int, ...]
    counted: tuple[int, ...]  # a layer without biases, for each width
    heads: tuple[int, ...]
    by_heads: tuple[int, ...]  # at width 512, for each number of heads
    with_biases: int  # at width 512

    def _tables(self, say: Words) -> list[Table]:
        widths = (
            (str(width), whole(count), whole(4 * width**2), whole(4 * width))
            for width, count in zip(self.widths, self.counted, strict=True)
        )
        heads = ((str(head), whole(count)) for head, count in zip(self.heads, self.by_heads, strict=True))
        biases = (say("biases"), whole(self.with_biases))
        return [
            say.table("by_width", ("d_model", say("counted"), "4·d_model²", say("noted")), widths),
            say.table("by_heads", say.each("heads", "counted"), (*heads, biases)),
        ]

    def _figure(self) -> _draw.Figure:
        counted = whole(self.counted[self.widths.index(512)])
        title = f"At d_model = 512 a layer has {counted} parameters, not {whole(4 * 512)}"
        figure, axes = _draw.subplots(8.4, 3.8, title)
        squares, noted = [4 * width**2 for width in self.widths], [4 * width for width in self.widths]
        axes.plot(self.widths, squares, color=_draw.BLUE, linewidth=1.5, label="4·d_model²")
        axes.scatter(self.widths, self.counted, color=_draw.BLUE, zorder=3, label="counted in a built layer")
        look = {"color": _draw.ORANGE, "linewidth": 1.5, "linestyle": "--"}
        axes.plot(self.widths, noted, label="4·d_model, as in a note", **look)
        axes.set_yscale("log")
        _draw.log_ticks(axes, [width for width in self.widths if width not in (768, 8192)])  # there is no room for them
        axes.text(self.widths[-1], 2 * self.counted[-1], "GPT-3's width", ha="right", fontsize=9)
        axes.set_ylim(100, 1e10)
        _draw.tidy(axes, x="d_model", y="parameters of a layer", legend="upper left")
        return figure


def parameters() -> Parameters:
    """Count the parameters of layers that are built without memory, on torch's meta device."""
    return Parameters(
        WIDTHS,
        tuple(_count(width, 8) for width in WIDTHS),
        HEADS,
        tuple(_count(512, heads) for heads in HEADS),
        _count(512, 8, biases=True),
    )


def _count(width: int, heads: int, *, biases: bool = False) -> int:
    return parameter_count(MultiHeadAttention(width, heads, qkv_bias=biases, out_bias=biases, device="meta"))
