"""`keep`: a cache that keeps a budget of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import masks
from regard._checks import check_count
from regard.cache._kept import POLICIES, Budget, KeptCache
from regard.edits._edit import Change, Edit, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from regard.cache import BlockPool


@dataclass(frozen=True, repr=False)
class Keep(Edit):
    budget: Budget
    when_idle = "keep acts between the calls of a cache, and none came after the budget was full"

    @property
    def wants_mass(self) -> bool:  # type: ignore[override]
        return True

    def mass_of(self, place: Place) -> slice | Tensor | None:
        if place.real is None:
            return self.budget.counted()
        if self.budget.policy != "window":
            return place.real
        after = place.real.flip(1).cumsum(1).flip(1)  # how many tokens come from here on
        return place.real & (after <= self.budget.recent)

    def change(self, place: Place) -> Change | None:
        if place.kind == "cross":
            return None
        if place.dropped:
            raise place.refuse("its cache forgets keys by itself: name the other layers with layers=[…]")
        if isinstance(place.read, int) and place.read < place.keys:
            raise place.refuse("a static cache cannot be followed, which hands over memory that is not filled yet")
        gone: Tensor | None = place.memory.get("gone")
        if gone is None:
            return None
        if gone.shape[0] != place.batch or gone.shape[2] + place.queries != place.keys:
            if place.queries != place.keys and place.first != 0:
                raise place.refuse(
                    f"its cache now has {place.keys - place.queries} tokens in a batch of {place.batch}, and had "
                    f"{gone.shape[2]} in a batch of {gone.shape[0]} after the last call (an item has ended, say), so "
                    "what was kept is not known any more: decode items one at a time, or with keep(…).caches(model)"
                )
            place.memory.clear()  # another text
            return None
        if not bool(gone.any()):
            return None
        gone = torch.nn.functional.pad(gone, (0, place.queries)).to(place.device)
        gone = gone.repeat_interleave(place.count // gone.shape[1], 1)
        return Change(hide=masks.keep(gone[:, :, None]))

    def after(self, mass: Tensor, place: Place) -> None:
        if place.kind == "cross":
            return
        mass = mass.float().reshape(place.batch, place.kv_heads, -1, place.keys).sum(2)
        before: Tensor | None = place.memory.get("mass")
        gone = torch.zeros_like(mass, dtype=torch.bool)
        if before is not None:
            mass[:, :, : before.shape[2]] += before
            gone[:, :, : before.shape[2]] = place.memory["gone"]
        real = self._real(place, mass.device)
        place.memory.update(mass=mass, real=real, gone=self._gone(mass, real, gone))

    def _real(self, place: Place, device: torch.device) -> Tensor:
        """bool [batch, key]: keys that are tokens by now, each item's at its own places; the others are padding."""
        offset = torch.as_tensor(place.offset, device=device).flatten().expand(place.batch)[:, None]
        before: Tensor | None = place.memory.get("real")
        if before is None:  # what was read before the block is taken for tokens
            real = torch.arange(place.keys, device=device) < offset
        else:
            real = torch.nn.functional.pad(before, (0, place.keys - before.shape[1]))
        new = torch.ones(1, 1, dtype=torch.bool, device=device) if place.real is None else place.real.to(device)
        columns = offset + torch.arange(place.queries, device=device)
        return real.scatter(1, columns, new.expand_as(columns))

    def saw(self, pattern: Any, place: Place) -> None:
        """The items of a cache may change places between two calls; then what was kept is that of others."""
        if pattern.seen is None or place.kind == "cross":
            return
        key: Tensor = pattern.seen.key
        before: Tensor | None = place.memory.get("last")
        if before is not None and before.shape[:2] == key.shape[:2]:
            width = min(before.shape[2], key.shape[3])  # a steer makes keys wider
            moved = (_at(key, place.memory["end"])[..., :width] - before[..., :width]).abs().amax()
            if bool(moved > 0.1 * before.abs().amax()):  # a cache of bytes gives keys back less exactly
                raise place.refuse(
                    "the items of its cache changed places between two calls (beam search, say), and what was kept of "
                    "each is not known any more: decode without beams, or with keep(…).caches(model)"
                )
        real: Tensor = place.memory["real"]
        end = (real * torch.arange(place.keys, device=real.device)).amax(1)  # the last token of each item
        place.memory.update(last=_at(key, end).clone(), end=end)

    def _gone(self, mass: Tensor, real: Tensor, gone: Tensor) -> Tensor:
        """The same choice that a cache makes, which holds the kept ones alone. Items may hold fewer than others: what
        stands before their keys has no worth, and goes first."""
        held = real[:, None] & ~gone
        order = held.byte().sort(dim=2, stable=True).indices[:, :, mass.shape[2] - int(held.sum(2).amax()) :]
        there = held.gather(2, order)
        places = (real.cumsum(1) - 1)[:, None].expand_as(mass).gather(2, order)
        worth = mass.gather(2, order).masked_fill(~there, -torch.inf)
        chosen = self.budget.chosen(worth, places.masked_fill(~there, mass.shape[2]))
        if chosen is None:
            return gone
        stay = torch.zeros_like(held).scatter_(2, order.gather(2, chosen), True)
        return real[:, None] & ~stay

    def caches(self, model: nn.Module, pools: Sequence[BlockPool] | None = None) -> list[KeptCache]:
        """One cache for each layer of a ``regard.models.Decoder``, whose memory really shrinks to the budget:

        ``model.generate(prompts, caches=keep("key_mass", budget=64).caches(model), max_new_tokens=100)``

        With ``pools``, one ``regard.cache.BlockPool`` for each layer, keys and values lie in their blocks, and what is
        dropped goes back to them, for other caches to use.
        """
        layers: Any = getattr(model, "layers", None)
        if layers is None or not hasattr(model, "caches"):
            raise TypeError(f"model must be a regard.models.Decoder, got {type(model).__name__}; for others use edit")
        if pools is None:
            return [KeptCache(self.budget) for _ in layers]
        if len(pools) != len(layers):
            raise ValueError(f"pools has {len(pools)} pools, and the model {len(layers)} layers; each needs its own")
        return [KeptCache(self.budget, pool) for pool in pools]

    def __repr__(self) -> str:
        policy, keys, first, recent = self.budget
        more = f", first={first}" * bool(first) + f", recent={recent}" * (policy != "recent")
        return f"keep({policy!r}, budget={keys}{more})"


def _at(key: Tensor, columns: Tensor) -> Tensor:
    """[batch, head, dim] of one key of each item."""
    return key[torch.arange(len(key), device=key.device), :, columns.to(key.device)]


def keep(policy: str, budget: int, *, first: int = 0, recent: int | None = None) -> Keep:
    """A cache policy: after each call a budget of keys is kept, and later calls see those and their own tokens.

        keep("recent", budget=64, first=4)                # StreamingLLM: the first four, and the newest
        keep("key_mass", budget=64, recent=16)            # H2O: the newest, and those that received most
        keep("window", budget=64, recent=16)              # SnapKV: by what the last 16 queries looked at

    In ``regard.edit`` the keys that go are hidden, in any model that decodes with a cache; ``keep(…).caches(model)``
    are caches of a ``regard.models.Decoder`` whose memory shrinks, with the same output. A prompt that is read in one
    call sees all of itself; the policy acts from the next call on. Heads that share keys (grouped heads) share the
    choice.

    Args:
        policy: by what keys stay: "key_mass", all the weight they were given so far; "window", what the last
            ``recent`` queries of each call gave; "recent", the newest.
        budget: keys that stay, the first and the newest included.
        first: number of first tokens that always stay.
        recent: number of newest tokens that always stay; budget // 4 when None. The policy "recent" fills its
            budget with them.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
    for name, given, least in (("budget", budget, 1), ("first", first, 0), ("recent", recent, 0)):
        if name == "recent" and given is None:
            continue
        check_count(name, given, least)
    budget, first = int(budget), int(first)
    recent = None if recent is None else int(recent)
    if policy == "recent" and recent is not None:
        raise ValueError('recent is given with the policy "recent", which fills its budget with the newest')
    if first > budget:
        raise ValueError(f"first={first} is more than budget={budget}, which includes them")
    newest = budget - first if policy == "recent" else (budget // 4 if recent is None else recent)
    if policy == "window" and newest < 1:
        raise ValueError('recent must be at least 1 for the policy "window": those queries are its window')
    if first + newest > budget:
        raise ValueError(f"first={first} and recent={newest} are more than budget={budget}")
    return Keep(Budget(policy, budget, first, newest))
