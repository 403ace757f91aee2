"""Nothing of an erased conversation is left in the SQLite file or in the write-ahead log beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stm_backends.backend import open_backend
from stm_backends.drivers.contract import Key, new_version
from stm_backends.drivers.plugins import open_driver
from stm_backends.testing import FakeClock
from stm_backends.types import ConversationTurn, MemoryKey, ShortTermMemoryConfig

SECRET = b"the diagnosis of Ms Example"
KEY = MemoryKey("acme", "ada", "chat")
OTHER = MemoryKey("acme", "bob", "chat")
CONFIG = ShortTermMemoryConfig(strategy="truncation")


@pytest.fixture(autouse=True)
def insecure_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect as with a build of SQLite that leaves deleted content in the file by default."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def connecting(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.execute("PRAGMA secure_delete = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connecting)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stm.db"


def copies(path: Path) -> int:
    """Return how often the text is in the file and in its log."""
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.read_bytes().count(SECRET) for file in files if file.exists())


@pytest.fixture
def reader(path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    """Another connection that reads the state of the file as it is when it is called."""
    opened: list[sqlite3.Connection] = []

    def read() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        opened.append(connection)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM stm_record").fetchone()
        return connection

    yield read
    for connection in opened:
        connection.close()


def turn(number: int, size: int = 1) -> ConversationTurn:
    return ConversationTurn(f"{number}: {SECRET.decode()} " * size, "noted")


async def test_nothing_of_an_erased_conversation_is_in_the_raw_files(path: Path) -> None:
    async with open_backend(f"sqlite:///{path}") as backend:
        memory, other = (backend.memory(key, CONFIG) for key in (KEY, OTHER))
        for number in range(120):
            # Of many sizes, so that some have pages of their own; mixed with the rows of another user.
            await memory.add_turn(turn(number, size=1 + number**2 % 700))
            await other.add_turn(ConversationTurn("q" * (number * 37 % 3000), "a"))
        await backend.state_store.save_memory_state(KEY.composite(), {"note": SECRET.decode()})
        assert copies(path) > 100
        assert await backend.sessions.erase(KEY)
        assert copies(path) == 0
        assert (path.with_name(f"{path.name}-wal")).stat().st_size == 0
        assert len(await other.turns()) > 0


@pytest.mark.parametrize("size", [2_000, 60_000])
async def test_nothing_of_an_erased_user_is_in_the_raw_files(path: Path, size: int) -> None:
    """Also not of records that are too large for one transaction, or that are stored in parts."""
    async with open_backend(f"sqlite:///{path}", max_record_bytes=16 * 1024 * 1024) as backend:
        memory = backend.memory(KEY, CONFIG)
        for number in range(4):
            await memory.add_turn(turn(number, size=size))
        receipt = await backend.sessions.erase_with_receipt("acme", "ada")
        assert receipt.records == 1
        assert "was cut" in receipt.remains
        assert copies(path) == 0


@pytest.mark.usefixtures("writes_purge_nothing")
async def test_an_expired_conversation_is_removed_with_its_user(path: Path) -> None:
    clock = FakeClock()
    driver = open_driver(f"sqlite:///{path}", clock=clock)
    await driver.open()
    key = Key("acme:ada:memory", "chat")
    for _ in range(3):
        await driver.append(key, SECRET, initial_version=new_version(), ttl=60)
    await driver.close()
    await clock.pass_time(61)
    async with open_backend(f"sqlite:///{path}", clock=clock) as backend:
        assert copies(path)
        receipt = await backend.sessions.erase_with_receipt("acme", "ada")
        assert (receipt.records, receipt.erased) == (0, {"expired": 1})
        assert copies(path) == 0


async def test_a_reader_that_goes_on_leaves_the_log_and_the_receipt_says_so(
    path: Path, reader: Callable[[], sqlite3.Connection]
) -> None:
    async with open_backend(f"sqlite:///{path}", deadline_s=0.3) as backend:
        await backend.memory(KEY, CONFIG).add_turn(turn(1))
        reading = reader()
        receipt = await backend.sessions.erase_with_receipt("acme", "ada", "chat")
        assert receipt.records == 1
        assert "was not cut (another connection is reading an older state)" in receipt.remains
        assert (receipt.cleaned, receipt.complete) == (False, False)
        assert receipt.as_json()["cleaned"] is False
        assert copies(path)
        reading.rollback()
        # A later write cuts it: by chance after one in eight.
        for number in range(1_000):
            await backend.memory(OTHER, CONFIG).add_turn(ConversationTurn(f"{number}", ""))
            if not copies(path):
                break
        assert not copies(path)


async def test_a_reader_that_ends_in_time_does_not_prevent_the_cut(
    path: Path, reader: Callable[[], sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stm_backends.drivers.sqlite import statements  # noqa: PLC0415

    cut, attempts = statements.cut_log, 0

    def cutting(connection: sqlite3.Connection) -> bool:
        nonlocal attempts
        attempts += 1
        done = cut(connection)
        if attempts == 3:
            reading.rollback()
        return done

    async with open_backend(f"sqlite:///{path}", deadline_s=30) as backend:
        await backend.memory(KEY, CONFIG).add_turn(turn(1))
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as reading:
            reading.execute("BEGIN")
            reading.execute("SELECT count(*) FROM stm_record").fetchone()
            monkeypatch.setattr(statements, "cut_log", cutting)
            receipt = await backend.sessions.erase_with_receipt("acme", "ada", "chat")
        assert "was cut" in receipt.remains
        assert attempts > 3
        assert copies(path) == 0


async def test_a_log_that_another_process_starts_again_loses_its_old_end(path: Path) -> None:
    async with open_backend(f"sqlite:///{path}") as one, open_backend(f"sqlite:///{path}") as two:
        for number in range(50):
            await one.memory(KEY, CONFIG).add_turn(turn(number))
        await one.conversations.get(KEY)
        for kind in ("memory", "card"):
            await one.driver.delete(Key(f"acme:ada:{kind}", "chat"))
        # Copies the log into the file without cutting it.
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[0] == 0
        assert copies(path)
        await two.memory(OTHER, CONFIG).add_turn(ConversationTurn("hello", ""))
        assert copies(path) == 0
