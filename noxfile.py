"""Everything that is checked, built and shown: `nox` and `nox -s full` check, `nox -s demo` shows it at work.

Needs Python, the package index, and nothing else: no other interpreter, no root. The servers that the tests
talk to come from package indexes too; DynamoDB Local needs Java and npm.
"""

import os
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
# `tests` comes last, so that its closing lines are the last ones in the log.
nox.options.sessions = ["lint", "types", "packaging", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)


def install_group(session: nox.Session, *groups: str) -> None:
    """Install dependency groups of pyproject.toml, with whatever pip there is."""
    session.install(*nox.project.dependency_groups(PYPROJECT, *groups))


@nox.session
def lint(session: nox.Session) -> None:
    """Style and common mistakes; `nox -s lint -- fix` repairs what can be repaired."""
    install_group(session, "lint")
    if "fix" in session.posargs:
        session.run("ruff", "check", "--fix", ".")
        session.run("ruff", "format", ".")
        return
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict, on the packages that are shipped."""
    install_group(session, "types", "test", "telemetry", "agents")
    session.install("-e", ".[all]")
    session.run("pyright", *session.posargs)


@nox.session
def packaging(session: nox.Session) -> None:
    """The sdist and the wheel built from it: exactly what belongs in them, and installable alone."""
    install_group(session, "packaging")
    session.run("pytest", "tests/packaging/test_wheel.py", "-p", "no:cacheprovider", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests with coverage; arguments after `--` select tests instead, without it."""
    run_tests(session)


@nox.session(name="tests-all", python=PYTHONS, default=False)
def tests_all(session: nox.Session) -> None:
    """All tests on each supported Python that this machine has."""
    run_tests(session)


def run_tests(session: nox.Session) -> None:
    """Run pytest on the tree, on real servers, with PenguiFlow and the other frameworks beside it."""
    install_group(session, "test", "telemetry", "services", "penguiflow", "agents")
    session.install("-e", ".[all,mongo-motor]")
    # LangChain brings a plugin for pytest that takes seconds to import, and the tests start many a pytest.
    session.env["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin"
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
        return
    session.run("coverage", "erase")
    # The wheel has a session of its own, with the tools that build it.
    # Tests wait for processes, leases and clocks, too; many more workers than cores would miss deadlines.
    workers = str((os.cpu_count() or 1) + 1)
    session.run("coverage", "run", "-m", "pytest", "--ignore=tests/packaging/test_wheel.py", "-n", workers)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(default=False)
def full(session: nox.Session) -> None:
    """What CI runs after `nox`: PenguiFlow's own tests of its memory and its planner, on our classes."""
    install_group(session, "test", "penguiflow")
    session.install("-e", ".")
    (release,) = PYPROJECT["dependency-groups"]["penguiflow"]
    plugins = Path("tests", "penguiflow").absolute()
    with tempfile.TemporaryDirectory(prefix="stm-backends-") as folder:
        # A wheel has no tests.
        session.run(
            *("python", "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps"),
            *("--dest", folder, release),
        )
        (sdist,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder, filter="data")
        with session.chdir(sdist.with_name(sdist.name.removesuffix(".tar.gz"))):
            files = sorted(str(path) for pattern in THEIR_TESTS for path in Path("tests").glob(pattern))
            options = ("-p", "our_memory", "-p", "no:cacheprovider", "-ra")
            session.run(
                *("python", "-m", "pytest", *options, *(session.posargs or files)),
                env={"PYTHONPATH": str(plugins)},
            )


THEIR_TESTS = (
    "test_short_term_memory.py",
    "test_react_planner*.py",
    "test_planner_*.py",
    "test_state_unified_store.py",
    "test_session*.py",
)
"""PenguiFlow's tests that reach its memory, by way of its planner and its sessions or at first hand."""


@nox.session(default=False)
def conformance(session: nox.Session) -> None:
    """Ten runs in a row of the suite on everything that is correct: what fails at times proves nothing."""
    install_group(session, "test")
    session.install("-e", ".[cli,conformance]")
    correct = ("reference_driver", "sqlite_driver", "stores", "default_memory", "distributed_memory")
    for _ in range(10):
        files = (f"tests/contract/test_{name}.py" for name in correct)
        session.run("python", "-m", "pytest", "-q", *files)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """The main job: conversations shared by four processes, checked, and one of them shown."""
    session.install(".[cli]")
    with tempfile.TemporaryDirectory(prefix="stm-backends-") as folder:
        url = f"sqlite:///{Path(folder, 'demo.db')}"
        command = ("python", "-m", "stm_backends.cli")
        budget = ("--full-zone-turns", "2", "--summary-max-tokens", "200")
        options = ("--pods", "4", "--strategy", "rolling_summary", *budget)
        session.run(*command, "replay", "examples/conversations.jsonl", "--url", url, *options)
        session.run(*command, "show", "demo:replay:trip-to-lisbon", "--url", url)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site in `build/site`, with warnings as errors; `nox -s docs -- serve` serves it."""
    install_group(session, "docs")
    session.install("-e", ".[cli]")
    session.run("python", "docs/site.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """What a turn and a read cost beside a bare round trip, and whether it grows with the conversation."""
    install_group(session, "services", "bench")
    session.install("-e", ".[all]")
    session.run("python", "-m", "benchmarks.run", *session.posargs)
