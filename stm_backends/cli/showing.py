"""The command `show`: one conversation as text, JSON, Markdown or a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stm_backends.cli import datastores, item_logs, markdown, page, render, transfer
from stm_backends.cli.completion import conversations
from stm_backends.cli.conversation import Conversation
from stm_backends.cli.files import is_standard, writing
from stm_backends.cli.item_logs import LogName
from stm_backends.cli.options import BackendName, SealingName, Url
from stm_backends.cli.outcome import reported, run, told_as
from stm_backends.errors import ConfigurationError
from stm_backends.records.keys import memory_key

_FORMATS: Final[dict[str, Callable[[Conversation], str]]] = {
    "--json": lambda shown: json.dumps(shown.as_json(), indent=2),
    "--md": markdown.document,
    "--html": page.page,
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
            help="How many of the newest turns are recent: your `budget.full_zone_turns`, which is "
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

    Of a conversation that an agent framework keeps, its newest items are shown; `history` shows all.

    With --output, only you can read the file that is written. If the file exists, it is replaced once the
    new text is complete.
    """
    asked = [name for name, wanted in zip(_FORMATS, (as_json, as_markdown, as_page), strict=True) if wanted]

    async def work() -> dict[str, Any] | item_logs.Found:
        parsed = transfer.conversation_key(key)
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            with told_as("show"):
                kind = item_logs.kind_in(log)
                if kind is None and await opened.driver.load(memory_key(parsed), last=0):
                    return await opened.sessions.export(parsed)
                return await item_logs.page_of(opened, parsed, kind)

    with reported():
        if len(asked) > 1:
            raise ConfigurationError(f"give one of {' and '.join(asked)}, not both")
        if output is not None and not asked:
            raise ConfigurationError("--output needs a format: --html, --md or --json")
        document = run(work())
        if isinstance(document, item_logs.Found):
            _show_log(document, transfer.escaped(transfer.unescaped(key)), asked, output)
            return
        shown = Conversation.of(
            document, transfer.escaped(transfer.unescaped(key)), full_zone_turns=full_zone_turns
        )
        if not asked:
            render.console.print(render.conversation(shown))
            return
        text = _FORMATS[asked[0]](shown)
        with writing(output) as out:
            # Text of a conversation may have surrogates, which no encoding has.
            out.write(f"{text.rstrip()}\n")
    if not is_standard(output):
        typer.echo(f"Written to {output}", err=True)


def _show_log(found: item_logs.Found, key: str, asked: list[str], output: Path | None) -> None:
    if not asked:
        render.console.print(item_logs.shown(found, key))
        return
    if asked != ["--json"]:
        raise ConfigurationError(f"{asked[0]} is for conversations with turns; the items are in --json")
    with writing(output) as out:
        out.write(f"{json.dumps(item_logs.document(found, key), indent=2)}\n")
    if not is_standard(output):
        typer.echo(f"Written to {output}", err=True)
