"""The turns of a run, and the summaries of them: everything stored says which turns it stands for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from stm_backends import (
    ConversationTurn,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    TrajectoryDigest,
)
from stm_backends.memory import policy
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from tests.chaos.history import Writer

TENANT: Final = "chaos"

SUMMARIZER_TIMEOUT_S: Final = 1.0
DEGRADED_RETRY_S: Final = 1.5


def config(*, lasts: float | None = None, **more: Any) -> ShortTermMemoryConfig:
    """Return the settings of every memory of a run: small, with waits of seconds, and with transcripts.

    `lasts` is the time to live. A library from before the transcripts has none, see `--other`.
    """
    keeps = hasattr(DistributedShortTermMemory, "transcript")
    more |= {"transcript": True, "transcript_ttl_s": lasts} if keeps else {"session_ttl_s": lasts}
    return ShortTermMemoryConfig(
        strategy="rolling_summary",
        budget=MemoryBudget(full_zone_turns=4, summary_max_tokens=100_000, total_max_tokens=0),
        recovery_backlog_limit=30,
        retry_attempts=2,
        retry_backoff_base_s=0.3,
        degraded_retry_interval_s=DEGRADED_RETRY_S,
        summarizer_timeout_s=SUMMARIZER_TIMEOUT_S,
        fold_batch_turns=3,
        fold_max_turns=12,
        fold_max_tokens=100_000,
        **more,
    )


def lease_s(deadline: float) -> float:
    """Return how long a lease outlives its holder, with this deadline of operations."""
    return policy.lease_s(config(), deadline)


def recovery_s(deadline: float) -> float:
    """Return how long a conversation in use takes to be healthy once all is well again, at most.

    A call of the model may hang then, or its pod may be dead and the lease last; then the next attempt comes.
    The rest is for a machine with much to do.
    """
    return SUMMARIZER_TIMEOUT_S + lease_s(deadline) + DEGRADED_RETRY_S + 3 * deadline


def key_of(conversation: str) -> MemoryKey:
    """Return the key of a conversation; `c0-3` is the fourth one of the user `c0`."""
    return MemoryKey(TENANT, conversation.partition("-")[0], conversation)


def lasts_s(conversation: str, lasts: float) -> float | None:
    """Return the time to live of a conversation: every third one has one, unless `lasts` is 0."""
    return lasts if lasts and generation(conversation) % 3 == 1 else None


def generation(conversation: str) -> int:
    """Return how many conversations the user had before this one."""
    return int(conversation.partition("-")[2])


LARGE: Final = 10
"""One turn in so many of a run has 1 to 8 kB of results of tools; in a soak each turn has up to 4 kB."""


def identity_of(conversation: str, process: str, number: int, at: float | None = None) -> str:
    """Return the id of the turn of this number of a process; `at` is when it is made, in a soak."""
    return f"{conversation}/{process}/{number}" + ("" if at is None else f"/{at:.3f}")


def turn_of(identity: str) -> ConversationTurn:
    """Return the turn of this id, which is in all its texts; the same id gives the same turn."""
    check = zlib.crc32(identity.encode())
    turn = ConversationTurn(f"{identity} {check:08x}", "answer " * (check % 23) + identity)
    at = identity.split("/")[3:]
    if at:
        # A purge by age needs the time.
        turn.ts = float(at[0])
    if at or check % LARGE == 0:
        size = check // LARGE % 4_200 if at else 1_000 + check // LARGE % 7_000
        results = f"{identity} found {check:08x} "
        turn.trajectory_digest = TrajectoryDigest(["search"], (results * (size // len(results) + 1))[:size])
    return turn


def turn_in(shown: Mapping[str, Any], conversation: str) -> str | None:
    """Return the id of a turn as a model sees it; `None` if it is altered or of another conversation."""
    identity = str(shown["user"]).partition(" ")[0]
    if not identity.startswith(f"{conversation}/"):
        return None
    turn = turn_of(identity)
    expected: dict[str, Any] = {"user": turn.user_message, "assistant": turn.assistant_response}
    if turn.trajectory_digest:
        expected["trajectory_digest"] = dataclasses.asdict(turn.trajectory_digest)
    return identity if shown == expected else None


def covered_by(summary: str, conversation: str) -> list[str | None]:
    """Return the ids that a summary covers; `None` stands for each that is not of this conversation."""
    if not summary:
        return []
    try:
        ids = cast("Sequence[str]", json.loads(summary)["covered"])
    except (ValueError, KeyError, TypeError):
        return [None]
    return [one if one.startswith(f"{conversation}/") else None for one in ids]


async def read(
    writer: Writer, conversation: str, memory: DistributedShortTermMemory, *, op: int | None = None
) -> dict[str, Any]:
    """Read a conversation, note what was read, and return it; `op` is a read that began before."""
    op = writer.invoke("read", conversation) if op is None else op
    try:
        context = await memory.get_llm_context()
    except BaseException as error:
        writer.end(op, "fail", "read", conversation, error=type(error).__name__)
        raise
    # Nothing is awaited since the load, so that this is of the same record.
    body, health = memory._shared.seen.body, memory.health  # noqa: SLF001 -- a context does not have the count
    shown: Mapping[str, Any] = context.get("conversation_memory", {})
    found: dict[str, list[str | None]] = {
        "summary": covered_by(shown.get("summary", ""), conversation),
        "pending": [turn_in(turn, conversation) for turn in shown.get("pending_turns", ())],
        "recent": [turn_in(turn, conversation) for turn in shown.get("recent_turns", ())],
    }
    data: dict[str, Any] = {part: [one for one in ids if one is not None] for part, ids in found.items()}
    data |= {
        "foreign": sum(ids.count(None) for ids in found.values()),
        "dropped": body.dropped,
        # A library from before the transcripts has none.
        "waiting": getattr(memory, "waiting", 0),
        "health": health.value,
    }
    writer.end(op, "ok", "read", conversation, **data)
    return data


async def read_whole(writer: Writer, conversation: str, memory: DistributedShortTermMemory) -> None:
    """Read the transcript of a conversation from its first turn to its last, and note it."""
    op = writer.invoke("transcript", conversation)
    ids = list[str]()
    foreign = 0
    try:
        async for one in memory.each_turn():
            known = one.id.startswith(f"{conversation}/") and same(one.turn, turn_of(one.id))
            foreign += not known
            ids.append(one.id)
    except BaseException as error:
        writer.end(op, "fail", "transcript", conversation, error=type(error).__name__)
        raise
    writer.end(op, "ok", "transcript", conversation, ids=ids, foreign=foreign)


def same(turn: ConversationTurn, other: ConversationTurn) -> bool:
    """Say whether two turns have the same texts."""
    texts = [(one.user_message, one.assistant_response, one.trajectory_digest) for one in (turn, other)]
    return texts[0] == texts[1]


def count(data: Mapping[str, Any]) -> int:
    """Return how many turns a read has."""
    return len(data["summary"]) + len(data["pending"]) + len(data["recent"])


# The model

HOWS: Final = ("well", "hangs", "raises", "garbage", "slow")
_WIDTH: Final = 8

GARBAGE: Final[Sequence[Any]] = (None, 7, {}, {"summary": 7}, {"summary": "  "}, {"summary": "<a></a>"}, [])


@dataclass(frozen=True, slots=True)
class Model:
    """Whether the model works, in a file that every pod keeps open."""

    file: Path

    def become(self, how: str) -> None:
        """Change the model, for all pods at once."""
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, how.ljust(_WIDTH).encode(), 0)
        finally:
            os.close(descriptor)


class Summarizer:
    """The model of one conversation in one pod: its summary is the list of the turns that it covers."""

    def __init__(self, model: int, writer: Writer, conversation: str, chance: random.Random) -> None:
        self._model = model
        self._writer = writer
        self._conversation = conversation
        self._chance = chance

    async def __call__(self, request: Mapping[str, Any], /) -> Any:
        """Return a summary of these turns on top of the earlier ones, if the model is well."""
        conversation = self._conversation
        covered = covered_by(request["previous_summary"], conversation)
        turns = [turn_in(turn, conversation) for turn in request["turns"]]
        op = self._writer.invoke("summarize", conversation, turns=turns, covered=covered)
        try:
            answer = await self._answer([*covered, *turns])
        except BaseException as error:
            ended = "fail" if isinstance(error, ModelDown) else "unknown"
            self._writer.end(op, ended, "summarize", conversation, error=type(error).__name__)
            raise
        self._writer.end(op, "ok", "summarize", conversation)
        return answer

    async def _answer(self, covered: Iterable[str | None]) -> Any:
        how = os.pread(self._model, _WIDTH, 0).decode().strip()
        if how == "hangs":
            await asyncio.sleep(3_600)
        if how == "raises":
            raise ModelDown
        if how == "garbage":
            return self._chance.choice(GARBAGE)
        slow = 0.7 * SUMMARIZER_TIMEOUT_S if how == "slow" else 0.03
        await asyncio.sleep(slow * self._chance.random())
        return {"summary": json.dumps({"covered": [one or "?" for one in covered]}, separators=(",", ":"))}


class ModelDown(Exception):
    """The model does not work at present."""


def since(start: float) -> str:
    """Return the time since a moment of the monotonic clock, as `minutes:seconds`."""
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    return f"{minutes}:{seconds:02}"
