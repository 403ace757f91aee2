"""Whether what was read of one conversation can be explained by what was added to it.

A conversation is a log that only grows at its end, and a read shows all of it: what the summary covers, what
is pending, what is recent. So all reads are beginnings of one order, and that order is right if no operation
that had ended stands after one that began later. Three things excuse a read that shows less: turns that were
counted as dropped while the conversation was degraded, turns that have left the record and wait for a
summary, and a degraded conversation, of which only the newest turns are shown.

An add without an end, or of unknown outcome, stores its turn once at any moment after it began, or never.
A conversation that was erased is several logs, one after the other: see `erasures`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from tests.chaos.history import Event

NEVER: Final = math.inf
FAR: Final = 1e15
"""A time after all others that can still be added to another."""


ILL: Final = frozenset({"degraded", "recovering"})
"""A process says `recovering` while it makes an attempt of its own to summarize a degraded conversation."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What no correct memory would have done, with the events that show it.

    `near` are the turns that long lists are printed around, `faults` those in force during these events.
    """

    kind: str
    conversation: str
    sentence: str
    events: tuple[Event, ...] = ()
    near: frozenset[str] = frozenset()
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.conversation}" if self.conversation else ""
        lines = [f"{self.kind}{where}: {self.sentence}", *(_line(event, self.near) for event in self.events)]
        lines += [f"faults in force: {', '.join(self.faults)}"] * bool(self.faults)
        return "\n    ".join(lines)


WHOLE: Final = 8
"""How many ids a list may have that is printed whole."""


def _line(event: Event, near: Collection[str]) -> str:
    data = {name: _around(ids, near) if isinstance(ids, list) else ids for name, ids in event.data.items()}
    return f"{event.t:.6f} {event.process}#{event.op} {event.what} {event.phase} {data}"


def _around(ids: list[str], near: Collection[str]) -> list[str]:
    """Return the ends of a long list and what is near, with the number of ids that are left out between."""
    if len(ids) <= WHOLE:
        return ids
    shown: list[str] = []
    kept = [place for place, one in enumerate(ids) if one in near or place in {0, len(ids) - 1}]
    for place, following in itertools.pairwise([*kept, len(ids)]):
        left = following - place - 1
        shown += [ids[place], *[f"... {left} more ..."] * bool(left)]
    return shown


@dataclass(slots=True)
class Op:
    """One operation. `ended` is when its effect was certain; `NEVER` if that did not come to be known."""

    begin: Event
    end: Event | None = None

    @property
    def invoked(self) -> float:
        return self.begin.t

    @property
    def status(self) -> str:
        return self.end.phase if self.end is not None else "unknown"

    @property
    def ended(self) -> float:
        return self.end.t if self.end is not None and self.end.phase == "ok" else NEVER

    @property
    def latest(self) -> float:
        """The last moment at which it may have had an effect."""
        return self.end.t if self.end is not None and self.end.phase != "unknown" else NEVER

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.begin,) if self.end is None else (self.begin, self.end)


@dataclass(slots=True)
class Read:
    """One read that was answered. `covered` is how many of the turns shown the summary covers."""

    op: Op
    shown: tuple[str, ...]
    covered: int
    dropped: int
    foreign: int
    newest_only: bool
    invoked: float
    ended: float
    health: str = "healthy"
    pending: int = 0
    """How many of the turns are neither recent nor covered."""
    waiting: int = 0
    """How many turns it does not show because they wait in pages for a summary."""

    @property
    def ill(self) -> bool:
        """Whether it met a degraded conversation, by its own word."""
        return self.health in ILL

    @property
    def excused(self) -> bool:
        """Whether it may show less than the whole log, if what it lacks is what may be dropped."""
        return self.newest_only or self.dropped > 0 or self.waiting > 0


@dataclass(slots=True)
class Conversation:
    """The operations on one conversation, each kind in the order in which they began."""

    name: str
    adds: dict[str, list[Op]] = field(default_factory=dict[str, list[Op]])
    reads: list[Read] = field(default_factory=list[Read])
    doubtful: list[Read] = field(default_factory=list[Read])
    """Reads that a deposed master may have answered, with what was true before."""
    erases: list[Op] = field(default_factory=list[Op])
    became_ill: list[float] = field(default_factory=list[float])
    """When a pod saw it become degraded, in the order of time."""
    ceased_ill: list[float] = field(default_factory=list[float])
    """When a pod saw that it had been degraded."""

    def before(self, moment: float) -> Conversation:
        """Return what was known of it at a moment: what had not ended then has no end."""
        adds = {turn: _begun(ops, moment) for turn, ops in self.adds.items()}
        return replace(
            self,
            adds={turn: ops for turn, ops in adds.items() if ops},
            reads=[read for read in self.reads if read.ended < moment],
            doubtful=[read for read in self.doubtful if read.ended < moment],
            erases=_begun(self.erases, moment),
        )

    def was_degraded(self, since: float, until: float) -> bool:
        """Say whether anybody saw it degraded between two moments."""
        # A pod notes what it saw a moment later.
        for times, last in ((self.became_ill, until), (self.ceased_ill, until + 1.0)):
            at = bisect.bisect_left(times, since)
            if at < len(times) and times[at] <= last:
                return True
        return any(read.ill and since <= read.ended and read.invoked <= until for read in self.reads)


def _begun(ops: Iterable[Op], moment: float) -> list[Op]:
    begun = (op for op in ops if op.invoked < moment)
    return [op if op.end is not None and op.end.t < moment else Op(op.begin) for op in begun]


@dataclass(slots=True)
class Span:
    """When a turn may have been added to a log: not before `invoked`, and surely once it is `ended`."""

    invoked: float
    ended: float


@dataclass(slots=True)
class Log:
    """What was read between two erasures.

    `first` is the earliest end of anything in it, `last` the latest begin: what begins after `first` is of
    this log or of a later one, and what ended before `last` of this one or of an earlier one.
    """

    turns: dict[str, Span] = field(default_factory=dict[str, Span])
    reads: list[Read] = field(default_factory=list[Read])
    first: float = FAR
    last: float = -FAR

    def take(self, read: Read) -> None:
        self.reads.append(read)
        self.first, self.last = min(self.first, read.ended), max(self.last, read.invoked)

    def hold(self, turn: str, span: Span) -> None:
        self.turns[turn] = span
        self.first, self.last = min(self.first, span.ended), max(self.last, span.invoked)

    def with_all_of(self, other: Log) -> Log:
        """Return this log and another one as one."""
        first, last = min(self.first, other.first), max(self.last, other.last)
        return Log({**self.turns, **other.turns}, [*self.reads, *other.reads], first, last)

    @property
    def loose(self) -> bool:
        """Whether it has a read that shows less than all, and may have no turn in common with others."""
        return any(read.excused for read in self.reads)

    @property
    def narrow(self) -> bool:
        """Whether all its reads show the newest turns only, so that they need not have a turn in common."""
        return all(read.newest_only for read in self.reads)


class Checked:
    """The violations of one conversation, each once, and what its history had that was no violation."""

    def __init__(self, conversation: Conversation) -> None:
        self.of = conversation
        self.violations: list[Violation] = []
        self.appeared: set[str] = set()
        self.spans = {
            turn: Span(min(op.invoked for op in able), min(op.ended for op in able))
            for turn, ops in conversation.adds.items()
            if (able := [op for op in ops if op.status != "fail"])
        }
        self._said = set[tuple[str, str]]()
        self._clean()

    def said_by(self, judge: Callable[[], None]) -> list[Violation]:
        """Return what a judgement says, which does not count yet."""
        kept, said, self.violations, self._said = self.violations, self._said, [], set(self._said)
        try:
            judge()
            return self.violations
        finally:
            self.violations, self._said = kept, said

    def say(self, kind: str, subject: str, sentence: str, *ops: Op | None) -> None:
        if (kind, subject) not in self._said:
            self._said.add((kind, subject))
            events = tuple(event for op in ops if op is not None for event in op.events)
            told = {id(op) for op in ops}
            reads = (*self.of.reads, *self.of.doubtful)
            parts = (self._near(subject, read) for read in reads if id(read.op) in told)
            near = frozenset(itertools.chain.from_iterable(parts))
            self.violations.append(Violation(kind, self.of.name, sentence, events, near))

    def _near(self, turn: str, read: Read) -> tuple[str, ...]:
        """Return what a read shows around a turn, or around where it belongs by the time of its add."""
        shown, spans = read.shown, self.spans
        if turn in shown:
            place = shown.index(turn)
        elif turn in spans:
            place = sum(one in spans and spans[one].invoked < spans[turn].invoked for one in shown)
        else:
            return ()
        return shown[max(place - 2, 0) : place + 3]

    def add_of(self, turn: str) -> Op | None:
        """Return the add that shows best that a turn was added: the first that was acknowledged."""
        ops = self.of.adds.get(turn, [])
        return min(ops, key=attrgetter("ended"), default=None)

    # What one read shows by itself

    def _clean(self) -> None:
        """Check each read by itself, and leave in it only what can be compared with other reads.

        Even a deposed master shows no turn twice, none of another conversation, and none that was refused.
        """
        adds = self.of.adds
        self.appeared.update(*(read.shown for read in self.of.reads))
        possible = {turn for turn, ops in adds.items() if any(op.status != "fail" for op in ops)}
        for read in (*self.of.reads, *self.of.doubtful):
            if read.foreign:
                what = f"a read shows {read.foreign} turns of another conversation, or altered ones"
                self.say("foreign", "", what, read.op)
            shown = set(read.shown)
            if shown <= possible and len(shown) == len(read.shown):
                continue
            for turn in shown - possible:
                if turn in adds:
                    what = f"{turn} was refused, and a read shows it"
                    self.say("refused", turn, what, *adds[turn], read.op)
                else:
                    self.say("foreign", turn, f"{turn} was never added here, and a read shows it", read.op)
            kept, covered = dict[str, None](), 0
            for place, turn in enumerate(read.shown):
                if turn in kept:
                    where = "in the summary" if place < read.covered else "among the turns"
                    what = f"{turn} stands twice, the second time {where}"
                    self.say("duplicate", turn, what, self.add_of(turn), read.op)
                elif turn in possible:
                    kept[turn] = None
                    covered += place < read.covered
            read.shown, read.covered = tuple(kept), covered

    # One log

    def check(self) -> None:
        """Judge a conversation that nobody erased: it is one log."""
        log = Log()
        for turn, span in self.spans.items():
            if span.ended < NEVER or turn in self.appeared:
                log.hold(turn, span)
        for read in self.of.reads:
            log.take(read)
        self.check_log(log)

    def check_log(self, log: Log) -> None:
        longest = max((read.shown for read in log.reads), key=len, default=())
        if all(not read.excused and longest[: len(read.shown)] == read.shown for read in log.reads):
            self._check_order(log, longest)
        else:
            _Partial(self, log).check()

    def _check_order(self, log: Log, order: tuple[str, ...]) -> None:
        """Check a log of which every read shows a beginning of one order."""
        place = {turn: index for index, turn in enumerate(order)}
        begun = -FAR
        latest: list[float] = []
        newest = ""
        for turn in order:
            span = log.turns[turn]
            if span.ended < begun:
                what = f"{newest} stands before {turn}, but was begun after {turn} was acknowledged"
                self.say("order", turn, what, self.add_of(turn), self.add_of(newest), _showing(log, turn))
            if span.invoked > begun:
                begun, newest = span.invoked, turn
            latest.append(begun)
        known = self.known(log)
        when = [moment for moment, _ in known]
        furthest = list(itertools.accumulate((place.get(turn, len(order)) for _, turn in known), max))
        for read in log.reads:
            count = len(read.shown)
            if count and latest[count - 1] > read.ended:
                turn = max(read.shown, key=lambda one: log.turns[one].invoked)
                self.early(turn, read)
            sure = bisect.bisect_left(when, read.invoked)
            if sure and furthest[sure - 1] >= count:
                for _, turn in known[:sure]:
                    if place.get(turn, len(order)) >= count:
                        self.lost(log, turn, read)

    def known(self, log: Log) -> list[tuple[float, str]]:
        """Return from when on each turn is surely in the log, in the order of these times."""
        known = {turn: span.ended for turn, span in log.turns.items()}
        longest = dict[str, int]()
        for read in sorted(log.reads, key=attrgetter("ended")):
            # A read that shows no more turns than an earlier one from the same beginning tells nothing new.
            head = read.shown[0] if read.shown else ""
            count = len(read.shown)
            start = longest.get(head, 0) if not read.excused else 0
            for turn in read.shown[start:]:
                known[turn] = min(known[turn], read.ended)
            longest[head] = max(start, count)
        return sorted((moment, turn) for turn, moment in known.items() if moment < NEVER)

    def early(self, turn: str, read: Read) -> None:
        self.say("order", turn, f"{turn} was read before it was added", self.add_of(turn), read.op)

    def lost(self, log: Log, turn: str, read: Read) -> None:
        if ("lost", turn) in self._said:
            return
        before = _showing(log, turn, until=read.invoked)
        add = self.add_of(turn)
        if add is not None and add.ended < read.invoked:
            why, ops = f"{turn} was acknowledged, and a later read does not show it", (add, read.op)
        else:
            why, ops = f"{turn} was read, and a later read does not show it", (before, read.op)
        self.say("lost", turn, why, *ops)


def _showing(log: Log, turn: str, *, until: float = NEVER) -> Op | None:
    reads = (read for read in log.reads if turn in read.shown and read.ended < until)
    found = min(reads, key=attrgetter("ended"), default=None)
    return found.op if found else None


class _Partial:
    """A log of which some reads show only a part, as they may, or as they may not.

    Turns are bits of numbers. `before` has for each turn those that surely stand before it.
    """

    def __init__(self, checked: Checked, log: Log) -> None:
        self._checked = checked
        self._log = log
        self._turns = sorted(log.turns, key=lambda turn: log.turns[turn].invoked)
        self._bit = {turn: index for index, turn in enumerate(self._turns)}
        self._before: list[int] = []

    def check(self) -> None:
        if not self._order():
            return
        known = self._checked.known(self._log)
        when = [moment for moment, _ in known]
        masks = list(itertools.accumulate((1 << self._bit[turn] for _, turn in known), int.__or__, initial=0))
        gone = dict[int, float]()
        reads = sorted(self._log.reads, key=attrgetter("ended"))
        lacking: dict[int, int] = {}
        for read in reads:
            older = 0
            for turn in read.shown:
                older |= self._before[self._bit[turn]]
            known_then = masks[bisect.bisect_left(when, read.invoked)]
            missing = (known_then | older) & ~self._bits(read.shown)
            lacking[id(read)] = missing & ~self._waiting(read, missing)
        dropped = self._dropped(reads, lacking)
        for read in reads:
            for turn in read.shown:
                if self._log.turns[turn].invoked > read.ended:
                    self._checked.early(turn, read)
            missing = lacking[id(read)]
            excused = self._hidden(read, missing) if read.newest_only else missing & dropped[id(read)]
            for turn in self._named(missing & ~excused):
                self._checked.lost(self._log, turn, read)
            for turn in read.shown:
                if gone.get(self._bit[turn], NEVER) < read.invoked:
                    what = f"{turn} was missing from a read, and a later read shows it again"
                    self._checked.say("order", turn, what, self._checked.add_of(turn), read.op)
            if not read.newest_only:
                for index in _indexes(missing):
                    gone.setdefault(index, read.ended)

    def _hidden(self, read: Read, missing: int) -> int:
        """Return which of the missing turns a degraded conversation may hide.

        Those are older than the oldest that is shown, or not surely newer.
        """
        return missing & ~self._after(read.shown[0])

    def _waiting(self, read: Read, missing: int) -> int:
        """Return which of the missing turns wait in pages, or none if more are missing there than wait.

        They stand between what the summary covers and the oldest turn beside it.
        """
        if not read.waiting:
            return 0
        covered, rest = read.shown[: read.covered], read.shown[read.covered :]
        may = missing & ~(self._after(rest[0]) if rest else 0)
        may &= ~(self._before[self._bit[covered[-1]]] if covered else 0)
        return may if may.bit_count() <= read.waiting else 0

    def _dropped(self, reads: Iterable[Read], lacking: Mapping[int, int]) -> dict[int, int]:
        """Return which turns may have been dropped before each read; none, if they would be too many.

        A drop is counted once, so all turns that were ever missing by some count are at most so many. What
        was in a summary is not dropped.
        """
        summarized = 0
        for read in self._log.reads:
            summarized |= self._bits(read.shown[: read.covered])
        allowed = self._allowed()
        gone = 0
        may: dict[int, int] = {}
        # By the count: of two reads at the same time, the one that ends first may be the later one.
        for read in sorted(reads, key=attrgetter("dropped", "ended")):
            if read.newest_only:
                continue
            now = lacking[id(read)] & ~summarized if read.dropped else 0
            now &= self._droppable(read) if now else 0
            if (gone | now).bit_count() <= allowed[read.dropped]:
                gone |= now
            may[id(read)] = gone
        return may

    def _droppable(self, read: Read) -> int:
        """Return the turns that do not surely stand behind one that has to have been dropped before them.

        The oldest pending turns are dropped, so what is retained in full has no gaps, and something is left.
        """
        if not read.shown:
            return 0
        oldest = read.shown[min(read.covered, len(read.shown) - 1)]
        return ((1 << len(self._turns)) - 1) & ~self._after(oldest)

    def _allowed(self) -> dict[int, int]:
        """Return for each count of dropped turns how many of them were dropped while degraded."""
        reads = self._log.reads
        allowed, total, before = {0: 0}, 0, 0
        for count in sorted({read.dropped for read in reads} - {0}):
            until = min(read.ended for read in reads if read.dropped >= count)
            fewer = (read.invoked for read in reads if read.dropped < count and read.invoked <= until)
            if self._checked.of.was_degraded(max(fewer, default=-FAR), until):
                total += count - before
            allowed[count], before = total, count
        return allowed

    def _after(self, turn: str) -> int:
        mask = 1 << self._bit[turn]
        return sum(1 << index for index, before in enumerate(self._before) if before & mask)

    def _bits(self, turns: Iterable[str]) -> int:
        bits = 0
        for turn in turns:
            bits |= 1 << self._bit[turn]
        return bits

    def _named(self, bits: int) -> Iterator[str]:
        return (self._turns[index] for index in _indexes(bits))

    def _order(self) -> bool:
        """Find out which turns surely stand before which; says so if that is contradictory."""
        spans = self._log.turns
        ends = sorted((spans[turn].ended, index) for index, turn in enumerate(self._turns))
        masks = list(itertools.accumulate((1 << index for _, index in ends), int.__or__, initial=0))
        times = [end for end, _ in ends]
        direct = [masks[bisect.bisect_left(times, spans[turn].invoked)] for turn in self._turns]
        shown_by = dict[tuple[int, int], Read]()
        for read in self._log.reads:
            for first, second in itertools.pairwise(map(self._bit.__getitem__, read.shown)):
                if (first, second) not in shown_by:
                    shown_by[first, second] = read
                    direct[second] |= 1 << first
        self._before = [0] * len(direct)
        left, done = set(range(len(direct))), 0
        while left:
            ready = [index for index in left if not direct[index] & ~done]
            if not ready:
                self._say_cycle(left, direct, shown_by)
                return False
            for index in ready:
                before = direct[index]
                for earlier in _indexes(direct[index]):
                    before |= self._before[earlier]
                self._before[index] = before
                left.discard(index)
                done |= 1 << index
        return True

    def _say_cycle(
        self, left: set[int], direct: Sequence[int], shown_by: Mapping[tuple[int, int], Read]
    ) -> None:
        """Name a shortest circle of turns that stand before each other."""
        rest = sum(1 << index for index in left)
        circle = min((c for start in left if (c := _circle(start, direct, rest))), key=len)
        names = [self._turns[index] for index in circle]
        reads = [shown_by.get(pair) for pair in itertools.pairwise([*circle, circle[0]])]
        ops = [read.op for read in reads if read is not None]
        adds = [self._checked.add_of(name) for name in names[:4]]
        what = f"{', '.join(names)} stand before each other by turns"
        self._checked.say("order", names[0], what, *adds, *ops[:4])


def _circle(start: int, direct: Sequence[int], among: int) -> list[int]:
    """Return a shortest way back to a turn along those that stand before it, the first of them first."""
    came: dict[int, int] = {}
    ring = [start]
    while ring:
        further: list[int] = []
        for index in ring:
            for earlier in _indexes(direct[index] & among):
                if earlier == start:
                    way = [index]
                    while way[-1] != start:
                        way.append(came[way[-1]])
                    return way
                if earlier not in came:
                    came[earlier] = index
                    further.append(earlier)
        ring = further
    return []


def _indexes(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
