"""The commands of `stm-backends`: their names and descriptions, in the order of the help.

A command's module is imported when the command runs, so that the help of the program and the completion of
its commands take no longer than Typer itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Generator
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command

import stm_backends
from stm_backends.cli.options import Command, Commands

_COMMANDS: Final = {
    "Inspect stored data": {
        "ls": (
            "listing:list_",
            "List the tenants, the users of a tenant, or the conversations of a user, one per line.",
        ),
        "show": (
            "showing:show",
            "Show one conversation: summary, pending turns, recent turns, health, tokens and times.",
        ),
        "history": (
            "reading:history",
            "Show the turns or messages of a conversation by number: the newest ones, or others.",
        ),
        "inspect": (
            "inspecting:inspect",
            "Serve a page on this machine that shows the stored data. Nothing is written.",
        ),
        "search": (
            "searching:search",
            "Find conversations whose title, summary, or one turn or message has all of the words.",
        ),
        "usage": (
            "usage:usage",
            "Sum the usage of answers: the numbers that programs passed as `usage` when they added messages.",
        ),
        "stats": (
            "stats:stats",
            "Count users, conversations, turns, bytes and tokens of tenants and users, and their health.",
        ),
    },
    "Move it": {
        "export": ("exporting:export_", "Export conversations as JSON Lines, one per line."),
        "import": (
            "importing:import_",
            "Import exported conversations and graphs. Fails if one of them already exists.",
        ),
        "copy": (
            "copying:copy",
            "Copy tenants and users to another datastore, then read everything back and compare.",
        ),
    },
    "Remove it": {
        "erase": ("erasing:erase", "Erase a conversation, a user or a tenant, permanently."),
        "purge": ("purging:purge", "Remove expired records and, with an age, older ones."),
        "expire": (
            "purging:expire",
            "Give the stored data of a tenant or a user a time to live, and keep its content.",
        ),
    },
    "Summarize it": {
        "work": (
            "working:work",
            'Summarize the conversations of processes that leave it to workers (`summaries="worker"`).',
        ),
    },
    "Datastores and keys": {
        "ping": ("backends:ping", "Load one record from the datastore, and print how long that took."),
        "drivers": (
            "backends:drivers",
            "List the installed backends, with the problem and its remedy for those that cannot be used.",
        ),
        "schema": (
            "backends:schema",
            "Print the statements that --create would run, in the datastore's own language.",
        ),
        "compact": (
            "compacting:compact",
            "Rewrite an SQLite file in the layout of a new one, and give back free space.",
        ),
        "reseal": (
            "resealing:reseal",
            "Seal all data of tenants and users with the primary key, so that an older key can be removed.",
        ),
    },
    "Try and verify": {
        "replay": (
            "replaying:replay",
            "Replay conversations on several pods at once, and verify what is stored.",
        ),
        "conformance": (
            "conformance:conformance",
            "Check that a backend keeps every clause of the contract, and explain failures.",
        ),
    },
}
"""The commands by heading of the help: each with its function and the first sentences of its docstring."""

_FUNCTIONS: Final = {name: where for group in _COMMANDS.values() for name, (where, _) in group.items()}

_INTERRUPTED: Final = 130
"""The exit status that shells report for a command ended by Ctrl-C."""

app = typer.Typer(
    help="Conversation memory shared by many processes: try, inspect, move and erase it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextlib.contextmanager
def _importing() -> Generator[None]:
    """End the program if Ctrl-C comes while it imports; once a command runs, it handles that itself."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(_INTERRUPTED) from None


class Later(TyperCommand):
    """A command as the help of the program lists it. `loaded` is the command itself."""

    @functools.cached_property
    def loaded(self) -> Any:
        """The command, whose module is imported now."""
        name = self.name or ""
        module, _, function = _FUNCTIONS[name].partition(":")
        with _importing():
            found = getattr(importlib.import_module(f"stm_backends.cli.{module}"), function)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
        alone.command(name, cls=Command)(found)
        return get_command(alone)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself, which runs, completes and explains itself."""
        return self.loaded.make_context(info_name, args, parent, **extra)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stm-backends {stm_backends.__version__}")
        raise typer.Exit


def _require_complete(result: object, **options: object) -> None:
    from stm_backends.cli.observing import require_complete  # noqa: PLC0415 -- the help needs none of it

    require_complete(result, **options)


@app.callback(cls=Commands, result_callback=_require_complete)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    with _importing():
        from stm_backends.cli.observing import begin  # noqa: PLC0415 -- as above

    begin()


def _add(name: str, panel: str, sentences: str) -> None:
    @app.command(name, cls=Later, help=sentences, rich_help_panel=panel)
    def listed() -> None: ...


for _panel, _group in _COMMANDS.items():
    for _name, (_, _sentences) in _group.items():
        _add(_name, _panel, _sentences)
