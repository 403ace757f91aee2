"""Ctrl-C: a real signal to a real process at a known point; what is said, and that it is true."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from tests.support.command_line import cli, generated, without_coverage
from tests.support.selection import few

BACKENDS: Final = Path(__file__).parent / "backends"
PATIENCE_S: Final = 60.0


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    """A path on which the backend that waits is installed."""
    metadata = tmp_path / "waiting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stm_backends]\nwaiting = waiting\n")
    return os.pathsep.join(filter(None, [str(BACKENDS), str(tmp_path), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with five conversations of three turns each."""

    async def fill(url: str) -> None:
        async with stm_backends.open_backend(url) as backend:
            for session in range(5):
                key = MemoryKey("acme", "u1", f"s{session}")
                memory = backend.memory(key, ShortTermMemoryConfig("truncation"))
                for number in range(3):
                    await memory.add_turn(ConversationTurn(f"I want {number}.", f"Booked {number}."))

    url = f"sqlite:///{tmp_path}/full.db"
    asyncio.run(fill(url))
    return url


def at(operation: str, path: Path) -> str:
    return f"waiting://{operation}/{path}"


def interrupted(path: Path, python_path: str, *arguments: object, processes: int = 1) -> tuple[int, str, str]:
    """Run a command until so many processes wait at `path`, interrupt it as a terminal does; what it says."""
    command = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "stm_backends", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**without_coverage(), "PYTHONPATH": python_path, "COLUMNS": "120"},
        start_new_session=True,
        # Where this test itself runs in the background, an interrupt would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 -- as above
    )
    until = time.monotonic() + PATIENCE_S
    while command.poll() is None and len(list(path.parent.glob(f"{path.name}.waiting-*"))) < processes:
        assert time.monotonic() < until, "the command never came to the point"
        time.sleep(0.01)
    # To the whole group, as a terminal does: the pods of a replay, too.
    os.killpg(command.pid, signal.SIGINT)
    said, wrong = command.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in wrong
    return command.returncode, said, wrong


def listed(url: str) -> list[str]:
    return cli("ls", "acme:u1", "--url", url).stdout.splitlines()


def exported(url: str) -> list[str]:
    """Return what is exported, in an order of its own."""
    return sorted(cli("export", "--user", "acme:u1", "--url", url).stdout.splitlines())


def test_an_import_says_how_many_it_has_done_and_a_merge_does_the_rest(
    url: str, tmp_path: Path, python_path: str
) -> None:
    file, path = tmp_path / "out.jsonl", tmp_path / "to.db"
    assert cli("export", "--user", "acme:u1", "--url", url, "-o", file).returncode == 0

    # The eighth turn is the second one of the third conversation.
    status, _, said = interrupted(path, python_path, "import", file, "--url", at("append-8", path))

    assert status == 130
    assert said.endswith(
        "Interrupted. 2 of 5 lines had been imported; run the command again with --merge for the rest.\n"
    )
    target = f"sqlite:///{path}"
    assert len(listed(target)) == 3
    assert cli("import", file, "--merge", "--url", target).returncode == 0
    assert exported(target) == exported(url)


@pytest.mark.full
@pytest.mark.parametrize("how", ["--merge", "--replace"])
def test_an_import_onto_what_exists_is_completed_by_the_same_command(
    url: str, tmp_path: Path, python_path: str, how: str
) -> None:
    file, path = tmp_path / "out.jsonl", tmp_path / "to.db"
    assert cli("export", "--user", "acme:u1", "--url", url, "-o", file).returncode == 0

    status, _, said = interrupted(path, python_path, "import", file, how, "--url", at("append-8", path))

    assert status == 130
    assert "2 of 5 lines had been imported; run the command again for the rest." in said
    assert cli("import", file, how, "--url", f"sqlite:///{path}").returncode == 0
    assert exported(f"sqlite:///{path}") == exported(url)


def test_an_import_that_is_interrupted_before_it_stores_anything_says_so(
    url: str, tmp_path: Path, python_path: str
) -> None:
    file, path = tmp_path / "out.jsonl", tmp_path / "to.db"
    assert cli("export", "--user", "acme:u1", "--url", url, "-o", file).returncode == 0

    # Whether the conversations are there already is asked before anything is stored.
    status, _, said = interrupted(path, python_path, "import", file, "--url", at("load-3", path))

    assert status == 130
    assert said.endswith("Interrupted. Nothing was imported; run the command again.\n")
    assert listed(f"sqlite:///{path}") == []


def test_an_export_leaves_the_file_as_it_was_and_says_so(url: str, tmp_path: Path, python_path: str) -> None:
    file, path = tmp_path / "out.jsonl", tmp_path / "full.db"
    file.write_text("what stood there before")
    arguments = ("export", "--user", "acme:u1", "--url", at("load-3", path))

    status, _, said = interrupted(path, python_path, *arguments, "-o", file)

    assert status == 130
    assert said.endswith(f"Interrupted. {file} was not written; run the command again.\n")
    assert file.read_text() == "what stood there before"
    assert not list(tmp_path.glob(".stm-*"))


def test_an_export_to_standard_output_says_how_many_it_has_written(
    url: str, tmp_path: Path, python_path: str
) -> None:
    path = tmp_path / "full.db"
    arguments = ("export", "--user", "acme:u1", "--url", at("load-3", path))

    status, written, said = interrupted(path, python_path, *arguments)

    assert status == 130
    assert len(written.splitlines()) == 2
    assert "Interrupted. 2 conversations had been written; run the command again for all of them." in said


def test_an_interrupted_copy_reports_its_progress_and_can_be_resumed(
    url: str, tmp_path: Path, python_path: str
) -> None:
    path = tmp_path / "to.db"
    arguments = ("copy", url, at("append-1", path), "--tenant", "acme")

    status, _, said = interrupted(path, python_path, *arguments)

    assert status == 130
    assert "run the command again to resume." in said
    assert cli("copy", url, f"sqlite:///{path}", "--tenant", "acme").returncode == 0
    assert exported(f"sqlite:///{path}") == exported(url)


def test_an_interrupted_reseal_reports_its_progress_and_can_be_repeated(
    url: str, tmp_path: Path, python_path: str
) -> None:
    (tmp_path / "migrating.py").write_text(
        "from stm_backends import Sealing, StaticKeys\n"
        "keys = StaticKeys({'k1': bytes(32)}, primary='k1')\n"
        "sealing, strict = Sealing(keys, accept_clear=True), Sealing(keys)\n"
    )
    path = tmp_path / "full.db"
    command = ("reseal", "--tenant", "acme", "--sealing", "migrating:sealing")
    before = exported(url)

    status, _, said = interrupted(path, python_path, *command, "--url", at("replace-3", path))

    assert status == 130
    assert re.search(r"Interrupted. \d records? had been resealed; run the command again for the rest.", said)
    assert cli(*command, "--url", url, PYTHONPATH=python_path).returncode == 0
    strict = ("--sealing", "migrating:strict")
    after = cli("export", "--user", "acme:u1", "--url", url, *strict, PYTHONPATH=python_path)
    assert sorted(after.stdout.splitlines()) == before


@pytest.mark.full
def test_a_replay_says_how_many_turns_it_has_added_and_how_to_start_over(
    tmp_path: Path, python_path: str
) -> None:
    file, path = generated(tmp_path, conversations=8, turns=6), tmp_path / "to.db"
    options = ("--pods", 2, "--concurrency", 1)

    # Each pod adds four turns, one at a time, and waits in the fifth.
    status, _, said = interrupted(
        path, python_path, "replay", file, "--url", at("append-5", path), *options, processes=2
    )

    assert status == 130
    assert said.endswith(
        "Interrupted. 8 of 48 turns had been added and are kept; "
        "run the command again with --replace to start over.\n"
    )
    assert cli("ls", "demo:replay", "--url", f"sqlite:///{path}").stdout
    again = cli("replay", file, "--url", f"sqlite:///{path}", "--replace", *options)
    assert again.returncode == 0, again.stderr


@pytest.mark.full
def test_a_replay_in_a_temporary_database_says_that_it_is_gone(tmp_path: Path) -> None:
    file = generated(tmp_path, conversations=4, turns=5_000)
    command = subprocess.Popen(
        [sys.executable, "-m", "stm_backends", "replay", str(file), "--pods", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in without_coverage().items() if name != "STM_BACKENDS_URL"}
        | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 -- as above
    )
    assert command.stderr is not None
    # The first line that tells how far it is.
    assert "of 20,000 turns" in command.stderr.readline()
    os.killpg(command.pid, signal.SIGINT)
    written, said = command.communicate(timeout=PATIENCE_S)
    assert "(temporary)" in written.splitlines()[0]
    assert command.returncode == 130
    assert "turns had been added; the temporary database is removed. Run the command again." in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("stm-replay-*"))


@pytest.mark.parametrize("where", few(1, ["append-2", "append-1", "append-5"]))
def test_a_run_of_the_suite_says_that_it_was_interrupted(
    tmp_path: Path, python_path: str, where: str
) -> None:
    """In the first look at a driver, too, which takes any other cancellation for the driver's."""
    path = tmp_path / "try.db"
    arguments = ("conformance", "waiting", "--url", at(where, path), "--clause", "driver.fold")

    status, _, said = interrupted(path, python_path, *arguments)

    assert status == 130
    assert said.endswith(
        "The report leaves out the checks that did not run. Run the command again for all.\n"
    )


def test_an_interrupted_purge_says_how_many_and_is_completed(tmp_path: Path, python_path: str) -> None:
    path = tmp_path / "full.db"
    options = ("--tenant", "acme", "--older-than", "90d")

    async def fill() -> None:
        async with stm_backends.open_backend(f"sqlite:///{path}") as backend:
            for session in range(40):
                memory = backend.memory(
                    MemoryKey("acme", "u1", f"s{session}"), ShortTermMemoryConfig("truncation")
                )
                await memory.add_turn(ConversationTurn("question", "answer", ts=1_500_000_000.0))

    asyncio.run(fill())
    status, _, said = interrupted(path, python_path, "purge", *options, "--url", at("replace-21", path))

    assert status == 130
    gone = 40 - sum("question" in line for line in exported(f"sqlite:///{path}"))
    assert 0 < gone < 40
    told = re.search(
        r"Interrupted\. At least (\d+) records removed; run the command again for the rest", said
    )
    # Those in work at that moment may have been removed, too.
    assert told
    assert 0 < int(told[1]) <= gone
    assert cli("purge", *options, "--url", f"sqlite:///{path}").returncode == 0
    assert not any("question" in line for line in exported(f"sqlite:///{path}"))
