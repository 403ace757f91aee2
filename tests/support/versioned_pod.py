"""One pod of any version of the library: `PYTHONPATH=TREE python -P versioned_pod.py URL COMMAND NAME`.

Uses what all versions have. Prints an answer as JSON. `NAME` marks what it stores: its turns and items. The
commands: `write` something of each kind, `look` at all there is, `race` with other pods on conversations that
they share, or `erase` everything.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stm_backends
from stm_backends import (
    ConversationTurn,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    TrajectoryDigest,
    open_backend,
)
from stm_backends.tiers import MemoryManager

TENANT, USER = "acme", "ada"
KIND = "langchain"
SUMMARIZED = "summarized"
CONVERSATIONS = ("plain", SUMMARIZED, "expiring", "large")
SHARED = ("shared", "shared too")
RACED = 30
LARGE = 700_000


def key(session: str) -> MemoryKey:
    return MemoryKey(TENANT, USER, session)


async def covered(request: Mapping[str, Any]) -> dict[str, str]:
    """Summarize turns as their texts."""
    texts = [*request["previous_summary"].split(), *(turn["user"] for turn in request["turns"])]
    return {"summary": " ".join(texts)}


def memory(backend: Any, session: str) -> Any:
    """Return the memory of a conversation, of which all but some turns are summarized or none."""
    folded = session in {SUMMARIZED, *SHARED}
    config = ShortTermMemoryConfig(
        "rolling_summary",
        MemoryBudget(3 if folded else 100, 1_000_000, total_max_tokens=0),
        session_ttl_s=3_600.0 if session == "expiring" else None,
        summarizer_timeout_s=2.0,
    )
    return backend.memory(key(session), config, summarizer=covered)


async def write(backend: Any, name: str) -> None:
    for session in CONVERSATIONS:
        conversation = memory(backend, session)
        for number in range(6):
            turn = ConversationTurn(
                f"{name}-{number}",
                "x" * LARGE if session == "large" and number == 1 else "answer",
                TrajectoryDigest(["search"], "found", artifacts_refs=[f"file:{number}"]),
                ts=1_700_000_000.0 + number,
            )
            await conversation.add_turn(turn, turn_id=f"{name}-{number}")
            # Once more, as after an outcome that was unknown.
            await conversation.add_turn(turn, turn_id=f"{name}-{number}")
        await conversation.flush()
    await backend.item_log(key("log"), KIND).add([{"by": name, "number": n} for n in range(5)])
    await backend.state_store.save_memory_state(f"state of {name}", {"by": name, "text": "y" * LARGE})
    manager = MemoryManager(backend=backend, owner=(TENANT, USER), session_id="s", llm_provider=gist)
    await manager.remember(name, f"{name} wants a red bike", importance=0.9, tags=["bike"])
    await manager.gc.on_session_end()


def gist(messages: object) -> str:
    del messages
    return "the gist of it"


async def look(backend: Any, name: str) -> dict[str, Any]:
    sessions = sorted([one.session_id async for one in backend.sessions.list(TENANT, USER)])
    stored = {one: await backend.sessions.export(key(one)) for one in sessions}
    manager = MemoryManager(backend=backend, owner=(TENANT, USER), session_id="s")
    return {
        "stored": stored,
        "shown": {one: await memory(backend, one).get_llm_context() for one in CONVERSATIONS},
        "log": await backend.item_log(key("log"), KIND).items(),
        "states": [
            await backend.state_store.load_memory_state(f"state of {other}") for other in ("old", "new")
        ],
        "remembered": sorted((one.key, one.content) for one in await manager.recall("red bike")),
    }


async def race(backend: Any, name: str) -> list[str]:
    """Add turns to conversations that others add turns to; returns those that were acknowledged."""

    async def talk(session: str) -> list[str]:
        conversation, done = memory(backend, session), list[str]()
        for number in range(RACED):
            turn = f"{name}-{number}"
            await conversation.add_turn(ConversationTurn(turn, "answer"), turn_id=turn)
            done.append(turn)
            await conversation.get_llm_context()
        await conversation.flush()
        return done

    first, second = await asyncio.gather(*map(talk, SHARED))
    assert first == second
    return first


async def erase(backend: Any, name: str) -> int:
    return await backend.sessions.erase_user(TENANT, USER)


async def main(url: str, command: str, name: str) -> None:
    do = {"write": write, "look": look, "race": race, "erase": erase}[command]
    async with open_backend(url, create=True) as backend:
        answer = await do(backend, name)
    print(json.dumps({"from": str(Path(stm_backends.__file__).parents[1]), "answer": answer}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
