"""The conversation of a local memory: no clock, no event loop, and a constant cost for each turn."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from stm_backends.memory import policy
from stm_backends.memory.local.merge import is_unrelated, merge
from stm_backends.memory.local.state import FORGET_BY_COUNT, State
from stm_backends.memory.policy import Fold, Step, Trim
from stm_backends.memory.view import View, render, summary_within_budget
from stm_backends.records.body import REMEMBERED_IDS, Body
from stm_backends.tokens import tokens_of, weigh
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn

COVERED_KEPT: Final = REMEMBERED_IDS
"""Number of turns kept after a local summary covers them, in case a merge keeps another summary."""


class Sides(NamedTuple):
    """The inputs of a merge with a stored state, at one instant."""

    local: State
    agreed: State
    covered: tuple[StoredTurn, ...]


class Conversation:
    """The turns, the body, and the known stored state.

    `agreed` is the stored state as last loaded or saved. `recovering` is true while an attempt to leave
    `DEGRADED` is running. `confirmed_by` is the store of `agreed`, if it is authoritative: a missing state
    was certainly erased or has expired.
    """

    def __init__(self, config: ShortTermMemoryConfig, state: State, *, now: float) -> None:
        self._config = config
        self._covered: deque[StoredTurn] = deque(maxlen=COVERED_KEPT)
        self._weights = _Weights.of(config)
        self.confirmed_by: object | None = None
        # No turn is known to be stored, but summaries and counters start from these.
        body = Body(state.body.summary, folded=state.body.folded, dropped=state.body.dropped)
        self.agreed = State(body=body, gone=state.gone)
        self._become(state.divided(config, now=now))

    def _become(self, state: State) -> None:
        self.body = state.body
        self.recovering = state.recovering
        self._gone = state.gone
        self._extra = state.extra
        self._pending = [*state.pending]
        self._recent = deque(state.recent)
        self._ids = {stored.id for stored in state.turns}
        if self._weights is not None:
            self._weights.forget()

    # Reading

    @property
    def health(self) -> MemoryHealth:
        return MemoryHealth.RECOVERING if self.recovering else self.body.health

    @property
    def pending(self) -> Sequence[StoredTurn]:
        """The turns that are no longer recent and that no summary covers."""
        return self._pending

    @property
    def state(self) -> State:
        return State(
            body=self.body,
            pending=tuple(self._pending),
            recent=tuple(self._recent),
            gone=self._gone,
            recovering=self.recovering,
            extra=self._extra,
        )

    @property
    def unsaved(self) -> int:
        """The number of turns that are not in the last known stored state."""
        return len(self._ids.difference(stored.id for stored in self.agreed.turns))

    def remembers(self, turn_id: str) -> bool:
        """Say whether a turn is held here, or left recently enough to be remembered."""
        return turn_id in self._ids or turn_id in self.body.forgotten

    def view(self) -> View:
        return render(
            self._config,
            health=self.health,
            summary=self.body.summary,
            pending=self._pending,
            recent=tuple(self._recent),
        )

    def require_room(self, stored: StoredTurn) -> None:
        """Raise `MemoryBudgetExceeded` if `overflow_policy="error"` rejects this turn."""
        if self._config.budget.overflow_policy != "error":
            return
        if self._weights is not None and self._fits(self._weights, stored):
            return
        turns = (*self._pending, *self._recent, stored)
        boundary = max(len(self._pending), len(turns) - self._config.budget.full_zone_turns)
        view = render(
            self._config,
            health=self.health,
            summary=self.body.summary,
            pending=turns[:boundary],
            recent=turns[boundary:],
        )
        view.require_room()

    def _fits(self, weights: _Weights, stored: StoredTurn) -> bool:
        """Say whether all turns fit with one more turn, at a cost independent of their number."""
        if not weights.known:
            weights.count(self._pending, self._recent)
        recent = [*self._recent, stored]
        leaving = max(0, len(recent) - self._config.budget.full_zone_turns)
        going, staying = recent[:leaving], recent[leaving:]
        return weights.fit(
            health=self.health,
            summary=self.body.summary,
            pending=(self._pending or going)[:1],
            recent=staying[:1],
            pending_weight=weights.pending + weights.sum_of(going),
            recent_weight=weights.recent + weights.sum_of([stored]) - weights.sum_of(going),
        )

    # Changing

    def add(self, stored: StoredTurn, *, now: float) -> None:
        """Add a turn that is not known yet."""
        self._ids.add(stored.id)
        self._recent.append(stored)
        leaving: list[StoredTurn] = []
        while len(self._recent) > self._config.budget.full_zone_turns:
            leaving.append(self._recent.popleft())
        self._pending += leaving
        if self._weights is not None:
            self._weights.add(stored, leaving)
        if self._config.strategy == "truncation":
            self.trim(Trim(len(self._pending), lost=False), now=now)

    def next_step(self, *, now: float, batch: int | None = None) -> Step:
        """Return the next step of the background."""
        return policy.next_step(self._config, self.body, self._pending, now=now, batch=batch)

    def trim(self, trim: Trim, *, now: float) -> None:
        """Drop the oldest pending turns."""
        gone = self._pending[: trim.count]
        self.body = policy.after_trim(self.body, trim, gone, now=now, keep_for=FORGET_BY_COUNT)
        self._drop(len(gone))

    def fold(self, fold: Fold, body: Body) -> None:
        """Replace the turns of `fold` by a body whose summary covers them."""
        self.body, self.recovering = body, False
        self._covered.extend(fold.turns)
        self._drop(len(fold.turns))

    def recover(self) -> None:
        """Become healthy: nothing is left to summarize."""
        self.body = policy.after_recovery(self.body)
        self.recovering = False

    def _drop(self, count: int) -> None:
        self._ids.difference_update(stored.id for stored in self._pending[:count])
        if self._weights is not None:
            self._weights.drop(self._pending[:count])
        del self._pending[:count]
        self._gone += count

    # Merging

    def sides(self) -> Sides:
        """Return the inputs of `merged` as of now."""
        return Sides(self.state, self.agreed, tuple(self._covered))

    def summarized_sides(self) -> Sides | None:
        """Return `sides` without the turns that were never stored.

        `None` if there is no new summary, or if it covers a turn that was never stored: only `persist` saves
        new turns.
        """
        if self.body.summary == self.agreed.body.summary:
            return None
        seen, gone = {stored.id for stored in self.agreed.turns}, self.agreed.body.forgotten
        if any(stored.id not in seen and stored.id not in gone for stored in self._covered):
            return None
        pending, recent = (
            tuple(stored for stored in turns if stored.id in seen) for turns in (self._pending, self._recent)
        )
        return self.sides()._replace(local=replace(self.state, pending=pending, recent=recent))

    def merged(self, stored: State | None, sides: Sides, *, now: float) -> State:
        """Return the state to save over a stored one; `None` means that nothing is stored."""
        if stored is None:
            return sides.local
        return merge(self._config, stored, *sides, now=now)

    def discard_if_erased(self, stored: State | None, by: object | None, *, now: float) -> bool:
        """Discard the stored part of the conversation if it was erased or has expired in its store.

        Only an authoritative store is relied upon; for any other store, everything is kept and saved again.
        Returns whether the stored part was discarded. Turns that were never confirmed as saved are kept.
        """
        if by is None or by is not self.confirmed_by or not is_unrelated(stored, self.agreed, self._config):
            return False
        confirmed, remembered = {turn.id for turn in self.agreed.turns}, self.agreed.body.forgotten
        turns = (*self._covered, *self._pending, *self._recent)
        ours = tuple(turn for turn in turns if turn.id not in confirmed and turn.id not in remembered)
        # The summary contains erased turns. The state of summarizing does not.
        body = Body(
            health=self.body.health,
            attempts=self.body.attempts,
            next_attempt_at=self.body.next_attempt_at,
        )
        state = State(body=body, recent=ours, recovering=self.recovering)
        self._covered.clear()
        self._become(state.divided(self._config, now=now))
        self.agreed, self.confirmed_by = State(), None
        return True

    def take_stored(self, stored: State, by: object | None, *, now: float) -> None:
        """Continue with the stored state and the turns that it lacks."""
        self._rebase(stored, merge(self._config, stored, *self.sides(), now=now), by)

    def take_saved(self, saved: State, since: Sides, by: object | None, *, now: float) -> None:
        """Continue with the saved state and the changes since the inputs `since`."""
        sides = self.sides()
        if sides == since:
            self._rebase(saved, saved, by)
            return
        sides = sides._replace(agreed=since.local)
        self._rebase(saved, merge(self._config, saved, *sides, exact=True, now=now), by)

    def _rebase(self, agreed: State, state: State, by: object | None) -> None:
        self._become(state)
        self.agreed, self.confirmed_by = agreed, by
        # Turns that returned are pending; turns that are not remembered are dropped for good.
        covered = [stored for stored in self._covered if stored.id in self.body.forgotten]
        self._covered = deque(covered, maxlen=COVERED_KEPT)


class _Weights:
    """The weight of a conversation as the model is shown it, updated with each turn; see `tokens.weigh`.

    The default token estimator depends only on this number; with a custom estimator this class is not used.
    `view` produces the text: it is called for one turn at a time, with weights in place of tokens.
    """

    @staticmethod
    def of(config: ShortTermMemoryConfig) -> _Weights | None:
        """Return an instance if the configuration needs one."""
        budget = config.budget
        limited = budget.overflow_policy == "error" and budget.total_max_tokens > 0
        return _Weights(config) if limited and config.token_estimator is None else None

    def __init__(self, config: ShortTermMemoryConfig) -> None:
        self._config = config
        unlimited = replace(config.budget, total_max_tokens=0, summary_max_tokens=sys.maxsize)
        self._counting = replace(config, token_estimator=weigh, budget=unlimited)
        self._weights: dict[str, int] = {}
        self.known = False
        self.pending = self.recent = 0

    def forget(self) -> None:
        """Recount on the next use, because the turns have changed."""
        self.known = False

    def count(self, pending: Iterable[StoredTurn], recent: Iterable[StoredTurn]) -> None:
        self._weights.clear()
        self.pending, self.recent, self.known = self.sum_of(pending), self.sum_of(recent), True

    def add(self, stored: StoredTurn, leaving: Sequence[StoredTurn]) -> None:
        """Add a recent turn, and move those that became pending."""
        if self.known:
            gone = self.sum_of(leaving)
            self.recent += self.sum_of([stored]) - gone
            self.pending += gone

    def drop(self, turns: Sequence[StoredTurn]) -> None:
        """Remove pending turns."""
        if self.known:
            self.pending -= self.sum_of(turns)
            for stored in turns:
                self._weights.pop(stored.id, None)

    def fit(
        self,
        *,
        health: MemoryHealth,
        summary: str,
        pending: Sequence[StoredTurn],
        recent: Sequence[StoredTurn],
        pending_weight: int,
        recent_weight: int,
    ) -> bool:
        """Say whether a conversation fits, given its first pending and its first recent turn, if any."""
        summary = summary_within_budget(summary, self._config)
        view = render(self._counting, health=health, summary=summary, pending=pending, recent=recent)
        weight = view.tokens + recent_weight - self.sum_of(recent)
        if view.kept > len(recent):
            weight += pending_weight - self.sum_of(pending)
        return tokens_of(weight) <= self._config.budget.total_max_tokens

    def sum_of(self, turns: Iterable[StoredTurn]) -> int:
        """Return the weight that these turns add to a list that is not empty."""
        return sum(self._weight(stored) for stored in turns)

    def _weight(self, stored: StoredTurn) -> int:
        weight = self._weights.get(stored.id)
        if weight is None:
            one, two = (self._count([stored] * number) for number in (1, 2))
            weight = self._weights[stored.id] = two - one
        return weight

    def _count(self, turns: Sequence[StoredTurn]) -> int:
        view = render(self._counting, health=MemoryHealth.HEALTHY, summary="", pending=(), recent=turns)
        return view.tokens
