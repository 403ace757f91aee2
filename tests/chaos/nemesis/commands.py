"""What people do at a command line while pods work: each command is a process, and may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from stm_backends import MemoryKey, StmError, open_backend
from tests.chaos import remembering, sealing, turns
from tests.chaos.history import Writer
from tests.chaos.nemesis.pods import ROOT
from tests.chaos.stands import Fault

OLD: Final = "chaos-old"
"""The tenant whose conversations have expired."""

EXPIRED: Final = 200
"""How many conversations expire before a purge."""

ATTEMPTS: Final = 6
"""How often a command is run again that an outage ended."""

TIME_TO_LIVE_S: Final = 1.0


def names(*, sealed: bool) -> Sequence[str]:
    """Return the names of what people do at a command line."""
    return ("command-purge", "command-copy", *["command-reseal"] * sealed)


class Commands:
    """People at a command line, who run one command at a time, and again until it has succeeded."""

    def __init__(
        self,
        folder: Path,
        url: str,
        writer: Writer,
        conversations: Callable[[], Sequence[str]],
        *,
        sealed: bool,
    ) -> None:
        self._folder = folder
        self._url = url
        self._writer = writer
        self._conversations = conversations
        self._sealed = sealed
        self._turn = asyncio.Lock()
        self._number = 0
        self._ids = ["k0"]
        self.problems: list[str] = []
        self.purges = 0
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if sealed:
            keys = folder / "keys.json"
            sealing.write(keys, self._ids)
            # Pods inherit it.
            os.environ[sealing.VARIABLE] = str(keys)
            self._environment |= {sealing.VARIABLE: str(keys), "STM_BACKENDS_SEALING": sealing.NAME}

    def faults(self) -> Mapping[str, Fault]:
        """Return what people do, by name. Each is over when it is done, however long it may take."""
        done = self._purge, self._copy, self._reseal
        return dict(zip(names(sealed=self._sealed), done, strict=False))

    async def finish(self) -> None:
        """With no fault in force, let each command do what is left; then only the newest key is needed."""
        if self.purges:
            await self._in_the_end("purge", "--url", self._url)
            left = self._folder / "left.json"
            await self._in_the_end("purge", "--dry-run", "--url", self._url, "--json", str(left))
            if left.exists() and (expired := json.loads(left.read_text(encoding="utf-8"))["expired"]):
                self.problems.append(f"a purge has left {expired} expired records")
        if self._sealed:
            tenants = ("--tenant", turns.TENANT, "--tenant", remembering.TENANT)
            await self._in_the_end("reseal", "--url", self._url, *tenants)
            sealing.write(Path(os.environ[sealing.VARIABLE]), self._ids[-1:])

    async def _in_the_end(self, *command: str) -> None:
        status, said = 1, ""
        for _ in range(ATTEMPTS):
            status, said = await self._run(None, *command)
            if not status:
                return
        self.problems.append(f"{command[0]} ended with {status} although all was well: {said[-600:]}")

    @asynccontextmanager
    async def _purge(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Purge hundreds of conversations that have just expired."""
        async with self._turn:
            figures: dict[str, Any] = {"expired": await self._let_expire()}
            self.purges += 1
            await self._until_done(chance, figures, "purge", "--url", self._url)
            yield figures

    @asynccontextmanager
    async def _copy(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Copy the tenant to another datastore; what is there then was all there at one moment."""
        async with self._turn:
            self._number += 1
            target = f"sqlite:///{self._folder}/copy{self._number}.db"
            conversations = self._conversations()
            ops = [(one, self._writer.invoke("read", one)) for one in conversations]
            result = self._folder / f"copy{self._number}.json"
            figures: dict[str, Any] = {}
            # With 1 it has copied as well, and found that the source has changed since.
            copying = ("copy", self._url, target, "--tenant", turns.TENANT, "--create", "--replace")
            await self._until_done(chance, figures, *copying, "--json", str(result), result=result)
            if figures["done"]:
                records = json.loads(result.read_text(encoding="utf-8"))["records"]
                figures["records"] = records
                if records.get("failed"):
                    self.problems.append(f"a copy could not read {records['failed']} records")
                # Of a record that was erased since the first attempt, a part may have been copied by it.
                elif len(figures["statuses"]) == 1 or not records.get("extra"):
                    await self._read(target, ops)
            yield figures

    @asynccontextmanager
    async def _reseal(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Give all processes another key, make it primary, and seal everything with it."""
        async with self._turn:
            keys, new = Path(os.environ[sealing.VARIABLE]), f"k{len(self._ids)}"
            sealing.write(keys, [new, *self._ids])
            await asyncio.sleep(0.2)
            self._ids.append(new)
            sealing.write(keys, self._ids)
            figures: dict[str, Any] = {"key": new}
            await self._until_done(chance, figures, "reseal", "--url", self._url, "--tenant", turns.TENANT)
            yield figures

    async def _let_expire(self) -> int:
        """Store conversations that expire at once; returns how many."""
        self._number += 1
        stored = 0
        options: dict[str, Any] = {"sealing": sealing.SEALING} if self._sealed else {}
        settings = turns.config(lasts=TIME_TO_LIVE_S)

        async def store(number: int) -> None:
            nonlocal stored
            key = MemoryKey(OLD, f"u{number % 10}", f"s{self._number}-{number}")
            with contextlib.suppress(StmError):
                memory = backend.memory(key, settings, summarizer=_nothing)
                await memory.add_turn(turns.turn_of(key.session_id))
                stored += 1

        # An outage leaves fewer of them.
        with contextlib.suppress(StmError):
            async with open_backend(self._url, deadline_s=2.0, **options) as backend:
                for first in range(0, EXPIRED, 20):
                    await asyncio.gather(*map(store, range(first, first + 20)))
                await asyncio.sleep(TIME_TO_LIVE_S)
        return stored

    async def _read(self, target: str, ops: Sequence[tuple[str, int]]) -> None:
        """Note what a copy has as what was read while it was made."""
        options: dict[str, Any] = {"sealing": sealing.SEALING} if self._sealed else {}
        async with open_backend(target, close_timeout_s=0.1, **options) as backend:
            for conversation, op in ops:
                memory = backend.memory(turns.key_of(conversation), turns.config(), summarizer=_nothing)
                await turns.read(self._writer, conversation, memory, op=op)

    async def _until_done(
        self, chance: random.Random, figures: dict[str, Any], *command: str, result: Path | None = None
    ) -> None:
        """Run a command until it has ended by itself, and well; at times the first process is killed."""
        statuses: list[int] = []
        figures |= {"statuses": statuses, "done": False}
        kill_after = chance.uniform(0.3, 4.0) if chance.random() < 0.4 else None
        for _ in range(ATTEMPTS):
            status, _ = await self._run(kill_after, *command)
            statuses.append(status)
            kill_after = None
            if not status or (result is not None and _is_written(result)):
                figures["done"] = True
                return

    async def _run(self, kill_after: float | None, *command: str) -> tuple[int, str]:
        """Run a command; returns its exit status, and what it said."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "stm_backends", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._folder,
            env=self._environment,
        )
        said = asyncio.ensure_future(process.communicate())
        try:
            await asyncio.wait({said}, timeout=kill_after)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()
            output = (await said)[0].decode(errors="replace")
        status = process.returncode if process.returncode is not None else -9
        if "Traceback" in output or status not in {0, 1, -9}:
            self.problems.append(f"{command[0]} ended with {status}: {output[-800:]}")
        return status, output


def _is_written(result: Path) -> bool:
    """Say whether a command got as far as its results."""
    return result.exists() and result.stat().st_size > 0


async def _nothing(request: Mapping[str, Any], /) -> Any:
    """Summarize nothing, for longer than anybody waits."""
    await asyncio.sleep(3_600)
