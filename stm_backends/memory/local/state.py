"""The complete state of a conversation as one value, and as the JSON object that PenguiFlow calls its state.

PenguiFlow's fields have PenguiFlow's meaning. Additional data is in the field `stm` and in the `turn_id` of
each turn; PenguiFlow ignores both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from stm_backends.errors import InvalidState
from stm_backends.memory import policy
from stm_backends.memory.policy import Trim
from stm_backends.memory.view import render
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.records.body import Body
from stm_backends.records.codec import TURN_FIELDS, dump_body, dump_turn, load_body, load_turn
from stm_backends.records.steps import STEP, Steps, run_now
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    ShortTermMemoryConfig,
    StoredTurn,
    TrajectoryDigest,
)

OURS: Final = "stm"
"""The field of a state for data that PenguiFlow's states do not have."""

REVISION: Final = "revision"
"""The field by which PenguiFlow, from 3.11.3 on, recognizes a state that it wrote or has loaded.

It skips the load of one, and saves a summary over it. So each save needs a new revision: with that of an
earlier save, later additions are ignored and overwritten; without a revision, they are overwritten.
"""

FORGET_BY_COUNT: Final = -math.inf
"""The `keep_for` of a local memory: its writes are never retried, so no id is kept because of its age, and
the cost of a turn does not depend on the length of the conversation."""


@dataclass(frozen=True, slots=True)
class State:
    """A conversation at one instant.

    `gone` counts the ids ever added to `body.forgotten`, which remembers the last of them. `recovering` is
    true if an attempt to leave `DEGRADED` was running. `ours` is true if this library wrote the state: one
    that PenguiFlow rewrote remembers no ids. `extra` has the fields of a saved state that this version does
    not know. The turns are deep copies and are never changed.
    """

    body: Body = Body()
    pending: tuple[StoredTurn, ...] = ()
    recent: tuple[StoredTurn, ...] = ()
    gone: int = 0
    recovering: bool = False
    ours: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def turns(self) -> tuple[StoredTurn, ...]:
        """Every turn that is retained, oldest first."""
        return (*self.pending, *self.recent)

    @property
    def health(self) -> MemoryHealth:
        """The health as it is shown."""
        return MemoryHealth.RECOVERING if self.recovering else self.body.health

    def without(self, trim: Trim, *, now: float) -> State:
        """Return the state after a trim."""
        gone = self.pending[: trim.count]
        return replace(
            self,
            body=policy.after_trim(self.body, trim, gone, now=now, keep_for=FORGET_BY_COUNT),
            pending=self.pending[trim.count :],
            gone=self.gone + len(gone),
        )

    def divided(self, config: ShortTermMemoryConfig, *, now: float) -> State:
        """Return the state with its turns divided by this configuration.

        Pending turns stay pending, even if the full zone has become larger.
        """
        if config.strategy == "none":
            return self
        turns = self.turns
        boundary = max(len(self.pending), len(turns) - config.budget.full_zone_turns)
        state = replace(self, pending=turns[:boundary], recent=turns[boundary:])
        return (
            state.without(Trim(boundary, lost=False), now=now) if config.strategy == "truncation" else state
        )


def own_turn(stored: StoredTurn) -> StoredTurn:
    """Return a deep copy of a turn, exactly as loading a state would return it.

    Raises `InvalidState` for a turn that could not be loaded.
    """
    turn_id, turn, extra, _ = stored
    digest = turn.trajectory_digest
    try:
        if digest is not None:
            reasoning = digest.reasoning_summary
            digest = TrajectoryDigest(
                digest.tools_invoked,
                str(digest.observations_summary or ""),
                None if reasoning is None else str(reasoning),
                digest.artifacts_refs,
            )
        # The fields that `_own_loaded` does not copy. `load_turn` on `dump_turn` takes four times as long.
        copy = ConversationTurn(
            str(turn.user_message or ""),
            str(turn.assistant_response or ""),
            digest,
            turn.artifacts_shown or {},
            turn.artifacts_hidden_refs or [],
            float(turn.ts or 0.0),
        )
        return StoredTurn(turn_id, _own_loaded(copy), extra)
    except InvalidState:
        raise
    except (TypeError, ValueError):
        raise InvalidState("a field of the turn is of the wrong type") from None
    except RecursionError:
        raise InvalidState("the turn is nested too deeply") from None


def _own_loaded(turn: ConversationTurn) -> ConversationTurn:
    """Complete the deep copy of a turn whose dataclasses are copies already; empty fields are new."""
    if turn.artifacts_shown:
        turn.artifacts_shown = _own_json(turn.artifacts_shown, "turn.artifacts_shown")
    if turn.artifacts_hidden_refs:
        turn.artifacts_hidden_refs = _own_json(turn.artifacts_hidden_refs, "turn.artifacts_hidden_refs")
    digest = turn.trajectory_digest
    if digest is not None:
        digest.tools_invoked = _own_json(digest.tools_invoked, "turn.trajectory_digest.tools_invoked")
        digest.artifacts_refs = _own_json(digest.artifacts_refs, "turn.trajectory_digest.artifacts_refs")
    return turn


def _own_json(value: Any, path: str) -> Any:
    require_json(value, path, deepest=DEEPEST_IN_TURN)
    return _copy(value)


def dump_state(state: State, config: ShortTermMemoryConfig) -> dict[str, Any]:
    """Return a state as a new JSON object.

    With `truncation` it has only the turns that fit the token budget, as PenguiFlow's does.
    """
    return run_now(dump_steps(state, config))


def dump_steps(state: State, config: ShortTermMemoryConfig) -> Steps[dict[str, Any]]:
    """Dump a state like `dump_state`, in steps."""
    recent = state.recent
    if config.strategy == "truncation":
        view = render(config, health=state.health, summary="", pending=(), recent=recent)
        recent = recent[len(recent) - view.kept :]
    unsummarized = yield from _dump_turns(state.pending)
    degraded = state.body.health is MemoryHealth.DEGRADED
    ours = dump_body(state.body)
    return {
        **_copy(state.extra),
        "version": 1,
        "health": ours.pop("health"),
        "summary": ours.pop("summary"),
        "turns": (yield from _dump_turns(recent)),
        "pending": [] if degraded else unsummarized,
        "backlog": unsummarized if degraded else [],
        "config_snapshot": _snapshot(config),
        OURS: _copy(ours) | {"gone": state.gone},
    }


def revised(content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a state as it is saved, under a revision that no other save has."""
    return {**content, REVISION: os.urandom(16).hex()}


_FIELDS: Final = (
    *("version", "health", "summary", "turns", "pending", "backlog", "config_snapshot"),
    *(OURS, REVISION),
)


def load_state(content: object, config: ShortTermMemoryConfig) -> State:
    """Return the state in a JSON object of this library or PenguiFlow. Raises `ValueError` if it is invalid.

    Accepts what PenguiFlow 3.11.2 accepts, with the same turns, summary and health. Other fields are kept,
    except for the revision, which belongs to one save.
    """
    return run_now(load_steps(content, config))


def load_steps(content: object, config: ShortTermMemoryConfig, known: State | None = None) -> Steps[State]:
    """Load a state like `load_state`, in steps; reuses equal turns of the state `known`."""
    if not isinstance(content, Mapping):
        raise ValueError("a memory state must be a mapping")
    # A copy, because the caller may change the mapping between steps. It is also freed in steps if there is
    # no other reference: freeing many turns takes as long as loading some of them.
    fields = {**cast("Mapping[str, Any]", content)}
    del content
    if fields.get("version") != 1:
        raise ValueError("a memory state of a version that this library does not read; it reads version 1")
    ours = fields.get(OURS)
    if ours is not None and not isinstance(ours, Mapping):
        raise ValueError(f"the field {OURS!r} of a memory state must be a mapping")
    kept = dict(cast("Mapping[str, Any]", ours or {}))
    try:
        health = MemoryHealth(fields.get("health"))
        gone = int(kept.pop("gone", 0))
        body = load_body(kept)
        loaded = _DistinctTurns(known)
        lists = [_listed(fields.pop(name, None)) for name in ("backlog", "pending", "turns")]
        backlog = yield from loaded.of(lists[0])
        pending = yield from loaded.of(lists[1])
        recent = yield from loaded.of(lists[2])
    except InvalidState:
        raise
    except (TypeError, OverflowError, ValueError):
        # The cause may quote the conversation.
        raise ValueError("not a memory state: a field has the wrong type or an invalid value") from None
    return State(
        body=replace(_with_health(body, health, config), summary=str(fields.get("summary") or "")),
        pending=(*backlog, *pending),
        recent=recent,
        gone=gone,
        recovering=health is MemoryHealth.RECOVERING,
        ours=ours is not None,
        extra={name: _own_json(fields[name], name) for name in fields if name not in _FIELDS},
    )


def _listed(payloads: object) -> list[object]:
    """Return a copy of the turns of one field of a state."""
    payloads = payloads or []
    if not isinstance(payloads, Sequence):
        raise ValueError("the turns of a memory state must be lists")
    return [*cast("Sequence[object]", payloads)]


class _DistinctTurns:
    """The turns of one state, each id once.

    A turn without an id gets one from its content and the number of equal turns before it, so that every
    process that reads the same state uses the same id.
    """

    def __init__(self, known: State | None) -> None:
        self._known = {} if known is None else {stored.id: stored for stored in known.turns}
        self._ids: set[str] = set()
        self._equal: Counter[str] = Counter()

    def of(self, payloads: list[object]) -> Steps[tuple[StoredTurn, ...]]:
        """Return the turns of a list, and empty the list."""
        turns: list[StoredTurn] = []
        payloads.reverse()
        while payloads:
            for _ in range(min(STEP, len(payloads))):
                stored = self._one(payloads.pop())
                if stored.id not in self._ids:
                    self._ids.add(stored.id)
                    turns.append(stored)
            yield
        return tuple(turns)

    def _one(self, payload: object) -> StoredTurn:
        if not isinstance(payload, Mapping):
            raise ValueError("Invalid turn payload")
        fields = cast("Mapping[str, Any]", payload)
        turn_id: object = fields.get("turn_id")
        if not isinstance(turn_id, str) or not turn_id:
            turn = load_turn(fields)
            content = dump_turn(StoredTurn("", turn))
            text = json.dumps(content, sort_keys=True)
            content_hash = hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()
            turn_id = f"{content_hash}-{self._equal[content_hash]}"
            self._equal[content_hash] += 1
        known = self._known.get(turn_id)
        if known is not None and _is_as_saved(known, fields):
            return known
        extra = {name: _own_json(fields[name], f"turn.{name}") for name in fields if name not in TURN_FIELDS}
        return StoredTurn(turn_id, _own_loaded(load_turn(fields)), extra)


def _is_as_saved(stored: StoredTurn, fields: Mapping[str, Any]) -> bool:
    """Say whether a turn equals its saved form; may return `False` for an equal turn with extra fields."""
    turn, extra = stored.turn, stored.extra
    if extra or len(fields) != len(TURN_FIELDS):
        return False
    digest: object = fields.get("trajectory_digest")
    if turn.trajectory_digest is None or not isinstance(digest, dict):
        same = turn.trajectory_digest is None and digest is None
    else:
        same = digest == _dump_digest(turn.trajectory_digest)
    return (
        same
        and fields.get("user_message") == turn.user_message
        and fields.get("assistant_response") == turn.assistant_response
        and fields.get("artifacts_shown") == turn.artifacts_shown
        and fields.get("artifacts_hidden_refs") == turn.artifacts_hidden_refs
        and fields.get("ts") == turn.ts
    )


def _with_health(body: Body, health: MemoryHealth, config: ShortTermMemoryConfig) -> Body:
    """Add the health of a state, and at least the failures that lead to it."""
    if health is MemoryHealth.HEALTHY:
        return replace(body, health=health, attempts=0, next_attempt_at=0.0)
    if health is MemoryHealth.RETRY:
        return replace(body, health=health, attempts=max(body.attempts, 1))
    attempts = max(body.attempts, config.retry_attempts + 1)
    return replace(body, health=MemoryHealth.DEGRADED, attempts=attempts)


def _dump_turns(turns: Sequence[StoredTurn]) -> Steps[list[dict[str, Any]]]:
    dumped: list[dict[str, Any]] = []
    for start in range(0, len(turns), STEP):
        dumped += map(_dump_own, turns[start : start + STEP])
        yield
    return dumped


def _dump_own(stored: StoredTurn) -> dict[str, Any]:
    """Return a turn as JSON, like `dump_turn`, as a deep copy."""
    turn, extra = stored.turn, stored.extra
    return {
        **_copy(extra),
        "turn_id": stored.id,
        "user_message": turn.user_message,
        "assistant_response": turn.assistant_response,
        "trajectory_digest": None if turn.trajectory_digest is None else _dump_digest(turn.trajectory_digest),
        "artifacts_shown": _copy(turn.artifacts_shown),
        "artifacts_hidden_refs": _copy(turn.artifacts_hidden_refs),
        "ts": turn.ts,
    }


def _dump_digest(digest: TrajectoryDigest) -> dict[str, Any]:
    return {
        "tools_invoked": _copy(digest.tools_invoked),
        "observations_summary": digest.observations_summary,
        "reasoning_summary": digest.reasoning_summary,
        "artifacts_refs": _copy(digest.artifacts_refs),
    }


def _copy(value: Any) -> Any:
    """Copy JSON, with lists for tuples, as loading it would return it."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: item if type(item) in _PLAIN else _copy(item) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else _copy(item) for item in cast("Sequence[Any]", value)]
    return value


_PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types that need no copy; most values of a state have one of them."""


def _snapshot(config: ShortTermMemoryConfig) -> dict[str, Any]:
    budget, isolation = config.budget, config.isolation
    return {
        "strategy": config.strategy,
        "budget": {name: getattr(budget, name) for name in budget.__slots__},
        "isolation": {name: getattr(isolation, name) for name in isolation.__slots__},
        "summarizer_model": config.summarizer_model,
        "include_trajectory_digest": config.include_trajectory_digest,
        "recovery_backlog_limit": config.recovery_backlog_limit,
        "retry_attempts": config.retry_attempts,
    }
