"""Statistics of stored conversations for operators, read only through the driver contract.

`of_user` reads every record; `listed` reads the catalogue's cards, and only the names of other records.

Each record is loaded once, `AT_ONCE` at a time, so memory use depends on the size of a few records and not on
their number. An unreadable record is counted and named. The contract does not report times to live, so no
expiry is shown.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from stm_backends.catalogue.card import Card, card_of
from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.errors import Corrupt, located
from stm_backends.memory import policy
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.view import render
from stm_backends.records import keys, operations
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import Codec
from stm_backends.types import MemoryBudget, MemoryHealth, MemoryKey, ShortTermMemoryConfig, StoredTurn
from stm_backends.work.policy import jobs_of, lag_of
from stm_backends.work.queue import WorkQueue

AT_ONCE: Final = 8
"""Number of records that are loaded concurrently."""

_EVERYTHING: Final = ShortTermMemoryConfig(
    "rolling_summary", MemoryBudget(summary_max_tokens=2**60, total_max_tokens=0)
)

_OTHER_KINDS: Final[tuple[keys.Kind, ...]] = ("blob", *keys.LOG_KINDS, "graph", "page", "card")

_COUNTED_AS: Final[dict[keys.Kind, str]] = {
    "memory": "conversations",
    "blob": "states",
    "graph": "graph_records",
    "page": "pages",
    "card": "cards",
    **dict.fromkeys(keys.LOG_KINDS, "logs"),
}
"""The field of `Totals` that counts the records of each kind."""

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True, slots=True)
class ConversationStats:
    """One conversation. `turns` counts the turns that are not in the summary, dropped or in pages.

    `archived` counts the turns in pages of its transcript, and `waiting` those among them that still await a
    summary. `bytes` is the size of the stored values after decryption. `tokens` is the memory's estimate for
    the summary and all turns. `last_activity` is the time of the newest turn in epoch seconds. If no turn has
    a time, it is the time of the last fold or trim, rounded up by some seconds; `None` means unknown.
    """

    key: MemoryKey
    turns: int
    folded: int
    dropped: int
    bytes: int
    tokens: int
    health: MemoryHealth
    last_activity: float | None
    archived: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class OtherStats:
    """A saved state, the log of an agent framework, a record of a graph, a page or a card.

    `name` is the key of a state, the session id of a log or a card, or the name of another record. A page is
    of a transcript unless it is `of_log`; one whose log is gone counts as a transcript's.
    """

    tenant: str
    user: str
    kind: keys.Kind
    name: str
    bytes: int
    of_log: bool = False


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record that cannot be read; `name` is as in `OtherStats`, and the session id of a conversation."""

    tenant: str
    user: str
    kind: keys.Kind
    name: str
    error: Corrupt


@dataclass(frozen=True, slots=True)
class WorkStats:
    """The queue of work: how many conversations wait for a worker, or are in its hands.

    `lag` is for how many seconds the oldest has been due; 0 if all that wait do so for the time of a retry.
    """

    waiting: int
    lag: float


Found: TypeAlias = ConversationStats | OtherStats | Damaged


@dataclass(slots=True)
class Totals:
    """The sums over any number of records. `listed_turns` counts turns by cards; see `Stats.listed`."""

    users: int = 0
    conversations: int = 0
    turns: int = 0
    folded: int = 0
    dropped: int = 0
    bytes: int = 0
    tokens: int = 0
    health: Counter[MemoryHealth] = field(default_factory=Counter[MemoryHealth])
    last_activity: float | None = None
    logs: int = 0
    states: int = 0
    graph_records: int = 0
    damaged: int = 0
    archived: int = 0
    waiting: int = 0
    pages: int = 0
    cards: int = 0
    listed_turns: int = 0
    log_pages: int = 0

    def add(self, found: Found) -> None:
        """Add one record."""
        match found:
            case ConversationStats():
                self.conversations += 1
                self.turns += found.turns
                self.folded += found.folded
                self.dropped += found.dropped
                self.archived += found.archived
                self.waiting += found.waiting
                self.bytes += found.bytes
                self.tokens += found.tokens
                self.health[found.health] += 1
                self._later(found.last_activity)
            case OtherStats():
                self.count(found.kind, of_log=found.of_log)
                self.bytes += found.bytes
            case Damaged():
                self.damaged += 1

    def add_card(self, card: Card | Damaged) -> None:
        """Add a conversation according to its card."""
        if isinstance(card, Damaged):
            self.damaged += 1
            return
        self.cards += 1
        self.listed_turns += card.turns
        self._later(card.updated)

    def count(self, kind: keys.Kind, *, of_log: bool = False) -> None:
        """Add a record of a kind; of pages, one of a log or of a transcript."""
        name = "log_pages" if of_log else _COUNTED_AS[kind]
        setattr(self, name, getattr(self, name) + 1)

    def plus(self, other: Totals) -> None:
        """Add other sums."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.health += other.health
        self._later(other.last_activity)

    def _later(self, when: float | None) -> None:
        if when is not None:
            self.last_activity = max(when, self.last_activity or when)


_COUNTS: Final = (
    *("users", "conversations", "turns", "folded", "dropped", "bytes", "tokens"),
    *("logs", "states", "graph_records", "damaged"),
    *("archived", "waiting", "pages", "cards", "listed_turns", "log_pages"),
)


class _Logs:
    """The logs of a user, to distinguish their pages from those of transcripts: logs come first."""

    def __init__(self) -> None:
        self._pages: set[str] = set()

    def meet(self, kind: keys.Kind, record: Key) -> None:
        """Remember a record if it is a log."""
        if kind in keys.LOG_KINDS:
            self._pages.add(keys.pages_of(record).name)

    def have(self, kind: keys.Kind, record: Key) -> bool:
        """Say whether a record is a page of one of them."""
        return kind == "page" and keys.prefix_in(record.name) in self._pages


class Stats:
    """Statistics of every tenant and user on one backend."""

    def __init__(self, driver: Driver, codec: Codec, *, clock: Callable[[], float] = time.time) -> None:
        self._driver = driver
        self._codec = codec
        self._clock = clock

    async def of_tenant(
        self, tenant: str, on_found: Callable[[Found], None] = lambda found: None, *, by_name: bool = False
    ) -> Totals:
        """Return the sums for the states of a tenant as a whole; as `of_user`, or `by_name` as `listed`."""
        totals = Totals()

        def judged(key: Key, record: Record) -> OtherStats:
            return OtherStats(tenant, "", "blob", keys.unname(key.name), _size(record))

        if by_name:
            async for _ in operations.names(self._driver, keys.shared_scope(tenant)):
                totals.count("blob")
            return totals
        async for found in self._read(tenant, "", "blob", judged):
            totals.add(found)
            on_found(found)
        return totals

    async def work(self, tenants: Collection[str] = ()) -> WorkStats | None:
        """Return what waits in the queue of work; `None` if nothing was ever left to a worker.

        With `tenants`, only what waits of these.
        """
        queue, now = WorkQueue(self._driver, self._codec), self._clock()
        looks = [look for shard in await queue.shards() if (look := await queue.look(shard)) is not None]
        if not looks:
            return None
        jobs = [
            job
            for shard, _, state, notes in looks
            for job in jobs_of(shard, state, notes, worker="", mine=(), ended=lambda worker, held: False)
            if not tenants or job.tenant in tenants
        ]
        return WorkStats(len(jobs), lag_of(jobs, now=now))

    def conversations(
        self, tenant: str, user: str, *, health: MemoryHealth | None = None
    ) -> AsyncIterator[ConversationStats | Damaged]:
        """Yield the conversations of a user in the order of their ids, unreadable ones as `Damaged`.

        With `health`, only those in that health; no turn of the others is read.
        """

        def is_wanted(record: Record) -> bool:
            return health in (None, Snapshot.of(record, self._codec).body.health)

        def judged(key: Key, record: Record) -> ConversationStats:
            snapshot = Snapshot.of(record, self._codec)
            body, turns = snapshot.body, snapshot.turns
            transcript = body.transcript or Transcript("")
            return ConversationStats(
                MemoryKey(tenant, user, keys.unname(key.name)),
                len(turns),
                body.folded,
                body.dropped,
                _size(record),
                tokens_of(body, turns),
                body.health,
                last_activity_of(body, turns, now=self._clock()),
                transcript.base - transcript.first,
                transcript.waiting,
            )

        return self._read(tenant, user, "memory", judged, None if health is None else is_wanted)

    async def others(self, tenant: str, user: str) -> AsyncIterator[OtherStats | Damaged]:
        """Yield a user's saved states, logs, records of graphs, pages and cards.

        Unreadable ones are `Damaged`.
        """
        logs = _Logs()
        for kind in _OTHER_KINDS:

            def judged(key: Key, record: Record, kind: keys.Kind = kind) -> OtherStats:
                of_log = logs.have(kind, key)
                return OtherStats(tenant, user, kind, keys.unname(key.name), _size(record), of_log)

            async for found in self._read(tenant, user, kind, judged):
                logs.meet(kind, Key(keys.scope(tenant, user, kind), keys.name(found.name)))
                yield found

    async def of_user(
        self, tenant: str, user: str, on_found: Callable[[Found], None] = lambda found: None
    ) -> Totals:
        """Return the sums for a user; `on_found` is called with each record."""
        totals, seen = Totals(), False
        for listing in (self.conversations, self.others):
            async for found in listing(tenant, user):
                seen = True
                totals.add(found)
                on_found(found)
        totals.users = int(seen)
        return totals

    async def listed(
        self, tenant: str, user: str, on_found: Callable[[Card | Damaged], None] = lambda found: None
    ) -> Totals:
        """Return the sums of a user from names and cards, without reading a conversation.

        These are the number of records of each kind and, for conversations with a card, the number of turns
        ever added and the last activity, as of up to a minute ago. `on_found` is called with each card.
        """

        def judged(key: Key, record: Record) -> Card:
            return card_of(key, self._codec.open("card", record.body or b""))

        totals, logs = Totals(), _Logs()
        for kind in ("memory", *_OTHER_KINDS):
            if kind != "card":
                scope = keys.scope(tenant, user, kind)
                async for name in operations.names(self._driver, scope):
                    logs.meet(kind, Key(scope, name))
                    totals.count(kind, of_log=logs.have(kind, Key(scope, name)))
        async for card in self._read(tenant, user, "card", judged):
            totals.add_card(card)
            on_found(card)
        totals.users = int(any(getattr(totals, name) for name in _COUNTS))
        return totals

    async def _read(
        self,
        tenant: str,
        user: str,
        kind: keys.Kind,
        judged: Callable[[Key, Record], _T],
        is_wanted: Callable[[Record], bool] | None = None,
    ) -> AsyncIterator[_T | Damaged]:
        """Yield the result of `judged` for each record of one kind; records that are gone are left out.

        Without a `user`, they are the states of the tenant as a whole.
        `is_wanted` decides on the body, before the entries are read.
        """
        scope = keys.scope(tenant, user, kind) if user else keys.shared_scope(tenant)

        async def read(name: str) -> _T | Damaged | None:
            key = Key(scope, name)
            try:
                if is_wanted is not None:
                    record = await self._driver.load(key, last=0)
                    with located(self._driver.name, "stats"):
                        if record is None or not is_wanted(record):
                            return None
                record = await self._driver.load(key)
                with located(self._driver.name, "stats"):
                    return None if record is None else judged(key, record)
            except Corrupt as error:
                return Damaged(tenant, user, kind, keys.unname(name), error)

        async for found in _in_order(operations.names(self._driver, scope), read):
            if found is not None:
                yield found


def tokens_of(body: Body, turns: Sequence[StoredTurn]) -> int:
    """Return the memory's estimate for a whole conversation, without a budget."""
    pending, recent = policy.split(turns, _EVERYTHING)
    view = render(
        _EVERYTHING, health=MemoryHealth.HEALTHY, summary=body.summary, pending=pending, recent=recent
    )
    return view.tokens


def last_activity_of(body: Body, turns: Sequence[StoredTurn], *, now: float) -> float | None:
    """Return the time of the newest turn or, without one, of the last fold or trim; `None` if unknown."""
    times = [stored.turn.ts for stored in turns if 0 < stored.turn.ts < math.inf]
    # These are rounded up; see `Forgotten`.
    times = times or [min(at, now) for at, _ in body.forgotten.ages if at > 0]
    return max(times, default=None)


def _size(record: Record) -> int:
    return len(record.body or b"") + sum(map(len, record.tail))


async def _in_order(items: AsyncIterator[_U], work: Callable[[_U], Awaitable[_T]]) -> AsyncIterator[_T]:
    """Yield the results of `work` in the order of the items, `AT_ONCE` at a time."""
    batch = list[_U]()
    async for item in items:
        batch.append(item)
        if len(batch) == AT_ONCE:
            for done in await operations.together(batch, work):
                yield done
            batch.clear()
    for done in await operations.together(batch, work):
        yield done
