"""Generating text on a GPU: a Llama of 0.85 B parameters with random weights, bfloat16, prompts of 512 tokens.

    python benchmarks/generation_gpu.py [--json FILE]

Milliseconds of a token: for one prompt, eight, and eight of unequal lengths; by recorded steps (CUDA graphs), and by
steps that are launched operation by operation; and Hugging Face's `generate` on a Llama of the same sizes. Recorded
steps must give the tokens of the others, where float32 weights leave no ties; in bfloat16 it is told how many of the
first tokens agree. First of all: seconds from the start of this process to its first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

START = time.perf_counter()

import torch  # noqa: E402

from _gpu import DEVICE, DRY, DTYPE, Row, failed, save, show, wait  # noqa: E402
from regard import models  # noqa: E402

NEW, ROUNDS = (5, 1) if DRY else (96, 3)
PROMPT = 24 if DRY else 512
SIZES = {
    "vocab_size": 32_000, "embed_dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "ff_dim": 5632,
    "max_tokens": 4096,
}  # fmt: skip
if DRY:
    SIZES |= {"vocab_size": 320, "embed_dim": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "ff_dim": 96}


def prompts(items: int, equal: bool) -> list[list[int]]:
    generator = torch.Generator().manual_seed(items)
    lengths = [PROMPT if equal else PROMPT - item * PROMPT // 10 for item in range(items)]
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def per_token(model: models.Decoder, given: list[list[int]], plain: bool) -> tuple[float, list[list[int]]]:
    """Milliseconds of a token after the first, and the tokens."""
    times = []
    for _ in range(ROUNDS):
        caches = model.caches(max(map(len, given)) + NEW) if plain else None
        wait()
        steps = model.stream(given, max_new_tokens=NEW, caches=caches)
        found = [next(steps)]
        start = time.perf_counter()
        found += list(steps)
        times.append((time.perf_counter() - start) / (NEW - 1) * 1e3)
    return statistics.median(times), [list(row) for row in zip(*found, strict=True)]  # type: ignore[arg-type]


def theirs(given: list[list[int]]) -> float:
    """Milliseconds of a token after the first by Hugging Face: the time of all tokens less that of one."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab_size"], hidden_size=SIZES["embed_dim"], intermediate_size=SIZES["ff_dim"],
        num_hidden_layers=SIZES["num_layers"], num_attention_heads=SIZES["num_heads"],
        num_key_value_heads=SIZES["num_kv_heads"], max_position_embeddings=SIZES["max_tokens"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, DTYPE).eval()
    width = max(map(len, given))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in given], device=DEVICE)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in given], device=DEVICE)

    def seconds(new: int) -> float:
        wait()
        start = time.perf_counter()
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=seen, min_new_tokens=new, max_new_tokens=new, **how)
        wait()
        return time.perf_counter() - start

    seconds(2)
    return statistics.median(seconds(NEW) - seconds(1) for _ in range(ROUNDS)) / (NEW - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    args = parser.parse_args()
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        show(row)
        save(rows, args.json)

    torch.manual_seed(0)
    model = models.Decoder(models.config("llama-2-7b", **SIZES), device=DEVICE, dtype=DTYPE).eval()
    built = time.perf_counter() - START
    first = model.stream(prompts(1, True), max_new_tokens=NEW)
    next(first)
    whole = time.perf_counter() - START
    next(first)
    next(first)
    third = time.perf_counter() - START
    note = {"model built": built * 1e3, "first token": whole * 1e3, "third token": third * 1e3}
    keep(Row("text", "seconds to the first token, model building apart", 3.0, "s", whole - built, 0.0, "", 0.0, note))
    for name, given in {
        "one prompt": prompts(1, True), "8 prompts": prompts(8, True), "8 unequal prompts": prompts(8, False)
    }.items():  # fmt: skip
        try:
            recorded, tokens = per_token(model, given, False)
            plain, wanted = per_token(model, given, True)
            peer = theirs(given)
        except Exception as problem:
            keep(failed("text", name, 2.0, problem))
            continue
        pairs = zip(tokens, wanted, strict=True)
        agree = [next((n for n, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NEW) for pair in pairs]
        about = {"recorded": recorded, "plain": plain, "theirs": peer, "first tokens that agree": float(min(agree))}
        keep(Row("text", f"{name}, a token", 2.0, "ms", recorded, 0.0, "", 0.0, about))
    small = models.Decoder(models.config("llama-2-7b", **{**SIZES, "num_layers": 4}), device=DEVICE).eval()
    given = prompts(4, False)
    same = per_token(small, given, False)[1] == per_token(small, given, True)[1]
    keep(Row("text", "recorded and plain steps differ in float32", 0.0, "", float(not same)))


if __name__ == "__main__":
    main()
