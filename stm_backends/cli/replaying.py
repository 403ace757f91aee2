"""The command `replay`: conversations on several pods at once, and what is stored afterwards."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from stm_backends.cli import datastores, render, transfer
from stm_backends.cli.files import writing
from stm_backends.cli.options import URL_VARIABLE, BackendName, Create, SealingName, Url
from stm_backends.cli.outcome import FAILED, counted, interruptible, reported, run
from stm_backends.cli.progress import Progress
from stm_backends.cli.replay import readback
from stm_backends.cli.replay.conversations import read_conversations
from stm_backends.cli.replay.pods import SMALLEST_SUMMARY, Setup
from stm_backends.cli.replay.report import put_together
from stm_backends.cli.replay.run import Replay, RunReport
from stm_backends.cli.seals import require_same_seal
from stm_backends.records.keys import memory_key
from stm_backends.types import MemoryBudget, ShortTermMemoryConfig

_TEMPORARY: Final = " (temporary)"


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
    pods: Annotated[int, typer.Option(help="Number of pods (processes) to run.", min=1)] = 4,
    strategy: Annotated[
        Literal["rolling_summary", "truncation"], typer.Option(help="The strategy of the memory.")
    ] = "rolling_summary",
    full_zone_turns: Annotated[int, typer.Option(help="Number of newest turns shown in full.", min=0)] = 5,
    summary_max_tokens: Annotated[
        int, typer.Option(help="Maximum length of a summary, in tokens.", min=SMALLEST_SUMMARY)
    ] = 1000,
    fold_batch_turns: Annotated[
        int, typer.Option(help="Number of pending turns needed before a summary is written.", min=1)
    ] = 1,
    kill_every: Annotated[
        float | None,
        typer.Option(
            help="Kill a pod whenever all have worked for this many seconds, and start a new one.", min=0.01
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Number of turns that a pod works on at the same time.", min=1)
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

    Each pod is a separate process. Successive turns of a conversation go to different pods. Afterwards,
    everything is read back, including the transcripts: the exit status is 1 if an acknowledged turn is lost,
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
