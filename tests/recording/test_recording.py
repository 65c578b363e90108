"""Recordings: selection, tokens, dicts, the summary, and the names of planted heads."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard
from regard.recording import THRESHOLDS

HEADS = ("first-token", "previous-token", "local", "broad", "")


class Planted(nn.Module):
    """Five heads over 63 tokens, whose logits are written by hand: keys are one-hot positions, so q·k is any table."""

    def __init__(self, causal: bool, length: int = 63, before: int = 0) -> None:
        super().__init__()
        i, j = torch.arange(length)[:, None], torch.arange(length)
        far = (i - j).abs()
        torch.manual_seed(1)
        tables = [
            9.0 * (j == before).expand(length, length),
            9.0 * (j == i - 1),
            -1.0 * far,
            torch.zeros(length, length),
            6.0 * torch.randn(length, length),
        ]
        self.causal, self.length, self.before = causal, length, before
        self.tables = torch.stack([table.float() for table in tables])

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.eye(self.length).expand(1, 5, -1, -1)
        i, j = torch.arange(self.length)[:, None], torch.arange(self.length)
        permitted = (j <= i if self.causal else torch.ones(self.length, self.length).bool()) & (j >= self.before)
        return F.scaled_dot_product_attention(self.tables[None], keys, keys, attn_mask=permitted, scale=1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_planted_heads_get_their_names(causal: bool, before: int) -> None:
    model = Planted(causal, before=before)
    with regard.watch(model) as recording:
        model(torch.zeros(1))
    assert [row["label"] for row in recording.described(recording.calls[0])] == list(HEADS)
    (row,) = recording.summary().rows
    assert row["heads"] == {"first-token": [0], "previous-token": [1], "local": [2], "broad": [3]}


def test_a_head_that_looks_at_the_next_token_is_not_a_previous_token_head() -> None:
    model = Planted(causal=False)
    model.tables[1] = model.tables[1].mT.clone()
    with regard.watch(model) as recording:
        model(torch.zeros(1))
    assert recording.described(recording.calls[0])[1]["label"] == "local"


def test_the_names_rest_on_numbers_that_are_exact() -> None:
    model = Planted(causal=True)
    with regard.watch(model, want=regard.Want.all()) as recording:
        model(torch.zeros(1))
    (call,) = recording
    weights = call.weights[0].double()
    rows = recording.described(call)
    i = torch.arange(63)
    for row, p in zip(rows, weights, strict=True):
        assert row["first"] == pytest.approx(float(p[:, 0].sum() / 63), abs=1e-6)
        assert row["near"] == pytest.approx(float(p[(i[:, None] - i).abs() <= 7].sum() / 63), abs=1e-6)
        assert row["spread"] == pytest.approx(float(row["entropy"] * 63 / (i + 1).log().sum()), abs=1e-6)
    assert rows[1]["previous"] == pytest.approx(float(weights[1, i[1:], i[:-1]].sum() / 63), abs=1e-6)


def test_the_summary_prints_its_thresholds_and_survives_any_token() -> None:
    model = Stack(ByHand(), ByHand(is_causal=True))
    tokens = ["[bold]", "\x1b[31m", "\n", "", " the", "[/]", "\udc80", "a" * 300, "�", "]", "["]
    with regard.watch(model, tokens=tokens) as recording:
        model(torch.randn(2, 11, 21))
    text = str(recording.summary())
    assert "at least 50% of the weight on the first key seen" in " ".join(text.split())
    assert "\x1b" not in text
    assert "layers.1" in text
    assert recording.summary().thresholds == THRESHOLDS
    assert str(recording.summary("zh")).splitlines()[0] == str(recording.summary()).splitlines()[0]
    assert recording.summary("zh").rows == recording.summary().rows


@pytest.mark.parametrize("columns", [56, 80, 109, 110, 120, 163])
def test_the_summary_loses_no_word_at_any_width(columns: int) -> None:
    model = Planted(causal=True)
    with regard.watch(model, tokens=[f"word{i}" for i in range(63)]) as recording:
        model(torch.zeros(1))
    text = io.StringIO()
    Console(file=text, width=columns).print(recording.summary())
    assert max(map(len, text.getvalue().splitlines())) <= columns
    (row,) = recording.summary().rows
    words = [*THRESHOLDS.split(), "distance", "(self)", *(f"{name}:" for name in row["heads"])]
    assert len(row["heads"]) == 4 and set(words) <= set(text.getvalue().split())


def test_what_was_not_recorded_is_absent_from_the_summary_and_not_zero() -> None:
    model = ByHand()
    with regard.watch(model, want=regard.Want.none()) as recording:
        model(torch.randn(2, 11, 21))
    (row,) = recording.summary().rows
    assert (row["entropy"], row["first"], row["distance"], row["most_attended"]) == (None, None, None, [])
    assert "–" in str(recording.summary())


def test_the_most_attended_tokens_are_added_up_over_their_places() -> None:
    model = Planted(causal=False)
    with regard.watch(model, heads=[0], tokens=["a", *("b" for _ in range(62))]) as recording:
        model(torch.zeros(1))
    (row,) = recording.summary().rows
    shares = dict(row["most_attended"])
    assert shares["a"] + shares["b"] == pytest.approx(1.0, abs=1e-6)


def test_a_share_below_one_percent_is_no_zero_in_the_summary() -> None:
    model = Planted(causal=False)
    with regard.watch(model, heads=[0], want=regard.Want.none().but(key_mass=True)) as recording:
        model(torch.zeros(1))
    mass = recording.calls[0].parts["key_mass"]
    mass[...] = 1.0
    mass[..., 40] = 0.0
    recording.tokens = [*("a" for _ in range(40)), "rare", *("b" for _ in range(22))]
    mass[..., 40] = mass.sum() / 250
    assert "rare 0.40%" in str(recording.summary()) and re.search(r"\ba 64%", str(recording.summary()))


@pytest.mark.parametrize(("poisoned", "heads"), [("key", 1), ("key", 3), ("value", 1)])
def test_heads_with_nan_are_left_out_of_the_summary_which_says_so(poisoned: str, heads: int) -> None:
    class Given(nn.Module):
        num_heads = 3

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    q, k, v = torch.randn(3, 1, 3, 7, 10).unbind()
    (k if poisoned == "key" else v)[:, :heads, 2] = torch.nan
    with regard.watch(model := Given(), want=regard.Want(value_mass=True)) as recording:
        model(q, k, v)
    (call,) = recording
    (row,) = recording.summary().rows
    received = call.key_mass[0, heads if poisoned == "key" else 0 :].sum(0)
    best = (received / received.sum()).topk(3).values.tolist() if heads < 3 else []
    assert [share for _, share in row["most_attended"]] == pytest.approx(best)
    carried = call.value_mass[0, heads:]
    share = (carried[:, 0] / carried.sum(-1)).mean().item() if heads < 3 else None
    assert row["first_value"] == (None if share is None else pytest.approx(share))
    assert "1 calls have heads with NaN" in str(recording.summary())
    assert not any(
        "nan%" in page for page in (str(recording.summary()), str(recording.summary("zh")), recording.to_html())
    )


def test_selection_by_number_path_call_and_item() -> None:
    model = Stack(ByHand(), ByHand())
    with regard.watch(model, tokens=[["x"] * 11, ["y"] * 11]) as recording:
        model(torch.randn(2, 11, 21))
        model(torch.randn(2, 7, 21))
    torch.testing.assert_close(recording[1, 2].entropy, recording.calls[1].entropy[0, 2])
    torch.testing.assert_close(recording["layers.1", 2].entropy, recording[-1, 2].entropy)
    assert recording[1, 2, -1].entropy.shape == (7,)
    other = recording.select(1, 2, item=1)
    assert other.key_tokens == ["y"] * 11
    assert other.map.shape == (11, 11)
    with pytest.raises(IndexError, match="layer 2 was not seen; there are 2"):
        recording[2, 0]
    with pytest.raises(KeyError, match="no layer 'nowhere' was seen; the layers are layers.0, layers.1"):
        recording["nowhere", 0]
    with pytest.raises(IndexError, match="has 2 recorded calls; there is no call 2"):
        recording[0, 0, 2]
    with pytest.raises(IndexError, match="head 3 of layers.0 was not recorded; there are heads 0 … 2"):
        recording[0, 3]
    with pytest.raises(IndexError, match="item 2 of the batch was not recorded"):
        recording.select(0, 0, item=2)
    with pytest.raises(TypeError, match=r"recording\[layer, head\]"):
        recording[0]  # type: ignore[index]


@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1)])
def test_numbers_of_other_libraries_select_as_python_does(one: Any) -> None:
    model = Stack(ByHand(), ByHand())
    with regard.watch(model, want=regard.Want(scores=True)) as recording:
        model(torch.randn(2, 11, 21))
    assert recording.at(one) == recording.at(1)
    torch.testing.assert_close(recording[one, one].lse, recording[1, 1].lse)
    assert recording.scores(queries=slice(one, None)).rows == recording.scores(queries=slice(1, None)).rows


def test_tokens_are_checked() -> None:
    recording = regard.Recording()
    recording.tokens = ["a", "b"]
    assert recording.tokens == [["a", "b"]]
    with pytest.raises(TypeError, match="one string: split it"):
        recording.tokens = "a b"
    with pytest.raises(TypeError, match="tokens must be a list of strings"):
        recording.tokens = [["a"], [3]]  # type: ignore[list-item]
    for given in (5, [1, 2]):
        with pytest.raises(TypeError, match="tokens must be a list of strings, .*got (int|list of other things)"):
            recording.tokens = given  # type: ignore[assignment]


def test_source_tokens_name_what_an_encoder_and_cross_attention_look_at() -> None:
    model = nn.Transformer(24, 4, 1, 1, 31, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, tokens=list("abcde")) as recording:
        model(torch.randn(1, 7, 24), torch.randn(1, 5, 24))
    recording.source_tokens = list("tuvwxyz")
    assert recording["encoder.layers.0.self_attn", 0].query_tokens == list("tuvwxyz")
    assert recording["decoder.layers.0.self_attn", 0].key_tokens == list("abcde")
    cross = recording["decoder.layers.0.multihead_attn", 0]
    assert (cross.query_tokens, cross.key_tokens) == (list("abcde"), list("tuvwxyz"))


def test_dicts_have_one_row_a_call_item_and_head_with_plain_values() -> None:
    model = Stack(ByHand(), ByHand())
    with regard.watch(model) as recording:
        model(torch.randn(2, 11, 21))
    rows = recording.to_dicts()
    assert len(rows) == 2 * 2 * 3
    assert all(isinstance(value, (int, float, str)) for row in rows for value in row.values())
    assert {(row["layer"], row["item"], row["head"]) for row in rows} == {
        (layer, item, head) for layer in range(2) for item in range(2) for head in range(3)
    }


@pytest.mark.parametrize(
    ("kind", "layer", "head"),
    [(None, None, None), (None, 1, None), (None, 1, 2), ("entropy", 0, None), ("keys", 0, None), ("keys", 1, 1)],
)
def test_every_plot_is_drawn_with_any_tokens(kind: str | None, layer: int | None, head: int | None) -> None:
    import io

    model = Stack(ByHand(), ByHand(is_causal=True))
    tokens = ["$x^", "\\frac{", "_", "", "[CLS]", "\n", *"abcde"]
    with regard.watch(model, tokens=tokens) as recording:
        model(torch.randn(2, 11, 21))
    picture = io.BytesIO()
    recording.plot(kind, layer=layer, head=head).savefig(picture, format="png")
    assert picture.getvalue()[:4] == b"\x89PNG"


def test_plots_refuse_what_they_cannot_draw() -> None:
    recording = regard.Recording()
    with pytest.raises(ValueError, match="the recording is empty"):
        recording.plot()
    with pytest.raises(ValueError, match="kind must be one of map, entropy, keys, got 'pie'"):
        recording.plot("pie")
    model = ByHand()
    with regard.watch(model) as recording:
        model(torch.randn(2, 11, 21))
    for given, complaint in (
        ({"layer": 1.5}, "layer must be its number or its module's path, got 1.5"),
        ({"layer": 0, "call": 9}, "layer 0 has 1 recorded calls; there is no call 9"),
        ({"item": 9}, "item 9 of the batch was not recorded; there are 2"),
        ({"kind": "entropy", "layer": 0, "item": 9}, "item 9 of the batch was not recorded; there are 2"),
        ({"kind": "entropy", "layer": 0, "head": 99}, "head 99 of .* was not recorded"),
        ({"kind": "entropy", "head": 1}, "head= needs a layer"),
        ({"kind": "entropy", "call": 1}, "call= needs a layer"),
        ({"lang": "fr"}, "lang is 'fr'; expected one of en, zh"),
    ):
        with pytest.raises((TypeError, ValueError, IndexError), match=complaint):
            recording.plot(**given)  # type: ignore[arg-type]


def test_an_entropy_plot_of_one_head_draws_that_head() -> None:
    model = ByHand()
    with regard.watch(model) as recording:
        model(torch.randn(2, 11, 21))
    (axes,) = recording.plot("entropy", layer=0, head=1, item=1).axes
    drawn = torch.as_tensor(axes.lines[0].get_ydata())
    assert len(axes.lines) == 2 and torch.equal(drawn, recording.select(0, 1, item=1).entropy)


def test_wrong_arguments_are_named() -> None:
    model = ByHand()
    with regard.watch(model, want=regard.Want(scores=True, key_mass=True)) as recording:
        model(torch.randn(2, 11, 21))
    weights = torch.softmax(torch.randn(1, 2, 3, 3), -1)
    calls: tuple[tuple[Any, str], ...] = (
        (lambda: recording.save(None), "path must be a path, as text or a pathlib.Path, got None"),
        (lambda: regard.Recording.load(3), "path must be a path, as text or a pathlib.Path, got 3"),
        (lambda: recording.to_html(against="a.regard"), "against must be a Recording, .*got str"),
        (lambda: recording.summary("fr"), "lang is 'fr'; expected one of en, zh"),
        (lambda: recording.notes("fr"), "lang is 'fr'; expected one of en, zh"),
        (lambda: recording.at(None), "layer must be its number or its module's path, got None"),
        (lambda: recording[0, 1].top_tokens("x"), "count must be an int, got 'x'"),
        (lambda: recording.scores(queries=slice("a", None)), "must be a slice of rows, .*got slice"),
        (lambda: recording.scores(queries=3), "must be a slice of rows, .*got 3"),
        (lambda: recording.scores().best("next", -1), "count must be at least 1, got -1"),
        (lambda: recording.add(weights, query_offset="x"), "query_offset must be an int, got 'x'"),
        (lambda: recording.tokens_from("bert", torch.zeros(1, 3)), "tokenizer must have decode .*got str"),
    )
    for call, complaint in calls:
        with pytest.raises((TypeError, ValueError), match=complaint):
            call()


def test_statistics_left_on_a_device_are_moved_for_everything_that_shows_them(tmp_path: Path) -> None:
    model = ByHand()
    with regard.watch(model, keep_on_cpu=False) as recording:
        model(torch.randn(2, 11, 21))
    assert recording.cpu() is recording
    # no second device here: one whose name is another stands for it
    there = recording.calls[0]
    there.parts = {name: OnDevice(part) for name, part in there.parts.items()}  # type: ignore[misc]
    moved = recording.cpu()
    assert moved is not recording
    assert all(type(part) is Tensor for part in moved.calls[0].parts.values())
    assert "(root)" in str(recording.summary()) and "(root)" in recording.to_html()
    recording.save(tmp_path / "run.regard")
    recording.plot(layer=0)


class OnDevice:
    """A tensor that says it is elsewhere, and only lets itself be moved or measured."""

    device = torch.device("meta")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.nbytes = tensor, tensor.shape, tensor.nbytes

    def cpu(self) -> Tensor:
        return self.tensor

    def detach(self) -> OnDevice:
        return self


class Few:
    """A tokenizer with fewer words than its model has ids."""

    def decode(self, ids: list[int]) -> str:
        return "cat" if ids == [3] else ""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [None for _ in ids]


def test_an_id_that_the_tokenizer_has_no_word_for_keeps_its_number() -> None:
    recording = regard.Recording()
    recording.tokens_from(Few(), torch.tensor([[3, 7]]))
    assert recording.tokens == [["cat", "<id 7>"]]


class Bytes:
    """A tokenizer of single bytes, which reads and writes UTF-8 and names each byte by a letter of its own."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(0x100 + one) for one in ids]


def test_tokens_that_are_parts_of_a_character_are_named_by_it() -> None:
    recording = regard.Recording()
    recording.tokens_from(Bytes(), torch.tensor([list("a猫é🐱".encode())]))
    assert recording.tokens == [["a", "猫₁", "猫₂", "猫₃", "é₁", "é₂", "🐱₁", "🐱₂", "🐱₃", "🐱₄"]]
    # parts without the rest, and a sign that stands for such parts in the text itself, keep the tokenizer's names
    cut = [*"猫".encode()[1:], *b"b", *"猫".encode()[:2]]
    recording.tokens_from(Bytes(), torch.tensor([cut, [0xEF, 0xBF, 0xBD, 0x61, 0x62]]))
    names = [[chr(0x100 + one) for one in row] for row in ([0x8C, 0xAB, 0xE7, 0x8C], [0xEF, 0xBF, 0xBD])]
    assert recording.tokens == [[*names[0][:2], "b", *names[0][2:]], [*names[1], "a", "b"]]


def test_many_parts_of_characters_take_no_more_than_linear_time() -> None:
    class Counted(Bytes):
        calls = 0

        def decode(self, ids: list[int]) -> str:
            Counted.calls += 1
            return super().decode(ids)

    recording = regard.Recording()
    recording.tokens_from(Counted(), torch.full((1, 501), 0x80))
    assert Counted.calls <= 12 * 501 + 1 and recording.tokens == [[chr(0x180)] * 501]
