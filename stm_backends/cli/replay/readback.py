"""Read replayed conversations back and compare them with the file they came from."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, Final

from stm_backends.backend import Backend
from stm_backends.cli.replay import ledger
from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.ledger import FOREIGN, Place
from stm_backends.cli.replay.pods import Setup
from stm_backends.cli.replay.verify import Findings, compare
from stm_backends.errors import ConfigurationError, SessionNotFound, StorageError, Unavailable
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records.codec import load_turn
from stm_backends.types import ConversationTurn

FLUSH_S: Final = 30.0
"""Seconds to wait for each of the final summaries of a conversation."""

_AT_ONCE: Final = 16
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Prepared:
    """A backend without any of the conversations: its name, and the deadline of its operations."""

    name: str
    deadline: float


@dataclass(slots=True)
class ReadBack:
    """The content of all conversations, and the counts of the memories that flushed them.

    `pending` turns have left the full zone and are not in a summary yet. `waiting` turns have left the record
    as well. `in_transcript` turns can be read in the transcripts, which keep all turns under every strategy.
    """

    findings: Findings = field(default_factory=Findings)
    transcript: Findings = field(default_factory=Findings)
    in_transcript: int = 0
    summarized: int = 0
    in_full: int = 0
    pending: int = 0
    waiting: int = 0
    stats: Counter[str] = field(default_factory=Counter[str])


async def prepare(
    setup: Setup,
    conversations: Sequence[Conversation],
    *,
    create: bool,
    replacing: bool,
    require_owner: Callable[[Backend, str, str], Awaitable[None]],
) -> Prepared:
    """Ensure that none of the conversations exists yet.

    `create` sets up the datastore, `replacing` erases existing conversations. `require_owner` raises for a
    tenant and user whose conversations must not be written. Raises `ConfigurationError` if
    one exists otherwise, and for a backend that other processes cannot reach.
    """
    async with setup.open(create=create) as backend:
        if backend.traits.reach == "process":
            raise ConfigurationError(
                f"the data of the backend {backend.name!r} is visible to one process only; "
                "replay needs a backend that its pods share, such as sqlite"
            )
        await require_owner(backend, setup.tenant, setup.user)
        wanted = {conversation.session for conversation in conversations}
        found = [
            key async for key in backend.sessions.list(setup.tenant, setup.user) if key.session_id in wanted
        ]
        if found and not replacing:
            raise ConfigurationError(
                f"{len(found)} of these conversations exist already (for example {found[0].composite()}); "
                "use --replace to erase them first, or another --user"
            )
        for key in found:
            await backend.sessions.erase(key)
        return Prepared(backend.name, backend.traits.deadline)


async def read_back(setup: Setup, conversations: Sequence[Conversation]) -> ReadBack:
    """Wait for the final summaries, while they keep coming, and compare the stored turns with the file."""
    result = ReadBack()
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(backend: Backend, conversation: Conversation) -> None:
        async with limit:
            memory = setup.memory(backend, conversation.session, spent=result.stats)
            # Turns that could not be summarized are read back where they are.
            with contextlib.suppress(StorageError):
                await _summarize_all(memory)
            await memory.close()
            result.stats.update(asdict(memory.stats))
            stored = await _stored(backend, setup, conversation)
            _note(result, setup, conversation, stored, waiting=memory.waiting)
            kept = [_place(one.turn, conversation) async for one in memory.each_turn()]
            result.transcript += compare(kept, acknowledged=len(conversation.turns))
            result.in_transcript += len(kept)

    try:
        async with setup.open() as backend, asyncio.TaskGroup() as tasks:
            for conversation in conversations:
                tasks.create_task(one(backend, conversation))
    except* StorageError as errors:
        first = errors.exceptions[0]
    else:
        return result
    raise first


async def _summarize_all(memory: DistributedShortTermMemory) -> None:
    """Wait until nothing is left to summarize, summarizing has failed, or no summary follows in time."""
    now = asyncio.get_running_loop().time
    until = now() + FLUSH_S
    while (remaining := until - now()) > 0:
        before, unavailable = memory.stats.summaries, False
        try:
            await memory.flush(timeout=remaining)
        except Unavailable:
            unavailable = True
            await asyncio.sleep(0.1)
        if memory.stats.summaries > before:
            until = now() + FLUSH_S
        elif not unavailable:
            return


async def _stored(backend: Backend, setup: Setup, conversation: Conversation) -> dict[str, Any]:
    for attempt in count(1):
        try:
            return await backend.sessions.export(setup.key(conversation.session), transcript=False)
        except SessionNotFound:
            break
        except Unavailable:
            if attempt == _TRIES:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
    return {"body": {"summary": ""}, "turns": []}


def _note(
    result: ReadBack, setup: Setup, conversation: Conversation, stored: dict[str, Any], *, waiting: int
) -> None:
    covered, _ = ledger.split(stored["body"]["summary"])
    tail = [_place(load_turn(turn), conversation) for turn in stored["turns"]]
    kept = [*ledger.with_waiting(covered, waiting), *tail]
    result.findings += compare(kept, acknowledged=len(conversation.turns), newest=setup.newest)
    result.waiting += waiting
    result.summarized += len(covered)
    result.in_full += len(tail)
    if setup.newest is None:
        result.pending += max(0, len(tail) - setup.config.budget.full_zone_turns)


def _place(stored: ConversationTurn, conversation: Conversation) -> Place:
    """Return the place of a stored turn if it equals the turn at that place in the file, else `FOREIGN`."""
    turns, session = conversation.turns, conversation.session
    references = stored.trajectory_digest.artifacts_refs if stored.trajectory_digest else ()
    place = ledger.place_among(references, session)
    if place >= len(turns):
        return FOREIGN
    as_added = ledger.marked(turns[place], session, place)
    return place if replace(stored, ts=0.0) == as_added else FOREIGN
