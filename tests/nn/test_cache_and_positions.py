from __future__ import annotations

import pytest
import torch
from tests.nn.helpers import build, close, random
from torch import nn

from regard import masks


class Growing:
    """The smallest cache: it keeps everything."""

    def __init__(self):
        self.key = self.value = None

    @property
    def position(self):
        return 0 if self.key is None else self.key.shape[2]

    def update(self, key, value):
        start = self.position
        if self.key is not None:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = key, value
        return key, value, start


class Slots:
    """A cache of fixed size whose unused slots hold NaN; only `mask` says which are in use."""

    def __init__(self, size):
        self.size, self.used = size, 0
        self.key = self.value = None

    @property
    def position(self):
        return torch.full((3,), self.used)

    def update(self, key, value):
        if self.key is None:
            self.key = key.new_full((3, key.shape[1], self.size, key.shape[3]), torch.nan)
            self.value = value.new_full((3, value.shape[1], self.size, value.shape[3]), torch.nan)
        start = self.position
        self.key[:, :, self.used : self.used + key.shape[2]] = key
        self.value[:, :, self.used : self.used + key.shape[2]] = value
        self.used += key.shape[2]
        return self.key, self.value, start


class Rotary(nn.Module):
    """Turns pairs of entries by an angle that grows with the position: the textbook rotation, for the test."""

    def forward(self, query, key, *, query_offset):
        return self.turn(query, query_offset), self.turn(key, query_offset + query.shape[2] - key.shape[2])

    @staticmethod
    def turn(x, start):
        start = torch.as_tensor(start, dtype=x.dtype).reshape(-1, 1, 1, 1)
        place = start + torch.arange(x.shape[2], dtype=x.dtype)[:, None]
        angle = place * 0.5 ** torch.arange(x.shape[3] // 2, dtype=x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2)


SPLITS = [[11], [5, 6], [7, 1, 1, 1, 1], [1] * 11, [3, 5, 3]]


@pytest.mark.parametrize("positions", [None, Rotary()], ids=["without positions", "rotary"])
@pytest.mark.parametrize("kind", [Growing, lambda: Slots(13)], ids=["growing", "slots with NaN"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("window", [None, 3])
def test_every_split_into_chunks_equals_one_causal_forward(split, kind, positions, window):
    module = build(48, 4, num_kv_heads=2, positions=positions, packed=True).eval()
    x = random(3, 11, 48)
    mask = masks.causal() if window is None else masks.causal() & masks.window(left=window)
    cache = kind()
    with torch.no_grad():
        parts = [module(part, mask=mask, cache=cache) for part in x.split(split, dim=1)]
        assert close(torch.cat(parts, 1), module(x, mask=mask))


def test_padding_rows_are_zero_with_a_cache_too():
    module = build(48, 4).eval()
    x, lengths = random(3, 7, 48), [7, 3, 5]

    def mask_of_first(tokens):
        return masks.causal() & masks.padding([n - 7 + tokens for n in lengths], side="left")

    whole = module(x, mask=mask_of_first(7))
    cache = Growing()
    parts = [module(x[:, a:b], mask=mask_of_first(b), cache=cache) for a, b in ((0, 5), (5, 6), (6, 7))]
    assert close(torch.cat(parts, 1), whole)
    assert not whole[1, :4].any()


def test_positions_are_applied_after_projection_and_norm():
    module = build(48, 4, qk_norm=True)
    x = random(3, 7, 48)
    seen = {}

    def look(query, key, *, query_offset):
        seen.update(query=query, key=key, offset=query_offset)
        return query * 2, key

    plain = module(x)
    module.positions = look
    assert not close(module(x), plain, 1e-3)
    assert close(seen["query"], module.q_norm(module.q_proj(x).unflatten(-1, (4, 12)).transpose(1, 2)))
    assert seen["key"].shape == (3, 4, 7, 12) and seen["offset"] == 0
    module(x, random(3, 11, 48))
    assert seen["key"].shape == (3, 4, 11, 12) and seen["offset"] == 4


def test_rotary_positions_make_attention_depend_on_distance_only():
    module = build(48, 4, positions=Rotary())
    x = random(3, 7, 48)
    assert not close(module(x), module(x.flip(1)).flip(1), 1e-3)
    shifted = torch.cat([random(3, 4, 48), x], 1)
    hidden = masks.causal() & masks.drop(torch.arange(11) < 4)
    assert close(module(shifted, mask=hidden)[:, 4:], module(x, mask=masks.causal()))


def test_without_positions_attention_is_permutation_equivariant():  # FACTS M15
    module, x = build(48, 4), random(3, 7, 48)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert close(module(x[:, order]), module(x)[:, order])


def test_positions_restart_in_each_nested_item():
    module = build(48, 4, positions=Rotary())
    items = [random(n, 48) for n in (5, 1, 7)]
    nested = torch.nested.nested_tensor(items, layout=torch.jagged)
    for out, item in zip(module(nested, mask=masks.causal()).unbind(), items, strict=True):
        assert close(out, module(item[None], mask=masks.causal())[0])
    others = torch.nested.nested_tensor(items[::-1], layout=torch.jagged)
    with pytest.raises(ValueError, match="positions cannot be placed on nested query and key of different lengths"):
        module(nested, others)


def test_a_position_module_is_part_of_the_module():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, query, key, *, query_offset):
            return query * self.gain, key

    assert "positions.gain" in build(48, 4, positions=Learned()).state_dict()
