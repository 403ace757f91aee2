"""Load the sealing that an option or the environment names: an object of a program, or a file of keys."""

from __future__ import annotations

import os
import pkgutil
import sys
from pathlib import Path
from typing import Final, TypeVar

from stm_backends.errors import ConfigurationError
from stm_backends.sealing.keys import Sealing, StaticKeys

SEALING_VARIABLE: Final = "STM_BACKENDS_SEALING"
KEYS_VARIABLE: Final = "STM_BACKENDS_KEYS"

T = TypeVar("T")


def load_sealing(name: str | None) -> Sealing | None:
    """Return the object `MODULE:OBJECT`, or the keys of the file that `STM_BACKENDS_KEYS` names, if any.

    Raises `ConfigurationError` if there is no such object or file, or it is of another type.
    """
    if name:
        return named_object("--sealing", name, Sealing)
    file = os.environ.get(KEYS_VARIABLE)
    return Sealing(StaticKeys.from_file(Path(file))) if file else None


def named_object(option: str, name: str, kind: type[T]) -> T:
    """Return the object of a program that an option names as `MODULE:OBJECT`.

    Raises `ConfigurationError` if there is no such object, or it is of another type.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(
            f"{option} is written MODULE:OBJECT, as in myservice.storage:{kind.__name__.lower()}"
        )
    # As `python -m` does, so that a module in the current directory is found.
    sys.path.insert(0, "")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{option}: there is no {attribute!r} in {module!r}") from error
    finally:
        sys.path.remove("")
    if not isinstance(found, kind):
        raise ConfigurationError(f"{option}: {name} is of type {type(found).__name__}, not {kind.__name__}")
    return found
