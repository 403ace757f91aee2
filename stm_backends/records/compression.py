"""Compression of stored data: transforms for `open_backend(transforms=[...])`."""

from __future__ import annotations

import importlib
import zlib
from typing import Any, Final

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError

THRESHOLD: Final = 256
"""The size in bytes from which a value is compressed, unless a transform is given another."""


class Zlib:
    """Compresses with zlib. `level` is 1 (fast) to 9 (small).

    Values of fewer than `threshold` bytes, and those that would not become smaller, are stored as they are.
    The size of a compressed value reveals something about its content, even if it is sealed afterwards.
    """

    name = "zlib"

    def __init__(self, *, level: int = 6, threshold: int = THRESHOLD) -> None:
        require_count("level", level, most=9)
        require_count("threshold", threshold)
        self._level = level
        self._threshold = threshold

    def encode(self, data: bytes, /) -> bytes | None:
        """Return the compressed bytes, or `None` if they are not worth it."""
        return _smaller(zlib.compress(data, self._level), data) if len(data) >= self._threshold else None

    def decode(self, data: bytes, limit: int, /) -> bytes:
        """Return the bytes. Raises `ValueError` if they are more than `limit`, or cannot be read."""
        reader = zlib.decompressobj()
        found = reader.decompress(data, limit)
        if not reader.eof or reader.unused_data:
            raise ValueError("compressed data are incomplete, or larger than they may be")
        return found


class Zstd:
    """Compresses with Zstandard, which is faster. Needs Python 3.14. Otherwise like `Zlib`."""

    name = "zstd"

    def __init__(self, *, level: int = 3, threshold: int = THRESHOLD) -> None:
        require_count("level", level, most=22)
        require_count("threshold", threshold)
        try:
            # The standard library has it from 3.14 on.
            self._zstd: Any = importlib.import_module("compression.zstd")
        except ModuleNotFoundError:
            raise ConfigurationError("Zstd needs Python 3.14; use Zlib, or another transform") from None
        self._level = level
        self._threshold = threshold

    def encode(self, data: bytes, /) -> bytes | None:
        """Return the compressed bytes, or `None` if they are not worth it."""
        if len(data) < self._threshold:
            return None
        return _smaller(self._zstd.compress(data, self._level), data)

    def decode(self, data: bytes, limit: int, /) -> bytes:
        """Return the bytes. Raises `ValueError` if they are more than `limit`, or cannot be read."""
        reader = self._zstd.ZstdDecompressor()
        found: bytes = reader.decompress(data, limit)
        if not reader.eof or reader.unused_data:
            raise ValueError("compressed data are incomplete, or larger than they may be")
        return found


class Preset:
    """Raw deflate with a dictionary of common text of turns, so that a single turn becomes smaller.

    The dictionary is part of the format: another one needs another name. `level` is 1 (fast) to 9 (small);
    the output of every level can be read.
    """

    name = "turns1"

    def __init__(self, *, level: int = 6) -> None:
        self._level = level

    def encode(self, data: bytes, /) -> bytes | None:
        """Return the compressed bytes, or `None` if they are not smaller."""
        writer = zlib.compressobj(self._level, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY)
        return _smaller(writer.compress(data) + writer.flush(), data)

    def decode(self, data: bytes, limit: int, /) -> bytes:
        """Return the bytes. Raises `ValueError` if they are more than `limit`, or cannot be read."""
        reader = zlib.decompressobj(-15, _DICTIONARY)
        found = reader.decompress(data, limit)
        if not reader.eof or reader.unused_data:
            raise ValueError("compressed data are incomplete, or larger than they may be")
        return found


_DICTIONARY: Final = (
    b'{"first":0,"prev":"","rev":0,"summary":"","upto":0,"turns":[{"turn_id":"","user_message":"I you the a '
    b'to is and for of in it what","assistant_response":"I you the a to is and for of in it with have your '
    b'are there","trajectory_digest":{"tools_invoked":[""],"observations_summary":"","reasoning_summary":'
    b'null,"artifacts_refs":[]},"artifacts_shown":{"":"","":"},"artifacts_hidden_refs":[],"ts":17'
)


def _smaller(compressed: bytes, data: bytes) -> bytes | None:
    return compressed if len(compressed) < len(data) else None
