"""One memory, and the tier that it belongs to."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, cast

from stm_backends.errors import ConfigurationError, InvalidState
from stm_backends.records.codec import require_json
from stm_backends.tiers import relevance


class MemoryTier(Enum):
    """How long a memory is kept: for a turn, for a session, or for good."""

    FLEETING = "fleeting"
    SHORT_TERM = "short_term"
    LONG_TERM = "long_term"


def utc_now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


@dataclass
class MemoryEntry:
    """One memory. Times are UTC: naive ones are taken as UTC, others are converted.

    `importance` outside [0, 1], a negative `access_count` and fields of the wrong type raise
    `ConfigurationError`.
    """

    key: str
    content: Any
    tier: MemoryTier
    created_at: datetime = field(default_factory=utc_now)
    last_accessed: datetime = field(default_factory=utc_now)
    access_count: int = 0
    importance: float = 0.5
    source_agent: str = ""
    source_run_id: str = ""
    tags: list[str] = field(default_factory=list[str])
    superseded_by: str | None = None

    def __post_init__(self) -> None:
        for name in ("key", "source_agent", "source_run_id"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f"{name} must be a string")
        if not self.key:
            raise ConfigurationError("key must not be empty")
        self.tier = MemoryTier(self.tier)
        self.created_at = _as_utc("created_at", self.created_at)
        self.last_accessed = _as_utc("last_accessed", self.last_accessed)
        require_importance(self.importance)
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
        """Return the relevance at a time."""
        return relevance.relevance(
            importance=self.importance,
            access_count=self.access_count,
            created_at=self.created_at,
            last_accessed=self.last_accessed,
            now=now,
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
        """Return the entry of a result of `to_dict`; unknown fields are ignored, others have defaults."""
        known = {name: data[name] for name in _NAMES if name in data}
        for name in ("created_at", "last_accessed"):
            if isinstance(known.get(name), str):
                known[name] = datetime.fromisoformat(known[name])
        known["content"] = copy.deepcopy(known["content"])
        return cls(**known)

    def to_json(self) -> str:
        """Return the JSON of `to_dict`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, json_str: str) -> MemoryEntry:
        """Return the entry of a result of `to_json`."""
        return cls.from_dict(json.loads(json_str))

    def copied(self, **changes: Any) -> MemoryEntry:
        """Return a validated copy, with a copy of the content and some fields changed."""
        return replace(self, **{"content": copied(self.content), **changes})

    def accessed(self, now: datetime) -> MemoryEntry:
        """Return a copy that was read once more."""
        return self.copied(
            access_count=self.access_count + 1, last_accessed=max(now, self.last_accessed, self.created_at)
        )


_NAMES = tuple(one.name for one in fields(MemoryEntry))


def require_importance(importance: object) -> None:
    """Raise `ConfigurationError` unless the importance is a number within [0, 1]."""
    if isinstance(importance, bool) or not isinstance(importance, (int, float)) or not 0 <= importance <= 1:
        raise ConfigurationError("importance must be a number within [0, 1]")


def copied(value: Any) -> Any:
    """Return a deep copy, so that later changes by the caller are not stored."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidState(f"{type(value).__name__} cannot be copied") from error


def _as_utc(name: str, time: object) -> datetime:
    if not isinstance(time, datetime):
        raise ConfigurationError(f"{name} must be a datetime")
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
