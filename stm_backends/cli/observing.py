"""The observer that commands report to, which the environment names."""

from __future__ import annotations

import os
from typing import Final

from stm_backends.sealing.naming import named_object
from stm_backends.telemetry.observer import SILENT, Observer

OBSERVER_VARIABLE: Final = "STM_BACKENDS_OBSERVER"


def observer() -> Observer:
    """Return the object `MODULE:OBJECT` that `STM_BACKENDS_OBSERVER` names; without it, a silent observer.

    Raises `ConfigurationError` if there is no such object, or it is not an `Observer`.
    """
    name = os.environ.get(OBSERVER_VARIABLE)
    return named_object(OBSERVER_VARIABLE, name, Observer) if name else SILENT
