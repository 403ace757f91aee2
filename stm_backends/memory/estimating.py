"""A user's token estimator, whose failures cost accuracy and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Final

from stm_backends import logs
from stm_backends.handed_in import PASSED, Misbehaved, Report, WrongType, ignore
from stm_backends.tokens import default_token_estimator
from stm_backends.types import ShortTermMemoryConfig, as_config

_MOST: Final = 2**63
"""More tokens than any text has, so that such an answer is a mistake."""


class GuardedEstimator:
    """A user's estimator that never raises: for a text that it fails for, the default estimate is used.

    Anything but a finite number that is not negative is a failure. `failed` is told of each.
    """

    def __init__(self, estimate: Callable[[str], object], failed: Report) -> None:
        self.estimate: Final = estimate.estimate if isinstance(estimate, GuardedEstimator) else estimate
        self._failed: Final = failed

    def __call__(self, text: str) -> int:
        try:
            return _count(self.estimate(text))
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001 -- a user's function may raise anything
            logs.failed("the token estimator failed (%s); the default estimate is used", error)
            self._failed("token_estimator", error)
            return default_token_estimator(text)


def _count(answer: object) -> int:
    if isinstance(answer, bool) or not isinstance(answer, Real):
        raise WrongType("the token estimator", answer, "a number")
    number = float(answer)
    if not 0 <= number <= _MOST:
        raise Misbehaved("the token estimator returned a number that counts no tokens")
    return math.ceil(number)


def checked_config(config: object | None, failed: Report = ignore) -> ShortTermMemoryConfig:
    """Return `as_config(config)` with a guarded estimator, if it has one."""
    checked = as_config(config)
    if checked.token_estimator is not None:
        checked.token_estimator = GuardedEstimator(checked.token_estimator, failed)
    return checked
