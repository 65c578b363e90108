"""The conformance suite: the promises as checks, for any function with `regard.attention`'s signature.

from regard.testing import check
print(check(my_attention, rules=[3, 10]).table())
"""

from __future__ import annotations

from regard.testing import (
    _caching,
    _derivatives,
    _dropout,
    _invariance,
    _layouts,
    _masks,
    _numbers,
    _poison,
    _shapes,
    _variants,
    _watching,
)
from regard.testing._suite import check, numbers
from regard.testing.report import Report, Row

__all__ = ["Report", "Row", "check", "numbers"]

# Importing a file registers its checks.
RULE_FILES = (
    *(_masks, _poison, _shapes, _numbers, _layouts, _derivatives, _invariance, _caching, _variants, _dropout),
    _watching,
)
