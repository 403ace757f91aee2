"""The pods of a run as processes, and what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.chaos import striking
from tests.chaos.pod import Settings

ROOT: Final = Path(__file__).parents[3]

ENDS_WITHIN_S: Final = 15.0
READY_WITHIN_S: Final = 120.0


class Pod:
    """One pod, whose process is started again whenever it has ended."""

    def __init__(self, settings: Settings, path: str = "") -> None:
        self.settings = settings
        self.adds = 0
        self.busy = False
        self.problems: list[str] = []
        self.turns: list[tuple[str, str]] = []
        """Turns that others may add again, as of the last strike."""
        self._adds_before = 0
        self._path = path
        self._errors = Path()
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._struck: asyncio.Future[dict[str, Any]] | None = None
        self._number = 0

    async def start(self, **changes: Any) -> None:
        """Begin a new life; does not wait until it is ready."""
        settings = self.settings = dataclasses.replace(self.settings, life=self.settings.life + 1)
        file = Path(settings.folder, "pods", f"{settings.process}.json")
        given = json.dumps(dataclasses.asdict(dataclasses.replace(settings, **changes)))
        await asyncio.to_thread(file.write_text, given, encoding="utf-8")
        self._errors = file.with_suffix(".err")
        with self._errors.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tests.chaos.pod", str(file)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [self._path, str(ROOT)]))},
            )
        self._ready.clear()
        self._adds_before, self._answers = self.adds, {}
        self._listener = asyncio.create_task(self._listen(self._process))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):
                self._hear(json.loads(line))
        for answer in (*self._answers.values(), *filter(None, [self._struck])):
            if not answer.done():
                answer.set_result({"ended": True})

    def _hear(self, said: dict[str, Any]) -> None:
        if "adds" in said:
            self.adds = self._adds_before + said["adds"]
        if "generations" in said:
            own = self.settings.generations
            own[:] = [max(pair) for pair in zip(own, said["generations"], strict=True)]
        if "ready" in said:
            self._ready.set()
            if not str(said["library"]).startswith(self._path):
                self.problems.append(f"{self.settings.process} uses the library in {said['library']}")
        if "struck" in said and self._struck and not self._struck.done():
            self._struck.set_result(said)
        answer = self._answers.pop(said.get("done", -1), None)
        # Whoever asked may have ceased to wait.
        if answer and not answer.done():
            answer.set_result({name: value for name, value in said.items() if name != "done"})

    async def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Tell it to do something, and wait until that is done or its process has ended."""
        assert self._process
        assert self._process.stdin
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"command": self._number, "do": do, **what})
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
        if self._process.returncode is not None:
            return {"ended": True}
        return await answer

    async def ready(self) -> None:
        """Wait until it works or has ended; that it does neither is a problem to report."""
        assert self._process
        waits = {asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._process.wait())}
        done, _ = await asyncio.wait(waits, timeout=READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self.problems.append(f"{self.settings.process} was not ready within {READY_WITHIN_S:g} s")
        for wait in waits:
            wait.cancel()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        if self._process and self._process.returncode is None:
            # Not by the process object, which would take the status of one that has just ended from the loop.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def strike(self, number: signal.Signals, aim: str, chance: random.Random) -> dict[str, Any]:
        """Have it struck by a signal while an operation of the kind `aim` is under way, if one begins soon.

        Returns what was under way, as `struck`. That is not known if the process could not do it itself.
        """
        self._struck = asyncio.get_running_loop().create_future()
        # Some operations take less than the median.
        until, moment = time.monotonic() + striking.WITHIN_S, round(chance.uniform(0.0, 0.8), 3)
        asking = asyncio.ensure_future(
            self.ask("strike", number=int(number), aim=aim, moment=moment, until=until)
        )
        figures: dict[str, Any] = {"aim": aim}
        try:
            async with asyncio.timeout(striking.WITHIN_S + 2 * striking.LATE_S):
                figures |= await self._struck
                self.turns = figures.pop("turns", [])
        except TimeoutError:
            self.send(number)
        finally:
            asking.cancel()
        return figures

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def revive(self) -> None:
        """Start it again if its process ended by itself, which is a problem to report."""
        if not self.alive and not self.busy:
            assert self._process
            errors = self._errors.read_text(encoding="utf-8")
            self.problems.append(
                f"{self.settings.process} ended with {self._process.returncode}: {errors[-600:]}"
            )
            await self.start()

    async def kill(self) -> None:
        """Kill it, stopped or not."""
        self.send(signal.SIGKILL)
        if self._process:
            await self._process.wait()
        if self._listener:
            await self._listener

    async def end(self) -> None:
        """Let it close its backend and end."""
        assert self._process
        asking = asyncio.ensure_future(self.ask("end"))
        try:
            code = await asyncio.wait_for(self._process.wait(), ENDS_WITHIN_S)
        except TimeoutError:
            self.problems.append(f"{self.settings.process} did not end within {ENDS_WITHIN_S:g} s")
        else:
            if code:
                self.problems.append(f"{self.settings.process} ended with {code}")
        asking.cancel()
        await self.kill()


ENDING: Final = ("pod-kill", "pod-restart")
"""Faults that end a pod's process."""

PodFault: TypeAlias = Callable[[Pod, random.Random, float], AbstractAsyncContextManager[dict[str, Any]]]
"""A fault of one pod, in other respects as a `Fault` of a stand."""


class Pods:
    """All pods of a run, and the faults that befall one of them at a time."""

    def __init__(self, pods: Sequence[Pod], *, ahead: float, lease: float = math.inf) -> None:
        self.all = pods
        self._ahead = ahead
        self._lease = lease
        self._freed = asyncio.Condition()
        self.repeats: Counter[str] = Counter()
        """How the turns ended that others added again for a pod that was killed."""

    @property
    def generations(self) -> list[int]:
        """The newest conversation of each user that any pod knows of."""
        return [max(each) for each in zip(*(pod.settings.generations for pod in self.all), strict=True)]

    def faults(self) -> Mapping[str, PodFault]:
        """What may happen to a pod, by name."""
        return {
            "pod-kill": self._killed,
            "pod-restart": _restarted,
            "pod-pause": partial(_paused, self._lease),
            "pod-clock": partial(_wrong_clock, self._ahead),
            "pod-cancel": partial(_told, "cancel"),
            "pod-descriptors": partial(_told, "descriptors"),
        }

    @asynccontextmanager
    async def _killed(self, pod: Pod, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        figures = await pod.strike(signal.SIGKILL, striking.aimed(chance, is_long=False), chance)
        await pod.kill()
        handed = self._hand_over(pod, chance)
        yield figures
        await pod.start()
        await pod.ready()
        for one in handed:
            one.cancel()

    def _hand_over(self, pod: Pod, chance: random.Random) -> Sequence[asyncio.Task[None]]:
        """Let one or two others add turns of a killed pod again, at once: its request may still arrive."""
        others = [other for other in self.all if other is not pod and other.alive]
        turns, pod.turns = pod.turns, []
        able = chance.sample(others, min(len(others), chance.choice((1, 1, 2)))) if turns else ()

        async def add(other: Pod) -> None:
            answer = await other.ask("again", turns=turns)
            self.repeats.update({phase: answer.get(phase, 0) for phase in ("ok", "unknown", "fail")})

        return [asyncio.ensure_future(add(other)) for other in able]

    @asynccontextmanager
    async def one(self, chance: random.Random, *, survives: bool) -> AsyncIterator[Pod]:
        """Give a pod that nothing else happens to; the first pod lives to the end, to show what it needs."""
        which = self.all if survives else self.all[1:] or self.all
        async with self._freed:
            await self._freed.wait_for(lambda: any(not pod.busy for pod in which))
            pod = chance.choice([pod for pod in which if not pod.busy])
            pod.busy = True
        try:
            yield pod
        finally:
            async with self._freed:
                pod.busy = False
                self._freed.notify_all()


@asynccontextmanager
async def _restarted(pod: Pod, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
    """End a pod in order, as a deployment does, and start it again."""
    await pod.end()
    yield {}
    await pod.start()
    await pod.ready()


@asynccontextmanager
async def _paused(
    lease: float, pod: Pod, chance: random.Random, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    try:
        aim = striking.aimed(chance, is_long=seconds > lease)
        yield await pod.strike(signal.SIGSTOP, aim, chance)
    finally:
        pod.send(signal.SIGCONT)


@asynccontextmanager
async def _wrong_clock(
    most: float, pod: Pod, chance: random.Random, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    ahead = round(chance.uniform(-most, most))
    async with _told("clock", pod, chance, seconds, ahead=ahead) as figures:
        yield {**figures, "ahead": ahead}


@asynccontextmanager
async def _told(
    do: str, pod: Pod, chance: random.Random, seconds: float, **what: Any
) -> AsyncIterator[dict[str, Any]]:
    asking = asyncio.ensure_future(pod.ask(do, seconds=seconds, **what))
    figures: dict[str, Any] = {}
    try:
        yield figures
        figures |= await asking
    finally:
        asking.cancel()
