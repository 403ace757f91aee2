"""`work`: what it takes, what it does, and what `stats` says of the queue."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.cli.app import app
from stm_backends.testing.workbench.summarizers import covered

CONFIG = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=1), fold_batch_turns=2)

PROGRAM = """
from stm_backends import ShortTermMemoryConfig, MemoryBudget

async def summarize(request):
    return {"summary": "".join(f"- {turn['user']}\\n" for turn in request["turns"])}

no_summarizer = 7
all_at_once = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=0))
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Conversations of two tenants that short-lived processes have left to workers."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    url = f"sqlite:///{tmp_path}/memory.db"

    async def fill() -> None:
        async with open_backend(url, summaries="worker") as backend:
            for tenant in ("acme", "bolt"):
                memory = backend.memory(MemoryKey(tenant, "u", "s"), CONFIG)
                for number in range(3):
                    await memory.add_turn(ConversationTurn(f"u{number}", "fine"))

    asyncio.run(fill())
    return url


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def summary(url: str, tenant: str) -> list[str]:
    async def read() -> list[str]:
        async with open_backend(url, summaries="worker") as backend:
            shown = await backend.memory(MemoryKey(tenant, "u", "s"), CONFIG).get_llm_context()
            return covered(shown["conversation_memory"].get("summary", ""))

    return asyncio.run(read())


def test_the_work_is_done_with_the_summarizer_of_a_program(url: str, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    options = ("--summarizer", "program:summarize", "--until-empty", "--alive", str(alive))
    done = cli("work", "--url", url, *options)
    assert done.exit_code == 0, done.output
    assert "Working on sqlite:" in done.stderr
    assert summary(url, "acme") == summary(url, "bolt") == ["u0", "u1"]
    assert alive.exists()


def test_only_the_named_tenants_are_worked_for(url: str) -> None:
    options = ("--summarizer", "program:summarize", "--until-empty", "--tenants", "bolt")
    assert cli("work", "--url", url, *options).exit_code == 0
    assert (summary(url, "acme"), summary(url, "bolt")) == ([], ["u0", "u1"])


def test_a_configuration_takes_the_place_of_the_settings_in_the_notes(url: str) -> None:
    options = ("--summarizer", "program:summarize", "--config", "program:all_at_once", "--until-empty")
    assert cli("work", "--url", url, *options).exit_code == 0
    assert summary(url, "acme") == ["u0", "u1", "u2"]


def test_without_a_summarizer_the_built_in_one_writes(url: str) -> None:
    assert cli("work", "--url", url, "--until-empty").exit_code == 0
    waiting = json.loads(cli("stats", "--url", url, "--json").stdout.splitlines()[-1])
    assert waiting["work"] == {"waiting": 0, "lag": 0.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--summarizer", "program:nothing"), "there is no 'nothing'"),
        (("--summarizer", "program"), "MODULE:OBJECT"),
        (("--summarizer", "program:no_summarizer"), "summarizer must be an async function"),
        (("--config", "program:summarize"), "configuration"),
        (("--tenants", "acme:u"), "--tenants is written TENANT"),
        (("--drain", "25"), "--drain is a number and a unit"),
        (("--alive", "nowhere/alive"), "--alive: nowhere/alive cannot be written"),
    ],
)
def test_what_cannot_work_is_refused_at_once(url: str, options: tuple[str, ...], says: str) -> None:
    done = cli("work", "--url", url, "--until-empty", *options)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert "Traceback" not in done.output


def test_stats_end_with_what_waits_for_a_worker(url: str) -> None:
    last = json.loads(cli("stats", "--url", url, "--json").stdout.splitlines()[-1])
    assert last["work"]["waiting"] == 2
    assert last["work"]["lag"] >= 0
    assert "Queue of work: 2 conversations, the oldest due for" in cli("stats", "--url", url).stdout
    assert "Queue of work: 1 conversation, " in cli("stats", "acme", "--url", url).stdout
    assert "Queue of work" not in cli("stats", "--quick", "--url", url).stdout


def test_stats_say_nothing_of_a_queue_that_never_was(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            await backend.memory(MemoryKey("acme", "u", "s")).add_turn(ConversationTurn("Hello", "Hi"))

    asyncio.run(fill())
    assert "Queue of work" not in cli("stats", "--url", url).stdout
    assert "work" not in json.loads(cli("stats", "--url", url, "--json").stdout.splitlines()[-1])
