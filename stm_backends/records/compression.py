"""Compression of what is stored: transforms for `open_backend(transforms=[...])`."""

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
    The size of a compressed value tells something of its content, also if it is sealed afterwards.
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


def _smaller(compressed: bytes, data: bytes) -> bytes | None:
    return compressed if len(compressed) < len(data) else None
