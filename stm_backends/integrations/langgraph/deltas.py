"""The difference between a value and an older one; pure functions on bytes.

A channel of messages is serialized as one value after another, so one more message changes the length at the
front and adds bytes at the end. The rest is copied from the older, stored value. Nothing depends on the
serializer: a value that shares nothing with the older one is stored whole.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, Final, TypeAlias

Piece: TypeAlias = "bytes | tuple[int, int]"
"""New bytes, or the start and the length of a part of the older value."""

ANCHOR: Final = 16
"""The number of equal bytes that starts a copied part."""

LEAST: Final = 128
"""Values smaller than this, in bytes, are stored whole."""

_GAP: Final = 64
_GAP_IN_LARGE: Final = 12
_LARGE: Final = 64 * 1024
"""Maximum number of new bytes skipped to find the next part of the older value; each one costs a search."""


def delta(old: bytes, new: bytes) -> list[Piece] | None:
    """Return the pieces from which `patch` builds `new`; `None` if they would save less than a quarter."""
    if len(new) < LEAST or not old:
        return None
    pieces: list[Piece] = []
    written = place = at = fresh = 0
    while at < len(new):
        length = _common(old, place, new, at)
        if length < ANCHOR:
            found = _next_part(old, place, new, at)
            if found is None:
                break
            place, at = found
            continue
        if written < at:
            pieces.append(new[written:at])
            fresh += at - written
        pieces.append((place, length))
        place, at = place + length, at + length
        written = at
    if written < len(new):
        pieces.append(new[written:])
        fresh += len(new) - written
    return pieces if fresh + 8 * len(pieces) < 3 * len(new) // 4 else None


def patch(old: bytes, pieces: list[Piece]) -> bytes:
    """Return the value that `delta` was called with."""
    return b"".join(
        piece if isinstance(piece, bytes) else old[piece[0] : piece[0] + piece[1]] for piece in pieces
    )


def dump_bytes(data: bytes) -> str:
    """Return bytes as a JSON string."""
    return b64encode(data).decode()


def load_bytes(text: str) -> bytes:
    """Return the bytes that `dump_bytes` wrote. Raises `ValueError`."""
    return b64decode(text, validate=True)


def dump_pieces(pieces: list[Piece]) -> list[Any]:
    """Return pieces as JSON."""
    return [dump_bytes(piece) if isinstance(piece, bytes) else list(piece) for piece in pieces]


def load_pieces(pieces: list[Any]) -> list[Piece]:
    """Return the pieces that `dump_pieces` wrote. Raises `ValueError`."""
    return [
        load_bytes(piece) if isinstance(piece, str) else (int(piece[0]), int(piece[1])) for piece in pieces
    ]


def _common(old: bytes, place: int, new: bytes, at: int) -> int:
    """Return the number of equal bytes that follow these two positions."""
    length, step = 0, LEAST
    most = min(len(old) - place, len(new) - at)
    while step:
        start, end = place + length, length + step
        if end <= most and old[start : start + step] == new[at + length : at + end]:
            length, step = end, 2 * step
        else:
            step //= 2
    return length


def _next_part(old: bytes, place: int, new: bytes, at: int) -> tuple[int, int] | None:
    """Return where the older value continues, and how many new bytes precede it; `None` if too many do."""
    for skipped in range(_GAP if len(old) <= _LARGE else _GAP_IN_LARGE):
        anchor = new[at + skipped : at + skipped + ANCHOR]
        if len(anchor) < ANCHOR:
            return None
        if (found := old.find(anchor, place)) >= 0:
            return found, at + skipped
    return None
