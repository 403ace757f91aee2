"""The other commands: what they print, what they refuse, and with which exit status."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import typer.main
import typer.testing
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import (
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
)
from stm_backends.cli import datastores, main
from stm_backends.cli.app import Later, app
from stm_backends.cli.files import writing
from stm_backends.drivers.contract import Key, Record
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.errors import Unavailable
from stm_backends.extras import install_command
from stm_backends.records.directory import Directory
from stm_backends.records.keys import memory_key

TRIP = MemoryKey("acme", "u1", "trip")
MADE = (TRIP, MemoryKey("acme", "u1", "a:b"), MemoryKey("acme", "u2", "other"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with three conversations of five turns each, three of them in full."""

    async def fill(url: str) -> None:
        config = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=3))
        async with stm_backends.open_backend(url) as backend:
            for key in MADE:
                memory = backend.memory(key, config, summarizer=ExtractiveSummarizer())
                for number in range(5):
                    await memory.add_turn(ConversationTurn(f"I want number {number}.", f"Booked {number}."))
                await memory.flush()

    url = f"sqlite:///{tmp_path}/stm.db"
    asyncio.run(fill(url))
    return url


def cli(*arguments: str, answer: str = "") -> Result:
    # A command ends its process, and leaves what it has set there for pytest.
    with patch.dict(os.environ):
        return CliRunner().invoke(app, arguments, input=answer)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def listed_by(result: Result) -> list[str]:
    """The lines of `ls`, whose exit status says whether anything is stored for its argument."""
    assert result.exit_code == (0 if result.stdout else 1), result.output
    return result.stdout.splitlines()


def exported(*, body: dict[str, Any] | None = None, ts: float = 0.0) -> dict[str, Any]:
    """A conversation as a file of exports has it."""
    turn = {"turn_id": "1", "user_message": "Hello", "assistant_response": "Hi", "ts": ts}
    key = {"tenant_id": "acme", "user_id": "u1", "session_id": "made"}
    return {"format": "stm-session", "version": 1, "key": key, "body": body or {}, "turns": [turn]}


def written(tmp_path: Path, *documents: dict[str, Any]) -> Path:
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return file


def stored(tmp_path: Path, *documents: dict[str, Any]) -> str:
    url = f"sqlite:///{tmp_path}/made.db"
    lines(cli("import", str(written(tmp_path, *documents)), "--url", url))
    return url


def damage(url: str, session: str, entry: bytes = b"damaged") -> None:
    """Put in a conversation's place one whose only turn is this entry."""

    async def work() -> None:
        async with stm_backends.open_backend(url) as backend:
            key = memory_key(MemoryKey("acme", "u1", session))
            await backend.driver.delete(key)
            await backend.driver.append(key, entry, initial_version="damaged", ttl=None)

    asyncio.run(work())


def entry_with(ts: float) -> bytes:
    """A stored turn with a time that this version does not store."""
    turn = {"turn_id": "1", "user_message": "Hello", "assistant_response": "Hi", "ts": ts}
    return f"stm/1 turn\n{json.dumps(turn)}".encode()


def blank(url: str, session: str) -> None:
    """Move a conversation to where an earlier version kept one without a session id."""

    async def work() -> None:
        async with stm_backends.open_backend(url) as backend:
            key = memory_key(MemoryKey("acme", "u1", session))
            record = await backend.driver.load(key)
            assert record is not None
            await backend.driver.delete(key)
            await backend.driver.append(
                Key(key.scope, "%"), record.tail[0], initial_version="blank", ttl=None
            )

    asyncio.run(work())


# Looking


def test_show_gives_a_readable_view_of_a_conversation(url: str):
    shown = cli("show", "acme:u1:trip", "--url", url, "--full-zone-turns", "2").stdout

    for part in (
        "acme:u1:trip",
        "healthy",
        "3 in full, 2 in the summary, 0 dropped",
        "User: I want number 1.",
        "pending (not summarized yet)",
        "I want number 4.",
    ):
        assert part in shown
    assert shown.index("pending") < shown.index("I want number 2.") < shown.index("recent")


def test_show_says_when_it_guesses_how_many_turns_are_recent(url: str):
    guessed = cli("show", "acme:u1:trip", "--url", url).stdout
    assert "the newest 5 turns (default; set yours with --full-zone-turns)" in guessed
    told = cli("show", "acme:u1:trip", "--url", url, "--full-zone-turns", "2").stdout
    assert "the default" not in told
    assert "I want number 2." in told


def test_what_a_terminal_would_obey_or_cannot_show_is_shown_escaped(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/stm.db"

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            memory = backend.memory(MemoryKey("t", "u", "s\x1b"), ShortTermMemoryConfig("truncation"))
            await memory.add_turn(ConversationTurn("\x1b[2Jnothing\ud800\0", "[bold]brackets[/nope]"))

    asyncio.run(fill())

    assert listed_by(cli("ls", "t:u", "--url", url)) == ["t:u:s%1B"]
    shown = "\n".join(lines(cli("show", "t:u:s\x1b", "--url", url)))
    assert "\\x1b[2Jnothing\\ud800\\x00" in shown
    assert "[bold]brackets[/nope]" in shown
    assert "\x1b" not in shown


def test_other_commands_accept_the_keys_that_ls_prints(url: str):
    assert sorted(listed_by(cli("ls", "acme", "--url", url))) == ["acme:u1", "acme:u2"]
    listed = listed_by(cli("ls", "acme:u1", "--url", url))
    assert sorted(listed) == ["acme:u1:a%3Ab", "acme:u1:trip"]
    assert all(cli("show", key, "--url", url).exit_code == 0 for key in listed)
    assert listed_by(cli("ls", "nobody", "--url", url)) == []


HOSTILE = ("x\nvictim", "x\u2028y", "x\u202ey", "\U000e0041", "tab\there", "100%0A", "\ud800")


def test_ids_that_break_lines_are_listed_on_one_line_and_accepted_so(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/stm.db"

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            for key in (MemoryKey("victim", "u", "s"), *(MemoryKey("acme", user, "s") for user in HOSTILE)):
                memory = backend.memory(key, ShortTermMemoryConfig("truncation"))
                await memory.add_turn(ConversationTurn("Hello", "Hi"))

    asyncio.run(fill())
    users = listed_by(cli("ls", "acme", "--url", url))
    assert len(users) == len(HOSTILE)
    assert all(line.startswith("acme:") and line.isprintable() for line in users)
    # As `stm-backends ls acme | while read user; do stm-backends erase "$user" -y; done` does.
    for user in users:
        assert lines(cli("erase", user, "-y", "--url", url))[0].startswith("1 record erased: 1 conversation;")
    assert listed_by(cli("ls", "acme", "--url", url)) == []
    assert listed_by(cli("ls", "victim", "--url", url)) == ["victim:u"]


def test_the_url_may_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STM_BACKENDS_URL", url)

    assert len(listed_by(cli("ls", "acme"))) == 2
    assert lines(cli("ping", "memory://"))[0].startswith("memory: answered in ")


def test_show_says_what_the_first_line_of_a_replayed_summary_is(tmp_path: Path):
    body = {"summary": "[turns 0-8]\nThey met."}
    url = stored(tmp_path, exported(body=body))

    shown = "\n".join(lines(cli("show", "acme:u1:made", "--url", url)))
    assert "added by replay: the turns that it covers" in shown
    assert "[turns 0-8]" in shown
    lines(cli("import", str(written(tmp_path, exported())), "--url", url, "--replace"))
    assert "added by replay" not in cli("show", "acme:u1:made", "--url", url).stdout


@pytest.mark.parametrize(
    ("ts", "said"),
    [
        (1_700_000_000.0, "2023-11-14 22:13:20 UTC"),
        (1.7e12, "2023-11-14 22:13:20 UTC"),
        *((ts, None) for ts in (0.0, 1e20, math.nan, math.inf, -1e15, True)),
    ],
)
def test_show_has_the_time_of_a_stored_turn_unless_it_is_unknown(tmp_path: Path, ts: float, said: str | None):
    url = stored(tmp_path, exported())
    damage(url, "made", entry_with(ts))

    shown = "\n".join(lines(cli("show", "acme:u1:made", "--url", url)))

    found = re.search(r"time +(.*? UTC)", shown)
    assert (found and found[1]) == said
    assert "Hello" in shown


@pytest.mark.parametrize("ts", [1.7e12, 1e20, math.nan, math.inf, -1e15, True])
def test_what_was_stored_with_an_odd_time_is_exported_and_imported(tmp_path: Path, ts: float):
    url = stored(tmp_path, exported())
    damage(url, "made", entry_with(ts))

    (line,) = lines(cli("export", "acme:u1:made", "--url", url))

    (turn,) = json.loads(line, parse_constant=pytest.fail)["turns"]
    assert turn["ts"] == (1.7e9 if ts == 1.7e12 else 0.0)
    file = written(tmp_path, json.loads(line))
    assert cli("import", str(file), "--url", url, "--replace").exit_code == 0


def test_the_error_for_an_unreadable_conversation_names_show(url: str):
    damage(url, "trip")

    result = cli("show", "acme:u1:trip", "--url", url)

    assert result.exit_code == 1
    assert "sqlite.show: " in result.stderr
    assert "export" not in result.stderr
    assert "newer" not in result.stderr


def test_only_what_another_version_wrote_is_answered_with_an_upgrade(url: str):
    damage(url, "trip", b'stm/9 turn\n{"turn_id": "x"}')
    assert "Upgrade stm-backends" in cli("show", "acme:u1:trip", "--url", url).stderr

    damage(url, "trip", b"damaged")
    assert "pgrade" not in cli("show", "acme:u1:trip", "--url", url).stderr


def test_ping_sets_up_what_is_not_there_only_if_told_to(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/new.db"

    assert cli("ping", "--url", url).stderr.startswith(
        f"Error: sqlite.open: there is no database file at {tmp_path}/new.db\n"
    )
    assert not (tmp_path / "new.db").exists()
    assert lines(cli("ping", "--create", "--url", url))[0].startswith("sqlite: answered in ")
    assert (tmp_path / "new.db").exists()


def test_ping_loads_a_record_of_the_tenant_that_is_named(url: str, monkeypatch: pytest.MonkeyPatch):
    loaded: list[Key] = []
    load = SqliteDriver.load

    async def noting(driver: SqliteDriver, key: Key) -> Record | None:
        loaded.append(key)
        return await load(driver, key)

    monkeypatch.setattr(SqliteDriver, "load", noting)
    assert cli("ping", "--tenant", "b%3Ac", "--url", url).exit_code == 0
    assert loaded == [Key("b%3Ac::users", "%")]
    assert cli("ping", "--tenant", "acme:u1", "--url", url).exit_code == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///a/b.db?synchronous=full", "sqlite:///a/b.db"),
        ("postgresql://me:secret@host/db?schema=a&password=secret", "postgresql://host/db?schema=a"),
        ("redis://:secret@host:7/0?key_prefix=x:", "redis://host:7/0?key_prefix=x:"),
        ("redis://user:hunter2?x@host/0", "redis:…"),
        ("redis://user:hunter2/x@host/0", "redis:…"),
        ("redis://host/0?password=a@hunter2", "redis:…"),
        ("dynamodb://t?endpoint_url=http://h:1&secret_access_key=s", "dynamodb://t?endpoint_url=http://h:1"),
        ("dynamodb://t?endpoint_url=http://u:s@h:1", "dynamodb:…"),
        ("memory", "memory"),
    ],
)
def test_a_datastore_is_shown_with_its_location_but_no_secret(url: str, said: str):
    assert datastores.shown(url) == said


def test_ping_says_how_long_an_answer_took(url: str):
    for arguments in ((url,), ("--url", url), ("sqlite", "--url", url)):
        assert re.fullmatch(r"sqlite: answered in [\d.]+ ms", lines(cli("ping", *arguments))[0])


@pytest.mark.parametrize(
    "arguments", [("ping",), ("ls", "a"), ("show", "a:b:c"), ("export", "a:b:c"), ("erase", "a", "--yes")]
)
def test_a_database_that_is_not_there_is_refused_and_not_created(tmp_path: Path, arguments: tuple[str, ...]):
    result = cli(*arguments, "--url", f"sqlite:///{tmp_path}/typo.db")

    assert result.exit_code == 1
    assert "there is no database file" in result.stderr
    assert "stm-backends ping" not in result.stderr
    assert "Check the URL" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_drivers_shows_the_whole_install_line_at_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    missing = {"aiobotocore", "asyncpg", "pymongo", "redis"}
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name in missing else found(name, package),
    )

    shown = cli("drivers")

    assert shown.exit_code == 0
    for extra in ("dynamo", "mongo", "postgres", "redis"):
        assert f"  {install_command('stm-backends', extra)}\n" in shown.stdout
        assert f"the backend '{extra}' needs the module" in shown.stdout
    assert "…" not in shown.stdout
    assert "rediss+sentinel://" in shown.stdout
    assert "sqlite" in shown.stdout
    assert "memory" in shown.stdout
    table = shown.stdout[: shown.stdout.index("└")]
    assert max(map(len, table.splitlines())) <= 80


def test_drivers_as_json_is_every_fact_of_the_table(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "redis" else found(name, package),
    )

    by_name = {one["name"]: one for one in json.loads(cli("drivers", "--json").stdout)}

    assert {"memory", "sqlite", "redis", "postgres", "mongo", "dynamo"} <= by_name.keys()
    assert by_name["sqlite"] == {
        "name": "sqlite",
        "distribution": "stm-backends",
        "version": stm_backends.__version__,
        "schemes": ["sqlite"],
        "state": "ready",
        "reason": "",
        "contract": 1,
        "install": "",
    }
    assert by_name["redis"]["state"] == "missing extra"
    assert by_name["redis"]["install"] == install_command("stm-backends", "redis")
    assert by_name["redis"]["reason"].endswith(by_name["redis"]["install"])


def test_drivers_says_what_is_broken_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metadata = tmp_path / "cracked-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cracked\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stm_backends]\ncracked = cracked_module\n")
    (tmp_path / "cracked_module.py").write_text("raise RuntimeError('[red]out of order')\n")
    monkeypatch.syspath_prepend(tmp_path)

    shown = cli("drivers")

    assert shown.exit_code == 1
    assert "broken" in shown.stdout
    assert "[red]out" in shown.stdout


def test_the_version_is_shown():
    assert lines(cli("--version")) == [f"stm-backends {stm_backends.__version__}"]


def test_every_command_explains_itself():
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        shown = cli(name, "--help")
        assert shown.exit_code == 0
        assert shown.stdout.count("Usage") == 1
        assert "<bool>" not in shown.stdout
    assert "<bool>" not in cli("--help").stdout


def test_the_help_lists_the_first_sentences_of_each_command():
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    for name, listed in program.commands.items():
        assert isinstance(listed, Later)
        assert listed.loaded.name == name
        assert listed.help == " ".join(listed.loaded.help.partition("\n\n")[0].split())


def test_the_help_imports_no_command():
    program = """
import contextlib, io, json, sys
from stm_backends.cli import main
sys.argv = ["stm-backends", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main()
assert "conformance" in shown.getvalue()
print(json.dumps([name for name in sys.modules if name.startswith("stm_backends")]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(json.loads(ran.stdout)) == {
        *("stm_backends", "stm_backends.errors", "stm_backends.extras", "stm_backends.sealing"),
        *("stm_backends.sealing.keys", "stm_backends.sealing.naming"),
        *("stm_backends.cli", "stm_backends.cli.app", "stm_backends.cli.options"),
    }


def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    program = typer.main.get_command(app)
    monkeypatch.setattr(importlib, "import_module", interrupted)
    with monkeypatch.context() as made:
        made.setattr(typer.testing, "_get_command", lambda _: program)
        shown = CliRunner().invoke(app, ["ls", "acme"])
    assert (shown.exit_code, shown.stderr) == (130, "Interrupted.\n")


# Moving


def test_ls_lists_the_framework_logs_that_export_writes(url: str, tmp_path: Path):
    async def add() -> None:
        async with stm_backends.open_backend(url) as backend:
            await backend.item_log(TRIP, "langchain").add([{"text": "Hello"}])
            await backend.item_log(MemoryKey("acme", "u1", "else"), "openai-agents").add([{"text": "Hello"}])

    before = lines(cli("ls", "acme:u1", "--url", url))
    asyncio.run(add())
    listed = cli("ls", "acme:u1", "--url", url)
    assert (lines(listed), listed.stderr) == ([*before, "acme:u1:else"], "")
    of = {
        one["session"]: one.get("logs")
        for one in map(json.loads, lines(cli("ls", "acme:u1", "--json", "--url", url)))
    }
    assert (of["trip"], of["else"]) == (["langchain"], ["openai-agents"])
    assert lines(cli("ls", "acme:u1", "-l", "--url", url))[-1].split() == [*"-----", "acme:u1:else"]
    written = cli("export", "--user", "acme:u1", "--url", url, "-o", str(tmp_path / "out.jsonl"))
    assert "Not written" not in written.stderr
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["log"] for one in exported if one["format"] == "stm-log"] == ["openai-agents", "langchain"]
    # Erasing a conversation erases what frameworks keep of it, and erasing the user erases the rest.
    assert cli("erase", TRIP.composite(), "--yes", "--url", url).exit_code == 0
    assert TRIP.composite() not in (left := lines(cli("ls", "acme:u1", "--url", url)))
    assert left[-1] == "acme:u1:else"
    assert cli("erase", "acme:u1", "--yes", "--url", url).exit_code == 0
    assert cli("ls", "acme:u1", "--url", url).stderr == "Error: nothing is stored for acme:u1\n"


def test_what_export_writes_import_reads(url: str, tmp_path: Path):
    file, elsewhere = tmp_path / "out.jsonl", f"sqlite:///{tmp_path}/elsewhere.db"

    lines(cli("export", "--user", "acme:u1", "--url", url, "-o", str(file)))
    lines(cli("import", str(file), "--url", elsewhere))

    exported = [json.loads(line) for line in file.read_text().splitlines()]
    again = [json.loads(line) for line in lines(cli("export", "--user", "acme:u1", "--url", elsewhere))]
    assert again == exported
    assert len(exported) == 2


def test_an_export_names_what_it_cannot_read_and_goes_on_with_the_rest(url: str, tmp_path: Path):
    damage(url, "a:b")
    file = tmp_path / "out.jsonl"

    result = cli("export", "--user", "acme:u1", "--url", url, "-o", str(file))

    assert result.exit_code == 1
    assert "acme:u1:a%3Ab: " in result.stderr
    assert "1 conversation written" in result.stderr
    assert "1 conversation could not be exported" in result.stderr
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["key"]["session_id"] == "trip"


def test_a_failed_export_keeps_the_old_file_and_leaves_no_temporary_one(url: str, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "keep.jsonl"
    file.write_text("precious")

    for key in ("acme:u1:nobody", "acme:u1:"):
        assert cli("export", key, "--url", url, "-o", str(file)).exit_code > 0
    empty = cli("export", "--user", "acme:typo", "--url", url, "-o", str(file))
    assert empty.exit_code == 1
    assert "there is no conversation to export" in empty.stderr
    assert (
        cli("export", "acme:u1:trip", "--url", f"sqlite:///{tmp_path}/no.db", "-o", str(file)).exit_code == 1
    )

    assert file.read_text() == "precious"
    assert list(folder.iterdir()) == [file]


def test_an_export_is_private_and_an_existing_file_keeps_its_permissions(url: str, tmp_path: Path):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("old")
    old.chmod(0o640)
    for file, mode in ((old, 0o640), (new, 0o600)):
        lines(cli("export", "acme:u1:trip", "--url", url, "-o", str(file)))
        assert json.loads(file.read_text())["key"]["session_id"] == "trip"
        assert file.stat().st_mode & 0o777 == mode


def test_the_temporary_file_of_an_export_is_private_too(tmp_path: Path):
    with writing(tmp_path / "new.jsonl") as out:
        out.write("secret")
        (beside,) = tmp_path.iterdir()
        assert beside.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_an_export_to_a_symbolic_link_is_refused(url: str, tmp_path: Path, exists: bool):
    file, link = tmp_path / "victim", tmp_path / "link"
    if exists:
        file.write_text("precious")
    link.symlink_to(file)
    result = cli("export", "acme:u1:trip", "--url", url, "-o", str(link))
    assert result.exit_code == 2
    assert f"{link} is a symbolic link" in result.stderr
    assert file.exists() == exists
    assert not exists or file.read_text() == "precious"


def test_an_export_to_a_device_writes_to_it_and_leaves_it_one(url: str):
    lines(cli("export", "acme:u1:trip", "--url", url, "-o", os.devnull))

    assert Path(os.devnull).is_char_device()


def test_a_place_that_cannot_be_written_to_is_one_clear_message(url: str, tmp_path: Path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"turns": [{"user": "a", "assistant": "b"}]}\n')
    for place, said in ((tmp_path / "no" / "x.jsonl", "No such file"), (tmp_path, "Is a directory")):
        for arguments in (
            ("export", "acme:u1:trip", "-o", str(place)),
            ("replay", str(file), "--json", str(place)),
        ):
            result = cli(*arguments, "--url", url)
            assert result.exit_code == 2
            assert f"Error: {place}: {said}" in result.stderr
            assert result.stderr.count("\n") == 1
            assert "Traceback" not in result.output


def test_a_dash_is_standard_output_and_input(url: str, tmp_path: Path):
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"

    exported = cli("export", "acme:u1:trip", "--url", url, "-o", "-").stdout
    lines(cli("import", "-", "--url", elsewhere, answer=exported))

    assert cli("export", "acme:u1:trip", "--url", elsewhere).stdout == exported


def test_a_conversation_without_a_session_id_is_in_nobodys_way(url: str):
    blank(url, "trip")

    listed = cli("ls", "acme:u1", "--url", url)
    assert listed.exit_code == 0
    assert listed.stdout.splitlines() == ["acme:u1:a%3Ab"]
    assert "blank session id" in listed.stderr

    exported = cli("export", "--user", "acme:u1", "--url", url)
    assert exported.exit_code == 1
    assert len(exported.stdout.splitlines()) == 1
    assert "a conversation of acme:u1 with a blank session id" in exported.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "{file}:3: not JSON"),
        (b"[]", "{file}:3: the line is not a JSON object"),
        (b"{}", "{file}:3: this is not an exported conversation"),
        (b'{"format": "stm-session", "version": 1}', "{file}:3: "),
        (b'{"messages": [{"role": "user", "content": "Hi"}]}', "stm-backends replay FILE"),
        (b'{"a": "\xff"}', "{file}: not UTF-8"),
        (None, "{file}:3: "),
    ],
)
def test_an_import_with_a_bad_line_names_it_and_stores_nothing(
    url: str, tmp_path: Path, line: bytes | None, said: str
):
    good = cli("export", "acme:u1:trip", "--url", url).stdout.encode()
    file, elsewhere = tmp_path / "x.jsonl", f"sqlite:///{tmp_path}/elsewhere.db"
    # Empty lines count. Where there is no other line, the first one comes again.
    file.write_bytes(b"\n" + good + (good if line is None else line))

    refused = cli("import", str(file), "--url", elsewhere)

    assert refused.exit_code == 2
    assert said.replace("{file}", str(file)) in refused.stderr
    file.write_bytes(good)
    lines(cli("import", str(file), "--url", elsewhere))


def test_an_import_that_meets_one_conversation_stores_none_of_the_others(url: str, tmp_path: Path):
    file, elsewhere = tmp_path / "x.jsonl", f"sqlite:///{tmp_path}/elsewhere.db"
    lines(cli("export", "acme:u2:other", "--url", url, "-o", str(file)))
    lines(cli("import", str(file), "--url", elsewhere))
    lines(cli("export", "acme:u1:trip", "acme:u2:other", "--url", url, "-o", str(file)))

    refused = cli("import", str(file), "--url", elsewhere)

    assert refused.exit_code == 2
    assert f"{file}:2: acme:u2:other exists already; nothing was imported" in refused.stderr
    assert listed_by(cli("ls", "acme:u1", "--url", elsewhere)) == []


def test_an_import_with_a_turn_too_large_for_the_backend_stores_nothing(tmp_path: Path):
    large = exported()
    large["key"]["session_id"] = "large"
    large["turns"][0]["user_message"] = "x" * 5000
    url = f"sqlite:///{tmp_path}/small.db?max_entry_bytes=1000"

    refused = cli("import", str(written(tmp_path, exported(), large)), "--url", url)

    assert refused.exit_code == 1
    assert "at most 1,000 are stored" in refused.stderr
    assert listed_by(cli("ls", "acme:u1", "--url", url)) == []


def test_a_merge_with_nothing_new_says_that_nothing_was_missing(url: str, tmp_path: Path):
    file, elsewhere = tmp_path / "x.jsonl", f"sqlite:///{tmp_path}/elsewhere.db"
    lines(cli("export", "--user", "acme:u1", "--url", url, "-o", str(file)))

    first = cli("import", str(file), "--merge", "--url", elsewhere)
    again = cli("import", str(file), "--merge", "--url", elsewhere)

    assert (first.exit_code, first.stderr) == (
        0,
        (
            "2 conversations merged, 2 of them changed\n"
            "Conversations that got a turn do not expire; --ttl sets a time to live.\n"
        ),
    )
    assert (again.exit_code, again.stderr) == (0, "2 conversations merged, none of them changed\n")
    limited = cli("import", str(file), "--merge", "--ttl", "90d", "--url", elsewhere)
    assert limited.stderr.splitlines()[1] == (
        "Conversations that got a turn expire in 90d; 2 unchanged conversations kept the old time to live. "
        "`stm-backends expire` sets it for all."
    )


def test_an_import_onto_what_exists_is_refused_unless_told(url: str, tmp_path: Path):
    file = tmp_path / "out.jsonl"
    lines(cli("export", TRIP.composite(), "--url", url, "-o", str(file)))

    refused = cli("import", str(file), "--url", url)

    assert refused.exit_code == 2
    assert f"{file}:1: " in refused.stderr
    assert "--merge" in refused.stderr
    for how in ("--merge", "--replace"):
        lines(cli("import", str(file), "--url", url, how))
        assert lines(cli("export", TRIP.composite(), "--url", url)) == file.read_text().splitlines()


def test_export_wants_either_conversations_or_a_user(url: str):
    for arguments in ((), (TRIP.composite(), "--user", "acme:u1"), ("--user", "acme")):
        assert cli("export", *arguments, "--url", url).exit_code == 2


# Erasing


def test_erase_asks_and_keeps_everything_unless_told_yes(url: str):
    refused = cli("erase", "acme", "--url", url, answer="n\n")

    assert refused.exit_code == 1
    assert "everything of the tenant acme" in refused.stdout
    assert len(listed_by(cli("ls", "acme", "--url", url))) == 2


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("acme:u1:trip", ["acme:u1:a%3Ab", "acme:u2:other"]),
        ("acme:u1", ["acme:u2:other"]),
        ("acme", []),
        ("ac", ["acme:u1:a%3Ab", "acme:u1:trip", "acme:u2:other"]),
    ],
)
def test_erase_takes_what_was_named_and_nothing_else(url: str, what: str, left: list[str]):
    assert cli("erase", what, "--yes", "--url", url).exit_code == (1 if what == "ac" else 0)

    listed = [key for user in ("acme:u1", "acme:u2") for key in listed_by(cli("ls", user, "--url", url))]
    assert sorted(listed) == left


# Misuse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("relpay",), "replay"),
        (("ping", "sqlit"), "Did you mean 'sqlite'"),
        (("ping", "redsi://user:hunter2@host/0"), "Did you mean 'redis'"),
        (("schema", "sqlte"), "Did you mean 'sqlite'"),
        (("conformance", "sqlit", "--url", "sqlit:///x.db"), "Did you mean 'sqlite'"),
        (
            ("conformance", "memory", "--url", "memory://typo", "--clause", "driver.resnt"),
            "no clause is called 'driver.resnt'. Did you mean driver.resent?",
        ),
        (("ping",), "STM_BACKENDS_URL"),
        (("show", "one-part", "--backend", "memory"), "write tenant:user:session"),
        (("erase", "a:b:c:d", "--backend", "memory"), "write tenant:user:session"),
        (("ls", " ", "--backend", "memory"), "blank"),
        (("ls", "a:b:c", "--backend", "memory"), "is a conversation"),
        (("ls", "", "--backend", "memory"), "as in acme:u123"),
        (("erase", "", "--yes", "--backend", "memory"), "as in acme:u123"),
        (("show", "a:b:", "--backend", "memory"), "as in acme:u123:chat_001"),
        (("export", "a:b", "--backend", "memory"), "as in acme:u123:chat_001"),
        (("replay", "nowhere.jsonl", "--strategy", "none"), "truncation"),
        (("import", "nowhere.jsonl", "--backend", "memory"), "nowhere.jsonl: No such file"),
        (("import", "x", "--merge", "--replace", "--backend", "memory"), "not both"),
        (("replay", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("replay", "nowhere.jsonl", "--pods", "0"), "--pods"),
    ],
)
def test_misuse_is_one_clear_message_and_exit_status_2(arguments: tuple[str, ...], said: str):
    result = cli(*arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert "hunter2" not in result.output
    assert result.stdout == ""


def test_a_replay_on_a_backend_that_pods_cannot_share_is_refused(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"turns": [{"user": "a", "assistant": "b"}]}\n')

    result = cli("replay", str(file), "--backend", "memory")

    assert result.exit_code == 2
    assert "one process only" in result.stderr


def test_a_session_that_cannot_be_a_key_is_refused_before_anything_starts(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"session": "x" * 2000, "turns": [{"user": "a", "assistant": "b"}]}))

    result = cli("replay", str(file))

    assert result.exit_code == 2
    assert "2,000 bytes" in result.stderr


def test_a_datastore_that_fails_is_exit_status_1_with_a_remedy(tmp_path: Path):
    (tmp_path / "no.db").write_text("this is not a database" * 100)

    result = cli("ls", "acme", "--url", f"sqlite:///{tmp_path}/no.db")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: sqlite.open: ")
    assert "Traceback" not in result.output
    assert "right file" in result.stderr
    assert "newer" not in result.stderr


def test_a_missing_extra_is_answered_with_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "typer", None)

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "needs typer, which is not installed" in said
    assert install_command("stm-backends", "cli") in said

    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit):
        main()
    assert "needs typer and rich, which are not installed" in capsys.readouterr().err


def test_ctrl_c_while_the_program_starts_shows_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    class Starting(ModuleType):
        @property
        def app(self) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "stm_backends.cli.app", Starting("starting"))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_erasure_that_fails_halfway_says_so(url: str, monkeypatch: pytest.MonkeyPatch):
    async def unavailable(directory: Directory, tenant: str, user: str) -> None:
        raise Unavailable("the server is down", backend="sqlite", operation="delete")

    monkeypatch.setattr(Directory, "forget", unavailable)
    result = cli("erase", "acme", "-y", "--url", url)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "Nothing was changed" not in said
    assert "run the command again to erase the rest" in said
