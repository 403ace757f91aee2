"""The command `show`: one conversation as text, JSON, Markdown or a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

from stm_backends.backend import Backend
from stm_backends.cli import datastores, item_logs, markdown, render, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.conversation import Conversation
from stm_backends.cli.files import is_standard, writing
from stm_backends.cli.inspecting import write_page
from stm_backends.cli.item_logs import LogName
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run, told_as
from stm_backends.drivers.contract import Record
from stm_backends.errors import ConfigurationError
from stm_backends.records.body import Transcript
from stm_backends.records.keys import memory_key
from stm_backends.types import MemoryBudget, MemoryKey, ShortTermMemoryConfig

_FORMATS: Final[dict[str, Callable[[Conversation], str]]] = {
    "--json": lambda shown: json.dumps(shown.as_json(), indent=2),
    "--md": markdown.document,
}

_FORMATS_OF_LOGS: Final[dict[str, Callable[[item_logs.Found, str], str]]] = {
    "--json": lambda found, key: json.dumps(item_logs.document(found, key), indent=2),
    "--md": markdown.log,
}


def show(  # noqa: PLR0913, PLR0917 -- one per option
    key: Annotated[
        str,
        typer.Argument(
            help="The conversation, as tenant:user:session.", metavar="KEY", autocompletion=conversations
        ),
    ],
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
    full_zone_turns: Annotated[
        int | None,
        typer.Option(
            help="Number of newest turns that are recent: your `budget.full_zone_turns`, which is "
            "not stored. [default: 5]",
            min=0,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    as_page: Annotated[bool, typer.Option("--html", help="Print one self-contained HTML page.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write. [default: standard output, -]", metavar="FILE"
        ),
    ] = None,
    log: LogName = None,
) -> None:
    """Show one conversation: summary, pending turns, recent turns, health, tokens and times.

    With --html, the page also has the turns that the summary covers, up to the newest 10,000 of all. For a
    conversation kept by an agent framework, the newest items are shown, and with --html up to 10,000;
    `history` shows all. Turns and items have the same numbers as in `history`.

    With --output, only you can read the file that is written. If the file exists, it is replaced once the
    new text is complete.
    """
    wanted = {"--json": as_json, "--md": as_markdown, "--html": as_page}
    asked = [name for name, wants in wanted.items() if wants]

    async def work() -> Conversation | item_logs.Found:
        parsed = transfer.conversation_key(key)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            with told_as("show"):
                kind = item_logs.kind_in(log)
                record = await opened.driver.load(memory_key(parsed), last=0)
                if kind is not None or record is None:
                    return await item_logs.page_of(opened, parsed, kind)
                document, transcript = await _exported(opened, parsed, record)
                return Conversation.of(document, named, transcript, full_zone_turns=full_zone_turns)

    async def write(out: TextIO) -> None:
        parsed, kind = transfer.conversation_key(key), item_logs.kind_in(log)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            await write_page(opened, parsed, out, config=_with(full_zone_turns), log=kind)

    with reported():
        named = transfer.escaped(transfer.unescaped(key))
        if len(asked) > 1:
            raise ConfigurationError(f"give one of {' and '.join(asked)}, not both")
        if output is not None and not asked:
            raise ConfigurationError("--output needs a format: --html, --md or --json")
        if not asked:
            found = run(work())
            if isinstance(found, item_logs.Found):
                render.console.print(item_logs.shown(found, named))
            else:
                render.console.print(render.conversation(found))
            return
        # Text of a conversation may have surrogates, which no encoding has.
        with writing(output) as out:
            if as_page:
                run(write(out))
            else:
                found = run(work())
                if isinstance(found, item_logs.Found):
                    text = _FORMATS_OF_LOGS[asked[0]](found, named)
                else:
                    text = _FORMATS[asked[0]](found)
                out.write(f"{text.rstrip()}\n")
    if not is_standard(output):
        typer.echo(f"Written to {output}", err=True)


def _with(full_zone_turns: int | None) -> ShortTermMemoryConfig | None:
    """Return a configuration with the zone that was given, if any."""
    if full_zone_turns is None:
        return None
    return ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns))


async def _exported(opened: Backend, key: MemoryKey, record: Record) -> tuple[dict[str, Any], Transcript]:
    """Return a conversation whose record was loaded before, and the transcript that numbers its turns."""
    while True:
        document = await opened.sessions.export(key, transcript=False)
        after = await opened.driver.load(memory_key(key), last=0)
        if after is not None and after.version == record.version:
            body = opened.codec.open_body(record.body)
            return document, body.transcript or Transcript.begun(record.version, body)
        # Turns may have left it before it was exported. If it was erased, the next export says so.
        record = after or record
