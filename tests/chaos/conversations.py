"""Whether what was read of one conversation can be explained by what was written to it.

A conversation is a sequence of logs: an erasure ends one, and the next turn begins another. A log only grows
at its end, and a read shows all of it: what the summary covers, what is pending, what is recent. So all reads
of a log are beginnings of one order, and that order is right if no operation that had ended stands after one
that began later. Two things excuse a read that shows less: turns that were counted as dropped, and a degraded
conversation, of which only the newest turns are shown.

What an operation without an end, or of unknown outcome, may do:

- An add stores its turn at any moment after it began, in each log at most once. It may do so in two logs,
  because a write of unknown outcome is tried again, and the attempts may lie before and after an erasure.
- An erasure takes effect at one later moment, or never. So it explains one change of logs, after it began.
- An erasure that was refused may have erased before the request that was refused, and nothing afterwards.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

from tests.chaos.history import Event

NEVER: Final = math.inf
MOST_COURSES: Final = 100
"""How many courses of events are tried for a conversation that was erased."""

_FAR: Final = 1e15
"""A time after all others that can still be added to another."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What no correct memory would have done, with the events that show it."""

    kind: str
    conversation: str
    sentence: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.conversation}" if self.conversation else ""
        lines = [f"{self.kind}{where}: {self.sentence}", *map(_line, self.events)]
        return "\n    ".join(lines)


def _line(event: Event) -> str:
    data = str(event.data)
    data = data if len(data) <= 300 else f"{data[:200]} ... {data[-100:]}"
    return f"{event.t:.6f} {event.process}#{event.op} {event.what} {event.phase} {data}"


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

    @property
    def excused(self) -> bool:
        """Whether it may show less than the whole log."""
        return self.newest_only or self.dropped > 0


@dataclass(slots=True)
class Conversation:
    """The operations on one conversation, each kind in the order in which they began."""

    name: str
    adds: dict[str, list[Op]] = field(default_factory=dict[str, list[Op]])
    reads: list[Read] = field(default_factory=list[Read])
    erases: list[Op] = field(default_factory=list[Op])


@dataclass(slots=True)
class _Span:
    """When a turn may have been added to a log: not before `invoked`, and surely once it is `ended`."""

    invoked: float
    ended: float


@dataclass(slots=True)
class _Log:
    """What was read between two erasures.

    `first` is the earliest end of anything in it, `last` the latest begin: what begins after `first` is of
    this log or of a later one, and what ended before `last` of this one or of an earlier one.
    """

    turns: dict[str, _Span] = field(default_factory=dict[str, _Span])
    reads: list[Read] = field(default_factory=list[Read])
    first: float = _FAR
    last: float = -_FAR

    def take(self, read: Read) -> None:
        self.reads.append(read)
        self.first, self.last = min(self.first, read.ended), max(self.last, read.invoked)

    def hold(self, turn: str, span: _Span) -> None:
        self.turns[turn] = span
        self.first, self.last = min(self.first, span.ended), max(self.last, span.invoked)

    def with_all_of(self, other: _Log) -> _Log:
        """Return this log and another one as one."""
        first, last = min(self.first, other.first), max(self.last, other.last)
        return _Log({**self.turns, **other.turns}, [*self.reads, *other.reads], first, last)

    def copy(self) -> _Log:
        """Return a log that can be changed."""
        return _Log({**self.turns}, [*self.reads], self.first, self.last)

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
        self.late_after_erasure: set[str] = set()
        self._said = set[tuple[str, str]]()
        self._clean()
        self._check_all()

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
            self.violations.append(Violation(kind, self.of.name, sentence, events))

    def add_of(self, turn: str) -> Op | None:
        """Return the add that shows best that a turn was added: the first that was acknowledged."""
        ops = self.of.adds.get(turn, [])
        return min(ops, key=attrgetter("ended"), default=None)

    # What one read shows by itself

    def _clean(self) -> None:
        """Check each read by itself, and leave in it only what can be compared with other reads."""
        adds = self.of.adds
        possible = {turn for turn, ops in adds.items() if any(op.status != "fail" for op in ops)}
        for read in self.of.reads:
            if read.foreign:
                what = f"a read shows {read.foreign} turns of another conversation, or altered ones"
                self.say("foreign", "", what, read.op)
            shown = set(read.shown)
            self.appeared |= shown
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

    # Which reads are of the same log

    def _check_all(self) -> None:
        spans = {
            turn: _Span(min(op.invoked for op in able), min(op.ended for op in able))
            for turn, ops in self.of.adds.items()
            if (able := [op for op in ops if op.status != "fail"])
        }
        if self.of.erases:
            _Erased(self, spans).check()
            return
        log = _Log()
        for turn, span in spans.items():
            if span.ended < NEVER or turn in self.appeared:
                log.hold(turn, span)
        for read in self.of.reads:
            log.take(read)
        self.check_log(log)

    # One log

    def check_log(self, log: _Log) -> None:
        longest = max((read.shown for read in log.reads), key=len, default=())
        if all(not read.excused and longest[: len(read.shown)] == read.shown for read in log.reads):
            self._check_order(log, longest)
        else:
            _Partial(self, log).check()

    def _check_order(self, log: _Log, order: tuple[str, ...]) -> None:
        """Check a log of which every read shows a beginning of one order."""
        place = {turn: index for index, turn in enumerate(order)}
        begun = -_FAR
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

    def known(self, log: _Log) -> list[tuple[float, str]]:
        """Return from when on each turn is surely in the log, in the order of these times."""
        known = {turn: span.ended for turn, span in log.turns.items()}
        longest = dict[str, int]()
        for read in sorted(log.reads, key=attrgetter("ended")):
            # A read that shows no more turns than an earlier one from the same beginning tells nothing new.
            head = read.shown[0] if read.shown else ""
            count = len(read.shown)
            start = longest.get(head, 0) if not read.newest_only and not read.dropped else 0
            for turn in read.shown[start:]:
                known[turn] = min(known[turn], read.ended)
            longest[head] = max(start, count)
        return sorted((moment, turn) for turn, moment in known.items() if moment < NEVER)

    def early(self, turn: str, read: Read) -> None:
        self.say("order", turn, f"{turn} was read before it was added", self.add_of(turn), read.op)

    def lost(self, log: _Log, turn: str, read: Read) -> None:
        if ("lost", turn) in self._said:
            return
        before = _showing(log, turn, until=read.invoked)
        add = self.add_of(turn)
        if add is not None and add.ended < read.invoked:
            why, ops = f"{turn} was acknowledged, and a later read does not show it", (add, read.op)
        else:
            why, ops = f"{turn} was read, and a later read does not show it", (before, read.op)
        self.say("lost", turn, why, *ops)


def _showing(log: _Log, turn: str, *, until: float = NEVER) -> Op | None:
    reads = (read for read in log.reads if turn in read.shown and read.ended < until)
    found = min(reads, key=attrgetter("ended"), default=None)
    return found.op if found else None


class _Partial:
    """A log of which some reads show only a part, as they may, or as they may not.

    Turns are bits of numbers. `before` has for each turn those that surely stand before it.
    """

    def __init__(self, checked: Checked, log: _Log) -> None:
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
        for read in sorted(self._log.reads, key=attrgetter("ended")):
            bits = self._bits(read.shown)
            for turn in read.shown:
                if self._log.turns[turn].invoked > read.ended:
                    self._checked.early(turn, read)
            older = 0
            for turn in read.shown:
                older |= self._before[self._bit[turn]]
            missing = (masks[bisect.bisect_left(when, read.invoked)] | older) & ~bits
            excused = self._excused(read, missing)
            for turn in self._named(missing & ~excused):
                self._checked.lost(self._log, turn, read)
            for turn in read.shown:
                if gone.get(self._bit[turn], NEVER) < read.invoked:
                    what = f"{turn} was missing from a read, and a later read shows it again"
                    self._checked.say("order", turn, what, self._checked.add_of(turn), read.op)
            if not read.newest_only:
                for index in _indexes(missing):
                    gone.setdefault(index, read.ended)

    def _excused(self, read: Read, missing: int) -> int:
        """Return which of the missing turns may be missing."""
        if read.newest_only:
            # Turns older than the oldest that is shown, or not surely newer.
            return missing & ~self._after(read.shown[0])
        # The oldest pending turns are dropped, so what is retained in full has no gaps.
        retained = read.shown[read.covered :]
        may = missing & ~self._after(retained[0]) if retained else missing
        return may if may.bit_count() <= read.dropped else 0

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


@dataclass(slots=True)
class _Erase:
    """An erasure, and between which logs it may lie: before the log `low`, ..., before the log `high`."""

    op: Op
    low: int = 0
    high: int = 0

    @property
    def latest(self) -> float:
        return self.op.latest


class _Erased:
    """A conversation that may have been erased, as its logs."""

    def __init__(self, checked: Checked, spans: Mapping[str, _Span]) -> None:
        self._checked = checked
        self._of = checked.of
        self._spans = spans
        self._erases = [_Erase(op) for op in self._of.erases]
        self._needs: dict[int, tuple[Op, ...]] = {}
        self._twice = {turn for turn in spans if self._may_stand_twice(turn)}

    def _may_stand_twice(self, turn: str) -> bool:
        """Say whether a turn may have been stored both before and after an erasure.

        An acknowledged add has stored it in two logs only if an erasure came between two attempts. One that
        began earlier and whose outcome is unknown would have to arrive between them, and a read, too: that is
        left out, because otherwise nothing after such an erasure could be told from what was before it.
        """
        able = [op for op in self._of.adds[turn] if op.status != "fail"]
        first, last = min(op.invoked for op in able), max(op.latest for op in able)
        erases = [erase for erase in self._erases if erase.latest > first and erase.op.invoked < last]
        if len(able) == 1 and last < NEVER:
            return any(erase.latest < NEVER or erase.op.invoked > first for erase in erases)
        return bool(erases)

    def check(self) -> None:
        """Judge the most likely course of events, and others while that one would not be right.

        What was read does not always say of which log it is, nor which of two logs came first.
        """
        if self._left():
            return
        first: list[Violation] | None = None
        # An order of these sums keeps every order that time demands, if any order does.
        starts = (sorted(self._clusters(prefer), key=_when) for prefer in (_apart, _age))
        numbers = itertools.count()
        courses = [(0, next(numbers), logs) for logs in starts]
        known = set[tuple[int, ...]]()
        while courses and len(known) < MOST_COURSES:
            _, _, logs = heapq.heappop(courses)
            course = tuple(hash(tuple(id(read) for read in log.reads)) for log in logs)
            if course in known:
                continue
            known.add(course)
            self._needs = {}
            judged = [log.copy() for log in logs]
            found = self._checked.said_by(partial(self._judge, judged))
            if not found:
                self._count_late(judged)
                return
            first = found if first is None else first
            for other in self._near(logs):
                heapq.heappush(courses, (len(found), next(numbers), other))
        self._checked.violations += first or []

    def _left(self) -> bool:
        """Say whether something is read after an erasure that was added, for certain, before it."""
        found = False
        for erase in self._erases:
            if erase.op.status != "ok":
                continue
            gone = {
                turn for turn, ops in self._of.adds.items() if all(op.latest < erase.op.invoked for op in ops)
            }
            for read in self._of.reads:
                if read.invoked > erase.latest and (left := gone.intersection(read.shown)):
                    turn = min(left)
                    what = f"{turn} was added before an acknowledged erasure began, and is read after it"
                    self._checked.say("erasure", turn, what, *self._of.adds[turn], erase.op, read.op)
                    found = True
        return found

    def _near(self, logs: list[_Log]) -> Iterator[list[_Log]]:
        """Yield courses that differ in one thing: two logs are one, or change places, or one log is two."""
        for place, (one, other) in enumerate(itertools.pairwise(logs)):
            both = one.with_all_of(other)
            alike = one.loose or other.loose or not one.turns.keys().isdisjoint(other.turns)
            if alike and not self._straddling(both):
                yield [*logs[:place], both, *logs[place + 2 :]]
            if one.first >= other.last:
                yield [*logs[:place], other, one, *logs[place + 2 :]]
        for place, log in enumerate(logs):
            for parts in self._parted(log):
                yield sorted([*logs[:place], *parts, *logs[place + 1 :]], key=_when)

    def _parted(self, log: _Log) -> Iterator[tuple[_Log, _Log]]:
        """Yield the ways in which a log may have been two in a row, with turns that stood in both."""
        reads = sorted(log.reads, key=lambda read: read.invoked + read.ended)
        whole = set[int]()
        for turn in log.turns.keys() - self._twice:
            shown = [place for place, read in enumerate(reads) if turn in read.shown]
            whole.update(range(shown[0] + 1, shown[-1] + 1))
        for place in set(range(1, len(reads))) - whole:
            early, late = _Log(), _Log()
            for number, read in enumerate(reads):
                self._put(early if number < place else late, read)
            yield early, late

    def _judge(self, logs: list[_Log]) -> None:
        for log in logs:
            if self._straddled(log):
                # What follows would only repeat this.
                return
        if not _in_time(logs):
            self._say_mixed(logs)
        if gaps := self._gaps(logs):
            self._say_gap(logs[gaps[0] - 1], logs[gaps[0]])
        for read in self._of.reads:
            if not read.shown:
                self._check_empty(logs, read)
        seen = {turn for log in logs for turn in log.turns}
        for turn, ops in self._of.adds.items():
            for op in ops:
                if op.status == "ok" and (turn not in seen or not self._stood(logs, turn, op)):
                    self._check_unseen(logs, turn, op)
        for gap in self._without(sorted({*range(1, len(logs)), *self._needs})) if not gaps else ():
            what = "an erasure of unknown outcome would have to take effect twice to explain what is missing"
            self._checked.say("lost", str(gap), what, *self._needs.get(gap, ()))
        for log in logs:
            self._checked.check_log(log)

    def _clusters(self, prefer: Callable[[_Log, Read], float]) -> list[_Log]:
        """Gather reads that have a turn in common which can stand in one log only."""
        root: dict[str, str] = {}

        def find(turn: str) -> str:
            while root.setdefault(turn, turn) != turn:
                root[turn] = turn = root[root[turn]]
            return turn

        twice = self._twice
        by_head: dict[str, list[Read]] = {}
        for read in self._of.reads:
            if read.shown:
                by_head.setdefault(read.shown[0], []).append(read)
        for reads in by_head.values():
            longest = max((read.shown for read in reads), key=len)
            odd = (read.shown for read in reads if longest[: len(read.shown)] != read.shown)
            for shown in (longest, *odd):
                once = [turn for turn in shown if turn not in twice]
                for first, second in itertools.pairwise(once):
                    root[find(second)] = find(first)
        logs: dict[str, _Log] = {}
        unsure: list[Read] = []
        for read in itertools.chain.from_iterable(by_head.values()):
            once = next((turn for turn in read.shown if turn not in twice), None)
            if once is None:
                unsure.append(read)
            else:
                self._put(logs.setdefault(find(once), _Log()), read)
        return self._place_unsure([*logs.values()], unsure, prefer)

    def _put(self, log: _Log, read: Read) -> None:
        log.take(read)
        for turn in read.shown:
            if turn not in log.turns:
                span = self._spans[turn]
                log.hold(turn, _Span(span.invoked, NEVER) if turn in self._twice else span)

    def _place_unsure(
        self, logs: list[_Log], unsure: list[Read], prefer: Callable[[_Log, Read], float]
    ) -> list[_Log]:
        """Put reads of which each turn may stand in two logs where they fit, beginning with the longest."""
        for read in sorted(unsure, key=lambda read: (-len(read.shown), read.invoked)):
            fits = [log for log in logs if self._fits(log, read) and not _contradicts(log, read)]
            if not fits:
                fits = [_Log()]
                logs.append(fits[0])
            self._put(min(fits, key=lambda log: prefer(log, read)), read)
        return logs

    def _fits(self, log: _Log, read: Read) -> bool:
        if read.newest_only or log.narrow:
            alike = any(turn in log.turns for turn in read.shown)
        else:
            alike = any(other.shown[: len(read.shown)] == read.shown for other in log.reads)
        if not alike:
            return False
        first, last = min(log.first, read.ended), max(log.last, read.invoked)
        return not any(erase.op.status == "ok" and _between(erase, first, last) for erase in self._erases)

    def _straddled(self, log: _Log) -> bool:
        """Say whether an acknowledged erasure lies within a log, which is a violation."""
        if erase := self._straddling(log):
            self._say_left(log, erase)
        return erase is not None

    def _straddling(self, log: _Log) -> _Erase | None:
        sure = (erase for erase in self._erases if erase.op.status == "ok")
        return next((erase for erase in sure if _between(erase, log.first, log.last)), None)

    def _say_left(self, log: _Log, erase: _Erase) -> None:
        after = [read for read in log.reads if read.invoked > erase.latest]
        old = {turn for turn, span in log.turns.items() if span.ended < erase.op.invoked}
        for read in log.reads:
            if read.ended < erase.op.invoked:
                old.update(read.shown)
        for read in after:
            if turn := next((turn for turn in read.shown if turn in old), None):
                what = f"{turn} was stored before an acknowledged erasure began, and is read after it"
                self._checked.say("erasure", turn, what, self._checked.add_of(turn), erase.op, read.op)
                return
        what = "turns before and after an acknowledged erasure are read together"
        reads = (read.op for read in log.reads[-1:])
        self._checked.say("erasure", "", what, erase.op, *reads)

    def _gaps(self, logs: Sequence[_Log]) -> list[int]:
        """Return before which logs there is no erasure."""
        for erase in self._erases:
            early = [place for place, log in enumerate(logs, 1) if log.first < erase.op.invoked]
            late = [place for place, log in enumerate(logs) if erase.latest < log.last]
            erase.low, erase.high = max(early, default=0), min(late, default=len(logs))
        return self._without(range(1, len(logs)))

    def _without(self, gaps: Iterable[int]) -> list[int]:
        """Return which of these changes of logs no erasure explains; each explains only one."""
        free = list(self._erases)
        without: list[int] = []
        for gap in gaps:
            able = [erase for erase in free if erase.low <= gap <= erase.high]
            if not able:
                without.append(gap)
                continue
            free.remove(min(able, key=attrgetter("high")))
        return without

    def _say_gap(self, before: _Log, after: _Log) -> None:
        one = max(before.reads, key=attrgetter("ended"))
        other = min(after.reads, key=attrgetter("ended"))
        what = f"{one.shown[0]} is gone and {other.shown[0]} comes first, without an erasure"
        self._checked.say("lost", one.shown[0], what, self._checked.add_of(one.shown[0]), one.op, other.op)

    def _say_mixed(self, logs: Sequence[_Log]) -> None:
        for one, other in itertools.pairwise(logs):
            if other.first < one.last:
                what = f"reads show {one.reads[-1].shown[0]} and {other.reads[0].shown[0]} first by turns"
                self._checked.say("order", "", what, one.reads[-1].op, other.reads[0].op)
                return

    def _check_empty(self, logs: Sequence[_Log], read: Read) -> None:
        early = [place for place, log in enumerate(logs, 1) if log.first < read.invoked]
        late = [place for place, log in enumerate(logs) if read.ended < log.last]
        low, high = max(early, default=0), min(late, default=len(logs))
        if low == 0 or any(
            max(low, erase.low) <= min(high, erase.high) and erase.op.invoked <= read.ended
            for erase in self._erases
        ):
            if 0 < low == high:
                self._needs[low] = (read.op,)
            return
        log = logs[low - 1]
        turn = min(log.turns, key=lambda one: log.turns[one].ended)
        what = f"{turn} was there, and a later read finds nothing, without an erasure"
        self._checked.say("lost", turn, what, self._checked.add_of(turn), read.op)

    def _stood(self, logs: Sequence[_Log], turn: str, op: Op) -> bool:
        """Say whether a log that shows the turn may have stood while this add was under way."""
        return any(
            turn in log.turns
            and not any(other.first < op.invoked for other in logs[place + 1 :])
            and not any(op.ended < other.last for other in logs[:place])
            and not any(
                erase.op.status == "ok" and erase.low > place and erase.latest < op.invoked
                for erase in self._erases
            )
            for place, log in enumerate(logs)
        )

    def _check_unseen(self, logs: Sequence[_Log], turn: str, op: Op) -> None:
        """Check an acknowledged add that no read shows: an erasure took it, or nobody has read since."""
        after = [read for read in self._of.reads if read.invoked > op.ended]
        if not after:
            return
        soon = min(after, key=attrgetter("ended"))
        early = [place for place, log in enumerate(logs, 1) if log.first < op.invoked]
        late = [place for place, log in enumerate(logs) if op.ended < log.last]
        # In a log's place is before its end, where the erasure is that follows it.
        low, high = max(early, default=0), min(late, default=len(logs))
        for erase in self._erases:
            fits = max(low, erase.low) <= min(high, erase.high)
            if fits and erase.latest >= op.invoked and erase.op.invoked <= soon.ended:
                if low == high and not any(read.excused for log in logs for read in log.reads):
                    self._needs[low] = op, soon.op
                return
        for log in logs[max(0, low - 1) : high + 1]:
            if any(read.dropped or read.newest_only for read in log.reads):
                log.hold(turn, self._spans[turn])
                return
        what = f"{turn} was acknowledged, and a later read does not show it"
        self._checked.say("lost", turn, what, op, soon.op)

    def _count_late(self, logs: Sequence[_Log]) -> None:
        """Note turns of unknown outcome that were added before an acknowledged erasure and stand after it."""
        for erase in self._erases:
            if erase.op.status == "ok":
                for log in logs:
                    if log.first > erase.latest:
                        old = (turn for turn, span in log.turns.items() if span.invoked < erase.op.invoked)
                        self._checked.late_after_erasure.update(old)


def _contradicts(log: _Log, read: Read) -> bool:
    """Say whether a read cannot be of a log, by what was surely in it, or not yet, at the time."""
    oldest = log.turns[read.shown[0]].ended if read.shown[0] in log.turns else NEVER
    lacks = (
        span.ended < read.invoked and (not read.newest_only or span.invoked > oldest)
        for turn, span in log.turns.items()
        if turn not in read.shown
    )
    if any(lacks):
        return True
    count = len(read.shown)
    return not read.newest_only and any(
        (other.ended < read.invoked and len(other.shown) > count)
        or (read.ended < other.invoked and len(other.shown) < count)
        for other in log.reads
        if not other.excused
    )


def _when(log: _Log) -> float:
    return log.first + log.last


def _age(log: _Log, read: Read) -> float:
    return log.first


def _apart(log: _Log, read: Read) -> float:
    """Return how long before or after the reads of a log another read was."""
    if not log.reads:
        return 0.0
    begin, end = min(one.invoked for one in log.reads), max(one.ended for one in log.reads)
    return max(0.0, begin - read.ended, read.invoked - end)


def _between(erase: _Erase, first: float, last: float) -> bool:
    """Say whether something had surely happened before an erasure, and something else only after it."""
    return first < erase.op.invoked and erase.latest < last


def _in_time(logs: Sequence[_Log]) -> bool:
    begun = -_FAR
    for log in logs:
        if log.first < begun:
            return False
        begun = max(begun, log.last)
    return True
