"""The commands `copy` and `schema`: what arrives, what is said, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import (
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.cli.app import app
from stm_backends.drivers import ABSENT
from stm_backends.drivers.contract import Key, Record
from stm_backends.records import keys, operations


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def process(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def copied(source: str, target: str, *options: str, status: int = 0) -> Result:
    done = cli("copy", source, target, *options)
    assert done.exit_code == status, done.output
    return done


def rows(done: Result) -> dict[str, int]:
    """Return the rows of the table at the end."""
    lines = [line.strip("│ ").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return {name.strip(): int(count.strip().replace(",", "")) for name, count in lines}


def url_of(folder: Path, name: str) -> str:
    return f"sqlite:///{folder}/{name}.db"


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A database with three conversations of two users, one of them half summarized, and some states."""

    async def fill(url: str) -> None:
        config = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=3))
        async with stm_backends.open_backend(url) as backend:
            for user, session in (("u1", "trip"), ("u1", "a:b"), ("u2", "other")):
                key = MemoryKey("acme", user, session)
                memory = backend.memory(key, config, summarizer=ExtractiveSummarizer())
                for number in range(5):
                    await memory.add_turn(ConversationTurn(f"I want number {number}.", f"Booked {number}."))
                await memory.flush()
            for state in ("acme:u1:trip", "kv:v1:acme:u1:trip:cart", "nobody's"):
                await backend.state_store.save_memory_state(state, {"state": state})

    url = url_of(tmp_path, "from")
    asyncio.run(fill(url))
    return url


async def _held(url: str) -> dict[Key, Record]:
    found: dict[Key, Record] = {}
    async with stm_backends.open_backend(url) as backend:
        async for user in backend.sessions.users("acme"):
            for kind in keys.KINDS:
                scope = keys.scope("acme", user, kind)
                async for name in operations.names(backend.driver, scope):
                    record = await backend.driver.load(Key(scope, name))
                    assert record is not None
                    found[Key(scope, name)] = record
    return found


def held(url: str) -> dict[Key, Record]:
    """Return everything of the tenant, as it is stored."""
    return asyncio.run(_held(url))


def write(url: str, operation: str, *arguments: Any, **options: Any) -> None:
    async def work() -> None:
        async with stm_backends.open_backend(url) as backend:
            await getattr(backend.driver, operation)(*arguments, **options)

    asyncio.run(work())


TRIP = keys.memory_key(MemoryKey("acme", "u1", "trip"))


# What arrives


def test_both_ends_show_list_and_export_the_same_after_a_copy(source: str, tmp_path: Path) -> None:
    target = url_of(tmp_path, "to")

    done = copied(source, target, "--tenant", "acme")

    assert rows(done) == {"copied": 5, "read back and identical": 5}
    assert held(target) == held(source)
    for arguments in (
        ("ls", "acme"),
        ("ls", "acme:u1"),
        ("show", "acme:u1:trip"),
        ("export", "--user", "acme:u1"),
        ("export", "--user", "acme:u2"),
    ):
        one, other = (cli(*arguments, "--url", url) for url in (source, target))
        assert one.exit_code == 0
        assert one.stdout
        # Without times of turns, the last activity is rounded up, but not beyond now.
        outputs = [re.sub("last activity.*", "", end.stdout) for end in (one, other)]
        assert outputs[0] == outputs[1]
    assert cli("erase", "acme", "--yes", "--url", target).stdout.startswith("5 records erased: ")


def test_users_tenants_and_other_states_may_be_given_together(source: str, tmp_path: Path) -> None:
    options = ("--user", "acme:u2", "--user", "acme:u1", "--other-states")
    done = copied(source, url_of(tmp_path, "to"), *options)

    assert "Copying 6 records of acme:u2, acme:u1 and other states from sqlite:///" in done.stdout
    assert "\nThe catalogue of conversations comes along, and is not counted.\n" in done.stdout
    assert rows(done)["copied"] == 6


def test_a_copy_claims_no_more_than_it_was_told_to_bring(source: str, tmp_path: Path) -> None:
    # The source has another state under a key that names no tenant and user.
    done = copied(source, url_of(tmp_path, "to"), "--tenant", "acme")
    assert "All data of acme is at the target, byte for byte." in done.stdout
    assert "Not copied: states at the source whose keys name no tenant" in done.stdout

    done = copied(source, url_of(tmp_path, "to"), "--user", "acme:u1", "--other-states")
    assert "All data of acme:u1 and other states is at the target" in done.stdout
    assert "Not copied" not in done.stdout

    done = copied(url_of(tmp_path, "to"), url_of(tmp_path, "third"), "--other-states")
    assert "All data of other states is at" in done.stdout
    # There is nothing else to leave out.
    write(source, "delete", Key(keys.OTHER_BLOBS, keys.name("nobody's")))
    assert "Not copied" not in copied(source, url_of(tmp_path, "to"), "--tenant", "acme").stdout


def test_the_numbers_of_a_copy_are_written_to_a_file(source: str, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    copied(source, url_of(tmp_path, "to"), "--tenant", "acme", "--json", str(file))
    assert json.loads(file.read_text()) == {
        "ok": True,
        "records": {"copied": 5, "verified": 5},
        "other_states_left_out": True,
    }


def test_it_is_said_that_copies_never_expire_unless_told(source: str, tmp_path: Path) -> None:
    assert "do not expire" in copied(source, url_of(tmp_path, "to"), "--tenant", "acme").stdout
    assert "do not expire" not in copied(source, url_of(tmp_path, "to"), "--tenant", "acme").stdout
    done = copied(source, url_of(tmp_path, "mortal"), "--tenant", "acme", "--ttl", "10m")
    assert "do not expire" not in done.stdout
    with closing(sqlite3.connect(tmp_path / "mortal.db")) as connection:
        left = connection.execute(
            "SELECT count(*) FROM stm_record WHERE expires > ? AND scope NOT LIKE '%::users' "
            "AND scope NOT LIKE '%:card' AND scope NOT LIKE '%:recent'",
            (time.time() + 300,),
        ).fetchone()
    assert left == (5,)


def test_a_copy_may_set_up_what_its_target_needs(source: str, tmp_path: Path) -> None:
    copied(source, url_of(tmp_path, "to"), "--tenant", "acme", "--create")

    assert held(url_of(tmp_path, "to")) == held(source)


# What is in trouble


def test_what_differs_is_left_and_named_until_told_to_replace_it(source: str, tmp_path: Path) -> None:
    target = url_of(tmp_path, "to")
    write(target, "append", TRIP, b"from elsewhere", initial_version="other", ttl=None)

    done = copied(source, target, "--tenant", "acme", status=1)

    assert "acme:u1:trip: differs at the target" in done.stderr
    assert rows(done)["different at the target, left unchanged"] == 1
    assert "--replace" in done.stdout
    assert "The target does not have all data of the source." in done.stdout
    assert held(target)[TRIP] == Record("other", None, (b"from elsewhere",))
    assert rows(copied(source, target, "--tenant", "acme", "--replace"))["replaced"] == 1
    assert held(target) == held(source)


def test_half_a_record_is_named_and_the_rest_is_copied(source: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "from.db", isolation_level=None)) as connection:
        connection.execute(
            "DELETE FROM stm_entry WHERE seq = (SELECT max(seq) FROM stm_entry) AND record = "
            "(SELECT id FROM stm_record WHERE scope = ? AND name = ?)",
            TRIP,
        )

    done = copied(source, url_of(tmp_path, "to"), "--tenant", "acme", status=1)

    assert "acme:u1:trip: sqlite.load: a part of the record is missing" in done.stderr
    assert rows(done) == {
        "copied": 4,
        "unreadable, or too large for the target": 1,
        "read back and identical": 4,
    }


def test_many_in_trouble_are_not_all_named(tmp_path: Path) -> None:
    source, target = url_of(tmp_path, "from"), url_of(tmp_path, "to")

    async def fill(url: str) -> None:
        async with stm_backends.open_backend(url) as backend:
            for number in range(25):
                key = keys.memory_key(MemoryKey("acme", "u1", f"s{number}"))
                await backend.driver.append(key, url.encode(), initial_version=url, ttl=None)

    for url in (source, target):
        asyncio.run(fill(url))

    done = copied(source, target, "--user", "acme:u1", status=1)

    assert done.stderr.count("differs at the target") == 20
    assert "and 5 records more" in done.stderr


def test_an_owner_with_nothing_is_a_failure_and_the_others_are_copied(source: str, tmp_path: Path) -> None:
    target = url_of(tmp_path, "to")

    done = copied(source, target, "--tenant", "acme", "--user", "acme:u11", "--tenant", "acne", status=1)
    assert "Error: acne: not found at the source" in done.stderr
    assert "acme:u11" not in done.stderr  # a user of a tenant that is copied as a whole
    assert held(target) == held(source)

    done = copied(source, target, "--user", "acme:u11", status=1)
    assert "Error: acme:u11: not found at the source" in done.stderr
    assert "There was nothing to copy." in done.stdout


def test_all_tenants_and_other_states_are_copied_together(source: str, tmp_path: Path) -> None:
    added = [
        Key(keys.OTHER_BLOBS, "loose"),
        keys.directory_key("bolt", "u"),
        keys.memory_key(MemoryKey("bolt", "u", "s")),
    ]
    for key in added:
        write(source, "append", key, b"x", initial_version="1", ttl=None)
    target = url_of(tmp_path, "to")

    done = copied(source, target, "--all")

    assert "records of acme, bolt and other states from" in done.stdout
    assert held(target) == held(source)
    listed = cli("ls", "--url", target).stdout, cli("ls", "bolt:u", "--url", target).stdout
    assert listed == ("acme\nbolt\n", "bolt:u:s\n")
    assert rows(copied(source, target, "--all"))["identical already"] == rows(done)["copied"]


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ((), "nothing to copy: give --all, --tenant TENANT or --user TENANT:USER", 2),
        (("--all", "--tenant", "acme"), "give --all, or some of --tenant and --user, not both", 2),
        (("--tenant", "acme:u1"), "--tenant is written TENANT", 2),
        (("--user", "acme"), "--user is written TENANT:USER", 2),
        (("--user", "acme:u1:trip"), "is a conversation", 2),
        (("--tenant", "acme", "--ttl", "0s"), "--ttl must be a positive number", 2),
        (("--tenant", "acme", "--ttl", "600"), "--ttl is a number and a unit", 2),
    ],
)
def test_misuse_is_told_before_anything_is_made(
    source: str, tmp_path: Path, arguments: tuple[str, ...], said: str, status: int
) -> None:
    done = copied(source, url_of(tmp_path, "to"), *arguments, status=status)

    assert said in done.stderr
    assert not (tmp_path / "to.db").exists()


def test_a_mistyped_end_is_told_by_its_name_and_nothing_is_made(source: str, tmp_path: Path) -> None:
    target = url_of(tmp_path, "to")
    tenant = ("--tenant", "acme")

    done = copied(url_of(tmp_path, "typo"), target, *tenant, status=1)
    assert "Error: the source, sqlite:///" in done.stderr
    assert "there is no database file" in done.stderr
    done = copied(source, f"sqllite:///{tmp_path}/to.db", *tenant, status=2)
    assert "Error: the target, sqllite:///" in done.stderr
    assert "Did you mean 'sqlite'?" in done.stderr
    done = copied(source, f"sqlite:///{tmp_path}/nowhere/to.db", *tenant, status=1)
    assert "Error: the target, sqlite:///" in done.stderr
    assert "until this command ends" in copied(source, "memory://", *tenant, status=2).stderr
    assert "are the same" in copied(source, source, *tenant, status=2).stderr
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["from.db"]


def many(url: str, conversations: int, turns: int) -> None:
    """Store so many conversations of three users, each with a body and a saved state."""

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            for number in range(conversations):
                user, session = f"u{number % 3}", f"s{number}"
                key = keys.memory_key(MemoryKey("acme", user, session))
                await backend.driver.replace(key, b"body", version=session, expect=ABSENT, ttl=None)
                for turn in range(turns):
                    await backend.driver.append(key, b"%d" % turn, initial_version="", ttl=None)
                await backend.state_store.save_memory_state(f"acme:{user}:{session}", {})

    asyncio.run(fill())


def written(path: Path) -> int:
    """Return how many bodies and entries a database holds that is being written to."""
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("SELECT count(*) FROM stm_entry").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def reached(path: Path, enough: float, copying: subprocess.Popen[str]) -> None:
    """Wait until so many bodies and entries are there, or the copy has ended."""
    while copying.poll() is None and written(path) < enough:
        time.sleep(0.01)


def test_a_target_that_fails_in_the_middle_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    source, target = url_of(tmp_path, "from"), url_of(tmp_path, "to")
    many(source, 150, 10)

    copying = process("-m", "stm_backends", "copy", source, f"{target}?deadline_s=0.5", "--tenant", "acme")
    reached(tmp_path / "to.db", 150, copying)
    with closing(sqlite3.connect(tmp_path / "to.db", timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        _, said = copying.communicate(timeout=60)

    assert copying.returncode == 1
    assert "the database is locked by another process" in said
    found = re.search(r"(\d+) records had been copied; run the command again to resume", said)
    assert found is not None
    again = rows(copied(source, target, "--tenant", "acme"))
    assert again["identical already"] >= int(found[1]) > 0
    assert again["read back and identical"] == 300
    assert held(target) == held(source)


# Kills


def test_a_copy_that_was_killed_is_completed_by_the_same_command(tmp_path: Path) -> None:
    source, target = url_of(tmp_path, "from"), url_of(tmp_path, "to")
    conversations, turns = 150, 10
    many(source, conversations, turns)
    kills = 0
    for share in (0.2, 0.6):
        # Records and entries that are there, of all that will be.
        enough = share * conversations * (turns + 2)
        copying = process("-m", "stm_backends", "copy", source, target, "--tenant", "acme")
        try:
            reached(tmp_path / "to.db", enough, copying)
        finally:
            copying.kill()
            copying.communicate()
        kills += copying.returncode < 0
        # A user is listed before anything of theirs is there, so `held` finds all that was written.
        found = held(target)
        assert found
        with closing(sqlite3.connect(tmp_path / "to.db")) as connection:
            (stored,) = connection.execute(
                "SELECT count(*) FROM stm_record WHERE scope NOT LIKE '%::users'"
            ).fetchone()
        assert len(found) == stored
    assert kills == 2

    done = copied(source, target, "--tenant", "acme")

    assert held(target) == held(source)
    made = rows(done)
    assert made["read back and identical"] == 2 * conversations
    assert made["identical already"] > 0
    assert made["copied"] > 0
    # All is right now, and stays untouched.
    assert rows(copied(source, target, "--tenant", "acme")) == {
        "copied": 0,
        "identical already": 2 * conversations,
        "read back and identical": 2 * conversations,
    }


def test_a_write_by_another_process_is_reported_and_copied_by_the_next_run(
    source: str, tmp_path: Path
) -> None:
    target = url_of(tmp_path, "to")
    program = (
        "import asyncio, sys\n"
        "from stm_backends import *\n"
        "async def main():\n"
        "    config = ShortTermMemoryConfig('truncation', MemoryBudget(full_zone_turns=10**6))\n"
        "    async with open_backend(sys.argv[1]) as backend:\n"
        "        memory = backend.memory(MemoryKey('acme', 'u1', 'trip'), config)\n"
        "        while True:\n"
        "            await memory.add_turn(ConversationTurn('More?', 'Yes.'))\n"
        "            print('.', flush=True)\n"
        "            await asyncio.sleep(0.002)\n"
        "asyncio.run(main())\n"
    )
    writer = process("-c", program, source)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == ".\n"
        done = copied(source, target, "--tenant", "acme", status=1)
    finally:
        writer.kill()
        writer.communicate()

    assert "acme:u1:trip: added to at the source during the copy" in done.stderr
    assert "run the command again" in done.stdout
    assert rows(done)["added to at the source during the copy"] == 1
    assert rows(copied(source, target, "--tenant", "acme"))["extended by missing entries"] == 1
    assert held(target) == held(source)


# Beside it


def test_a_schema_is_printed_to_be_handed_to_the_datastore(tmp_path: Path) -> None:
    done = cli("schema", "sqlite")
    assert done.exit_code == 0
    assert cli("schema", "--url", url_of(tmp_path, "made")).stdout == done.stdout
    with closing(sqlite3.connect(tmp_path / "made.db")) as connection:
        connection.executescript(done.stdout)
    write(f"{url_of(tmp_path, 'made')}?must_exist=true", "load", TRIP)


def test_a_backend_without_a_schema_says_so_in_a_line_and_prints_nothing() -> None:
    for name in ("memory", "memory://"):
        done = cli("schema", name)
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == "The backend 'memory' needs no setup.\n"


def test_every_command_that_may_set_a_datastore_up_takes_create(source: str, tmp_path: Path) -> None:
    for command_name in ("replay", "import", "copy", "conformance"):
        assert "--create" in cli(command_name, "--help").stdout
    exported = tmp_path / "out.jsonl"
    assert cli("export", "acme:u1:trip", "--url", source, "-o", str(exported)).exit_code == 0
    done = cli("import", str(exported), "--url", url_of(tmp_path, "to"), "--create")
    assert done.stderr == "1 conversation imported\n"
    assert json.loads(exported.read_text())["key"]["session_id"] == "trip"
