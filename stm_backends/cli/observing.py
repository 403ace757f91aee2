"""The observer that commands report to, which the environment names."""

from __future__ import annotations

import os
from typing import Final

import typer

from stm_backends.cli.outcome import FAILED, say_wrong
from stm_backends.sealing.naming import named_object
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer

OBSERVER_VARIABLE: Final = "STM_BACKENDS_OBSERVER"

_failures: Final = set[tuple[str, type[BaseException]]]()
"""The errors of the observer that this command has printed."""


def observer() -> Observer:
    """Return the object `MODULE:OBJECT` that `STM_BACKENDS_OBSERVER` names; without it, a silent observer.

    Its errors are printed and do not end the command. Raises `ConfigurationError` if the object does not
    exist, or is not an `Observer`.
    """
    name = os.environ.get(OBSERVER_VARIABLE)
    return guarded(named_object(OBSERVER_VARIABLE, name, Observer), _failed) if name else SILENT


def begin() -> None:
    """Forget the errors of an earlier command in this process."""
    _failures.clear()


def require_complete(result: object, **options: object) -> None:
    """End a command that succeeded with exit status 1 if its observer failed."""
    del result, options
    if _failures:
        raise typer.Exit(FAILED)


def _failed(method: str, error: BaseException) -> None:
    """Print an error of the observer, once for each method and class of error."""
    if (method, type(error)) in _failures:
        return
    _failures.add((method, type(error)))
    say_wrong(
        f"the observer of {OBSERVER_VARIABLE} failed in {method} ({type(error).__name__}: {error}); the "
        "command continues, but the observer's reports are incomplete"
    )
