"""No write drops or rewrites an entry that only the new server has; see decision 0037.

A failover that loses an entry does not change the version, and another entry may come in its place. The load
came from the old server, the write reaches the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from stm_backends import races
from stm_backends.admin.purging import Purge
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import OutcomeUnknown, TooLarge
from stm_backends.history import items
from stm_backends.history.items import Add
from stm_backends.records import confirming, keys, ledger, postings
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.tiers import vertices
from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.index import Index
from stm_backends.types import ConversationTurn, MemoryKey, StoredTurn
from tests.mutants.ledger import CONFIRMATIONS, counts_what_is_dropped, stores_nothing_without_room
from tests.support.replicated import FailsOver, StillAnswersLoads

OWNER = ("acme", "ada")
CODEC = Codec()
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


async def two_servers(
    where: Key, lost: bytes, kept: bytes, *, both: Sequence[bytes] = (), driver: FailsOver | None = None
) -> FailsOver:
    """Return two servers with one record, whose last entry differs, under one version.

    Its user is listed, so that the first `replace` is the one in question.
    """
    driver = driver or FailsOver()
    await driver.open()
    for server, last in (driver.inner, lost), (driver.new, kept):
        await Directory(server, CODEC).note(*OWNER)
        for entry in (*both, last):
            await server.append(where, entry, initial_version="v", ttl=None)
    return driver


def graph_on(driver: Driver) -> BackendGraph:
    return BackendGraph(Backend(driver), OWNER)


def half(target: str) -> bytes:
    return vertices.seal_halves("a", target, "knows", {}, CODEC)[0]


async def edges(driver: Driver) -> set[str]:
    """Return to what a vertex has the first halves of edges."""
    stored = vertices.read(await driver.load(keys.vertex_key(*OWNER, "a")), CODEC)
    return {target for target, _ in stored.out}


async def test_a_changed_vertex_drops_no_edge_that_only_the_new_server_has() -> None:
    driver = await two_servers(keys.vertex_key(*OWNER, "a"), half("lost"), half("kept"), both=[half("b")])
    await graph_on(driver).add_vertex("a", "person", {"key": "a"})
    assert driver.inner is driver.new
    assert await edges(driver) == {"b", "kept"}


async def index_on(word: str, driver: FailsOver) -> tuple[Index, FailsOver]:
    """Return an index on two servers of which each has one vertex that the other lacks under a word."""
    number = next(iter(postings.by_bucket([word])))
    lost, kept = (postings.seal_added(f"{0:011x}{one}", one, [word], CODEC) for one in ("lost", "kept"))
    await two_servers(keys.postings_key(*OWNER, number), lost, kept, driver=driver)
    return Index(driver, CODEC, Directory(driver, CODEC), OWNER), driver


async def test_a_fold_of_an_index_drops_no_word_that_only_the_new_server_has() -> None:
    index, driver = await index_on("word", FailsOver())
    await index.drop_unless(lambda stamp: True)
    assert driver.inner is driver.new
    assert await index.ids(frozenset(["word"])) == ["kept"]


async def test_a_version_that_confirms_words_is_stored_on_one_server_only() -> None:
    """Else the former master shows that version with its own words, and the new one drops others."""
    index, driver = await index_on("word", StillAnswersLoads())
    with pytest.raises(OutcomeUnknown):
        await index.drop_unless(lambda stamp: True)
    new, _ = Index(driver.new, CODEC, Directory(driver.new, CODEC), OWNER), driver
    assert await new.ids(frozenset(["word"])) == ["kept"]


def seals(driver: Driver, primary: str) -> SealedDriver:
    keys_ = StaticKeys({"k1": OLD, "k2": NEW}, primary=primary)
    return SealedDriver(driver, Sealing(keys_), clear_met=lambda: None)


@pytest.mark.parametrize("has_body", [True, False])
async def test_sealing_again_replaces_no_entry_that_only_the_new_server_has(*, has_body: bool) -> None:
    where, driver = Key("acme:ada:memory", "trip"), FailsOver()
    await driver.open()
    for server, last in (driver.inner, b"lost"), (driver.new, b"kept"):
        before = seals(server, "k1")
        for entry in (b"both", last):
            await before.append(where, entry, initial_version="v", ttl=None)
        if has_body:
            assert await before.replace(where, b"body", version="w", expect="v", ttl=None)
    resealed = await seals(driver, "k2").reseal(where)
    assert (resealed.left, resealed.lost_races) == (0, 1)
    after = SealedDriver(driver.new, Sealing(StaticKeys({"k2": NEW}, primary="k2")), clear_met=lambda: None)
    record = await after.load(where)
    assert record is not None
    assert (record.body, record.tail) == (b"body" if has_body else None, (b"both", b"kept"))


def old_turn(text: str) -> bytes:
    return CODEC.seal_turn(StoredTurn(text, ConversationTurn(text, text, ts=1e9)))


def old_items(text: str) -> bytes:
    return items.seal_entry(Add(text, [{"n": text}], 1e9), CODEC)


@pytest.mark.parametrize(
    ("where", "entry"),
    [
        pytest.param(keys.memory_key(MemoryKey(*OWNER, "chat")), old_turn, id="a conversation"),
        pytest.param(keys.log_key(MemoryKey(*OWNER, "chat"), "langchain"), old_items, id="a log"),
    ],
)
async def test_a_purge_drops_no_entry_that_only_the_new_server_has(
    where: Key, entry: Callable[[str], bytes]
) -> None:
    new = entry("kept")
    driver = await two_servers(where, entry("lost"), new, both=[entry("both")])
    await driver.new.append(where, entry("later"), initial_version="v", ttl=None)
    purge = Purge(driver, CODEC, Directory(driver, CODEC), older_than=60.0)
    await purge.user(*OWNER)
    assert driver.inner is driver.new
    assert purge.purged.changed == 1
    record = await driver.load(where)
    assert record is not None
    assert new in record.tail


class Full(WrapperDriver):
    """Has the room for a body only that it had before."""

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if body and not options.get("drop"):
            raise TooLarge("record", size=2, limit=1)
        return await self.inner.replace(key, body, **options)


async def test_a_full_record_without_a_body_drops_no_entry_that_only_the_new_server_has() -> None:
    where, servers = Key("acme:ada:memory", "trip"), FailsOver()
    await servers.open()
    driver = Full(servers)
    for server, last in (servers.inner, b"lost"), (servers.new, b"kept"):
        for entry in (b"both", last):
            await server.append(where, entry, initial_version="v", ttl=None)
    record = await driver.load(where)
    assert record is not None

    def body_of(found: Record) -> bytes:
        return b"%d folded" % len(found.tail)

    change = ledger.Change(b"2 folded", drop=2)
    assert not await ledger.fold(driver, where, record, change, unchanged=ledger.unchanged_by(body_of))
    record = await driver.load(where)
    assert record is not None
    assert (record.body or None, record.tail) == (None, (b"both", b"kept"))
    assert await ledger.fold(driver, where, record, change, unchanged=ledger.unchanged_by(body_of))
    record = await driver.load(where)
    assert record is not None
    assert (record.body, record.tail) == (b"2 folded", ())


async def test_a_ledger_that_stores_no_version_without_room_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confirming, "confirmed", stores_nothing_without_room)
    with pytest.raises(AssertionError):
        await test_a_full_record_without_a_body_drops_no_entry_that_only_the_new_server_has()


@pytest.mark.parametrize("mutant", CONFIRMATIONS)
async def test_ledgers_that_confirm_too_little_are_rejected(
    mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirming, "confirmed", mutant)
    with pytest.raises(AssertionError):
        await test_a_changed_vertex_drops_no_edge_that_only_the_new_server_has()
    with pytest.raises(AssertionError):
        await test_a_fold_of_an_index_drops_no_word_that_only_the_new_server_has()
    with pytest.raises(AssertionError):
        await test_sealing_again_replaces_no_entry_that_only_the_new_server_has(has_body=True)


async def test_a_ledger_that_confirms_no_rewritten_entry_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger.Change, "going", property(counts_what_is_dropped))
    with pytest.raises(AssertionError):
        await test_sealing_again_replaces_no_entry_that_only_the_new_server_has(has_body=True)


async def test_a_ledger_that_repeats_what_confirms_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def repeats(write: Callable[[], Awaitable[object]], **_: object) -> object:
        return await retried(write)

    retried = races.retried
    monkeypatch.setattr(ledger, "retried", repeats)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await test_a_version_that_confirms_words_is_stored_on_one_server_only()
