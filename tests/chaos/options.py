"""What the commands of runs and of soaks take and say alike."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path


def positive(kind: type[float]) -> Callable[[str], float]:
    """Return a type of `argparse` for numbers above 0 of this kind."""

    def parse(text: str) -> float:
        # What is no number at all, argparse says by the name of this function.
        if not (number := kind(text)) > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    parse.__name__ = kind.__name__
    return parse


def counted(count: float, noun: str) -> str:
    """Return a number of things in words: `1 fault`, `2,000 faults`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def no_such_stand(given: Iterable[str], there: Collection[str]) -> str:
    """Return what to say of the first stand that does not exist, or `""`."""
    for name in given:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"there is no stand {name!r}.{hint} There are: {', '.join(there)}"
    return ""


def there_already(out: Path | None, stands: Iterable[str]) -> str:
    """Return what to say of the first stand that the folder has results of, or `""`."""
    taken = (out / name for name in stands if out and (out / name).exists())
    return next((f"{one} exists already: name another folder" for one in taken), "")


def no_such_fault(there: Collection[str], only: Sequence[str]) -> str:
    """Return what to say if no fault's name begins in one of these ways, or `""`."""
    if not only or any(name.startswith(tuple(only)) for name in there):
        return ""
    return f"no fault's name begins with {' or '.join(only)}; there are: {', '.join(sorted(there))}"
