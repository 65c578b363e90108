"""E14: the line of work from 2017 on: what each step changed, run here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import api, masks
from regard.lab import _draw
from regard.lab._result import Result, Table, Words, check_counts

WINDOW = 256
# DeepSeek-V3's attention: heads, their dim, and what it keeps of a token: a latent and one rotary key
HEADS, HEAD_DIM, LATENT, ROTARY = 128, 128, 512, 64


@dataclass(frozen=True)
class LineOfWork(Result):
    tokens: int
    pairs: int  # 2017: every query with every key
    first_sees: dict[str, int]  # 2018: how many tokens the first one sees
    window_pairs: int  # 2020: of a causal window
    linear_state: int  # 2020: numbers that linear attention keeps of all tokens, for one head
    cache: int  # numbers that a cache keeps of them
    bytes_: dict[str, int]  # 2024: memory at the peak, written out and fused
    kept: dict[str, int]  # 2024: numbers kept of a token, all heads and latent

    def _tables(self, say: Words) -> list[Table]:
        changes = {
            "attention": (str(self.tokens - 1), "1"),
            "bert": (str(self.first_sees["causal"]), str(self.first_sees["everything"])),
            "window": (f"{self.pairs:,}", f"{self.window_pairs:,}"),
            "linear": (f"{self.cache:,}", f"{self.linear_state:,}"),
            "flash": (_mib(self.bytes_["eager"]), _mib(self.bytes_["fused"])),
            "mla": (f"{self.kept['heads']:,}", f"{self.kept['latent']:,}"),
        }
        rows = ((say(key), say(f"{key}_what"), *both) for key, both in changes.items())
        return [say.table("line", ("", *say.each("what", "before", "after")), rows, tokens=self.tokens)]

    def _figure(self) -> _draw.Figure:
        figure, axes = _draw.subplots(8.4, 3.4, "What each step leaves, as a share of what came before")
        shares = {
            "2020, window": self.window_pairs / self.pairs,
            "2020, linear": self.linear_state / self.cache,
            "2024, fused": self.bytes_["fused"] / self.bytes_["eager"],
            "2024, latent": self.kept["latent"] / self.kept["heads"],
        }
        bars = axes.barh(list(shares), list(shares.values()), color=_draw.BLUE)
        axes.bar_label(bars, [f"{share:.1%}" for share in shares.values()], padding=3, fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(1e-3, 1)
        axes.invert_yaxis()
        _draw.tidy(axes, x="share (pairs, state, memory, cache)", y="")
        return figure


def line_of_work(tokens: int = 8192, head_dim: int = 64) -> LineOfWork:
    """Attention (2017), BERT (2018), efficient attention (2020), FlashAttention 2 and latent attention (2024)."""
    check_counts(tokens=tokens, head_dim=head_dim)
    x = torch.empty(1, 1, 1, head_dim).expand(1, 1, tokens, head_dim)
    costs = {name: api.explain(x, x, x, backend=name).cost.peak_bytes for name in ("eager", "sdpa")}
    near = api.explain(x, x, x, mask=masks.causal() & masks.window(left=WINDOW - 1)).cost.kept_pairs
    seen = {
        mask: int(getattr(masks, mask)().dense(1, tokens, query_offset=0).sum()) for mask in ("causal", "everything")
    }
    return LineOfWork(
        tokens,
        tokens**2,
        seen,
        near,
        head_dim * (head_dim + 1),  # sums of key ⊗ value, and of keys
        2 * tokens * head_dim,
        {"eager": costs["eager"], "fused": costs["sdpa"]},
        {"heads": 2 * HEADS * HEAD_DIM, "latent": LATENT + ROTARY},
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
