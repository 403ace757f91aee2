"""The command `conformance`: put an installed backend to the test, and say per clause what was found.

The checks are run by pytest, as in one's own tests; this is the way for those who have written none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from stm_backends.cli.options import Create, UrlOfName
from stm_backends.cli.outcome import FAILED, INTERRUPTED, MISUSED, reported, say_wrong
from stm_backends.cli.render import console, plain
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import Unavailable

if TYPE_CHECKING:
    from stm_backends.testing.runner.plugin import Reporter

_NEEDED: Final = ("pytest", "hypothesis")


def conformance(  # noqa: PLR0913, PLR0917 -- an option each
    backend: Annotated[str, typer.Argument(help="The backend's name.", metavar="NAME")],
    url: UrlOfName = None,
    profile: Annotated[
        Literal["driver", "store", "memory", "all"] | None,
        typer.Option(
            help="Check the driver (which earns the rest), or what is built on it.", show_default="driver"
        ),
    ] = None,
    clause: Annotated[
        list[str] | None,
        typer.Option(help="Check this clause only, as driver.fold; may be given again.", metavar="CLAUSE"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the slow checks.")] = False,
    create: Create = False,
    server: Annotated[str, typer.Option(help="The server's version, for the report.", metavar="TEXT")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.", metavar="FILE")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write the results as JUnit XML.", metavar="FILE")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report as a page.", metavar="FILE")
    ] = None,
) -> None:
    """Put a backend to the test: every clause of the contract, passed or failed, and how.

    Everything is done under fresh keys and removed again. The exit status is 1 if a clause is broken.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        typer.echo(
            f"The conformance suite needs {' and '.join(missing)}, which {are} not installed:\n"
            '  pip install "stm-backends[cli,conformance]"',
            err=True,
        )
        raise typer.Exit(MISUSED)
    with reported():
        # A datastore that cannot be used is one line, as with every other command.
        asyncio.run(_use_once(backend, url, create=create))
    options = {
        "--stm-backend": backend,
        "--stm-url": url,
        "--stm-profile": profile,
        "--stm-server": server,
        "--stm-json": json_file,
        "--stm-html": html_file,
        "--junit-xml": junit_file,
    }
    reporter, interrupted = _run(
        [f"{name}={value}" for name, value in options.items() if value]
        + [f"--stm-clause={name}" for name in clause or ()]
        + ["--stm-quick"] * quick
        + ["--stm-create"] * create
    )
    for text, colour in reporter.lines():
        console.print(Text(plain(text), style=colour), soft_wrap=True)
    if interrupted:
        typer.echo(
            "Interrupted. The checks that were not reached are left out; run the same again.", err=True
        )
        raise typer.Exit(INTERRUPTED)
    if not reporter.run.ok:
        raise typer.Exit(FAILED)


async def _use_once(backend: str, url: str | None, *, create: bool) -> None:
    driver = plugins.open_driver(backend, url=url, create=create)
    if not isinstance(cast("object", driver), Driver):
        # The suite says what it lacks.
        return
    try:
        await driver.open()
        await driver.load(Key("check:conformance:memory", "record"))
    except Unavailable as error:
        if not create and "create=True" in str(error):
            say_wrong(str(error))
            typer.echo("Run the command again with --create to set up what the datastore needs.", err=True)
            raise typer.Exit(FAILED) from None
        raise
    finally:
        await driver.close()


def _run(options: list[str]) -> tuple[Reporter, bool]:
    """Run the suite by pytest, untouched by whatever pytest is configured to do where we stand.

    Returns who knows what was found, and whether Ctrl-C ended the run.
    """
    import pytest  # noqa: PLC0415 -- of an extra

    # Neither plugins nor options that somebody's own tests want have a say here.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    watcher = _Watcher()
    with tempfile.TemporaryDirectory(prefix="stm-conformance-") as folder, watcher.bar:
        # Nothing is left behind in the directory where the command is run.
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        status = pytest.main(
            [
                *(
                    "-p",
                    "stm_backends.testing.runner.plugin",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:terminal",
                ),
                *("-c", os.devnull, "--rootdir", str(Path.cwd()), "--pyargs", "stm_backends.testing"),
                *options,
            ],
            plugins=[watcher],
        )
    if status == pytest.ExitCode.USAGE_ERROR:
        # pytest has said what is wrong.
        raise typer.Exit(MISUSED)
    return watcher.reporter(), watcher.interrupted


class _Watcher:
    """A plugin of pytest that shows how far the run is, and keeps what it has found."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("checks"),
            TimeElapsedColumn(),
            TextColumn("[red]{task.fields[failed]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self.bar.add_task("checking", total=None, failed="")
        self._failed = 0
        self.interrupted = False
        self._reporter: Any = None

    def pytest_collection_finish(self, session: Any) -> None:
        """Learn how many checks there will be."""
        self._reporter = session.config.pluginmanager.get_plugin("stm-backends-reporter")
        self.bar.update(self._task, total=len(session.items))

    def pytest_keyboard_interrupt(self) -> None:
        """Note that Ctrl-C has ended the run."""
        self.interrupted = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name the check that begins."""
        name = nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        self.bar.update(self._task, description=name[:48].ljust(48))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count what failed, and what is done."""
        self._failed += report.failed
        failed = f"{self._failed} failed" if self._failed else ""
        self.bar.update(self._task, advance=report.when == "teardown", failed=failed)

    def reporter(self) -> Reporter:
        """Return who knows what the run has found."""
        if self._reporter is None:
            typer.echo("The suite could not be started; pytest says why, above.", err=True)
            raise typer.Exit(FAILED)
        return self._reporter
