"""What commands say, and their exit status, if nothing is stored under the name that they were given."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.cli.app import app
from stm_backends.sealing.naming import KEYS_VARIABLE


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with one conversation."""
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)

    async def fill(url: str) -> None:
        async with stm_backends.open_backend(url) as backend:
            memory = backend.memory(MemoryKey("acme", "u1", "chat"), ShortTermMemoryConfig("truncation"))
            await memory.add_turn(ConversationTurn("question", "answer"))

    url = f"sqlite:///{tmp_path}/stm.db"
    asyncio.run(fill(url))
    return url


NAMED = [
    ("ls", "{}"),
    ("ls", "-l", "{}"),
    ("ls", "--degraded", "{}"),
    ("stats", "{}"),
    ("stats", "acme", "{}"),
    ("erase", "{}", "-y"),
]
OPTIONS = [("purge",), ("purge", "--older-than", "90d", "--dry-run"), ("expire", "--ttl", "90d"), ("reseal",)]


@pytest.mark.parametrize("typo", ["acmee", "acme:u2"])
@pytest.mark.parametrize("command", [*NAMED, *OPTIONS], ids=" ".join)
def test_a_name_without_data_is_named_and_exit_status_1(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], typo: str
) -> None:
    if command == ("reseal",):
        (tmp_path / "keys.json").write_text(json.dumps({"primary": "k", "keys": {"k": "A" * 43 + "="}}))
        monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys.json"))
        command = (*command, "--json", str(tmp_path / "numbers.json"))
    if command[0] in {"purge", "expire", "reseal"}:
        command = (*command, "--user" if ":" in typo else "--tenant", typo)
    result = cli(*(one.format(typo) for one in command), "--url", url)
    assert result.exit_code == 1, result.output
    assert f"nothing is stored for {typo}" in result.stderr
    if command == ("stats", "{}"):
        assert not result.stdout
    if command[0] == "reseal":
        assert json.loads((tmp_path / "numbers.json").read_text())["ok"] is False


def test_a_missing_conversation_has_the_same_exit_status(url: str) -> None:
    for command in (("show", "acme:u1:none"), ("export", "acme:u1:none"), ("erase", "acme:u1:none", "-y")):
        assert cli(*command, "--url", url).exit_code == 1


def test_a_copy_does_not_claim_data_of_a_name_that_has_none(url: str, tmp_path: Path) -> None:
    target = f"sqlite:///{tmp_path}/copy.db"
    numbers = tmp_path / "numbers.json"
    result = cli("copy", url, target, "--tenant", "acme", "--tenant", "typo", "--json", str(numbers))
    assert result.exit_code == 1
    assert json.loads(numbers.read_text())["ok"] is False
    assert "typo: not found at the source" in result.stderr
    assert "All data of acme is at the target" in result.stdout


def test_a_receipt_never_replaces_another(url: str, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    receipt.write_text("the first")
    result = cli("erase", "acme", "-y", "--receipt", str(receipt), "--url", url)
    assert result.exit_code == 2
    assert "exists already, and is not overwritten" in result.stderr
    assert receipt.read_text() == "the first"
    assert cli("ls", "acme", "--url", url).stdout == "acme:u1\n"
    receipt.unlink()
    receipt.symlink_to(tmp_path / "elsewhere")
    assert cli("erase", "acme", "-y", "--receipt", str(receipt), "--url", url).exit_code == 2
    assert not (tmp_path / "elsewhere").exists()
    receipt.unlink()
    # An erasure that fails leaves no receipt behind.
    missing = f"sqlite:///{tmp_path}/none.db"
    assert cli("erase", "acme", "-y", "--receipt", str(receipt), "--url", missing).exit_code == 1
    assert not receipt.exists()
    assert cli("erase", "acme", "-y", "--receipt", str(receipt), "--url", url).exit_code == 0
    assert json.loads(receipt.read_text())["erased"]["conversations"] == 1
    assert receipt.stat().st_mode & 0o777 == 0o600


full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")


@full_disk
def test_an_erasure_whose_receipt_cannot_be_written_is_printed_and_fails(url: str) -> None:
    result = cli("erase", "acme", "-y", "--receipt", "/dev/full", "--url", url)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "Error: /dev/full: No space left on device" in result.stderr
    assert "1 record erased: 1 conversation" in result.stdout


def test_a_receipt_is_written_although_nothing_reads_the_output(url: str, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "stm_backends.cli",
                "erase",
                "acme",
                "-y",
                "--receipt",
                receipt,
                "--url",
                url,
            ],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(receipt.read_text())["erased"]["conversations"] == 1


@full_disk
@pytest.mark.parametrize(
    "command",
    [
        ("purge", "--tenant", "acme", "--json"),
        ("export", "acme:u1:chat", "-o"),
        ("replay", "{}", "--pods", "1", "--json"),
    ],
    ids=" ".join,
)
def test_a_report_that_cannot_be_written_is_no_wrong_use(
    url: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"session": "trip", "turns": [{"user": "To Zanzibar!", "assistant": "Booked."}]}\n')
    result = cli(*(word.format(chat) for word in command), "/dev/full", "--url", url)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "Error: /dev/full: No space left on device" in result.stderr


FAILING = """
from stm_backends.telemetry.observer import Observer

class Audit(Observer):
    def erased(self, subject, records):
        open("/nowhere/audit.jsonl", "a")

observer = Audit()
"""


def test_a_failing_observer_is_named_and_the_receipt_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_audit.py").write_text(FAILING)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("STM_BACKENDS_OBSERVER", "failing_audit:observer")
    receipt = tmp_path / "receipt.json"
    result = cli("erase", "acme", "-y", "--receipt", str(receipt), "--url", url)
    assert result.exit_code == 1
    assert "the observer of STM_BACKENDS_OBSERVER failed in erased (FileNotFoundError" in result.stderr
    assert str(receipt) not in result.stderr
    assert json.loads(receipt.read_text())["erased"]["conversations"] == 1
    monkeypatch.delenv("STM_BACKENDS_OBSERVER")
    assert cli("drivers").exit_code == 0
