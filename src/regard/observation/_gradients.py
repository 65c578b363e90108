"""Gradients through entropy, key mass and first mass: the tiles of the forward pass once more, memory O(L).

With p the weights and z = log p, a loss that reaches p only through H_i = −Σ_j p·z, M_j = Σ_i p and F_i = Σ_(j<n) p has

    G_ij = ∂loss/∂p_ij = −dH_i·(z_ij + 1) + dM_j + dF_i·[j < n]        ds_ij = p_ij·(G_ij − Σ_k p_ik·G_ik)

and ds is what a backward pass of attention has too: the gradients of query and key are its products with the other.
On a GPU, calls without bias, softcap and sinks are handed to such a backward pass (`_as_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends._autograd import save, saved
from regard.backends._base import accumulation, no_autocast
from regard.backends._bias import add_bias_gradient, bias_over
from regard.backends._steps import side_by_side
from regard.observation import _as_attention
from regard.observation._rows import tiles
from regard.observation._totals import Tile
from regard.spec import Call, Refused
from regard.statistics import Want

NAMES = ("entropy", "key_mass", "first_mass")


def with_gradients(call: Call, lse: Tensor, want: Want, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the statistics that can be trained on, joined to the graph of the call's inputs."""
    names = [name for name in NAMES if name in found]
    if not names:
        raise ValueError(
            "differentiable=True gives gradients to entropy, key_mass and first_mass, and want asks for none of them: "
            "pass want=regard.Want(rows=True), Want(key_mass=True) or Want(first=4)"
        )
    if call.spec.mode != "plain":
        raise Refused(f"observe(differentiable=True) has no derivatives in {call.spec.mode} mode")
    inputs = (call.query, call.key, call.bias, call.sinks)
    made = _Statistics.apply(call.without_tensors(), lse, want, names, *inputs, *(found[name] for name in names))  # type: ignore[no-untyped-call]
    return dict(zip(names, made, strict=True))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, lse: Tensor, want: Want, names: list[str], *given: Any) -> tuple[Tensor, ...]:
        query, key, bias, sinks = given[:4]
        ctx.call, ctx.want, ctx.names = call, want, names
        save(ctx, call, query, key, bias, sinks, lse)
        return tuple(part.clone() for part in given[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        query, key, bias, sinks, lse, *_ = saved(ctx)
        call = ctx.call.replace(query=query, key=key, bias=bias, sinks=sinks)
        given = dict(zip(ctx.names, grads, strict=True))
        with torch.no_grad(), no_autocast(call.spec.device):
            if _as_attention.takes(call):
                two = _as_attention.gradients(call, lse, ctx.want, given)
                found: tuple[Tensor | None, ...] = (*two, None, None)
            else:
                found = _Backward(call, lse, ctx.want, given, ctx.needs_input_grad[4:8]).run()
        if torch.is_grad_enabled():  # somebody may want to differentiate other gradients again, but not these
            found = tuple(None if made is None else _Last.apply(made, query, key, *grads) for made in found)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *found, *(None for _ in grads))


class _Last(torch.autograd.Function):
    """A gradient that depends on inputs, and has no derivative of its own: asking for one is refused."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *inputs: Tensor | None) -> Tensor:
        return made.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise Refused(
            "observe(differentiable=True) has no second derivative (a gradient of its statistics was differentiated "
            "again, after create_graph=True); compute entropy, key_mass and first_mass from plain weights for it"
        )


class _Backward:
    """One backward pass: gradients of the statistics in, gradients of query, key, bias and sinks out."""

    def __init__(self, call: Call, lse: Tensor, want: Want, given: dict[str, Any], needs: tuple[bool, ...]) -> None:
        self.call, self.want, self.needs = call, want, needs
        work = self.work = accumulation(call.spec.dtype)
        # an empty row has no entropy, and no weights that could change
        self.empty = lse == -torch.inf
        self.lse = lse.to(work)
        entropy = given.get("entropy")
        self.entropy = None if entropy is None else entropy.to(work).masked_fill(self.empty, 0.0)
        sums = (given.get(name) for name in ("key_mass", "first_mass"))
        self.mass, self.first = (None if each is None else each.to(work) for each in sums)
        self.queries = range(call.spec.queries)[want.queries or slice(None)]
        # what a pair that is not permitted holds must not reach a product with 0
        self.query, self.key = (torch.where(t.isfinite(), t, 0.0).to(work) for t in (call.query, call.key))

    def run(self) -> tuple[Tensor | None, ...]:
        call = self.call
        bias = call.bias
        d_query, d_key = (t.new_zeros(t.shape, dtype=self.work) for t in (self.query, self.key))
        d_bias = None if bias is None or not self.needs[2] else bias.new_zeros(bias.shape, dtype=self.work)
        shares = self.lse.new_zeros(self.lse.shape)  # Σ p·G of each row
        for tile in tiles(call, self.lse):
            capped = None if call.spec.softcap is None else self._slope(tile)
            ds = self._logits(tile, shares)
            if d_bias is not None:
                self._add_bias(tile, ds, d_bias)
            self._add_products(tile, ds if capped is None else ds.mul_(capped), d_query, d_key)
        d_query.mul_(call.spec.scale)
        d_key.mul_(call.spec.scale)
        d_sinks = None
        if call.sinks is not None and self.needs[3]:
            weight = torch.exp(call.sinks.to(self.work).view(1, -1, 1) - self.lse).masked_fill(self.empty, 0.0)
            d_sinks = -(weight * shares).sum((0, 2)).to(call.sinks.dtype)
        made = (d_query, d_key, d_bias)
        inputs = (call.query, call.key, bias)
        return (
            *(
                None if grad is None or tensor is None or not need else grad.to(tensor.dtype)
                for grad, tensor, need in zip(made, inputs, self.needs, strict=False)
            ),
            d_sinks,
        )

    def _logits(self, tile: Tile, shares: Tensor) -> Tensor:
        """The gradient of the tile's logits; its z is used up."""
        grad = self._with_mass(tile, None if self.entropy is None else -self.entropy[tile.at].unsqueeze(-1))
        if self.first is not None:
            for keys, columns in side_by_side(tile.runs):
                if keys.start < self.want.first:
                    grad[..., columns][..., : self.want.first - keys.start] += self.first[tile.at].unsqueeze(-1)
        product = grad.mul_(tile.p)
        share = product.sum(-1, keepdim=True)
        if self.call.sinks is not None and self.entropy is not None:
            # the 1 of z + 1, which cancels where the weights sum to 1
            ones = self.entropy[tile.at].unsqueeze(-1)
            product.addcmul_(tile.p, ones, value=-1.0)
            share = product.sum(-1, keepdim=True)
        shares[tile.at] = share.squeeze(-1)
        return product.addcmul_(tile.p, share, value=-1.0)

    def _with_mass(self, tile: Tile, slope: Tensor | None) -> Tensor:
        """slope·z + dM of the tile, in one pass where all of its rows count; its z is used up."""
        grad = tile.z
        inside = range(max(tile.rows.start, self.queries.start), min(tile.rows.stop, self.queries.stop))
        if self.mass is None or not len(inside):
            return grad.zero_() if slope is None else grad.mul_(slope)
        mass = tile.of_keys(self.mass).unsqueeze(2)
        if inside == tile.rows:
            return grad.copy_(mass) if slope is None else torch.addcmul(mass, grad, slope, out=grad)
        grad = grad.zero_() if slope is None else grad.mul_(slope)
        grad[:, :, inside.start - tile.rows.start : inside.stop - tile.rows.start] += mass
        return grad

    def _slope(self, tile: Tile) -> Tensor:
        """The derivative of c·tanh(s/c), from what it gave."""
        cap = self.call.spec.softcap
        assert cap is not None
        logits = tile.z + self.lse[tile.at].masked_fill(self.empty[tile.at], 0.0).unsqueeze(-1)
        for keys, columns in side_by_side(tile.runs):
            bias = bias_over(self.call, tile.rows, range(keys.start, keys.stop), tile.items, tile.heads)
            if bias is not None:
                logits[..., columns] -= bias.masked_fill(bias == -torch.inf, 0.0)
        return 1.0 - (logits / cap).clamp_(-1.0, 1.0).square_()

    def _add_bias(self, tile: Tile, ds: Tensor, d_bias: Tensor) -> None:
        for keys, columns in side_by_side(tile.runs):
            cols = range(keys.start, keys.stop)
            add_bias_gradient(self.call, d_bias, ds[..., columns], tile.rows, cols, tile.items, tile.heads)

    def _add_products(self, tile: Tile, ds: Tensor, d_query: Tensor, d_key: Tensor) -> None:
        spec = self.call.spec
        group = spec.heads // spec.kv_heads
        kv = slice(tile.heads.start // group, tile.heads.stop // group)
        flat = ds.view(-1, group * ds.shape[2], ds.shape[3])  # [items · kv, group · rows, keys]
        if self.needs[0]:
            key = tile.of_keys(self.key, group)
            made = torch.bmm(flat, key.reshape(len(flat), *key.shape[2:]))
            d_query[tile.at] = made.view(*ds.shape[:3], -1)
        if self.needs[1]:
            query = self.query[tile.at].reshape(len(flat), -1, self.query.shape[-1])
            # a view, because a tile has all heads or one item
            into = d_key[tile.items, kv].view(len(flat), *d_key.shape[2:])
            for keys, columns in side_by_side(tile.runs):
                into[:, keys].baddbmm_(flat[..., columns].transpose(1, 2), query)
