"""How much of what repeats is in every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(count: int, values: Iterable[object]) -> list[Any]:
    """Return parameters of which the first `count` are in every run, and the others in the full run only."""
    return [
        pytest.param(value, marks=() if place < count else pytest.mark.full)
        for place, value in enumerate(values)
    ]
