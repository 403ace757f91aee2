"""A user's token estimator, whose failures cost only accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from stm_backends.guarded import Guarded
from stm_backends.handed_in import Misbehaved, Report, ignore, number
from stm_backends.tokens import TokenEstimator, default_token_estimator
from stm_backends.types import ShortTermMemoryConfig, as_config

_MOST: Final = 2**63
"""No text has this many tokens, so a larger answer is a mistake."""


def guarded_estimator(estimate: Callable[[str], object], failed: Report) -> TokenEstimator:
    """Return an estimator that never raises: if it fails for a text, the default estimate is used.

    Anything but a finite number that is not negative is a failure. `failed` receives each.
    """
    return Guarded(
        estimate,
        default_token_estimator,
        _count,
        name="token_estimator",
        warning="the token estimator failed (%s); the default estimate is used",
        failed=failed,
    )


def _count(answer: object) -> int:
    if not 0 <= (found := number("the token estimator", answer)) <= _MOST:
        raise Misbehaved("the token estimator returned a number that is not a count of tokens")
    return math.ceil(found)


def checked_config(config: object | None, failed: Report = ignore) -> ShortTermMemoryConfig:
    """Return `as_config(config)` with a guarded estimator, if it has one."""
    checked = as_config(config)
    if checked.token_estimator is not None:
        checked.token_estimator = guarded_estimator(checked.token_estimator, failed)
    return checked
