"""Outcomes of asking for memory."""

from __future__ import annotations

from enum import Enum


class Fit(Enum):
    """Answer to "does it fit?"."""

    OK = "ok"
    LATER = "later"
    """Not now; it can once others finish."""
    NEVER = "never"
    """Larger than the whole memory."""
