"""Expectations of checks, which fail with a sentence."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar

import pytest

E = TypeVar("E", bound=Exception)

_SHORT: Final = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxset = 4


def must_be(found: object, expected: object, because: str) -> None:
    """Fail unless something equals what is expected; `True`, `False` and `None` are only themselves."""
    if isinstance(expected, bool | None):
        assert found is expected, _sentence(expected, because)
    else:
        assert found == expected, _sentence(expected, because)


@contextmanager
def must_raise(kind: type[E] | tuple[type[E], ...], because: str) -> Generator[pytest.ExceptionInfo[E]]:
    """Fail unless the context ends with an error of this kind; yields what `pytest.raises` does."""
    try:
        with pytest.raises(kind) as caught:
            yield caught
    except pytest.fail.Exception:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise AssertionError(f"expected {names}, because {because}; nothing was raised") from None


@asynccontextmanager
async def must_end(within: float, because: str) -> AsyncGenerator[None]:
    """Fail unless the context ends within so many seconds; what runs in it is cancelled then."""
    limit = asyncio.timeout(within)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"expected an end within {within:g} s, because {because}") from None


def _sentence(expected: object, because: str) -> str:
    return f"expected {_SHORT.repr(expected)}, because {because}"
