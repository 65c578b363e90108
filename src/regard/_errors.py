"""Errors of the library's own; both kinds of bad input otherwise get plain TypeError and ValueError."""

from __future__ import annotations


class Refused(ValueError):
    """A backend that was named cannot do the call; the message says why and what to change."""
