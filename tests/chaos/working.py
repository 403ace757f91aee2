"""What a pod does: it adds turns to conversations that other pods use too, and reads them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import logging
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import stm_backends
from stm_backends import (
    Backend,
    DistributedShortTermMemory,
    OutcomeUnknown,
    StmError,
    open_backend,
)
from stm_backends.drivers.contract import KEEP, AbsentType, AnyType, Driver, KeepType, Key, Record
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import Corrupt
from stm_backends.records.codec import Codec
from stm_backends.telemetry.observer import Observer
from stm_backends.tiers import MemoryManager
from stm_backends.types import MemoryHealth
from tests.chaos import asking, remembering, turns
from tests.chaos.figures import of_this_process, without_garbage
from tests.chaos.history import Phase
from tests.chaos.mutants import LEAKS, MUTANTS
from tests.chaos.pod import Clock, Settings
from tests.chaos.striking import WITHIN_S, Striker, Watch

WORKERS: Final = 2
KEPT: Final = 24
"""Of how many conversations a pod that works for long knows something, instead of thousands."""

OUTCOMES: Final[Sequence[type[BaseException]]] = (OutcomeUnknown, TimeoutError, asyncio.CancelledError)
"""After these it is not known whether an operation was done."""


def work(settings: Settings, clock: Clock) -> None:
    """Work until told to end, or until the parent has ended."""
    # A pod that is stopped would survive its parent, which cannot tell it anything then.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("stm_backends").setLevel(logging.ERROR)
    asyncio.run(_Pod(settings, clock).run())


class _Pod:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.chance = random.Random(f"{settings.seed} {settings.process}")
        self.folder = Path(settings.folder)
        self.writer = Watch(self.folder / "events", settings.process)
        self.striker = Striker(self.writer, self.tell)
        self.model = os.open(self.folder / "model", os.O_RDONLY)
        self.generations = settings.generations
        self.memories: dict[str, DistributedShortTermMemory] = {}
        self.sent: dict[str, list[str]] = {}
        self.mine = 0
        self.adds = 0
        self.cancelling_until = 0.0
        self.cancelled = 0
        self.resting = asyncio.Event()
        self.ended = asyncio.Event()
        if settings.lasts:
            self._fill_caches()

    def _fill_caches(self) -> None:
        """Have as much in memory at once as there would be after hours."""
        # Late, because a pod of another version may not have them.
        from stm_backends.memory.shared import backgrounds, recent  # noqa: PLC0415
        from stm_backends.records.body import digest  # noqa: PLC0415
        from stm_backends.records.large import driver as large  # noqa: PLC0415

        backgrounds.Recent = partial(recent.Recent, most=KEPT)
        large.REMEMBERED = KEPT
        if self.settings.url.startswith("postgres"):
            from stm_backends_postgres import driver as postgres  # noqa: PLC0415

            postgres.REMEMBERED = 10 * KEPT
        # Python's table of interned strings grows once its places are used up, also by strings that are gone.
        for number in range(40_000):
            sys.intern(f"{self.settings.process} {number}")
        for number in range(digest.cache_parameters()["maxsize"]):
            digest(f"c0-0/{self.settings.process}/{number}")

    async def run(self) -> None:
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, lines), sys.stdin)
        backend = await self._open()
        async with backend, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._commands(lines, backend)), group.create_task(self._figures())]
            workers = [group.create_task(self._work(backend)) for _ in range(WORKERS)]
            workers.append(group.create_task(self._remember(backend)))
            self.tell(ready=True, library=stm_backends.__file__)
            await self.ended.wait()
            for task in [*tasks, *workers]:
                task.cancel()
        self.writer.close()

    async def _open(self) -> Backend:
        """Return the backend, opened; a pod is restarted until its datastore answers."""
        while True:
            options = self.settings.options
            if self.settings.sealing:
                from stm_backends.sealing.naming import load_sealing  # noqa: PLC0415 -- needs an extra

                options = {**options, "sealing": load_sealing(self.settings.sealing)}
            backend = open_backend(
                self.settings.url,
                observer=_Noting(self.writer, self.settings),
                close_timeout_s=2.0,
                **options,
            )
            try:
                await backend.open()
            except StmError:
                await asyncio.sleep(0.3)
            else:
                return backend

    def tell(self, **what: Any) -> None:
        """Tell the parent, which may have ended."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(what).encode() + b"\n")

    # What it does by itself

    async def _work(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(self.settings.pause * (0.5 + self.chance.random()))
            if self.resting.is_set():
                continue
            user = self.chance.randrange(len(self.generations))
            conversation = f"c{user}-{self.generations[user]}"
            memory = self._memory(backend, conversation)
            draw = self.chance.random()
            if draw < 0.62:
                await self._add(memory, conversation)
            elif draw < 0.95:
                data = await self._calling(partial(turns.read, self.writer, conversation, memory))
                if data is not None and turns.count(data) >= self.settings.longest:
                    self._next_conversation(user, conversation)
            elif draw < 0.98 or not hasattr(memory, "each_turn"):
                await self._noted("flush", conversation, partial(memory.flush, timeout=2.0))
            else:
                await self._calling(partial(turns.read_whole, self.writer, conversation, memory))

    async def _remember(self, backend: Backend) -> None:
        """Remember facts in sessions that all pods share, look some up, and end a session now and then."""
        managers = [remembering.manager(backend, number) for number in range(remembering.SESSIONS)]
        # In a soak the users are erased now and then, and it goes on.
        for count in itertools.count() if self.settings.lasts else range(remembering.MOST):
            await asyncio.sleep(self.settings.pause * remembering.PACE * (0.5 + self.chance.random()))
            if self.resting.is_set():
                return
            session, key, importance = remembering.drawn(self.chance, self.settings.process, count)
            memory = managers[session]
            remember = partial(memory.remember, key, remembering.fact(key), importance=importance)
            await self._noted("remember", "", remember, session=session, key=key, importance=importance)
            if count % 5 == 4:
                await self._calling(partial(memory.recall, f"{self.settings.process}/"))
            if count % 12 == 11:
                await self._end_session(memory)
            if self.settings.lasts and count % 60 == 59:
                # Users are erased by others, which only a pass over all memories shows.
                await self._calling(memory.gc.on_idle)

    async def _end_session(self, memory: MemoryManager) -> Phase:
        return await self._noted("people", "", memory.gc.on_session_end, kind="session-end")

    def _next_conversation(self, user: int, conversation: str) -> None:
        if conversation == f"c{user}-{self.generations[user]}":
            self.generations[user] += 1
            self.memories.pop(conversation, None)
            self.sent.pop(conversation, None)
            self.tell(generations=self.generations)

    def _memory(self, backend: Backend, conversation: str) -> DistributedShortTermMemory:
        memory = self.memories.get(conversation)
        if memory is None:
            summarizer = turns.Summarizer(self.model, self.writer, conversation, self.chance)
            settings = turns.config(
                on_health_changed=partial(self._health, conversation),
                lasts=turns.lasts_s(conversation, self.settings.lasts),
            )
            memory = backend.memory(turns.key_of(conversation), settings, summarizer=summarizer)
            self.memories[conversation] = memory
        return memory

    async def _health(self, conversation: str, old: MemoryHealth, new: MemoryHealth) -> None:
        self.writer.info("health", conversation, old=old.value, new=new.value)

    async def _add(self, memory: DistributedShortTermMemory, conversation: str) -> None:
        """Add a turn; if it is not known whether it is stored, perhaps add it again, at once or later."""
        sent = self.sent.setdefault(conversation, [])
        if sent and self.chance.random() < 0.05:
            await self._add_again(memory, conversation, self.chance.choice(sent[-40:]))
            return
        self.mine += 1
        at = time.time() if self.settings.lasts else None
        identity = turns.identity_of(conversation, self.settings.process, self.mine, at)
        add = partial(memory.add_turn, turns.turn_of(identity), turn_id=identity)
        done = await self._noted("add", conversation, add, turn=identity)
        # What was refused must never appear, so only what may be stored is repeated.
        if done != "fail":
            sent.append(identity)
        while done == "unknown" and self.chance.random() < 0.6:
            done = await self._add_again(memory, conversation, identity)
        # Of each turn once, however often it is added later.
        self.adds += done == "ok"

    async def _add_again(self, memory: DistributedShortTermMemory, conversation: str, identity: str) -> Phase:
        """Add a turn that may be stored, or may be in a summary, or may be erased."""
        add = partial(memory.add_turn, turns.turn_of(identity), turn_id=identity)
        return await self._noted("add", conversation, add, turn=identity, repeated=True)

    async def _noted(
        self, what: str, conversation: str, call: Callable[[], Awaitable[object]], **data: Any
    ) -> Phase:
        """Make a call and note how it ended, which is returned."""
        op = self.writer.invoke(what, conversation, **data)
        try:
            data = {**data, **answered} if isinstance(answered := await self._limited(call), dict) else data
        except StmError as error:
            # An erasure has many steps, of which some may be done.
            unknown = isinstance(error, OutcomeUnknown) or what not in {"add", "flush"}
            done: Phase = "unknown" if unknown else "fail"
            self.writer.end(op, done, what, conversation, **data, error=type(error).__name__)
            return done
        except (TimeoutError, asyncio.CancelledError) as error:
            self.writer.end(op, "unknown", what, conversation, **data, error=type(error).__name__)
            if self.ended.is_set():
                raise
            return "unknown"
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is not what was promised
            self._not_ours(what, error)
            self.writer.end(op, "unknown", what, conversation, **data, error=type(error).__name__)
            return "unknown"
        self.writer.end(op, "ok", what, conversation, **data)
        return "ok"

    async def _calling(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call that notes its own events; returns `None` if it failed."""
        try:
            return await self._limited(call)
        except (StmError, TimeoutError):
            return None
        except asyncio.CancelledError:
            if self.ended.is_set():
                raise
            return None
        except Exception as error:  # noqa: BLE001 -- as above
            self._not_ours("read", error)
            return None

    def _not_ours(self, what: str, error: Exception) -> None:
        """Note an error that is not one of the library's: the run fails by it."""
        self.writer.info("defect", "", during=what, error=f"{type(error).__name__}: {error}")

    async def _limited(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call, which is cancelled or timed out at a random moment while that is asked for."""
        if time.monotonic() > self.cancelling_until:
            return await call()
        self.cancelled += 1
        moment = self.chance.random() * self.chance.choice((0.002, 0.02, 0.1))
        if self.chance.random() < 0.5:
            async with asyncio.timeout(moment):
                return await call()
        task = asyncio.ensure_future(call())
        await asyncio.wait({task}, timeout=moment)
        task.cancel()
        return await task

    async def _figures(self) -> None:
        while True:
            await asyncio.sleep(self.settings.figures_every)
            self.tell(adds=self.adds)
            figures = without_garbage if self.settings.lasts else of_this_process
            with contextlib.suppress(OSError):  # no descriptor is left
                self.writer.info("figures", **figures(), tasks=len(asyncio.all_tasks()), adds=self.adds)

    # What it is told to do

    async def _commands(self, lines: asyncio.StreamReader, backend: Backend) -> None:
        async with asyncio.TaskGroup() as group:
            while line := await lines.readline():
                group.create_task(self._obey(json.loads(line), backend))
        # The parent has ended.
        self.ended.set()

    async def _obey(self, command: dict[str, Any], backend: Backend) -> None:
        number, do = command.pop("command"), command.pop("do")
        answer = await getattr(self, f"do_{do}")(backend, **command)
        self.tell(done=number, **(answer or {}))

    async def do_strike(self, backend: Backend, **how: Any) -> None:
        """Kill or stop this process, soon."""
        self.striker.arm(**how)

    async def do_again(self, backend: Backend, turns: list[tuple[str, str]]) -> dict[str, Any]:
        """Add turns of a pod that was killed, as whoever sent them to it does; returns how that ended."""
        ended: Counter[str] = Counter()
        for conversation, identity in turns:
            # In a soak, conversations that are over have to go.
            if not (self.resting.is_set() or self.settings.lasts):
                ended[await self._add_again(self._memory(backend, conversation), conversation, identity)] += 1
        return ended

    async def do_cancel(self, backend: Backend, seconds: float) -> dict[str, Any]:
        """Cancel calls at random moments for some time, until there was one; returns how many were begun."""
        until, before = time.monotonic() + max(seconds, WITHIN_S), self.cancelled
        self.cancelling_until = until
        await asyncio.sleep(seconds)
        while self.cancelled == before and time.monotonic() < until:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.01)
        self.cancelling_until = 0.0
        return {"calls": self.cancelled - before}

    async def do_descriptors(self, backend: Backend, seconds: float) -> None:
        """Have no file descriptor left for some time."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            await asyncio.sleep(seconds)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def do_clock(self, backend: Backend, seconds: float, ahead: float) -> None:
        """Have a wrong clock for some time."""
        self.clock.ahead = ahead
        await asyncio.sleep(seconds)
        self.clock.ahead = 0.0

    async def do_erase(self, backend: Backend, conversation: str) -> dict[str, Any]:
        """Erase a conversation."""

        async def erase() -> dict[str, Any]:
            return {"found": await backend.sessions.erase(turns.key_of(conversation))}

        return await self._asked("erase", conversation, erase, by="backend")

    async def do_people(self, backend: Backend, kind: str, conversation: str) -> dict[str, Any]:
        """Do what people do beside the pods; returns how it ended, and whether it found something."""
        if kind == "session-end":
            session = self.chance.randrange(remembering.SESSIONS)
            outcome = await self._end_session(remembering.manager(backend, session))
            return {"outcome": outcome, "found": True}
        call = partial(asking.CALLS[kind], backend, self.folder, conversation)
        answer = await self._asked("people", conversation, call, kind=kind)
        for wrong in answer.keys() & {"missing", "foreign"}:
            self.writer.info("defect", conversation, during="merge", error=f"{wrong}: {answer[wrong]}")
        return answer

    async def _asked(
        self, what: str, conversation: str, call: Callable[[], Awaitable[dict[str, Any]]], **data: Any
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {}

        async def noted() -> dict[str, Any]:
            answer.update(await call())
            return answer

        outcome = await self._noted(what, conversation, noted, **data)
        return {"outcome": outcome, **answer}

    async def do_generations(self, backend: Backend, generations: list[int]) -> None:
        """Use these conversations from now on, and forget earlier ones."""
        self.generations = [max(pair) for pair in zip(self.generations, generations, strict=True)]
        used = {f"c{user}-{number}" for user, number in enumerate(self.generations)}
        for kept in (self.memories, self.sent):
            for conversation in kept.keys() - used:
                kept.pop(conversation)

    async def do_rest(self, backend: Backend) -> None:
        """Begin nothing new."""
        self.resting.set()

    async def do_settle(self, backend: Backend, conversations: list[str], within: float) -> dict[str, Any]:
        """Flush conversations until each is healthy and nothing is pending; returns which are not."""
        left = [one for one in conversations if not await self._settled(backend, one, within)]
        if left:
            # For whoever looks for the reason, in the file of what the process wrote to its standard error.
            for task in asyncio.all_tasks():
                task.print_stack()
        self.memories.clear()
        return {"left": left}

    async def _settled(self, backend: Backend, conversation: str, within: float) -> bool:
        memory, until = self._memory(backend, conversation), time.monotonic() + within
        while True:
            flushed = await self._noted("flush", conversation, partial(memory.flush, timeout=2.0))
            data = await self._calling(partial(turns.read, self.writer, conversation, memory))
            if flushed == "ok" and data is not None and data["health"] == "healthy" and not data["pending"]:
                return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.2)

    async def do_end(self, backend: Backend) -> None:
        """Close the backend and end."""
        self.ended.set()


LOADED: Final = 256
"""Of how many records a pod knows which version it has loaded last: of a bounded number, or it would grow."""


class _Noting(Observer):
    def __init__(self, writer: Watch, settings: Settings) -> None:
        self._writer = writer
        self._settings = settings

    def driver(self, driver: Driver) -> Driver:
        if self._settings.mutant:
            driver = {**MUTANTS, **LEAKS}[self._settings.mutant](driver, Path(self._settings.folder))
        return _NotedWrites(driver, self._writer)


class _NotedWrites(WrapperDriver):
    """Notes each replace that was done, the version that it replaced, and the lease that stands in it."""

    def __init__(self, inner: Driver, writer: Watch) -> None:
        super().__init__(inner)
        self._writer = writer
        self._codec = Codec()
        self._loaded: dict[Key, str] = {}

    async def load(self, key: Key, **last: Any) -> Record | None:
        record = await self.inner.load(key, **last)
        self._loaded.pop(key, None)
        if record is not None:
            self._loaded[key] = record.version
            if len(self._loaded) > LOADED:
                del self._loaded[next(iter(self._loaded))]
        return record

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType = KEEP,
    ) -> bool:
        began, op = time.monotonic(), self._writer.begin("replace")
        try:
            done = await self.inner.replace(
                key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
            )
        finally:
            self._writer.over(op)
        # A write of the version that stands confirms it, and is not another write.
        if done and version != self._loaded.get(key):
            data: dict[str, Any] = {"record": f"{key.scope}|{key.name}", "version": version, "began": began}
            data |= {"expect": expect if isinstance(expect, str) else None, "drop": drop}
            with contextlib.suppress(Corrupt):
                data["lease"] = self._codec.open_body(body).lease
            self._writer.info("write", **data)
        return done
