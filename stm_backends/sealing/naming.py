"""Load the sealing that an option or the environment names: an object of a program, or a file of keys."""

from __future__ import annotations

import importlib
import operator
import os
import sys
import traceback
from pathlib import Path
from typing import Final, TypeVar

from stm_backends.errors import ConfigurationError, StmError
from stm_backends.sealing.keys import Sealing, StaticKeys

SEALING_VARIABLE: Final = "STM_BACKENDS_SEALING"
KEYS_VARIABLE: Final = "STM_BACKENDS_KEYS"

T = TypeVar("T")


def load_sealing(name: str | None) -> Sealing | None:
    """Return the object `MODULE:OBJECT`, or the keys of the file that `STM_BACKENDS_KEYS` names, if any.

    Raises `ConfigurationError` if the object or file does not exist, or is of another type.
    """
    if name:
        return named_object("--sealing", name, Sealing)
    file = os.environ.get(KEYS_VARIABLE)
    return Sealing(StaticKeys.from_file(Path(file))) if file else None


def named_object(option: str, name: str, kind: type[T]) -> T:
    """Return the object of a program that an option names as `MODULE:OBJECT`.

    Raises `ConfigurationError` if the object does not exist, if importing its module fails, or if the object
    is of another type.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(
            f"{option} is written MODULE:OBJECT, as in myservice.storage:{kind.__name__.lower()}"
        )
    # As `python -m` does, so that a module in the current directory is found.
    sys.path.insert(0, "")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ConfigurationError(f"{option}: {_failure(module, error)}") from error
    finally:
        sys.path.remove("")
    try:
        found = operator.attrgetter(attribute)(imported)
    except AttributeError:
        raise ConfigurationError(f"{option}: there is no {attribute!r} in {module!r}") from None
    if not isinstance(found, kind):
        raise ConfigurationError(f"{option}: {name} is of type {type(found).__name__}, not {kind.__name__}")
    return found


def _failure(module: str, error: Exception) -> str:
    """Return why importing a module failed. Leaves out the text of errors that may quote a secret."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"there is no module {module!r} in the current directory or on PYTHONPATH"
    # Frames of files, without those of the import system.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    where = (
        (error.filename, error.lineno)
        if isinstance(error, SyntaxError)
        else (frames[-1].filename, frames[-1].lineno)
    )
    cause = type(error).__name__
    if isinstance(error, (ImportError, StmError)):
        cause = f"{cause}: {error}"
    return f"importing {module!r} failed at {where[0]}, line {where[1]}: {cause}"
