"""Calls the user's function that returns the key of a session, for frameworks that give only its id."""

from __future__ import annotations

from collections.abc import Callable

from stm_backends.errors import InvalidKey
from stm_backends.handed_in import WrongType, call_now, described
from stm_backends.types import MemoryKey


def key_from(name: str, function: Callable[..., MemoryKey], *ids: str) -> MemoryKey:
    """Return the key from the function called `name` in errors. Raises `InvalidKey`, which quotes nothing."""
    try:
        key = call_now(function, *ids)
    except InvalidKey:
        raise
    except Exception as error:
        raise InvalidKey(f"the function `{name}` failed ({described(error)})") from error
    if not isinstance(key, MemoryKey):  # pyright: ignore[reportUnnecessaryIsInstance] -- the user's function returns it
        raise InvalidKey(str(WrongType(f"the function `{name}`", key, "a MemoryKey")))
    return key
