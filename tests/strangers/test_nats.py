"""A driver on NATS JetStream, written from the pages for authors, keeps the contract; and what breaks it."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stm_backends import ConfigurationError
from stm_backends.testing import Datastore, DriverContract, FakeClock
from tests.conformance.running import command, pytest_in
from tests.strangers.nats_bugs import BUGS, BUGS_OF_MEANS, FEW, installed
from tests.support import nats as server
from tests.support.bugs import Bug

pytest.importorskip("nats", reason="the dependency group `strangers` brings it")
import nats

from tests.strangers.nats_backend.driver import open_nats
from tests.strangers.nats_backend.plugin import open_driver
from tests.strangers.nats_means import given, url_of

pytestmark = pytest.mark.full

CLASS = """
import functools
import pytest
from stm_backends.drivers.plugins import open_driver
from stm_backends.testing import DriverContract, open_at
from tests.strangers.nats_means import given

class TestNats(DriverContract):
    quick = True

    @pytest.fixture
    def datastore(self):
        opened = functools.partial(open_at, create=True)
        with given({address!r}, {stream!r}, opened=opened, made=open_driver) as found:
            yield found
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server."""
    with server.reached(tmp_path_factory.mktemp("nats")) as url:
        yield url.removeprefix("nats://")


@pytest.fixture
def stream() -> str:
    return f"S{uuid.uuid4().hex}"


class TestNatsDriver(DriverContract):
    """What it lacks are means that such a datastore does not have: locks, transactions, replicas."""

    @pytest.fixture
    def datastore(self, address: str, stream: str) -> Iterator[Datastore]:
        with given(address, stream, opened=open_nats, made=open_driver) as found:
            yield found


class TestNatsDriverWithAClock(DriverContract):
    """The same with a clock that only the checks move; other processes have another one."""

    quick = True

    @pytest.fixture
    def datastore(self, address: str, stream: str) -> Datastore:
        clock = FakeClock()
        opened = functools.partial(open_nats, url_of(address, stream), clock=clock)
        return Datastore(open=opened, pass_time=clock.pass_time)


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("stm_quick"))


def test_the_command_finds_the_package_and_nothing_wrong(
    address: str, tmp_path: Path, is_quick: bool
) -> None:
    selected = ("--clause", "driver.fold", "--clause", "driver.outage") if is_quick else ()
    options = ("--url", f"nats://{address}/COMMAND", "--create", "--quick", *selected)
    status, printed = command(tmp_path, "nats", *options, path=installed(tmp_path))
    assert status == 0, printed
    assert "a selection of" in printed or "grade 2 of 3 (without the means of a test class)" in printed


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_command_finds_a_bug_of_it(bug: Bug, address: str, tmp_path: Path, is_quick: bool) -> None:
    if is_quick and bug.name not in FEW:
        pytest.skip("left out of a quick run; nox -s strangers has it")
    selected = ("-k", bug.check, *(["--stm-quick"] if bug.quick else []), "--pyargs", "stm_backends.testing")
    # A third of the deadline is longer than the suite pauses an operation, also on a busy machine.
    url = url_of(address, bug.name, deadline_s=4.0)
    options = ("--stm-backend=nats", f"--stm-url={url}", "--stm-create", *selected)
    status, printed = pytest_in(tmp_path, *options, path=installed(tmp_path, bug))
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert bug.check in printed


@pytest.mark.parametrize("bug", BUGS_OF_MEANS, ids=lambda bug: bug.name)
def test_a_test_class_finds_a_bug_of_it(bug: Bug, address: str, stream: str, tmp_path: Path) -> None:
    tests = tmp_path / "test_mine.py"
    tests.write_text(CLASS.format(address=address, stream=stream), "utf-8")
    status, printed = pytest_in(tmp_path, tests, "-k", bug.check, path=installed(tmp_path, bug))
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert bug.check in printed


async def test_a_stream_that_may_remove_records_is_refused(address: str, stream: str) -> None:
    async with await nats.connect(f"nats://{address}") as client:
        limits = {"max_age": 3600 * 10**9, "max_msgs_per_subject": 1}
        wanted = json.dumps({"name": stream, "subjects": [f"{stream}.*.*"], **limits}).encode()
        made = await client.request(f"$JS.API.STREAM.CREATE.{stream}", wanted, timeout=5)
        assert "error" not in json.loads(made.data)
    with pytest.raises(ConfigurationError, match="max_age"):
        await open_nats(url_of(address, stream))
