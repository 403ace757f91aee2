"""JSON as it is stored: compact, exact, and with NaN, infinities and lone surrogates, as Python has it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from stm_backends.errors import InvalidState


def encode_json(content: object) -> bytes:
    """Return compact UTF-8 JSON of a value that `require_json` has accepted."""
    return encoded(content).encode("utf-8", "surrogatepass")


def encoded(content: object) -> str:
    """Return the JSON of `encode_json` as text."""
    try:
        return _encode(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidState(f"not JSON: {error}") from error


def decode_json(data: bytes) -> object:
    """Return the value of one JSON document as `encode_json` wrote it. Raises `ValueError` otherwise."""
    text = data.decode("utf-8", "surrogatepass")
    content, end = raw_decode(text)
    if end != len(text):
        raise ValueError("data follows the JSON document")
    return content


# Created once: the functions of the json module create an encoder for each call, and look for white space.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
raw_decode = json.JSONDecoder().raw_decode
"""Returns the value at the beginning of a text, or at an index, and where it ends."""


_PRINTED_BITS = 14_000
"""Integers of up to this many bits are within the interpreter's default limit on digits."""


DEEPEST: Final = 120
"""Maximum nesting of lists and objects. The interpreter's own limit depends on the depth of the caller,
so without this limit one caller could store what another cannot read."""

DEEPEST_IN_TURN: Final = 100
"""The same limit within a turn, which leaves room for the state and the export around it."""


def require_json(value: object, path: str, *, deepest: int = DEEPEST, strict: bool = False) -> None:
    """Raise `InvalidState`, with the path, unless a value survives a round trip through JSON.

    Accepted are tuples (which come back as lists), NaN, infinities, lone surrogates, and integers of any size
    that Python prints. Rejected are mappings with keys that are not strings, because JSON converts them to
    strings and two keys could become equal, and values nested more than `deepest` levels deep. With `strict`,
    NaN, infinities and lone surrogates are rejected, too: JSON of other programs does not have them.
    """
    try:
        if strict or not _is_plain(value, deepest):
            _require_json(value, path, deepest, strict)
    except RecursionError:
        raise InvalidState("a value is nested too deeply to be looked at from this depth of calls") from None


_SCALARS: Final = frozenset((str, float, bool, type(None)))


def _is_plain(value: object, deepest: int) -> bool:
    """Say whether a value is certainly JSON, faster than the check that tracks the path."""
    if type(value) in _SCALARS:
        return True
    if isinstance(value, int):
        return value.bit_length() <= _PRINTED_BITS
    if not deepest:
        return False
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if type(key) is not str or not (type(item) in _SCALARS or _is_plain(item, deepest - 1)):
                return False
        return True
    if isinstance(value, (list, tuple)):
        for item in cast("Sequence[object]", value):
            if not (type(item) in _SCALARS or _is_plain(item, deepest - 1)):
                return False
        return True
    return False


def _require_json(value: object, path: str, deepest: int, strict: bool) -> None:
    """Check a value for `require_json`."""
    if isinstance(value, int) and value.bit_length() > _PRINTED_BITS:
        try:
            str(value)
        except ValueError:
            raise InvalidState(f"{path} is an integer of more digits than Python prints") from None
    if strict:
        _require_common(value, path)
    if value is None or isinstance(value, (str, int, float)):
        return
    if not deepest and isinstance(value, (dict, list, tuple)):
        raise InvalidState(f"{path} is nested too deeply to be stored, or contains itself")
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise InvalidState(f"{path} has a key that is not a string: {type(key).__name__}")
            if strict:
                _require_common(key, f"a key of {path}")
            _require_json(item, below(path, f".{key}"), deepest - 1, strict)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(cast("Sequence[object]", value)):
            _require_json(item, below(path, f"[{index}]"), deepest - 1, strict)
    else:
        raise InvalidState(f"{path} is {type(value).__name__}, which JSON does not have")


def _require_common(value: object, path: str) -> None:
    """Reject a number or a text that only Python's JSON has."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidState(f"{path} is {value}, which JSON does not have")
    if isinstance(value, str) and _SURROGATE.search(value):
        raise InvalidState(f"{path} has half of a surrogate pair, which is no character")


def below(path: str, step: str) -> str:
    """Return the path of a part, shortened: it is made for each part, and a key may be long."""
    if path.endswith("..."):
        return path
    return (
        path + step
        if len(path) + len(step) <= _LONGEST_PATH
        else f"{path}{step[:_LONGEST_PATH]}"[:77] + "..."
    )


_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_LONGEST_PATH: Final = 80
"""Maximum number of characters of a path in an error."""


_Nested: TypeAlias = dict[str, object] | list[object]


def is_deeper(value: object, deepest: int) -> bool:
    """Return whether lists and objects are nested more than `deepest` levels deep, without recursion."""
    level: list[_Nested] = [[value]]
    for _ in range(deepest + 1):
        inner = itertools.chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        # Most values of a level are texts.
        level = [cast("_Nested", one) for one in inner if isinstance(one, (dict, list))]
        if not level:
            return False
    return True
