"""LangChain: its histories of messages and ours."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage

from benchmarks.peers import langchain_histories
from benchmarks.peers.conversation import NEWEST, Conversation
from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, report, time_both, turn_of
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place

_OWN = {
    "sqlite": langchain_histories.sql,
    "postgres": langchain_histories.postgres,
    "redis": langchain_histories.redis,
}

_ARTIFACTS = (b"\xff", datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.5"), {1, 2}, ValueError("no table"))
"""What tools return beside a text, and JSON does not have."""


async def measure(place: Place, plan: Plan) -> None:
    """Time turns and reads, and store what is not JSON."""
    async with (
        _OWN[place.datastore](place) as theirs,
        langchain_histories.ours(place.beside) as mine,
    ):
        both = (theirs, mine)
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} messages"):
                histories = [one(f"{length} messages") for one in both]
                for history in histories:
                    await history.seed([turn_of(number) for number in range(length // 2)])
                turns = (partial(_turn, history, turn_of(length)) for history in histories)
                await time_both(f"read all and add a turn, after {length:,} messages", plan, *turns)
        with reporting("the newest messages"):
            theirs_read, ours_read = (one(f"{plan.long} messages") for one in both)
            what = f"read the newest {NEWEST} of {plan.long:,} messages; theirs reads all"
            await time_both(what, plan, theirs_read.read, ours_read.newest)
        with reporting("artifacts"):
            stored = [await _stored(one("artifacts")) for one in both]
            whats = (
                "results of tools stored, with an artifact that is not JSON",
                "artifacts stored of these",
            )
            for what, sides in zip(whats, zip(*stored, strict=True), strict=True):
                report(what, "count", *sides)


async def _turn(history: Conversation, turn: tuple[str, str]) -> None:
    await history.read()
    await history.store(*turn)


async def _stored(history: Any) -> tuple[Side, Side]:
    """Return how many results of tools can be read back, and how many of them with an artifact."""
    errors = Counter[str]()
    for number, artifact in enumerate(_ARTIFACTS):
        result = ToolMessage("Done.", tool_call_id=f"call_{number}", artifact=artifact)
        try:
            await history.keep(HumanMessage(turn_of(number)[0]), result)
        except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
            errors[type(error).__name__] += 1
    stored = [one for one in await history.read() if one.type == "tool"]
    artifacts = sum(one.artifact is not None for one in stored)
    count = len(_ARTIFACTS)
    return Side(len(stored), count, count, dict(errors)), Side(artifacts, count, count)
