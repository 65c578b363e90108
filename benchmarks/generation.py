"""Generating text on a CPU: float32, 2 threads, random weights, greedy.

python benchmarks/generation.py [--only peer --only flat] [--quick] [--save]

peer: `Decoder.generate` beside Hugging Face's `generate` of the same configuration: time for all new tokens.
flat: a step late in a text beside a step early in it, whole, and apart from attention: to the late step the attention
calls of the early one are added, and to the early step those of the late one, so that both sides attend alike.

Ratios are medians of interleaved pairs, printed beside their control: the peer against itself.
--quick takes 3 rounds and small models: it shows that the tool works, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import transformers
from torch.nn import functional as F

import regard
from _harness import RESULTS, Row, Work, at_most, interleave, main
from regard import models
from regard.nn._products import generating, product

PROMPT, NEW = 64, 32

# SmolLM2-135M's sizes: the smallest Llama that people use
SMOL: dict[str, int] = {"vocab_size": 49_152, "embed_dim": 576, "num_layers": 30, "num_heads": 9, "ff_dim": 1536}


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rounds = 3 if quick else 15
        self.long_rounds = 3 if quick else 7  # seconds each
        self.layers = {"num_layers": 2} if quick else {}
        self.new = 8 if quick else NEW
        self.late = 200 if quick else 960


def gpt2(sizes: Sizes) -> models.Decoder:
    return models.Decoder(models.config("gpt2", **sizes.layers)).eval()


def smol(sizes: Sizes) -> models.Decoder:
    changes = {**SMOL, "num_kv_heads": 3, "max_tokens": 2048, "tied": True, **sizes.layers}
    return models.Decoder(models.config("llama-2-7b", **changes)).eval()


def theirs(model: models.Decoder) -> Any:
    """Hugging Face's model of the same sizes."""
    c = model.config
    if c.positions == "learned":
        config = transformers.GPT2Config(n_layer=c.num_layers, n_embd=c.embed_dim, n_head=c.num_heads)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.embed_dim,
        intermediate_size=c.ff_dim,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_tokens,
        tie_word_embeddings=c.tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


MODELS: dict[str, Callable[[Sizes], models.Decoder]] = {"GPT-2 (124M)": gpt2, "SmolLM2's sizes (135M)": smol}


def peer(sizes: Sizes) -> Iterator[Row]:
    transformers.utils.logging.set_verbosity_error()
    for name, make in MODELS.items():
        ours = make(sizes)
        other = theirs(ours)
        generator = torch.Generator().manual_seed(0)
        for lengths in ([PROMPT], [PROMPT] * 4, [PROMPT, 7, 33, 50]):
            rows = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
            padded = torch.tensor([[0] * (PROMPT - len(row)) + row for row in rows])
            keep = torch.arange(PROMPT) >= PROMPT - torch.tensor(lengths).unsqueeze(1)

            def mine(rows: Any = rows, model: models.Decoder = ours) -> object:
                return model.generate(rows, max_new_tokens=sizes.new)

            def its(padded: Any = padded, keep: Any = keep, model: Any = other) -> object:
                how = {"max_new_tokens": sizes.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                return model.generate(padded, attention_mask=keep.long(), **how)

            of = "one prompt" if len(lengths) == 1 else f"{len(set(lengths))} lengths in a batch of {len(lengths)}"
            of = f"a batch of {len(lengths)}" if len(lengths) > 1 == len(set(lengths)) else of
            samples = interleave(mine, its, rounds=sizes.long_rounds)
            yield at_most("peer", f"{name}, {of}, {sizes.new} new tokens", samples, 1.0)


def step(model: models.Decoder, held: int) -> Work:
    """One more token after `held`, again and again."""
    caches = model.caches(held + 1)
    with torch.inference_mode():
        model.states(torch.randint(0, 1000, (1, held)), caches=caches)
    token = torch.tensor([[5]])

    def work() -> object:
        with torch.inference_mode():
            logits = model.logits(model.states(token, caches=caches))
            for cache in caches:
                cache.truncate(held)
            return logits

    return work


def attending(model: models.Decoder, held: int) -> Work:
    """The attention calls of that step alone."""
    c = model.config
    dim, kv_heads = c.embed_dim // c.num_heads, c.num_kv_heads or c.num_heads
    query = torch.randn(1, c.num_heads, 1, dim)
    memory = [[torch.randn(1, kv_heads, held + 1, dim) for _ in range(2)] for _ in model.layers]

    def work() -> None:
        with torch.inference_mode():
            for key, value in memory:
                regard.attention(query, key, value)

    return work


def flat(sizes: Sizes) -> Iterator[Row]:
    for name, make in MODELS.items():
        model = make(sizes)
        early, late = step(model, PROMPT), step(model, sizes.late)
        near, far = attending(model, PROMPT), attending(model, sizes.late)
        what = f"{name}, a step after {sizes.late} tokens against one after {PROMPT}"
        # a step reads every cached key and value: it may grow, and how much is told here
        yield at_most("flat", what, interleave(late, early, rounds=sizes.rounds), 2.0, note="whole")

        def later(late: Work = late, near: Work = near) -> None:
            late(), near()

        def earlier(early: Work = early, far: Work = far) -> None:
            early(), far()

        yield at_most("flat", what, interleave(later, earlier, rounds=sizes.rounds), 1.05, note="apart from attention")


def products(sizes: Sizes) -> Iterator[Row]:
    for outputs, inputs in ((576, 576), (576, 1536), (3072, 768), (768, 3072), (4096, 4096), (50_257, 768)):
        count = 2 if sizes.quick else max(2, 100_000_000 // (4 * outputs * inputs))  # more than the caches hold
        weights = [torch.randn(outputs, inputs) for _ in range(count)]
        bias = torch.randn(outputs)
        for rows in (1, 2, 4, 16, 64):
            x = torch.randn(rows, inputs)

            def ours(x: Any = x, weights: Any = weights, bias: Any = bias) -> None:
                with torch.inference_mode(), generating():
                    for weight in weights:
                        product(F.linear, x, weight, bias)

            def torchs(x: Any = x, weights: Any = weights, bias: Any = bias) -> None:
                with torch.inference_mode():
                    for weight in weights:
                        F.linear(x, weight, bias)

            samples = interleave(ours, torchs, rounds=sizes.rounds)
            yield at_most("products", f"{rows} rows with a matrix of {outputs} × {inputs}", samples, 1.1)


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {"peer": peer, "flat": flat, "products": products}


if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, Sizes, RESULTS / "generation.json", {"prompt": PROMPT, "new": NEW}))
