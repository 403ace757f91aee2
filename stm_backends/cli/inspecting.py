"""The command `inspect`: a local page that shows what is stored, or one conversation as a page in a file."""

from __future__ import annotations

import asyncio
import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stm_backends.backend import Backend
from stm_backends.cli import datastores, item_logs, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.files import is_standard, writing
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run, told_as
from stm_backends.cli.replay import ledger
from stm_backends.errors import ConfigurationError
from stm_backends.inspect import page
from stm_backends.records.keys import LogKind, memory_key
from stm_backends.sealing.naming import named_object
from stm_backends.types import MemoryKey, ShortTermMemoryConfig, as_config


def inspect(
    whose: Annotated[
        str | None,
        typer.Argument(
            help="The place to open first. Without it, all tenants, if the datastore can find them.",
            metavar="TENANT[:USER[:SESSION]]",
            autocompletion=conversations,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Write one self-contained page of the conversation to this file, and serve nothing.",
            metavar="FILE",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="The ShortTermMemoryConfig of your program, whose budget is not stored.",
            metavar="MODULE:OBJECT",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to serve on; 0 is any.", min=0, max=65_535)] = 0,
    open_browser: Annotated[
        bool,
        typer.Option("--open", help="Open the page in a browser. Its command line has the token meanwhile."),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Serve a page on this machine that shows the stored data. Nothing is written.

    The page lists tenants, users and conversations. Of a conversation it shows what was said, what the model
    would be shown now and what is left out and why, and what happened to it. Ctrl-C ends it.

    Only who has the printed URL can open the page, and only on this machine. Sealed data needs keys, as for
    `show`. The budget of a memory is not stored: give yours with --config, or change it on the page.
    """
    with reported():
        settings = as_config(named_object("--config", config, ShortTermMemoryConfig)) if config else None
        start = _ids(whose)
        opened = datastores.read_only(backend, url, sealing=sealing)
        if record is not None:
            if whose is None or len(start) != 3:
                raise ConfigurationError("--record needs a conversation: TENANT:USER:SESSION")
            _record(opened, whose, record, settings)
            return
        # Imported here: the other commands do not need the extra.
        from stm_backends.inspect.serving import serve  # noqa: PLC0415 -- as above

    def ready(address: str) -> None:
        typer.echo(f"Open {address}\nCtrl-C ends it.")
        if open_browser:
            webbrowser.open(address)

    shown = datastores.shown(backend or datastores.given(url), url)
    # The server ends on Ctrl-C; which of these it leaves, if any, is up to its version.
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        run(serve(opened, port=port, ready=ready, datastore=shown, start=start, config=settings))
    typer.echo("Ended.", err=True)


def _ids(whose: str | None) -> tuple[str, ...]:
    """Return the ids that `TENANT[:USER[:SESSION]]` names."""
    if whose is None:
        return ()
    if whose.count(":") > 1:
        key = transfer.conversation_key(whose)
        return key.tenant_id, key.user_id, key.session_id
    tenant, user = transfer.owner(whose)
    return (tenant,) if user is None else (tenant, user)


def _record(opened: Backend, whose: str, file: Path, config: ShortTermMemoryConfig | None) -> None:
    key = transfer.conversation_key(whose)

    async def work(out: TextIO) -> None:
        async with opened:
            await write_page(opened, key, out, config=config)

    with writing(file) as out:
        run(work(out))
    if not is_standard(file):
        typer.echo(f"Written to {file}", err=True)


async def write_page(
    opened: Backend,
    key: MemoryKey,
    out: TextIO,
    *,
    config: ShortTermMemoryConfig | None = None,
    log: LogKind | None = None,
) -> None:
    """Write the page of a conversation or, if it has no turns or `log` names one, of a framework's log."""
    named = transfer.named(key)
    with told_as("show"):
        if log is None and await opened.driver.load(memory_key(key), last=0) is not None:
            parts = page.record(
                opened,
                key,
                named=named,
                config=config,
                clean=lambda turn: ledger.stored_without_mark(turn, key.session_id),
            )
        else:
            found = await item_logs.page_of(opened, key, log)
            parts = page.record_log(opened, key, found.kind, found.page, named=named)
        async for part in parts:
            out.write(part)
