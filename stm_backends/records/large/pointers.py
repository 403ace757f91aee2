r"""The format of pointers, which replace large values in a record, and of the parts that they point to.

```
pointer  stm/1 large\n{"id": ..., "size": ..., "digest": ..., "parts": ..., "ttl": ...}   padded to `POINTER`
part     stm/1 part\n{"at": ..., "ttl": ...}   padded to `HEADER`, and then its share of the bytes
```

A pointer never changes, and neither does a part's share of the bytes. The header of a part has its time to
live and when it was set. Pure functions: no clock, no I/O.
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
"""The prefix of a pointer. A value with this prefix is stored in parts regardless of its size."""

POINTER: Final = 256
"""The size of every pointer in bytes."""

HEADER: Final = 96
"""The size of a part's header in bytes."""

_PART_MARK: Final = b"stm/1 part\n"

OUTLIVES: Final = 3
"""The time to live of parts is this multiple of the record's, see decision 0018."""

MARGIN_S: Final = 60.0
"""Plus this many seconds, for clocks that differ."""

FRESH: Final = 0.25
"""For this fraction of the record's time to live, parts need not be renewed."""


class Life(NamedTuple):
    """The time to live of a record in seconds as its parts know it, and when it was set, in epoch seconds."""

    ttl: float | None
    at: float

    def covers(self, ttl: float | None, *, now: float) -> bool:
        """Say whether parts outlive a record with `ttl` seconds left, with a sufficient margin.

        Parts without a time to live do not suit a record with one: they would be left behind.
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
    """The place of a stored value. `size` is in bytes; `ttl` is the initial time to live of its parts."""

    id: str
    size: int
    digest: str
    parts: int
    ttl: float | None

    @property
    def at(self) -> float:
        """The time at which the pointer was created, in epoch seconds, by the clock of its writer."""
        return time_of(self.id)

    @property
    def life(self) -> Life:
        """The initial life of its parts."""
        return Life(self.ttl, self.at)

    def seal(self) -> bytes:
        """Return the bytes that the record holds."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return MARK + json.dumps(fields, separators=(",", ":")).encode().ljust(POINTER - len(MARK))

    def sealed_by(self, digests: Iterable[bytes]) -> Pointer:
        """Return the pointer to a value whose parts have these digests."""
        return replace(self, digest=digest_of(digests))

    def value(self, chunks: Sequence[bytes]) -> bytes:
        """Return the value of these parts. Raises `Corrupt` unless it is the value that was stored."""
        if digest_of(map(digest, chunks)) != self.digest or sum(map(len, chunks)) != self.size:
            raise Corrupt("a part of a large value is damaged")
        return b"".join(chunks)


def new_id(now: float) -> str:
    """Return the id of a new value: the time in whole epoch seconds, and a random token."""
    return f"{int(now):010x}{secrets.token_hex(8)}"


def time_of(value_id: str) -> float:
    """Return the creation time of a value id in epoch seconds. Raises `ValueError` for an invalid id."""
    return float(int(value_id[:10], 16))


def open_pointer(data: bytes) -> Pointer | None:
    """Return the pointer in these bytes, or `None` if they are not one. Raises `Corrupt` if it is damaged."""
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
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise Corrupt("a pointer in the record cannot be read") from None
    return pointer


def part_name(prefix: str, value_id: str, index: int) -> str:
    """Return the name of one part; `id_in` is its inverse."""
    return f"{prefix}{value_id}:{index:04x}"


def id_in(name: str) -> str:
    """Return the value id in the name of a part."""
    return name.rpartition(":")[0].rpartition(":")[2]


def seal_part(chunk: bytes, life: Life) -> bytes:
    """Return the bytes of a part."""
    header = json.dumps({"at": life.at, "ttl": life.ttl}, separators=(",", ":")).encode()
    return (_PART_MARK + header).ljust(HEADER) + chunk


def open_part(data: bytes | None) -> tuple[bytes, Life]:
    """Return a part's share of the value, and its life. Raises `Corrupt` if it is not a part."""
    if data is None or not data.startswith(_PART_MARK):
        raise Corrupt("a stored part of a large value is invalid")
    try:
        fields = cast("dict[str, Any]", json.loads(data[len(_PART_MARK) : HEADER]))
        ttl = fields["ttl"]
        life = Life(None if ttl is None else float(ttl), float(fields["at"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise Corrupt("a part of a large value has a damaged header") from None
    return data[HEADER:], life


def digest(chunk: bytes) -> bytes:
    """Return the digest of one part's bytes."""
    return hashlib.sha256(chunk).digest()


def digest_of(digests: Iterable[bytes]) -> str:
    """Return the digest of a value, from the digests of its parts in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
