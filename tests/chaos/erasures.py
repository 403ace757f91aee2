"""Whether what was read of one conversation can be explained by logs that erasures have ended.

An erasure ends a log, and the next turn begins another. What an operation without an end, or of unknown
outcome, may do:

- An add stores its turn at any moment after it began, in each log at most once. It may do so in two logs,
  because a write of unknown outcome is tried again, and the attempts may lie before and after an erasure.
- An erasure takes effect at one later moment, or never. So it explains one change of logs, after it began.
- An erasure that was refused may have erased before the request that was refused, and nothing afterwards.

What was read does not always say of which log it is, nor which of two logs came first. So courses of events
are tried, the likely ones first, until one is right.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

from tests.chaos.conversations import FAR, NEVER, Checked, Log, Op, Read, Span, Violation

MOST_COURSES: Final = 1_000
"""How many courses of events are tried for a conversation."""


@dataclass(slots=True)
class _Erase:
    """An erasure, and between which logs it may lie: before the log `low`, ..., before the log `high`."""

    op: Op
    low: int = 0
    high: int = 0

    @property
    def latest(self) -> float:
        return self.op.latest


class Erased:
    """A conversation that may have been erased, as its logs."""

    def __init__(self, checked: Checked) -> None:
        self.late: set[str] = set()
        """Turns of unknown outcome that were added before an acknowledged erasure and stand after it."""
        self.again: set[str] = set()
        """Turns that were added before an acknowledged erasure, and again, and stand after it."""
        self._checked = checked
        self._of = checked.of
        self._spans = checked.spans
        self._erases = [_Erase(op) for op in self._of.erases]
        self._needs: dict[int, tuple[Op, ...]] = {}
        self._twice = {turn for turn in self._spans if self._may_stand_twice(turn)}

    def _may_stand_twice(self, turn: str) -> bool:
        """Say whether a turn may have been stored both before and after an erasure.

        An acknowledged add has stored it in two logs only if an erasure came between two attempts. One that
        began earlier and whose outcome is unknown would have to arrive between them, and a read, too: that is
        left out, because otherwise nothing after such an erasure could be told from what was before it.
        """
        return self._in_two_logs([op for op in self._of.adds[turn] if op.status != "fail"])

    def _in_two_logs(self, able: Sequence[Op]) -> bool:
        first, last = min(op.invoked for op in able), max(op.latest for op in able)
        erases = [erase for erase in self._erases if erase.latest > first and erase.op.invoked < last]
        if len(able) == 1 and last < NEVER:
            return any(erase.latest < NEVER or erase.op.invoked > first for erase in erases)
        return bool(erases)

    def _placed(self, log: Log) -> Log:
        """Return a log with each turn at its time in this log, by the adds that can have stored it there.

        Those are the adds that had begun when a read showed it first, without those that were over before an
        acknowledged erasure that came before a read of this log. Another add of the turn is of another log.
        """
        last = max((read.invoked for read in log.reads), default=-FAR)
        begun = [e.op.invoked for e in self._erases if e.op.status == "ok" and e.latest < last]
        since = max(begun, default=-FAR)
        placed, first = Log(), dict[str, float]()
        for read in log.reads:
            placed.take(read)
            for turn in read.shown:
                first[turn] = min(read.ended, first.get(turn, NEVER))
        for turn, seen in first.items():
            span = self._spans[turn]
            if turn in self._twice:
                ops = [op for op in self._of.adds[turn] if op.status != "fail" and op.latest >= since]
                # Without any, the turn was left by an erasure, or read before it was added: see elsewhere.
                if ops := [op for op in ops if op.invoked <= seen]:
                    ended = NEVER if self._in_two_logs(ops) else min(op.ended for op in ops)
                    span = Span(min(op.invoked for op in ops), ended)
                else:
                    span = Span(span.invoked, NEVER)
            placed.hold(turn, span)
        return placed

    def check(self) -> None:
        """Judge the most likely course of events, and others while that one would not be right."""
        if self._left():
            return
        first: list[Violation] | None = None
        # An order of these sums keeps every order that time demands, if any order does.
        numbers = itertools.count()
        courses = [(0, next(numbers), sorted(self._clusters(), key=_when))]
        known = set[tuple[int, ...]]()
        while courses and len(known) < MOST_COURSES:
            _, _, logs = heapq.heappop(courses)
            course = tuple(hash(tuple(id(read) for read in log.reads)) for log in logs)
            if course in known:
                continue
            known.add(course)
            self._needs = {}
            judged = [self._placed(log) for log in logs]
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
            old = {turn for turn, ops in self._of.adds.items() if self._all_before(ops[:1], erase)}
            for read in self._of.reads:
                if read.invoked <= erase.latest:
                    continue
                for turn in sorted(old.intersection(read.shown)):
                    # What is added again later explains nothing that was read before.
                    ops = [op for op in self._of.adds[turn] if op.invoked <= read.ended]
                    if self._all_before(ops, erase):
                        what = f"{turn} was added before an acknowledged erasure began, and is read after it"
                        self._checked.say("erasure", turn, what, *ops, erase.op, read.op)
                        found = True
                        break
        return found

    def _all_before(self, ops: Iterable[Op], erase: _Erase) -> bool:
        return all(op.status == "fail" or op.latest < erase.op.invoked for op in ops)

    def _near(self, logs: list[Log]) -> Iterator[list[Log]]:
        """Yield courses that differ in one thing.

        Two logs are one, or change places, or some reads are of the other one; or one log is two.
        """
        for place, (one, other) in enumerate(itertools.pairwise(logs)):
            before, after = logs[:place], logs[place + 2 :]
            if both := self._joined(one, other):
                yield [*before, both, *after]
            if one.first >= other.last:
                yield [*before, other, one, *after]
            for early, late in self._parted(one):
                if both := self._joined(late, other):
                    yield [*before, early, both, *after]
            for early, late in self._parted(other):
                if both := self._joined(one, early):
                    yield [*before, both, late, *after]
        for place, log in enumerate(logs):
            for parts in self._parted(log):
                yield sorted([*logs[:place], *parts, *logs[place + 1 :]], key=_when)

    def _joined(self, one: Log, other: Log) -> Log | None:
        """Return two logs as one, if they can be."""
        both = one.with_all_of(other)
        alike = one.loose or other.loose or not one.turns.keys().isdisjoint(other.turns)
        return both if alike and not self._straddling(both) else None

    def _parted(self, log: Log) -> Iterator[tuple[Log, Log]]:
        """Yield the ways in which a log may have been two in a row, with turns that stood in both."""
        reads = sorted(log.reads, key=lambda read: read.invoked + read.ended)
        whole = set[int]()
        for turn in log.turns.keys() - self._twice:
            shown = [place for place, read in enumerate(reads) if turn in read.shown]
            whole.update(range(shown[0] + 1, shown[-1] + 1))
        for place in set(range(1, len(reads))) - whole:
            yield self._log_of(reads[:place]), self._log_of(reads[place:])
        # A long read that took place early, or late, is on the wrong side then.
        unsure = [read for read in reads if self._twice.issuperset(read.shown)]
        sure = [read for read in reads if not self._twice.issuperset(read.shown)]
        for place in range(len(unsure) if sure else 0):
            yield self._log_of(unsure[:place] + sure), self._log_of(unsure[place:])
            yield self._log_of(unsure[: place + 1]), self._log_of(sure + unsure[place + 1 :])

    def _log_of(self, reads: Iterable[Read]) -> Log:
        log = Log()
        for read in reads:
            self._put(log, read)
        return log

    def _judge(self, logs: list[Log]) -> None:
        for log in logs:
            if self._straddled(log):
                # What follows would only repeat this.
                return
        if not _in_time(logs):
            self._say_mixed(logs)
        gaps = self._gaps(logs)
        for gap in gaps:
            self._say_gap(logs[gap - 1], logs[gap])
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

    def _clusters(self) -> list[Log]:
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
        logs: dict[str, Log] = {}
        unsure: list[Read] = []
        for read in itertools.chain.from_iterable(by_head.values()):
            once = next((turn for turn in read.shown if turn not in twice), None)
            if once is None:
                unsure.append(read)
            else:
                self._put(logs.setdefault(find(once), Log()), read)
        return self._place_unsure([*logs.values()], unsure)

    def _put(self, log: Log, read: Read) -> None:
        log.take(read)
        for turn in read.shown:
            if turn not in log.turns:
                span = self._spans[turn]
                log.hold(turn, Span(span.invoked, NEVER) if turn in self._twice else span)

    def _place_unsure(self, logs: list[Log], unsure: list[Read]) -> list[Log]:
        """Put reads of which each turn may stand in two logs where they fit, beginning with the longest."""
        for read in sorted(unsure, key=lambda read: (-len(read.shown), read.invoked)):
            log = next((log for log in logs if self._fits(log, read)), None)
            if log is None:
                logs.append(log := Log())
            self._put(log, read)
        return logs

    def _fits(self, log: Log, read: Read) -> bool:
        if read.newest_only or log.narrow:
            alike = any(turn in log.turns for turn in read.shown)
        else:
            alike = any(other.shown[: len(read.shown)] == read.shown for other in log.reads)
        if not alike:
            return False
        first, last = min(log.first, read.ended), max(log.last, read.invoked)
        return not any(erase.op.status == "ok" and _between(erase, first, last) for erase in self._erases)

    def _straddled(self, log: Log) -> bool:
        """Say whether an acknowledged erasure lies within a log, which is a violation."""
        if erase := self._straddling(log):
            self._say_left(log, erase)
        return erase is not None

    def _straddling(self, log: Log) -> _Erase | None:
        sure = (erase for erase in self._erases if erase.op.status == "ok")
        return next((erase for erase in sure if _between(erase, log.first, log.last)), None)

    def _say_left(self, log: Log, erase: _Erase) -> None:
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

    def _gaps(self, logs: Sequence[Log]) -> list[int]:
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

    def _say_gap(self, before: Log, after: Log) -> None:
        one = max(before.reads, key=attrgetter("ended"))
        other = min(after.reads, key=attrgetter("ended"))
        what = f"{one.shown[0]} is gone and {other.shown[0]} comes first, without an erasure"
        self._checked.say("lost", one.shown[0], what, self._checked.add_of(one.shown[0]), one.op, other.op)

    def _say_mixed(self, logs: Sequence[Log]) -> None:
        for one, other in itertools.pairwise(logs):
            if other.first < one.last:
                what = f"reads show {one.reads[-1].shown[0]} and {other.reads[0].shown[0]} first by turns"
                self._checked.say("order", "", what, one.reads[-1].op, other.reads[0].op)
                return

    def _check_empty(self, logs: Sequence[Log], read: Read) -> None:
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

    def _stood(self, logs: Sequence[Log], turn: str, op: Op) -> bool:
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

    def _check_unseen(self, logs: Sequence[Log], turn: str, op: Op) -> None:
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
            if log.loose:
                # It may have been stored by an earlier add, but one that ended may be of another log.
                log.hold(turn, Span(self._spans[turn].invoked, op.ended))
                return
        what = f"{turn} was acknowledged, and a later read does not show it"
        self._checked.say("lost", turn, what, op, soon.op)

    def _count_late(self, logs: Sequence[Log]) -> None:
        for erase in self._erases:
            if erase.op.status == "ok":
                for log in logs:
                    if log.first > erase.latest:
                        for turn, span in log.turns.items():
                            if span.invoked < erase.op.invoked:
                                self.late.add(turn)
                            elif self._spans[turn].invoked < erase.op.invoked:
                                self.again.add(turn)


def _when(log: Log) -> float:
    return log.first + log.last


def _between(erase: _Erase, first: float, last: float) -> bool:
    """Say whether something had surely happened before an erasure, and something else only after it."""
    return first < erase.op.invoked and erase.latest < last


def _in_time(logs: Sequence[Log]) -> bool:
    begun = -FAR
    for log in logs:
        if log.first < begun:
            return False
        begun = max(begun, log.last)
    return True
