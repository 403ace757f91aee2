"""`stats` and `ls`: what is counted, in which form, and what happens to records that cannot be read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig
from stm_backends.admin import stats as admin
from stm_backends.backend import Backend
from stm_backends.cli import progress
from stm_backends.cli.app import app
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.records.keys import memory_key
from stm_backends.sealing.naming import KEYS_VARIABLE
from stm_backends.testing.memory_contract import until

TS = 1_760_000_000.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def on(url: str, work: Callable[[Backend], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with stm_backends.open_backend(url) as backend:
            await work(backend)

    asyncio.run(run())


async def converse(backend: Backend, key: MemoryKey, turns: int = 3) -> None:
    memory = backend.memory(key, ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=5)))
    for number in range(turns):
        await memory.add_turn(ConversationTurn(f"I want number {number}.", "Booked.", ts=TS + number))


async def degrade(backend: Backend, key: MemoryKey) -> None:
    """Store a conversation whose summarizer has failed too often."""
    document = await backend.sessions.export(key)
    document["body"]["health"] = "degraded"
    await backend.sessions.import_(document, on_conflict="replace")


async def damage(backend: Backend, key: MemoryKey) -> None:
    await backend.driver.delete(memory_key(key))
    await backend.driver.append(memory_key(key), b"damaged", initial_version="damaged", ttl=None)


KEYS = [MemoryKey("acme", "u1", "a:b"), MemoryKey("acme", "u1", "trip"), MemoryKey("acme", "u2", "trip")]
BOLT = MemoryKey("bolt", "u1", "trip")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two tenants: three conversations of three turns, one of them degraded, and one of another tenant."""

    async def fill(backend: Backend) -> None:
        for key in (*KEYS, BOLT):
            await converse(backend, key)
        await degrade(backend, KEYS[1])
        await backend.item_log(KEYS[0], "langchain").add([{"text": "Hello"}])
        await backend.state_store.save_memory_state("acme:u2:trip", {"turns": []})

    url = f"sqlite:///{tmp_path}/stm.db"
    on(url, fill)
    return url


def objects(result: Result, status: int = 0) -> list[dict[str, Any]]:
    assert result.exit_code == status, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_stats_of_a_tenant_sums_over_its_users(url: str) -> None:
    one, total = objects(cli("stats", "acme", "--json", "--url", url))
    assert one.pop("owner") == "acme"
    assert total.pop("owner") is None
    assert one == total
    stored = one.pop("bytes"), one.pop("tokens")
    assert one == {
        "users": 2,
        "conversations": 3,
        "turns": 9,
        "folded": 0,
        "dropped": 0,
        "last_activity": "2025-10-09T08:53:22Z",
        "health": {"healthy": 2, "retry": 0, "degraded": 1},
        "logs": 1,
        "states": 1,
        "graph_records": 0,
        "archived": 0,
        "waiting": 0,
        "pages": 0,
        "log_pages": 0,
        "cards": 3,
        "damaged": 0,
    }
    assert min(stored) > 100


@pytest.fixture
def long(tmp_path: Path) -> str:
    """A conversation of 80 turns, 75 of them in two pages."""

    async def fill(backend: Backend) -> None:
        memory = backend.memory(KEYS[1])
        for number in range(80):
            await memory.add_turn(ConversationTurn(f"I want number {number}.", "Booked.", ts=TS + number))
        await memory.flush()

    url = f"sqlite:///{tmp_path}/long.db"
    on(url, fill)
    return url


def test_stats_count_what_transcripts_and_the_catalogue_have(long: str) -> None:
    _, total = objects(cli("stats", "acme", "--json", "--url", long))
    counted = ("turns", "folded", "archived", "waiting", "pages", "cards")
    assert [total[name] for name in counted] == [5, 75, 75, 0, 2, 1]
    shown = cli("stats", "acme", "--url", long).stdout
    assert re.search(r"  in pages of transcripts +│ +75 │", shown)
    assert re.search(r"pages of transcripts +│ +2 │\n│ pages of logs +│ +0 │\n│ cards in", shown)


def test_stats_tell_pages_of_logs_from_those_of_transcripts(long: str) -> None:
    async def add(backend: Backend) -> None:
        log = backend.item_log(KEYS[1], "langchain")
        for number in range(300):
            await log.add([{"text": f"Hello {number}"}])

    on(long, add)
    for quick in ([], ["--quick"]):
        _, total = objects(cli("stats", "acme", *quick, "--json", "--url", long))
        assert [total[name] for name in ("pages", "log_pages", "logs")] == [2, 3, 1]


def test_stats_count_turns_that_wait_for_a_summary(tmp_path: Path) -> None:
    async def down(request: object) -> dict[str, str]:
        raise RuntimeError

    async def fill(backend: Backend) -> None:
        config = ShortTermMemoryConfig(
            "rolling_summary", recovery_backlog_limit=2, retry_attempts=0, transcript=True
        )
        memory = backend.memory(KEYS[1], config, summarizer=down)
        for number in range(20):
            await memory.add_turn(ConversationTurn(f"I want number {number}.", "Booked.", ts=TS + number))

        async def moved() -> bool:
            return len(await memory.turns()) == 7

        await until(moved)

    url = f"sqlite:///{tmp_path}/stm.db"
    on(url, fill)
    total = objects(cli("stats", "acme", "--json", "--url", url))[-1]
    assert [total[name] for name in ("turns", "folded", "archived", "waiting")] == [7, 0, 13, 13]


def test_quick_stats_read_the_catalogue_alone(long: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, load = list[str](), SqliteDriver.load

    async def noted(driver: SqliteDriver, key: Key, *, last: int | None = None) -> Record | None:
        read.append(key.scope.rpartition(":")[2])
        return await load(driver, key, last=last)

    monkeypatch.setattr(SqliteDriver, "load", noted)
    _, total = objects(cli("stats", "acme", "--quick", "--json", "--url", long))
    assert not {"memory", "page"} & {*read}
    assert read.count("card") == 1
    total.pop("last_activity")
    assert total == {
        "owner": None,
        "users": 1,
        "conversations": 1,
        "cards": 1,
        "listed_turns": 80,
        "pages": 2,
        "log_pages": 0,
        "logs": 0,
        "states": 0,
        "graph_records": 0,
        "damaged": 0,
    }
    shown = cli("stats", "--quick", "--url", url).stdout.splitlines()
    assert shown[0].split() == [
        *("USERS", "CONVS", "CARDS", "ALL", "TURNS", "PAGES", "LAST", "ACTIVITY"),
        "TENANT",
    ]
    assert shown[1].split()[:3] == ["2", "3", "3"]
    assert shown[2].split()[:5] == ["1", "1", "1", "3", "0"]


def test_an_unreadable_card_or_page_is_named(long: str) -> None:
    async def spoil(backend: Backend) -> None:
        for kind in ("card", "page"):
            name = (await backend.driver.scan(f"acme:u1:{kind}", limit=1)).names[0]
            await backend.driver.replace(
                Key(f"acme:u1:{kind}", name), b"spoilt", version="v", expect=ANY, ttl=None
            )

    on(long, spoil)
    done = cli("stats", "acme", "--quick", "--url", long)
    assert done.exit_code == 1
    assert "a card in the catalogue of acme:u1" in done.stderr


def test_quick_stats_of_degraded_conversations_are_refused(url: str) -> None:
    done = cli("stats", "--quick", "--degraded", "--url", url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "a card does not say the health" in done.stderr


def test_stats_without_arguments_sums_over_all_tenants(url: str) -> None:
    acme, bolt, total = objects(cli("stats", "--json", "--url", url))
    assert (acme["owner"], bolt["owner"]) == ("acme", "bolt")
    for name in ("users", "conversations", "turns", "bytes", "tokens"):
        assert acme[name] + bolt[name] == total[name]
    shown = cli("stats", "--url", url).stdout
    assert shown.splitlines()[0].split() == [
        *("USERS", "CONVS", "TURNS", "BYTES", "TOKENS", "DEGRADED", "LAST", "ACTIVITY", "TENANT"),
    ]
    assert "Total" in shown


def test_stats_reads_each_owner_given_once_and_in_order(url: str) -> None:
    rows = objects(cli("stats", "bolt", "acme:u1", "bolt", "--json", "--url", url))
    assert [row["owner"] for row in rows] == ["bolt", "acme:u1", None]
    assert [row["conversations"] for row in rows] == [1, 2, 3]


def test_the_figures_are_those_of_the_stored_bytes_and_of_show(url: str) -> None:
    (row,) = objects(cli("ls", "bolt:u1", "-l", "--json", "--url", url))
    stored: list[int] = []

    async def measure(backend: Backend) -> None:
        record = await backend.driver.load(memory_key(BOLT))
        assert record is not None
        stored.append(sum(map(len, (record.body or b"", *record.tail))))

    on(url, measure)
    assert row["bytes"] == stored[0]
    shown = json.loads(cli("show", "bolt:u1:trip", "--json", "--url", url).stdout)
    assert row["tokens"] == shown["tokens"]
    assert row["last_activity"] == shown["last_activity"] == "2025-10-09T08:53:22Z"


def test_stats_degraded_counts_degraded_conversations_only(url: str) -> None:
    acme, bolt, total = objects(cli("stats", "--degraded", "--json", "--url", url))
    assert (acme["users"], acme["conversations"], acme["turns"]) == (1, 1, 3)
    assert (bolt["users"], bolt["conversations"], bolt["bytes"]) == (0, 0, 0)
    assert total["health"] == {"healthy": 0, "retry": 0, "degraded": 1}


@pytest.mark.parametrize("whose", [(), ("acme",), ("acme:u1",)])
def test_ls_degraded_lists_degraded_conversations_of_all_users(url: str, whose: tuple[str, ...]) -> None:
    assert cli("ls", *whose, "--degraded", "--url", url).stdout == "acme:u1:trip\n"
    (row,) = objects(cli("ls", *whose, "--degraded", "-l", "--json", "--url", url))
    assert (row["key"], row["health"]) == ("acme:u1:trip", "degraded")
    nothing = cli("ls", "bolt", "--degraded", "--url", url)
    assert (nothing.stdout, nothing.stderr) == ("", "No conversation is degraded for bolt.\n")


def test_ls_without_arguments_lists_the_tenants(url: str) -> None:
    assert cli("ls", "--url", url).stdout == "acme\nbolt\n"
    assert objects(cli("ls", "--json", "--url", url)) == [
        {"key": "acme", "tenant": "acme"},
        {"key": "bolt", "tenant": "bolt"},
    ]


def test_ls_long_fits_80_columns_and_ends_with_the_key(url: str) -> None:
    for whose, keys in (
        ((), ["acme", "bolt"]),
        (("acme",), ["acme:u1", "acme:u2"]),
        (("acme:u1",), ["acme:u1:a%3Ab", "acme:u1:trip"]),
    ):
        result = cli("ls", "-l", *whose, "--url", url)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert [line.split()[-1] for line in lines[1:]] == keys
        assert max(map(len, lines)) <= 80
        assert "  2025-10-09T08:53Z  acme" in lines[1]


def test_ls_json_has_the_ids_as_they_are_and_the_key_to_type(url: str) -> None:
    first, second = objects(cli("ls", "acme:u1", "--json", "--url", url))
    ids = {"tenant": "acme", "user": "u1", "session": "a:b"}
    assert first == {"key": "acme:u1:a%3Ab", **ids, "logs": ["langchain"]}
    assert second["key"] == "acme:u1:trip"


@pytest.mark.parametrize("command", [("stats",), ("stats", "acme"), ("ls", "-l")])
def test_damaged_records_are_named_and_the_rest_is_counted(url: str, command: tuple[str, ...]) -> None:
    async def break_two(backend: Backend) -> None:
        await damage(backend, KEYS[0])
        log = Key("acme:u2:langchain", "a")
        await backend.driver.append(
            log, b"fine, because logs are measured only", initial_version="1", ttl=None
        )

    on(url, break_two)
    result = cli(*command, "--json", "--url", url)
    assert result.exit_code == 1
    assert "acme:u1:a%3Ab: sqlite." in result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows[0]["key" if command[0] == "ls" else "owner"].startswith("acme")
    assert rows[0]["conversations"] == 2
    assert rows[0]["damaged"] == 1


@pytest.mark.parametrize("command", [("stats", "--degraded"), ("ls", "--degraded")])
def test_a_damaged_turn_is_named_if_its_conversation_is_degraded(url: str, command: tuple[str, str]) -> None:
    async def damage_a_turn(backend: Backend, key: MemoryKey) -> None:
        await backend.driver.append(memory_key(key), b"damaged", initial_version="damaged", ttl=None)

    on(url, lambda backend: damage_a_turn(backend, KEYS[0]))
    assert cli(*command, "--url", url).exit_code == 0, "no turn of a healthy conversation is read"
    on(url, lambda backend: damage_a_turn(backend, KEYS[1]))
    result = cli(*command, "--url", url)
    assert result.exit_code == 1
    assert "acme:u1:trip: sqlite." in result.stderr


def test_only_the_first_damaged_records_are_named(tmp_path: Path) -> None:
    async def fill(backend: Backend) -> None:
        await converse(backend, MemoryKey("acme", "u", "good"))
        for number in range(25):
            await damage(backend, MemoryKey("acme", "u", f"s{number:02}"))

    url = f"sqlite:///{tmp_path}/stm.db"
    on(url, fill)
    result = cli("stats", "acme", "--json", "--url", url)
    assert result.exit_code == 1
    assert result.stderr.count("acme:u:s") == 20
    assert "and 5 records more" in result.stderr
    assert json.loads(result.stdout.splitlines()[0])["damaged"] == 25


def test_an_empty_datastore_is_said_to_be_empty(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    assert cli("ping", "--create", "--url", url).exit_code == 0
    for arguments, said in (
        (("ls",), "Nothing is stored.\n"),
        (("ls", "-l"), "Nothing is stored.\n"),
        (("ls", "--degraded"), "No conversation is degraded.\n"),
        (("stats",), "Nothing is stored.\n"),
    ):
        result = cli(*arguments, "--url", url)
        assert (result.exit_code, result.stderr) == (0, said)


def test_sealed_data_is_counted_with_its_keys_and_damaged_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    secret = base64.b64encode(bytes(range(32))).decode()
    keys.write_text(json.dumps({"primary": "k1", "keys": {"k1": secret}}))
    monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    file, url = tmp_path / "c.jsonl", f"sqlite:///{tmp_path}/sealed.db"
    file.write_text('{"session": "trip", "turns": [{"user": "To Zanzibar!", "assistant": "Booked."}]}\n')
    assert cli("replay", str(file), "--url", url, "--tenant", "acme", "--user", "ada").exit_code == 0

    first, _ = objects(cli("stats", "--json", "--url", url))
    assert (first["owner"], first["conversations"], first["turns"]) == ("acme", 1, 1)
    monkeypatch.delenv(KEYS_VARIABLE)
    without = cli("stats", "--json", "--url", url)
    assert without.exit_code == 1
    assert "acme:ada:trip: " in without.stderr
    assert json.loads(without.stdout.splitlines()[0])["damaged"] == 1


def test_a_conversation_without_times_has_no_last_activity(tmp_path: Path) -> None:
    async def fill(backend: Backend) -> None:
        await converse(backend, MemoryKey("acme", "u", "s"))
        # As another program stores turns: a memory would add the time.
        document = await backend.sessions.export(MemoryKey("acme", "u", "s"))
        for turn in document["turns"]:
            turn["ts"] = 0.0
        await backend.sessions.import_(document, on_conflict="replace")

    url = f"sqlite:///{tmp_path}/stm.db"
    on(url, fill)
    (row,) = objects(cli("ls", "acme:u", "-l", "--json", "--url", url))
    assert row["last_activity"] is None
    assert cli("ls", "acme:u", "-l", "--url", url).stdout.splitlines()[1].split()[-2:] == ["-", "acme:u:s"]


def test_a_long_count_reports_progress_beside_the_result(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    result = cli("stats", "--json", "--url", url)
    assert "6 records" in result.stderr.splitlines()
    assert len(objects(result)) == 3


def on_terminal(*arguments: str, stdout: int | None = None) -> tuple[str, str]:
    """Run a command whose standard error is a terminal; returns what it printed on that and on a pipe."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, "-m", "stm_backends.cli", *arguments],
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            text=True,
            check=True,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux raises it at the end
            while part := terminal.read(100_000):
                shown += part
    return shown.decode(), done.stdout or ""


def test_lines_for_a_pipe_are_not_mixed_with_the_progress(url: str) -> None:
    shown, piped = on_terminal("stats", "--json", "--url", url, stdout=subprocess.PIPE)
    assert [json.loads(line)["owner"] for line in piped.splitlines()] == ["acme", "bolt", None]
    assert "reading" in shown
    assert "owner" not in shown


@pytest.mark.parametrize("command", [("ls", "-l"), ("stats",)])
def test_lines_on_a_terminal_stay_above_the_progress(url: str, command: tuple[str, ...]) -> None:
    shown, _ = on_terminal(*command, "--url", url)
    assert "reading" in shown
    # Each line as a terminal shows it: what was drawn before an erasure of the line is gone.
    lines = [re.sub(r"\x1b\[[\d;?]*\w", "", re.sub(r".*\x1b\[2K", "", line)) for line in shown.split("\n")]
    keys = [line.split()[-1] for line in lines if "2025-10-09T08:53Z" in line]
    assert keys == ["acme", "bolt"]
    assert not [line for line in lines if "reading" in line and "2025" in line]


async def test_no_more_records_are_held_than_are_read_at_once() -> None:
    """Of any number: a record is let go before the ninth after it is loaded."""
    async with stm_backends.open_backend("memory") as backend:
        for number in range(40):
            await converse(backend, MemoryKey("acme", "u", f"s{number:02}"), turns=1)
        # The catalogue, which loads them too, is written by then.
        await backend.close()
        await backend.open()
        loads = 0
        load = backend.driver.load

        async def counting(key: Key) -> Any:
            nonlocal loads
            # The memories may still be listing their user.
            loads += key.scope.endswith(":memory")
            return await load(key)

        backend.driver.load = counting
        seen = 0
        async for found in backend.stats.conversations("acme", "u"):
            assert isinstance(found, admin.ConversationStats)
            assert found.key.session_id == f"s{seen:02}"
            seen += 1
            assert loads - seen < admin.AT_ONCE
        assert (seen, loads) == (40, 40)


@pytest.mark.parametrize(
    ("command", "said"),
    [("stats", "Interrupted. 5 records had been read."), ("ls", "Interrupted. 1 line had been printed.")],
)
def test_ctrl_c_says_how_much_was_read(
    url: str, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    read = admin.Stats.of_user

    async def interrupted(stats: admin.Stats, tenant: str, user: str, *more: Any) -> admin.Totals:
        if user == "u2":
            raise KeyboardInterrupt
        return await read(stats, tenant, user, *more)

    monkeypatch.setattr(admin.Stats, "of_user", interrupted)
    result = cli(command, "acme", *(["-l"] if command == "ls" else []), "--url", url)
    assert (result.exit_code, result.stderr.splitlines()) == (130, [said])


@pytest.mark.parametrize("arguments", [("ls", "a:b:c"), ("stats", "a:b:c"), ("stats", "acme", " ")])
def test_what_is_no_owner_is_refused(url: str, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments, "--url", url)
    assert result.exit_code == 2
    assert "as in acme:u123" in result.stderr
    assert result.stdout == ""


def test_a_user_of_a_tenant_that_is_given_too_is_counted_once(url: str) -> None:
    *rows, total = objects(cli("stats", "acme:u1", "acme", "--json", "--url", url))
    assert [row["owner"] for row in rows] == ["acme"]
    assert total["conversations"] == 3


def test_stats_degraded_says_so_in_its_title_and_when_nothing_is_stored(url: str) -> None:
    assert "acme, degraded only" in cli("stats", "acme", "--degraded", "--url", url).stdout
    assert "Total, degraded only" in cli("stats", "--degraded", "--url", url).stdout
    assert "degraded only" not in cli("stats", "acme", "--url", url).stdout
    typo = cli("stats", "typo", "--degraded", "--url", url)
    assert typo.exit_code == 1
    assert "nothing is stored for typo" in typo.stderr
