"""Commands on sealed data: by a program's own `Sealing`, or by a file of keys."""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stm_backends import StaticKeys
from stm_backends.cli.app import app
from stm_backends.sealing.naming import KEYS_VARIABLE

SECRET = base64.b64encode(bytes(range(32))).decode()
LINES = '{"session": "trip", "turns": [{"user": "To Zanzibar!", "assistant": "Booked."}]}\n'


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def key_file(folder: Path) -> Path:
    """Write a file of keys."""
    file = folder / "keys.json"
    file.write_text(json.dumps({"primary": "k1", "keys": {"k1": SECRET}}))
    file.chmod(0o600)
    return file


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = key_file(tmp_path)
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)
    monkeypatch.setenv(KEYS_VARIABLE, str(file))
    return file


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sealed database, filled by a replay, which runs processes."""
    folder = tmp_path_factory.mktemp("sealed")
    conversations = folder / "conversations.jsonl"
    conversations.write_text(LINES)
    data = folder / "data"
    data.mkdir()
    options = ("--url", f"sqlite:///{data}/stm.db", "--tenant", "acme", "--user", "ada")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, str(key_file(folder)))
        result = cli("replay", str(conversations), *options)
    assert result.exit_code == 0, result.output
    assert b"Zanzibar" not in b"".join(file.read_bytes() for file in data.iterdir())
    return data


@pytest.fixture
def url(tmp_path: Path, replayed: Path, keys: Path) -> str:
    """A sealed database of the test's own."""
    folder = tmp_path / "data"
    shutil.copytree(replayed, folder)
    return f"sqlite:///{folder}/stm.db"


def test_commands_read_and_erase_sealed_data_with_a_file_of_keys(url: str, tmp_path: Path) -> None:
    assert cli("ls", "acme:ada", "--url", url).stdout.splitlines() == ["acme:ada:trip"]
    assert "Zanzibar" in cli("show", "acme:ada:trip", "--url", url).stdout
    exported = tmp_path / "out.jsonl"
    assert cli("export", "acme:ada:trip", "--url", url, "-o", str(exported)).exit_code == 0
    assert "Zanzibar" in exported.read_text()
    assert cli("erase", "acme:ada", "--url", url, "-y").exit_code == 0
    assert cli("import", str(exported), "--url", url).exit_code == 0
    assert "Zanzibar" in cli("show", "acme:ada:trip", "--url", url).stdout


def test_commands_take_the_sealing_of_a_program(
    url: str, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    (tmp_path / "myservice.py").write_text(
        "from pathlib import Path\n"
        "from stm_backends import Sealing, StaticKeys\n"
        f"sealing = Sealing(StaticKeys.from_file(Path({str(keys)!r})))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "Zanzibar" in cli("show", "acme:ada:trip", "--url", url, "--sealing", "myservice:sealing").stdout
    monkeypatch.delitem(sys.modules, "myservice")
    for wrong, said in (
        ("myservice", "written MODULE:OBJECT"),
        ("myservice:nothing", "there is no 'nothing'"),
        ("nowhere:sealing", "there is no module 'nowhere'"),
        ("myservice:Path", "not Sealing"),
    ):
        result = cli("show", "acme:ada:trip", "--url", url, "--sealing", wrong)
        assert result.exit_code == 2
        assert said in result.stderr
    monkeypatch.delitem(sys.modules, "myservice")


def test_without_the_keys_sealed_data_is_one_clear_message(
    url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.write_text(json.dumps({"primary": "k2", "keys": {"k2": SECRET}}))
    result = cli("show", "acme:ada:trip", "--url", url)
    assert result.exit_code == 1
    assert "'k1', which this process does not have" in result.stderr
    monkeypatch.delenv(KEYS_VARIABLE)
    result = cli("show", "acme:ada:trip", "--url", url)
    assert result.exit_code == 1
    assert "sealed" in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"primary": "k1", "keys": {"k1": "c2VjcmV0"}}', "\0"])
def test_a_file_of_keys_of_another_form_is_refused_without_showing_it(keys: Path, content: str) -> None:
    keys.write_text(content)
    result = cli("ls", "acme", "--url", "sqlite:///none.db")
    assert result.exit_code == 2
    assert "c2VjcmV0" not in result.output
    assert "secret" not in result.output


def test_a_missing_file_of_keys_is_refused(keys: Path) -> None:
    keys.unlink()
    result = cli("ls", "acme", "--url", "sqlite:///none.db")
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_sealed_data_is_not_erased_without_its_keys_unless_asked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    receipt = tmp_path / "receipt.json"
    for what in ("acme:ada", "acme"):
        result = cli("erase", what, "--url", url, "-y", "--receipt", str(receipt))
        assert result.exit_code == 2
        assert "nothing was erased; give --sealing" in " ".join(result.stderr.split())
        assert "Some records may be erased" not in result.stderr
        assert not receipt.exists()
    result = cli("erase", "acme:ada", "--url", url, "-y", "--keep-keys", "--receipt", str(receipt))
    assert result.exit_code == 0
    assert "data keys in a separate store were not erased" in " ".join(result.stderr.split())
    assert json.loads(receipt.read_text())["data_keys_left"] is True


def test_sealed_users_behind_one_in_clear_are_reported_with_exit_status_1(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal looks at one user of a tenant, so the others are counted during the erasure."""
    (tmp_path / "chat.jsonl").write_text(LINES)
    at = ("--url", f"sqlite:///{tmp_path}/mixed.db", "--tenant", "acme")
    monkeypatch.setattr("stm_backends.cli.replaying.require_same_seal", allowing)
    monkeypatch.delenv(KEYS_VARIABLE)
    for user in ("ada", "bob"):
        assert cli("replay", str(tmp_path / "chat.jsonl"), *at, "--user", user).exit_code == 0
        monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    monkeypatch.delenv(KEYS_VARIABLE)
    result = cli("erase", "acme", *at[:2], "-y")
    assert result.exit_code == 1
    assert "erase each of the users again with --sealing" in " ".join(result.stderr.split())


async def allowing(*given: object) -> None:
    """Allow to write sealed data beside clear text, as programs that never saw the other user do."""


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("user", ["ada", "new"])
def test_import_and_replay_keep_clear_text_and_sealed_data_apart(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool, user: str
) -> None:
    def give_keys(given: bool) -> None:
        monkeypatch.setenv(KEYS_VARIABLE, str(keys)) if given else monkeypatch.delenv(KEYS_VARIABLE)

    (tmp_path / "chat.jsonl").write_text(LINES)
    (tmp_path / "more.jsonl").write_text(LINES.replace("trip", "taxes"))
    at, other = ("--url", f"sqlite:///{tmp_path}/a.db"), ("--url", f"sqlite:///{tmp_path}/b.db")
    give_keys(sealed)
    assert (
        cli("replay", str(tmp_path / "chat.jsonl"), *at, "--tenant", "acme", "--user", "ada").exit_code == 0
    )
    give_keys(not sealed)
    owner = ("--tenant", "acme", "--user", user)
    assert cli("replay", str(tmp_path / "more.jsonl"), *other, *owner).exit_code == 0
    exported = tmp_path / "out.jsonl"
    assert cli("export", f"acme:{user}:taxes", *other, "-o", str(exported)).exit_code == 0
    for command in (("import", str(exported)), ("replay", str(tmp_path / "more.jsonl"), *owner)):
        result = cli(*command, *at)
        assert result.exit_code == 2, result.output
        assert "nothing was written" in " ".join(result.stderr.split())
    give_keys(sealed)
    assert cli("ls", "acme:ada", *at).stdout == "acme:ada:trip\n"


def test_migrated_clear_text_is_sealed_and_what_remains_of_it_is_printed(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "chat.jsonl").write_text(LINES)
    (tmp_path / "migrating.py").write_text(
        "from pathlib import Path\n"
        "from stm_backends import Sealing, StaticKeys\n"
        f"sealing = Sealing(StaticKeys.from_file(Path({str(keys)!r})), accept_clear=True)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv(KEYS_VARIABLE)
    url, numbers = f"sqlite:///{folder}/stm.db", tmp_path / "numbers.json"
    owner = ("--tenant", "acme", "--user", "ada")
    assert cli("replay", str(tmp_path / "chat.jsonl"), "--url", url, *owner).exit_code == 0
    with closing(sqlite3.connect(folder / "stm.db")) as reader:
        # The log, which has the clear text, cannot be cut while another connection reads.
        reader.execute("BEGIN")
        reader.execute("SELECT name FROM sqlite_master").fetchall()
        migrate = ("reseal", "--all", "--sealing", "migrating:sealing", "--json", str(numbers))
        result = cli(*migrate, "--url", f"{url}?deadline_s=0.5")
        assert result.exit_code == 1
        assert json.loads(numbers.read_text())["cleaned"] is False
        assert "run the command again" in result.stderr
    result = cli(*migrate, "--url", url)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "Replaced clear text" in said
    assert "SQLite: deleted data is overwritten in the file, and the write-ahead log was cut" in said
    assert b"Zanzibar" not in b"".join(file.read_bytes() for file in folder.iterdir())


ENVELOPES = """
from stm_backends import EnvelopeKeys, Sealing, open_backend
from stm_backends.sealing.wrapping import LocalWrapping

store = open_backend({store!r}).driver
sealing = Sealing(EnvelopeKeys(store, LocalWrapping({{"w1": bytes(32)}}, primary="w1"), owns_store=True))
"""


def test_commands_take_data_keys_from_their_store_and_erase_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_envelopes.py").write_text(ENVELOPES.format(store=f"sqlite:///{tmp_path}/keys.db"))
    (tmp_path / "chat.jsonl").write_text(LINES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    at = ("--url", f"sqlite:///{tmp_path}/data.db", "--sealing", "with_envelopes:sealing")
    result = cli("replay", str(tmp_path / "chat.jsonl"), *at, "--tenant", "acme", "--user", "ada")
    assert result.exit_code == 0, result.output
    assert "Zanzibar" in cli("show", "acme:ada:trip", *at).stdout
    assert cli("reseal", "--tenant", "acme", *at).exit_code == 0
    refused = cli("erase", "acme:ada", *at, "-y", "--keep-keys")
    assert refused.exit_code == 2
    assert "give --sealing or --keep-keys, not both" in refused.stderr
    receipt = tmp_path / "receipt.json"
    assert cli("erase", "acme:ada", *at, "-y", "--receipt", str(receipt)).exit_code == 0
    assert json.loads(receipt.read_text())["erased"]["data_keys"] == 1


@pytest.mark.parametrize("command", [("expire", "--ttl", "90d"), ("purge", "--older-than", "1s")])
def test_retention_without_the_keys_leaves_sealed_data_and_says_why(
    url: str, keys: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    result = cli(*command, "--tenant", "acme", "--url", url)
    monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    assert "Zanzibar" in cli("show", "acme:ada:trip", "--url", url).stdout
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "could not be read" in said
    assert "the data is sealed, and no keys were given Give the keys: --sealing MODULE:OBJECT" in said


@pytest.mark.parametrize("option", ["--sealing", "STM_BACKENDS_OBSERVER"])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import no_such_library", "line 1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os\nos.environ['NOT_SET_HERE']", "failed at"),
        ("raise ValueError('a secret')", "line 1: ValueError"),
        ("def (", "line 1: SyntaxError"),
        ("from stm_backends import StaticKeys\nStaticKeys({}, primary='k')", "primary is not the id"),
    ],
)
def test_a_program_that_fails_to_import_is_named_with_the_cause(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str, option: str
) -> None:
    (tmp_path / "failing.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    options = ("--sealing", "failing:it")
    if option != "--sealing":
        monkeypatch.setenv(option, "failing:it")
        options = ()
    result = cli("ls", "acme", "--url", url, *options)
    assert result.exit_code == 2
    assert f"{option}: importing 'failing' failed at " in result.stderr
    assert "failing.py, line" in result.stderr or "keys.py, line" in result.stderr
    assert said in result.stderr
    assert "a secret" not in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"primary": "k1", "keys": {"k1": "c2hvcnQ="}}', "the key 'k1' must be 32 bytes, not 5"),
        ('{"primary": "k1", "keys": {"k1": "%%%%"}}', "the key 'k1' is not Base64"),
        ('{"primary": "k1", "keys": {"k1": 5}}', "the key 'k1' is not Base64"),
        (
            f'{{"primary": "k2", "keys": {{"k1": "{SECRET}"}}}}',
            "primary is not the id of one of the keys",
        ),
        (f'{{"primary": "k1", "keys": {{"{SECRET}": "k1"}}}}', "a key's id has 1 to 32 ASCII letters"),
        ('{"primary": "k1", "keys": [1]}', 'must be {"primary": ID, "keys": {ID: BASE64}}'),
    ],
)
def test_an_error_in_a_file_of_keys_names_the_file_and_the_key(
    url: str, keys: Path, content: str, said: str
) -> None:
    keys.write_text(content)
    result = cli("ls", "acme", "--url", url)
    assert result.exit_code == 2
    assert f"the file of keys {keys}" in result.stderr
    assert said in result.stderr
    assert SECRET not in result.stderr


@pytest.mark.parametrize(
    ("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True), (0o660, True), (0o666, True)]
)
def test_a_file_of_keys_that_others_may_use_is_warned_of(
    url: str, keys: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    keys.chmod(mode)
    result = cli("ls", "acme", "--url", url)
    assert (result.exit_code, result.stdout) == (0, "acme:ada\n")
    assert result.stderr == (
        f"Warning: other users may read or change {keys}; run: chmod 600 {keys}\n" if warns else ""
    )
    caplog.clear()
    StaticKeys.from_file(keys)
    assert bool(caplog.records) is warns


def test_sealed_data_without_keys_says_how_to_give_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE)
    result = cli("show", "acme:ada:trip", "--url", url)
    assert result.exit_code == 1
    assert f"--sealing MODULE:OBJECT, or a file of keys that {KEYS_VARIABLE} names." in result.stderr


def test_clear_data_with_a_file_of_keys_says_how_to_migrate(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/clear.db"
    monkeypatch.delenv(KEYS_VARIABLE)
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text(LINES)
    assert cli("replay", str(conversations), "--url", url, "--tenant", "acme", "--user", "ada").exit_code == 0
    monkeypatch.setenv(KEYS_VARIABLE, str(keys))
    result = cli("show", "acme:ada:trip", "--url", url)
    assert result.exit_code == 1
    assert "accept_clear=True accepts both" in result.stderr
    assert "--sealing MODULE:OBJECT of a Sealing(keys, accept_clear=True)" in result.stderr
