"""What the page is given: characters of planted heads, how much a file takes, and numbers that stay what they were."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.browser.recordings import call_of, recording_of, sentence

from regard._display import head_labels
from regard._page._pack import pack
from regard._page._scenes import Texts, scenes
from regard.recording import Recorded, Recording, Site

HIGH = 12.0


def planted(keys: dict[int, int] | None, length: int, everywhere: float = 0.0) -> torch.Tensor:
    """Logits [query, key] that put nearly all of a query's weight on one key."""
    logits = torch.full((length, length), everywhere, dtype=torch.float64)
    for query, key in (keys or {}).items():
        logits[query, key] = HIGH
    return logits


def repeated(length: int) -> list[str]:
    """A text whose second half repeats the first."""
    half = [f"w{at}" for at in range(length // 2)]
    return half + half


LENGTH = 46
HALF = LENGTH // 2
HEADS: dict[str, tuple[dict[int, int] | None, bool]] = {
    # name: (which key each query looks at, causal)
    "first": (dict.fromkeys(range(LENGTH), 0), True),
    "previous": ({q: max(0, q - 1) for q in range(LENGTH)}, True),
    "next": ({q: min(LENGTH - 1, q + 1) for q in range(LENGTH)}, False),
    "same": ({q: q for q in range(LENGTH)}, True),
    "duplicate": ({q: q - HALF if q >= HALF else q // 2 for q in range(LENGTH)}, True),
    "induction": ({q: q - HALF + 1 if q >= HALF else q // 2 for q in range(LENGTH)}, True),
    "local": ({q: q - 3 - q % 4 if q >= 7 else q // 2 for q in range(LENGTH)}, True),
    "broad": (None, True),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_planted_head_gets_its_name(name: str) -> None:
    keys, causal = HEADS[name]
    tokens = repeated(LENGTH) if name in ("duplicate", "induction") else [f"w{at}" for at in range(LENGTH)]
    recording = recording_of([call_of(planted(keys, LENGTH)[None, None], 0, causal=causal)], tokens)
    (row,) = scenes(recording, Texts())[0][0].layers[0].rows
    assert row["label"] == name


def test_a_head_just_below_every_threshold_has_no_name() -> None:
    rows: dict[str, Any] = {statistic: least - 0.01 for _, statistic, least in head_labels.RULES}
    assert head_labels.label(rows, 46) == ""
    for name, statistic, least in head_labels.RULES:
        assert head_labels.label({**rows, statistic: least}, 46) == name
    assert head_labels.label({**rows, "near": 0.95}, 31) == ""  # in a short text everything is near
    assert head_labels.label({**rows, "first": 1.0}, 1) == ""


def test_repeats_mean_nothing_in_a_text_that_repeats_nothing() -> None:
    recording = recording_of(
        [call_of(planted(HEADS["duplicate"][0], LENGTH)[None, None], 0, causal=True)],
        [f"w{at}" for at in range(LENGTH)],
    )
    (row,) = scenes(recording, Texts())[0][0].layers[0].rows
    assert row["duplicate"] is None and row["induction"] is None


def test_shares_are_those_of_the_whole_matrix() -> None:
    recording = sentence(layers=1, heads=2)
    weights = recording.calls[0].map[0].numpy().astype(np.float64)
    length = weights.shape[-1]
    for head, row in enumerate(scenes(recording, Texts())[0][0].layers[0].rows):
        own = weights[head]
        assert row["same"] == pytest.approx(np.trace(own) / length, abs=1e-6)
        assert row["first"] == pytest.approx(own[:, 0].sum() / length, abs=1e-6)
        assert row["entropy"] == pytest.approx(-(own * np.log(own)).sum() / length, abs=1e-5)
        assert row["previous"] <= np.trace(own, -1) / length + 1e-6


def test_a_head_without_any_entropy_has_none_in_place_of_zero() -> None:
    recording = sentence(layers=1, heads=3)
    for name in ("entropy", "max_weight"):
        recording.calls[0].parts[name][:, 1] = torch.nan  # as where every query is padding
        recording.calls[0].parts[name][:, 2, 3:] = torch.nan
    rows = scenes(recording, Texts())[0][0].layers[0].rows
    assert rows[1]["entropy"] is None and rows[1]["max_weight"] is None
    for name in ("entropy", "max_weight"):
        assert rows[2][name] == pytest.approx(float(recording.calls[0].parts[name][0, 2, :3].mean()))


def header(page: str) -> dict[str, Any]:
    data = re.search(r'id="regard-data">(.*?)</script>', page)
    assert data is not None
    raw = zlib.decompress(base64.b64decode(data[1]), -15)
    assert raw[:4] == b"RGD1"
    found: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack("<I", raw[4:8])[0]])
    return found


def random_recording(layers: int, heads: int, length: int) -> Recording:
    """Statistics drawn at random: nothing in them repeats, so nothing of them can be squeezed."""
    draw = torch.Generator().manual_seed(0)
    found = Recording("random")
    at = torch.arange(length)
    for layer in range(layers):
        site = Site(f"layers.{layer}", 0)
        found.sites.append(site)
        weights = torch.rand(1, heads, length, 8, generator=draw).pow(4).sort(-1, descending=True).values
        weights = weights / (weights.sum(-1, keepdim=True) * 1.5)
        keys = (torch.rand(1, heads, length, 8, generator=draw) * (at + 1)[:, None]).int()
        parts = {
            "lse": torch.zeros(1, heads, length),
            "entropy": torch.rand(1, heads, length, generator=draw),
            "max_weight": weights[..., 0].clone(),
            "key_mass": torch.rand(1, heads, length, generator=draw),
            "map": torch.rand(1, heads, min(64, length), min(64, length), generator=draw),
            "top_keys": keys,
            "top_weights": weights,
            "distance": torch.rand(1, heads, 32, generator=draw),
        }
        found.calls.append(
            Recorded(
                site=site,
                layer=layer,
                number=0,
                kind="self",
                phase="prefill",
                keys=length,
                heads=tuple(range(heads)),
                positions=torch.tensor([0]),
                permitted=(at + 1).int().view(1, 1, -1),
                parts=parts,
            )
        )
    found.tokens = [f" w{n % 977}" for n in range(length)]
    return found


@pytest.mark.parametrize(
    ("layers", "heads", "length", "most"), [(6, 12, 12, 400_000), (6, 12, 512, 2_000_000), (30, 9, 2048, 6_000_000)]
)
def test_files_stay_small_even_where_nothing_repeats(layers: int, heads: int, length: int, most: int) -> None:
    page = random_recording(layers, heads, length).to_html()
    assert len(page.encode()) < most
    top = header(page)["recordings"][0]["scenes"][0]["layers"][0]["top"]
    assert top["largest"] is True  # each query's largest weight is always there
    if length <= 512:
        assert top["floor"] == 0


def test_a_budget_is_kept_by_leaving_out_small_weights() -> None:
    recording = random_recording(4, 4, 512)
    full, small = pack([recording]), pack([recording], 60_000)
    assert len(small) <= 60_000 < len(full)


def test_calls_that_decode_are_one_layer_over_one_text() -> None:
    from tests.browser.recordings import generated

    recording, weights = generated(4, list("abcdefg"))
    (scene,), total = scenes(recording, Texts())
    assert total == 1
    assert [layer.queries for layer in scene.layers] == [7, 7]
    assert all(layer.is_exact and layer.sight == "causal" for layer in scene.layers)
    for layer, expected in zip(scene.layers, weights, strict=True):
        np.testing.assert_allclose(layer.map, expected, atol=1e-6)


def test_what_came_token_by_token_is_marked_and_a_prompt_that_was_read_in_parts_is_not() -> None:
    from tests.browser.recordings import generated

    def places(recording: Recording) -> list[int | None]:
        return [layer.generated for layer in scenes(recording, Texts())[0][0].layers]

    assert places(generated(4, list("abcdefg"))[0]) == [4, 4]
    assert places(sentence(layers=1, causal=True)) == [None]
    logits = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    parts = [call_of(logits[..., :4, :4], 0, causal=True), call_of(logits[..., 4:, :], 0, causal=True, number=1)]
    assert places(recording_of(parts, list("abcdefg"))) == [None]


def test_single_weights_of_a_picture_are_all_in_the_file_where_there_is_room() -> None:
    def is_exact(heads: int) -> bool:
        recording = sentence([f"{n}" for n in range(197)], layers=1, heads=heads, size=256)
        return bool(header(recording.to_html())["recordings"][0]["scenes"][0]["layers"][0]["map"]["exact"])

    assert is_exact(3) and not is_exact(31)


def test_maps_of_long_calls_that_continue_each_other_keep_their_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 101, 101, generator=draw, dtype=torch.float64)
    calls = [
        call_of(logits[..., :90, :90], 0, causal=True),
        *(call_of(logits[..., at : at + 1, : at + 1], 0, causal=True, number=at) for at in range(90, 101)),
    ]
    (scene,), _ = scenes(recording_of(calls, [f"w{n}" for n in range(101)]), Texts())
    grid = scene.layers[0].map
    assert grid is not None and grid.shape == (2, 64, 64) and not scene.layers[0].is_exact
    edges = np.arange(65) * 101 // 64
    pairs = np.diff(edges)[:, None] * np.diff(edges)[None, :]
    np.testing.assert_allclose((grid * pairs).sum((1, 2)), 101, rtol=1e-4)


def test_two_passes_are_two_texts_and_only_so_many_are_in_the_file() -> None:
    recording = sentence(batch=13)
    again = sentence(batch=13, seed=1)
    for call in again.calls:
        call.number = 1
    recording.calls += again.calls
    found = header(recording.to_html())["recordings"][0]
    assert (len(found["scenes"]), found["all_scenes"]) == (16, 26)


def test_a_page_is_a_string_that_shows_itself_and_prints_one_line(tmp_path: Path) -> None:
    recording = sentence()
    page = recording.to_html(tmp_path / "page.html")
    assert isinstance(page, str) and page == (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(repr(page)) < 100 and "a model" in repr(page)
    assert page._repr_html_().startswith("<div") and "srcdoc" in page._repr_html_()


def test_a_page_opens_where_it_is_asked_to_and_refuses_what_is_not_there() -> None:
    recording = sentence()
    assert header(recording.to_html(layer=-1, head=3, lang="zh"))["open"] == {"layer": 2, "head": 3, "lang": "zh"}
    with pytest.raises(IndexError, match="layer 3 was not seen; there are 3"):
        recording.to_html(layer=3)
    with pytest.raises(IndexError, match="head 9"):
        recording.to_html(layer=1, head=9)
    with pytest.raises(ValueError, match="lang is 'fr'; expected one of en, zh"):
        recording.to_html(lang="fr")


def test_show_opens_the_page_in_a_browser_outside_a_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    sentence().show(layer=1, head=2)
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert header((tmp_path / "page.html").read_text(encoding="utf-8"))["open"] == {"layer": 1, "head": 2}
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("webbrowser.open", lambda address: False)  # a machine without one says where the page is
    sentence().show()
    assert capsys.readouterr() == ("", f"no browser could be opened; open {tmp_path / 'page.html'} in one\n")


def test_show_displays_the_page_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    IPython = pytest.importorskip("IPython")
    shown: list[Any] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr("IPython.display.display", shown.append)
    recording = sentence()
    recording.show()
    assert shown == [recording.to_html()]
