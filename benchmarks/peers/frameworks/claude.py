"""The Claude Agent SDK: its only store of sessions, which is in memory, and ours there."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from claude_agent_sdk import InMemorySessionStore, SessionStore

from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, report, time_both, turn_of
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import open_backend
from stm_backends.integrations.claude_agent_sdk import StmSessionStore

_PROJECT, _LISTED = "-srv-app", "-srv-listed"


async def measure(place: Place, plan: Plan) -> None:
    """Send a batch again, and time appends, loads and listings."""
    async with open_backend(place.backend_url, create=True) as backend:
        stores: tuple[SessionStore, SessionStore] = (InMemorySessionStore(), StmSessionStore(backend))
        with reporting("a batch that is sent again"):
            entries = _entries(5)
            what = "entries that are loaded, of 5 of which a batch of 3 was sent again"
            report(what, "count", *[await _again(store, entries) for store in stores])
        with reporting("appends"):
            for store in stores:
                await store.append(_key("long"), _entries(plan.long))
            appends = (partial(_append, store) for store in stores)
            await time_both(f"append an entry, after {plan.long:,}", plan, *appends)
            loads = (partial(store.load, _key("long")) for store in stores)
            await time_both(f"load {plan.long:,} entries", plan, *loads)
        with reporting("a listing"):
            for store in stores:
                for number in range(plan.sessions):
                    await store.append(_key(f"session {number}", _LISTED), _entries(plan.events))
            lists = (partial(store.list_session_summaries, _LISTED) for store in stores)
            await time_both(f"list the summaries of {plan.sessions} sessions", plan, *lists)


async def _again(store: SessionStore, entries: list[Any]) -> Side:
    for batch in (entries[:2], entries[2:], entries[2:]):
        await store.append(_key("again"), batch)
    return Side(len(await store.load(_key("again")) or []), right=len(entries))


async def _append(store: SessionStore) -> None:
    await store.append(_key("long"), _entries(1))


def _key(session: str, project: str = _PROJECT) -> Any:
    return {"project_key": project, "session_id": session}


def _entries(count: int) -> list[Any]:
    return [
        {
            "type": "user",
            "uuid": str(uuid.uuid4()),
            "timestamp": "2026-01-01T00:00:00.000Z",
            "message": {"role": "user", "content": turn_of(number)[0]},
        }
        for number in range(count)
    ]
