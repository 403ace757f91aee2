"""Whether a correct memory can have made a recorded history: `python -m tests.chaos.checker FOLDER`.

`conversations` and `erasures` compare what was read with what was written. Here are the properties that need
more than one conversation: leases, versions, health, what is left to do at the end, and the figures of pods.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from tests.chaos import flat, history, remembering, transcripts
from tests.chaos.conversations import ILL, Checked, Conversation, Op, Read, Violation
from tests.chaos.erasures import Erased
from tests.chaos.history import Event

ALLOWED: Final[Mapping[str, float]] = {
    "memory": 48 * 1024 * 1024,
    "tasks": 24,
    "descriptors": 24,
    "connections": 12,
}
"""By how much a figure of a surviving pod may grow after its warm-up: in bytes, or in pieces."""

INTERRUPTED: Final = (
    "the run was interrupted before its final reads, "
    "so losses after each conversation's last read cannot be seen"
)

SLACK_S: Final = 0.1
"""By how much a lease may seem too short: events are noted a moment after what they note."""

SHOWN: Final = 5
"""How many violations of a kind are printed."""


@dataclass(slots=True)
class Report:
    """What was found: what no correct memory does, and how much was looked at.

    `pods` has for each pod that was judged how long it was watched, in seconds, and the median of each figure
    early and late in that time.
    """

    violations: list[Violation] = field(default_factory=list[Violation])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    pods: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def __str__(self) -> str:
        kinds = Counter(one.kind for one in self.violations)
        shown: Counter[str] = Counter()
        lines: list[str] = []
        for one in self.violations:
            shown[one.kind] += 1
            if shown[one.kind] <= SHOWN:
                lines.append(str(one))
        lines += [f"... and {n - SHOWN} more of: {kind}" for kind, n in kinds.items() if n > SHOWN]
        lines += [f"{name}: {value:g}" for name, value in self.figures.items()]
        return "\n".join([*lines, f"{len(self.violations)} violations"])


def judged(
    events: Sequence[Event],
    *,
    lease_s: float,
    recovery_s: float,
    full_zone: int = 0,
    pooled: int = 0,
    interrupted: bool = False,
) -> Report:
    """Return what no correct memory would have done, errors of the run itself, and its figures.

    A run calls this, and so does the command that judges its history again: both say the same. `lease_s` is
    how long a lease lasts. `recovery_s` is the longest time from when all is well again until a conversation
    that a process uses is healthy: the delay between two attempts, and what an attempt takes. `full_zone` is
    how many turns are recent where others are pending; 0 if that is not known. `pooled` is how many
    connections a pod may keep in its pools when they are full, in addition to what is allowed. Of an
    `interrupted` run it is no violation that its end was not read, so no live run may say so.
    """
    allowed = {name: by + pooled * (name in {"connections", "descriptors"}) for name, by in ALLOWED.items()}
    report = _Check(events, lease_s, recovery_s, full_zone, allowed, interrupted).report
    defects = (event for event in events if event.what == "defect")
    report.violations += (
        Violation("defect", "", f"not an error of the library: {one.data}", (one,)) for one in defects
    )
    found, figures = remembering.judged(events)
    report.violations += (Violation("tiers", "", one.removeprefix("tiers: ")) for one in found)
    report.figures |= figures
    whole, figures = transcripts.judged(events)
    report.violations += whole
    report.figures |= figures
    return report


class _Check:
    def __init__(
        self,
        events: Sequence[Event],
        lease_s: float,
        recovery_s: float,
        full_zone: int,
        allowed: Mapping[str, float],
        interrupted: bool,
    ) -> None:
        self._zone = full_zone
        self._interrupted = interrupted
        self._events = events
        self._lease_s = lease_s
        self._recovery_s = recovery_s
        self._allowed = allowed
        self.report = Report()
        self._ops: dict[str, list[Op]] = defaultdict(list)
        self._infos: dict[str, list[Event]] = defaultdict(list)
        self._pair()
        self._last = events[-1].t if events else 0.0
        self._final = next((event.t for event in self._infos["final"]), None)
        self._doubts = [(event.data["begin"], event.data["end"]) for event in self._infos["doubt"]]
        self._faults = [(op.begin.t, op.end.t if op.end else self._last, op) for op in self._ops["fault"]]
        self._times_of_degradation()
        self._conversations = self._of_conversations()
        self._check_conversations()
        self._check_versions()
        self._check_leases()
        self._check_health()
        self._check_settled()
        self._check_pods()
        self._count()
        self.report.violations = [
            replace(one, faults=self._in_force(one.events)) for one in self.report.violations
        ]

    def _say(self, kind: str, conversation: str, sentence: str, *events: Event) -> None:
        self.report.violations.append(Violation(kind, conversation, sentence, events))

    def _pair(self) -> None:
        """Pair each operation's invocation with its end."""
        open_ops: dict[tuple[str, int], Op] = {}
        for event in self._events:
            if event.phase == "info":
                self._infos[event.what].append(event)
            elif event.phase == "invoke":
                op = open_ops[event.process, event.op] = Op(event)
                self._ops[event.what].append(op)
            elif (op := open_ops.pop((event.process, event.op), None)) is not None:
                op.end = event
            else:
                self._say("history", event.conversation, "an operation ended that had not begun", event)

    def _in_force(self, events: Sequence[Event]) -> tuple[str, ...]:
        """Return the faults that were in force during the operations of these events, each kind once."""
        times: dict[tuple[str, float], list[float]] = defaultdict(list)
        for event in events:
            times[event.process, event.t if event.phase == "info" else event.op].append(event.t)
        kinds = (
            fault.begin.data["kind"]
            for begun, over, fault in self._faults
            if any(begun <= max(op) and min(op) <= over for op in times.values())
        )
        return tuple(sorted(set(kinds)))

    def _times_of_degradation(self) -> None:
        self._became: dict[str, list[float]] = defaultdict(list)
        self._ceased: dict[str, list[float]] = defaultdict(list)
        for event in self._infos["health"]:
            if event.data.get("old") in ILL:
                self._ceased[event.conversation].append(event.t)
            if event.data.get("new") in ILL:
                self._became[event.conversation].append(event.t)

    # Conversations

    def _of_conversations(self) -> dict[str, Conversation]:
        found: dict[str, Conversation] = {}

        def of(op: Op) -> Conversation:
            name = op.begin.conversation
            return found.setdefault(name, Conversation(name))

        for op in self._ops["add"]:
            of(op).adds.setdefault(op.begin.data["turn"], []).append(op)
        for op in self._ops["erase"]:
            of(op).erases.append(op)
        for op in self._ops["read"]:
            if op.end is not None and op.end.phase == "ok":
                conversation = of(op)
                reads = conversation.doubtful if self._in_doubt(op) else conversation.reads
                reads.append(self._read(op, op.end))
        for name, conversation in found.items():
            conversation.became_ill, conversation.ceased_ill = self._became[name], self._ceased[name]
        return found

    def _in_doubt(self, op: Op) -> bool:
        """Say whether a deposed master may have answered a read.

        Where another server takes over, no read of that time is promised to be of the present. What was
        acknowledged meanwhile has to be there in all later reads.
        """
        until = op.end.t if op.end is not None else op.invoked
        return any(op.invoked < end and begin < until for begin, end in self._doubts)

    def _read(self, op: Op, end: Event) -> Read:
        data = end.data
        summary, pending, recent = data.get("summary", ()), data.get("pending", ()), data.get("recent", ())
        newest_only = not (summary or pending) and self._only_newest(recent)
        return Read(
            op=op,
            shown=(*summary, *pending, *recent),
            covered=len(summary),
            dropped=int(data.get("dropped") or 0),
            waiting=int(data.get("waiting") or 0),
            foreign=int(data.get("foreign") or 0),
            newest_only=newest_only and self._was_degraded(op, end),
            invoked=op.begin.t,
            ended=end.t,
            health=str(data.get("health", "healthy")),
            pending=len(pending),
        )

    def _only_newest(self, recent: Sequence[str]) -> bool:
        return len(recent) == (self._zone or len(recent)) > 0

    def _was_degraded(self, op: Op, end: Event) -> bool:
        """Say whether a read met a degraded conversation, by its own word or by what a pod saw meanwhile.

        A pod asks for the health after it has read. A moment may lie between, in which it may have changed:
        it was degraded if it ceased to be so after the read began, or became so during the read.
        """
        if str(end.data.get("health")) == "degraded":
            return True
        name, begin = op.begin.conversation, op.begin.t
        return _any_between(self._ceased.get(name, []), begin, end.t + 1.0) or _any_between(
            self._became.get(name, []), begin, end.t
        )

    def _check_conversations(self) -> None:
        unknown = late = again = unjudged = within = 0
        for conversation in self._conversations.values():
            if self._imported_after_doubt(conversation):
                unjudged += 1
                within += sum(any(op.status == "ok" for op in ops) for ops in conversation.adds.values())
                # What one read shows by itself, and all that was before anything was in doubt.
                self.report.violations += Checked(conversation).violations
                until = min(op.invoked for op in conversation.erases if op.status != "ok")
                conversation = conversation.before(until)  # noqa: PLW2901 -- the rest may be in any state
                checked = Checked(conversation)
            else:
                checked = Checked(conversation)
                if not self._interrupted:
                    self._check_final(conversation)
            if conversation.erases:
                erased = Erased(checked)
                erased.check()
                late += len(erased.late)
                again += len(erased.again)
            else:
                checked.check()
            self.report.violations += checked.violations
            unknown += sum(
                all(op.status != "ok" for op in ops) and turn in checked.appeared
                for turn, ops in conversation.adds.items()
            )
        figures = self.report.figures
        figures["conversations not judged"] = unjudged
        figures["turns in conversations not judged"] = within
        figures["unknown turns that stand"] = unknown
        figures["unknown turns that arrived after an erasure"] = late
        figures["turns that were added again after an erasure"] = again

    def _imported_after_doubt(self, conversation: Conversation) -> bool:
        """Say whether a person imported what an erasure of unknown outcome may have erased after the export.

        What was exported then stands again, and what was added since is gone: both are as they should be.
        """
        doubts = [op.invoked for op in conversation.erases if op.status != "ok"]
        return bool(doubts) and any(
            op.begin.conversation == conversation.name
            and op.begin.data.get("kind") == "import"
            and op.latest > min(doubts)
            for op in self._ops["people"]
        )

    def _check_final(self, conversation: Conversation) -> None:
        """Check that the conversation was read at the end, without which a loss cannot be seen."""
        adds = [op for ops in conversation.adds.values() for op in ops if op.status == "ok"]
        final = self._final
        if adds and (final is None or not any(read.invoked >= final for read in conversation.reads)):
            what = "turns were acknowledged, and nobody has read them at the end"
            self._say("unread", conversation.name, what, *adds[-1].events)

    # Versions, leases, health

    def _check_versions(self) -> None:
        first: dict[tuple[str, str], Event] = {}
        for event in self._infos["write"]:
            place = event.data["record"], event.data["version"]
            if (other := first.setdefault(place, event)) is not event:
                self._say("version", event.conversation, f"the version {place[1]} came twice", other, event)

    def _check_leases(self) -> None:
        """Check that no lease is taken while it is held, and that the calls under leases do not overlap.

        A process may take a lease once it has seen it for as long as it lasts, by a clock that nothing moves.
        So neither happens earlier than that after the lease was taken. The lease says when that was, by the
        clock of its process, also if its write was tried again. Where a clock was wrong meanwhile, nothing is
        judged: two clocks that are wrong in different ways may end a lease.
        """
        writes = {(event.data["record"], event.data["version"]): event for event in self._infos["write"]}
        takers: dict[tuple[str, tuple[float, ...]], Event] = {}
        over: dict[tuple[str, tuple[float, ...]], tuple[float, ...]] = {}
        for (record, _), event in writes.items():
            before = writes.get((record, event.data.get("expect")))
            lease, held = _lease(event), _lease(before)
            # Another one may stand over the same lease: a note that it is overdue.
            if lease and lease != held:
                takers[record, lease], over[record, lease] = event, held
        # Processes on one machine have one clock, apart from faults.
        apart = [_lease(event)[0] - _began(event) for event in takers.values()]
        self._ahead = statistics.median(apart) if apart else 0.0
        self._clocks = [
            (begun, end + self._lease_s)
            for begun, end, op in self._faults
            if op.begin.data["kind"] == "pod-clock"
        ]
        judged = 0
        for (record, lease), second in takers.items():
            first = takers.get((record, over[record, lease]))
            # A record is named by its scope and its name, which is that of the conversation.
            name = record.rpartition("|")[2]
            if first is None or first.process == second.process:
                continue
            taken = self._taken(first)
            if taken is None or self._clock_was_wrong(taken, second.t):
                continue
            judged += 1
            # The version that it replaced still had the lease, so that was not given back.
            if second.t < taken + _lease(first)[1] - SLACK_S:
                what = f"{second.process} takes a lease that {first.process} holds"
                self._say("lease", name, what, first, second)
        self.report.figures["pairs of leases judged"] = judged
        self._check_calls(takers.values())

    def _check_calls(self, takers: Iterable[Event]) -> None:
        """Check that the calls of two processes for a conversation do not overlap while a lease lasts.

        This does not ask which version a lease replaced. A process that was stopped longer than its lease may
        make its call late, and one that has erased or imported the record has erased the lease.
        """
        leases: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in takers:
            leases[event.process, event.data["record"].rpartition("|")[2]].append(event)
        changes = [*self._ops["erase"], *(o for o in self._ops["people"] if o.begin.data["kind"] == "import")]
        changed: dict[str, list[Op]] = defaultdict(list)
        for op in changes:
            changed[op.begin.conversation].append(op)
        calls: dict[str, list[Op]] = defaultdict(list)
        for op in self._ops["summarize"]:
            calls[op.begin.conversation].append(op)
        judged = 0
        for name, ops in calls.items():
            under = [(op, _under(leases[op.begin.process, name], op)) for op in ops]
            for (first, held), (second, taken) in itertools.pairwise(under):
                if first.begin.process == second.begin.process:
                    continue
                since, until = self._lasts(first, held)
                its_own = None if taken is None else self._taken(taken)
                if (
                    since is None
                    # It ended before its call began, as after a stop.
                    or until <= first.invoked
                    # It took its own before, and was stopped; `_check_leases` judges these two.
                    or (its_own is not None and its_own < since)
                    or self._clock_was_wrong(since, second.invoked)
                    or any(op.invoked <= second.invoked and op.latest >= since for op in changed[name])
                ):
                    continue
                judged += 1
                if second.invoked < min(until - SLACK_S, _over(first)):
                    what = f"{second.begin.process} calls the model while {first.begin.process} does"
                    held_by = (held,) if held else ()
                    self._say("lease", name, what, *held_by, *first.events, *second.events)
        self.report.figures["pairs of summarizer calls judged"] = judged

    def _lasts(self, call: Op, lease: Event | None) -> tuple[float | None, float]:
        """Return from when until when the lease of a call lasts; nothing if that is not known.

        The write of a lease that nobody noted was of unknown outcome, which needs a fault. Without one, there
        was no lease, and there should have been one from the call on.
        """
        if lease is not None:
            taken = self._taken(lease)
            return taken, (taken or 0.0) + _lease(lease)[1]
        since = call.invoked - 2 * self._lease_s
        if any(begun <= call.invoked and since <= end for begun, end, _ in self._faults):
            return None, 0.0
        return call.invoked, call.invoked + self._lease_s

    def _taken(self, lease: Event) -> float | None:
        """Return when a lease was taken, in the time of the events; `None` if its clock was wrong."""
        taken = _lease(lease)[0] - self._ahead
        # Its first write may have been tried again, for as long as some deadlines.
        return taken if _began(lease) - 20.0 < taken < lease.t + SLACK_S else None

    def _clock_was_wrong(self, since: float, until: float) -> bool:
        return any(begun <= until and since <= end for begun, end in self._clocks)

    def _quiet(self) -> list[tuple[float, float]]:
        """Return the times in which the model was well and no fault in force.

        Administrative operations make nothing ill, so they are none.
        """
        ill: list[tuple[float, float]] = [
            (start, end)
            for start, end, op in self._faults
            if not op.begin.data["kind"].startswith(("people-", "command-"))
        ]
        since: float | None = None
        for event in self._infos["model"]:
            well = event.data.get("how") == "well"
            if well and since is not None:
                ill.append((since, event.t))
                since = None
            elif not well and since is None:
                since = event.t
        if since is not None:
            ill.append((since, self._last))
        quiet: list[tuple[float, float]] = []
        free = self._events[0].t if self._events else 0.0
        for start, end in sorted(ill):
            if start > free:
                quiet.append((free, start))
            free = max(free, end)
        return [*quiet, (free, self._last)]

    def _check_health(self) -> None:
        """Check that a conversation is healthy once all is well, and has been used, for that long.

        While the datastore still does not answer calls in time, not all is well.
        """
        slowest, judged = 0.0, 0
        quiet = self._quiet()
        unanswered = self._unanswered()
        starts = [start for start, _ in quiet]
        for conversation in self._conversations.values():
            used: dict[int, float] = {}
            for read in sorted(conversation.reads, key=attrgetter("invoked")):
                place = bisect.bisect_right(starts, read.invoked) - 1
                if place < 0 or read.ended > quiet[place][1]:
                    continue
                health = read.health
                before = bisect.bisect_right(unanswered, read.invoked)
                noticed = max(used.setdefault(place, read.ended), *unanswered[before - 1 : before], 0.0)
                judged += read.invoked > noticed + self._recovery_s
                if health == "healthy":
                    continue
                slowest = max(slowest, read.invoked - noticed)
                if read.invoked > noticed + self._recovery_s:
                    took = read.invoked - noticed
                    what = f"it is {health} although all has been well for {took:.1f} s"
                    self._say("health", conversation.name, what, *read.op.events)
                    break
        self.report.figures["reads whose health was judged"] = judged
        self.report.figures["slowest recovery seen (s)"] = round(slowest, 3)
        self.report.figures["calls that failed while all was well"] = sum(
            bisect.bisect_right(starts, t) > 0 and t <= quiet[bisect.bisect_right(starts, t) - 1][1]
            for t in unanswered
        )

    def _unanswered(self) -> list[float]:
        """Return when calls of pods ended that the datastore did not answer in time."""
        ops = itertools.chain(*(self._ops[what] for what in ("add", "read", "flush")))
        ends = (op.end for op in ops if op.end is not None and op.end.phase in {"fail", "unknown"})
        return sorted(end.t for end in ends if end.data.get("error") in {"Unavailable", "OutcomeUnknown"})

    def _check_settled(self) -> None:
        """Check that nothing is left to do once a pod has flushed and seen that, when all was well.

        So it is said to have been settled. What is read in the end may have more only if it came later.
        """
        last_quiet = self._quiet()[-1][0]
        flushes: dict[str, list[Op]] = defaultdict(list)
        for op in self._ops["flush"]:
            if op.end is not None and op.end.phase == "ok" and op.invoked >= last_quiet:
                flushes[op.begin.conversation].append(op)
        judged = 0
        for name, ops in flushes.items():
            conversation = self._conversations.get(name)
            if conversation is None:
                continue
            self._check_asked(conversation, ops)
            settled = self._settled(conversation, ops)
            final = [read for read in conversation.reads if read.invoked >= (self._final or math.inf)]
            if settled is None or not final:
                continue
            judged += 1
            flush, read = settled
            for last in final:
                left = self._left(conversation, last, flush)
                if left or last.health != "healthy":
                    state = f"{left} turns are pending" if left else f"it is {last.health}"
                    what = f"{state} in the end, although a pod had flushed it and seen nothing left to do"
                    self._say("stuck", name, what, *flush.events, *read.op.events, *last.op.events)
        self.report.figures["conversations whose end was settled"] = judged

    def _settled(self, conversation: Conversation, flushes: Sequence[Op]) -> tuple[Op, Read] | None:
        """Return the last flush after which its pod has read that nothing is left to do, and that read."""
        done = [
            (read.invoked, flush, read)
            for flush in flushes
            for read in conversation.reads
            if read.op.begin.process == flush.begin.process
            and flush.ended <= read.invoked
            and read.ended <= (self._final or -math.inf)
            and read.health == "healthy"
            and not read.pending
        ]
        if not done:
            return None
        _, flush, read = max(done, key=lambda one: (one[0], one[1].invoked))
        return flush, read

    def _check_asked(self, conversation: Conversation, flushes: Sequence[Op]) -> None:
        """Check that nothing is left once it was asked for, again and again for long enough."""
        enough = flushes[0].invoked + self._lease_s + self._recovery_s
        asked = min((op.ended for op in flushes if op.ended >= enough), default=math.inf)
        for read in conversation.reads:
            if read.invoked > asked and (left := self._left(conversation, read, flushes[0])):
                what = f"{left} turns are pending although nothing has kept them from a summary"
                self._say("stuck", conversation.name, what, *flushes[0].events, *read.op.events)
                break

    def _left(self, conversation: Conversation, read: Read, flush: Op) -> int:
        """Return how many turns are pending, 0 if as many may have come after a flush began."""
        # A turn that arrives late makes an earlier one pending.
        late = [
            turn
            for turn in read.shown
            if not any(op.ended < flush.invoked for op in conversation.adds.get(turn, ()))
        ]
        return read.pending if read.pending > len(late) else 0

    # Pods

    def _check_pods(self) -> None:
        series: dict[str, list[Event]] = defaultdict(list)
        for event in self._infos["figures"]:
            series[event.process].append(event)
        for process, events in series.items():
            pod: dict[str, Any] = {"seconds": round(events[-1].t - events[0].t)}
            for name, allowed in self._allowed.items():
                values = [float(event.data[name]) for event in events if event.data.get(name) is not None]
                if (by := flat.growth(values)) is None:
                    continue
                pod[name] = flat.ends(values)
                self.report.pods[process] = pod
                if flat.grows(values, allowed):
                    most = f"at most by {flat.rise(values):,.0f}"
                    what = f"{name} of {process} grow: by {by:,.0f} after the warm-up, and {most}"
                    self._say("flat", "", what, events[len(events) // 4], events[-1])
        self.report.figures["pods whose figures were judged"] = len(self.report.pods)

    # Figures

    def _count(self) -> None:
        figures = self.report.figures
        for what, name in (
            ("add", "adds"),
            ("read", "reads"),
            ("summarize", "summaries"),
            ("erase", "erasures"),
        ):
            ops = self._ops[what]
            if what == "read":
                sure = [op for op in ops if not self._in_doubt(op)]
                figures["reads in doubt, of a change of master"] = len(ops) - len(sure)
                ops = sure
            phases = Counter(op.status for op in ops)
            for phase in ("ok", "unknown", "fail"):
                figures[f"{name} {phase}"] = phases[phase]
        figures["conversations"] = len(self._conversations)
        turns = Counter(
            min((op.status for op in ops), key=("ok", "unknown", "fail").index)
            for conversation in self._conversations.values()
            for ops in conversation.adds.values()
        )
        figures["turns acknowledged"] = turns["ok"]
        figures["turns unknown"] = turns["unknown"]
        figures["turns failed"] = turns["fail"]
        reads = [read for conversation in self._conversations.values() for read in conversation.reads]
        figures["reads while degraded"] = sum(read.newest_only for read in reads)
        figures["turns dropped"] = sum(
            max((read.dropped for read in conversation.reads), default=0)
            for conversation in self._conversations.values()
        )
        figures["faults"] = len(self._faults)
        figures["pods"] = len({event.process for event in self._events} - {"nemesis", "final"})
        figures["events"] = len(self._events)
        figures["minutes"] = round((self._last - self._events[0].t) / 60, 2) if self._events else 0.0
        figures["longest unavailability (s)"] = round(self._longest_gap(), 3)

    def _longest_gap(self) -> float:
        """Return the longest time in which no turn was acknowledged and no read answered, of any pod."""
        until = self._last if self._final is None else self._final
        ops = [op for what in ("add", "read") for op in self._ops[what] if op.invoked <= until]
        if not ops:
            return 0.0
        begun = min(op.invoked for op in ops)
        times = sorted([begun, *(op.ended for op in ops if op.ended <= until)])
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def _began(write: Event) -> float:
    """Return when a noted write began."""
    return float(write.data.get("began", write.t))


def _lease(write: Event | None) -> tuple[float, ...]:
    """Return when the lease that a write leaves was taken, and for how long; nothing if there is none."""
    return () if write is None else tuple(write.data.get("lease") or ())


def _any_between(times: Sequence[float], since: float, until: float) -> bool:
    at = bisect.bisect_left(times, since)
    return at < len(times) and times[at] <= until


def _under(leases: Sequence[Event], call: Op) -> Event | None:
    """Return the last lease of its process that a call began under."""
    return max((one for one in leases if one.t <= call.invoked), key=attrgetter("t"), default=None)


def _over(call: Op) -> float:
    """Return when a call was over; that of a process that was killed is not, and gives nothing back."""
    return call.end.t if call.end is not None else math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a recorded history once more; 1 if it has a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.checker", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where the events of a run are")
    parser.add_argument("--lease", type=float, default=None, help="seconds; by default those of the run")
    parser.add_argument("--recovery", type=float, default=None, help="seconds; by default those of the run")
    given = parser.parse_args(arguments)
    if not [*given.folder.glob("*.jsonl")]:
        parser.error(f"there is no history in {given.folder}; name OUT/STAND/events")
    settings = given.folder / "settings.json"
    kept: dict[str, float] = json.loads(settings.read_text()) if settings.exists() else {}
    events = history.read(given.folder)
    interrupted = all(event.what != "final" for event in events)
    report = judged(
        events,
        lease_s=given.lease or kept.get("lease_s", 10.0),
        recovery_s=given.recovery or kept.get("recovery_s", 30.0),
        full_zone=int(kept.get("full_zone", 0)),
        pooled=int(kept.get("pooled", 0)),
        interrupted=interrupted,
    )
    if interrupted:
        print(INTERRUPTED)
    print(report)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
