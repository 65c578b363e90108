"""`python -m regard.cli` is the `regard` command."""

from __future__ import annotations

from regard.cli import main

main()
