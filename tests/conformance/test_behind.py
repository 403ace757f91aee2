"""A proxy before the server that a URL names: where the command puts it, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stm_backends.testing.runner import behind
from stm_backends.testing.runner.behind import AROUND, ENCRYPTED, NO_HOST, SEVERAL, means, server_in
from tests.conformance.running import command, pytest_in
from tests.support.networked import DictionaryServer

WIRE = """
import ssl
from dataclasses import dataclass, replace
from typing import ClassVar

from stm_backends.drivers import BackendPlugin, Settings, hookimpl, setting
from stm_backends.errors import ConfigurationError, Unavailable
from tests.mutants.network import LeaksConnections, RetriesAppends
from tests.support.networked import Connection, NetworkedDriver

@dataclass(frozen=True, kw_only=True)
class WireSettings(Settings):
    backend: ClassVar = "wire"
    url_schemes: ClassVar = ("wire",)
    address: str = setting("", query=False)
    kind: str = "right"
    at: str = ""

    @classmethod
    def before_query(cls, parts):
        return {"address": parts.netloc}

class Encrypts(NetworkedDriver):
    async def _connected(self):
        import asyncio
        return Connection(*await asyncio.open_connection(*self._address, ssl=ssl.create_default_context()))

KINDS = {"right": NetworkedDriver, "retries": RetriesAppends, "leaks": LeaksConnections, "tls": Encrypts}

def open_driver(url, *, create=False, **options):
    settings = WireSettings.from_url(url, **options)
    if settings.kind == "fails" and settings.at != settings.address:
        raise ConfigurationError("this host is not known here")
    # As the driver of a cluster, which asks the servers where the others are.
    address = settings.at or settings.address
    driver = KINDS.get(settings.kind, NetworkedDriver)(address)
    driver.traits = replace(driver.traits, reach="network", deadline=settings.deadline_s)
    return driver

@hookimpl
def stm_backend():
    return BackendPlugin(name="wire", url_schemes=("wire",), open=open_driver)
"""
"""A backend on the small server of `tests/support/networked.py`, with a URL that names a host and a port."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "installed"
    metadata = folder / "wire-1.5.dist-info"
    metadata.mkdir(parents=True)
    (folder / "wire.py").write_text(WIRE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wire\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text("[stm_backends]\nwire = wire\n")
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture(scope="module")
def address() -> str:
    return DictionaryServer().address


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """An address at which nothing answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("url", "address", "changed"),
    [
        ("redis://h:6379/0?a=b", "h:6379", "redis://HERE/0?a=b"),
        ("mariadb://me:s%40c@db:3306/stm", "db:3306", "mariadb://me:s%40c@HERE/stm"),
        ("pg://[::1]:5432/x", "[::1]:5432", "pg://HERE/x"),
        ("etcd://h:2379", "h:2379", "etcd://HERE"),
        (
            "dynamodb://table?region=eu&endpoint_url=http://127.0.0.1:8000&x=y",
            "127.0.0.1:8000",
            "dynamodb://table?region=eu&endpoint_url=http%3A%2F%2FHERE&x=y",
        ),
        ("s3://b?endpoint_url=http%3A%2F%2Fh%3A9%2F", "h:9", "s3://b?endpoint_url=http%3A%2F%2FHERE%2F"),
    ],
)
def test_a_url_with_a_host_and_a_port_names_a_server(url: str, address: str, changed: str) -> None:
    server = server_in(url)
    assert not isinstance(server, str)
    assert (server.address, server.at("HERE")) == (address, changed)
    assert server.at(address) == url or "?" in url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", NO_HOST),
        ("memory://name", NO_HOST),
        ("sqlite:///a/b.db", NO_HOST),
        ("sqlite:///a:5/b.db?note=c:6", NO_HOST),
        ("redis://localhost/0", NO_HOST),
        ("redis://host:port/0", NO_HOST),
        ("mongodb://a:1,b:2/db?replicaSet=rs", SEVERAL),
        ("redis+sentinel://a:26379,b/service", SEVERAL),
    ],
)
def test_any_other_url_is_told_what_it_lacks(url: str, reason: str) -> None:
    assert server_in(url) == reason
    assert means({"name_or_url": "x", "url": url}) == {"no_proxy": reason}


def tried(url: str, **options: Any) -> dict[str, Any]:
    return means({"name_or_url": "wire", "url": url, "create": False, **options})


@pytest.mark.usefixtures("installed")
def test_a_driver_is_reached_by_way_of_a_proxy_with_a_short_deadline(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tried(f"wire://{address}")
    assert found["address"] == address

    async def deadline() -> float:
        driver = await found["through"](address)
        await driver.close()
        return driver.traits.deadline

    assert asyncio.run(deadline()) in behind.DEADLINES_S
    # On a machine on which the first is too short, as no time at all is everywhere.
    monkeypatch.setattr(behind, "DEADLINES_S", (1e-9, 4.0))
    found = tried(f"wire://{address}")
    assert asyncio.run(deadline()) == 4.0
    # A deadline that the author has given stays.
    found = tried(f"wire://{address}?deadline_s=0.75")
    assert asyncio.run(deadline()) == 0.75


@pytest.mark.usefixtures("installed")
def test_what_keeps_a_proxy_from_being_of_use_is_told(address: str, elsewhere: str) -> None:
    before = threading.active_count()
    assert tried(f"wire://{elsewhere}?at={address}") == {"no_proxy": AROUND}
    assert tried(f"wire://{address}?kind=tls") == {"no_proxy": ENCRYPTED}
    refused = tried(f"wire://{address}?kind=fails&at={address}")["no_proxy"]
    assert refused == "a driver by way of it fails: ConfigurationError: this host is not known here"
    (away,) = tried(f"wire://{elsewhere}").values()
    assert away.startswith("a driver by way of it fails: Unavailable")
    assert threading.active_count() <= before + 1, "no proxy goes on; the watchdog may take a moment to end"


@pytest.mark.parametrize(("query", "deadline"), [("", behind.AMPLE_S), ("?deadline_s=0.75", 0.75)])
def test_drivers_that_nothing_stalls_have_time_for_a_busy_machine(
    installed: Path, tmp_path: Path, address: str, query: str, deadline: float
) -> None:
    report = tmp_path / "report.json"
    options = ("--url", f"wire://{address}{query}", "--clause", "driver.traits", "--json", report)
    status, printed = command(tmp_path, "wire", *options, path=installed)
    assert status == 0, printed
    assert json.loads(report.read_text())["traits"]["deadline"] == deadline


NETWORK = ("--clause", "driver.resent")


def test_the_command_asks_the_network_of_a_url_by_itself(
    installed: Path, tmp_path: Path, address: str
) -> None:
    report = tmp_path / "report.json"
    options = ("wire", "--url", f"wire://{address}", "--quick", "--json", report, *NETWORK)
    status, printed = command(tmp_path, *options, path=installed)
    assert status == 0, printed
    assert "`Datastore.address`" not in printed
    assert "with a proxy before the server" not in json.loads(report.read_text())["unasked"]


def test_the_command_finds_what_only_a_lost_answer_shows(
    installed: Path, tmp_path: Path, address: str
) -> None:
    url = f"wire://{address}?kind=retries"
    status, printed = command(tmp_path, "wire", "--url", url, "--quick", *NETWORK, path=installed)
    assert status == 1
    assert "it was sent again" in printed


def test_the_command_says_why_it_asks_nothing_of_the_network(
    installed: Path, tmp_path: Path, address: str, elsewhere: str
) -> None:
    url = f"wire://{elsewhere}?at={address}"
    status, printed = command(tmp_path, "wire", "--url", url, "--quick", *NETWORK, path=installed)
    assert status == 0, printed
    *_, line, verdict = printed.strip().splitlines()
    assert line.startswith("not asked, and what would ask it: ")
    assert f"checks with a proxy before the server ({AROUND}): a URL of one host and port" in line
    assert verdict.startswith("wire passes a selection")


def test_pytest_puts_the_proxy_there_as_well(installed: Path, tmp_path: Path, address: str) -> None:
    name = "test_during_an_outage_every_operation"
    options = ("--stm-backend=wire", f"--stm-url=wire://{address}", "-k", name, "--pyargs")
    status, printed = pytest_in(tmp_path, *options, "stm_backends.testing", path=installed)
    assert status == 0, printed
    assert "1 passed" in printed
