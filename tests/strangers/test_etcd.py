"""A driver on etcd, written from the pages for authors, keeps the contract; and the suite finds its bugs."""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends.drivers import Key, Record
from stm_backends.testing import Datastore, DriverContract
from tests.conformance.running import command, pytest_in
from tests.strangers.etcd_bugs import BUGS, FEW, installed
from tests.support import etcd
from tests.support.bugs import Bug

pytest.importorskip("httpx", reason="the dependency group `strangers` brings it")
import httpx

from tests.strangers.etcd_backend.driver import (
    NO_TLS,
    Place,
    Row,
    Seen,
    deleted,
    joined,
    open_etcd,
    place_of,
    put,
    ranged,
    rows_of,
)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server."""
    with etcd.reached(tmp_path_factory.mktemp("etcd")) as url:
        yield url.removeprefix("etcd://")


class Beside:
    """The server past the driver, which keeps its records below a prefix."""

    def __init__(self, address: str, prefix: str) -> None:
        self._url, self._prefix = f"http://{address}/v3/kv/txn", prefix.encode()

    def place(self, key: Key) -> Place:
        return place_of(self._prefix, joined(key))

    def do(self, *operations: dict[str, Any]) -> list[dict[str, Any]]:
        with httpx.Client(verify=NO_TLS, trust_env=False) as client:
            answer = client.post(self._url, content=json.dumps({"success": operations}))
        return answer.raise_for_status().json()["responses"]

    def rows(self, key: Key) -> list[Row]:
        """Return what is stored at the place of a record: its head first, if there is one."""
        place = self.place(key)
        answers = self.do(ranged(place.head), ranged(place.values, place.values[:-1] + b"\1"))
        return [row for one in answers for row in rows_of(one["response_range"])]


class TestEtcdDriver(DriverContract):
    @pytest.fixture
    def datastore(self, address: str) -> Datastore:
        prefix = uuid.uuid4().hex
        beside = Beside(address, prefix)

        async def damage(key: Key) -> None:
            head = beside.rows(key)[0]
            beside.do(put(head.key, head.value[:-1]))

        async def cut(key: Key) -> None:
            beside.do(deleted(beside.rows(key)[-1].key))

        async def stored(key: Key) -> list[Row]:
            return beside.rows(key)

        async def peek(key: Key) -> Record | None:
            rows = beside.rows(key)
            values = {row.key: row.value for row in rows}
            return Seen(beside.place(key), rows[0].value, values).record() if rows else None

        def at(address: str, deadline_s: float = 10.0) -> str:
            return f"etcd://{address}?prefix={prefix}&deadline_s={deadline_s}"

        return Datastore(
            open=functools.partial(open_etcd, at(address)),
            address=address,
            through=lambda address: open_etcd(at(address, deadline_s=2.0)),
            damage=damage,
            cut=cut,
            stored=stored,
            peek=peek,
            server="etcd",
        )


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("stm_quick"))


def test_the_command_finds_the_package_and_nothing_wrong(
    address: str, tmp_path: Path, is_quick: bool
) -> None:
    selected = ("--clause", "driver.fold", "--clause", "driver.outage") if is_quick else ()
    options = ("--url", f"etcd://{address}?prefix=command", "--quick", *selected)
    status, printed = command(tmp_path, "etcd", *options, path=installed(tmp_path))
    assert status == 0, printed
    assert "a selection of" in printed or "grade 2 of 3" in printed


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_command_finds_a_bug_of_it(bug: Bug, address: str, tmp_path: Path, is_quick: bool) -> None:
    if is_quick and bug.name not in FEW:
        pytest.skip("left out of a quick run; nox -s strangers has it")
    selected = ("-k", bug.check, *(["--stm-quick"] if bug.quick else []), "--pyargs", "stm_backends.testing")
    options = ("--stm-backend=etcd", f"--stm-url=etcd://{address}?prefix=bugs", *selected)
    status, printed = pytest_in(tmp_path, *options, path=installed(tmp_path, bug))
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert bug.check in printed


async def test_a_close_that_is_cancelled_is_done_nevertheless(address: str) -> None:
    driver = await open_etcd(f"etcd://{address}?prefix=close")
    client = vars(driver)["_client"]
    loading = asyncio.create_task(driver.load(Key("s", "a")))
    await asyncio.sleep(0)
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.gather(loading, vars(driver)["_closing"], return_exceptions=True)
    assert client.is_closed
