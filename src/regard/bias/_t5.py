"""T5's relative bias: one learned number for each head and bucket of distances (Raffel et al., 2019)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from regard._checks import check_count
from regard.bias._base import Bias
from regard.bias._rule import Offset, Rule, constant, working
from regard.positions import _checks


class T5Bias(Bias, nn.Module):
    """A learned bias by distance: near distances have a bucket each, farther ones share buckets that grow.

        relative = T5Bias(8)                                         # one for all layers, as T5 has it
        out = regard.attention(query, key, value, bias=relative)
        y = mha(x, mask=masks.causal(), bias=relative_of_the_decoder)

    Args:
        num_heads: heads of the query.
        num_buckets: number of learned values per head.
        max_distance: from here on all distances share the last bucket.
        bidirectional: half of the buckets are for keys after the query (encoders); otherwise those share bucket 0
            with the query itself (decoders, whose mask hides them).
        std: of the normal distribution the numbers start from.

    `weight` is `[num_buckets, num_heads]`, as in Hugging Face's `relative_attention_bias`, and the buckets are equal to
    theirs. T5 itself attends with `scale=1.0`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_count("num_buckets", num_buckets, 4 if bidirectional else 2)
        if bidirectional and num_buckets % 2:
            raise ValueError(f"num_buckets must be even when bidirectional (half for each side), got {num_buckets}")
        exact = num_buckets // (4 if bidirectional else 2)
        check_count("max_distance", max_distance, exact + 1)
        _checks.above("std", std)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.bidirectional, self.std = bidirectional, std
        self.rule = T5Rule(num_buckets, max_distance, int(bidirectional))
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.weight

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (key position − query position)."""
        found: Tensor = self.rule.buckets(distance)  # type: ignore[attr-defined]
        return found

    def forward(self, L: int, S: int, *, query_offset: Offset | None = None) -> Tensor:
        """The whole bias (see `dense`), for inspection; pass the module itself as `bias=`."""
        return self.dense(L, S, query_offset=query_offset, device=self.weight.device)

    def extra_repr(self) -> str:
        sizes = f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return sizes if self.bidirectional else f"{sizes}, bidirectional=False"


class T5Rule(Rule):
    """The table is the weight, [buckets, H]."""

    kind = "t5"
    may_hide = True

    def __init__(self, num_buckets: int, max_distance: int, bidirectional: int) -> None:
        super().__init__((num_buckets, max_distance, bidirectional))
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bool(bidirectional)
        self._side = num_buckets // 2 if bidirectional else num_buckets
        self._by_distance = _buckets_of_one_side(self._side, max_distance)

    def __str__(self) -> str:
        ways = "both ways" if self.bidirectional else "one way"
        return f"T5 ({self.num_buckets} buckets up to {self.max_distance}, {ways})"

    def buckets(self, distance: Tensor) -> Tensor:
        by_distance = constant(self._by_distance, torch.int64, distance.device)
        if not self.bidirectional:
            return by_distance[distance.neg().clamp(0, self.max_distance)]
        return by_distance[distance.abs().clamp_max(self.max_distance)] + (distance > 0) * self._side

    def line(self, table: Tensor, distance: Tensor) -> Tensor:
        return working(table)[self.buckets(distance)].transpose(-1, -2)

    def pairs(self, table: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        return working(table)[self.buckets(distance), head.unsqueeze(-1)]

    def line_gradient(self, grad_table: Tensor, grad_line: Tensor, distance: Tensor) -> None:
        # a product, not index_add_: many distances share a bucket, and on a GPU they would wait for each other
        found = self.buckets(distance).unsqueeze(-1) == torch.arange(self.num_buckets, device=distance.device)
        grad_table += (grad_line @ found.to(grad_line.dtype)).sum(0).T  # [b, H, n] @ [b or 1, n, buckets]

    def of_heads(self, table: Tensor, heads: slice | list[int]) -> Tensor:
        return table[:, heads]

    def check_shape(self, table: Tensor, heads: int) -> None:
        if table.shape != (self.num_buckets, heads):
            raise ValueError(
                f"bias T5Bias has a weight {list(table.shape)}; it must be [num_buckets, num_heads] = "
                f"[{self.num_buckets}, {heads}] for a query of {heads} heads"
            )

    def check_values(self, table: Tensor) -> None:
        top = table.detach().amax().item()
        if math.isnan(top) or top == math.inf:
            what = "NaN" if math.isnan(top) else "+inf"
            raise ValueError(f"bias T5Bias holds {what}; it must hold finite numbers, or -inf to hide a distance")


@lru_cache(64)
def _buckets_of_one_side(count: int, max_distance: int) -> tuple[int, ...]:
    """Buckets of distances 0 … max_distance on one side, in the float32 arithmetic of the published code."""
    exact = count // 2
    with _disable_current_modes():  # a module may be built among fake tensors, which have no numbers
        far = torch.arange(exact, max_distance + 1, device="cpu", dtype=torch.float32)
        grown = exact + (torch.log(far / exact) / math.log(max_distance / exact) * (count - exact)).long()
        return (*range(exact), *grown.clamp_max(count - 1).tolist())
