"""The command `reseal`: what it prints, what it writes, and when it fails."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stm_backends.cli.app import app
from stm_backends.sealing.naming import KEYS_VARIABLE

SECRETS = {name: base64.b64encode(bytes([number]) * 32).decode() for number, name in enumerate(("k1", "k2"))}
LINES = "".join(
    f'{{"session": "{session}", "turns": [{{"user": "To Zanzibar!", "assistant": "Booked."}}]}}\n'
    for session in ("trip", "taxes")
)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


class Keys:
    """The file of keys that the commands use."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def use(self, primary: str, *others: str) -> None:
        keys = {name: SECRETS[name] for name in (primary, *others)}
        self._path.write_text(json.dumps({"primary": primary, "keys": keys}))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys.json"))
    return Keys(tmp_path / "keys.json")


@pytest.fixture
def url(tmp_path: Path, keys: Keys) -> str:
    """A database sealed with the first key, with two conversations of two users."""
    conversations, url = tmp_path / "conversations.jsonl", f"sqlite:///{tmp_path}/stm.db"
    conversations.write_text(LINES)
    keys.use("k1")
    for user in ("ada", "bob"):
        replay = (
            "replay",
            str(conversations),
            "--url",
            url,
            "--tenant",
            "acme",
            "--user",
            user,
            "--pods",
            "1",
        )
        result = cli(*replay)
        assert result.exit_code == 0, result.output
    return url


def test_a_tenant_is_resealed_and_the_old_key_removed(url: str, keys: Keys, tmp_path: Path) -> None:
    keys.use("k2", "k1")
    numbers = tmp_path / "numbers.json"
    result = cli("reseal", "--tenant", "acme", "--url", url, "--json", str(numbers))
    assert result.exit_code == 0, result.output
    assert "sealed with the primary key" in result.stdout
    done = json.loads(numbers.read_text())
    assert done == {
        "ok": True,
        "records": 14,
        "values": done["values"],
        "current": 0,
        "data_keys": 0,
        "lost_races": 0,
        "left": 0,
        "failed": 0,
        "remains": "",
        "cleaned": None,
    }
    assert cli("reseal", "--tenant", "acme", "--url", url, "--json", str(numbers)).exit_code == 0
    assert json.loads(numbers.read_text())["current"] == 14
    keys.use("k2")
    for user in ("ada", "bob"):
        assert "Zanzibar" in cli("show", f"acme:{user}:trip", "--url", url).stdout


def test_a_user_is_resealed_and_others_keep_the_old_key(url: str, keys: Keys) -> None:
    keys.use("k2", "k1")
    assert cli("reseal", "--user", "acme:ada", "--url", url).exit_code == 0
    keys.use("k2")
    assert "Zanzibar" in cli("show", "acme:ada:trip", "--url", url).stdout
    assert "'k1', which this process does not have" in cli("show", "acme:bob:trip", "--url", url).stderr


def test_records_that_cannot_be_opened_are_named_and_the_command_fails(url: str, keys: Keys) -> None:
    keys.use("k2")
    result = cli("reseal", "--tenant", "acme", "--url", url)
    assert result.exit_code == 1
    assert "acme:ada:trip: " in result.stderr
    assert "'k1', which this process does not have" in result.stderr
    assert "a record of acme (users)" in result.stderr
    assert "Keep the older keys" in result.stderr
    assert "Zanzibar" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to reseal: give --all, --tenant"),
        (("--tenant", "acme:ada"), "for a user give --user acme:u123"),
        (("--user", "acme"), "--user is written TENANT:USER"),
    ],
)
def test_options_that_name_no_tenant_or_no_user_are_refused(
    url: str, keys: Keys, arguments: tuple[str, ...], said: str
) -> None:
    result = cli("reseal", *arguments, "--url", url)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_command_without_keys_says_that_nothing_is_sealed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    result = cli("reseal", "--tenant", "acme", "--url", url)
    assert result.exit_code == 2
    assert "--sealing" in result.stderr
