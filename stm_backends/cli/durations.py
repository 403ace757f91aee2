"""Durations as people write them: `90d`, `12h`, `30m`."""

from __future__ import annotations

import re
from typing import Final

from stm_backends.cli.render import plain
from stm_backends.drivers.checks import require_seconds
from stm_backends.errors import ConfigurationError

SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
"""The units, in seconds."""

SPELLING: Final = "a number and a unit, s, m, h, d or w, as in 90d, 12h or 30m"

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")


def seconds(option: str, text: str) -> float:
    """Return a duration in seconds. Raises `ConfigurationError`, naming the option, for any other text.

    A number without a unit is refused: days that are read as seconds would remove nearly everything.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{option} is {SPELLING}; not {plain(text[:40])!r}")
    duration = float(found[1]) * SECONDS[found[2]]
    require_seconds(option, duration)
    return duration


def optional(option: str, text: str | None) -> float | None:
    """Return a duration in seconds, or `None` if the option was not given."""
    return None if text is None else seconds(option, text)
