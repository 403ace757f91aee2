"""A key is rotated while pods write: no acknowledged turn is lost, and at the end none needs the old key."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends import (
    ConversationTurn,
    Corrupt,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    open_backend,
)
from stm_backends.sealing.naming import KEYS_VARIABLE
from stm_backends.testing.workbench.summarizers import covered
from tests.support.places import EACH, Place
from tests.support.rotating_pod import LOG, LOG_KEY, SESSIONS, memory_of

SECRETS = {"k1": bytes(range(32)), "k2": bytes(range(32, 64))}


def sealing(keys: dict[str, bytes], primary: str) -> Sealing:
    return Sealing(StaticKeys(keys, primary=primary))


class Process:
    """A pod or a command. `said` has the lines of its standard output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[str] = []

    @classmethod
    async def start(cls, *arguments: object, **environment: str) -> Process:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *map(str, arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **environment},
            )
        )

    async def read(self, *, lines: int) -> None:
        """Read that many more lines; fail if the process ends before."""
        for _ in range(lines):
            assert await self._line(), f"the process ended with {await self._process.wait()}"

    async def _line(self) -> bool:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line.endswith(b"\n"):
            self.said.append(line.decode().strip())
            return True
        return False

    async def end(self, *, kill: bool = False) -> int:
        """Ask the process to end, or kill it; reads what it says until then, and returns its status."""
        if kill and self._process.returncode is None:
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        while await self._line():
            pass
        return await self._process.wait()


def keys_file(folder: Path, primary: str, *ids: str) -> Path:
    file = folder / f"{primary}-of-{'-'.join(ids)}.json"
    keys = {one: base64.b64encode(SECRETS[one]).decode() for one in ids}
    file.write_text(json.dumps({"primary": primary, "keys": keys}))
    return file


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", "redis"])
async def test_a_key_is_rotated_under_pods_that_write_and_then_removed(
    datastore: str, place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    url = place_on(datastore).url
    pods: list[Process] = []
    running: dict[str, Process] = {}

    async def start(name: str, file: Path) -> None:
        pods.append(await Process.start("tests.support.rotating_pod", url, file, name))
        running[name.partition("-")[0]] = pods[-1]

    async def reseal(file: Path) -> Process:
        command = ("stm_backends", "reseal", "--tenant", "acme", "--url", url)
        return await Process.start(*command, **{KEYS_VARIABLE: str(file)})

    added = keys_file(tmp_path, "k1", "k1", "k2")
    primary = keys_file(tmp_path, "k2", "k1", "k2")
    removed = keys_file(tmp_path, "k2", "k2")
    try:
        for name in "abc":
            await start(name, added)
        await asyncio.gather(*(pod.read(lines=30) for pod in running.values()))
        for name in "abc":
            # One is killed; the others end as services do. Each is started again with the new primary key.
            status = await running[name].end(kill=name == "b")
            assert status == (-signal.SIGKILL if name == "b" else 0)
            await start(f"{name}-2", primary)
            await running[name].read(lines=10)

        interrupted = await reseal(primary)
        await running["a"].read(lines=5)
        await interrupted.end(kill=True)
        await asyncio.gather(*(pod.read(lines=20) for pod in running.values()))
        assert await (await reseal(primary)).end() == 0

        for name in "abc":
            await running[name].end(kill=name == "c")
            await start(f"{name}-3", removed)
        await asyncio.gather(*(pod.read(lines=30) for pod in running.values()))
        assert [await pod.end() for pod in running.values()] == [0, 0, 0]
    finally:
        for pod in pods:
            await pod.end(kill=True)

    acknowledged = [tuple(line.split()) for pod in pods for line in pod.said]
    stored = await read_back(url)
    for where in (*SESSIONS, LOG):
        tags = [tag for place, tag in acknowledged if place == where]
        assert len(tags) == len({*tags})
        counts = Counter(stored[where])
        assert {*tags} <= counts.keys(), "an acknowledged turn is lost"
        assert {*counts.values()} == {1}, "a turn is stored twice"
        # A pod that was killed may have added one more.
        assert len(counts) <= len(tags) + 2
    async with open_backend(url, sealing=sealing({"k1": SECRETS["k1"]}, "k1")) as old:
        with pytest.raises(Corrupt, match="'k2', which this process does not have"):
            await memory_of(old, SESSIONS[0]).get_llm_context()


@pytest.mark.parametrize("datastore", EACH)
async def test_after_resealing_the_old_key_is_not_needed_on_any_datastore(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    url, large = place_on(datastore).url, "Zanzibar " * 100_000
    both, new = dict(SECRETS), {"k2": SECRETS["k2"]}
    ada = MemoryKey("acme", "ada", "trip")
    async with open_backend(url, create=True, sealing=sealing(both, "k1")) as backend:
        for text in ("small", large):
            turn = ConversationTurn(text, "noted")
            await backend.memory(ada, ShortTermMemoryConfig("truncation")).add_turn(turn)
        await backend.state_store.save_memory_state("acme:ada:trip", {"text": large})
    async with open_backend(url, sealing=sealing(both, "k2")) as backend:
        report = await backend.sessions.reseal("acme")
        assert report.ok
        assert report.records >= 3
        assert (await backend.sessions.reseal("acme")).current == report.records
    async with open_backend(url, sealing=sealing(new, "k2")) as backend:
        turns = (await backend.sessions.export(ada))["turns"]
        assert [turn["user_message"] for turn in turns] == ["small", large]
        assert await backend.state_store.load_memory_state("acme:ada:trip") == {"text": large}


async def read_back(url: str) -> dict[str, list[str]]:
    """Return the tags of each conversation and of the log, with the new key alone."""
    found: dict[str, list[str]] = {}
    async with open_backend(url, sealing=sealing({"k2": SECRETS["k2"]}, "k2")) as backend:
        for session in SESSIONS:
            document = await backend.sessions.export(MemoryKey("acme", "ada", session))
            turns = [turn["user_message"] for turn in document["turns"]]
            found[session] = [*covered(document["body"]["summary"]), *turns]
        found[LOG] = [item["tag"] for item in await backend.item_log(LOG_KEY, "langchain").items()]
    return found
