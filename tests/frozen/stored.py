"""What a release stores, kept as files, and what it answers from them: every later version answers the same.

`python -m tests.frozen` writes the files of the present version into the folder of its release. Once
the release is published, they stay as they are.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from stm_backends import (
    Backend,
    Conversation,
    ConversationTurn,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    TrajectoryDigest,
)
from stm_backends.drivers import ABSENT, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings
from stm_backends.tiers import MemoryManager, MemoryTier

RELEASE: Final = Path(__file__).parent / "release_0_1"
RECORDS: Final = "records.jsonl"
"""Every record: its key, its version, its body and its tail."""

ANSWERS: Final = "answers.json"
"""What is read from these records by the public names."""

FILE: Final = "stored.db"
"""The same records in a file of the SQLite driver, as its layout was."""

TURNS: Final = MemoryKey("acme", "ann", "turns")
CHAT: Final = MemoryKey("acme", "ann", "chat")
COPY: Final = MemoryKey("acme", "ann", "copy")
SEALED: Final = MemoryKey("sealed", "ann", "chat")
SEALING: Final = Sealing(StaticKeys({"k1": bytes(range(32))}, primary="k1"))
CONFIG: Final = ShortTermMemoryConfig(
    strategy="rolling_summary",
    budget=MemoryBudget(full_zone_turns=2, summary_max_tokens=300, total_max_tokens=3_000),
    transcript=True,
)


async def write(store: MemoryStore) -> None:
    """Store something of every kind, by the public names."""
    async with Backend(MemoryDriver(store)) as backend:
        await _write_turns(backend)
        await _write_messages(backend)
        await _write_others(backend)
    # Where an entry takes so little, a state is stored in parts.
    async with Backend(MemoryDriver(store, max_entry_bytes=8_192)) as backend:
        await backend.state_store.save_memory_state("acme:ann:large", {"text": "é" * 20_000})
    async with Backend(MemoryDriver(store), sealing=SEALING) as backend:
        await _chat(backend, SEALED).add({"role": "user", "content": "A secret"}, id="q")
        await backend.state_store.save_memory_state("sealed:ann:state", {"secret": True})


async def _write_turns(backend: Backend) -> None:
    memory = backend.memory(TURNS, CONFIG, summarizer=ExtractiveSummarizer(max_tokens=300))
    for number in range(8):
        digest = TrajectoryDigest(["book"], f"booked {number}", "as asked", [f"ref-{number}"])
        turn = ConversationTurn(
            f"A table for {number}",
            f"Booked for {number} — bom apetite",
            trajectory_digest=digest if number % 2 else None,
            artifacts_shown={"menu": {"price": number + 0.5}} if number % 3 else {},
            artifacts_hidden_refs=["hidden"],
            ts=1_760_000_000.0 + number,
        )
        await memory.add_turn(turn, turn_id=f"turn-{number}")
    await memory.flush()


async def _write_messages(backend: Backend) -> None:
    chat = _chat(backend, CHAT)
    call = {"id": "call-1", "type": "function", "function": {"name": "book", "arguments": '{"for": 2}'}}
    await chat.add({"role": "user", "content": "A table for two in Lisbon"}, id="q-0")
    await chat.add({"role": "assistant", "content": None, "tool_calls": [call]}, id="c-0")
    await chat.add({"role": "tool", "tool_call_id": "call-1", "content": "booked"}, id="r-0")
    usage = {"input_tokens": 12, "cost": 0.25}
    await chat.add({"role": "assistant", "content": "Booked."}, id="a-0", usage=usage)
    for number in range(1, 6):
        await chat.add({"role": "user", "content": f"And for {number}?"}, id=f"q-{number}")
        await chat.add({"role": "assistant", "content": f"Booked for {number}."}, id=f"a-{number}")
    await chat.rewind(9)
    await chat.add({"role": "user", "content": [{"type": "text", "text": "Cancel it"}]}, id="q-9")
    await chat.add({"role": "assistant", "content": "Cancelling"}, id="a-9", cut=True)
    await chat.flush()
    await chat.fork("copy", to=3)
    await backend.conversations.get(CHAT)
    await backend.conversations.update(CHAT, title="Lisbon", metadata={"colour": "blue"}, pinned=True)


async def _write_others(backend: Backend) -> None:
    state = {"numbers": [1, 2.5, None], "text": "\n✓"}
    await backend.state_store.save_memory_state("acme:ann:state", state)
    await backend.state_store.save_memory_state("acme:ann:bytes", {"raw": b"\x00\xff"})
    await backend.state_store.save_memory_state("any key", {"owner": "nobody"})
    await backend.tenant_state("acme").save_memory_state("settings", {"theme": "dark"})
    log = backend.item_log(MemoryKey("acme", "ann", "log"), "langchain")
    for number in range(6):
        await log.add([{"type": "human", "data": {"content": f"item {number}"}}], id=f"item-{number}")
    await log.pop()
    await log.fold()
    await log.add([{"type": "ai", "data": {"content": "the last"}}])
    manager = MemoryManager(backend=backend, owner=("acme", "ann"))
    for key, value in (("name", "Ann"), ("city", {"name": "Lisbon"})):
        await manager.remember(key, value, tier=MemoryTier.LONG_TERM, importance=0.75, tags=["profile"])


def _chat(backend: Backend, key: MemoryKey) -> Conversation:
    ids = (key.tenant_id, key.user_id, key.session_id)
    return backend.conversation(*ids, CONFIG, summarizer=ExtractiveSummarizer(max_tokens=300))


async def read(driver: Driver) -> dict[str, Any]:
    """Return what is read of all that `write` stores, as JSON. Closes the driver."""
    answers: dict[str, Any] = {}
    async with Backend(driver) as backend:
        memory = backend.memory(TURNS, CONFIG, summarizer=ExtractiveSummarizer(max_tokens=300))
        answers["context"] = await memory.get_llm_context()
        answers["turns"] = [
            [one.number, one.id, vars_of(one.turn), one.summarized] async for one in memory.each_turn()
        ]
        chat, copy = _chat(backend, CHAT), _chat(backend, COPY)
        answers["messages"] = await chat.messages()
        answers["history"] = await _history(chat)
        answers["before the edit"] = await _history(chat, revision=0)
        answers["copy"] = await _history(copy)
        answers["usage"] = (await chat.usage()).total
        answers["conversations"] = await _listed(backend)
        found = await backend.conversations.search("acme", "ann", "lisbon")
        answers["found"] = sorted(one.card.key.session_id for one in found.found)
        answers["users"] = [user async for user in backend.sessions.users("acme")]
        for key in ("acme:ann:state", "acme:ann:bytes", "any key", "acme:ann:large"):
            answers[key] = await backend.state_store.load_memory_state(key)
        answers["settings"] = await backend.tenant_state("acme").load_memory_state("settings")
        answers["items"] = await backend.item_log(MemoryKey("acme", "ann", "log"), "langchain").items()
        manager = MemoryManager(backend=backend, owner=("acme", "ann"))
        remembered = await manager.recall("name profile", [MemoryTier.LONG_TERM])
        answers["remembered"] = sorted([one.key, one.content, one.importance] for one in remembered)
    return as_json(answers)


async def read_sealed(driver: Driver) -> dict[str, Any]:
    """Return what is read of all that is sealed, as JSON. Closes the driver."""
    async with Backend(driver, sealing=SEALING) as backend:
        state = await backend.state_store.load_memory_state("sealed:ann:state")
        return as_json({"sealed history": await _history(_chat(backend, SEALED)), "sealed state": state})


async def _history(chat: Conversation, revision: int | None = None) -> list[object]:
    return [
        [one.number, one.id, one.message, one.at, one.begins, one.cut, one.usage]
        async for one in chat.each_message(revision=revision)
    ]


async def _listed(backend: Backend) -> list[object]:
    cards = (await backend.conversations.list("acme", "ann")).cards
    return sorted(
        [card.key.session_id, card.title, card.preview, card.turns, dict(card.metadata), card.pinned]
        for card in cards
    )


def vars_of(turn: ConversationTurn) -> list[object]:
    """Return the fields of a turn."""
    digest = turn.trajectory_digest
    seen = digest and [
        digest.tools_invoked,
        digest.observations_summary,
        digest.reasoning_summary,
        digest.artifacts_refs,
    ]
    shown, hidden = turn.artifacts_shown, turn.artifacts_hidden_refs
    return [turn.user_message, turn.assistant_response, seen, shown, hidden, turn.ts]


def as_json(value: object) -> Any:
    """Return what is left of a value in JSON; bytes are in Base64."""

    def other(one: object) -> object:
        if isinstance(one, bytes):
            return {"base64": base64.b64encode(one).decode("ascii")}
        return dict(cast("Mapping[str, object]", one))

    return json.loads(json.dumps(value, default=other))


def dump(store: MemoryStore) -> list[str]:
    """Return a line for each record of a store."""
    lines: list[str] = []
    for scope, records in sorted(store.scopes.items()):
        for name, stored in sorted(records.records.items()):
            body = None if stored.body is None else _text(stored.body)
            record = {"scope": scope, "name": name, "version": stored.version, "body": body}
            lines.append(json.dumps({**record, "tail": [_text(entry) for entry in stored.tail]}))
    return lines


def _text(data: bytes) -> str | dict[str, str]:
    """Return bytes as text, which a person can compare, if they are text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def data_of(text: str | dict[str, str]) -> bytes:
    """Return the bytes of a body or an entry, as these files have it."""
    return text.encode("utf-8") if isinstance(text, str) else base64.b64decode(text["base64"])


async def load(lines: Iterable[str], driver: Driver) -> None:
    """Store the records of these lines, as they were. The driver is open."""
    for record in map(json.loads, lines):
        key, version = Key(record["scope"], record["name"]), record["version"]
        if record["body"] is not None:
            await driver.replace(key, data_of(record["body"]), version=version, expect=ABSENT, ttl=None)
        for entry in record["tail"]:
            await driver.append(key, data_of(entry), initial_version=version, ttl=None)


async def keep(folder: Path) -> None:
    """Write the files of the present version into a folder."""
    await write(store := MemoryStore())
    lines = dump(store)
    (folder / RECORDS).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    with tempfile.TemporaryDirectory() as there:
        driver = SqliteDriver(SqliteSettings(path=f"{there}/{FILE}"))
        await driver.open()
        await load(lines, driver)
        await driver.close()
        shutil.copyfile(Path(there, FILE), folder / FILE)
    answers = {**await read(MemoryDriver(store)), **await read_sealed(MemoryDriver(store))}
    (folder / ANSWERS).write_text(json.dumps(answers, ensure_ascii=False, indent=1) + "\n", "utf-8")
