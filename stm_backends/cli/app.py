"""The commands of `stm-backends`: what can be asked for, and what is printed."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeAlias

import typer

import stm_backends
from stm_backends import plugins
from stm_backends.backend import Backend, open_backend
from stm_backends.cli import readback, render, transfer
from stm_backends.cli.conformance import conformance
from stm_backends.cli.conversations import read_conversations
from stm_backends.cli.outcome import FAILED, reported, run
from stm_backends.cli.pods import SMALLEST_SUMMARY, Setup
from stm_backends.cli.progress import Progress
from stm_backends.cli.replay import Replay
from stm_backends.cli.report import put_together
from stm_backends.errors import ConfigurationError
from stm_backends.keys import memory_key, parse_composite
from stm_backends.types import MemoryBudget, MemoryKey, ShortTermMemoryConfig

app = typer.Typer(
    help="Conversation memory that many processes share: try it, look at it, move it, erase it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

BackendName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--backend", "-b", help="The backend's name. Not needed if the URL says it.", metavar="NAME"
    ),
]
Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        envvar="STM_BACKENDS_URL",
        help="Where the datastore is, e.g. sqlite:///conversations.db",
        metavar="URL",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stm-backends {stm_backends.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def replay(  # noqa: PLR0913, PLR0917 -- an option each
    file: Annotated[
        Path,
        typer.Argument(
            help='JSON Lines, one conversation a line: {"session", "turns": [{"user", "assistant", '
            '"tools"}]} or {"messages": [{"role", "content"}]}.',
            metavar="FILE",
        ),
    ],
    backend: BackendName = None,
    url: Url = None,
    pods: Annotated[int, typer.Option(help="How many processes share the conversations.", min=1)] = 4,
    strategy: Annotated[
        Literal["rolling_summary", "truncation", "none"], typer.Option(help="What the memory keeps.")
    ] = "rolling_summary",
    full_zone_turns: Annotated[int, typer.Option(help="Newest turns that are shown in full.", min=0)] = 5,
    summary_max_tokens: Annotated[
        int, typer.Option(help="The longest summary.", min=SMALLEST_SUMMARY)
    ] = 1000,
    fold_batch_turns: Annotated[
        int, typer.Option(help="How many turns must wait to be worth a summary.", min=1)
    ] = 1,
    kill_every: Annotated[
        float | None,
        typer.Option(help="Kill a random process every so many seconds, and start another.", min=0.01),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Turns that a process works on at once.", min=1)] = 2,
    tenant: Annotated[str, typer.Option(help="The tenant to store under.")] = "demo",
    user: Annotated[str, typer.Option(help="The user to store under.")] = "replay",
    limit: Annotated[
        int | None, typer.Option(help="Replay only the first so many conversations.", min=1)
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Set up what the datastore needs first.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Erase these conversations first if they are there already.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file, too.", metavar="FILE")
    ] = None,
) -> None:
    """Replay conversations on several processes at once and verify what is stored.

    Each turn goes to whichever process is next, so that every conversation wanders over all of them.
    Afterwards all is read back: the exit status is 1 if an acknowledged turn is lost, doubled or out of
    order. Without --backend and --url a temporary SQLite file is used.
    """
    with contextlib.ExitStack() as cleanup, reported():
        conversations = read_conversations(file, limit=limit)
        if backend is None and url is None:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="stm-replay-"))
            url = f"sqlite:///{folder}/replay.db"
        setup = Setup(
            backend=backend or _given(url),
            url=url if backend else None,
            tenant=tenant,
            user=user,
            config=ShortTermMemoryConfig(
                strategy,
                MemoryBudget(full_zone_turns, summary_max_tokens, total_max_tokens=0),
                summarizer_timeout_s=2.0,
                fold_batch_turns=fold_batch_turns,
            ),
        )
        for conversation in conversations:
            memory_key(setup.key(conversation.session))
        name = run(readback.prepare(setup, conversations, create=create, replacing=replace))
        with Progress(sum(len(conversation.turns) for conversation in conversations)) as progress:
            done = Replay(
                setup,
                conversations,
                pods=pods,
                concurrency=concurrency,
                kill_every=kill_every,
                on_turn=progress.show,
            ).run()
            progress.say("reading back, once the last summaries are written")
            read = run(readback.read_back(setup, conversations))
        report = put_together(setup, conversations, done, read, backend=name, pods=pods)
        if json_file is not None:
            with _writing(json_file) as out:
                json.dump(report.as_json(), out, indent=2)
        render.console.print(render.report(report))
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def drivers() -> None:
    """List the installed backends, and for those that are broken, why and what would help."""
    diagnoses = plugins.diagnose()
    render.console.print(render.drivers(diagnoses))
    if any(one.state in ("broken", "ambiguous") for one in diagnoses):
        raise typer.Exit(FAILED)


@app.command()
def ping(
    where: Annotated[
        str | None, typer.Argument(help="A URL, or a backend's name.", metavar="URL_OR_NAME")
    ] = None,
    backend: BackendName = None,
    url: Url = None,
) -> None:
    """Ask the datastore for one record, and say how long that took."""

    async def work() -> tuple[str, float]:
        async with open_backend(where) if where and ":" in where else _open(where or backend, url) as opened:
            return opened.name, await opened.ping()

    name, seconds = run(work())
    typer.echo(f"{name}: answered in {seconds * 1e3:.1f} ms")


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="The conversation, as tenant:user:session.", metavar="KEY")],
    backend: BackendName = None,
    url: Url = None,
    full_zone_turns: Annotated[
        int, typer.Option(help="How many of the newest turns count as recent.", min=0)
    ] = 5,
) -> None:
    """Show one conversation: its summary, what is pending, what is recent, health and tokens."""

    async def work() -> dict[str, Any]:
        parsed = parse_composite(key)
        async with _open(backend, url) as opened:
            return await opened.sessions.export(parsed)

    document = run(work())
    with reported():
        render.console.print(render.conversation(document, key, full_zone_turns=full_zone_turns))


@app.command("ls")
def list_(
    whose: Annotated[str, typer.Argument(help="A tenant, or one of its users.", metavar="TENANT[:USER]")],
    backend: BackendName = None,
    url: Url = None,
) -> None:
    """List the users of a tenant, or the conversations of a user, one a line."""

    async def work() -> None:
        tenant, user = transfer.owner(whose)
        async with _open(backend, url) as opened:
            if user is None:
                async for one in opened.sessions.users(tenant):
                    typer.echo(render.plain(transfer.user_composite(tenant, one)))
            else:
                async for key in opened.sessions.list(tenant, user):
                    typer.echo(render.plain(key.composite()))

    run(work())


@app.command("export")
def export_(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Conversations, as tenant:user:session.", metavar="KEY")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Export all conversations of a user.", metavar="TENANT:USER")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write, instead of standard output.", metavar="FILE"),
    ] = None,
    backend: BackendName = None,
    url: Url = None,
) -> None:
    """Write conversations as JSON Lines, one a line, to be imported elsewhere."""
    with reported():
        if bool(keys) == bool(user):
            raise ConfigurationError(
                "give either conversations (KEY...) or all of a user (--user TENANT:USER)"
            )
        wanted = [parse_composite(key) for key in keys or ()]
        whose = transfer.owner(user) if user else None
        if whose and whose[1] is None:
            raise ConfigurationError("--user is written TENANT:USER")

    async def work(out: TextIO) -> int:
        async with _open(backend, url) as opened:
            return await transfer.write_export(opened, _selected(opened, wanted, whose), out)

    with _writing(output) as out:
        count = run(work(out))
    if output is not None:
        typer.echo(f"{_counted(count, 'conversation')} written to {output}", err=True)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What export wrote.", metavar="FILE")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the turns that are missing to conversations that exist.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace conversations that exist.")] = False,
    backend: BackendName = None,
    url: Url = None,
) -> None:
    """Store exported conversations; one that exists already is refused unless told otherwise."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    async def work(lines: TextIO) -> None:
        async with _open(backend, url) as opened:
            await transfer.read_import(
                opened,
                file,
                lines,
                on_conflict="merge" if merge else "replace" if replace else "refuse",
                done=counted,
            )

    with reported():
        if merge and replace:
            raise ConfigurationError("give --merge or --replace, not both")
        with _reading(file) as lines:
            try:
                run(work(lines))
            finally:
                typer.echo(f"{_counted(count, 'conversation')} imported", err=True)


@app.command()
def erase(
    what: Annotated[
        str,
        typer.Argument(
            help="A conversation (tenant:user:session), all of a user (tenant:user) or all of a tenant.",
            metavar="KEY|TENANT:USER|TENANT",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    backend: BackendName = None,
    url: Url = None,
) -> None:
    """Erase a conversation, or everything of a user or of a tenant, for ever."""
    kinds = {0: "everything of the tenant", 1: "everything of the user"}
    with reported():
        transfer.check(what)
    if not yes:
        typer.confirm(
            f"Erase {kinds.get(what.count(':'), 'the conversation')} {render.plain(what)}, for ever?",
            abort=True,
        )

    async def work() -> int:
        async with _open(backend, url) as opened:
            return await transfer.erase(opened, what)

    count = run(work())
    typer.echo(f"{_counted(count, 'record')} erased" if count else "there was nothing to erase")


app.command()(conformance)


def _open(backend: str | None, url: str | None) -> Backend:
    return open_backend(backend, url=url) if backend else open_backend(_given(url))


def _given(url: str | None) -> str:
    if not url:
        raise ConfigurationError(
            "say where the datastore is: give --url, or set STM_BACKENDS_URL (e.g. sqlite:///conversations.db)"
        )
    return url


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


async def _selected(
    backend: Backend, keys: list[MemoryKey], whose: tuple[str, str | None] | None
) -> AsyncIterator[MemoryKey]:
    for key in keys:
        yield key
    if whose and whose[1]:
        async for key in backend.sessions.list(whose[0], whose[1]):
            yield key


@contextlib.contextmanager
def _writing(path: Path | None) -> Generator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with _file(path, "w") as out:
        yield out


@contextlib.contextmanager
def _reading(path: Path) -> Generator[TextIO]:
    with _file(path, "r") as lines:
        yield lines


def _file(path: Path, mode: Literal["r", "w"]) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from error
