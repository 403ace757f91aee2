"""The pytest plugin: options for a backend that is installed, and a report per clause.

It does nothing in runs that have no checks of a contract and are given none of its options.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

if TYPE_CHECKING:
    from stm_backends.testing.bench import Datastore
    from stm_backends.testing.contract import Check
    from stm_backends.testing.results import Outcome, Run

_GROUP: Final = "stm-backends"
_PROPERTY: Final = "stm_check"
_ATTRIBUTE: Final = "__stm_check__"

QUICK_TICK_S: Final = 0.15
TICK_S: Final = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the options."""
    group = parser.getgroup(_GROUP, "conformance of storage backends (stm-backends)")
    group.addoption(
        "--stm-backend",
        metavar="NAME",
        help="The installed backend that `--pyargs stm_backends.testing` puts to the test.",
    )
    group.addoption("--stm-url", metavar="URL", help="Where its datastore is.")
    group.addoption(
        "--stm-profile",
        action="append",
        choices=["driver", "store", "memory", "all"],
        help="What is checked: the driver (the default, which earns the rest), or what is built on it.",
    )
    group.addoption(
        "--stm-quick",
        action="store_true",
        help="Leave out the slow checks: under 10 s on an embedded datastore.",
    )
    group.addoption(
        "--stm-tick",
        type=float,
        metavar="SECONDS",
        help=f"A time to live that no single operation outlasts (default: {TICK_S}, quick: {QUICK_TICK_S}; "
        "at least what the driver honours).",
    )
    group.addoption(
        "--stm-create", action="store_true", help="Set up what the datastore needs first, such as tables."
    )
    group.addoption("--stm-server", metavar="TEXT", default="", help="The server's version, for the report.")
    group.addoption("--stm-json", metavar="FILE", help="Write the report as JSON.")
    group.addoption("--stm-html", metavar="FILE", help="Write the report as a page.")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results, if there may be any to report."""
    wanted = ("stm_backend", "stm_json", "stm_html")
    if any(config.getoption(name) for name in wanted) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reporter(config), Reporter.NAME)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow checks of a quick run, and the profiles that were not asked for."""
    quick = bool(config.getoption("stm_quick"))
    profiles = set[str](config.getoption("stm_profile") or ["driver"])
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        check = _check_of(item)
        # Only the classes in `test_installed` have a profile: their subject is chosen by options.
        profile = getattr(getattr(item, "cls", None), "profile", None) if check else None
        if profile and not config.getoption("stm_backend"):
            raise pytest.UsageError("say which backend is to be tested: --stm-backend=NAME --stm-url=URL")
        unasked = profile and not profiles & {profile, "all"}
        (left_out if unasked or (quick and check and check.slow) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what is known of a check into its report, from which every kind of report is made."""
    report = yield
    check = _check_of(item)
    if check is not None and call.when == "setup":
        # Of the item, so that they are in a JUnit report as well.
        item.user_properties += [("clause", check.clause.id), ("expected", check.sentence)]
    if check is not None and (call.when == "call" or report.outcome != "passed"):
        report.user_properties += [(_PROPERTY, _facts(item, check, call, report))]
    return report


@pytest.fixture
def stm_datastore(request: pytest.FixtureRequest) -> Datastore:
    """The datastore that the options name."""
    import functools  # noqa: PLC0415 -- whoever has not asked for this suite pays for none of it

    from stm_backends.plugins import open_driver  # noqa: PLC0415 -- as above
    from stm_backends.testing.bench import Datastore, open_at  # noqa: PLC0415 -- as above

    config = request.config
    quick = bool(config.getoption("stm_quick"))
    backend: Any = config.getoption("stm_backend")
    options: dict[str, Any] = {"url": config.getoption("stm_url")}
    if config.getoption("stm_create"):
        options["create"] = True
    # A shorter time to live than the driver honours would show nothing but that.
    shortest = open_driver(backend, **options).traits.min_ttl
    return Datastore(
        open=functools.partial(open_at, backend, **options),
        tick=config.getoption("stm_tick") or max(QUICK_TICK_S if quick else TICK_S, shortest),
        histories=3 if quick else 30,
        server=config.getoption("stm_server") or "",
    )


class Reporter:
    """Gathers the results of a run, and writes them where the options say."""

    NAME: Final = "stm-backends-reporter"

    def __init__(self, config: pytest.Config) -> None:
        from stm_backends.testing.results import Run  # noqa: PLC0415 -- only a run that reports needs it

        self._config = config
        self._start = time.monotonic()
        self.run: Run = Run(
            backend=config.getoption("stm_backend") or "",
            server=config.getoption("stm_server") or "",
            quick=bool(config.getoption("stm_quick")),
            distribution=_distribution(config.getoption("stm_backend")),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of a check."""
        from stm_backends.testing.results import Result  # noqa: PLC0415 -- as above

        for name, value in report.user_properties:
            if name != _PROPERTY or not isinstance(value, dict):
                continue
            facts: dict[str, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType] -- `_facts` made it
            self.run.traits = facts.pop("traits") or self.run.traits
            self.run.server = facts.pop("server") or self.run.server
            self.run.results.append(Result(**facts))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a class that could not be made, such as one that overrides a check."""
        if report.failed:
            self.run.broken.append(str(report.longrepr).strip().splitlines()[-1].removeprefix("E   ").strip())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the reports."""
        self.run.seconds = time.monotonic() - self._start
        if path := self._config.getoption("stm_json"):
            import json  # noqa: PLC0415 -- as above

            Path(path).write_text(json.dumps(self.run.as_json(), indent=2, default=str), "utf-8")
        if path := self._config.getoption("stm_html"):
            from stm_backends.testing.page import page  # noqa: PLC0415 -- as above

            Path(path).write_text(page(self.run), "utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the report per clause."""
        if not self._config.getoption("stm_backend"):
            return
        terminalreporter.section(f"conformance of {self.run.backend}")
        for text, colour in self.run.lines():
            terminalreporter.write_line(text, **({colour: True} if colour else {}))


def _check_of(item: pytest.Item) -> Check | None:
    return getattr(getattr(item, "function", None), _ATTRIBUTE, None)


def _facts(
    item: pytest.Item, check: Check, call: pytest.CallInfo[None], report: pytest.TestReport
) -> dict[str, Any]:
    """Return the fields of a `Result`, with the traits and the server as the check has seen them."""
    from dataclasses import asdict  # noqa: PLC0415 -- as above

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
        "subject": item.parent.name if item.parent is not None else "",
        "clause": check.clause.id,
        "name": item.name,
        "sentence": check.sentence,
        "outcome": outcome,
        "seconds": round(call.duration, 4),
        "reason": reason.removeprefix("opted out: "),
        "message": _message(error) if report.failed else "",
        "explanation": "\n".join(notes),
        "traits": asdict(traits) if traits is not None else {},
        "server": getattr(datastore, "server", ""),
    }


def _message(error: BaseException | None) -> str:
    """Return what was found, and of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"{type(error).__name__}: {error}".removeprefix("AssertionError: ")


def _distribution(name: str | None) -> str:
    from stm_backends import plugins  # noqa: PLC0415 -- as above

    for one in plugins.diagnose() if name else ():
        if one.name == name:
            return f"{one.distribution} {one.version}".strip()
    return ""
