"""Models whose cross attention is easily taken for self attention: told apart, with the padding of the right side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.watching.zoo.run import built
from torch import Tensor, nn

import regard

TOKENS = 13
IDS = torch.randint(5, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
SOURCE = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])


@contextmanager
def eager_weights(model: nn.Module, names: tuple[str, ...]) -> Iterator[list[tuple[str, Tensor]]]:
    """What the model's own modules give as their weights, in the order in which they run."""
    found: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, args, out, name=name: found.append((name, out[1])))
        for name, module in model.named_modules()
        if any(part in names for part in name.split(".")[-2:]) and hasattr(module, "k_proj")
    ]
    yield found
    for handle in handles:
        handle.remove()


def compared(model: Any, names: tuple[str, ...], **inputs: Any) -> list[Any]:
    """The recorded calls, after their weights were compared with those of the eager model."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        with eager_weights(model, names) as expected:
            model(**inputs)
        model.set_attn_implementation("sdpa")
        with regard.watch(model, want=regard.Want(weights="all")) as recording:
            model(**inputs)
    assert recording.missed == [] and [call.path for call in recording] == [name for name, _ in expected]
    for call, (_, weights) in zip(recording, expected, strict=True):
        missing = call.entropy.isnan()
        torch.testing.assert_close(call.weights, weights.masked_fill(missing.unsqueeze(-1), 0.0), rtol=0, atol=2e-6)
    return list(recording)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokens", [7, TOKENS])  # as many as the source has, too
@pytest.mark.parametrize("padded", [False, True])
def test_dia_with_a_padded_source_hides_no_query_of_the_decoder(tokens: int, padded: bool) -> None:
    target = torch.ones(2, tokens, dtype=torch.bool)
    target[0, :2] = not padded
    inputs = {"decoder_attention_mask": target.long()} if padded else {}
    spoken = IDS[:, :tokens, None] + torch.arange(3)
    calls = compared(
        built("dia"), ("self_attention", "cross_attention"),
        input_ids=IDS, attention_mask=SOURCE.long(), decoder_input_ids=spoken, **inputs,
    )  # fmt: skip
    assert [call.kind for call in calls] == ["self", "self", "self", "cross", "self", "cross"]
    for call in calls:
        real = SOURCE if call.path.startswith("encoder") else target
        assert torch.equal(~call.entropy.isnan(), real[:, None].expand_as(call.entropy)), call


@pytest.mark.filterwarnings("ignore")
def test_blt_with_padding_hides_bytes_and_no_patches() -> None:
    calls = compared(
        built("blt"), ("self_attn", "cross_attn_layers"), input_ids=IDS, attention_mask=SOURCE.long()
    )  # fmt: skip
    assert {call.kind for call in calls if "cross" in call.path} == {"cross"}
    assert {call.kind for call in calls if "self" in call.path} == {"self"}
    for call in calls:
        of_bytes = call.path.startswith("local") and call.queries == TOKENS  # the patcher is handed no mask
        real = SOURCE if of_bytes else torch.ones(2, call.queries, dtype=torch.bool)
        if call.kind == "cross" and call.keys == TOKENS:
            real[:, -2:] = False  # the last patch, which asks twice, has no bytes to look at
        assert torch.equal(~call.entropy.isnan(), real[:, None].expand_as(call.entropy)), call
