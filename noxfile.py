"""Check, build and show the project: `nox` checks in minutes, `nox -s full` what takes longer.

Needs Python, the package index, and nothing else: no other interpreter, no root. The servers that the tests
talk to come from package indexes too; DynamoDB Local needs Java and npm. With `nox[uv]`, uv installs, which
takes a sixth of pip's time; without it, pip does.
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
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)


def install_group(session: nox.Session, *groups: str) -> None:
    """Install dependency groups of pyproject.toml, also with a pip that does not know them."""
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
    """Pyright, strict, on the packages that are shipped; and mypy, strict, on programs of users."""
    install_group(session, "types", "test", "telemetry", "agents")
    session.install("-e", ".[all]")
    session.run("pyright", *session.posargs)
    # As in a program of a user: what the library itself has in it is for pyright alone.
    session.run("mypy", "--strict", "--follow-imports=silent", "tests/typed")


@nox.session
def packaging(session: nox.Session) -> None:
    """The sdist and the wheel built from it: exactly what belongs in them, and installable alone.

    With the variable `RELEASE_TAG`, what is not ready for that release fails; with `DIST`, the files in that
    folder are judged.
    """
    install_group(session, "packaging")
    files = ("tests/packaging/test_wheel.py", "tests/packaging/test_release.py")
    session.run("pytest", *files, "-p", "no:cacheprovider", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a tag publishes: the sdist and the wheel in `dist`, and the SBOM `build/sbom.cdx.json`.

    With the variable `RELEASE_TAG`, what is not ready for that release fails.
    """
    install_group(session, "release")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--installer", "uv")
    (wheel,) = Path("dist").glob("*.whl")
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stm-backends-") as folder:
        # The wheel and all that it brings along, in an environment that has nothing else.
        session.run("python", "-m", "uv", "venv", "--quiet", folder)
        python = str(Path(folder, "Scripts" if os.name == "nt" else "bin", "python"))
        session.run("python", "-m", "uv", "pip", "install", "--quiet", "--python", python, str(wheel))
        written = ("--output-format", "JSON", "--output-file", "build/sbom.cdx.json")
        options = ("--output-reproducible", "--pyproject", "pyproject.toml")
        session.run("cyclonedx-py", "environment", *options, *written, python)


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """Try every extra with the lowest versions that it admits, each in an environment of its own."""
    install_group(session, "packaging", "services")
    session.install("-e", ".[all,mongo-motor]")
    session.run("pytest", "tests/packaging/test_lowest.py", *session.posargs)


FRAMEWORKS = tuple(
    extra
    for extra in PYPROJECT["project"]["optional-dependencies"]
    if any(Path("stm_backends", "integrations").glob(f"{extra.replace('-', '_')}*"))
)
"""The extras that have a module of their own, and so tests."""


@nox.session(default=False)
@nox.parametrize("extra", FRAMEWORKS)
def newest(session: nox.Session, extra: str) -> None:
    """Run the tests of each framework, and the framework's own, with its newest release."""
    install_group(session, "test", "telemetry", "services", "agents")
    session.install("pip", "-e", ".[all]")
    # In a call of its own: where frameworks do not agree on a version of something, the others lose.
    session.install("--upgrade", *PYPROJECT["project"]["optional-dependencies"][extra])
    name = extra.replace("-", "_")
    found = [*Path("tests", "integrations").glob("test_*.py"), *Path("tests", "kits").glob("test_*.py")]
    files = [str(path) for path in found if f"{path.stem}_".startswith(f"test_{name}_")]
    options = {"PYTEST_ADDOPTS": "-p no:langsmith_plugin"}  # see `prepare_tests`
    session.run("python", "-m", "pytest", "-n", "auto", *files, *session.posargs, env=options)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on every driver, with the suites in their quick form; or the arguments after `--`."""
    run_tests(session)


@nox.session(name="tests-all", python=PYTHONS, default=False)
def tests_all(session: nox.Session) -> None:
    """Run the same tests on each supported Python that this machine has."""
    run_tests(session)


@nox.session(default=False)
def full(session: nox.Session) -> None:
    """Run what `tests` leaves out or shortens, at full length, and PenguiFlow's own tests on our memory."""
    prepare_tests(session, "browser")
    # Some tests run a whole suite by its command, on a server and at full length.
    longer = ("-m", "full or suite", "--durations=40", "-o", "faulthandler_timeout=900", *ALL_IN_PARALLEL)
    session.run("python", "-m", "pytest", *longer, *session.posargs)
    last = (f"tests/{path}" for path in FEW_AT_A_TIME)
    # A long dialogue may last longer than any other test.
    session.run("python", "-m", "pytest", "-n", "2", "-o", "faulthandler_timeout=1200", "--stm-quick", *last)
    run_penguiflows_tests(session)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Say what no test runs; less than the floor in pyproject.toml is an error.

    Apart from `full`, because before Python 3.14, which has `sys.monitoring` for branches, a measured test
    takes twice its time and more.
    """
    prepare_tests(session, "browser")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *ALL_IN_PARALLEL, *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


FEW_AT_A_TIME = (
    *("chaos/test_runs.py", "chaos/test_soak.py"),
    *("services/test_long_dialogues.py", "strangers/test_objects.py"),
    *("strangers/test_etcd.py", "strangers/test_nats.py"),
)
"""What `full` runs after the other tests: pods and faults, dialogues of 39 MB that take minutes, and suites
that keep a processor busy.

The suite on an object store takes a quarter of an hour at full length, and those on etcd and NATS minutes,
which is left to the session `strangers`: they are here in their quick form.
"""

OF_OTHER_SESSIONS = ("packaging/test_lowest.py", "packaging/test_wheel.py")

# The wheel and the lowest versions have sessions of their own, with the tools that they need. Tests also wait
# for processes, leases and clocks. Two workers more than there are cores use that time; many more would miss
# deadlines.
ALL_IN_PARALLEL = (
    *(f"--ignore=tests/{path}" for path in (*FEW_AT_A_TIME, *OF_OTHER_SESSIONS)),
    *("-n", str((os.cpu_count() or 1) + 2)),
)


def run_tests(session: nox.Session) -> None:
    """Run the default selection of tests, or the one that the arguments make."""
    prepare_tests(session)
    selection = session.posargs or ("-m", "not full", "--stm-quick", *ALL_IN_PARALLEL)
    session.run("python", "-m", "pytest", *selection)


def prepare_tests(session: nox.Session, *further: str) -> None:
    """Install what the tests need: clients, servers, PenguiFlow and the other frameworks."""
    install_group(session, "test", "telemetry", "services", "strangers", "penguiflow", "agents", *further)
    # An author's page installs with pip, which an environment made by uv lacks.
    session.install("pip", "-e", ".[all,mongo-motor]")
    # LangChain brings a plugin for pytest that takes seconds to import, and the tests start many a pytest.
    session.env["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin"
    # Containers often set this. Each of the many processes would then compile all that it imports.
    session.env["PYTHONDONTWRITEBYTECODE"] = None


@nox.session(default=False)
def penguiflow(session: nox.Session) -> None:
    """PenguiFlow's own tests on our memory; `-- newest` takes its newest pre-release, `-- 3.11.3a2` another.

    Before them, our tests with its planner run on that release.
    """
    prepare_tests(session)
    run_penguiflows_tests(session, *session.posargs)


def run_penguiflows_tests(session: nox.Session, release: str = "") -> None:
    """Run PenguiFlow's own tests of its memory and its planner, on our classes.

    They are those of the pinned release, of the `newest` one, pre-releases included, or of a version. Any but
    the pinned one is installed.
    """
    (wanted,) = PYPROJECT["dependency-groups"]["penguiflow"]
    if release:
        wanted = "penguiflow" if release == "newest" else f"penguiflow=={release}"
    ours = Path("tests", "penguiflow").absolute()
    with tempfile.TemporaryDirectory(prefix="stm-backends-") as folder:
        # A wheel has no tests, and uv does not download source distributions.
        session.run(
            *("python", "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps", "--pre"),
            *("--dest", folder, wanted),
        )
        (sdist,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder, filter="data")
        source = sdist.with_name(sdist.name.removesuffix(".tar.gz"))
        if release:
            session.install(str(source))
            # The others compare states and views with those of the pinned release.
            files = (f"tests/penguiflow/test_{name}.py" for name in WITH_THEIRS)
            session.run("python", "-m", "pytest", "-m", "not full", *files)
        with session.chdir(source):
            files = sorted(str(path) for pattern in THEIR_TESTS for path in Path("tests").glob(pattern))
            left_out = [f"--deselect={test}" for test in LEFT_OUT]
            options = ("-p", "our_memory", "-p", "no:cacheprovider", "-ra")
            session.run(
                *("python", "-m", "pytest", *options, *files, *left_out), env={"PYTHONPATH": str(ours)}
            )


THEIR_TESTS = (
    "test_short_term_memory.py",
    "test_react_planner*.py",
    "test_planner_*.py",
    "test_state_unified_store.py",
    "test_session*.py",
)
"""PenguiFlow's tests that reach its memory, by way of its planner and its sessions or at first hand."""

WITH_THEIRS = ("revisions", "adoption", "planner_memory", "planner_state")
"""Our tests that hold of each release of PenguiFlow."""

LEFT_OUT = tuple(
    f"tests/test_short_term_memory.py::test_{name}"
    for name in (
        # Of two writers, theirs keeps the turns of the last one. Ours keeps those of both.
        "hydrate_with_newer_state_resummarizes_current_state",
        # Theirs gives its summary up where another writer came first. Ours merges it with what was saved.
        "background_persist_skipped_when_store_has_newer_revision",
        # Theirs saves a summary where the state was loaded, ours only where `persist` has saved the turns.
        "background_persist_goes_to_the_key_it_started_under",
        # Theirs keeps the end of a summary that is cut, ours its beginning, too.
        "truncate_summary_shrinks_summary_before_dropping_turns",
        # Theirs loads a saved `recovering` as `degraded`, and `retry` as `healthy`. Ours, as 3.11.2, shows
        # what was saved, and its background goes on from there.
        "restored_recovering_state_recovers_its_backlog",
        "restored_transient_health_states_are_normalised",
    )
)
"""Tests of newer releases that ask of a memory what ours does otherwise, each with the difference."""


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """Mutants of both embedded drivers before the shipped suite alone, and of decisions before unit tests.

    Hours for all, minutes for a sample: `nox -s mutation -- memory sqlite --sample 100 --seed 1`.
    """
    install_group(session, "test")
    session.install("-e", ".[cli,conformance]")
    session.run("python", "-m", "tests.mutation.run", *session.posargs)


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
def chaos(session: nox.Session) -> None:
    """Faults at random on each datastore, and a checker; `-- --minutes 60 redis`, `-- --help` for more."""
    install_group(session, "services")
    session.install("-e", ".[all]")
    session.run("python", "-m", "tests.chaos", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Three datastores in steady use for an hour: what grows? `-- --minutes 20 redis`, `-- --help`."""
    install_group(session, "services")
    session.install("-e", ".[all]")
    session.run("python", "-m", "tests.chaos.soak", *session.posargs)


@nox.session(default=False)
def strangers(session: nox.Session) -> None:
    """Run the suite at full length on drivers that were written from the page alone."""
    prepare_tests(session)
    session.run("python", "-m", "pytest", "tests/strangers", *session.posargs)


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
        session.run(*command, "show", "demo:replay:trip-to-lisbon", "--url", url, "--full-zone-turns", "2")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site in `build/site`, with warnings as errors; `nox -s docs -- serve` serves it."""
    install_group(session, "docs")
    session.install("-e", ".[cli]")
    session.run("python", "docs/site.py", *session.posargs)


@nox.session(default=False)
def scale(session: nox.Session) -> None:
    """Measure a million conversations, a long one, and many pods; `-- --write` writes the pages."""
    install_group(session, "services")
    session.install("-e", ".[all]")
    session.run("python", "-m", "benchmarks.scale", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Compare a turn with a bare client's on each datastore, under goals; `-- --write` writes the page."""
    install_group(session, "services")
    session.install("-e", ".[all]")
    session.run("python", "-m", "benchmarks.run", *session.posargs)


@nox.session(default=False)
def peers(session: nox.Session) -> None:
    """What other libraries cost for one turn, and what they lose; `-- --write` writes the page.

    `-- --messages` measures messages with tool calls instead, `-- --shown` what a product shows: pages of
    history, newest items, sidebars; `-- --frameworks` compares each integration with its framework's own.
    """
    # In one call, so that all requirements are resolved together.
    services = nox.project.dependency_groups(PYPROJECT, "services")
    folder = "benchmarks/peers/frameworks" if "--frameworks" in session.posargs else "benchmarks/peers"
    session.install("-r", f"{folder}/requirements.txt", *services, "-e", ".[all]")
    session.run("python", "-m", "benchmarks.peers", *session.posargs)
