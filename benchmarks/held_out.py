"""Other people's conversations, stored and shown: they come back exactly, and a server accepts them.

    python -m benchmarks.held_out FILE... [--url URL]

A file has lines as `stm-backends replay` reads them: `{"id": ..., "shape": ..., "messages": [...]}`, in the
shape of OpenAI's chat, of its Responses, or of Anthropic. Each conversation is stored twice, under the tenant
`held-out`: at once and kept in full, and message by message with a small full zone. Both are read by the
process that wrote them, and again after the datastore was closed and opened. Without `--url`, a temporary
SQLite file is used. The exit status is 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from stm_backends.backend import Backend, open_backend
from stm_backends.errors import MemoryBudgetExceeded, StmError
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.messages import SHAPES, Message, begins_turn, shape_of, tokens_of
from stm_backends.tokens import default_token_estimator
from stm_backends.types import MemoryBudget, ShortTermMemoryConfig
from tests.support.dialogues import require_accepted, require_valid

BUDGETS: Final = (250, 1_000, 8_000, 100_000, 10**9)
FOLDED: Final = ShortTermMemoryConfig(
    "rolling_summary", MemoryBudget(2, 200, total_max_tokens=0), fold_batch_turns=1, transcript=True
)
_AT_ONCE: Final = 8


class HeldOut(NamedTuple):
    """One conversation, with the shape that its messages have."""

    name: str
    shape: str
    messages: list[Message]


@dataclass
class Report:
    """What was found; `counts` by file and shape."""

    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict[tuple[str, str], Counter[str]])
    problems: list[str] = field(default_factory=list[str])

    def count(self, source: str, shape: str, **numbers: int) -> None:
        self.counts.setdefault((source, shape), Counter()).update(numbers)


def read(path: Path) -> Iterator[HeldOut]:
    """Yield the conversations of a file."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            content = json.loads(line)
            if "messages" not in content:
                sys.exit(f"{path}, line {number}: no `messages`; `--help` has the form of a line")
            messages = content["messages"]
            shape = content.get("shape") or shape_of(*messages).name
            yield HeldOut(str(content.get("id", number)), shape, messages)


def accepted(name: str, messages: Sequence[Message], *rules: Callable[[str, list[Message]], None]) -> str:
    """Return what a provider's client, or another rule, has against messages; `""` if nothing."""
    for rule in rules:
        try:
            rule(name, [*messages])
        except (AssertionError, ValueError) as error:
            return f"{type(error).__name__}: {error}"[:600]
    return ""


def _said(messages: Sequence[Message], shape: str) -> list[Any]:
    """Return what messages say and show, without texts that are blank."""
    parts = (part for one in messages for part in SHAPES[shape].parts(one) if not part.blank)
    return [part.value for part in parts]


def problem_of_window(said: HeldOut, shown: list[Message], budget: int, *, whole: bool) -> str:
    """Return what is wrong with messages for a model, and `""` if nothing is."""
    shape = SHAPES[said.shape]
    if (tokens := _tokens(shown, said.shape)) > budget:
        return f"{tokens} tokens"
    kept = not accepted(said.shape, said.messages, require_accepted)
    if problem := accepted(said.shape, shown, require_valid, *([require_accepted] if kept else [])):
        return problem
    asked = [one for one in said.messages if begins_turn(one, shape)][-1:]
    if asked and _tokens(asked, said.shape) <= budget:
        values = _said(shown, said.shape)
        if not all(value in values for value in _said(asked, said.shape)):
            return "the newest question is not there"
    fits = whole and kept and not shape.joins and _tokens(said.messages, said.shape) <= budget
    if fits and not accepted(said.shape, said.messages, require_valid):
        return "" if shown == said.messages else "what fits is not there as it was"
    return ""


def _tokens(messages: Sequence[Message], shape: str) -> int:
    return tokens_of(messages, estimate=default_token_estimator, shape=shape)


async def problems_of(chat: Conversation, said: HeldOut, *, whole: bool) -> AsyncIterator[str]:
    """Yield what is wrong with a conversation that was stored."""
    found = [one async for one in chat.each_message()]
    paged: list[Any] = []
    before: int | None = None
    while before is None or before > 0:
        page = await chat.history(before=before, limit=50)
        if not page.messages:
            break
        paged[:0] = page.messages
        before = page.messages[0].number
    for way, some in (("each_message", found), ("history", paged)):
        if [one.message for one in some] != said.messages:
            yield f"{way} is not what was said"
        if [one.number for one in some] != [*range(len(said.messages))]:
            yield f"{way} does not count the messages"
    for budget in BUDGETS:
        try:
            shown = await chat.messages(max_tokens=budget)
        except MemoryBudgetExceeded:
            asked = [one for one in said.messages if begins_turn(one, SHAPES[said.shape])][-1:]
            if _tokens(asked, said.shape) <= budget:
                yield f"max_tokens={budget}: refused, although the newest question fits"
            continue
        if problem := problem_of_window(said, shown, budget, whole=whole):
            yield f"max_tokens={budget}: {problem}"


class Check:
    """One run over files of conversations, on one datastore."""

    def __init__(self, files: Sequence[Path], url: str) -> None:
        self._said = [(path.name, one) for path in files for one in read(path)]
        self._url = url
        self._report = Report()

    async def run(self) -> Report:
        """Store and read all conversations. Returns what was found."""
        for source, said in self._said:
            kept = not accepted(said.shape, said.messages, require_accepted)
            self._report.count(
                source, said.shape, conversations=1, messages=len(said.messages), accepted=kept
            )
            if (recognized := shape_of(*said.messages).name) not in (said.shape, "openai"):
                self._note(source, said, f"taken for {recognized}")
        for stores in (True, False):
            async with self._open(create=stores) as backend, asyncio.TaskGroup() as tasks:
                limit = asyncio.Semaphore(_AT_ONCE)
                for number, (source, said) in zip(count(), self._said):
                    for whole in (True, False):
                        tasks.create_task(
                            self._one(limit, backend, number, source, said, whole=whole, stores=stores)
                        )
        return self._report

    @asynccontextmanager
    async def _open(self, *, create: bool) -> AsyncIterator[Backend]:
        async with open_backend(self._url, create=create) as backend:
            yield backend

    async def _one(
        self,
        limit: asyncio.Semaphore,
        backend: Backend,
        number: int,
        source: str,
        said: HeldOut,
        *,
        whole: bool,
        stores: bool,
    ) -> None:
        where = f"{'whole' if whole else 'folded'}, {'written' if stores else 'reopened'}"
        async with limit:
            try:
                chat = self._conversation(backend, number, said, whole=whole)
                if stores:
                    await self._store(chat, said, whole=whole)
                async for problem in problems_of(chat, said, whole=whole):
                    self._note(source, said, f"{where}: {problem}")
                await chat.close()
            except StmError as error:
                self._note(source, said, f"{where}: {type(error).__name__}: {error}")

    def _conversation(self, backend: Backend, number: int, said: HeldOut, *, whole: bool) -> Conversation:
        user, session = ("whole" if whole else "folded"), f"{number}"
        if whole:
            return backend.conversation("held-out", user, session, shape=said.shape, max_tokens=10**9)
        summarizer = ExtractiveSummarizer(max_tokens=200)
        return backend.conversation(
            "held-out", user, session, FOLDED, summarizer=summarizer, shape=said.shape
        )

    async def _store(self, chat: Conversation, said: HeldOut, *, whole: bool) -> None:
        if whole:
            await chat.add(*said.messages, id="all")
            return
        for place, message in enumerate(said.messages):
            await chat.add(message, id=f"m{place}")
        await chat.flush()

    def _note(self, source: str, said: HeldOut, problem: str) -> None:
        self._report.count(source, said.shape, problems=1)
        self._report.problems.append(f"{source} {said.name}: {problem}")
        print(self._report.problems[-1], flush=True)


def main() -> None:
    """Check files, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--url", help="a datastore without the tenant `held-out`")
    arguments = parser.parse_args()
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="stm-held-out-"))
        url = arguments.url or f"sqlite:///{folder}/held-out.db"
        report = asyncio.run(Check(arguments.files, url).run())
    for (source, shape), numbers in sorted(report.counts.items()):
        told = ", ".join(f"{numbers[name]:,} {name}" for name in (*_COUNTED, "problems"))
        print(f"{source} ({shape}): {told}")
    sys.exit(bool(report.problems))


_COUNTED: Final = ("conversations", "messages", "accepted")


if __name__ == "__main__":
    main()
