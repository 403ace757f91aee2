"""One run: a stand, its pods, a nemesis, and in the end the judgement of a checker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import platform
import random
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stm_backends import open_backend
from tests.chaos import checker, history, remembering, schedule, sealing, striking, turns
from tests.chaos.history import Writer
from tests.chaos.nemesis import commands, model, people
from tests.chaos.nemesis.hits import Hits
from tests.chaos.nemesis.pods import ENDING, ROOT, Pod, PodFault, Pods
from tests.chaos.options import counted, no_such_fault
from tests.chaos.pod import Settings
from tests.chaos.stands import Fault, Stand
from tests.chaos.turns import Model

USERS: Final = 4
DEADLINE_S: Final = 1.0
GAP_S: Final = 0.45
AT_ONCE: Final = 5
"""How many faults are in force at a time, at most."""

WEIGHTS: Final[Mapping[str, float]] = {
    "pod-kill": 2.0,
    "pod-pause": 3.0,
    "pod-cancel": 2.0,
    "pod-restart": 0.5,
    "command-purge": 0.5,
    "command-copy": 0.5,
    "command-reseal": 0.5,
}
"""How often a fault is drawn, where that is not once. To start a process takes much of the machine."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be run."""

    stand: str
    folder: Path
    seed: int
    faults: int = 0
    minutes: float = 1.0
    pods: int = 4
    pause: float = 0.1
    users: int = USERS
    mutant: str = ""
    sealed: bool = False
    other: str = ""
    """A commit whose library every second pod uses."""
    only: Sequence[str] = ()
    """How the names of the faults begin that may happen; by default all may."""


@dataclass(kw_only=True)
class Result:
    """What a run came to, as in `results.json`.

    `library` is the version, and the commit where there is one. `pods` has for each pod that could be judged
    the medians of its figures in the first and the last third of its life, without the warm-up.
    """

    stand: str
    seed: int
    library: str = ""
    mutant: str = ""
    sealed: bool = False
    other: str = ""
    """The commit whose library every second pod used."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    pods_count: int = 0
    pause: float = 0.0
    faults_limit: int = 0
    """After how many faults the run was to end; 0 if after its time only."""
    minutes: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many there were of each kind, without those that found nothing to act on."""
    hits: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of them hit something; of those that `perhaps` did, another one may be the reason."""
    perhaps: Mapping[str, int] = field(default_factory=dict[str, int])
    struck: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """How many kills and pauses of a pod struck which operations under way."""
    repeats: Mapping[str, int] = field(default_factory=dict[str, int])
    """How adds ended of turns of a killed pod that another one added again."""
    adds: int = 0
    """How many calls of `add_turn` were acknowledged, repeats of a turn included."""
    violations: list[str] = field(default_factory=list[str])
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pods: Mapping[str, Any] = field(default_factory=dict[str, Any])


class NoSuchFaultError(ValueError):
    """Nothing is named as `--only` says."""


def known_faults(stand: Stand, *, sealed: bool) -> list[str]:
    """Return the faults that there may be once a stand has started; its disk may never be full."""
    pods = Pods([], ahead=0.0)
    of_commands = commands.names(sealed=sealed)
    return [*stand.faults(), "disk-full", *model.NAMES, *people.faults(pods), *of_commands, *pods.faults()]


async def run(order: Order, stand: Stand) -> Result:
    """Run a nemesis against pods on a stand until the time is over or there were enough faults."""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(stand.stop)
        await stand.start()
        return await Run(order, stand, stack).go()


class Run:
    """One run on a stand that has started; what it starts is stopped by the stack."""

    over = "the faults are over"

    def __init__(self, order: Order, stand: Stand, stack: contextlib.AsyncExitStack) -> None:
        self._order = order
        self._stand = stand
        self._stack = stack
        for name in ("events", "pods"):
            (order.folder / name).mkdir(parents=True)
        self._writer = Writer(order.folder / "events", "nemesis")
        stack.callback(self._writer.close)
        self._counts: Counter[str] = Counter()
        self._struck: dict[str, Counter[str]] = {}
        self._hits: Counter[str] = Counter()
        self._perhaps: Counter[str] = Counter()
        self._watched = Hits(order.folder / "events")
        self._start = time.monotonic()
        self._problems: list[str] = []
        # Where `python -m tests.chaos.checker` finds them, which judges a history once more.
        self._times = {"lease_s": turns.lease_s(DEADLINE_S), "recovery_s": turns.recovery_s(DEADLINE_S)}
        zone = turns.config().budget.full_zone_turns
        self._judging = {**self._times, "full_zone": zone, "pooled": stand.pooled}
        settings = json.dumps(self._judging) + "\n"
        (order.folder / "events" / "settings.json").write_text(settings, encoding="utf-8")

    async def go(self) -> Result:
        order, stand = self._order, self._stand
        async with open_backend(stand.direct_url, create=True):
            pass
        the_model = Model(order.folder / "model")
        model.become(the_model, self._writer, "well")
        self._commands = commands.Commands(
            order.folder, stand.url, self._writer, self._conversations, sealed=order.sealed
        )
        if order.other:
            await asyncio.to_thread(_check_out, order.other, order.folder / "other")
        processes = [self._pod(number) for number in range(order.pods)]
        pods = self._pods = Pods(processes, ahead=self._ahead(), lease=self._times["lease_s"])
        for pod in pods.all:
            self._stack.push_async_callback(pod.kill)
            await pod.start()
        await asyncio.gather(*(pod.ready() for pod in pods.all))
        self._start = time.monotonic()
        faults: dict[str, Fault] = {
            **stand.faults(),
            **model.faults(the_model, self._writer),
            **people.faults(pods),
            **self._commands.faults(),
        }
        if "disk-full" not in faults:
            self._say("no disk can be full, because nothing may be mounted here")
        await self._torment(faults, pods.faults())
        minutes = (time.monotonic() - self._start) / 60
        self._say(f"{self.over}; pods flush, and everything is read")
        await self._settle()
        return self._judged(minutes)

    def _pod(self, number: int) -> Pod:
        order = self._order
        return Pod(
            Settings(
                name=f"p{number}",
                life=0,
                folder=str(order.folder),
                url=self._stand.url,
                seed=order.seed,
                pause=order.pause,
                deadline=DEADLINE_S,
                generations=[0] * order.users,
                mutant=order.mutant,
                sealing=sealing.NAME if order.sealed else "",
                options={"deadline_s": DEADLINE_S},
            ),
            path=str(order.folder / "other") if order.other and number % 2 else "",
        )

    def _ahead(self) -> float:
        """Return how far a pod's clock may be off: the processes of one host share a clock, more or less."""
        return 300.0 if self._stand.name == "sqlite" else 6 * 3_600.0

    async def _torment(self, faults: Mapping[str, Fault], of_pods: Mapping[str, PodFault]) -> None:
        order = self._order
        allowed = tuple(order.only) or ("",)
        names = [name for name in (*faults, *of_pods) if name.startswith(allowed)]
        if said := no_such_fault((*faults, *of_pods), order.only):
            raise NoSuchFaultError(said)
        weights = {name: WEIGHTS.get(name, 1.0) for name in names}
        until = self._start + 60 * order.minutes
        running: set[asyncio.Task[None]] = set()
        shown = time.monotonic()
        try:
            for one in schedule.planned(
                order.seed,
                weights,
                gap=GAP_S,
                lease=self._times["lease_s"],
                # What was last begun ends, then everything recovers, and then it is seen to be healthy.
                calm=2.5 * self._times["recovery_s"],
            ):
                # What is in progress may find nothing to act on, and does not count then.
                while running and order.faults and self._counts.total() + len(running) >= order.faults:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if (order.faults and self._counts.total() >= order.faults) or time.monotonic() > until:
                    break
                fault = of_pods.get(one.kind)
                happening = self._on_pod(fault, one) if fault else self._inject(faults[one.kind], one)
                running.add(asyncio.create_task(happening))
                await asyncio.sleep(one.gap)
                while len(running) >= AT_ONCE:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running = {task for task in running if not task.done()}
                for pod in self._pods.all:
                    await pod.revive()
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    self._show()
            await asyncio.wait_for(asyncio.gather(*running), 90)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._show()

    async def _on_pod(self, fault: PodFault, planned: schedule.Planned) -> None:
        async with self._pods.one(random.Random(planned.chance), survives=planned.kind not in ENDING) as pod:
            await self._inject(partial(fault, pod), planned, target=pod.settings.process)

    async def _inject(self, fault: Fault, planned: schedule.Planned, **data: str) -> None:
        """Let one fault happen, and count it when it has."""
        chance = random.Random(planned.chance)
        op = self._writer.invoke("fault", kind=planned.kind, seconds=planned.seconds, **data)
        watched = self._watched.began(planned.kind, data.get("target", ""), time.monotonic())
        try:
            async with fault(chance, planned.seconds) as figures:
                await asyncio.sleep(planned.seconds)
        except Exception as error:  # noqa: BLE001 -- a run of hours goes on, and says it in the end
            self._watched.ended(watched, time.monotonic(), {})
            self._problems.append(f"the fault {planned.kind} failed: {type(error).__name__}: {error}")
            self._writer.end(op, "fail", "fault", kind=planned.kind, **data, error=type(error).__name__)
        else:
            hit = self._watched.ended(watched, time.monotonic(), figures)
            self._writer.end(op, "ok", "fault", kind=planned.kind, **data, **figures, hit=hit)
            if figures.get("acted", True):
                self._count(planned.kind, figures, hit)

    def _count(self, kind: str, figures: Mapping[str, Any], hit: bool | str) -> None:
        self._counts[kind] += 1
        self._hits[kind] += hit is True
        self._perhaps[kind] += hit == "unknown"
        if "struck" in figures:
            self._struck.setdefault(kind, Counter()).update(striking.shown(figures["struck"]))

    def _show(self) -> None:
        adds = sum(pod.adds for pod in self._pods.all)
        self._say(f"{counted(sum(self._counts.values()), 'fault'):>13}  {counted(adds, 'turn'):>14}")

    def _say(self, what: str) -> None:
        print(f"{self._stand.name:<16} {turns.since(self._start):>6}  {what}", flush=True)

    async def _settle(self) -> None:
        """Let all pods flush and end, then read everything past every proxy."""
        pods = self._pods
        for pod in pods.all:
            await pod.revive()
            await pod.ready()
        await asyncio.gather(*(pod.ask("rest") for pod in pods.all))
        conversations = self._conversations()
        used = self._used(conversations)
        shares = [used[number :: len(pods.all)] for number in range(len(pods.all))]
        answers = await asyncio.gather(
            *(
                pod.ask("settle", conversations=share, within=2 * self._times["recovery_s"])
                for pod, share in zip(pods.all, shares, strict=True)
            )
        )
        for pod, answer in zip(pods.all, answers, strict=True):
            if answer.get("ended") or answer["left"]:
                left = answer.get("left", "all")
                self._problems.append(f"{pod.settings.process} could not settle {left}")
        await asyncio.gather(*(pod.end() for pod in pods.all))
        await self._commands.finish()
        self._writer.info("final")
        await self._read_all(conversations)

    def _used(self, conversations: list[str]) -> list[str]:
        """Return the conversations of which something may be left to do."""
        return conversations

    def _conversations(self) -> list[str]:
        return [f"c{user}-{one}" for user, n in enumerate(self._pods.generations) for one in range(n + 1)]

    async def _read_all(self, conversations: list[str]) -> None:
        writer = Writer(self._order.folder / "events", "final")
        self._stack.callback(writer.close)
        settings = turns.config()
        unused = os.open(self._order.folder / "model", os.O_RDONLY)
        self._stack.callback(os.close, unused)
        options: dict[str, Any] = {"sealing": sealing.SEALING} if self._order.sealed else {}
        async with open_backend(self._stand.direct_url, **options) as backend:
            for conversation in conversations:
                summarizer = turns.Summarizer(unused, writer, conversation, random.Random(0))
                memory = backend.memory(turns.key_of(conversation), settings, summarizer=summarizer)
                await turns.read(writer, conversation, memory)
                await turns.read_whole(writer, conversation, memory)
            await remembering.note_all(backend, writer)

    def _judged(self, minutes: float) -> Result:
        order = self._order
        # For whoever judges the history again.
        for begin, end in self._stand.doubts:
            self._writer.info("doubt", begin=begin, end=end)
        events = history.read(order.folder / "events")
        report = checker.judged(events, **self._judging)
        problems = [
            *self._problems,
            *self._commands.problems,
            *(one for pod in self._pods.all for one in pod.problems),
        ]
        if all(event.what != "final" for event in events):
            problems.append("the run did not reach its final reads, without which a loss cannot be seen")
        result = Result(
            stand=self._stand.name,
            seed=order.seed,
            library=_library(),
            mutant=order.mutant,
            sealed=order.sealed,
            other=order.other,
            versions={"python": platform.python_version(), **self._stand.versions},
            pods_count=order.pods,
            pause=order.pause,
            faults_limit=order.faults,
            minutes=round(minutes, 2),
            faults=dict(sorted(self._counts.items())),
            hits=dict(sorted(self._hits.items())),
            perhaps=dict(sorted(self._perhaps.items())),
            struck=self._struck,
            repeats=self._pods.repeats,
            adds=sum(event.what == "add" and event.phase == "ok" for event in events),
            violations=[*problems, *map(str, report.violations)],
            figures=report.figures,
            pods=report.pods,
        )
        self._write(result)
        return result

    def _write(self, result: Result) -> None:
        text = json.dumps(vars(result), indent=1, default=str)
        (self._order.folder / "results.json").write_text(text + "\n", encoding="utf-8")


def _library() -> str:
    """Return the version of the library, and the commit of this work tree."""
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return version("stm-backends")
    return f"{version('stm-backends')} ({commit.strip()})"


def no_such_commit(name: str) -> str:
    """Return what to say if nothing of this repository has the name, or `""`."""
    command = ("git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    there = not subprocess.run(command, capture_output=True, check=False).returncode
    return "" if there else f"there is no commit {name!r} in this repository"


def _check_out(commit: str, folder: Path) -> None:
    """Write the library as of a commit into a folder, without the tests of that commit."""
    names = subprocess.run(
        ["git", "ls-tree", "--name-only", commit],  # noqa: S607 -- wherever it is
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    packages = [name for name in names if name.startswith("stm_backends")]
    archive = subprocess.run(
        ["git", "archive", commit, *packages],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
