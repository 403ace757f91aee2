"""Determine which turns a memory contains, in full or within a summary.

Every replayed turn carries a mark among the artifact references of its trajectory. The summarizer is wrapped
so that each summary begins with a line (the ledger) that lists the turns it covers, in the order in which it
received them. Without marks and ledger, the context is the same as without a replay.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, TypeAlias, cast

from stm_backends.protocols import Summarizer
from stm_backends.types import ConversationTurn, TrajectoryDigest, default_token_estimator

Place: TypeAlias = int
"""The index of a turn in its conversation, from 0; or `FOREIGN`."""

FOREIGN: Final = -1
"""The place of a turn that belongs to another conversation or was altered."""

_LINE = re.compile(r"\[turns ([0-9,?-]*)\](?:\n|$)")


def marked(turn: ConversationTurn, session: str, place: Place) -> ConversationTurn:
    """Return a copy of a turn with a mark of its place."""
    digest = turn.trajectory_digest or TrajectoryDigest([], "")
    references = [*digest.artifacts_refs, _mark(session, place)]
    return replace(turn, trajectory_digest=replace(digest, artifacts_refs=references))


def place_of(turn: Mapping[str, Any], session: str) -> Place:
    """Return the place of a turn as the model or a summarizer sees it."""
    digest = turn.get("trajectory_digest")
    references = cast("Mapping[str, Any]", digest).get("artifacts_refs") if digest else ()
    return place_among(cast("Sequence[object]", references or ()), session)


def place_among(references: Sequence[object], session: str) -> Place:
    """Return the place that the first mark among references names."""
    places = (place_in(str(reference), session) for reference in references)
    return next((place for place in places if place != FOREIGN), FOREIGN)


def place_in(reference: str, session: str) -> Place:
    """Return the place that a mark names; `FOREIGN` for any other reference."""
    mark, _, number = reference.rpartition("#")
    return int(number) if mark == f"turn:{session}" and number.isdecimal() else FOREIGN


def stored_without_mark(turn: ConversationTurn, session: str) -> ConversationTurn:
    """Return a stored turn without the mark of a replay, if it has one."""
    digest = turn.trajectory_digest
    if digest is None:
        return turn
    kept = [ref for ref in digest.artifacts_refs if place_in(ref, session) == FOREIGN]
    if len(kept) == len(digest.artifacts_refs):
        return turn
    left = replace(digest, artifacts_refs=kept)
    return replace(turn, trajectory_digest=None if left == TrajectoryDigest([], "") else left)


def unmarked(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without its mark."""
    shown = dict(turn)
    if digest := shown.pop("trajectory_digest", None):
        kept = [ref for ref in digest["artifacts_refs"] if not str(ref).startswith("turn:")]
        if kept or digest["tools_invoked"] or digest["observations_summary"] or digest["reasoning_summary"]:
            shown["trajectory_digest"] = {**digest, "artifacts_refs": kept}
    return shown


def write(places: Iterable[Place]) -> str:
    """Return a summary's first line: the turns it covers, in order, with ranges as `first-last`."""
    numbers = list(places)
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if a == FOREIGN or b != a + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *breaks, len(numbers)]) if start < end]
    names = ["?" if n[0] == FOREIGN else f"{n[0]}-{n[-1]}" if len(n) > 1 else f"{n[0]}" for n in runs]
    return f"[turns {','.join(names)}]"


def split(summary: str) -> tuple[list[Place], str]:
    """Return the turns that a summary covers, and its text. A summary without a ledger covers none."""
    line = _LINE.match(summary)
    if line is None:
        return [], summary
    places: list[Place] = []
    for run in filter(None, line[1].split(",")):
        first, _, last = run.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            places.append(FOREIGN)
        else:
            places.extend(range(int(first), int(last or first) + 1))
    return places, summary[line.end() :]


def places_in(memory: Mapping[str, Any], session: str, *, waiting: int) -> list[Place]:
    """Return every turn that a `conversation_memory` covers, oldest first, repeats included.

    The result includes the `waiting` turns, which it does not show: they wait in pages for a summary.
    """
    covered, _ = split(memory.get("summary", ""))
    shown = [*memory.get("pending_turns", ()), *memory.get("recent_turns", ())]
    return [*with_waiting(covered, waiting), *(place_of(turn, session) for turn in shown)]


def with_waiting(covered: Sequence[Place], waiting: int) -> list[Place]:
    """Return the turns that a summary covers, then the `waiting` turns, which follow them."""
    first = max(covered, default=-1) + 1
    return [*covered, *range(first, first + waiting)]


def without_ledger(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `conversation_memory` without marks and ledger."""
    shown: dict[str, Any] = {
        name: [unmarked(turn) for turn in memory[name]]
        for name in ("recent_turns", "pending_turns")
        if name in memory
    }
    if "summary" in memory:
        shown["summary"] = split(memory["summary"])[1]
    return shown


class LedgerSummarizer:
    """A summarizer whose summaries begin with the ledger of one conversation.

    Counts in `spent` the tokens that the wrapped summarizer reads and writes, as `tokens_read` and
    `tokens_written`.
    """

    def __init__(self, summarizer: Summarizer, session: str, *, spent: Counter[str] | None = None) -> None:
        self._summarizer = summarizer
        self._session = session
        self._spent = Counter[str]() if spent is None else spent

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return the wrapped summarizer's answer with the ledger as its first line."""
        covered, previous = split(request["previous_summary"])
        covered += [place_of(turn, self._session) for turn in request["turns"]]
        turns = [unmarked(turn) for turn in request["turns"]]
        self._spent["tokens_read"] += estimate_turns(turns) + default_token_estimator(previous)
        answer = await self._summarizer({"previous_summary": previous, "turns": turns})
        self._spent["tokens_written"] += default_token_estimator(answer["summary"])
        return {"summary": f"{write(covered)}\n{answer['summary']}"}


def _mark(session: str, place: Place) -> str:
    return f"turn:{session}#{place}"


def tokens_of(memory: Mapping[str, Any]) -> int:
    """Estimate the tokens of a `conversation_memory` without marks and ledger."""
    plain = without_ledger(memory)
    turns = [*plain.get("pending_turns", ()), *plain.get("recent_turns", ())]
    return estimate_turns(turns) + (default_token_estimator(plain["summary"]) if "summary" in plain else 0)


def estimate_turns(turns: Iterable[Mapping[str, Any]]) -> int:
    """Estimate the tokens of turns as the model is shown them."""
    return sum(default_token_estimator(json.dumps(turn, ensure_ascii=False)) for turn in turns)
