"""Turns, keys, budgets, isolation, health and configuration: the vocabulary of the memory.

Names, fields and defaults are those of PenguiFlow's short-term memory, so that these types can stand in
for `penguiflow.planner.memory`. Settings of our own come last and have defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from stm_backends.errors import ConfigurationError, InvalidKey

Strategy: TypeAlias = Literal["truncation", "rolling_summary", "none"]
OverflowPolicy: TypeAlias = Literal["truncate_summary", "truncate_oldest", "error"]
TokenEstimator: TypeAlias = Callable[[str], int]


class MemoryHealth(str, Enum):
    """How summarization is doing."""

    HEALTHY = "healthy"
    """Summaries are being written."""

    RETRY = "retry"
    """The last attempt failed; the next one is scheduled with exponential backoff."""

    DEGRADED = "degraded"
    """Every retry failed: the model sees recent turns only, and attempts go on at an interval."""

    RECOVERING = "recovering"
    """An attempt that would end `DEGRADED` is under way. Shown, never stored."""


@dataclass(slots=True)
class TrajectoryDigest:
    """What the tools of one turn did, short enough to be remembered."""

    tools_invoked: list[str]
    observations_summary: str
    reasoning_summary: str | None = None
    artifacts_refs: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class ConversationTurn:
    """One exchange: what the user said, what the assistant answered, and what happened in between.

    `ts` is the time of completion in seconds since the epoch. `artifacts_shown` is JSON.
    """

    user_message: str
    assistant_response: str
    trajectory_digest: TrajectoryDigest | None = None
    artifacts_shown: dict[str, Any] = field(default_factory=dict[str, Any])
    artifacts_hidden_refs: list[str] = field(default_factory=list[str])
    ts: float = 0.0


class StoredTurn(NamedTuple):
    """A turn with the id that makes adding it twice harmless."""

    id: str
    turn: ConversationTurn


@dataclass(slots=True)
class MemoryBudget:
    """How much of a conversation the model is shown; sizes are tokens.

    `total_max_tokens=0` is unlimited, `summary_max_tokens=0` means no summary.
    """

    full_zone_turns: int = 5
    summary_max_tokens: int = 1000
    total_max_tokens: int = 10000
    overflow_policy: OverflowPolicy = "truncate_oldest"

    def __post_init__(self) -> None:
        _require_at_least_zero(self, "full_zone_turns", "summary_max_tokens", "total_max_tokens")
        if self.total_max_tokens and self.summary_max_tokens > self.total_max_tokens:
            raise ConfigurationError("summary_max_tokens must be <= total_max_tokens")
        _require_one_of(self, "overflow_policy", ("truncate_summary", "truncate_oldest", "error"))


@dataclass(slots=True)
class MemoryIsolation:
    """Where in `tool_context` the parts of a conversation's key are found (dotted paths)."""

    tenant_key: str = "tenant_id"
    user_key: str = "user_id"
    session_key: str = "session_id"
    require_explicit_key: bool = True

    def __post_init__(self) -> None:
        for name in ("tenant_key", "user_key", "session_key"):
            if not getattr(self, name):
                raise ConfigurationError(f"{name} must be a non-empty string")


@dataclass(slots=True)
class MemoryKey:
    """Whose conversation, and which one. The boundary that no memory crosses."""

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


def default_token_estimator(text: str) -> int:
    """Estimate tokens as a quarter of the characters, plus one."""
    return len(text) // 4 + 1


@dataclass(slots=True)
class ShortTermMemoryConfig:
    """Everything that can be configured about one memory. Times are seconds.

    The settings after `on_health_changed` are ours; a configuration object without them works too.

    - `summarizer_timeout_s`: a summarizer call that takes longer counts as failed.
    - `fold_batch_turns`: how many turns must have left the full zone to be worth a summarizer call.
    - `session_ttl_s`: a conversation that nobody adds to for this long is forgotten; `None`: never.
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

    def __post_init__(self) -> None:
        _require_one_of(self, "strategy", ("truncation", "rolling_summary", "none"))
        _require_at_least_zero(
            self,
            "recovery_backlog_limit",
            "retry_attempts",
            "retry_backoff_base_s",
            "degraded_retry_interval_s",
        )
        if not self.summarizer_timeout_s > 0:
            raise ConfigurationError("summarizer_timeout_s must be > 0")
        if self.fold_batch_turns < 1:
            raise ConfigurationError("fold_batch_turns must be >= 1")
        if self.session_ttl_s is not None and not self.session_ttl_s > 0:
            raise ConfigurationError("session_ttl_s must be > 0, or None for no expiry")

    @property
    def estimate(self) -> TokenEstimator:
        """The token estimator in force."""
        return self.token_estimator or default_token_estimator


def as_config(config: object | None) -> ShortTermMemoryConfig:
    """Return our own validated copy of any object with the fields of a `ShortTermMemoryConfig`.

    Fields that the object lacks (those newer than PenguiFlow's) take their defaults; `None` is the
    default configuration. A copy, so that nobody changes a running memory's settings from outside.
    """
    if config is None:
        return ShortTermMemoryConfig()
    return dataclasses.replace(
        _copy(ShortTermMemoryConfig, config),
        budget=_copy(MemoryBudget, getattr(config, "budget", MemoryBudget())),
        isolation=_copy(MemoryIsolation, getattr(config, "isolation", MemoryIsolation())),
    )


def as_turn(turn: object) -> ConversationTurn:
    """Return our own copy of any object with the fields of a `ConversationTurn`."""
    copy = _copy(ConversationTurn, turn)
    if not (isinstance(copy.user_message, str) and isinstance(copy.assistant_response, str)):  # pyright: ignore[reportUnnecessaryIsInstance] -- turns are duck-typed
        raise ConfigurationError("user_message and assistant_response of a turn must be strings")
    digest = cast("object", copy.trajectory_digest)
    copy.trajectory_digest = None if digest is None else _copy(TrajectoryDigest, digest)
    return copy


_T = TypeVar("_T")


def _copy(cls: type[_T], source: object) -> _T:
    names: tuple[str, ...] = vars(cls)["__match_args__"]  # where a dataclass has its fields' names
    given = {name: getattr(source, name, _LACKING) for name in names}
    try:
        return cls(**{name: value for name, value in given.items() if value is not _LACKING})
    except TypeError as error:
        raise ConfigurationError(f"{type(source).__name__} is not a {cls.__name__}: {error}") from None


_LACKING = object()


def _require_at_least_zero(settings: object, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ConfigurationError(f"{name} must be >= 0")


def _require_one_of(settings: object, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(settings, name) not in allowed:
        raise ConfigurationError(f"{name} must be one of: {', '.join(allowed)}")
