"""The command `conformance`: check an installed backend and report per clause.

pytest runs the checks, as it does in a test suite; the command needs no test code.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from stm_backends.errors import StmError, Unavailable
from stm_backends.extras import install_command

if TYPE_CHECKING:
    from stm_backends.testing.runner.plugin import Reporter

_NEEDED: Final = ("pytest", "hypothesis")

_SLACK_S: Final = 5.0
"""Time that a busy machine may add to a driver's deadline. The suite explains a driver that never answers."""


def conformance(  # noqa: PLR0913, PLR0917 -- an option each
    backend: Annotated[str, typer.Argument(help="The backend's name.", metavar="NAME")],
    url: UrlOfName = None,
    profile: Annotated[
        Literal["driver", "store", "graph", "memory", "all"] | None,
        typer.Option(
            help="Check the driver, the store, graph or memory built on it, or all.",
            show_default="driver",
        ),
    ] = None,
    clause: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only this clause, such as driver.fold; repeat the option for more.", metavar="CLAUSE"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out slow checks and shorten others.")] = False,
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
    """Check that a backend keeps every clause of the contract, and explain failures.

    The checks use new keys and remove what they store. If the URL names one host and its port, a proxy in
    front of that server causes network faults. The exit status is 1 if a check fails.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        typer.echo(
            f"The conformance suite needs {' and '.join(missing)}, which {are} not installed:\n"
            f"  {install_command('stm-backends', 'cli', 'conformance')}",
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
            "Interrupted. The report leaves out the checks that did not run. Run the command again for all.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED)
    if not reporter.run.ok:
        raise typer.Exit(FAILED)


async def _use_once(backend: str, url: str | None, *, create: bool) -> None:
    driver = plugins.open_driver(backend, url=url, create=create)
    if not isinstance(cast("object", driver), Driver):
        # The suite reports what it lacks.
        return
    from stm_backends.testing.workbench.watchdog import WATCHDOG  # noqa: PLC0415 -- of an extra

    limit = driver.traits.deadline + _SLACK_S
    # Nothing else ends a driver that blocks the event loop.
    with WATCHDOG.watching("the first use of the driver", 2 * limit):
        await _open_and_load(driver, limit, create=create)


async def _open_and_load(driver: Driver, limit: float, *, create: bool) -> None:
    try:
        async with asyncio.timeout(limit):
            await driver.open()
            await driver.load(Key("check:conformance:memory", "record"))
    except Unavailable as error:
        if not create and "create=True" in str(error):
            say_wrong(str(error))
            typer.echo("Run the command again with --create to set up what the datastore needs.", err=True)
            raise typer.Exit(FAILED) from None
        raise
    except StmError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001, S110 -- the suite says which line of the driver it was
        pass
    finally:
        with contextlib.suppress(Exception, SystemExit):
            async with asyncio.timeout(limit):
                await driver.close()


def _run(options: list[str]) -> tuple[Reporter, bool]:
    """Run the suite with pytest, without the configuration of the current directory.

    Returns the reporter, and whether Ctrl-C ended the run.
    """
    import pytest  # noqa: PLC0415 -- of an extra

    # Plugins and options of other tests must not change the run.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    watcher = _Watcher()
    with tempfile.TemporaryDirectory(prefix="stm-conformance-") as folder, watcher.bar:
        # Hypothesis must not write to the current directory.
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
        # pytest has printed the reason.
        raise typer.Exit(MISUSED)
    return watcher.reporter(), watcher.interrupted


class _Watcher:
    """A plugin of pytest that shows progress and keeps the reporter."""

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
        """Note the number of checks."""
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
        """Count failed and finished checks."""
        self._failed += report.failed
        failed = f"{self._failed} failed" if self._failed else ""
        self.bar.update(self._task, advance=report.when == "teardown", failed=failed)

    def reporter(self) -> Reporter:
        """Return the reporter, which has the results."""
        if self._reporter is None:
            typer.echo("The suite could not be started; see the message of pytest above.", err=True)
            raise typer.Exit(FAILED)
        return self._reporter
