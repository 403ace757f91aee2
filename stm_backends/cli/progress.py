"""How far a replay is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from stm_backends.cli.replay import RunReport

_LINE_EVERY_S: Final = 5.0


class Progress:
    """Shows, on standard error, how many of `total` turns have been acknowledged."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._total = total
        self._console = console
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[killed]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._ending = contextlib.ExitStack()
        self._task = self._bar.add_task("replaying", total=total, killed="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._ending.close()

    def show(self, report: RunReport) -> None:
        """Show what has been done so far."""
        killed = f"{report.killed} killed" if report.killed else ""
        self._bar.update(self._task, completed=report.turns, killed=killed)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self._console.print(f"{report.turns:,} of {self._total:,} turns {killed}".rstrip())

    def say(self, what: str) -> None:
        """Say what is being done now, once the turns have been added."""
        self._bar.stop()
        if self._console.is_terminal:
            self._ending.enter_context(self._console.status(what))
        else:
            self._console.print(what, highlight=False)
