"""Real conversations copied from datastore to datastore, all the way round, byte for byte."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends import open_backend
from stm_backends.admin import copying
from stm_backends.drivers.contract import Key, Record
from stm_backends.records import keys, operations
from stm_backends.testing.faults import Proxy
from tests.support.command_line import cli
from tests.support.places import Place

CONVERSATIONS = Path(__file__).parents[2] / "examples" / "conversations.jsonl"
WHOSE = ("--tenant", "demo")


async def _held(url: str) -> dict[Key, Record]:
    found: dict[Key, Record] = {}
    async with open_backend(url) as backend:
        for kind in copying.KINDS:
            scope = keys.scope("demo", "replay", kind)
            async for name in operations.names(backend.driver, scope):
                record = await backend.driver.load(Key(scope, name))
                assert record is not None
                found[Key(scope, name)] = record
    return found


def held(url: str) -> dict[Key, Record]:
    """Return everything of the user, as it is stored."""
    return asyncio.run(_held(url))


def copied(source: str, target: str) -> str:
    done = cli("copy", source, target, *WHOSE, "--create")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All data of demo is at the target, byte for byte." in done.stdout
    return done.stdout


def kill_while_copying(source: str, target: Place, original: dict[Key, Record]) -> int:
    """Start a copy and kill it once a record has arrived whole; returns how many had then."""

    def arrived() -> int:
        return len(original.items() & held(target.url).items())

    # A record of several entries takes several round trips, and one without a tail only one.
    with Proxy("{}:{}".format(*target.address)) as proxy, proxy.slow(0.1):
        command = ["copy", source, target.by_way_of(proxy.port).url, *WHOSE]
        copying = subprocess.Popen(
            [sys.executable, "-m", "stm_backends.cli", *command], stdout=subprocess.PIPE, text=True
        )
        try:
            assert copying.stdout
            assert copying.stdout.readline().startswith("Copying")
            while not arrived():
                # It is stopped while it is looked at: looking may take longer than the whole copy.
                copying.send_signal(signal.SIGCONT)
                assert copying.poll() is None, "it had ended before it could be killed"
                time.sleep(0.05)
                copying.send_signal(signal.SIGSTOP)
        finally:
            copying.kill()
            copying.communicate()
    return arrived()


@pytest.mark.full
def test_what_comes_out_of_the_last_is_what_went_into_the_first(place_on: Callable[[str], Place]) -> None:
    route = ("redis", "postgres", "mongo", "dynamo", "sqlite")
    first = place_on("sqlite").url
    replayed = cli("replay", CONVERSATIONS, "--url", first, "--full-zone-turns", 3, "--pods", 2)
    assert replayed.returncode == 0, replayed.stderr
    original = held(first)
    assert sum(record.body is not None for record in original.values()) > 5
    assert sum(len(record.tail) for record in original.values()) > 30

    source = first
    for datastore in route:
        place = place_on(datastore)
        if datastore == "mongo":
            asyncio.run(_create(place.url))
            assert 0 < kill_while_copying(source, place, original) < len(original)
            assert "identical already" in copied(source, place.url)
        else:
            copied(source, place.url)
        assert held(place.url) == original, datastore
        source = place.url

    exports = [cli("export", "--user", "demo:replay", "--url", url).stdout for url in (first, source)]
    assert exports[0] == exports[1]
    # Before a conversation, there may be pages of its transcript.
    complete = [line for line in exports[0].splitlines() if line.startswith('{"format":"stm-session"')]
    assert len(complete) == len(CONVERSATIONS.read_text("utf-8").splitlines())


async def _create(url: str) -> None:
    async with open_backend(url, create=True):
        pass
