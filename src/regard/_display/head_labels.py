"""What a head is called, by printed thresholds: in summaries, and on the page, which needs no torch."""

from __future__ import annotations

from typing import Any

# The first that is reached names the head, in this order.
RULES: tuple[tuple[str, str, float], ...] = (
    # name, statistic, least value
    ("first", "first", 0.5),
    ("previous", "previous", 0.5),
    ("next", "next", 0.5),
    ("same", "same", 0.5),
    ("induction", "induction", 0.3),
    ("duplicate", "duplicate", 0.3),
    ("local", "near", 0.8),
    ("broad", "spread", 0.8),
)
LOCAL_KEYS = 32  # in fewer keys than this everything is near
NEAR_BUCKETS = 4  # distances 0 … 7


def label(row: dict[str, Any], keys: int) -> str:
    """The first rule that the numbers of a head reach, which it is called by; empty where they reach none."""
    if keys < 2:
        return ""
    for name, statistic, least in RULES:
        value = row.get(statistic)
        if value is not None and value >= least and (name != "local" or keys >= LOCAL_KEYS):
            return name
    return ""
