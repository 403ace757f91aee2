"""The commands of `stm-backends` on each datastore of many hosts, in processes that are killed at times."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.erasing import expired_names
from stm_backends.records import keys
from stm_backends.testing.faults import Proxy
from tests.support.command_line import cli, generated, replay
from tests.support.places import EACH, Place, quick_on

PlaceOn = Callable[[str], Place]


@pytest.mark.full
@pytest.mark.parametrize("datastore", EACH)
def test_pods_that_are_killed_take_nothing_acknowledged_with_them(
    datastore: str, proxied: Callable[[str], tuple[Place, Proxy]], tmp_path: Path
) -> None:
    place, proxy = proxied(datastore)
    # Leases of the killed expire after some deadlines, which the replay waits for.
    url = place.options(deadline_s=4)
    file = generated(tmp_path, conversations=12, turns=12)

    options = ("--pods", 4, "--kill-every", 2.5, "--full-zone-turns", 2, "--create")
    # Slow enough that some are killed before all is done, however quick the datastore is, and killed no more
    # often than others can start in their place.
    with proxy.slow(0.12):
        status, numbers = replay(file, tmp_path, "--url", url, *options)

    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["bad_reads"] == 0
    assert status == 0
    assert numbers["killed"] >= 2
    assert numbers["turns"] == numbers["summarized"] + numbers["in_full"] == 144


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
def test_the_conformance_command_finds_nothing_broken(datastore: str, place_on: PlaceOn) -> None:
    """In some clauses, because all of them are a class in the driver's own directory."""
    url = place_on(datastore).url
    clauses = [f"--clause=driver.{clause}" for clause in ("append", "replace", "fold", "scan")]

    done = cli("conformance", datastore, "--url", url, "--quick", "--create", *clauses)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{datastore} passes a selection" in done.stdout
    assert re.search(r"^\+ driver\.replace\b", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
def test_the_conformance_command_puts_its_proxy_before_a_server(
    datastore: str, place_on: PlaceOn, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = place_on(datastore)
    # The URL of a replica set names several hosts; this one names the member that takes writes.
    url = place.through(place.address[1]) if datastore == "mongo" else place.url
    file = tmp_path / "report.json"
    expected = {
        "resent": "test_an_append_that_loses_its_answer_is_not_stored_twice",
        "lifecycle": "test_failed_operations_and_close_leave_no_connection_open",
        "outage": "test_during_an_outage_every_operation_raises_a_typed_error_in_time",
    }
    if request.config.getoption("stm_quick"):
        # One shows that the proxy is there; the class in the driver's own directory has asked the others.
        expected = {"resent": expected["resent"]}
    clauses = [f"--clause=driver.{clause}" for clause in expected]

    options = ("--url", url, "--quick", "--create", "--json", file, *clauses)
    done = cli("conformance", datastore, *options, timeout=290)

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    asked = {check["name"]: check["outcome"] for clause in report["clauses"] for check in clause["checks"]}
    assert {name: asked[name] for name in expected.values()} == dict.fromkeys(expected.values(), "passed")
    assert "proxy" not in report["unasked"]


@pytest.mark.full
def test_the_conformance_command_says_why_it_puts_no_proxy_before_a_replica_set(place_on: PlaceOn) -> None:
    url = place_on("mongo").url
    done = cli("conformance", "mongo", "--url", url, "--quick", "--create", "--clause=driver.resent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with a proxy before the server (the URL names several hosts, and" in done.stdout


CONFIG = ShortTermMemoryConfig(strategy="truncation")
ADA = MemoryKey("acme", "ada@example.com", "chat")


async def store(url: str, key: MemoryKey, *, ttl: float | None = None) -> None:
    async with open_backend(url, create=True) as backend:
        config = ShortTermMemoryConfig(strategy="truncation", session_ttl_s=ttl)
        await backend.memory(key, config).add_turn(ConversationTurn("Hello", "Hi"))


@pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", *EACH]))
def test_an_erasure_of_a_user_is_confirmed_by_a_receipt(
    datastore: str, place_on: PlaceOn, tmp_path: Path
) -> None:
    url = place_on(datastore).url

    async def fill() -> None:
        for key in (ADA, MemoryKey("acme", "bob", "chat")):
            await store(url, key)
        async with open_backend(url) as backend:
            await backend.item_log(ADA, "langchain").add([{"a": 1}])
            await backend.state_store.save_memory_state(ADA.composite(), {})
            run = {"tool_context": {"tenant_id": ADA.tenant_id, "user_id": ADA.user_id}}
            await backend.state_store.save_planner_state("token", run)

    asyncio.run(fill())
    file = tmp_path / "receipt.json"
    done = cli("erase", "acme:ada@example.com", "-y", "--url", url, "--receipt", file)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("4 records erased: 1 conversation, ")
    assert rest[-1] == "A second reading found nothing."

    receipt = json.loads(file.read_text())
    counts = {kind: count for kind, count in receipt["erased"].items() if count}
    cards = counts.pop("cards")
    assert cards >= 2, "a card, and its names in the index"
    assert counts == {"conversations": 1, "logs": 1, "states": 1, "paused_runs": 1, "directory_entries": 1}
    assert receipt["second_reading"] == {}
    assert receipt["of"] == {"tenant_id": "acme", "user_id": "ada@example.com", "session_id": None}
    assert receipt["remains"].lower().startswith(receipt["backend"][:5])
    assert receipt["datastore"].partition(":")[0] == url.partition(":")[0]
    assert "secret" not in json.dumps(receipt)
    assert file.stat().st_mode & 0o077 == 0
    listed = cli("ls", "acme", "--url", url)
    assert listed.stdout == "acme:bob\n"


@pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", *EACH]))
async def test_what_has_expired_is_erased_though_it_is_still_stored(
    datastore: str, place_on: PlaceOn
) -> None:
    url = place_on(datastore).url
    await store(url, ADA, ttl=1.0)
    async with open_backend(url) as backend:
        for _ in range(300):
            if await backend.driver.load(keys.memory_key(ADA)) is None:
                break
            await asyncio.sleep(0.1)
        receipt = await backend.sessions.erase_with_receipt(ADA.tenant_id, ADA.user_id)
        # The conversation and its card. Redis, or the TTL monitor of MongoDB, may have been faster.
        assert receipt.erased.get("expired", 0) <= 2
        scope = keys.scope(ADA.tenant_id, ADA.user_id, "memory")
        assert [name async for name in expired_names(backend.driver, scope)] == []
        assert receipt.found == {}


def test_a_receipt_that_cannot_be_written_prevents_the_erasure(place_on: PlaceOn, tmp_path: Path) -> None:
    url = place_on("sqlite").url
    asyncio.run(store(url, ADA))
    done = cli("erase", "acme", "-y", "--url", url, "--receipt", tmp_path / "missing" / "receipt.json")
    assert done.returncode == 2
    assert cli("ls", "acme", "--url", url).stdout == "acme:ada@example.com\n"
