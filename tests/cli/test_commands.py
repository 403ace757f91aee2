"""The other commands: what they print, what they refuse, and with which exit status."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

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
from stm_backends.cli import main
from stm_backends.cli.app import app

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
    return CliRunner().invoke(app, arguments, input=answer)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


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


def test_what_a_terminal_would_obey_or_cannot_show_is_shown_escaped(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/stm.db"

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            memory = backend.memory(MemoryKey("t", "u", "s\x1b"), ShortTermMemoryConfig("truncation"))
            await memory.add_turn(ConversationTurn("\x1b[2Jnothing\ud800\0", "[bold]brackets[/nope]"))

    asyncio.run(fill())

    assert lines(cli("ls", "t:u", "--url", url)) == ["t:u:s\\x1b"]
    shown = "\n".join(lines(cli("show", "t:u:s\x1b", "--url", url)))
    assert "\\x1b[2Jnothing\\ud800\\x00" in shown
    assert "[bold]brackets[/nope]" in shown
    assert "\x1b" not in shown


def test_ls_lists_users_and_conversations_in_the_form_that_other_commands_take(url: str):
    assert sorted(lines(cli("ls", "acme", "--url", url))) == ["acme:u1", "acme:u2"]
    listed = lines(cli("ls", "acme:u1", "--url", url))
    assert sorted(listed) == ["acme:u1:a%3Ab", "acme:u1:trip"]
    assert all(cli("show", key, "--url", url).exit_code == 0 for key in listed)
    assert lines(cli("ls", "nobody", "--url", url)) == []


def test_the_url_may_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STM_BACKENDS_URL", url)

    assert len(lines(cli("ls", "acme"))) == 2
    assert lines(cli("ping", "memory://"))[0].startswith("memory: answered in ")


def test_ping_says_how_long_an_answer_took(url: str):
    for arguments in ((url,), ("--url", url), ("sqlite", "--url", url)):
        assert lines(cli("ping", *arguments))[0].startswith("sqlite: answered in ")


def test_drivers_lists_what_is_installed():
    shown = cli("drivers")

    assert shown.exit_code == 0
    assert "sqlite" in shown.stdout
    assert "memory" in shown.stdout


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
    assert "[red]out of" in shown.stdout


def test_the_version_is_shown():
    assert lines(cli("--version")) == [f"stm-backends {stm_backends.__version__}"]


def test_every_command_explains_itself():
    for command in ("replay", "drivers", "ping", "show", "ls", "export", "import", "erase"):
        shown = cli(command, "--help")
        assert shown.exit_code == 0
        assert shown.stdout.count("Usage") == 1


# Moving


def test_what_export_writes_import_reads(url: str, tmp_path: Path):
    file, elsewhere = tmp_path / "out.jsonl", f"sqlite:///{tmp_path}/elsewhere.db"

    lines(cli("export", "--user", "acme:u1", "--url", url, "-o", str(file)))
    lines(cli("import", str(file), "--url", elsewhere))

    exported = [json.loads(line) for line in file.read_text().splitlines()]
    again = [json.loads(line) for line in lines(cli("export", "--user", "acme:u1", "--url", elsewhere))]
    assert again == exported
    assert len(exported) == 2


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


def test_a_file_that_is_no_export_is_refused_by_file_and_line(url: str, tmp_path: Path):
    file = tmp_path / "bad.jsonl"
    for line, wrong in (
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "not an exported conversation"),
    ):
        file.write_text(f"\n{line}\n")
        refused = cli("import", str(file), "--url", url)
        assert refused.exit_code == 2
        assert f"{file}:2: " in refused.stderr
        assert wrong in refused.stderr


def test_export_wants_either_conversations_or_a_user(url: str):
    for arguments in ((), (TRIP.composite(), "--user", "acme:u1"), ("--user", "acme")):
        assert cli("export", *arguments, "--url", url).exit_code == 2


# Erasing


def test_erase_asks_and_keeps_everything_unless_told_yes(url: str):
    refused = cli("erase", "acme", "--url", url, answer="n\n")

    assert refused.exit_code == 1
    assert "everything of the tenant acme" in refused.stdout
    assert len(lines(cli("ls", "acme", "--url", url))) == 2


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
    lines(cli("erase", what, "--yes", "--url", url))

    listed = [key for user in ("acme:u1", "acme:u2") for key in lines(cli("ls", user, "--url", url))]
    assert sorted(listed) == left


# Misuse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("relpay",), "replay"),
        (("ping", "sqlit"), "Did you mean 'sqlite'"),
        (("ping",), "STM_BACKENDS_URL"),
        (("show", "one-part", "--backend", "memory"), "three parts"),
        (("show", "a:b:c", "--backend", "memory"), "ls TENANT:USER"),
        (("erase", "a:b:c:d", "--backend", "memory"), "three parts"),
        (("ls", " ", "--backend", "memory"), "blank"),
        (("ls", "a:b:c", "--backend", "memory"), "names a conversation"),
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


def test_what_is_secret_in_a_url_is_not_printed():
    result = cli("ping", "redsi://user:hunter2@host/0")

    assert result.exit_code == 2
    assert "hunter2" not in result.output


def test_a_missing_extra_is_answered_with_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "typer", None)

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    assert 'pip install "stm-backends[cli]"' in capsys.readouterr().err
