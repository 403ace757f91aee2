"""The commands of `stm-backends`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TextIO

import typer
from typer.models import CommandInfo

import stm_backends
from stm_backends.admin.importing import OnConflict
from stm_backends.admin.receipt import Receipt
from stm_backends.backend import open_backend
from stm_backends.cli import datastores, durations, erasing, graphs, render, transfer
from stm_backends.cli.compacting import compact
from stm_backends.cli.completion import conversations
from stm_backends.cli.conformance import conformance
from stm_backends.cli.copying import copy
from stm_backends.cli.exports import MIB, ExportFile, FileLimits, export_file
from stm_backends.cli.files import NotWritten, creating, is_standard, writing
from stm_backends.cli.inspecting import inspect
from stm_backends.cli.listing import list_
from stm_backends.cli.observing import begin, observer, require_complete
from stm_backends.cli.options import (
    URL_VARIABLE,
    BackendName,
    Command,
    Commands,
    Create,
    SealingName,
    Url,
    UrlOfName,
)
from stm_backends.cli.outcome import (
    FAILED,
    counted,
    fail,
    interruptible,
    reported,
    run,
    say_wrong,
)
from stm_backends.cli.progress import Progress
from stm_backends.cli.purging import expire, purge
from stm_backends.cli.reading import history
from stm_backends.cli.replay import readback
from stm_backends.cli.replay.conversations import read_conversations
from stm_backends.cli.replay.pods import SMALLEST_SUMMARY, Setup
from stm_backends.cli.replay.report import put_together
from stm_backends.cli.replay.run import Replay, RunReport
from stm_backends.cli.resealing import reseal
from stm_backends.cli.seals import require_keys, require_same_seal
from stm_backends.cli.searching import search
from stm_backends.cli.showing import show
from stm_backends.cli.stats import stats
from stm_backends.cli.usage import usage
from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError
from stm_backends.records.keys import memory_key
from stm_backends.sealing.naming import load_sealing
from stm_backends.types import MemoryBudget, ShortTermMemoryConfig

app = typer.Typer(
    help="Conversation memory shared by many processes: try, inspect, move and erase it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TEMPORARY: Final = " (temporary)"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stm-backends {stm_backends.__version__}")
        raise typer.Exit


@app.callback(cls=Commands, result_callback=require_complete)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    begin()


@app.command()
def replay(  # noqa: PLR0913, PLR0917 -- one per option
    file: Annotated[
        Path,
        typer.Argument(
            help='JSON Lines, one conversation per line: {"session", "turns": [{"user", "assistant", '
            '"tools": [{"name", "arguments", "results"}]}]} or {"messages": [{"role", "content"}]}.',
            metavar="FILE",
        ),
    ],
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
    pods: Annotated[int, typer.Option(help="How many pods (processes) share the conversations.", min=1)] = 4,
    strategy: Annotated[
        Literal["rolling_summary", "truncation"], typer.Option(help="The strategy of the memory.")
    ] = "rolling_summary",
    full_zone_turns: Annotated[
        int, typer.Option(help="How many of the newest turns are shown in full.", min=0)
    ] = 5,
    summary_max_tokens: Annotated[
        int, typer.Option(help="The maximum length of a summary, in tokens.", min=SMALLEST_SUMMARY)
    ] = 1000,
    fold_batch_turns: Annotated[
        int, typer.Option(help="How many turns must be pending before a summary is written.", min=1)
    ] = 1,
    kill_every: Annotated[
        float | None,
        typer.Option(
            help="Kill a pod whenever all have worked for so many seconds, and start a new one.", min=0.01
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="How many turns a pod works on at the same time.", min=1)
    ] = 2,
    tenant: Annotated[str, typer.Option(help="The tenant to store under.")] = "demo",
    user: Annotated[str, typer.Option(help="The user to store under.")] = "replay",
    limit: Annotated[
        int | None, typer.Option(help="Replay only the first N conversations.", metavar="N", min=1)
    ] = None,
    create: Create = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Erase existing copies of these conversations first.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this file as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Replay conversations on several pods at once, and verify what is stored.

    Each pod is a separate process. Successive turns of a conversation go to different pods. Afterwards
    everything is read back, the transcripts too: the exit status is 1 if an acknowledged turn is lost,
    duplicated or out of order.

    The conversations stay in the database of --url or STM_BACKENDS_URL, under --tenant and --user. Without a
    URL and without --backend, a temporary SQLite file is used and removed.
    """
    origin, turns, added = "", 0, 0

    def show(run: RunReport) -> None:
        nonlocal added
        added = run.turns
        progress.show(run.turns, f"{run.killed} killed" if run.killed else "")

    def so_far() -> str:
        if not added:
            return "No turn was added; run the command again."
        done = f"{added:,} of {counted(turns, 'turn')} had been added"
        if origin == _TEMPORARY:
            return f"{done}; the temporary database is removed. Run the command again."
        again = "run the command again" if replace else "run the command again with --replace"
        return f"{done} and are kept; {again} to start over."

    with reported(), interruptible(so_far), contextlib.ExitStack() as cleanup:
        conversations = read_conversations(file, limit=limit)
        origin = " (from STM_BACKENDS_URL)" if url and url == os.environ.get(URL_VARIABLE) else ""
        if backend is None and url is None:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="stm-replay-"))
            url, origin = f"sqlite:///{folder}/replay.db", _TEMPORARY
        setup = Setup(
            backend=backend or datastores.given(url),
            url=url if backend else None,
            tenant=tenant,
            user=user,
            config=ShortTermMemoryConfig(
                strategy,
                MemoryBudget(full_zone_turns, summary_max_tokens, total_max_tokens=0),
                summarizer_timeout_s=2.0,
                fold_batch_turns=fold_batch_turns,
                transcript=True,
            ),
            sealing=sealing,
        )
        for conversation in conversations:
            memory_key(setup.key(conversation.session))
        # Opened first, so that an unwritable path is reported before the work is done.
        numbers = cleanup.enter_context(writing(json_file)) if json_file else None
        turns = sum(len(conversation.turns) for conversation in conversations)
        what = f"{counted(len(conversations), 'conversation')}, {counted(turns, 'turn')}"
        owner, where = transfer.user_composite(tenant, user), datastores.shown(setup.backend, setup.url)
        typer.echo(render.plain(f"Replaying {what}, as {owner}, in {where}{origin}"))
        prepared = run(
            readback.prepare(
                setup, conversations, create=create, replacing=replace, require_owner=require_same_seal
            ),
            creates=True,
        )
        start = time.monotonic()
        with Progress(turns, "replaying", "turns") as progress:
            done = Replay(
                setup,
                conversations,
                pods=pods,
                concurrency=concurrency,
                kill_every=kill_every,
                on_turn=show,
            ).run()
            wait = math.ceil(min(readback.FLUSH_S, setup.lease_s(prepared.deadline)))
            leases = done.killed and strategy == "rolling_summary"
            progress.say(
                f"waiting up to {wait} s for the leases of killed pods" if leases else "reading back"
            )
            read = run(readback.read_back(setup, conversations))
        report = put_together(
            setup,
            conversations,
            done,
            read,
            backend=prepared.name,
            pods=pods,
            kill_every=kill_every,
            seconds_in_all=time.monotonic() - start,
        )
        if numbers is not None:
            json.dump(report.as_json(), numbers, indent=2)
        render.console.print(render.report(report))
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def drivers(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed backends, with the problem and its remedy for those that cannot be used."""
    diagnoses = plugins.diagnose()
    if as_json:
        facts = [dataclasses.asdict(one) | {"install": one.install} for one in diagnoses]
        typer.echo(json.dumps(facts, indent=2))
    else:
        render.drivers(diagnoses)
    if any(one.state in ("broken", "ambiguous", "newer contract") for one in diagnoses):
        raise typer.Exit(FAILED)


@app.command()
def schema(
    backend: Annotated[
        str | None,
        typer.Argument(help="The backend's name. Not needed if --url is given.", metavar="NAME"),
    ] = None,
    url: UrlOfName = None,
) -> None:
    """Print the statements that --create would run, in the datastore's own language.

    The URL determines the schema, table or database to set up. The command does not connect to the datastore,
    and does not need the backend's client library.
    """
    with reported():
        where = backend or datastores.given(url)
        text = plugins.schema(where, url=url if backend else None)
    if text is None:
        name = plugins.scheme_of(where) or where
        typer.echo(f"The backend {name!r} needs no setup.", err=True)
    else:
        typer.echo(text.rstrip("\n"))


@app.command()
def ping(
    where: Annotated[
        str | None, typer.Argument(help="A URL, or a backend's name.", metavar="URL_OR_NAME")
    ] = None,
    backend: BackendName = None,
    url: Url = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Load a record of this tenant, for a role that may use no other.", metavar="TENANT"
        ),
    ] = None,
    create: Create = False,
) -> None:
    """Load one record from the datastore, and print how long that took."""

    async def work() -> tuple[str, float]:
        by_url = where is not None and ":" in where
        async with datastores.chosen(where or backend, None if by_url else url, create=create) as opened:
            return opened.name, await opened.ping(whose[0])

    with reported():
        whose = transfer.owner(tenant) if tenant else (None, None)
        if whose[1] is not None:
            raise ConfigurationError("--tenant is written TENANT, as in acme")
    name, seconds = run(work(), creates=True)
    typer.echo(f"{name}: answered in {render.milliseconds(seconds * 1e3)} ms")


app.command()(show)
app.command()(history)
app.command()(inspect)
app.command("ls")(list_)
app.command()(search)
app.command()(usage)
app.command()(stats)


@app.command("export")
def export_(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="Conversations, as tenant:user:session.", metavar="KEY", autocompletion=conversations
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Export all conversations of a user.", metavar="TENANT:USER")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write. [default: standard output, -]", metavar="FILE"
        ),
    ] = None,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Export conversations as JSON Lines, one per line.

    With --user, the vertices of the user's graph, which is its long-term memory, follow, one per line.

    An unreadable conversation or vertex is reported and skipped, and the exit status is 1. So are the turns
    of a page that is damaged: the conversation is exported without them. The file is replaced in one step at
    the end; if nothing could be exported, an existing file is kept.

    Logs of agent frameworks (OpenAI Agents sessions, LangChain messages) are exported as conversations are.
    Saved states are not; `copy` copies them.
    """
    others = list[str]()
    exported = transfer.Exported(user)

    async def work(out: TextIO) -> None:
        nonlocal others
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            if whose and whose[1]:
                others = await transfer.count_others(opened, whose[0], whose[1], graph=False)
            await transfer.write_export(
                opened,
                transfer.selected(opened, wanted, (whose[0], whose[1]) if whose and whose[1] else None),
                out,
                exported,
            )
            if whose and whose[1]:
                await graphs.write(
                    opened,
                    (whose[0], whose[1]),
                    out,
                    failed=exported.unread_vertices.failed,
                    on_written=exported.wrote_vertex,
                )

    def so_far() -> str:
        if is_standard(output):
            return f"{exported} had been written; run the command again for all of them."
        return f"{output} was not written; run the command again."

    with reported(), interruptible(so_far):
        if bool(keys) == bool(user):
            raise ConfigurationError(
                "give either conversations (KEY...) or all of a user (--user TENANT:USER)"
            )
        wanted = [transfer.conversation_key(key) for key in keys or ()]
        whose = transfer.owner(user) if user else None
        if whose and whose[1] is None:
            raise ConfigurationError("--user is written TENANT:USER, as in acme:u123")
        with writing(output) as out:
            run(work(out))
            transfer.mention(others, "written")
            if not exported.count:
                if not exported.say_unread():
                    say_wrong(
                        "there is no conversation to export; list them with: stm-backends ls TENANT:USER"
                    )
                raise typer.Exit(FAILED)
    if not is_standard(output):
        typer.echo(f"{exported} written to {output}", err=True)
    if exported.say_unread():
        raise typer.Exit(FAILED)


@app.command("import")
def import_(  # noqa: PLR0913, PLR0917 -- each is an option
    file: Annotated[
        Path,
        typer.Argument(
            help="A file that `export` wrote, or with states that a memory has saved; - is standard input.",
            metavar="FILE",
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add missing turns to conversations that exist already.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace conversations that exist already.")
    ] = False,
    ttl: Annotated[
        str | None,
        typer.Option(
            help=f"Time to live of what is imported, from now on: {durations.SPELLING}. [default: no expiry]",
            metavar="DURATION",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Import only what belongs to this tenant or user, and skip all other lines.",
            metavar="TENANT[:USER]",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="The conversation of a saved state that does not name its own.",
            metavar="TENANT:USER:SESSION",
        ),
    ] = None,
    max_line_mib: Annotated[
        int, typer.Option(help="The longest line, in MiB of text. Memory grows with it.", min=1)
    ] = FileLimits().line // MIB,
    max_total_mib: Annotated[
        int, typer.Option(help="The longest file, in MiB of text.", min=1)
    ] = FileLimits().total // MIB,
    max_turns: Annotated[
        int, typer.Option(help="The most turns of one conversation.", min=1)
    ] = FileLimits().turns,
    create: Create = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Import exported conversations and graphs. Fails if one of them exists already.

    With --merge, missing turns, vertices and edges are added. With --replace, what exists is replaced.

    A line may also be a state that PenguiFlow's memory has saved, with its conversation as "key".

    The whole file is checked before anything is stored. It must not change meanwhile. With --only, lines of
    other tenants and users are not imported. With --merge, --ttl also applies to existing conversations that
    get a turn.
    """
    imported = transfer.Imported()
    on_conflict: OnConflict = "merge" if merge else "replace" if replace else "refuse"
    limits = FileLimits(line=max_line_mib * MIB, total=max_total_mib * MIB, turns=max_turns)

    async def work(file: ExportFile) -> None:
        where = backend or datastores.given(url)
        async with open_backend(
            where,
            url=url if backend else None,
            create=create,
            sealing=load_sealing(sealing),
            observer=observer(),
        ) as opened:
            await transfer.import_all(
                opened,
                file,
                on_conflict=on_conflict,
                imported=imported,
                ttl=ttl_s,
                require_owner=partial(require_same_seal, opened),
            )

    with reported(), interruptible(lambda: imported.so_far(on_conflict)):
        if merge and replace:
            raise ConfigurationError("give --merge or --replace, not both")
        ttl_s = durations.optional("--ttl", ttl)
        whose = transfer.owner(only) if only is not None else None
        of = None if key is None else transfer.conversation_key(key)
        with export_file(file, limits=limits, only=whose, of=of) as exported:
            try:
                run(work(exported), creates=True)
            except typer.Exit:
                if imported.done:
                    typer.echo(imported.so_far(on_conflict), err=True)
                raise
    if imported.skipped:
        typer.echo(f"{counted(imported.skipped, 'line')} of others skipped", err=True)
        if not imported.done:
            say_wrong(f"the file has nothing of {only}")
            raise typer.Exit(FAILED)
    if not merge:
        typer.echo(f"{imported} imported", err=True)
    elif changed := imported.changed + imported.changed_vertices:
        typer.echo(f"{imported} merged, {changed} of them changed", err=True)
    else:
        typer.echo(f"{imported} merged, none of them changed", err=True)
    imported.holes.print(partial(typer.echo, err=True))
    if merge and imported.conversations and (imported.changed or ttl):
        typer.echo(_merged_ttl(ttl, unchanged=imported.conversations - imported.changed), err=True)


app.command()(copy)
app.command()(reseal)


@app.command()
def erase(
    what: Annotated[
        str,
        typer.Argument(
            help="A conversation (tenant:user:session), a user (tenant:user) or a tenant.",
            metavar="KEY|TENANT:USER|TENANT",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    receipt_file: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            help="Also write a receipt to this new file as JSON; it names the ids.",
            metavar="FILE",
        ),
    ] = None,
    keep_keys: Annotated[
        bool,
        typer.Option(
            "--keep-keys",
            help="Erase sealed records without --sealing. Data keys in a store of their own stay.",
        ),
    ] = False,
    backend: BackendName = None,
    url: Url = None,
    sealing: SealingName = None,
) -> None:
    """Erase a conversation, a user or a tenant, permanently.

    Logs of agent frameworks are erased as well. Afterwards everything is read again. The exit status is 1 if
    nothing was stored there, if another process has written in the meantime, or if the datastore could not
    remove all that it can, such as SQLite's log.
    """
    kinds = {0: "everything of the tenant", 1: "everything of the user"}
    with reported():
        transfer.check(what)
        if keep_keys and sealing:
            raise ConfigurationError("give --sealing or --keep-keys, not both: with --sealing, data keys go")
    if not yes:
        typer.confirm(
            f"Erase {kinds.get(what.count(':'), 'the conversation')} {render.plain(what)} permanently?",
            abort=True,
        )

    async def work() -> Receipt:
        async with datastores.chosen(backend, url, sealing=sealing) as opened:
            # A conversation has no keys of its own.
            if not keep_keys and what.count(":") < 2:
                await require_keys(opened, *transfer.owner(what))
            return await transfer.erase(opened, what)

    so_far = "Some records may be erased; run the command again to erase the rest."
    receipt, written = None, True
    with reported(), interruptible(lambda: so_far):
        try:
            # Opened first, so that an unwritable path is reported before anything is erased.
            with creating(receipt_file) if receipt_file else contextlib.nullcontext() as out:
                try:
                    receipt = run(work())
                except typer.Exit as end:
                    if end.exit_code == FAILED:  # an outage
                        typer.echo(so_far, err=True)
                    raise
                if out is not None:
                    datastore = datastores.shown(backend or datastores.given(url), url)
                    erasing.write(receipt, out, datastore=datastore)
        except NotWritten as error:
            # The records are erased all the same.
            fail(error)
            written = False
    # Last: the file stays if standard output is closed.
    if not (receipt and erasing.show(receipt, what, keep_keys=keep_keys) and written):
        raise typer.Exit(FAILED)


app.command()(purge)

app.command()(expire)

app.command()(compact)

app.command()(conformance)

_PANELS: Final = {
    "Look at what is stored": ("ls", "show", "history", "inspect", "search", "usage", "stats"),
    "Move it": ("export", "import", "copy"),
    "Remove it": ("erase", "purge", "expire"),
    "Datastores and keys": ("ping", "drivers", "schema", "compact", "reseal"),
    "Try and verify": ("replay", "conformance"),
}
"""The commands in the order of the help."""


def _arranged(commands: list[CommandInfo]) -> list[CommandInfo]:
    by_name = {one.name or getattr(one.callback, "__name__", ""): one for one in commands}
    for title, names in _PANELS.items():
        for name in names:
            by_name[name].cls, by_name[name].rich_help_panel = Command, title
    return [by_name[name] for names in _PANELS.values() for name in names]


app.registered_commands = _arranged(app.registered_commands)


def _merged_ttl(ttl: str | None, *, unchanged: int) -> str:
    """Return what a merge means for the time to live of conversations."""
    if ttl is None:
        return "Conversations that got a turn do not expire; --ttl sets a time to live."
    left = f"; {counted(unchanged, 'unchanged conversation')} kept the old time to live" if unchanged else ""
    return (
        f"Conversations that got a turn expire in {ttl.strip()}{left}. `stm-backends expire` sets it for all."
    )
