"""Expectations of checks, which fail with a sentence."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar, cast

import pytest

from stm_backends.drivers.contract import Record

E = TypeVar("E", bound=Exception)

_LONGEST_VALUE: Final = 80


class _Short(reprlib.Repr):
    """One-line representations, including those of records and of bytes of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = _LONGEST_VALUE
        self.maxtuple = self.maxlist = self.maxset = 4

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Return bytes, with their length if there are many."""
        del level
        shown = repr(value[:_LONGEST_VALUE])
        if len(value) <= _LONGEST_VALUE:
            return shown
        return f"{shown[: _LONGEST_VALUE // 2]}... ({len(value):,} bytes)"

    def repr_Record(self, value: Record, level: int) -> str:  # noqa: N802 -- reprlib calls it so
        """Return a record with short values."""
        body, tail = self.repr1(value.body, level - 1), self.repr1(value.tail, level - 1)
        return f"Record(version={value.version!r}, body={body}, tail={tail})"


_SHORT: Final = _Short()


def must_be(found: object, expected: object, because: str) -> None:
    """Fail unless a value equals the expected one; `True`, `False` and `None` equal only themselves."""
    __tracebackhide__ = True
    if found is expected if isinstance(expected, bool | None) else found == expected:
        return
    # `assert` is not used: its explanation prints whole values, or a hint on how to make pytest print them.
    raise AssertionError(
        f"expected {_SHORT.repr(expected)}, because {because}\nfound {_SHORT.repr(found)}"
        + "".join(f"\n  {line}" for line in _difference(found, expected))
    )


def _difference(found: Any, expected: Any) -> list[str]:
    """Return where two values of one kind begin to differ, if their representations may not show it."""
    if type(found) is not type(expected):
        return []
    if isinstance(found, Record):
        fields = ("version", "body", "tail")
        return _of_each({name: (getattr(found, name), getattr(expected, name)) for name in fields})
    if isinstance(found, Mapping):
        one, other = cast("Mapping[Any, Any]", found), cast("Mapping[Any, Any]", expected)
        return _of_each({key: (one.get(key), other.get(key)) for key in {**other, **one}})
    if not isinstance(found, list | tuple | bytes | str):
        return []
    some, others = cast("Sequence[Any]", found), cast("Sequence[Any]", expected)
    pairs = enumerate(zip(some, others, strict=False))
    at = next((n for n, (one, other) in pairs if one != other), min(len(some), len(others)))
    there = " instead of ".join(_SHORT.repr(side[at : at + 1]) for side in (some, others))
    lengths = f", {len(some):,} long instead of {len(others):,}" if len(some) != len(others) else ""
    lines = [f"they differ at {at:,}: {there}{lengths}"] if max(len(some), len(others)) > 4 else []
    # For one in a list, only the beginning is shown.
    within = isinstance(found, list | tuple) and at < min(len(some), len(others))
    return lines + (_difference(some[at], others[at]) if within else [])


def _of_each(sides: Mapping[Any, tuple[Any, Any]]) -> list[str]:
    return [
        f"{name}: {_SHORT.repr(one)} instead of {_SHORT.repr(other)}"
        for name, (one, other) in sides.items()
        if one != other
    ]


@contextmanager
def must_raise(kind: type[E] | tuple[type[E], ...], because: str) -> Generator[pytest.ExceptionInfo[E]]:
    """Fail unless the context ends with an error of this kind. Yields the same as `pytest.raises`."""
    __tracebackhide__ = True
    try:
        with pytest.raises(kind) as caught:
            yield caught
    except pytest.fail.Exception:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise AssertionError(f"expected {names}, because {because}; nothing was raised") from None


@asynccontextmanager
async def must_end(within: float, because: str) -> AsyncGenerator[None]:
    """Fail unless the context ends within this many seconds; otherwise its body is cancelled."""
    __tracebackhide__ = True
    limit = asyncio.timeout(within)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(
            f"expected an end within {within:g} s, because {because}; on a busy machine it may be this limit"
        ) from None
