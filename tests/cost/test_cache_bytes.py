"""Bytes of caches equal those of the real objects, by the sizes of their storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cost.small_bills import GPT, MLA, WORDS, words

from regard import cost, models
from regard.cache import KVCache, LatentCache, RollingCache

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def storages(*caches: Any) -> int:
    """Bytes of every tensor that caches hold, each storage once."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (tuple, list)):
            for one in value:
                look(one)
        elif type(value).__module__.startswith("regard.cache"):
            look(list(vars(value).values()))

    look(caches)
    return sum(found.values())


def fill(config: models.DecoderConfig, caches: list[Any], batch: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    model: Any = models.build(config, dtype=dtype).eval()
    with torch.inference_mode():
        model(words(batch, 3), caches=caches)
    return caches


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
def test_mha_gqa_and_mqa_caches(heads: tuple[int, int], int8: bool) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 34}
    config = models.config("llama-3-8b", **GPT | sizes)
    caches = fill(config, [KVCache(63, int8=int8) for _ in range(3)], 5)
    found = cost.of(config, length=63, batch=5, dtype="float32", int8=int8).cache
    assert found is not None
    assert found.total == storages(*caches) == sum(cache.bytes for cache in caches)
    assert found.layers == 3 and found.layer == storages(caches[0]) and 5 * 63 * found.token == found.layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_in_every_dtype(dtype: str) -> None:
    config = models.config("gpt2", **GPT)
    caches = fill(config, [KVCache(11) for _ in range(3)], 2, DTYPES[dtype])
    found = cost.of(config, length=11, batch=2, dtype=dtype).cache
    assert found is not None and found.total == storages(*caches)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(111, 0), (111, 3), (7, 5)])
def test_rolling_caches_are_bounded(window: int, sinks: int, int8: bool) -> None:
    config = models.config("llama-3-8b", **GPT | {"num_kv_heads": 1, "window": window})
    caches = fill(config, [RollingCache(window, sinks=sinks, int8=int8) for _ in range(3)], 5)
    for length in (1, 63, 10**9):
        found = cost.of(config, length=length, batch=5, dtype="fp32", rolling=True, sinks=sinks, int8=int8).cache
        assert found is not None and found.total == storages(*caches)
    assert cost.of(config, rolling=True, sinks=sinks).crossings.cache_over_weights is None


@pytest.mark.parametrize("int8", [False, True])
def test_a_latent_cache_holds_one_tensor_a_token(int8: bool) -> None:
    config = models.LatentConfig(**MLA)
    cache, module = LatentCache(63, int8=int8), models.build(config).eval()
    with torch.inference_mode():
        module(torch.randn(5, 3, 60), cache=cache)
    alone = cost.of(config, length=63, batch=5, dtype="float32", int8=int8).cache
    assert alone is not None and alone.total == storages(cache)
    decoder = models.config("llama-3-8b", **GPT | {"num_kv_heads": 1})
    inside = cost.of(decoder, latent=config, length=63, batch=5, dtype="float32", int8=int8).cache
    assert inside is not None and inside.total == 3 * storages(cache) and inside.kind.startswith("MLA, latent 23 + 6")


def test_an_encoder_decoder_keeps_target_and_source() -> None:
    config = models.config("transformer-base", vocab_size=WORDS, embed_dim=60, num_heads=5, num_layers=3, ff_dim=33)
    model: Any = models.build(config).eval()
    caches = model.caches(11, 63)
    with torch.inference_mode():
        model.decode(words(2, 1), model.encode(words(2, 63)), caches=caches)
    found = cost.of(config, length=11, source_length=63, batch=2, dtype="float32").cache
    assert found is not None and found.total == storages(*(cache for pair in caches for cache in pair))


def test_an_encoder_has_no_cache() -> None:
    assert cost.of("bert-base").cache is None


def test_the_kinds_are_compared_at_the_same_length() -> None:
    found = cost.of("llama-3-8b", length=100, batch=3, dtype="bf16").cache
    assert found is not None
    token = 2 * 128 * 2 * 32 * 300
    assert {kind: plain for kind, (plain, _) in found.kinds.items()} == {
        "GQA, 8 heads": 8 * token,
        "MHA, 32 heads": 32 * token,
        "MQA, 1 head": token,
    }
    assert all(small == plain * 1.125 / 2 for plain, small in found.kinds.values())
