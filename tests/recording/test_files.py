"""`.regard` files: round trips, and every kind of broken or hostile file refused in one sentence (rules 63-65)."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from tests import held_files
from tests.watching.models import ByHand, Stack

import regard
from regard.recording import Recording


@pytest.fixture
def recording() -> Recording:
    torch.manual_seed(0)
    model = Stack(ByHand(), ByHand(is_causal=True))
    tokens = ["[CLS]", "\n", "é", "\udc80", "<b>", '"', *"abcde"]
    with regard.watch(model, tokens=tokens, want=regard.Want.all()) as recording:
        model(torch.randn(2, 11, 21))
        model(torch.randn(2, 5, 21))
    recording.missed.append(("layers.7", "no reason"))
    recording.origin = {"model": "a/model", "text": "[CLS] …"}
    return recording


def contents(recording: Recording) -> Any:
    calls = [
        (call.site, call.layer, call.number, call.kind, call.phase, call.keys, call.heads, list(call.parts))
        for call in recording
    ]
    return recording.title, recording.sites, recording.tokens, recording.missed, recording.origin, calls


def test_a_recording_comes_back_as_it_was(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.regard"
    recording.save(path)
    loaded = Recording.load(path)
    assert contents(loaded) == contents(recording)
    for one, other in zip(loaded, recording, strict=True):
        for name, part in other.parts.items():
            assert torch.equal(getattr(one, name).nan_to_num(-7.0), part.nan_to_num(-7.0))
    assert str(loaded.summary()) == str(recording.summary())
    assert loaded.to_html() == recording.to_html()


def test_the_file_is_a_safetensors_file_and_an_empty_recording_is_one_too(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.regard"
    recording.save(path)
    tensors = safetensors.torch.load_file(path)
    torch.testing.assert_close(tensors["1.entropy"], recording.calls[1].entropy)
    Recording("empty").save(path)
    assert len(Recording.load(path)) == 0


def test_saving_is_atomic_and_leaves_nothing_behind(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.regard"
    recording.save(path)
    before = path.read_bytes()

    def full_disk(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        Recording("other").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HOSTILE: dict[str, tuple[Any, bytes]] = {
    "empty header": (b"", b""),
    "not JSON": (b"{nope", b""),
    "not UTF-8": (b'{"\xff": 1}', b""),
    "a list": ([], b""),
    "deep nesting": (b"[" * 200_000 + b"]" * 200_000, b""),
    "NaN": (b'{"__metadata__": NaN}', b""),
    "duplicate key": (b'{"a": {"dtype":"F32"}, "a": {"dtype":"F32"}}', b""),
    "huge integer": (b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "metadata not text": ({"__metadata__": {"regard": 3}}, b""),
    "no recording": ({"a": ENTRY}, b"1234"),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "PICKLE"}}, b"1234"),
    "huge shape": ({"a": {**ENTRY, "shape": [1 << 61, 1 << 61]}}, b"1234"),
    "negative shape": ({"a": {**ENTRY, "shape": [-1]}}, b"1234"),
    "boolean shape": ({"a": {**ENTRY, "shape": [True]}}, b"1234"),
    "float shape": ({"a": {**ENTRY, "shape": [1.0]}}, b"1234"),
    "past the end": ({"a": {**ENTRY, "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
    "overlap": ({"a": ENTRY, "b": ENTRY}, b"1234"),
    "gap": ({"a": {**ENTRY, "data_offsets": [4, 8]}}, b"12345678"),
    "too long": ({"a": ENTRY}, b"12345678"),
    "extra field": ({"a": {**ENTRY, "code": "import os"}}, b"1234"),
    "entry is a number": ({"a": 3}, b""),
    "inner duplicate": ({"__metadata__": {"regard": '{"version": 1, "version": 1}'}}, b""),
    "inner not a table": ({"__metadata__": {"regard": "[]"}}, b""),
    "other version": ({"__metadata__": {"regard": '{"version": 2}'}}, b""),
    "no fields": ({"__metadata__": {"regard": '{"version": 1}'}}, b""),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_file_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.regard", *HOSTILE[name])
    with pytest.raises(ValueError, match="is not a recording that can be read") as refused:
        Recording.load(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300 + len(str(path))


def test_a_header_that_claims_more_than_there_is_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.regard"
    for claimed in (1 << 63, (64 << 20) + 1, 100):
        path.write_bytes(claimed.to_bytes(8, "little") + b"{}")
        with pytest.raises(ValueError, match=f"its header claims {claimed} bytes"):
            Recording.load(path)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="too short"):
        Recording.load(path)
    path.write_text("<!doctype html>, a page that somebody takes for the recording")
    with pytest.raises(ValueError, match="it is no safetensors file"):
        Recording.load(path)


def test_a_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.regard"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="is not a recording"):
        Recording.load(path)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.regard cannot be read: No such file"):
        Recording.load(tmp_path / "none.regard")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        Recording.load(tmp_path)


def changed(recording: Recording, path: Path, change: Any) -> None:
    """Save the recording with its header or tensors changed."""
    recording.save(path)
    tensors, metadata = held_files.read(path)
    header = json.loads(metadata["regard"])
    change(header, tensors)
    held_files.write(path, tensors, {"regard": json.dumps(header)})


def set_call(**fields: Any) -> Any:
    return lambda header, tensors: header["calls"][0].update(fields)


def set_tensor(name: str, value: torch.Tensor) -> Any:
    return lambda header, tensors: tensors.update({f"0.{name}": value})


def without_keys(header: Any, tensors: Any, keys: int) -> None:
    """The first call without what would show how many keys there are."""
    for name in ("key_mass", "top_keys", "top_weights"):
        del tensors[f"0.{name}"]
        header["calls"][0]["parts"].remove(name)
    header["calls"][0]["keys"] = keys


def many_of_nothing(header: Any, tensors: Any) -> None:
    """A batch of a thousand million items, each without heads: no byte in the file."""
    for name in header["calls"][0]["parts"][1:]:
        del tensors[f"0.{name}"]
    header["calls"][0].update(parts=["lse"], heads=[])
    tensors["0.lse"] = torch.zeros(10**9, 0, 0)
    tensors["0.permitted"] = torch.zeros(1, 0, 0, dtype=torch.int32)


@pytest.mark.parametrize(
    "change",
    [
        set_call(layer=7),
        set_call(layer=-1),
        set_call(layer=True),
        set_call(keys=10),
        lambda header, tensors: without_keys(header, tensors, keys=0),
        lambda header, tensors: without_keys(header, tensors, keys=1 << 39),
        lambda header, tensors: many_of_nothing(header, tensors),
        set_call(heads=[0]),
        set_call(heads=[0, 1, 1]),
        set_call(heads="012"),
        set_call(kind="other"),
        set_call(phase=[]),
        set_call(parts=["lse", "code"]),
        set_call(parts=["entropy"]),
        set_call(parts=["lse", "lse"]),
        set_tensor("entropy", torch.zeros(2, 3, 10)),
        set_tensor("key_mass", torch.zeros(2, 3, 11, dtype=torch.int64)),
        set_tensor("top_keys", torch.full((2, 3, 11, 8), 11, dtype=torch.int32)),
        set_tensor("top_keys", torch.full((2, 3, 11, 8), -2, dtype=torch.int32)),
        set_tensor("top_weights", torch.zeros(2, 3, 11, 7)),
        set_tensor("distance", torch.zeros(2, 3, 31)),
        set_tensor("lse", torch.zeros(2, 3)),
        set_tensor("positions", torch.zeros(3, dtype=torch.int64)),
        set_tensor("positions", torch.full((1,), 1 << 60)),
        set_tensor("permitted", torch.zeros(1, 1, 7, dtype=torch.int32)),
        set_tensor("stowaway", torch.zeros(3)),
        lambda header, tensors: tensors.pop("1.lse"),
        lambda header, tensors: header.update(tokens=[["a", 3]]),
        lambda header, tensors: header.update(sites=[["a"]]),
        lambda header, tensors: header.update(missed=["a"]),
        lambda header, tensors: header.update(title=None),
        lambda header, tensors: header.update(origin=["model", "text"]),
        lambda header, tensors: header.update(origin={"model": "a"}),
        lambda header, tensors: header.update(origin={"model": "a", "text": 3}),
        lambda header, tensors: header.update(calls={}),
        lambda header, tensors: header.update(calls=[3]),
    ],
)
def test_a_file_whose_parts_disagree_is_refused(recording: Recording, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "bad.regard"
    changed(recording, path, change)
    with pytest.raises(ValueError, match="is not a recording that can be read"):
        Recording.load(path)


@hypothesis.given(st.binary(max_size=200))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_with_a_value_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.regard"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ValueError, match="is not a recording"):
        Recording.load(path)
