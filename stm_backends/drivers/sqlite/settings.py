"""Settings of the SQLite backend, as keyword arguments or as a URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, cast, get_args
from urllib.parse import quote, unquote, urlsplit

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.urls import from_query, merged, truth
from stm_backends.errors import ConfigurationError

Synchronous = Literal["normal", "full"]

_MIB: Final = 1024 * 1024
_MAX_BYTES: Final = 900 * _MIB
"""SQLite holds a value of at most 1,000,000,000 bytes, its row included."""


_FROM_TEXT: Final[Mapping[str, Callable[[str], object]]] = {
    "synchronous": str,
    "deadline_s": float,
    "max_entry_bytes": int,
    "max_record_bytes": int,
    "must_exist": truth,
}


@dataclass(frozen=True, kw_only=True)
class SqliteSettings:
    """Which file, how durable, how patient and how large.

    `synchronous="normal"`: what was acknowledged survives the death of any process; a power cut may
    take the last transactions, and never harms the file. `"full"`: it survives the power cut too, at
    the price of one flush to the disk per write. `deadline_s` is how long one operation may take.
    `max_entry_bytes` limits an entry, and a body; `max_record_bytes` a body with its tail.
    `must_exist=True`: a file that is not there is `Unavailable` when it is opened, and not created.
    """

    path: str
    synchronous: Synchronous = "normal"
    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = 16 * _MIB
    max_record_bytes: int = 64 * _MIB
    must_exist: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(f"path is a string or a Path, not {type(self.path).__name__}")
        if not self.path or self.path == ":memory:":
            raise ConfigurationError(
                "backend 'sqlite' needs a file, as in sqlite:///conversations.db; use the backend 'memory' "
                "for what need not outlive the process"
            )
        if "\0" in self.path:
            raise ConfigurationError("the path of a database file cannot contain NUL")
        if self.path.endswith(("/", os.sep)):
            raise ConfigurationError(
                "the path of a database file ends with the file's name, as in "
                "sqlite:////srv/conversations.db; this one names a directory"
            )
        if self.synchronous not in get_args(Synchronous):
            raise ConfigurationError(f"synchronous is 'normal' or 'full', not {self.synchronous!r}")
        if not isinstance(self.must_exist, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
            raise ConfigurationError(f"must_exist is True or False, not {self.must_exist!r}")
        require_seconds("deadline_s", self.deadline_s)
        require_count("max_entry_bytes", self.max_entry_bytes, most=_MAX_BYTES)
        require_count("max_record_bytes", self.max_record_bytes, most=_MAX_BYTES)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SqliteSettings:
        """Return the settings that a URL spells out, and beside it keyword arguments.

        `sqlite:///file.db` is relative to the working directory, `sqlite:////srv/file.db` is absolute
        (SQLAlchemy's convention). The path is percent-decoded; settings follow as `?synchronous=full`. A
        setting that the two give differently is refused.
        """
        parts = urlsplit(url)
        if not parts.scheme:
            raise ConfigurationError(
                f"this is a path and not a URL; write {_url_of(url)}, "
                "or give it as path=... instead of url=..."
            )
        if parts.scheme != "sqlite":
            raise ConfigurationError(f"a sqlite URL begins with sqlite://, not {parts.scheme}://")
        if parts.netloc:
            raise ConfigurationError(
                "a sqlite URL has no host: sqlite:///file.db is a relative path, sqlite:////srv/file.db an "
                "absolute one"
            )
        if parts.fragment:
            raise ConfigurationError("a sqlite URL has no fragment; '#' in a path is written %23")
        if parts.path and not url.partition(":")[2].startswith("///"):
            raise ConfigurationError(
                f"a sqlite URL has three slashes before the path; for this one write {_url_of(parts.path)}"
            )
        if "path" in options:
            raise ConfigurationError(
                "the file is given twice, by the URL and as path=...; leave one of them out"
            )
        given = from_query(parts.query, _FROM_TEXT, backend="sqlite")
        return cls.from_options(path=unquote(parts.path[1:]), **merged(given, options))

    @classmethod
    def from_options(cls, **options: Any) -> SqliteSettings:
        """Return the settings that keyword arguments spell out; an unknown one raises."""
        require_known(options, (field.name for field in fields(cls)), backend="sqlite")
        path = options.pop("path", "")
        if isinstance(path, os.PathLike):
            path = os.fsdecode(cast("os.PathLike[str]", path))
        return cls(path=path, **options)


def _url_of(path: str) -> str:
    """Return how the path of a mistaken URL would be written in a right one."""
    return f"sqlite:///{quote(unquote(path))}"
