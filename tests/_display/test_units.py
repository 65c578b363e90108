"""Numbers as tables print them: short, and never with an exponent where a larger unit exists."""

from __future__ import annotations

import pytest

from regard._display.units import seconds


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (0.0, "0 ns"),
        (3.2e-7, "320 ns"),
        (0.0106, "10.6 ms"),
        (0.9997, "1 s"),
        (104.0, "104 s"),
        (999.6, "16.7 min"),
        (2070.0, "34.5 min"),
        (82_800.0, "23 h"),
        (86_400.0 * 1204, "1 204 days"),
    ],
)
def test_a_time_is_written_in_the_unit_that_keeps_it_short(time: float, text: str) -> None:
    assert seconds(time) == text
