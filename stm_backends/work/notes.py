"""A note that a conversation has work, with the settings that a worker needs for it; pure functions."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from stm_backends.errors import ConfigurationError, Corrupt
from stm_backends.types import MemoryBudget, MemoryKey, ShortTermMemoryConfig

SHARDS: Final = 8
"""The number of records that notes are spread over."""

SPILLS: Final = 15
"""The number of further records for the notes of a shard that is full."""

_ID_BYTES: Final = 8

_NO_SETTINGS: Final[Mapping[str, Any]] = {}


def new_id() -> str:
    """Return a new id of a note. A repeat of one append has the same id, so it is the same note."""
    return os.urandom(_ID_BYTES).hex()


@dataclass(frozen=True, slots=True)
class Note:
    """A conversation has work.

    `at` is when that was noted, and `due` when the work may begin, in epoch seconds. `settings` are those of
    the memory, see `settings_of`. `everything` says that fewer turns than `fold_batch_turns` are summarized,
    too. `tries` is how often in a row the work could not be done, for another reason than a summarizer.
    """

    key: MemoryKey
    at: float
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    due: float = 0.0
    everything: bool = False
    tries: int = 0
    id: str = field(default_factory=new_id)

    @property
    def is_void(self) -> bool:
        """Whether this stands in the place of a note that was erased."""
        return not self.id

    @property
    def since(self) -> float:
        """Since when the work is due, in epoch seconds."""
        return max(self.at, self.due)

    def later(self, due: float, *, tries: int = 0) -> Note:
        """Return another note of the same work that is due at a later time."""
        return replace(self, due=due, tries=tries, id=new_id())


VOID: Final = Note(MemoryKey("", "", ""), 0.0, id="")
"""What stands in the place of a note that was erased."""


def shard_of(key: MemoryKey) -> str:
    """Return the name of the record for the notes of a conversation."""
    return f"{_hash_of(key) % SHARDS:x}"


def _hash_of(key: MemoryKey) -> int:
    composite = key.composite().encode("utf-8", "surrogatepass")
    return hashlib.blake2b(composite, digest_size=1).digest()[0]


def shards() -> list[str]:
    """Return the names of the records that notes are spread over."""
    return [f"{number:x}" for number in range(SHARDS)]


def spill_of(shard: str, number: int) -> str:
    """Return the name of a further record for the notes of a shard that is full."""
    return f"{shard}.{number % SPILLS:x}"


def dump_note(note: Note) -> dict[str, Any]:
    """Return a note as JSON, without what has its default."""
    if note.is_void:
        return {"id": ""}
    key = note.key
    return {
        "id": note.id,
        "key": [key.tenant_id, key.user_id, key.session_id],
        "at": note.at,
        **({"settings": dict(note.settings)} if note.settings else {}),
        **({"due": note.due} if note.due else {}),
        **({"everything": True} if note.everything else {}),
        **({"tries": note.tries} if note.tries else {}),
    }


def load_note(content: Mapping[str, Any]) -> Note:
    """Return the note that `dump_note` wrote. Raises `Corrupt` for anything else."""
    if content.get("id") == "":
        return VOID
    key, settings = content.get("key"), content.get("settings", _NO_SETTINGS)
    times = [content.get("at"), content.get("due", 0.0)]
    tries = content.get("tries", 0)
    if not (
        isinstance(content.get("id"), str)
        and isinstance(key, list)
        and len(cast("list[object]", key)) == 3
        and all(isinstance(part, str) and part.strip() for part in cast("list[object]", key))
        and isinstance(settings, Mapping)
        and all(isinstance(time, (int, float)) and not isinstance(time, bool) for time in times)
        and isinstance(tries, int)
    ):
        raise Corrupt("a note of the queue of work lacks a field, or a field has another type")
    at, due = (float(cast("float", time)) for time in times)
    return Note(
        MemoryKey(*cast("list[str]", key)),
        at,
        cast("Mapping[str, Any]", settings),
        due,
        content.get("everything") is True,
        tries,
        cast("str", content["id"]),
    )


_SETTINGS: Final = (
    "strategy",
    "summarizer_model",
    "include_trajectory_digest",
    "recovery_backlog_limit",
    "retry_attempts",
    "retry_backoff_base_s",
    "degraded_retry_interval_s",
    "summarizer_timeout_s",
    "fold_batch_turns",
    "session_ttl_s",
    "fold_max_turns",
    "fold_max_tokens",
    "transcript",
    "transcript_ttl_s",
)
"""The settings of a memory that a note has. Functions and `isolation` are not among them."""

_BUDGET: Final = ("full_zone_turns", "summary_max_tokens", "total_max_tokens", "overflow_policy")


def settings_of(config: ShortTermMemoryConfig) -> dict[str, Any]:
    """Return the settings of a memory that differ from the defaults, as JSON."""
    budget = _changed(config.budget, MemoryBudget(), _BUDGET)
    changed = _changed(config, ShortTermMemoryConfig(), _SETTINGS)
    return {**changed, **({"budget": budget} if budget else {})}


def config_of(settings: Mapping[str, Any]) -> ShortTermMemoryConfig:
    """Return the configuration with these settings, for the process that does the work.

    Settings that this version does not know are left out. Raises `Corrupt` for values that are not valid.
    """
    budget = settings.get("budget", _NO_SETTINGS)
    try:
        return ShortTermMemoryConfig(
            **{name: settings[name] for name in _SETTINGS if name in settings},
            budget=MemoryBudget(**{name: budget[name] for name in _BUDGET if name in budget}),
            summaries="process",
        )
    except (ConfigurationError, TypeError) as error:
        raise Corrupt("a note of the queue of work has settings that are not valid") from error


def _changed(settings: object, defaults: object, names: tuple[str, ...]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for one in dataclasses.fields(cast("Any", defaults)):
        if one.name in names:
            value: object = getattr(settings, one.name)
            is_json = value is None or isinstance(value, (str, int, float))
            if is_json and value != getattr(defaults, one.name):
                changed[one.name] = value
    return changed
