"""A driver on NATS JetStream, written from the pages for authors, keeps the contract; and what breaks it."""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from base64 import b64decode
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends.drivers import Driver, Key, Record
from stm_backends.testing import Datastore, DriverContract, FakeClock, HandedIn
from stm_backends.testing.faults import Proxy
from tests.conformance.running import command, pytest_in
from tests.strangers.nats_bugs import BUGS, FEW, installed
from tests.support import nats as server
from tests.support.bugs import Bug

pytest.importorskip("nats", reason="the dependency group `strangers` brings it")
import nats
from nats.aio.client import Client

from tests.strangers.nats_backend.driver import open_nats
from tests.strangers.nats_backend.layout import GONE, decode, subject_of
from tests.strangers.nats_backend.plugin import open_driver

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server."""
    with server.reached(tmp_path_factory.mktemp("nats")) as url:
        yield url.removeprefix("nats://")


class Beside:
    """The server past the driver, on connections of the test."""

    def __init__(self, address: str, stream: str) -> None:
        self.url, self.stream = f"nats://{address}", stream

    async def messages(self, key: Key) -> list[bytes]:
        """Return the message of a record, or the one that a delete leaves; nothing if there is neither."""
        async with await nats.connect(self.url) as client:
            request = json.dumps({"last_by_subj": subject_of(self.stream, key)}).encode()
            asked = await client.request(f"$JS.API.STREAM.MSG.GET.{self.stream}", request, timeout=5)
        answer = json.loads(asked.data)
        return [b64decode(answer["message"].get("data", ""))] if "message" in answer else []

    async def write(self, key: Key, data: bytes) -> None:
        async with await nats.connect(self.url) as client:
            await client.jetstream().publish(subject_of(self.stream, key), data)

    async def damage(self, key: Key) -> None:
        (data,) = await self.messages(key)
        await self.write(key, data[:-1] + bytes([data[-1] ^ 1]))

    async def cut(self, key: Key) -> None:
        (data,) = await self.messages(key)
        await self.write(key, data[:-1])

    async def peek(self, key: Key) -> Record | None:
        found = [data for data in await self.messages(key) if data != GONE]
        return decode(found[0]).record if found else None

    async def handed_in(self) -> HandedIn:
        client: Client = await nats.connect(self.url)
        driver = open_driver(f"nats:///{self.stream}", client=client, create=True)
        await driver.open()

        async def is_open() -> bool:
            return client.is_connected

        async def kept() -> list[Any]:
            return [*vars(client)["_subs"].values()]

        return HandedIn(driver=driver, is_open=is_open, close=client.close, kept=kept)


def url_of(address: str, stream: str, deadline_s: float = 10.0) -> str:
    return f"nats://{address}/{stream}?deadline_s={deadline_s}"


class TestNatsDriver(DriverContract):
    """What is left are means that such a datastore does not have: locks, transactions, replicas."""

    @pytest.fixture
    def datastore(self, address: str) -> Iterator[Datastore]:
        stream = f"S{uuid.uuid4().hex}"
        beside = Beside(address, stream)

        async def through(address: str) -> Driver:
            # A read is sent again after a third of it, which is longer than the suite pauses an operation.
            return await open_nats(url_of(address, stream, deadline_s=3.0))

        with Proxy(address) as proxy:

            @contextlib.asynccontextmanager
            async def refusal() -> AsyncGenerator[None]:
                with server.without_a_leader() as other:
                    try:
                        proxy.lead_to(other)
                        async with proxy.cut():
                            pass
                        yield
                    finally:
                        proxy.lead_to(address)
                        async with proxy.cut():
                            pass

            yield Datastore(
                open=functools.partial(open_nats, url_of(proxy.address, stream)),
                address=address,
                through=through,
                outage=proxy.cut,
                refusal=refusal,
                damage=beside.damage,
                cut=beside.cut,
                stored=beside.messages,
                peek=beside.peek,
                handed_in=beside.handed_in,
                server="nats-server",
            )


class TestNatsDriverWithAClock(DriverContract):
    """The same with a clock that only the checks move; other processes have another one."""

    quick = True

    @pytest.fixture
    def datastore(self, address: str) -> Datastore:
        clock, url = FakeClock(), url_of(address, f"S{uuid.uuid4().hex}")
        return Datastore(open=functools.partial(open_nats, url, clock=clock), pass_time=clock.pass_time)


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


async def test_a_stream_that_may_remove_records_is_refused(address: str) -> None:
    stream = f"S{uuid.uuid4().hex}"
    async with await nats.connect(f"nats://{address}") as client:
        limits = {"max_age": 3600 * 10**9, "max_msgs_per_subject": 1}
        wanted = json.dumps({"name": stream, "subjects": [f"{stream}.*.*"], **limits}).encode()
        made = await client.request(f"$JS.API.STREAM.CREATE.{stream}", wanted, timeout=5)
        assert "error" not in json.loads(made.data)
    with pytest.raises(ValueError, match="max_age"):
        await open_nats(url_of(address, stream))
