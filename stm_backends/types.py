"""Turns, keys, budgets, isolation, health and configuration.

Names, fields and defaults are those of PenguiFlow's short-term memory, so that these types can replace those
of `penguiflow.planner.memory`. Settings of this library come last and have defaults.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

from stm_backends.errors import ConfigurationError, InvalidKey, InvalidState
from stm_backends.tokens import TokenEstimator, default_token_estimator

Strategy: TypeAlias = Literal["truncation", "rolling_summary", "none"]
OverflowPolicy: TypeAlias = Literal["truncate_summary", "truncate_oldest", "error"]
Summaries: TypeAlias = Literal["process", "worker"]


class MemoryHealth(str, Enum):
    """The health of summarization."""

    HEALTHY = "healthy"
    """Summaries are written."""

    RETRY = "retry"
    """The last attempt failed; the next is scheduled with exponential backoff."""

    DEGRADED = "degraded"
    """All retries failed: the model is shown recent turns only, and attempts continue at an interval."""

    RECOVERING = "recovering"
    """An attempt that would end `DEGRADED` is running. Shown, never stored."""


@dataclass(slots=True)
class TrajectoryDigest:
    """A short account of the tool use in one turn."""

    tools_invoked: list[str]
    observations_summary: str
    reasoning_summary: str | None = None
    artifacts_refs: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class ConversationTurn:
    """One exchange: the user's message, the assistant's response, and the tool use in between.

    `ts` is the time of completion in seconds since the epoch; if it is 0, a shared memory stores the current
    time. `artifacts_shown` is JSON that the model is shown, by name.
    """

    user_message: str
    assistant_response: str
    trajectory_digest: TrajectoryDigest | None = None
    artifacts_shown: dict[str, Any] = field(default_factory=dict[str, Any])
    artifacts_hidden_refs: list[str] = field(default_factory=list[str])
    ts: float = 0.0


_NO_FIELDS: Final[Mapping[str, Any]] = {}


class Said(NamedTuple):
    """A message that was stored as one, by the id of the `entry` that brought it.

    It is JSON as the caller gave it. `begins` is true if a turn begins with it, and `weight` is the part of a
    budget that it takes; see `tokens.weigh`.
    """

    entry: str
    message: Mapping[str, Any]
    begins: bool
    weight: int


class StoredTurn(NamedTuple):
    """A numbered item of a conversation: a turn, or one message. Its id makes adding it twice harmless.

    `extra` has the fields of a saved turn that this version of the library does not know; they are JSON.
    A message is `said`, and `turn` shows its text and its time.
    """

    id: str
    turn: ConversationTurn
    extra: Mapping[str, Any] = _NO_FIELDS
    said: Said | None = None

    @property
    def entry(self) -> str:
        """The id of the entry that brought it; an addition is recognized by this id."""
        return self.id if self.said is None else self.said.entry

    @property
    def begins(self) -> bool:
        """True if a turn begins with it."""
        return self.said is None or self.said.begins

    @property
    def removed(self) -> bool:
        """True if an edit has removed it. Its number stays, and it is shown nowhere."""
        return self.said is not None and not self.said.message


@dataclass(slots=True)
class MemoryBudget:
    """The share of a conversation that the model is shown. Sizes are in tokens.

    `total_max_tokens=0` is unlimited, `summary_max_tokens=0` means no summary.
    """

    full_zone_turns: int = 5
    summary_max_tokens: int = 1000
    total_max_tokens: int = 10000
    overflow_policy: OverflowPolicy = "truncate_oldest"

    def __post_init__(self) -> None:
        _require_count(self, "full_zone_turns", "summary_max_tokens", "total_max_tokens")
        if self.total_max_tokens and self.summary_max_tokens > self.total_max_tokens:
            raise ConfigurationError("summary_max_tokens must be <= total_max_tokens")
        _require_one_of(self, "overflow_policy", ("truncate_summary", "truncate_oldest", "error"))


@dataclass(slots=True)
class MemoryIsolation:
    """The dotted paths in `tool_context` of the parts of a conversation's key."""

    tenant_key: str = "tenant_id"
    user_key: str = "user_id"
    session_key: str = "session_id"
    require_explicit_key: bool = True

    def __post_init__(self) -> None:
        for name in ("tenant_key", "user_key", "session_key"):
            path: object = getattr(self, name)
            if not (isinstance(path, str) and path):
                raise ConfigurationError(f"{name} must be a non-empty string")


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """The key of a conversation: its tenant, user and session. Immutable and hashable."""

    tenant_id: str
    user_id: str
    session_id: str

    def composite(self) -> str:
        """Return `tenant:user:session`; different keys never share a composite.

        A part that contains `:` or `%` has those percent-encoded, and a composite that would begin
        with the reserved `kv:v1:` has its first letter encoded. Raises `InvalidKey` on a blank part.
        """
        parts = (self.tenant_id, self.user_id, self.session_id)
        for name, part in zip(("tenant_id", "user_id", "session_id"), parts, strict=True):
            if not isinstance(part, str) or not part.strip():  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidKey(f"{name} must be a string that is not blank")
        composite = ":".join(part.replace("%", "%25").replace(":", "%3A") for part in parts)
        return f"%6B{composite[1:]}" if composite.startswith("kv:v1:") else composite


def as_composite(key: object) -> str:
    """Return the composite of a key; a string is returned as it is.

    Raises `InvalidKey` for anything but a string or an object with the parts of a `MemoryKey`.
    """
    if isinstance(key, str):
        return key
    parts = [getattr(key, name, None) for name in ("tenant_id", "user_id", "session_id")]
    if isinstance(key, type) or None in parts:
        raise InvalidKey(f"a conversation's key must be a MemoryKey, or its composite; not {_kind(key)}")
    return MemoryKey(*cast("list[str]", parts)).composite()


@dataclass(slots=True)
class ShortTermMemoryConfig:
    """The settings of a memory. Times are seconds.

    The settings after `on_health_changed` are not PenguiFlow's; a configuration object may lack them.

    - `summarizer_timeout_s`: a summarizer call that takes longer counts as failed.
    - `fold_batch_turns`: number of turns that must have left the full zone before the summarizer is called.
    - `session_ttl_s`: a conversation expires this long after the last turn was added; `None`: never.
    - `fold_max_turns`, `fold_max_tokens`: the most that one summarizer call covers; further calls cover the
      rest. Both are halved for each failure in a row, down to one turn, and then start over.
    - `transcript`: turns that leave the record are kept in pages, so that the whole conversation can be read;
      for shared memories only. Once one process has kept it, every process does.
    - `transcript_ttl_s`: with a transcript, the conversation expires this long after the last turn was added,
      and a page this long after its last turn was added; `None`: never, or after `session_ttl_s`.
    - `summaries`: `"worker"` leaves summaries and trims to `stm-backends work`, and `"process"` makes them in
      the processes that use the conversation; for shared memories only. `None`: as set on the backend.
    """

    strategy: Strategy = "none"
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    isolation: MemoryIsolation = field(default_factory=MemoryIsolation)
    summarizer_model: str | None = None
    include_trajectory_digest: bool = True
    recovery_backlog_limit: int = 20
    retry_attempts: int = 3
    retry_backoff_base_s: float = 2.0
    degraded_retry_interval_s: float = 30.0
    token_estimator: TokenEstimator | None = None
    on_turn_added: Callable[[ConversationTurn], Awaitable[None]] | None = None
    on_summary_updated: Callable[[str, str], Awaitable[None]] | None = None
    on_health_changed: Callable[[MemoryHealth, MemoryHealth], Awaitable[None]] | None = None
    summarizer_timeout_s: float = 60.0
    fold_batch_turns: int = 1
    session_ttl_s: float | None = None
    fold_max_turns: int = 50
    fold_max_tokens: int = 4000
    transcript: bool = False
    transcript_ttl_s: float | None = None
    summaries: Summaries | None = None

    def __post_init__(self) -> None:
        _require_one_of(self, "strategy", ("truncation", "rolling_summary", "none"))
        _require_fields(self, "budget", "MemoryBudget", "full_zone_turns")
        _require_fields(self, "isolation", "MemoryIsolation", "session_key")
        _require_count(self, "recovery_backlog_limit", "retry_attempts")
        _require_count(self, "fold_batch_turns", "fold_max_turns", "fold_max_tokens", least=1)
        _require_seconds(self, "retry_backoff_base_s", "degraded_retry_interval_s", zero=True)
        _require_seconds(self, "summarizer_timeout_s", zero=False)
        for name in ("session_ttl_s", "transcript_ttl_s"):
            if getattr(self, name) is not None:
                _require_seconds(self, name, zero=False, otherwise=", or None for no expiry")
        if self.summaries is not None:
            _require_one_of(self, "summaries", ("process", "worker"))
        self._require_one_expiry()
        for name in ("token_estimator", "on_turn_added", "on_summary_updated", "on_health_changed"):
            value: object = getattr(self, name)
            if not (value is None or callable(value)):
                raise ConfigurationError(f"{name} must be callable, or None; not {type(value).__name__}")

    def _require_one_expiry(self) -> None:
        """Reject times to live that would let a record expire before its pages, or that need a transcript."""
        if not isinstance(self.transcript, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
            raise ConfigurationError(f"transcript must be True or False; not {_kind(self.transcript)}")
        if self.transcript_ttl_s is None:
            return
        if not self.transcript:
            raise ConfigurationError("transcript_ttl_s needs transcript=True")
        if self.session_ttl_s is not None and self.session_ttl_s != self.transcript_ttl_s:
            raise ConfigurationError(
                "session_ttl_s must be None, or equal to transcript_ttl_s: a conversation that expires "
                "earlier than its transcript would lose it"
            )

    async def get_llm_context(self) -> Mapping[str, Any]:
        """Return a mapping that raises `ConfigurationError` when it is used: a configuration is not a memory.

        A framework that is given a configuration instead of a memory would otherwise go on without one.
        PenguiFlow's planner only logs what this method raises, so the answer raises.
        """
        return _NoContext()

    @property
    def record_ttl_s(self) -> float | None:
        """The seconds that a conversation's record lives after its last turn; `None` means forever."""
        return self.session_ttl_s if self.transcript_ttl_s is None else self.transcript_ttl_s

    @property
    def estimate(self) -> TokenEstimator:
        """The token estimator in force."""
        return self.token_estimator or default_token_estimator


class _NoContext(Mapping[str, Any]):
    """The context of an object that is not a memory."""

    def __getitem__(self, name: str) -> Any:
        raise _not_a_memory()

    def __iter__(self) -> Iterator[str]:
        raise _not_a_memory()

    def __len__(self) -> int:
        raise _not_a_memory()


def _not_a_memory() -> ConfigurationError:
    return ConfigurationError(
        "a ShortTermMemoryConfig of stm_backends was passed in the place of a memory, so nothing would be "
        "remembered; write short_term_memory=backend.router(config, summarizer=...), or pass the framework's "
        "own configuration for its own memory"
    )


def as_config(config: object | None) -> ShortTermMemoryConfig:
    """Return a validated copy of any object with the fields of a `ShortTermMemoryConfig`.

    Missing fields take their defaults, and `None` means the default configuration. An object without
    `strategy` and `budget` raises `ConfigurationError`: the defaults would turn the memory off. Changing the
    original object does not affect the copy.
    """
    if config is None:
        return ShortTermMemoryConfig()
    if isinstance(config, type) or not (hasattr(config, "strategy") and hasattr(config, "budget")):
        raise ConfigurationError(
            "a memory's configuration must be a ShortTermMemoryConfig(strategy=..., "
            f"budget=MemoryBudget(...)) or an object with its fields; not {_kind(config)}"
        )
    copy = _copy(ShortTermMemoryConfig, config)
    copy.budget = _copy(MemoryBudget, copy.budget)
    copy.isolation = _copy(MemoryIsolation, copy.isolation)
    return copy


def as_turn(turn: object) -> ConversationTurn:
    """Return a copy of any object with the fields of a `ConversationTurn`.

    Raises `InvalidState`, with the field's path, for values that could not be read back: texts and references
    must be strings and `ts` a number. The content of `artifacts_shown` is checked when it is stored. A `ts`
    in milliseconds or smaller units is converted to seconds; a negative one and NaN are unknown times (0).
    """
    if type(turn) is ConversationTurn:
        # The same copy in fewer steps, because nearly every turn is one.
        copy = ConversationTurn(
            turn.user_message,
            turn.assistant_response,
            turn.trajectory_digest,
            turn.artifacts_shown,
            turn.artifacts_hidden_refs,
            turn.ts,
        )
    else:
        copy = _copy(ConversationTurn, turn, InvalidState)
    if type(copy.user_message) is not str:
        _require_text(copy.user_message, "turn.user_message")
    if type(copy.assistant_response) is not str:
        _require_text(copy.assistant_response, "turn.assistant_response")
    digest = cast("object", copy.trajectory_digest)
    if digest is not None:
        copy.trajectory_digest = _as_digest(digest)
    if not isinstance(copy.artifacts_shown, dict):  # pyright: ignore[reportUnnecessaryIsInstance] -- turns are duck-typed
        raise InvalidState(f"turn.artifacts_shown is {type(copy.artifacts_shown).__name__}, not a dict")
    if type(copy.artifacts_hidden_refs) is not list or copy.artifacts_hidden_refs:
        _require_texts(copy.artifacts_hidden_refs, "turn.artifacts_hidden_refs")
    if type(copy.ts) is not float or not 0 <= copy.ts < MILLISECONDS:
        copy.ts = _as_time(copy.ts)
    return copy


def as_turn_id(turn_id: object | None) -> str:
    """Return the given id of a turn, or a new one for `None`.

    Raises `InvalidState` for anything but a non-empty string.
    """
    if turn_id is None:
        return os.urandom(16).hex()
    if not isinstance(turn_id, str) or not turn_id:
        what = "empty" if turn_id == "" else f"{type(turn_id).__name__}, not a string"
        raise InvalidState(f"the id of a turn or of messages is {what}; omit it to get a new one")
    return turn_id


def _as_digest(source: object) -> TrajectoryDigest:
    digest = _copy(TrajectoryDigest, source, InvalidState)
    _require_texts(digest.tools_invoked, "turn.trajectory_digest.tools_invoked")
    _require_text(digest.observations_summary, "turn.trajectory_digest.observations_summary")
    if digest.reasoning_summary is not None:
        _require_text(digest.reasoning_summary, "turn.trajectory_digest.reasoning_summary")
    _require_texts(digest.artifacts_refs, "turn.trajectory_digest.artifacts_refs")
    # Copies of the lists: this process shows the turn again without reading what was stored.
    digest.tools_invoked, digest.artifacts_refs = [*digest.tools_invoked], [*digest.artifacts_refs]
    return digest


AHEAD_S: Final = 86_400.0
"""A time more than this many seconds in the future cannot be that of a turn."""

MILLISECONDS: Final = 1e11
"""A time from here on is not in seconds: it would be after the year 5000."""


def seconds_of(time: float) -> float:
    """Return a time of unknown quality in seconds since the epoch, and 0 for an unknown one.

    Milliseconds, microseconds and nanoseconds are recognized by their size. NaN, infinity, negative times and
    larger times are unknown. So no time keeps a conversation from ever being old.
    """
    for scale in (1.0, 1e3, 1e6, 1e9):
        if 0 <= time / scale < MILLISECONDS:
            return time / scale
    return 0.0


def _as_time(ts: object) -> float:
    """Return a time in seconds; infinity and times beyond nanoseconds are rejected."""
    if not isinstance(ts, (str, bytes, bytearray, bool)):
        try:
            time = float(cast("Any", ts))
        except (TypeError, ValueError, OverflowError):
            time = math.inf
        if not math.isinf(time) and (not time >= MILLISECONDS or seconds_of(time)):
            return seconds_of(time)
    what = "out of range" if isinstance(ts, (int, float)) and not isinstance(ts, bool) else type(ts).__name__
    raise InvalidState(f"turn.ts is {what}, not a number of seconds since 1970")


def _require_text(value: object, path: str) -> None:
    if not isinstance(value, str):
        raise InvalidState(f"{path} is {type(value).__name__}, not a string")


def _require_texts(value: object, path: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise InvalidState(f"{path} is {type(value).__name__}, not a list of strings")
    for index, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, str):
            raise InvalidState(f"{path}[{index}] is {type(item).__name__}, not a string")


_T = TypeVar("_T")


def _copy(cls: type[_T], source: object, error: type[ConfigurationError] = ConfigurationError) -> _T:
    names: tuple[str, ...] = vars(cls)["__match_args__"]  # the names of a dataclass's fields
    given = {name: getattr(source, name, _LACKING) for name in names}
    try:
        return cls(**{name: value for name, value in given.items() if value is not _LACKING})
    except TypeError as problem:
        missing = [name for name in _required(cls) if given[name] is _LACKING]
        what = f"it has no {' and no '.join(missing)}" if missing else str(problem)
        raise error(f"{_kind(source)} is not a {cls.__name__}: {what}") from None


def _required(cls: Any) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    return [
        one.name
        for one in dataclasses.fields(cls)
        if one.default is MISSING and one.default_factory is MISSING
    ]


_LACKING = object()


def _kind(value: object) -> str:
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def _require_fields(settings: object, name: str, cls: str, field_name: str) -> None:
    """Reject an object without the fields, for which the defaults would be used silently."""
    value: object = getattr(settings, name)
    if isinstance(value, type) or not hasattr(value, field_name):
        raise ConfigurationError(
            f"{name} must be a {cls}, or an object with its fields; not {_kind(cast('object', value))}"
        )


def _require_count(settings: object, *names: str, least: int = 0) -> None:
    for name in names:
        value: object = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigurationError(f"{name} must be an integer >= {least}; not {type(value).__name__}")
        if value < least:
            raise ConfigurationError(f"{name} must be >= {least}")


_LONGEST_S = 1e11
"""About three thousand years: a longer time is a mistake, and no datastore can represent it."""


def _require_seconds(settings: object, *names: str, zero: bool, otherwise: str = "") -> None:
    for name in names:
        value: object = getattr(settings, name)
        least = ">= 0" if zero else "> 0"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            problem = f"a number of seconds {least}{otherwise}; not {type(value).__name__}"
        elif not (0 <= value <= _LONGEST_S and (zero or value)):
            problem = f"{least} and at most {_LONGEST_S:g}{otherwise}"
        else:
            continue
        raise ConfigurationError(f"{name} must be {problem}")


def _require_one_of(settings: object, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(settings, name) not in allowed:
        raise ConfigurationError(f"{name} must be one of: {', '.join(allowed)}")
