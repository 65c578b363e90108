"""Caches that move, are saved and loaded, and belong to one layer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests import held_files

from regard import cache, masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import LatentAttention, MultiHeadAttention
from regard.positions import Rotary

MADE: dict[str, Any] = {
    "KVCache": lambda: KVCache(23),
    "KVCache of bytes": lambda: KVCache(23, int8=True),
    "RollingCache": lambda: RollingCache(5, sinks=2),
    "RollingCache of bytes": lambda: RollingCache(5, sinks=2, int8=True),
    "LatentCache": lambda: LatentCache(23),
    "PagedCache": lambda: PagedCache(BlockPool(40, 4)),
    "PagedCache of bytes": lambda: PagedCache(BlockPool(40, 4, int8=True)),
}


def module_for(name: str) -> Any:
    torch.manual_seed(0)
    if name == "LatentCache":
        return LatentAttention(12, 3, kv_lora_rank=7, nope_dim=5, rope_dim=4).eval()
    return MultiHeadAttention(24, 4, num_kv_heads=2, positions=Rotary(6)).eval()


def steps(module: Any, held: Any, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    mask = getattr(held, "mask", masks.causal())
    with torch.no_grad():
        return torch.cat([module(x[:, a:b], mask=mask, cache=held) for a, b in itertools.pairwise(cuts)], 1)


@pytest.mark.parametrize("name", MADE)
def test_what_is_loaded_goes_on_as_what_was_saved(name: str, tmp_path: Path) -> None:
    module = module_for(name)
    x = torch.randn(3, 19, module.embed_dim)
    held = MADE[name]()
    steps(module, held, x, [0, 7, 8, 13])
    held.save(tmp_path / "cache.safetensors")
    safetensors.torch.load_file(tmp_path / "cache.safetensors")  # other programs read it
    again = cache.load(tmp_path / "cache.safetensors")
    assert type(again) is type(held) and repr(again) == repr(held) and again.bytes == held.bytes
    again.fill_unused(float("nan"))
    assert torch.equal(steps(module, again, x, [13, 14, 19]), steps(module, held, x, [13, 14, 19]))
    again.truncate(15)
    assert again.lengths == [15] * 3


def test_items_of_different_lengths_and_an_empty_cache(tmp_path: Path) -> None:
    module, held = module_for(""), KVCache(23)
    x = torch.randn(3, 7, 24)
    with torch.no_grad():
        module(x, mask=masks.causal(), cache=held.padded([7, 3, 5]))
    held.save(tmp_path / "some")
    again = cache.load(tmp_path / "some")
    assert again.lengths == [7, 3, 5]
    assert torch.equal(steps(module, again, x, [0, 1]), steps(module, held, x, [0, 1]))
    KVCache(5, int8=True).save(tmp_path / "empty")
    empty = cache.load(tmp_path / "empty")
    assert (empty.capacity, empty.int8, empty.lengths) == (5, True, [])
    assert steps(module, empty, x, [0, 5]).shape == (3, 5, 24)


@pytest.mark.parametrize("name", MADE)
def test_a_cache_moves_to_another_dtype_and_device(name: str) -> None:
    module = module_for(name)
    x = torch.randn(2, 11, module.embed_dim)
    held = MADE[name]()
    steps(module, held, x, [0, 6])
    expected = steps(module, held.fork(), x, [6, 9])
    assert held.to(torch.float64) is held and held.to("cpu", torch.float64) is held
    found = steps(module.double(), held, x.double(), [6, 9])
    assert found.dtype == torch.float64
    # a number that lies between two bytes may be rounded to either, as its last bit is
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=5e-3 if "bytes" in name else 1e-5)
    unused = MADE[name]().to("cpu", torch.float16)  # has no tokens yet, and takes the dtype of its first
    assert steps(module.float(), unused, x, [0, 3]).dtype == torch.float32
    with pytest.raises(RuntimeError, match="gpu"):
        MADE[name]().to("gpu")  # no such device, also where nothing has to move yet
    with pytest.raises(TypeError, match="dtype must be one of"):
        held.to(dtype=torch.int64)
    held.to("meta")
    heads, dim = (1, 11) if name == "LatentCache" else (2, 6)
    new = torch.zeros(2, heads, 1, dim, dtype=torch.float64, device="meta")
    assert all(part.is_meta for part in held.update(new, None if name == "LatentCache" else new)[:2])


@pytest.mark.parametrize("name", MADE)
def test_a_device_may_be_named_with_its_number_or_without(name: str, tmp_path: Path) -> None:
    module = module_for(name)
    x = torch.randn(2, 11, module.embed_dim)
    held = MADE[name]()
    steps(module, held, x, [0, 6])
    expected = steps(module, held.fork(), x, [6, 9])
    held.save(tmp_path / "some")
    again = cache.load(tmp_path / "some", device="cpu:0")
    for moved in (held.to("cpu:0"), again):
        assert torch.equal(steps(module, moved, x, [6, 9]), expected)


def test_paged_sequences_share_their_blocks_after_a_move_and_in_a_file(tmp_path: Path) -> None:
    module, pool = module_for(""), BlockPool(17, 4)
    x = torch.randn(1, 6, 24)
    held, other = PagedCache(pool), PagedCache(pool)
    steps(module, held, x, [0, 6])
    steps(module, other, x, [0, 3])
    held.reorder([0, 0, 0])
    more = torch.randn(3, 5, 24)
    copy = held.fork()
    expected = steps(module, copy, more, [0, 5])
    copy.free()
    held.save(tmp_path / "paged")
    again = cache.load(tmp_path / "paged")
    assert again.blocks == [[0, 1]] * 3 and again.pool.free_blocks == 15  # shared as before
    assert torch.equal(steps(module, again, more, [0, 5]), expected)
    assert again.pool.free_blocks == 17 - 1 - 3 - 3  # each wrote into a copy of the second, and took a third
    held.to(torch.float64)
    assert held.pool is not pool and pool.free_blocks == 16 and other.lengths == [3]  # it left, and the other stays
    found = steps(module.double(), held, more.double(), [0, 5])
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5)
    held.free()
    assert held.pool.free_blocks == 17
    PagedCache(BlockPool(3, 2, int8=True)).save(tmp_path / "empty")
    empty = cache.load(tmp_path / "empty")
    assert (empty.pool.blocks, empty.pool.block_size, empty.int8, empty.lengths) == (3, 2, True, [])
    PagedCache(pool).save(tmp_path / "empty next to others")
    assert other.lengths == [3] and cache.load(tmp_path / "empty next to others").lengths == []


def test_a_damaged_paged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file, held = tmp_path / "paged", PagedCache(BlockPool(9, 4))
    steps(module_for(""), held, torch.randn(2, 7, 24), [0, 7])
    held.fill_unused(float("nan"))
    held.save(file)
    tensors, metadata = held_files.read(file)
    assert all(bool(part.isfinite().all()) for part in tensors.values())  # what holds no token is not written
    good = json.loads(metadata["regard"])
    built = good["built"]
    for changes, parts, complaint in (
        ({"built": {**built, "blocks": 3}}, {}, "its blocks do not fit its pool"),
        ({"built": {**built, "block_size": 7}}, {}, "its blocks do not fit its pool"),
        ({"built": {**built, "blocks": 1 << 40}}, {}, "the most that is made"),
        ({"built": {**built, "block_size": 1 << 40}}, {}, "the most that is made"),
        ({"built": {**built, "blocks": "x"}}, {}, "blocks"),
        ({"held": [7, 9]}, {}, "table of blocks does not fit"),
        ({"table": [[0, 1], [2, 9]]}, {}, "names blocks that are not there"),
        ({"table": [[0, 1], [2, "3"]]}, {}, "names blocks that are not there"),
        ({"table": [], "held": []}, {}, "names blocks that are not there"),  # blocks that nobody could give back
        ({"table": 3}, {}, "table of blocks does not fit"),
        ({"dtype": "int64"}, {}, "not those of a cache"),
        ({"dtype": None}, {}, "tokens of no dtype"),
        ({}, {"value.0": tensors["value.0"][:, :, :1]}, "value.0 is malformed"),
        ({}, {"value.0": torch.zeros(())}, "value.0 is malformed"),
        ({}, {"odd": tensors["key.0"]}, "not those of a cache"),
    ):
        text = json.dumps({**good, **changes})
        held_files.write(file, {**tensors, **parts}, {"regard": text})
        with pytest.raises(ValueError, match=complaint):
            cache.load(file)


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    held = KVCache(23)
    steps(module_for(""), held, torch.randn(2, 7, 24), [0, 7])
    held.save(file)
    tensors, metadata = held_files.read(file)
    good = json.loads(metadata["regard"])
    for changes, parts, complaint in (
        ({"format": "other"}, {}, "it holds no cache"),
        ({"version": 2}, {}, "version 2"),
        ({"kind": "Cache"}, {}, "its kind is 'Cache'"),
        ({"built": {"capacity": 3, "int8": False}}, {}, "do not fit"),
        ({"built": {"capacity": 1 << 39, "int8": False}}, {}, "the most that is made"),
        ({"built": {"capacity": "x", "int8": False}}, {}, "capacity"),
        ({"built": {"odd": 1}}, {}, "is not a cache that can be read"),
        ({"held": [7]}, {}, "do not fit"),
        ({"held": [7, -1]}, {}, "malformed"),
        ({"dtype": "int64"}, {}, "not those of a cache"),
        ({}, {"key.0": tensors["key.0"].double()}, "key.0 is malformed"),
        ({}, {"key.0": torch.zeros(())}, "key.0 is malformed"),
        ({}, {"odd": tensors["key.0"]}, "not those of a cache"),
    ):
        text = json.dumps({**good, **changes})
        held_files.write(file, {**tensors, **parts}, {"regard": text})
        with pytest.raises(ValueError, match=complaint):
            cache.load(file)
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is not a cache that can be read"):
        cache.load(file)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        cache.load(tmp_path / "none")


def test_one_cache_for_two_layers_is_refused_and_stays_as_it_was() -> None:
    first, second = MultiHeadAttention(24, 4), MultiHeadAttention(24, 4)
    x = torch.randn(2, 5, 24)
    for held in (KVCache(23), RollingCache(23), PagedCache(BlockPool(40, 4))):
        mask = getattr(held, "mask", masks.causal())
        with torch.no_grad():
            first(x, mask=mask, cache=held)
            for call in (second, second.observe, second.explain):
                with pytest.raises(
                    ValueError, match="cache holds 5 tokens of another layer; every layer needs a cache"
                ):
                    call(x, mask=mask, cache=held)
            with pytest.raises(ValueError, match="another layer"):
                second(x, mask=mask, cache=held.padded([5, 3]))
            assert held.lengths == [5, 5]
            first(x, mask=mask, cache=held)
            second(x, mask=mask, cache=held.fork())  # a copy belongs to whoever uses it
            held.truncate(0)
            second(x, mask=mask, cache=held)  # and an empty one to anybody
    latents = [LatentAttention(12, 3, kv_lora_rank=7, nope_dim=5, rope_dim=4) for _ in range(2)]
    held = LatentCache(9)
    with torch.no_grad():
        latents[0](torch.randn(1, 3, 12), cache=held)
        with pytest.raises(ValueError, match="another layer"):
            latents[1](torch.randn(1, 3, 12), cache=held)
