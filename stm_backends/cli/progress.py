"""Progress of a command: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

_LINE_EVERY_S: Final = 5.0


class Progress:
    """Shows on standard error how many of `total` are done: `Progress(9, "copying", "records")`.

    `None` is an unknown total.
    """

    def __init__(self, total: int | None, doing: str, unit: str) -> None:
        console = Console(stderr=True)
        self._total = total
        self._unit = unit
        self._console = console
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._bar = Bar(
            TextColumn("{task.description}"),
            *(
                (BarColumn(), MofNCompleteColumn())
                if total is not None
                else (TextColumn("{task.completed:,}"),)
            ),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=total is None,
        )
        self._ending = contextlib.ExitStack()
        self._task = self._bar.add_task(doing, total=total, note="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._ending.close()

    def show(self, done: int, note: str = "") -> None:
        """Show how much is done; raises the total if more has come up."""
        if self._total is not None:
            self._total = max(self._total, done)
        self._bar.update(self._task, completed=done, total=self._total, note=note)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            count = f"{done:,}" if self._total is None else f"{done:,} of {self._total:,}"
            unit = self._unit.removesuffix("s") if count in ("1", "1 of 1") else self._unit
            self._console.print(f"{count} {unit} {note}".rstrip(), highlight=False)

    def echo(self, line: str) -> None:
        """Print a line of the result on standard output; above the bar, if both are on a terminal."""
        if self._console.is_terminal and sys.stdout.isatty():
            self._bar.console.print(Text(line), soft_wrap=True)
        else:
            typer.echo(line)

    def say(self, what: str) -> None:
        """Replace the bar by the next activity."""
        self._bar.stop()
        if self._console.is_terminal:
            self._ending.enter_context(self._console.status(what))
        else:
            self._console.print(what, highlight=False)
