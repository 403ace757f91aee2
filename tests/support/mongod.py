"""MongoDB servers for tests: single ones, and replica sets."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.uri_parser import parse_uri

from tests.support.servers import START_S, Server, free_port

LEAN = ("--wiredTigerCacheSizeGB", "0.25", "--setParameter", "diagnosticDataCollectionEnabled=false")


def binary() -> Path | None:
    """Return the server that the package index has, if it is installed and runs here."""
    spec = importlib.util.find_spec("fiftyone")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "db" / "bin" / "mongod"
        if path.exists():
            path.chmod(0o755)
            return path
    return None


def in_database(url: str, database: str, *, port: int | None = None) -> str:
    """Return the URL of a database on the same servers, for the same user; with `port`, by way of a proxy.

    A proxy is all that a client then sees of a replica set.
    """
    address, _, query = url.partition("?")
    scheme, _, rest = address.partition("://")
    hosts, _, path = rest.partition("/")
    source = parse_uri(url)["options"].get("authSource", path or "admin")
    options = [pair for pair in query.split("&") if pair and not pair.startswith("authSource=")]
    if port is not None:
        user, at, _ = hosts.rpartition("@")
        hosts, options = f"{user}{at}127.0.0.1:{port}", ["directConnection=true"]
    return f"{scheme}://{hosts}/{database}?{'&'.join([*options, f'authSource={source}'])}"


class Mongod(Server):
    """One `mongod` on a port of its own, with the journal that it always has."""

    def __init__(self, program: Path, directory: Path, *options: str) -> None:
        directory.mkdir()
        self.address = f"127.0.0.1:{(port := free_port())}"
        command = [program, "--dbpath", directory, "--port", str(port), "--bind_ip", "127.0.0.1"]
        super().__init__([*command, *LEAN, *options], directory, self.hello)

    def hello(self) -> dict[str, Any]:
        """Ask what this member is, past any replica set."""
        return self.ask("hello")

    def ask(
        self, command: str, value: object = 1, *, database: str = "admin", **more: object
    ) -> dict[str, Any]:
        """Send this member one command."""
        url = f"mongodb://{self.address}/?directConnection=true&serverSelectionTimeoutMS=2000"
        with MongoClient[dict[str, Any]](url) as client:
            return client[database].command(command, value, **more)


class ReplicaSet:
    """Three members, unless told otherwise, that elect another primary soon after one has died."""

    def __init__(self, program: Path, directory: Path, *, size: int = 3) -> None:
        self.members = [
            Mongod(program, directory / f"member{n}", "--replSet", "stm", "--oplogSize", "64")
            for n in range(size)
        ]

    @property
    def url(self) -> str:
        """Where the set is, without a database."""
        hosts = ",".join(member.address for member in self.members)
        return f"mongodb://{hosts}/?replicaSet=stm"

    def start(self) -> None:
        """Start and join the members."""
        for member in self.members:
            member.start()
        config = {
            "_id": "stm",
            "members": [{"_id": n, "host": member.address} for n, member in enumerate(self.members)],
            "settings": {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500},
        }
        self.members[0].ask("replSetInitiate", config)
        self.settle()

    def stop(self) -> None:
        """Stop all members."""
        for member in self.members:
            member.kill()

    def primary(self) -> Mongod:
        """Return the member that is the primary, once there is one."""
        return until(lambda: next((one for one in self.members if is_primary(one)), None))

    def settle(self) -> None:
        """Wait until there is a primary, and the others follow it."""
        primary = self.primary()

        def settled() -> bool:
            states = [member["state"] for member in primary.ask("replSetGetStatus")["members"]]
            return sorted(states) == [1] + [2] * (len(states) - 1)

        until(settled)


def is_primary(member: Mongod) -> bool:
    """Return whether a member says that it is the primary; one that is dead does not."""
    try:
        return bool(member.hello()["isWritablePrimary"])
    except PyMongoError:
        return False


def until(ask: Callable[[], Any]) -> Any:
    """Return what a question is answered, once that is a yes."""
    give_up_at = time.monotonic() + START_S
    while not (answer := ask()):
        assert time.monotonic() < give_up_at, "it never came to pass"
        time.sleep(0.1)
    return answer
