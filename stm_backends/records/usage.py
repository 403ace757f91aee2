"""The usage of answers by day: tokens, cost, and whatever else a caller counts; pure functions.

```
{"names": ["input_tokens", "details.cached", "cost"],
 "days": {"": [900, 70, "1.25"], "2026-11-28": [120], "2026-11-29": [80, 3, "0.00012"]}}
```

This is the stored form of sums. A row may end early. `""` has the sums of no known day, and of old days.

Sums are whole numbers of millionths of millionths, so that they do not depend on the order of adding: each
process comes to the same, wherever the others have added up so far.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final, TypeAlias, cast

DAYS: Final = 62
"""Number of days with usage that a conversation keeps separate; older days are added up."""

NAMES: Final = 32
"""Number of names that a conversation keeps sums of: those that came first."""

LONGEST_NAME: Final = 64

LARGEST: Final = 2**53
"""A larger number is neither a count nor a price. Up to here a float represents each whole number."""

Sums: TypeAlias = Mapping[str, Mapping[str, int]]
"""Sums by day, and by name; see above."""

Stated: TypeAlias = tuple[float, Mapping[str, Any]]
"""The usage of an answer, after its time in epoch seconds, which is 0 if it is unknown."""

_PARTS: Final = 10**12
_STORED: Final = re.compile(r"([0-9]{1,30})(?:\.([0-9]{1,12}))?")


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums of the usage of answers, by name: `{"input_tokens": 1200, "cost": 0.0173}`.

    `days` has them by day in UTC, oldest first. `total` covers all answers, including those of no known day,
    and of days too long ago to be kept separate. Numbers within objects have the path as their name, such as
    `prompt_tokens_details.cached_tokens`. Only numbers from 0 to 2**53 are summed. Decimals are added up
    exactly, to twelve places.
    """

    total: Mapping[str, float] = field(default_factory=dict[str, float])
    days: Mapping[date, Mapping[str, float]] = field(default_factory=dict[date, Mapping[str, float]])


def stated(before: Sums, usages: Iterable[Stated]) -> Sums:
    """Return sums after more answers, in bounded size. The result does not depend on the portions."""
    sums = {day: {**row} for day, row in before.items()}
    names = {name for row in sums.values() for name in row}
    for at, usage in usages:
        row: dict[str, int] = {}
        for name, amount in itertools.islice(_numbers_in(usage), NAMES):
            if name in names or len(names) < NAMES:
                names.add(name)
                row[name] = row.get(name, 0) + amount
        if row:
            _add(sums, datetime.fromtimestamp(at, UTC).date().isoformat() if at else "", row)
    for day in sorted(filter(None, sums))[:-DAYS]:
        _add(sums, "", sums.pop(day))
    return sums


def total(several: Iterable[Sums], *, since: date | None = None) -> Usage:
    """Return the sum of sums, of all of them or of the days from one on."""
    found, days = dict[str, int](), dict[str, dict[str, int]]()
    first = "" if since is None else since.isoformat()
    for sums in several:
        for day, row in sums.items():
            if day >= first:
                _add(days, day, row)
    for row in days.values():
        _add({"": found}, "", row)
    return Usage(
        _shown(found), {date.fromisoformat(day): _shown(days[day]) for day in sorted(filter(None, days))}
    )


def dump(sums: Sums) -> dict[str, Any]:
    """Return sums as JSON."""
    names = [*dict.fromkeys(name for day in sorted(sums) for name in sums[day])]
    rows: dict[str, list[int | str]] = {}
    for day in sorted(sums):
        amounts = [sums[day].get(name) for name in names]
        while amounts[-1] is None:
            amounts.pop()
        rows[day] = [_text(amount or 0) for amount in amounts]
    return {"names": names, "days": rows}


def load(content: object) -> Sums:
    """Return sums that were stored. Raises `ValueError` for anything else."""
    try:
        fields = cast("Mapping[str, Any]", content)
        names = [*map(_name, fields["names"])]
        return {
            _day(day): {name: _amount(value) for name, value in zip(names, row, strict=False)}
            for day, row in fields["days"].items()
            if row
        }
    except (KeyError, TypeError, AttributeError):
        raise ValueError("the stored usage is of the wrong type") from None


def _add(sums: dict[str, dict[str, int]], day: str, row: Mapping[str, int]) -> None:
    into = sums.setdefault(day, {})
    for name, amount in row.items():
        into[name] = into.get(name, 0) + amount


def _numbers_in(usage: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers that are usage, with the path of each as its name. Anything else is ignored."""
    for key, value in usage.items():
        name = f"{path}{key}"
        if len(name) > LONGEST_NAME or isinstance(value, bool):
            continue
        if isinstance(value, Mapping):
            yield from _numbers_in(cast("Mapping[str, Any]", value), f"{name}.")
        elif isinstance(value, (int, float)) and 0 <= value <= LARGEST:
            yield name, value * _PARTS if isinstance(value, int) else _parts_in(value)


def _parts_in(value: float) -> int:
    from fractions import Fraction  # noqa: PLC0415 -- slow, and rarely needed

    return round(Fraction(repr(value)) * _PARTS)


def _shown(row: Mapping[str, int]) -> dict[str, float]:
    return {
        name: amount // _PARTS if amount % _PARTS == 0 else amount / _PARTS for name, amount in row.items()
    }


def _text(amount: int) -> int | str:
    whole, rest = divmod(amount, _PARTS)
    return f"{whole}.{rest:012d}".rstrip("0") if rest else whole


def _amount(value: object) -> int:
    found = _STORED.fullmatch(str(value)) if type(value) in (int, str) else None
    if found is None:
        raise ValueError("a stored sum is not a number")
    return int(found[1]) * _PARTS + int((found[2] or "").ljust(12, "0"))


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError("a name is a string")
    return name


def _day(day: str) -> str:
    if day and date.fromisoformat(day).isoformat() != day:
        raise ValueError("a day is YYYY-MM-DD")
    return day
