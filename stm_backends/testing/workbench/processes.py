"""Other operating-system processes that work on the same datastore as a check does.

A worker receives its task as a pickle on standard input. It writes one line per acknowledged write to
standard output, so a check that kills it knows which writes must be stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import sys
import weakref
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Final

from stm_backends.drivers.contract import ABSENT, KEEP, Driver, Key, new_version
from stm_backends.testing.workbench.failures import Met, cause, origin, told
from stm_backends.testing.workbench.history import must_answer

UNREACHABLE: Final = (
    "`Datastore.open` must be importable by other processes; use `open_at` or a module-level function"
)

_MAIN: Final = "from stm_backends.testing.workbench.processes import main; main()"

# Executed before any import, because a module may keep a reference to the function that tells the time.
# Objects made by C code are of the original class, and are still instances of this one.
_WRONG: Final = """
import datetime, time

true, by = datetime.datetime, {by}

class Kind(type):
    def __instancecheck__(cls, one):
        return isinstance(one, true)

class Wrong(true, metaclass=Kind):
    @classmethod
    def now(cls, tz=None):
        return true.now(tz) + datetime.timedelta(seconds=by)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.UTC).replace(tzinfo=None)

datetime.datetime = Wrong
seconds, nanoseconds = time.time, time.time_ns
time.time = lambda: seconds() + by
time.time_ns = lambda: nanoseconds() + int(by * 1e9)
"""

_KILLED: Final = -9 if os.name == "posix" else 1

_LAST_WORDS: Final = 12
"""Maximum number of lines of a worker's standard error that a failure shows."""

_LAST_BYTES: Final = 8_192

_RAISED: Final = "raised "
"""The beginning of the last line of a worker that an error ends; no acknowledgement begins like this."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A worker's task: append `count` entries `label:0`, `label:1` ..., folding now and then.

    With `stays`, it keeps running afterwards. With `lease_s`, it first takes a lease of that many seconds,
    acknowledges it as `label` and keeps running. With `work`, it does that first, on the record under `key`.
    """

    open: Callable[[], Awaitable[Driver]]
    key: Key
    label: str
    count: int
    fold_every: int = 0
    stays: bool = False
    lease_s: float = 0.0
    work: Callable[[Driver, Key], Awaitable[None]] | None = None


class Worker:
    """A process that carries out a task. An unexpected end fails the check and is shown."""

    def __init__(self, process: asyncio.subprocess.Process, complaints: asyncio.Task[bytes]) -> None:
        self._process = process
        self._complaints = complaints
        self._error, self._cause = "", ""
        self.acknowledged: list[str] = []
        _WORKERS.setdefault(asyncio.get_running_loop(), []).append(self)

    @classmethod
    async def start(cls, task: Task, *, ahead_s: float = 0.0) -> Worker:
        """Start a process on a task. Its Python code sees a time of day that is `ahead_s` seconds ahead."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            (_WRONG.format(by=ahead_s) if ahead_s else "") + _MAIN,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(pickle.dumps(task))
        process.stdin.write_eof()
        # Read continuously, because a full pipe would block the process.
        return cls(process, asyncio.create_task(_end_of(process.stderr)))

    async def read(self, *, until: int) -> None:
        """Note the first `until` acknowledged writes; fail if the process ends before that many."""
        __tracebackhide__ = True
        if not await self._note(until):
            await self._end(expected=None)

    async def kill(self) -> None:
        """Kill the process during its work, and note the writes that it had acknowledged.

        Fails if the process had already ended.
        """
        __tracebackhide__ = True
        if self._process.returncode is None:
            self._process.kill()
        await self._note()
        await self._end(expected=_KILLED)

    async def finish(self) -> None:
        """Wait until the task succeeds; cancelling the wait kills the process."""
        __tracebackhide__ = True
        try:
            await self._note()
            await self._end(expected=0)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            raise

    async def _note(self, until: int | None = None) -> bool:
        """Note acknowledged writes, up to `until` or the end, and return whether there were that many."""
        assert self._process.stdout is not None
        while until is None or len(self.acknowledged) < until:
            line = await self._process.stdout.readline()
            if not line.endswith(b"\n"):
                return False
            text = line.decode().strip()
            if text.startswith(_RAISED):
                self._error, self._cause = json.loads(text.removeprefix(_RAISED))
            else:
                self.acknowledged.append(text)
        return True

    async def _end(self, *, expected: int | None) -> None:
        """Wait for the process to end. Unless it has the expected status, fail with its last words."""
        __tracebackhide__ = True
        status = await self._process.wait()
        words = (await self._complaints).decode(errors="replace").splitlines()[-_LAST_WORDS:]
        if status == expected:
            return
        words += self._error.splitlines()
        said = ["its last words:", *words] if words else ["it wrote nothing to its standard error"]
        count = len(self.acknowledged)
        raise Met(
            f"a worker process ended by itself with status {status}, after {count} acknowledged "
            f"write{'s' * (count != 1)}; " + "\n  ".join(said),
            self._cause,
        )

    def kill_now(self) -> None:
        """Kill the process if it is still running, without waiting for its end."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()

    async def end(self) -> None:
        """End the process if it is still running."""
        self.kill_now()
        await self._process.wait()
        await self._complaints


_WORKERS: Final[MutableMapping[asyncio.AbstractEventLoop, list[Worker]]] = weakref.WeakKeyDictionary()


async def end_workers() -> None:
    """End the processes started by a check, so that none of them writes on or outlives the event loop.

    A failed check has not waited for them.
    """
    for worker in _WORKERS.pop(asyncio.get_running_loop(), []):
        await worker.end()


def kill_workers() -> None:
    """Kill the processes started by checks, from a thread next to a blocked event loop."""
    for workers in list(_WORKERS.values()):
        for worker in workers:
            worker.kill_now()


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    """Return the last bytes of a stream once it has ended."""
    end = b""
    while part := await stream.read(_LAST_BYTES):
        end = (end + part)[-_LAST_BYTES:]
    return end


def main() -> None:
    """Carry out the task on standard input; the entry of a worker process."""
    try:
        task = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 -- our own parent wrote it
    except (ImportError, AttributeError) as error:
        sys.exit(f"{UNREACHABLE}: {error}")
    try:
        asyncio.run(_carry_out(task))
    except BaseException as error:  # noqa: BLE001 -- also what ends a process, such as SystemExit
        # Sent to standard output: on standard error, libraries' output at exit could displace it.
        where = origin(error)
        said = f"{told(error)}\nraised at {where}" if where else told(error)
        _acknowledge(_RAISED + json.dumps([said, cause(error)]))
        sys.exit(1)


async def _carry_out(task: Task) -> None:
    driver = await task.open()
    try:
        if task.lease_s:
            await driver.replace(task.key, b"", version=new_version(), expect=ABSENT, ttl=task.lease_s)
            _acknowledge(task.label)
            await asyncio.Event().wait()
        if task.work is not None:
            await task.work(driver, task.key)
        for number in range(task.count):
            entry = f"{task.label}:{number}"
            length = await driver.append(task.key, entry.encode(), initial_version=new_version(), ttl=None)
            must_answer("append", length, (int,))
            _acknowledge(entry)
            if task.fold_every and length >= task.fold_every:
                await fold(driver, task.key, length // 2)
        if task.stays:
            await asyncio.Event().wait()
    finally:
        await driver.close()


def _acknowledge(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def look_and_write(driver: Driver, key: Key, *, other: Key, ttl: float) -> None:
    """Append to another record, and acknowledge whether the first is `there` or `absent`."""
    found = await driver.load(key)
    await driver.append(other, b"a", initial_version=new_version(), ttl=ttl)
    _acknowledge("absent" if found is None else "there")


async def fold(driver: Driver, key: Key, drop: int) -> bool:
    """Move up to `drop` of the oldest entries into the body, one a line; returns whether it won."""
    record = await driver.load(key)
    if record is None:
        return False
    drop = min(drop, len(record.tail))
    body = (record.body or b"") + b"".join(entry + b"\n" for entry in record.tail[:drop])
    return await driver.replace(key, body, version=new_version(), expect=record.version, drop=drop, ttl=KEEP)


async def ledger(driver: Driver, key: Key) -> list[str]:
    """Return every entry ever appended, folded or not, in order."""
    record = await driver.load(key)
    if record is None:
        return []
    return (record.body or b"").decode().split() + [entry.decode() for entry in record.tail]
