"""What an observer receives of actions that somebody may have to account for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Denied,
    EnvelopeKeys,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    Unavailable,
    open_backend,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.cli import observing
from stm_backends.drivers import Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from tests.support.command_line import cli
from tests.support.telemetry import Ear

ADA, BOB = MemoryKey("acme", "ada", "trip"), MemoryKey("acme", "bob", "trip")
CONFIG = ShortTermMemoryConfig(strategy="truncation")
EXAMPLES = Path(__file__).parents[2] / "examples"


class Heard(Observer):
    """An observer that keeps what it receives."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def erased(self, subject: Subject, records: int) -> None:
        self.events.append(("erased", subject, records))

    def purged(self, subject: Subject, records: int) -> None:
        self.events.append(("purged", subject, records))

    def exported(self, subject: Subject) -> None:
        self.events.append(("exported", subject))

    def imported(self, subject: Subject) -> None:
        self.events.append(("imported", subject))

    def copied(self, subject: Subject, records: int) -> None:
        self.events.append(("copied", subject, records))

    def denied(self, subject: Subject, operation: str) -> None:
        self.events.append(("denied", subject, operation))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def backend(heard: Heard) -> AsyncIterator[Backend]:
    async with open_backend("memory://", observer=heard) as backend:
        yield backend


async def say(backend: Backend, *keys: MemoryKey) -> None:
    for key in keys:
        await backend.memory(key, CONFIG).add_turn(ConversationTurn("a", "b"))


async def test_an_erasure_says_whose_and_how_many_records(heard: Heard, backend: Backend) -> None:
    await say(backend, ADA, MemoryKey("acme", "ada", "work"), BOB)
    await backend.sessions.erase(ADA)
    await backend.sessions.erase(ADA)
    await backend.sessions.erase_user("acme", "ada")
    await backend.sessions.erase_tenant("acme")
    assert heard.events == [
        ("erased", Subject("acme", "ada", "trip"), 1),
        ("erased", Subject("acme", "ada", "trip"), 0),
        ("erased", Subject("acme", "ada"), 1),
        ("erased", Subject("acme", "bob"), 1),
        ("erased", Subject("acme"), 0),
    ]


async def test_an_erasure_that_fails_is_not_reported_as_done(heard: Heard) -> None:
    class Broken(MemoryDriver):
        async def delete(self, *args: Any, **options: Any) -> bool:
            raise Unavailable("no answer")

    async with Backend(Broken(), observer=heard) as backend:
        await say(backend, ADA)
        for erasure in (backend.sessions.erase(ADA), backend.sessions.erase_user("acme", "ada")):
            with pytest.raises(Unavailable):
                await erasure
    assert heard.events == []


async def test_a_purge_says_whose_and_a_dry_run_nothing(heard: Heard, backend: Backend) -> None:
    for key, ts in ((ADA, time.time() - 90.0), (BOB, time.time())):
        await backend.memory(key, CONFIG).add_turn(ConversationTurn("a", "b", ts=ts))
    await backend.item_log(ADA, "langchain").add([{"text": "a"}])
    await backend.sessions.purge("acme", older_than=60.0, dry_run=True)
    assert heard.events == []
    await backend.sessions.purge("acme", older_than=60.0)
    await backend.sessions.purge("acme", older_than=60.0)
    assert heard.events == [("purged", Subject.of(ADA), 1)]


async def test_exports_imports_and_copies_say_whose(heard: Heard, backend: Backend) -> None:
    await say(backend, ADA)
    document = await backend.sessions.export(ADA)
    await backend.sessions.import_(document, on_conflict="replace")
    await backend.sessions.copy(ADA, backend.sessions, under=BOB)
    subject = Subject.of(ADA)
    assert heard.events == [
        ("exported", subject),
        ("imported", subject),
        ("exported", subject),
        ("imported", Subject.of(BOB)),
    ]


async def test_a_copy_reports_each_record_it_writes_and_no_other(heard: Heard, backend: Backend) -> None:
    await say(backend, ADA, BOB)
    await backend.state_store.save_memory_state(ADA.composite(), {"a": 1})
    async with open_backend("memory://") as target:
        for _ in range(2):
            await Copy(backend.driver, target.driver, [Owner("acme")], observer=heard).copy()
    assert sorted(heard.events) == [
        ("copied", Subject("acme", "ada"), 1),
        ("copied", Subject.of(ADA), 1),
        ("copied", Subject.of(BOB), 1),
    ]


class Refusing(MemoryDriver):
    """A driver whose user may not do some operations."""

    def __init__(self, *operations: str) -> None:
        super().__init__()
        self._operations = operations

    async def open(self) -> None:
        if "open" in self._operations:
            raise Denied("no permission")
        await super().open()

    async def load(self, key: Key) -> Any:
        if "load" in self._operations:
            raise Denied("no permission")
        return await super().load(key)

    async def scan(self, *args: Any, **options: Any) -> Any:
        if "scan" in self._operations:
            raise Denied("no permission")
        return await super().scan(*args, **options)


async def test_an_operation_that_is_denied_says_which_and_whose(heard: Heard) -> None:
    async with Backend(Refusing("load", "scan"), observer=heard) as backend:
        with pytest.raises(Denied):
            await backend.memory(ADA, CONFIG).get_llm_context()
        with pytest.raises(Denied):
            await anext(backend.sessions.users("acme"), None)
        with pytest.raises(Denied):
            await backend.state_store.load_planner_state("token")
    with pytest.raises(Denied):
        await Backend(Refusing("open"), observer=heard).open()
    assert heard.events == [
        ("denied", Subject("acme", "ada"), "load"),
        ("denied", Subject("acme"), "scan"),
        ("denied", Subject(), "load"),
        ("denied", Subject(), "open"),
    ]


async def test_a_store_of_keys_that_denies_is_reported(heard: Heard) -> None:
    keys = EnvelopeKeys(Refusing("load"), LocalWrapping({"w1": bytes(32)}, primary="w1"))
    async with open_backend("memory://", sealing=Sealing(keys), observer=heard) as backend:
        with pytest.raises(Denied):
            await say(backend, ADA)
    # The keys of the tenant are looked at first.
    assert heard.events == [("denied", Subject("acme"), "load")]


async def test_opentelemetry_counts_actions_without_ids() -> None:
    ear = Ear()
    async with open_backend("memory://", observer=ear.telemetry) as backend:
        await say(backend, ADA)
        await backend.sessions.import_(await backend.sessions.export(ADA), on_conflict="replace")
        await backend.sessions.erase(ADA)
        async with Backend(Refusing("scan"), observer=ear.telemetry) as refusing:
            with pytest.raises(Denied):
                await refusing.sessions.erase_tenant("acme")
        async with open_backend("memory://") as source, open_backend("memory://") as target:
            await say(source, ADA, BOB)
            await Copy(source.driver, target.driver, [Owner("acme")], observer=ear.telemetry).copy()
    points = ear.points()
    assert points["stm.records.erased"] == [({}, 1)]
    assert points["stm.records.copied"] == [({}, 2)]
    assert points["stm.conversations.exported"] == [({}, 1)]
    assert points["stm.conversations.imported"] == [({}, 1)]
    assert points["stm.operations.denied"] == [({"db.operation.name": "scan"}, 1)]
    # The user's id could be a part of a trace's.
    assert not [one for one in ("acme", "trip") if one in ear.exported()]


# Commands


def test_commands_report_to_the_observer_that_the_environment_names(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    lines = tmp_path / "exported.jsonl"
    program = """
import asyncio, sys
from stm_backends import *
async def main():
    async with open_backend(sys.argv[1]) as backend:
        memory = backend.memory(MemoryKey("acme", "ada", "trip"), ShortTermMemoryConfig("truncation"))
        await memory.add_turn(ConversationTurn("a", "b"))
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program, url], check=True, timeout=60)
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    wanted = ("--url", url)
    for arguments in (
        ("export", ADA.composite(), *wanted, "-o", lines),
        ("copy", url, f"sqlite:///{tmp_path}/copy.db", "--tenant", "acme"),
        ("erase", "acme:ada", *wanted, "-y"),
        ("import", lines, *wanted),
    ):
        done = cli(*arguments, cwd=tmp_path, STM_BACKENDS_OBSERVER="audit:observer", PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log] == ["exported", "copied", "erased", "imported"]
    assert len({line["user"] for line in log}) == 1
    assert "ada" not in (tmp_path / "audit.jsonl").read_text()


def test_without_the_variable_commands_report_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(observing.OBSERVER_VARIABLE, raising=False)
    assert observing.observer() is SILENT


@pytest.mark.parametrize(
    ("name", "said"),
    [("json", "MODULE:OBJECT"), ("json:nothing", "no 'nothing'"), ("json:loads", "function, not Observer")],
)
def test_a_name_that_is_no_observer_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(observing.OBSERVER_VARIABLE, name)
    with pytest.raises(ConfigurationError, match=said) as refused:
        observing.observer()
    assert str(refused.value).startswith("STM_BACKENDS_OBSERVER")
