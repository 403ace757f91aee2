"""The commands `purge` and `expire`, and `import --ttl`: what they print, write and refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.admin.expiring import Expiring
from stm_backends.admin.purging import Purged
from stm_backends.admin.resealing import ResealReport
from stm_backends.cli.app import app
from stm_backends.drivers.contract import Key
from stm_backends.records.keys import memory_key
from tests.support.transcripts import converse, numbered, told

DAY = 86_400.0
CONFIG = ShortTermMemoryConfig("truncation")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


@pytest.fixture
def url(tmp_path: Path, writes_purge_nothing: None) -> str:
    """A database with two old conversations, a new one and one without a time, and ten expired records."""
    del writes_purge_nothing
    now = time.time()

    async def fill(url: str) -> None:
        async with stm_backends.open_backend(url) as backend:
            for session, ts in (
                ("old\n1", now - 100 * DAY),
                ("old2", now - 95 * DAY),
                ("new", now),
                ("x", now),
            ):
                memory = backend.memory(MemoryKey("acme", "u1", session), CONFIG)
                await memory.add_turn(ConversationTurn("question", "answer", ts=ts))
            # As another program stores a turn: a memory would add the time.
            document = await backend.sessions.export(MemoryKey("acme", "u1", "x"))
            document["turns"][0]["ts"] = 0.0
            await backend.sessions.import_(document, on_conflict="replace")
            for number in range(10):
                key = Key("gone:u:memory", str(number))
                await backend.driver.append(key, b"e", initial_version="v", ttl=0.001)

    url = f"sqlite:///{tmp_path}/stm.db"
    asyncio.run(fill(url))
    return url


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def raw(url: str) -> list[str]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        return [*connection.iterdump()]


def ends(url: str) -> list[float | None]:
    """Return when the records of conversations expire."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        rows = connection.execute("SELECT expires FROM stm_record WHERE scope = 'acme:u1:memory'").fetchall()
    return [expires for (expires,) in rows]


def test_purge_removes_expired_records_and_says_how_many(url: str) -> None:
    done = cli("purge", "--url", url)
    assert (done.exit_code, done.stdout) == (0, "Removed: 10 expired records\n")
    again = cli("purge", "--url", url)
    assert (again.exit_code, again.stdout) == (0, "Removed: nothing\n")


@pytest.mark.usefixtures("writes_purge_nothing")
def test_one_record_is_counted_in_the_singular(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/one.db"

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            turn = ConversationTurn("Hello", "Hi", ts=time.time() - 900 * 86_400)
            await backend.memory(MemoryKey("acme", "u", "s"), CONFIG).add_turn(turn)
        async with stm_backends.open_backend(url) as backend:
            log = Key("acme:u:memory", "gone")
            await backend.driver.inner.append(log, b"a", initial_version="v", ttl=0.001)

    asyncio.run(fill())
    done = cli("purge", "--tenant", "acme", "--older-than", "90d", "--url", url)
    assert done.stdout.splitlines()[0] == "Removed: 1 expired record, 1 old conversation"
    assert cli("expire", "--tenant", "acme", "--ttl", "90d", "--url", url).stdout == (
        "Expire in 90d: 1 conversation\n"
    )


def test_purge_removes_what_is_older_and_says_what_it_kept(url: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--tenant", "acme", "--older-than", "90d", "--url", url)
    done = cli("purge", *options, "-v", "--json", str(report))
    assert done.exit_code == 0, done.output
    # Several are judged at once, so they are told in no order.
    first, second, *told = done.stdout.splitlines()
    assert {first, second} == {"acme:u1:old%0A1", "acme:u1:old2"}
    assert told == [
        "Removed: 10 expired records, 2 old conversations",
        "Kept: 1 newer, 1 without a time (`stm-backends expire` gives a time to live)",
        "Their empty records stay listed until they expire in 90d.",
    ]
    found = json.loads(report.read_text())
    assert found["conversations"] == 2
    assert sorted(one["name"] for one in found["found"]) == ["old\n1", "old2"]
    again = cli("purge", *options)
    assert "Removed: nothing\nKept: 1 newer" in again.stdout
    assert "2 emptied by an earlier purge" in again.stdout


def test_a_dry_run_says_the_same_and_writes_nothing(url: str) -> None:
    before = raw(url)
    done = cli("purge", "--user", "acme:u1", "--older-than", "90d", "--dry-run", "--url", url)
    assert done.exit_code == 0, done.output
    assert "Would be removed: 10 expired records, 2 old conversations\n" in done.stdout
    assert raw(url) == before


def test_an_unreadable_conversation_is_kept_and_ends_with_status_1(url: str) -> None:
    async def damage() -> None:
        async with stm_backends.open_backend(url) as backend:
            key = memory_key(MemoryKey("acme", "u1", "old2"))
            await backend.driver.append(key, b"damaged", initial_version="v", ttl=None)

    asyncio.run(damage())
    done = cli("purge", "--tenant", "acme", "--older-than", "90d", "--url", url)
    assert done.exit_code == 1
    assert "1 old conversation" in done.stdout
    assert "1 record could not be read" in done.stderr
    assert "acme:u1:old2: " in done.stderr
    assert "damaged" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--older-than", "90d"), "--older-than needs --tenant"),
        (("--tenant", "acme", "--older-than", "90"), "--older-than is a number and a unit"),
        (("--tenant", "acme:u1"), "--tenant is written TENANT"),
        (("--user", "acme"), "--user is written TENANT:USER"),
        (("--tenant", "acme", "--user", "acme:u1"), "not both"),
    ],
)
def test_purge_refuses_what_it_cannot_mean(url: str, arguments: tuple[str, ...], message: str) -> None:
    before = raw(url)
    done = cli("purge", *arguments, "--url", url)
    assert done.exit_code == 2
    assert message in done.stderr
    assert raw(url) == before


def test_expire_gives_everything_of_a_user_a_time_to_live(url: str) -> None:
    assert ends(url) == [None] * 4
    done = cli("expire", "--ttl", "90d", "--user", "acme:u1", "--url", url)
    assert (done.exit_code, done.stdout) == (0, "Expire in 90d: 4 conversations\n")
    assert all(end and 89 * DAY < end - time.time() <= 90 * DAY for end in ends(url))
    assert "question" in cli("export", "acme:u1:new", "--url", url).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ttl", "90d"), "name the owner of the records"),
        (("--ttl", "soon", "--tenant", "acme"), "--ttl is a number and a unit"),
    ],
)
def test_expire_refuses_what_it_cannot_mean(url: str, arguments: tuple[str, ...], message: str) -> None:
    done = cli("expire", *arguments, "--url", url)
    assert done.exit_code == 2
    assert message in done.stderr
    assert ends(url) == [None] * 4


def test_imported_conversations_expire_with_ttl(url: str, tmp_path: Path) -> None:
    file, target = tmp_path / "out.jsonl", f"sqlite:///{tmp_path}/to.db"
    assert cli("export", "--user", "acme:u1", "--url", url, "-o", str(file)).exit_code == 0
    refused = cli("import", str(file), "--ttl", "12", "--url", target)
    assert refused.exit_code == 2
    assert "--ttl is a number and a unit" in refused.stderr
    assert not (tmp_path / "to.db").exists()
    assert cli("import", str(file), "--ttl", "12h", "--url", target).exit_code == 0
    assert all(end and 0.4 * DAY < end - time.time() <= 0.5 * DAY for end in ends(target))
    assert cli("import", str(file), "--replace", "--url", target).exit_code == 0
    assert ends(target) == [None] * 4


@pytest.mark.parametrize("command", ["purge", "expire", "import"])
def test_help_shows_how_durations_are_written(command: str) -> None:
    assert "90d, 12h or 30m" in " ".join(cli(command, "--help").stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "report"), [("purge", Purged), ("expire", Expiring), ("reseal", ResealReport)]
)
def test_the_page_lists_the_fields_of_each_json_file(command: str, report: type) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "command-line.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| `{command} --json FILE` \|.*$", page, re.MULTILINE)
    for field in dataclasses.fields(report):
        assert f"`{field.name}`" in row


def test_old_pages_of_transcripts_are_removed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/kept.db"
    now = time.time()

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            key = MemoryKey("acme", "u1", "long")
            await converse(backend, key, range(150), ts=lambda number: now - (150 - number) * DAY)

    asyncio.run(fill())
    options = ["--url", url, "--transcripts-older-than", "20d"]
    dry = CliRunner().invoke(app, ["purge", *options, "--tenant", "acme", "-n"])
    assert dry.stdout == "Would be removed: 2 pages of transcripts\n"
    done = CliRunner().invoke(app, ["purge", *options, "--user", "acme:u1", "-v"])
    assert done.stdout == "acme:u1:long (transcript)\nRemoved: 2 pages of transcripts\n"

    async def left() -> list[tuple[int, str]]:
        async with stm_backends.open_backend(url) as backend:
            return await told(backend, MemoryKey("acme", "u1", "long"))

    assert asyncio.run(left()) == numbered(range(128, 150))
    refused = CliRunner().invoke(app, ["purge", *options])
    assert refused.exit_code == 2
    assert "--transcripts-older-than needs --tenant" in refused.stderr
