"""The command `work`: summarize what other processes leave to workers, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from stm_backends.backend import Backend
from stm_backends.cli import datastores, durations, transfer
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run
from stm_backends.cli.render import plain
from stm_backends.errors import ConfigurationError
from stm_backends.memory.schedule import MAX_SUMMARIES
from stm_backends.sealing.naming import named_object

_TOUCHED_EVERY_S: Final = 1.0


def work(  # noqa: PLR0913, PLR0917 -- one per option
    summarizer: Annotated[
        str | None,
        typer.Option(
            help="The summarizer of your program, an async function. [default: the built-in one, without a "
            "model]",
            metavar="MODULE:OBJECT",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="A ShortTermMemoryConfig to use in place of the settings in the notes, as for a token "
            "estimator.",
            metavar="MODULE:OBJECT",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Number of conversations to work on at a time.", min=1)
    ] = MAX_SUMMARIES,
    tenants: Annotated[
        list[str] | None,
        typer.Option(help="Work for this tenant only; may be repeated.", metavar="TENANT"),
    ] = None,
    drain: Annotated[
        str,
        typer.Option(
            help=f"Time for running work to end after SIGTERM: {durations.SPELLING}.", metavar="DURATION"
        ),
    ] = "25s",
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End once nothing is due, as a job of a scheduler.")
    ] = False,
    alive: Annotated[
        Path | None,
        typer.Option(
            help="Touch this file after each look at the queue, at most once a second, for a probe.",
            metavar="FILE",
        ),
    ] = None,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Summarize the conversations of processes that leave it to workers (`summaries="worker"`).

    Run any number of these, on any machines: they share the work, fairly to tenants. What a killed one has
    begun is taken over by another. SIGTERM and Ctrl-C let running work end, for --drain, and give back the
    rest. An outage of the datastore, or of the model, is waited for.

    `stm-backends stats` says how many conversations wait, and for how long.
    """
    with reported():
        seconds = durations.seconds("--drain", drain)
        named = [transfer.owner(tenant) for tenant in tenants or ()]
        if any(user is not None for _, user in named):
            raise ConfigurationError("--tenants is written TENANT, as in acme")
        writer = named_object("--summarizer", summarizer, object) if summarizer else None
        settings = named_object("--config", config, object) if config else None
        look = None if alive is None else _Alive(alive)

    async def until_stopped() -> None:
        # A service says what is wrong; the other commands print it once.
        logging.getLogger("stm_backends").setLevel(logging.WARNING)
        async with datastores.chosen(backend, url, sealing=sealing, max_summaries=concurrency) as opened:
            worker = opened.worker(
                settings,
                summarizer=writer,  # pyright: ignore[reportArgumentType] -- checked there
                concurrency=concurrency,
                tenants=[tenant for tenant, _ in named],
                drain_s=seconds,
                on_look=look,
            )
            loop = asyncio.get_running_loop()
            for one in (signal.SIGTERM, signal.SIGINT):
                # Windows has no handlers in its loop; there, Ctrl-C ends the work at once.
                with contextlib.suppress(NotImplementedError):
                    loop.add_signal_handler(one, worker.stop)
            typer.echo(begins(opened), err=True)
            await worker.run(until_empty=until_empty)

    def begins(opened: Backend) -> str:
        where = datastores.shown(backend or datastores.given(url), url)
        return f"Working on {plain(where)} ({opened.name}); SIGTERM or Ctrl-C ends it."

    run(until_stopped())


class _Alive:
    """Touches a file, at most once a second."""

    def __init__(self, file: Path) -> None:
        """Raises `ConfigurationError` if the file cannot be written."""
        self._file = file
        self._next = -math.inf
        try:
            file.touch()
        except OSError as error:
            raise ConfigurationError(f"--alive: {file} cannot be written: {error.strerror}") from error

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _TOUCHED_EVERY_S
            # A file that grows old is what the probe reports.
            with contextlib.suppress(OSError):
                self._file.touch()
