"""A summarizer for tests, which keeps a ledger of the turns it covered and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class LedgerSummarizer:
    """Summarizes turns as a list of their user messages, so that a summary proves which turns it covers.

    `covered(summary)` reads the list back. The next `fail` calls raise `error`. `answers` are returned
    instead of summaries until they run out. `hold()` makes calls wait until `release()`, and `requests` has
    all requests so far.
    """

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.answers: list[Any] = []
        self.fail = 0
        self.error: type[BaseException] = RuntimeError
        self.running = 0
        self.most_running = 0
        self._open = asyncio.Event()
        self._open.set()
        self.called = asyncio.Event()

    def hold(self) -> None:
        """Make calls wait from now on."""
        self._open.clear()
        self.called.clear()

    def release(self) -> None:
        """Let waiting and later calls continue."""
        self._open.set()

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.called.set()
        try:
            await self._open.wait()
        finally:
            self.running -= 1
        if self.fail:
            self.fail -= 1
            raise self.error("the summarizer was told to fail")
        if self.answers:
            return self.answers.pop(0)
        users = [str(turn["user"]) for turn in request["turns"]]
        return {"summary": summary_of(covered(request["previous_summary"]) + users)}


def summary_of(users: list[str]) -> str:
    """Return the summary that covers these turns."""
    return "<session_summary>\n" + "\n".join(f"- {user}" for user in users) + "\n</session_summary>"


def covered(summary: str) -> list[str]:
    """Return the user messages of the turns that a ledger's summary covers, in order."""
    return [line.removeprefix("- ") for line in summary.splitlines() if line.startswith("- ")]
