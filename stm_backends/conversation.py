"""A conversation as one process changes it: no clock, no event loop, the same cost for every turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from stm_backends import policy
from stm_backends.merge import merge
from stm_backends.policy import Body, Fold, Step, Trim, View
from stm_backends.states import FORGET_BY_COUNT, State
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig, StoredTurn

COVERED_KEPT: Final = policy.REMEMBERED_IDS
"""How many turns are kept after a summary of ours covers them, in case another process's summary stands."""


class Sides(NamedTuple):
    """What merging with a stored state needs, as of one instant."""

    local: State
    agreed: State
    covered: tuple[StoredTurn, ...]


class Conversation:
    """The turns, the body, and what is known of the state they are saved in.

    `agreed` is the stored state as it was last seen or last confirmed saved. `recovering` says that an
    attempt to leave `DEGRADED` is under way.
    """

    def __init__(self, config: ShortTermMemoryConfig, state: State, *, now: float) -> None:
        self._config = config
        self._covered: deque[StoredTurn] = deque(maxlen=COVERED_KEPT)
        # No turn is known to be stored, but summaries grow from this one and counters count on top.
        body = Body(state.body.summary, folded=state.body.folded, dropped=state.body.dropped)
        self.agreed = State(body=body, gone=state.gone)
        self._become(state.divided(config, now=now))

    def _become(self, state: State) -> None:
        self.body = state.body
        self.recovering = state.recovering
        self._gone = state.gone
        self._pending = [*state.pending]
        self._recent = deque(state.recent)
        self._ids = {stored.id for stored in state.turns}

    # What it is

    @property
    def health(self) -> MemoryHealth:
        return MemoryHealth.RECOVERING if self.recovering else self.body.health

    @property
    def pending(self) -> Sequence[StoredTurn]:
        """The turns that are not recent any more and that no summary covers."""
        return self._pending

    @property
    def state(self) -> State:
        return State(
            body=self.body,
            pending=tuple(self._pending),
            recent=tuple(self._recent),
            gone=self._gone,
            recovering=self.recovering,
        )

    @property
    def unsaved(self) -> int:
        """How many turns were never seen in a store."""
        return len(self._ids.difference(stored.id for stored in self.agreed.turns))

    def knows(self, turn_id: str) -> bool:
        """Say whether a turn stands here, or did within the remembered past."""
        return turn_id in self._ids or turn_id in self.body.forgotten

    def view(self) -> View:
        return policy.render(
            self._config,
            health=self.health,
            summary=self.body.summary,
            pending=self._pending,
            recent=tuple(self._recent),
        )

    def require_room(self, stored: StoredTurn) -> None:
        """Raise `MemoryBudgetExceeded` if the configuration refuses this turn."""
        if self._config.budget.overflow_policy != "error":
            return
        turns = (*self._pending, *self._recent, stored)
        boundary = max(len(self._pending), len(turns) - self._config.budget.full_zone_turns)
        policy.require_room(
            self._config,
            health=self.health,
            summary=self.body.summary,
            pending=turns[:boundary],
            recent=turns[boundary:],
        )

    # What happens to it

    def add(self, stored: StoredTurn, *, now: float) -> None:
        """Take a turn that is not known yet."""
        self._ids.add(stored.id)
        self._recent.append(stored)
        while len(self._recent) > self._config.budget.full_zone_turns:
            self._pending.append(self._recent.popleft())
        if self._config.strategy == "truncation":
            self.trim(Trim(len(self._pending), lost=False), now=now)

    def next_step(self, *, now: float, batch: int | None = None) -> Step:
        """Say what the background shall do."""
        return policy.next_step(self._config, self.body, self._pending, now=now, batch=batch)

    def trim(self, trim: Trim, *, now: float) -> None:
        """Let the oldest pending turns go."""
        gone = self._pending[: trim.count]
        self.body = policy.after_trim(self.body, trim, gone, now=now, keep_for=FORGET_BY_COUNT)
        self._drop(len(gone))

    def fold(self, fold: Fold, body: Body) -> None:
        """Put a body whose summary covers the turns of `fold` in the place of these turns."""
        self.body, self.recovering = body, False
        self._covered.extend(fold.turns)
        self._drop(len(fold.turns))

    def _drop(self, count: int) -> None:
        self._ids.difference_update(stored.id for stored in self._pending[:count])
        del self._pending[:count]
        self._gone += count

    # What others made of it

    def sides(self) -> Sides:
        """Return what `merged` needs of this instant."""
        return Sides(self.state, self.agreed, tuple(self._covered))

    def merged(self, stored: State | None, sides: Sides, *, now: float) -> State:
        """Return what is to be saved over a stored state, `None` being nothing there."""
        if stored is None:
            return sides.local
        return merge(self._config, stored, *sides, now=now)

    def take_stored(self, stored: State, *, now: float) -> None:
        """Continue with what a store holds, and with what it does not have yet."""
        self._rebase(stored, merge(self._config, stored, *self.sides(), now=now))

    def take_saved(self, saved: State, since: State, *, now: float) -> None:
        """Continue with what was saved, and with what has happened since its own side was `since`."""
        sides = self.sides()._replace(agreed=since)
        self._rebase(saved, merge(self._config, saved, *sides, exact=True, now=now))

    def _rebase(self, agreed: State, state: State) -> None:
        self._become(state)
        self.agreed = agreed
        # What came back is pending; what nobody remembers has been let go for good.
        covered = [stored for stored in self._covered if stored.id in self.body.forgotten]
        self._covered = deque(covered, maxlen=COVERED_KEPT)
