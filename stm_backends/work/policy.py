"""What a shard of the queue says, and what a worker makes of it; pure functions.

A shard is a record. Its tail has the notes, oldest first. Its body, a `State`, says which of them are done
but not dropped yet, and which are held by a worker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends.errors import Corrupt
from stm_backends.types import MemoryKey
from stm_backends.work.notes import Note

LEASE_S: Final = 10.0
"""The lease of a worker in a shard: seconds after its last write there."""

RENEW_S: Final = 3.0
"""The interval, in seconds, at which a worker renews its lease in a shard."""

MOST_DONE: Final = 256
"""The number of done notes behind a waiting one from which the waiting one moves to the end."""


class Held(NamedTuple):
    """The notes that a worker holds, and the time of its last write in the shard in epoch seconds."""

    ids: frozenset[str]
    at: float


@dataclass(frozen=True, slots=True)
class State:
    """The body of a shard: notes of the tail that are done, and what each worker holds."""

    done: frozenset[str] = frozenset()
    held: Mapping[str, Held] = field(default_factory=dict[str, Held])


Noted: TypeAlias = Note | None
"""An entry of a shard; `None` is one that this version cannot read, which stays."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work on one conversation, with all of its notes in a shard.

    `note` is the newest of them. `since` is when the work fell due, and `due` when it may begin. A job that
    is `held` has a note that a worker holds.
    """

    shard: str
    note: Note
    ids: frozenset[str]
    since: float
    due: float
    held: bool = False

    @property
    def tenant(self) -> str:
        """The tenant of the conversation."""
        return self.note.key.tenant_id


def dump_state(state: State) -> dict[str, Any]:
    """Return the body of a shard as JSON."""
    held = {worker: {"at": one.at, "ids": sorted(one.ids)} for worker, one in state.held.items()}
    return {"done": sorted(state.done), "held": held}


def load_state(content: Mapping[str, Any]) -> State:
    """Return the state that `dump_state` wrote. Raises `Corrupt` for anything else."""
    done, held = content.get("done"), content.get("held")
    if not isinstance(held, dict):
        raise Corrupt("a shard of the queue of work does not say who holds its notes")
    found: dict[str, Held] = {}
    for worker, one in cast("dict[str, object]", held).items():
        fields = cast("dict[str, object]", one) if isinstance(one, dict) else {}
        at = fields.get("at")
        if not isinstance(at, (int, float)):
            raise Corrupt("a worker in a shard of the queue of work has no time")
        found[worker] = Held(_ids(fields.get("ids")), float(at))
    return State(_ids(done), found)


def _ids(content: object) -> frozenset[str]:
    ids = cast("list[object]", content) if isinstance(content, list) else [None]
    if not all(isinstance(one, str) for one in ids):
        raise Corrupt("a shard of the queue of work has no list of ids where one belongs")
    return frozenset(cast("list[str]", ids))


def lease_ended(at: float, *, now: float, known_for: float) -> bool:
    """Say whether the lease of another worker has ended.

    `at` is its time, and `known_for` how many seconds ago this worker first saw that time. A clock that is
    ahead ends a lease too early, which costs one load; one that is behind is not waited for.
    """
    return known_for >= LEASE_S or now - at >= 2 * LEASE_S


def jobs_of(
    shard: str,
    state: State,
    notes: Sequence[Noted],
    *,
    worker: str,
    mine: Collection[str],
    ended: Callable[[str, Held], bool],
) -> list[Job]:
    """Return the work in a shard, in the order of the oldest note of each conversation.

    `mine` has the ids that this `worker` works on. Others that the shard gives to it are free: the answer to
    the write that took them was lost. `ended` says whether the lease of another worker has ended.
    """
    busy = {*mine}
    for other, held in state.held.items():
        if other != worker and not ended(other, held):
            busy |= held.ids
    together: dict[MemoryKey, list[Note]] = {}
    for note in notes:
        if note is not None and not note.is_void and note.id not in state.done:
            together.setdefault(note.key, []).append(note)
    return [_job(shard, of_one, busy) for of_one in together.values()]


def _job(shard: str, notes: Sequence[Note], busy: Collection[str]) -> Job:
    newest = replace(
        notes[-1],
        at=min(note.at for note in notes),
        everything=any(note.everything for note in notes),
        tries=max(note.tries for note in notes),
    )
    return Job(
        shard,
        newest,
        frozenset(note.id for note in notes),
        min(note.since for note in notes),
        min(note.due for note in notes),
        any(note.id in busy for note in notes),
    )


def pick(
    jobs: Iterable[Job],
    *,
    now: float,
    places: int,
    at_work: Mapping[str, int],
) -> list[Job]:
    """Return the jobs to take now, fair to tenants.

    `at_work` counts the places of each tenant that are taken, of `places`. A free place goes to the tenant
    that has the fewest, and there to the oldest job. A quarter of the places is for tenants without any.
    """
    lines: dict[str, deque[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.since):
        if not job.held and job.due <= now:
            lines.setdefault(job.tenant, deque()).append(job)
    working, reserved = Counter(at_work), places // 4
    free, picked = places - sum(at_work.values()), list[Job]()
    while free > 0:
        able = [tenant for tenant in lines if free > (reserved if working[tenant] else 0)]
        if not able:
            break
        tenant = min(able, key=lambda one: (working[one], lines[one][0].since))
        picked.append(lines[tenant].popleft())
        if not lines[tenant]:
            del lines[tenant]
        working[tenant] += 1
        free -= 1
    return picked


def lag_of(jobs: Iterable[Job], *, now: float) -> float:
    """Return for how many seconds the oldest job that is due has been due; 0 if none is."""
    return max((now - job.since for job in jobs if job.due <= now and job.since <= now), default=0.0)


def said(
    state: State,
    notes: Sequence[Noted],
    *,
    worker: str,
    now: float,
    holds: Collection[str],
    done: Collection[str],
    max_drop: int,
) -> tuple[State, int]:
    """Return the state of a shard after a worker has said what it holds and what is done.

    And how many of the oldest notes go with that: those that are done, up to the first that is not. What the
    worker holds is taken from workers whose lease has ended.
    """
    finished, drop = state.done | {*done}, 0
    for note in notes[:max_drop]:
        if note is None or not (note.is_void or note.id in finished):
            break
        drop += 1
    left = {note.id for note in notes[drop:] if note is not None}
    held = {
        other: Held(ids, one.at)
        for other, one in state.held.items()
        if other != worker and (ids := (one.ids & left) - finished - {*holds})
    }
    if own := (left & {*holds}) - finished:
        held[worker] = Held(frozenset(own), now)
    return State(frozenset(finished & left), held), drop


def in_the_way(state: State, notes: Sequence[Noted], *, now: float, busy: Collection[str]) -> list[Note]:
    """Return the oldest notes that only wait for their time, if many done ones stand behind them."""
    if len(state.done) <= MOST_DONE:
        return []
    waiting = list[Note]()
    for note in notes:
        if note is None or note.id in busy or (note.id not in state.done and note.due <= now):
            break
        if not note.is_void and note.id not in state.done:
            waiting.append(note)
    return waiting
