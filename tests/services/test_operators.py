"""What operators see, on each of the five datastores: `stats`, `ls` and `copy --all`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.records.keys import memory_key
from tests.support.command_line import cli
from tests.support.places import EACH, Place, in_file, quick_on

PlaceOn = Callable[[str], Place]

FIVE = ("sqlite", *EACH)
LISTING = {"sqlite", "postgres", "mongo"}
"""The datastores that keep their keys in order, and so can find tenants."""

TENANTS = ("acme", "acme!", "acme;", "b:c", "e\u0301\U0001f680", "z%")
"""Each sorts differently with its separator than without it."""


def filled(place: Place) -> str:
    """Store one damaged conversation of a tenant, and one with two turns of each tenant."""

    async def fill() -> None:
        async with open_backend(place.url, create=True) as backend:
            for tenant in TENANTS:
                key = MemoryKey(tenant, "u1", "trip")
                memory = backend.memory(key, ShortTermMemoryConfig("truncation", session_ttl_s=3600))
                for number in range(2):
                    await memory.add_turn(ConversationTurn(f"Number {number}", "Booked", ts=1_760_000_000.0))
            damaged = memory_key(MemoryKey("acme", "u2", "damaged"))
            await backend.driver.append(damaged, b"damaged", initial_version="damaged", ttl=3600.0)
            document = await backend.sessions.export(MemoryKey("acme", "u1", "trip"))
            document["key"] |= {"user_id": "u2", "session_id": "good"}
            await backend.sessions.import_(document)

    asyncio.run(fill())
    return place.url


@pytest.fixture
def url(datastore: str, place_on: PlaceOn, tmp_path: Path) -> str:
    return filled(in_file(tmp_path) if datastore == "sqlite" else place_on(datastore))


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("datastore", quick_on("redis", FIVE))
def test_stats_and_ls_count_what_is_stored(datastore: str, url: str) -> None:
    done = cli("stats", "acme", "b%3Ac:u1", "--json", "--url", url)
    assert done.returncode == 1
    assert "acme:u2:damaged: " in done.stderr
    acme, other, total = rows(done)
    figures = ("users", "conversations", "turns", "damaged", "last_activity")
    assert [acme[name] for name in figures] == [2, 2, 4, 1, "2025-10-09T08:53:20Z"]
    assert [other[name] for name in figures] == [1, 1, 2, 0, "2025-10-09T08:53:20Z"]
    assert total["bytes"] == acme["bytes"] + other["bytes"] > 300
    (listed,) = rows(cli("ls", "b%3Ac:u1", "-l", "--json", "--url", url))
    assert listed["key"] == "b%3Ac:u1:trip"
    assert listed["tokens"] == other["tokens"]
    assert 0 < listed["bytes"] < other["bytes"], "the card is the user's"


@pytest.mark.parametrize("datastore", quick_on("sqlite", FIVE))
def test_tenants_are_listed_where_keys_are_in_order_only(datastore: str, url: str, tmp_path: Path) -> None:
    listed, summed = cli("ls", "--json", "--url", url), cli("stats", "--json", "--url", url)
    target = f"sqlite:///{tmp_path}/copy.db"
    copied = cli("copy", url, target, "--all")
    if datastore not in LISTING:
        for refused in (listed, summed, copied):
            assert refused.returncode == 2
            assert f"{datastore} cannot list its tenants; name those that you mean" in refused.stderr
        return
    assert sorted(row["tenant"] for row in rows(listed)) == sorted(TENANTS)
    assert rows(summed)[-1]["conversations"] == len(TENANTS) + 1
    assert copied.returncode == 0, copied.stderr
    assert rows(cli("stats", "--json", "--url", target)) == rows(summed)
