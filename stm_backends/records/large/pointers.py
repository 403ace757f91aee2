r"""What stands in a record in place of a value that is too large for it, and what stands beside the record.

```
pointer  stm/1 large\n{"id": ..., "size": ..., "digest": ..., "parts": ..., "ttl": ...}   padded to `POINTER`
part     stm/1 part\n{"at": ..., "ttl": ...}   padded to `HEADER`, and then its share of the bytes
```

A pointer never changes, and neither does a part's share. The header of a part says how long it was given to
live, and when. Pure functions: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

from stm_backends.drivers.checks import LONGEST_S
from stm_backends.errors import Corrupt

MARK: Final = b"stm/1 large\n"
"""What a pointer begins with. A value that begins so itself is kept beside its record, whatever its size."""

POINTER: Final = 256
"""How many bytes a pointer takes, always: so many less stand in the record."""

HEADER: Final = 96
"""How many bytes of a part are not of the value."""

_PART_MARK: Final = b"stm/1 part\n"

OUTLIVES: Final = 3
"""Parts are given so many times the record's time to live, see 0018."""

MARGIN_S: Final = 60.0
"""And so many seconds more, for clocks that differ."""

FRESH: Final = 0.25
"""For so much of the record's time to live nothing has to be renewed."""


class Life(NamedTuple):
    """How long parts were given: the record's time to live in seconds, and when, in epoch seconds."""

    ttl: float | None
    at: float

    def covers(self, ttl: float | None, *, now: float) -> bool:
        """Say whether parts outlive a record that lives for `ttl` seconds from now, with enough to spare.

        Parts that are for ever do not suit a record that ends: they would be left behind.
        """
        if ttl is None or self.ttl is None:
            return ttl is self.ttl
        return self.at + OUTLIVES * self.ttl + MARGIN_S / 2 >= now + (OUTLIVES - FRESH) * ttl

    @property
    def given(self) -> float | None:
        """The time to live that the parts themselves are written with."""
        return None if self.ttl is None else min(OUTLIVES * self.ttl + MARGIN_S, max(self.ttl, LONGEST_S))


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a value is kept. `size` is its bytes; `ttl` is the time to live that its parts began with."""

    id: str
    size: int
    digest: str
    parts: int
    ttl: float | None

    @property
    def at(self) -> float:
        """When it was made, in epoch seconds, by the clock of its writer."""
        return time_of(self.id)

    @property
    def life(self) -> Life:
        """How long its parts were given at first."""
        return Life(self.ttl, self.at)

    def seal(self) -> bytes:
        """Return the bytes that stand in the record."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return MARK + json.dumps(fields, separators=(",", ":")).encode().ljust(POINTER - len(MARK))

    def sealed_by(self, digests: Iterable[bytes]) -> Pointer:
        """Return the pointer to a value whose parts have these digests."""
        return replace(self, digest=digest_of(digests))

    def value(self, chunks: Sequence[bytes]) -> bytes:
        """Return the value that parts make up. Raises `Corrupt` unless it is the one that was stored."""
        if digest_of(map(digest, chunks)) != self.digest or sum(map(len, chunks)) != self.size:
            raise Corrupt("what is kept beside the record is damaged")
        return b"".join(chunks)


def new_id(now: float) -> str:
    """Return the id of a new value: its time, in whole epoch seconds, and what makes it unique."""
    return f"{int(now):010x}{secrets.token_hex(8)}"


def time_of(value_id: str) -> float:
    """Return when a value got its id, in epoch seconds. Raises `ValueError` if it is none of ours."""
    return float(int(value_id[:10], 16))


def open_pointer(data: bytes) -> Pointer | None:
    """Return the pointer that bytes of a record are, or `None`. Raises `Corrupt` if it cannot be read."""
    if not data.startswith(MARK):
        return None
    try:
        fields = cast("dict[str, Any]", json.loads(data[len(MARK) :]))
        ttl = fields["ttl"]
        pointer = Pointer(
            str(fields["id"]),
            int(fields["size"]),
            str(fields["digest"]),
            int(fields["parts"]),
            None if ttl is None else float(ttl),
        )
        time_of(pointer.id)
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt("the record points to something beside it in a way that cannot be read") from error
    return pointer


def part_name(prefix: str, value_id: str, index: int) -> str:
    """Return the name of one part; `id_in` is its inverse."""
    return f"{prefix}{value_id}:{index:04x}"


def id_in(name: str) -> str:
    """Return whose part a name is."""
    return name.rpartition(":")[0].rpartition(":")[2]


def seal_part(chunk: bytes, life: Life) -> bytes:
    """Return the bytes of a part."""
    header = json.dumps({"at": life.at, "ttl": life.ttl}, separators=(",", ":")).encode()
    return (_PART_MARK + header).ljust(HEADER) + chunk


def open_part(data: bytes | None) -> tuple[bytes, Life]:
    """Return a part's share of the value, and how long it was given. Raises `Corrupt` if it is no part."""
    if data is None or not data.startswith(_PART_MARK):
        raise Corrupt("what is kept beside the record is not a part of it")
    try:
        fields = cast("dict[str, Any]", json.loads(data[len(_PART_MARK) : HEADER]))
        ttl = fields["ttl"]
        life = Life(None if ttl is None else float(ttl), float(fields["at"]))
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt("what is kept beside the record has a damaged header") from error
    return data[HEADER:], life


def digest(chunk: bytes) -> bytes:
    """Return what tells one part's bytes from any others."""
    return hashlib.sha256(chunk).digest()


def digest_of(digests: Iterable[bytes]) -> str:
    """Return what tells a value from any other, from the digests of its parts in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
