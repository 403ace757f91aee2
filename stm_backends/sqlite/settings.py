"""Settings of the SQLite backend, as keyword arguments or as a URL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from stm_backends.checks import require_known
from stm_backends.driver import DEFAULT_DEADLINE_S
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
}


@dataclass(frozen=True, kw_only=True)
class SqliteSettings:
    """Which file, how durable, how patient and how large.

    `synchronous="normal"`: what was acknowledged survives the death of any process; a power cut may
    take the last transactions, and never harms the file. `"full"`: it survives the power cut too, at
    the price of one flush to the disk per write. `deadline_s` is how long one operation may take.
    `max_entry_bytes` limits an entry, and a body; `max_record_bytes` a body with its tail.
    """

    path: str
    synchronous: Synchronous = "normal"
    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = 16 * _MIB
    max_record_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        if not self.path or self.path == ":memory:":
            raise ConfigurationError(
                "backend 'sqlite' needs a file, as in sqlite:///conversations.db; use the backend 'memory' "
                "for what need not outlive the process"
            )
        if "\0" in self.path:
            raise ConfigurationError("the path of a database file cannot contain NUL")
        if self.synchronous not in get_args(Synchronous):
            raise ConfigurationError(f"synchronous is 'normal' or 'full', not {self.synchronous!r}")
        if not (self.deadline_s > 0 and math.isfinite(self.deadline_s)):
            raise ConfigurationError(f"deadline_s is a positive number of seconds, not {self.deadline_s!r}")
        for name in ("max_entry_bytes", "max_record_bytes"):
            if not 1 <= getattr(self, name) <= _MAX_BYTES:
                raise ConfigurationError(f"{name} is between 1 and {_MAX_BYTES:,}")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SqliteSettings:
        """Return the settings that a URL spells out; keyword arguments win over its parameters.

        `sqlite:///file.db` is relative to the working directory, `sqlite:////srv/file.db` is absolute
        (SQLAlchemy's convention). The path is percent-decoded; settings follow as `?synchronous=full`.
        """
        parts = urlsplit(url)
        if parts.scheme != "sqlite":
            raise ConfigurationError(f"a sqlite URL begins with sqlite://, not {parts.scheme}://")
        if parts.netloc:
            raise ConfigurationError(
                "a sqlite URL has no host: sqlite:///file.db is a relative path, sqlite:////srv/file.db an "
                "absolute one"
            )
        if parts.fragment:
            raise ConfigurationError("a sqlite URL has no fragment; '#' in a path is written %23")
        return cls.from_options(path=unquote(parts.path[1:]), **{**_from_query(parts.query), **options})

    @classmethod
    def from_options(cls, **options: Any) -> SqliteSettings:
        """Return the settings that keyword arguments spell out; an unknown one raises."""
        require_known(options, (field.name for field in fields(cls)), backend="sqlite")
        return cls(path=options.pop("path", ""), **options)


def _from_query(query: str) -> dict[str, object]:
    given: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        require_known([name], _FROM_TEXT, backend="sqlite")
        if name in given:
            raise ConfigurationError(f"the URL sets {name} twice")
        try:
            given[name] = _FROM_TEXT[name](text)
        except ValueError:
            raise ConfigurationError(f"{name} in the URL is not a number: {text!r}") from None
    return given
