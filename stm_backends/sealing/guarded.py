"""Sources of keys and wrappings that users write: each failure is an outage, and each answer is checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from stm_backends import handed_in
from stm_backends.errors import StmError, Unavailable
from stm_backends.sealing.keys import KEY_BYTES, DataKey, KeySource

if TYPE_CHECKING:
    from stm_backends.sealing.wrapping import Wrapping

ANSWER_S: Final = 60.0
"""Seconds that a method may take."""

_Check = Callable[[Any], bool]


def _is_key(found: object) -> bool:
    return isinstance(found, DataKey) and len(found.secret) == KEY_BYTES


_SOURCE: Final[dict[str, tuple[_Check, str]]] = {
    "primary": (_is_key, f"a DataKey of {KEY_BYTES} bytes"),
    "key": (_is_key, f"a DataKey of {KEY_BYTES} bytes"),
    "rewrap": (lambda found: isinstance(found, int), "a number"),
    "erase": (lambda found: isinstance(found, int), "a number"),
}
_BESIDE: Final[dict[str, tuple[_Check, str]]] = dict.fromkeys(
    ("open", "close", "reread"), (lambda _: True, "anything")
)
"""Optional methods of a source; see `OpensStore` and `OwnersKeys`."""

_WRAPPING: Final[dict[str, tuple[_Check, str]]] = {
    "wrap": (lambda found: isinstance(found, bytes) and bool(found), "bytes"),
    "unwrap": (lambda found: isinstance(found, bytes) and len(found) == KEY_BYTES, f"{KEY_BYTES} bytes"),
}


def guarded_source(keys: KeySource) -> KeySource:
    """Return a source of keys whose methods raise only errors of this library.

    A method raises `Unavailable` if the user's raises anything else, takes longer than `ANSWER_S`, or returns
    an invalid value.
    """
    beside = {name: check for name, check in _BESIDE.items() if hasattr(keys, name)}
    return _guarded(keys, {**_SOURCE, **beside})


def guarded_wrapping(wrapping: Wrapping) -> Wrapping:
    """Return a wrapping whose methods raise only errors of this library; see `guarded_source`."""
    guarded = _guarded(wrapping, _WRAPPING)
    guarded.is_current = partial(_is_current, wrapping)
    return guarded


def _guarded(given: Any, checks: dict[str, tuple[_Check, str]]) -> Any:
    # With all its other attributes, such as `open` and `close`.
    guarded = SimpleNamespace(
        **{name: getattr(given, name) for name in dir(given) if not name.startswith("_")}
    )
    for name, (is_right, expected) in checks.items():
        setattr(guarded, name, partial(_call, getattr(given, name), name, is_right, expected))
    return guarded


def _is_current(wrapping: Any, wrapped: bytes) -> bool:
    try:
        found = handed_in.call_now(wrapping.is_current, wrapped)
        if not isinstance(found, bool):
            raise handed_in.WrongType("it", found, "True or False")
    except StmError:
        raise
    except Exception as error:
        raise _failed("is_current", error) from error
    return found


async def _call(
    method: Callable[..., Awaitable[object]], name: str, is_right: _Check, expected: str, *args: object
) -> object:
    try:
        found = await handed_in.call(method, *args, within=ANSWER_S)
        if not is_right(found):
            raise handed_in.WrongType("it", found, expected)
    except StmError:
        raise
    except Exception as error:
        raise _failed(name, error) from error
    return found


def _failed(name: str, error: Exception) -> Unavailable:
    return Unavailable(f"`{name}` of the keys failed ({handed_in.described(error)})")
