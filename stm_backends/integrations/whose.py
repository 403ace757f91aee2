"""Whose a session is, of which a framework gives an id alone: what a function of the user's says."""

from __future__ import annotations

from collections.abc import Callable

from stm_backends.errors import InvalidKey
from stm_backends.handed_in import WrongType, call_now, described
from stm_backends.types import MemoryKey


def key_from(name: str, function: Callable[..., MemoryKey], *ids: str) -> MemoryKey:
    """Return what a function of this name says. Raises `InvalidKey`, which quotes nothing of it."""
    try:
        key = call_now(function, *ids)
    except InvalidKey:
        raise
    except Exception as error:
        raise InvalidKey(f"the function `{name}` failed ({described(error)})") from error
    if not isinstance(key, MemoryKey):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
        raise InvalidKey(str(WrongType(f"the function `{name}`", key, "a MemoryKey")))
    return key
