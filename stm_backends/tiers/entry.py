"""One memory, and its tier."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, cast

from stm_backends.errors import ConfigurationError, InvalidState
from stm_backends.guarded import utc_now
from stm_backends.plain_json import require_json
from stm_backends.tiers import relevance


class MemoryTier(Enum):
    """The lifetime of a memory: one turn, one session, or permanent."""

    FLEETING = "fleeting"
    SHORT_TERM = "short_term"
    LONG_TERM = "long_term"

    @classmethod
    def _missing_(cls, value: object) -> MemoryTier:
        raise ConfigurationError(f"a tier must be one of: {', '.join(tier.value for tier in cls)}")


@dataclass
class MemoryEntry:
    """One memory. Times are in UTC: naive ones are taken as UTC, others are converted.

    `importance` outside [0, 1], a negative `access_count` and fields of the wrong type raise
    `ConfigurationError`. The `repr` has no text and no ids.
    """

    key: str = field(repr=False)
    content: Any = field(repr=False)
    tier: MemoryTier
    created_at: datetime = field(default_factory=utc_now)
    last_accessed: datetime = field(default_factory=utc_now)
    access_count: int = 0
    importance: float = 0.5
    source_agent: str = field(default="", repr=False)
    source_run_id: str = field(default="", repr=False)
    tags: list[str] = field(default_factory=list[str], repr=False)
    superseded_by: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("key", "source_agent", "source_run_id"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name} must be a string")
        if not self.key:
            raise ConfigurationError("key must not be empty")
        if not isinstance(cast("object", self.superseded_by), str | None):
            raise ConfigurationError("superseded_by must be a key or None")
        self.tier = MemoryTier(self.tier)
        self.created_at = _as_utc("created_at", self.created_at)
        self.last_accessed = _as_utc("last_accessed", self.last_accessed)
        require_fraction("importance", self.importance)
        count = cast("object", self.access_count)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigurationError("access_count must be an integer, at least 0")
        tags = cast("object", self.tags)
        if not isinstance(tags, (list, tuple)) or not all(
            isinstance(tag, str) for tag in cast("list[object]", tags)
        ):
            raise ConfigurationError("tags must be a list of strings")
        self.tags = [*self.tags]

    @property
    def relevance_score(self) -> float:
        """The relevance at this moment, within [0, 1].

        `recency * 0.3 + frequency * 0.2 + importance * 0.4 + decay * 0.1`
        """
        return self.relevance_at(utc_now())

    def relevance_at(self, now: datetime) -> float:
        """Return the relevance at a time; a naive one is taken as UTC."""
        return relevance.relevance(
            importance=self.importance,
            access_count=self.access_count,
            created_at=self.created_at,
            last_accessed=self.last_accessed,
            now=_as_utc("now", now),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as a JSON object. Raises `InvalidState` if the content is not JSON."""
        require_json(self.content, "content")
        return {
            **{name: getattr(self, name) for name in _NAMES},
            "content": copy.deepcopy(self.content),
            "tier": self.tier.value,
            "created_at": self.created_at.isoformat(timespec="microseconds"),
            "last_accessed": self.last_accessed.isoformat(timespec="microseconds"),
            "tags": [*self.tags],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryEntry:
        """Return the entry from the dictionary of `to_dict`.

        Unknown fields are ignored; missing ones have their defaults. Raises `ConfigurationError` for a
        missing `key`, `content` or `tier`, and for fields of the wrong type.
        """
        if not isinstance(cast("object", data), Mapping):
            raise ConfigurationError(f"an entry must be an object, not {type(data).__name__}")
        missing = [name for name in ("key", "content", "tier") if name not in data]
        if missing:
            raise ConfigurationError(f"an entry must have: {', '.join(missing)}")
        known = {name: data[name] for name in _NAMES if name in data}
        for name in ("created_at", "last_accessed"):
            if isinstance(known.get(name), str):
                known[name] = _time_in(name, known[name])
        known["content"] = copied(known["content"])
        return cls(**known)

    def to_json(self) -> str:
        """Return the JSON of `to_dict`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, json_str: str) -> MemoryEntry:
        """Return the entry from the text of `to_json`. Raises `ConfigurationError` for any other text."""
        try:
            data = json.loads(json_str)
        except (TypeError, ValueError, RecursionError):
            raise ConfigurationError("the text is not the JSON of an entry") from None
        return cls.from_dict(data)

    def copied(self, **changes: Any) -> MemoryEntry:
        """Return a validated copy, with a copy of the content and some fields changed."""
        return replace(self, **{"content": copied(self.content), **changes})

    def accessed(self, now: datetime) -> MemoryEntry:
        """Return a copy with one more access."""
        return self.copied(**self.access(now))

    def access(self, now: datetime) -> dict[str, Any]:
        """Return the fields that change with one more access."""
        return {
            "access_count": self.access_count + 1,
            "last_accessed": max(now, self.last_accessed, self.created_at),
        }


_NAMES = tuple(one.name for one in fields(MemoryEntry))


class Tier:
    """`size`, `len()` and `in` of a tier, without I/O: they count the entries that this process knows of."""

    def _keys(self) -> Collection[str]:
        """Return the keys of the entries that this process knows of."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of entries that this process knows of; other processes may have changed it."""
        return len(self._keys())

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: object) -> bool:
        return key in self._keys()


def require_fraction(name: str, value: object) -> None:
    """Raise `ConfigurationError` unless a value is a number within [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name} must be a number within [0, 1]")


def require_is_entry(entry: object) -> None:
    """Raise `ConfigurationError` unless a value is a `MemoryEntry`."""
    if not isinstance(entry, MemoryEntry):
        raise ConfigurationError(f"entry must be a MemoryEntry, not {type(entry).__name__}")


def copied(value: Any) -> Any:
    """Return a deep copy, so that later changes by the caller are not stored."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidState(f"{type(value).__name__} cannot be copied") from error


def _as_utc(name: str, time: object) -> datetime:
    if not isinstance(time, datetime):
        raise ConfigurationError(f"{name} must be a datetime")
    try:
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except OverflowError:
        raise ConfigurationError(f"{name} is not a UTC time between the years 1 and 9999") from None


def _time_in(name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a time in ISO 8601") from None
