"""Bytes in JSON, as saved states have them.

```
{"image": b"..."}   <->   {"image": {"%b": "Li4u"}}
{"%b": 1}           <->   {"%%b": 1}                  so that an object is never read as bytes
```

Only envelopes with bytes are written and read in this form.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from stm_backends.errors import Corrupt, InvalidState
from stm_backends.plain_json import DEEPEST
from stm_backends.records.steps import STEP, Steps

_BYTES: Final = "%b"

_ESCAPED: Final = re.compile("%+b")


def has_bytes(value: object, deepest: int = DEEPEST) -> bool:
    """Say whether bytes are anywhere in a value. Raises `InvalidState` if it is nested more deeply."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    if not isinstance(value, (dict, list, tuple)):
        return False
    _require_depth(deepest)
    if isinstance(value, dict):
        return any(has_bytes(one, deepest - 1) for one in cast("dict[object, object]", value).values())
    return any(has_bytes(one, deepest - 1) for one in cast("Sequence[object]", value))


def escaped(content: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Return an object with its bytes as text, in steps over its long lists.

    Other values that are not JSON stay as they are, for `require_json` to name.
    """
    return _each(content, _escape)


def restored(content: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Reverse `escaped`. Raises `Corrupt` for an object that it does not return."""
    return _each(content, _restore)


def _each(content: Mapping[str, Any], change: Callable[[object], Any]) -> Steps[dict[str, Any]]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(value, (list, tuple)):
            found[name] = change(value)
            continue
        items, changed = cast("Sequence[object]", value), list[object]()
        for start in range(0, len(items), STEP):
            changed += map(change, items[start : start + STEP])
            yield
        found[name] = changed
    return found


def _escape(value: object, deepest: int = DEEPEST) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(bytes(cast("bytes", value))).decode("ascii")}
    if not isinstance(value, (dict, list, tuple)):
        return value
    _require_depth(deepest)
    if not isinstance(value, dict):
        return [_escape(one, deepest - 1) for one in cast("Sequence[object]", value)]
    fields = {name: _escape(one, deepest - 1) for name, one in cast("dict[object, object]", value).items()}
    return {f"%{name}": one for name, one in fields.items()} if _is_special(fields) else fields


def _restore(value: object) -> object:
    if isinstance(value, list):
        return [_restore(one) for one in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    if not _is_special(fields):
        return {name: _restore(one) for name, one in fields.items()}
    ((name, one),) = fields.items()
    if name != _BYTES:
        return {name[1:]: _restore(one)}
    try:
        return base64.b64decode(cast("str", one), validate=True)
    except (TypeError, ValueError):
        raise Corrupt("a saved state has bytes that are not in base64") from None


def _require_depth(left: int) -> None:
    if not left:
        raise InvalidState("a value is nested too deeply to be stored, or contains itself")


def _is_special(fields: Mapping[Any, object]) -> bool:
    """Say whether an object looks like bytes, or like one that does and was escaped."""
    return len(fields) == 1 and all(isinstance(name, str) and _ESCAPED.fullmatch(name) for name in fields)
