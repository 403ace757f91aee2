"""Settings of the SQLite backend, as keyword arguments or as a URL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast
from urllib.parse import SplitResult, quote, unquote

from stm_backends.drivers.checks import require_count
from stm_backends.drivers.plugins import DATABASE_FILE, scheme_of
from stm_backends.drivers.settings import MIB, Settings, setting
from stm_backends.errors import ConfigurationError

Synchronous = Literal["normal", "full"]


@dataclass(frozen=True, kw_only=True)
class SqliteSettings(Settings):
    """The file to use, and the durability of writes.

    `synchronous="normal"`: an acknowledged write survives the death of any process; a power cut may lose the
    last transactions, and never damages the file. `"full"`: it survives a power cut too, at the cost of one
    flush to the disk for each write. `max_record_bytes` limits a body together with its tail.
    `must_exist=True`: opening a file that does not exist raises `Unavailable` instead of creating it.
    `private=True`: a new file, and the files that SQLite keeps next to it, can be read and written by their
    owner only, regardless of the umask. An existing file keeps its permissions, and a warning is logged if
    they allow more. `private=False`: the umask decides, as for every other file.
    """

    backend: ClassVar = "sqlite"
    url_schemes: ClassVar = ("sqlite",)
    # SQLite stores a value of at most 1,000,000,000 bytes, including its row.
    largest_entry: ClassVar = 900 * MIB

    path: str = setting("", query=False)
    synchronous: Synchronous = "normal"
    max_record_bytes: int = 64 * MIB
    must_exist: bool = False
    private: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path or self.path == ":memory:":
            raise ConfigurationError(
                "backend 'sqlite' needs a file, as in sqlite:///conversations.db; use the backend 'memory' "
                "for data that need not outlive the process"
            )
        if "\0" in self.path:
            raise ConfigurationError("the path of a database file cannot contain NUL")
        if self.path.endswith(("/", os.sep)):
            raise ConfigurationError(
                "the path of a database file ends with the file's name, as in "
                "sqlite:////srv/conversations.db; this one names a directory"
            )
        require_count("max_record_bytes", self.max_record_bytes, most=self.largest_entry)

    @classmethod
    def from_options(cls, /, **options: Any) -> Self:
        """Return the settings that keyword arguments spell out, validated; `path` may be a `Path`."""
        if isinstance(path := options.get("path"), os.PathLike):
            options["path"] = os.fsdecode(cast("os.PathLike[str]", path))
        return super().from_options(**options)

    @classmethod
    def read_url(cls, url: str) -> dict[str, Any]:
        """Return the settings in a URL; a path that was given instead is answered with its URL."""
        scheme = scheme_of(url)
        if not scheme:
            raise ConfigurationError(
                f"this is a path and not a URL; write {_url_of(url)}, or path=... instead of url=..."
            )
        if scheme == "sqlite" and url.partition(":")[2][:2] not in ("", "//"):
            raise ConfigurationError(
                "a sqlite URL has three slashes before the path; for this one write "
                f"{_url_of(url.partition(':')[2].partition('?')[0])}"
            )
        return super().read_url(url)

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        """Return the path in a URL, percent-decoded, as SQLAlchemy reads it.

        `sqlite:///file.db` is relative to the working directory, `sqlite:////srv/file.db` is absolute.
        """
        if parts.netloc:
            raise ConfigurationError(
                "a sqlite URL has no host: sqlite:///file.db is a relative path, sqlite:////srv/file.db an "
                "absolute one"
            )
        path = unquote(parts.path[1:])
        return {"path": path} if path else {}


def _url_of(path: str) -> str:
    """Return the correct URL for the path of a malformed one; only what is surely a path is shown."""
    path = unquote(path)
    return f"sqlite:///{quote(path) if DATABASE_FILE.fullmatch(path) else 'PATH'}"
