"""`inspect`: a page in a file, and a page that is served until Ctrl-C."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.cli.app import app
from tests.support.recorded import recorded

KEY = MemoryKey("acme", "u1", "trip")
START_S = 60.0


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)
    url = f"sqlite:///{tmp_path}/memory.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            memory = backend.memory(KEY, ShortTermMemoryConfig("truncation"))
            for number in range(3):
                await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))

    asyncio.run(fill())
    return url


def test_a_page_is_recorded_in_a_private_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "trip.html"
    done = cli("inspect", "acme:u1:trip", "--url", url, "--record", str(file))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"Written to {file}\n")
    assert file.stat().st_mode & 0o777 == 0o600
    page = recorded(file.read_text("utf-8"))
    assert (page["key"], page["named"]) == (["acme", "u1", "trip"], "acme:u1:trip")
    assert [unit["number"] for unit in page["units"]] == [0, 1, 2]
    shown = recorded(cli("show", "acme:u1:trip", "--url", url, "--html").stdout)
    assert {**shown, "now": 0} == {**page, "now": 0}


def test_a_page_shows_what_the_settings_of_a_program_show(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inspected_service.py").write_text(
        "from stm_backends import MemoryBudget, ShortTermMemoryConfig\n"
        'MEMORY = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=1))\n',
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "trip.html"
    settings = ("--config", "inspected_service:MEMORY", "--record", str(file))
    assert cli("inspect", "acme:u1:trip", "--url", url, *settings).exit_code == 0
    page = recorded(file.read_text("utf-8"))
    assert page["config"]["given"]
    assert [part["number"] for part in page["shown"]["parts"]] == [2]
    assert page["shown"]["left_out"][0]["reason"] == "truncation"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("acme:u1", "--record", "x.html"), 2, "--record needs a conversation"),
        (("--record", "x.html"), 2, "--record needs a conversation"),
        (("acme:u1:none", "--record", "x.html"), 1, "there is no conversation under this key"),
        (("acme:u1:trip", "--config", "nothing"), 2, "--config is written MODULE:OBJECT"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_no_file(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("inspect", *arguments, "--url", url)
    assert done.exit_code == status
    assert said in done.stderr
    assert not (tmp_path / "x.html").exists()


@pytest.fixture
def served(url: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the page, and the URL that it has printed."""
    pytest.importorskip("uvicorn", reason="the extra `inspect` brings it")
    command = [sys.executable, "-m", "stm_backends", "inspect", "acme:u1:trip", "--url", url]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)
        try:
            assert found, line
            yield process, found[0]
        finally:
            process.kill()


def get(address: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=START_S)) as connection:
        connection.request("GET", path, headers={"Host": host or parts.netloc})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_page_is_served_to_who_has_the_url_until_ctrl_c(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = served
    path = urlsplit(address).path
    status, body = get(address, path)
    assert (status, body[:15]) == (200, b"<!doctype html>")
    status, body = get(address, f"{path}api/where")
    assert json.loads(body)["start"] == ["acme", "u1", "trip"]
    assert get(address, "/api/where")[0] == 404
    assert get(address, f"{path}api/where", "evil.example")[0] == 421
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=START_S)
    assert (process.returncode, told) == (0, "Ended.\n")


def test_a_taken_port_is_said(served: tuple[subprocess.Popen[str], str], url: str) -> None:
    port = str(urlsplit(served[1]).port)
    done = cli("inspect", "--url", url, "--port", port)
    assert done.exit_code == 2
    assert f"port {port} cannot be used" in done.stderr


def test_without_the_extra_the_command_says_how_to_install_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stm_backends.inspect.app", "stm_backends.inspect.serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    done = cli("inspect", "--url", url)
    assert done.exit_code == 2
    assert "the extra stm-backends[inspect]" in done.stderr
    assert "pip install " in done.stderr
