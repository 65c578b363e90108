"""What `import regard` loads, offers and leaves alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard

HEAVY = ("triton", "transformers", "matplotlib", "torch._dynamo", "sympy")


def python(code: str) -> str:
    """What `code` prints in an interpreter of its own, where nothing is loaded yet and a warning is an error."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", regard.__version__)


def test_the_installed_version_is_the_one_in_the_source() -> None:
    from importlib.metadata import version

    assert version("regard") == regard.__version__


def test_importing_regard_loads_nothing_heavy() -> None:
    code = f"import sys, regard; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(code) == "[]"


def test_an_attention_call_loads_nothing_heavy_either() -> None:
    code = f"""
import sys, torch, regard
tokens = torch.randn(1, 3, 5, 7)
regard.attention(tokens, tokens, tokens, mask=regard.masks.causal())
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code) == "[]"


def test_the_reference_works_without_torch() -> None:
    code = """
import sys
from regard import reference
print(reference.softmax([2.3, 9.1, 0.5]).round(5).tolist(), "torch" in sys.modules)
"""
    assert python(code) == "[0.00111, 0.9987, 0.00018] False"


def test_every_listed_name_can_be_had() -> None:
    assert set(regard.__all__) <= set(dir(regard))
    for name in regard.__all__:
        assert getattr(regard, name) is not None


@pytest.mark.parametrize("name", ["attention", "observe", "explain", "Want", "Plan", "Refused", "masks", "nn"])
def test_the_public_names_are_listed(name: str) -> None:
    assert name in dir(regard)


def test_a_name_that_does_not_exist_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="regard.*no attribute 'atention'"):
        _ = regard.atention  # type: ignore[attr-defined]


def test_private_helpers_are_not_listed() -> None:
    assert [name for name in dir(regard) if name.startswith("_") and not name.startswith("__")] == []


def test_there_is_one_logger_and_it_is_silent_by_default() -> None:
    code = """
import logging, torch, regard
regard.attention(*(torch.randn(1, 1, 3, 5) for _ in range(3)))
names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "regard"]
print(names, logging.root.handlers)
"""
    assert python(code) in ("['regard'] []", "[] []")


def test_nothing_tells_people_to_install_regard_from_an_index_that_has_it_not() -> None:
    root = Path(__file__).parent.parent
    texts = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]
    assert [str(text) for text in texts if re.search(r"pip install '?regard\b", text.read_text(encoding="utf-8"))] == []
