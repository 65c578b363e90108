"""Every package refuses a number in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regard import bias, cache, cost, edits, lab, linear, models, nn, positions, sparse

TAKES: list[tuple[str, Callable[[Any], Any]]] = [
    ("num_heads", bias.alibi),
    ("capacity", cache.KVCache),
    ("batch", lambda n: cost.of("gpt2", batch=n)),
    ("budget", lambda n: edits.keep("recent", budget=n)),
    ("tokens", lambda n: lab.permutation(tokens=n)),
    ("count", lambda n: linear.RandomFeatures(5, n)),
    ("num_layers", lambda n: models.config("gpt2", num_layers=n)),
    ("embed_dim", lambda n: nn.MultiHeadAttention(n, 1)),
    ("length", lambda n: positions.LearnedPositions(n, 5)),
    ("stride", sparse.strided),
]


@pytest.mark.parametrize(("name", "take"), TAKES, ids=[name for name, _ in TAKES])
def test_what_is_no_count_is_refused_in_the_same_words(name: str, take: Callable[[Any], Any]) -> None:
    for given, kind in ((2.5, "float"), ("3", "str"), (True, "bool")):
        with pytest.raises(TypeError) as refused:
            take(given)
        assert str(refused.value) == f"{name} must be an int, got {given!r} ({kind})"
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got -3$"):
        take(-3)


def test_a_number_of_numpy_is_taken_where_nothing_is_saved_and_refused_in_a_configuration() -> None:
    assert nn.MultiHeadAttention(np.int64(6), 3).embed_dim == 6
    with pytest.raises(TypeError, match="num_layers must be an int"):
        models.config("gpt2", num_layers=np.int64(3))
