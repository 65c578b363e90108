"""A layer of a trained model for the walkthrough: its input for a text, and its matrices, as NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._walk import Layer, Settings, Source
from regard._walk._inputs import MOST_TOKENS, permitted
from regard.cli import terminal

if TYPE_CHECKING:
    from torch import Tensor

    from regard.nn import MultiHeadAttention


def trained(name: str, text: str, index: int, settings: Settings) -> tuple[Layer, Source]:
    """Layer `index` of a model that reads words (an encoder such as BERT), and what it is given for the text.

    Raises:
        ValueError, ImportError, OSError: with a message fit to be shown.
    """
    import torch

    from regard.cli.folders import load
    from regard.models import Encoder

    found = load(name)
    model = found.model.eval()
    if not isinstance(model, Encoder) or model.config.vocab_size is None:
        raise ValueError(f"--model {name} is a {type(model).__name__}; expected an encoder of words, such as minilm")
    config = model.config
    if not 0 <= index < config.num_layers:
        raise ValueError(f"--layer is {index}; {name} has layers 0 to {config.num_layers - 1}")
    ids, tokens = _tokens(found.folder, text, min(config.max_tokens or MOST_TOKENS, MOST_TOKENS))
    with torch.inference_mode():
        _, states = model(torch.tensor([ids]), hidden_states=True)
        block: Any = model.layers[index]
        x = block.attention_norm(states[index]) if block.pre_norm else states[index]
        mask = permitted(len(tokens), settings.causal, settings.window)
        theirs = _own_output(block.attention, x, mask, settings.scale)
    vectors = _numbers(x[0])
    layer = Layer(
        tokens=tokens,
        key_tokens=tokens,
        x=vectors,
        memory=vectors,
        weights=_matrices(block.attention),
        heads=config.num_heads,
        scale=None if settings.scale else 1.0,
        mask=mask,
        before={"ids": np.array(ids)},
    )
    difference = _difference(layer, theirs)
    return layer, Source(model=name, layer=index, layers=config.num_layers, difference=difference)


def _own_output(module: MultiHeadAttention, x: Tensor, mask: Any, scale: bool) -> Any:
    """What the module computes itself; it has no switch for the scale, so none is compared without it."""
    import torch

    from regard import masks

    if not scale:
        module = _unscaled(module)
    return module(x, mask=None if mask is None else masks.keep(torch.tensor(mask)))[0].double().numpy()


def _unscaled(module: MultiHeadAttention) -> MultiHeadAttention:
    """The same layer with queries √d_k as large, which undoes the division."""
    import copy

    larger = copy.deepcopy(module)
    for parameter in larger.q_proj.parameters():
        parameter.mul_(larger.head_dim**0.5)
    return larger


def _difference(layer: Layer, theirs: Any) -> float:
    from regard._walk._steps import traced

    return float(np.abs(traced(layer)["output"][0] - theirs).max())


def _matrices(module: MultiHeadAttention) -> dict[str, Any]:
    """`[width in, width out]`, as `reference.trace` takes them: a Linear holds the transpose."""
    given: dict[str, Any] = {}
    for short, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "out_proj")):
        linear = getattr(module, name)
        given[short] = _numbers(linear.weight).T
        if linear.bias is not None:
            given[f"{short}_bias"] = _numbers(linear.bias)
    return given


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


def _tokens(folder: Path, text: str, most: int) -> tuple[list[int], tuple[str, ...]]:
    from regard.cli.folders import tokenizer_in

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json")
    tokenizer = tokenizer_in(file)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = tokenizer.encode(terminal.readable(text))
    if len(found.ids) > most:
        raise ValueError(f"the text has {len(found.ids)} tokens; expected at most {most}")
    return list(found.ids), tuple(found.tokens)
