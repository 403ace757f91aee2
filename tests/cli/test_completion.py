"""Completion in a shell: keys from the datastore, safe to evaluate, in bounded time, and silent."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, Sessions, ShortTermMemoryConfig
from stm_backends.cli import completion
from stm_backends.cli.app import app

KEYS = ("trip", "a:b", "trip-2")
HOSTILE = ("x\\$(touch pwned)", "x;id", "x y", "x*", "-x", "x'y", 'x"y', "x`id`", "x\ny", "x~", "x&y")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            for key in (
                *(MemoryKey("acme", "u1", session) for session in KEYS),
                *(MemoryKey("acme", user, "s") for user in ("u:2", *HOSTILE)),
                *(MemoryKey(tenant, "u", "s") for tenant in ("bolt", *HOSTILE)),
            ):
                memory = backend.memory(key, ShortTermMemoryConfig("truncation"))
                await memory.add_turn(ConversationTurn("Hello", "Hi"))

    url = f"sqlite:///{tmp_path}/stm.db"
    asyncio.run(fill())
    monkeypatch.setenv("STM_BACKENDS_URL", url)
    return url


def complete(*words: str) -> list[str]:
    """Return what bash is offered for the last of these words."""
    environment = {
        "_STM_BACKENDS_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("stm-backends", *words)),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(app, env=environment, prog_name="stm-backends")
    assert result.stderr == ""
    return result.stdout.split("\n")[:-1] if result.stdout.strip() else []


def test_commands_and_options_are_completed() -> None:
    assert complete("sta") == ["stats"]
    assert "--html" in complete("show", "--h")


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_tenants_and_users_are_completed_from_the_datastore(url: str, command: str) -> None:
    assert complete(command, "b") == ["bolt"]
    assert complete(command, "acme:u") == ["acme:u1", "acme:u%3A2"]
    assert complete(command, "none:") == []


@pytest.mark.parametrize("command", ["show", "export"])
def test_conversations_are_completed_from_the_datastore(url: str, command: str) -> None:
    assert complete(command, "acme") == ["acme"]
    assert complete(command, "acme:u1") == ["acme:u1"]
    assert complete(command, "acme:u1:") == ["acme:u1:a%3Ab", "acme:u1:trip", "acme:u1:trip-2"]
    assert complete(command, "acme:u1:trip-") == ["acme:u1:trip-2"]


def test_the_datastore_is_that_of_the_option_if_given(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STM_BACKENDS_URL", f"sqlite:///{tmp_path}/other.db")
    assert complete("ls", "acme:u1") == []
    assert complete("ls", "--url", url, "acme:u1") == ["acme:u1"]
    assert not (tmp_path / "other.db").exists()


def test_ids_that_a_shell_would_interpret_are_offered_escaped(url: str) -> None:
    offered = [*complete("ls", "x"), *complete("ls", "acme:x")]
    assert {"x%0Ay", "x%20y", "x%2A", "acme:x%0Ay"} <= {*offered}
    assert all(re.fullmatch(r"[\w%:]+", one) for one in offered)
    assert "-x" not in complete("ls", "-")


def test_no_more_is_offered_than_fits_a_screen(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MOST", 2)
    assert complete("show", "acme:u1:") == ["acme:u1:a%3Ab", "acme:u1:trip"]


@pytest.fixture
def mute() -> Iterator[int]:
    """A port whose server accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_datastore_that_does_not_answer_offers_nothing_and_says_nothing(
    mute: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 0.1)
    for url in (f"redis://127.0.0.1:{mute}", f"postgresql://u@127.0.0.1:{mute}/d", "sqlit://typo", ""):
        monkeypatch.setenv("STM_BACKENDS_URL", url)
        assert complete("ls", "acme:") == []


def test_what_was_found_is_offered_when_the_time_is_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[asyncio.Timeout] = []

    def noted(
        seconds: float, timeout: Callable[[float], asyncio.Timeout] = asyncio.timeout
    ) -> asyncio.Timeout:
        limits.append(timeout(seconds))
        return limits[-1]

    async def hanging(sessions: Sessions, tenant: str) -> AsyncIterator[str]:
        yield "u1"
        limits[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    monkeypatch.setattr(Sessions, "users", hanging)
    monkeypatch.setattr(completion, "PATIENCE_S", 600.0)
    monkeypatch.setattr(asyncio, "timeout", noted)
    assert complete("ls", "acme:") == ["acme:u1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from stm_backends.cli import main; main()"],
        env={"_STM_BACKENDS_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"},
        cwd=Path(stm_backends.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "stm-backends" in done.stdout
