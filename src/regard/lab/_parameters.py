"""E10: the parameters of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard._display.units import whole
from regard.lab._result import Result, Table
from regard.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12288)
HEADS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Parameters(Result):
    name = "E10"
    topic = "parameters"

    widths: tuple[int, ...]
    counted: tuple[int, ...]  # a layer without biases, for each width
    heads: tuple[int, ...]
    by_heads: tuple[int, ...]  # at width 512, for each number of heads
    with_biases: int  # at width 512

    def tables(self, lang: str = "en") -> list[Table]:
        columns = ("d_model", self.say("counted", lang), "4·d_model²", self.say("noted", lang))
        lines = tuple(
            (str(width), whole(count), whole(4 * width**2), whole(4 * width))
            for width, count in zip(self.widths, self.counted, strict=True)
        )
        heads = tuple((str(head), whole(count)) for head, count in zip(self.heads, self.by_heads, strict=True))
        more = (self.say("biases", lang), whole(self.with_biases))
        return [
            Table(self.say("by_width", lang), columns, lines),
            Table(self.say("by_heads", lang), (self.say("heads", lang), self.say("counted", lang)), (*heads, more)),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        at = self.widths.index(512)
        figure = _draw.figure(
            8.4, 3.8, f"At d_model = 512 a layer has {whole(self.counted[at])} parameters, not {whole(4 * 512)}"
        )
        axes = figure.add_subplot()
        axes.plot(
            self.widths, [4 * width**2 for width in self.widths], color=_draw.BLUE, linewidth=1.5, label="4·d_model²"
        )
        axes.scatter(self.widths, self.counted, color=_draw.BLUE, zorder=3, label="counted in a built layer")
        noted = [4 * width for width in self.widths]
        axes.plot(
            self.widths, noted, color=_draw.ORANGE, linewidth=1.5, linestyle="--", label="4·d_model, as a note has it"
        )
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(
            [64, 128, 256, 512, 1024, 2048, 4096, 12288], ["64", "128", "256", "512", "1024", "2048", "4096", "12288"]
        )
        axes.minorticks_off()
        axes.text(self.widths[-1], 2 * self.counted[-1], "GPT-3's width", ha="right", fontsize=9)
        axes.set_ylim(100, 1e10)
        _draw.tidy(axes, x="d_model", y="parameters of a layer")
        axes.legend(fontsize=9, loc="upper left")
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
    layer = MultiHeadAttention(width, heads, qkv_bias=biases, out_bias=biases, device="meta")
    return sum(parameter.numel() for parameter in layer.parameters())
