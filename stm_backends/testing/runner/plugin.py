"""The pytest plugin: options for an installed backend, and a report per clause.

`-p stm_backends.testing` turns it on; the command `conformance` does so by itself. Other tests of a run are
not changed.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

if TYPE_CHECKING:
    from stm_backends.testing.runner.results import Outcome, Run
    from stm_backends.testing.runner.selection import Selection
    from stm_backends.testing.runner.terminal import Line
    from stm_backends.testing.workbench.check import Check
    from stm_backends.testing.workbench.drivers import Datastore, NamedDatastore

_GROUP: Final = "stm-backends"
_ATTRIBUTE: Final = "__stm_check__"
_SUITE_PROPERTIES: Final = "stm_suite_properties"

# Results travel in pytest's reports, which also arrive from the processes of pytest-xdist.
_RESULT: Final = "stm_check"
_PLANNED: Final = "stm_planned"
_UNFIT: Final = "stm_unfit"
_FINDING: Final = "stm_finding"

_SELECTION: Final = pytest.StashKey["Selection"]()
_SHORTEST_TTL: Final = pytest.StashKey[float]()
_IS_USED: Final = pytest.StashKey[bool]()
_TOLD: Final = pytest.StashKey[bool]()
_MEANS: Final = pytest.StashKey[dict[str, Any]]()

_HOW_TO_SEE_MORE: Final = re.compile(r"^\s*(\.\.\.Full output truncated|Use -v+ to get more diff)")
_LONGEST_LINE: Final = 300

_NAME_IT: Final = "name the backend to test: --stm-backend=NAME --stm-url=URL"
_NOTHING_TESTS_IT: Final = (
    "nothing here tests the backend of --stm-backend: add `--pyargs stm_backends.testing`; or omit "
    "--stm-backend and --stm-url, if your own classes name the datastore"
)

QUICK_TICK_S: Final = 0.15
TICK_S: Final = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the options."""
    group = parser.getgroup(_GROUP, "conformance of storage backends (stm-backends)")
    group.addoption(
        "--stm-backend",
        metavar="NAME",
        help="The installed backend to test with `--pyargs stm_backends.testing`.",
    )
    group.addoption("--stm-url", metavar="URL", help="The URL of its datastore.")
    group.addoption(
        "--stm-profile",
        action="append",
        choices=["driver", "store", "graph", "memory", "all"],
        help="What to check: the driver (the default), the store, graph or memory built on it, or all.",
    )
    group.addoption(
        "--stm-clause",
        action="append",
        metavar="NAME",
        help="Run only the checks of this clause, such as driver.fold; repeat the option for more.",
    )
    group.addoption(
        "--stm-quick",
        action="store_true",
        help="Leave out slow checks and shorten others: under 15 s on an embedded datastore.",
    )
    group.addoption(
        "--stm-tick",
        type=float,
        metavar="SECONDS",
        help=f"A time to live longer than any operation takes (default: {TICK_S}, quick: {QUICK_TICK_S}; "
        "at least the driver's min_ttl).",
    )
    group.addoption(
        "--stm-create", action="store_true", help="First set up the datastore, for example its tables."
    )
    group.addoption("--stm-server", metavar="TEXT", default="", help="The server's version, for the report.")
    group.addoption("--stm-json", metavar="FILE", help="Write the report as JSON.")
    group.addoption("--stm-html", metavar="FILE", help="Write the report as a page.")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare to collect results, and reject unknown clauses and backends, and unusable URLs."""
    if names := config.getoption("stm_clause"):
        from stm_backends.errors import ConfigurationError  # noqa: PLC0415 -- imported only where it is used
        from stm_backends.testing.workbench.clauses import require_clauses  # noqa: PLC0415 -- as above

        try:
            require_clauses(names)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
    if config.getoption("stm_backend"):
        config.stash[_SHORTEST_TTL] = _shortest_ttl(config)
    if not hasattr(config, "workerinput"):
        shown_once = ShownOnce()
        config.pluginmanager.register(shown_once)
        config.pluginmanager.register(Reporter(config, shown_once), Reporter.NAME)


def _shortest_ttl(config: pytest.Config) -> float:
    """Return the `min_ttl` of the backend that the options name; reject one that creates no driver.

    Done here, because in the fixture, every check would report the same error.
    """
    from stm_backends.drivers.plugins import open_driver  # noqa: PLC0415 -- as above
    from stm_backends.errors import StmError  # noqa: PLC0415 -- as above
    from stm_backends.testing.workbench.failures import origin, told  # noqa: PLC0415 -- as above

    try:
        driver = open_driver(**_options(config))
    except StmError as error:
        raise pytest.UsageError(str(error)) from None
    # A third-party plugin may raise anything, and its result may not be a driver yet.
    except Exception as error:  # noqa: BLE001 -- as said above
        where = origin(error)
        raise pytest.UsageError(
            f"the backend {config.getoption('stm_backend')!r} makes no driver: {told(error)}"
            + (f" (raised at {where})" if where else "")
        ) from None
    return getattr(getattr(driver, "traits", None), "min_ttl", 0.0)


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the arguments of `open_driver` and `open_at` that the options set."""
    return {
        "name_or_url": config.getoption("stm_backend"),
        "url": config.getoption("stm_url"),
        "create": bool(config.getoption("stm_create")),
    }


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note every check of a class before any selection."""
    report = yield
    if isinstance(collector, pytest.Class) and report.passed:
        for item in report.result:
            if isinstance(item, pytest.Item) and (check := _check_of(item)) is not None:
                _selection(item.config).note(item, check)
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note whether anything uses the datastore that the options name."""
    if "stm_datastore" in getattr(item, "fixturenames", ()):
        item.config.stash[_IS_USED] = True


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect the checks that this plugin's options do not select."""
    if config.getoption("stm_backend") and not config.stash.get(_IS_USED, False) and not session.testsfailed:
        # A report would name a datastore that was never opened.
        raise pytest.UsageError(_NOTHING_TESTS_IT)
    only_checks = bool(config.getoption("stm_clause"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        check = _check_of(item)
        if check is None:
            (left_out if only_checks else kept).append(item)
            continue
        from stm_backends.testing.runner.selection import profile_of  # noqa: PLC0415 -- as above

        if profile_of(item) and not config.getoption("stm_backend"):
            raise pytest.UsageError(_NAME_IT)
        (kept if _selection(config).keeps(item, check) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which checks will run, and list those that will not in a JUnit report."""
    if _SELECTION in session.config.stash:
        from stm_backends.testing.workbench.watchdog import WATCHDOG  # noqa: PLC0415 -- as above

        # Done now, because pytest captures the standard error while tests run.
        session.config.add_cleanup(WATCHDOG.keep_stderr())
        _keep_finalizers_out_of_parsing(session.config)
        _selection(session.config).begin(session.items)
        for item in session.items:
            if isinstance(item, pytest.Function) and _check_of(item) is not None:
                item.fixturenames.append(_SUITE_PROPERTIES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the facts about a check to its report, from which all kinds of reports are made."""
    check = _check_of(item)
    if check is None:
        return (yield)
    report = yield
    if call.when == "setup":
        # Also added to the item, so that they are in a JUnit report.
        item.user_properties += [("clause", check.clause.id), ("expected", check.sentence)]
    if not item.config.stash.get(_TOLD, False):
        item.config.stash[_TOLD] = True
        report.user_properties += [(_PLANNED, dict(_selection(item.config).left_out))]
    if call.when == "call" or report.outcome != "passed":
        report.user_properties += _found(item, check, call, report)
    return report


def pytest_enter_pdb() -> None:
    """Lift the time limit of a check in a debugger."""
    from stm_backends.testing.workbench.watchdog import WATCHDOG  # noqa: PLC0415 -- as above

    WATCHDOG.call_off()


def _keep_finalizers_out_of_parsing(config: pytest.Config) -> None:
    """Keep `ast.parse` from running finalizers until the end of the run.

    Up to Python 3.12, an `ast.parse` within an `ast.parse` makes the outer one raise a `SystemError`. That
    happens if a finalizer raises there and its traceback is formatted. Broken drivers leave such objects, and
    pytest and hypothesis often parse, even while one of their own errors ends the run.
    """
    parse: Callable[..., ast.AST] = ast.parse

    @functools.wraps(parse)
    def collecting_nothing(*args: Any, **options: Any) -> ast.AST:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **options)
        finally:
            if collecting:
                gc.enable()

    if sys.version_info < (3, 13):
        patch = pytest.MonkeyPatch()
        patch.setattr(ast, "parse", collecting_nothing)
        config.add_cleanup(patch.undo)


@pytest.fixture(scope="session")
def stm_suite_properties(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Record in a JUnit report how much of the contract is checked, and which checks are left out."""
    from stm_backends.testing.runner.results import Result, Run  # noqa: PLC0415 -- as above
    from stm_backends.testing.runner.selection import UNREACHED  # noqa: PLC0415 -- as above

    planned = {key: Result(**fields) for key, fields in _selection(request.config).left_out.items()}
    # The state after all selected checks have run.
    done = [result for result in planned.values() if result.reason == UNREACHED]
    run = Run(quick=bool(request.config.getoption("stm_quick")), planned=planned, results=done)
    record_testsuite_property("extent", run.extent())
    for result in run.left_out:
        record_testsuite_property("left out", f"{result.id}: {result.reason}")


@pytest.fixture
def stm_datastore(request: pytest.FixtureRequest) -> NamedDatastore:
    """The datastore that the options name."""
    from stm_backends.testing.workbench.drivers import NamedDatastore, open_at  # noqa: PLC0415 -- as above

    config = request.config
    if _SHORTEST_TTL not in config.stash:
        raise pytest.UsageError(_NAME_IT)
    tick = QUICK_TICK_S if config.getoption("stm_quick") else TICK_S
    return NamedDatastore(
        open=functools.partial(open_at, **_options(config)),
        # A driver may round up shorter times to live.
        tick=config.getoption("stm_tick") or max(tick, config.stash[_SHORTEST_TTL]),
        server=config.getoption("stm_server") or "",
    )


@pytest.fixture
def stm_networked_datastore(request: pytest.FixtureRequest, stm_datastore: NamedDatastore) -> Datastore:
    """The same with ample deadlines, and with the suite's proxy before its server or the reason why not."""
    from dataclasses import replace  # noqa: PLC0415 -- as above

    from stm_backends.testing.runner.behind import AMPLE_S, means, with_deadline  # noqa: PLC0415 -- as above
    from stm_backends.testing.workbench.drivers import open_at  # noqa: PLC0415 -- as above

    stash = request.config.stash
    if _MEANS not in stash:
        options = _options(request.config)
        ample = functools.partial(open_at, **with_deadline(options, AMPLE_S))
        stash[_MEANS] = {"open": ample, **means(options)}
    return replace(stm_datastore, **stash[_MEANS])


class Reporter:
    """Collects the results of checks and writes the reports that the options request."""

    NAME: Final = "stm-backends-reporter"

    def __init__(self, config: pytest.Config, shown_once: ShownOnce) -> None:
        self._config = config
        self._shown_once = shown_once
        self._start = time.monotonic()
        self._asked = any(config.getoption(name) for name in ("stm_backend", "stm_json", "stm_html"))

    @functools.cached_property
    def run(self) -> Run:
        """The results so far."""
        from stm_backends.testing.runner.results import Run  # noqa: PLC0415 -- only a run that reports needs it

        return Run(
            backend=self._config.getoption("stm_backend") or "",
            server=self._config.getoption("stm_server") or "",
            quick=bool(self._config.getoption("stm_quick")),
            distribution=_distribution(self._config.getoption("stm_backend")),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the result of a check."""
        for name, value in report.user_properties:
            if name in (_RESULT, _PLANNED, _UNFIT, _FINDING):
                self._note(name, cast("dict[str, Any]", value))

    def _note(self, name: str, facts: dict[str, Any]) -> None:
        from stm_backends.testing.runner.results import Result  # noqa: PLC0415 -- as above

        if name == _PLANNED:
            self.run.planned |= {key: Result(**fields) for key, fields in facts.items()}
        elif name == _UNFIT:
            self.run.broken.append(facts["message"])
        elif name == _FINDING:
            # Each process of pytest-xdist may have one.
            self.run.findings.setdefault(facts["cause"], facts["message"])
        else:
            facts = dict(facts)
            self.run.traits = facts.pop("traits") or self.run.traits
            self.run.server = facts.pop("server") or self.run.server
            self.run.results.append(Result(**facts))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Note a check whose pytest-xdist process ended during it, so that it sent no result."""
        if self._asked or crashitem in self.run.planned:
            self.run.broken.append(f"{crashitem} ended its process; the standard error may say why")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a class that could not be defined, for example because it overrides a check."""
        if report.failed and self._asked:
            self.run.broken.append(str(report.longrepr).strip().splitlines()[-1].removeprefix("E   ").strip())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the reports."""
        if not self._asked:
            return
        self.run.seconds = time.monotonic() - self._start
        if path := self._config.getoption("stm_json"):
            import json  # noqa: PLC0415 -- as above

            Path(path).write_text(json.dumps(self.run.as_json(), indent=2, default=str), "utf-8")
        if path := self._config.getoption("stm_html"):
            from stm_backends.testing.runner.page import page  # noqa: PLC0415 -- as above

            Path(path).write_text(page(self.run), "utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Print the report per clause; for classes in a test suite, a short one."""
        self._shown_once.restore(terminalreporter)
        if "run" not in vars(self) or exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        from stm_backends.testing.runner.terminal import summary  # noqa: PLC0415 -- as above

        named = self._config.getoption("stm_backend")
        if named or self.run.planned:
            terminalreporter.section(f"conformance of {named}" if named else "conformance")
            for text, colour in self.lines() if named else summary(self.run):
                terminalreporter.write_line(text, **({colour: True} if colour else {}))

    def lines(self) -> Iterator[Line]:
        """Yield the report per clause."""
        from stm_backends.testing.runner.terminal import lines  # noqa: PLC0415 -- as above

        return lines(self.run)


class ShownOnce:
    """Makes pytest show a failure shared by several checks once, with their number."""

    def __init__(self) -> None:
        self._failed: list[pytest.TestReport] | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """Hide repeated failures from pytest while it shows them; `restore` puts them back."""
        failed: list[pytest.TestReport] = terminalreporter.stats.get("failed", [])
        alike: dict[str, list[pytest.TestReport]] = {}
        for report in failed:
            if (
                cause := dict(cast("list[tuple[str, Any]]", report.user_properties))
                .get(_RESULT, {})
                .get("cause")
            ):
                alike.setdefault(cause, []).append(report)
        for first, *others in alike.values():
            if others:
                text = f"and {len(others)} more check{'s' * (len(others) > 1)} in the same way"
                # As a section below the traceback; the short summary lists the checks.
                first.sections.append((text, ""))
                self._failed = self._failed or list(failed)
                failed[:] = [report for report in failed if report not in others]
        return (yield)

    def restore(self, terminalreporter: Any) -> None:
        """Let all failures be counted and listed."""
        if self._failed is not None:
            terminalreporter.stats["failed"][:] = self._failed


def _check_of(item: pytest.Item) -> Check | None:
    return getattr(getattr(item, "function", None), _ATTRIBUTE, None)


def _selection(config: pytest.Config) -> Selection:
    from stm_backends.testing.runner.selection import Selection  # noqa: PLC0415 -- as above

    if _SELECTION not in config.stash:
        config.stash[_SELECTION] = Selection(config)
    return config.stash[_SELECTION]


def _found(
    item: pytest.Item, check: Check, call: pytest.CallInfo[None], report: pytest.TestReport
) -> list[tuple[str, dict[str, Any]]]:
    """Return the data for a report: the result of a check, or the reason why its class cannot run."""
    from stm_backends.testing.runner.selection import facts_of, profile_of  # noqa: PLC0415 -- as above
    from stm_backends.testing.workbench.check import Finding, NotReached, Unfit  # noqa: PLC0415 -- as above

    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, NotReached):
        return []
    # A backend named by options is already named in the report.
    whose = "" if profile_of(item) else f"{facts_of(item, check)['subject']}: "
    if isinstance(error, Unfit):
        return [(_UNFIT, {"message": f"{whose}{error}"})]
    if isinstance(error, Finding):
        return [(_FINDING, {"message": f"{whose}{error}", "cause": f"{whose}{error.cause}"})]
    return [(_RESULT, _facts(item, check, call, report))]


def _facts(
    item: pytest.Item, check: Check, call: pytest.CallInfo[None], report: pytest.TestReport
) -> dict[str, Any]:
    """Return the fields of a `Result`, with the traits and the server that the check has seen."""
    from dataclasses import asdict  # noqa: PLC0415 -- as above

    from stm_backends.testing.runner.selection import facts_of  # noqa: PLC0415 -- as above
    from stm_backends.testing.workbench.failures import cause  # noqa: PLC0415 -- as above

    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    bench, datastore = arguments.get("bench"), arguments.get("datastore")
    traits = getattr(bench, "traits", None)
    error = call.excinfo.value if call.excinfo is not None else None
    reason = str(error) if report.skipped and error is not None else ""
    outcome: Outcome = "passed"
    if report.failed:
        outcome = "failed"
    elif report.skipped:
        outcome = "opted out" if reason.startswith("opted out: ") else "not asked"
    notes: list[str] = list(getattr(error, "__notes__", ())) if report.failed else []
    return {
        **facts_of(item, check),
        "outcome": outcome,
        "seconds": round(call.duration, 4),
        "reason": reason.removeprefix("opted out: "),
        "message": _message(error) if report.failed else "",
        "explanation": "\n".join(notes),
        "cause": cause(error) if report.failed and error is not None else "",
        "traits": asdict(traits) if traits is not None else {},
        "server": getattr(datastore, "server", ""),
    }


def _message(error: BaseException | None) -> str:
    """Return the message of an error, or of the first error in a group."""
    from stm_backends.testing.workbench.failures import cut, told  # noqa: PLC0415 -- as above

    lines = told(error).removeprefix("AssertionError: ").splitlines() if error is not None else []
    # These lines are about an option of pytest, which the reports do not use.
    lines = [line for line in lines if not _HOW_TO_SEE_MORE.search(line)]
    return "\n".join(cut(line, _LONGEST_LINE) for line in lines)


def _distribution(name: str | None) -> str:
    from stm_backends.drivers import plugins  # noqa: PLC0415 -- as above

    for one in plugins.diagnose() if name else ():
        if one.name == name:
            return f"{one.distribution} {one.version}".strip()
    return ""
