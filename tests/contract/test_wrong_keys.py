"""A process without the keys that sealed what is stored, or with others, writes nothing beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConversationTurn,
    EnvelopeKeys,
    ExtractiveSummarizer,
    KeyMismatch,
    MemoryBudget,
    MemoryKey,
    Sealing,
    SealMismatch,
    ShortTermMemoryConfig,
    StaticKeys,
    StmError,
    open_backend,
)
from stm_backends.admin.copying import UNOWNED, Copy, Owner
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records.keys import data_keys_key, directory_key, mark_key
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.testing.workbench.spy import SpyDriver

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
ADA, NEWCOMER = MemoryKey("acme", "ada", "trip"), MemoryKey("acme", "new", "trip")
CONFIG = ShortTermMemoryConfig("truncation")
K1 = Sealing(StaticKeys({"k1": OLD}, primary="k1"))
K1_AND_K2 = Sealing(StaticKeys({"k1": OLD, "k2": NEW}, primary="k2"))
K2 = Sealing(StaticKeys({"k2": NEW}, primary="k2"))
OTHER_BYTES = Sealing(StaticKeys({"k1": NEW}, primary="k1"))
TOO = Sealing(StaticKeys({"k1": NEW, "k2": OLD}, primary="k2"))
OTHER_PRIMARY = Sealing(StaticKeys({"k1": OLD, "k2": OLD}, primary="k2"))
MIGRATING = Sealing(K1.keys, accept_clear=True)
SUMMARIES = ShortTermMemoryConfig("rolling_summary", budget=MemoryBudget(full_zone_turns=1))


async def add(backend: Backend, key: MemoryKey, text: str = "To Zanzibar!") -> None:
    await backend.memory(key, CONFIG).add_turn(ConversationTurn(text, "Booked."))


async def shown(backend: Backend, key: MemoryKey) -> list[str]:
    return [turn.user_message for turn in await backend.memory(key, CONFIG).turns()]


async def import_new(backend: Backend) -> None:
    await backend.sessions.import_(
        {
            "format": "stm-session",
            "version": 1,
            "key": {"tenant_id": "acme", "user_id": "new", "session_id": "imported"},
            "body": {},
            "turns": [],
        }
    )


WRITES: dict[str, Callable[[Backend], Awaitable[Any]]] = {
    "a turn": lambda backend: add(backend, ADA),
    "a turn of a new user": lambda backend: add(backend, NEWCOMER),
    "a state of a user": lambda backend: backend.state_store.save_memory_state("acme:ada:trip", {"a": 2}),
    "a state of a new user": lambda backend: backend.state_store.save_memory_state("acme:new:s", {"a": 2}),
    "a state of no user": lambda backend: backend.state_store.save_memory_state("loose", {"a": 2}),
    "an item of a log": lambda backend: backend.item_log(NEWCOMER, "langchain").add([{"a": 2}]),
    "an import": import_new,
}


async def fill(backend: Backend) -> None:
    for session in ("trip", "taxes"):
        await add(backend, MemoryKey("acme", "ada", session))
    await backend.state_store.save_memory_state("acme:ada:trip", {"a": 1})
    await backend.state_store.save_memory_state("loose", {"a": 1})


async def everything(backend: Backend) -> object:
    return [
        await shown(backend, ADA),
        await shown(backend, NEWCOMER),
        await backend.state_store.load_memory_state("acme:ada:trip"),
        await backend.state_store.load_memory_state("loose"),
        [user async for user in backend.sessions.users("acme")],
    ]


async def refuses(url: str, sealing: Sealing | None, error: type[StmError]) -> None:
    """Check that nothing is written with this sealing; each write has a backend of its own."""
    for write in WRITES.values():
        async with open_backend(url, sealing=sealing) as backend:
            with pytest.raises(error):
                await write(backend)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/data.db"


@pytest.mark.parametrize(
    ("other", "error", "marked"),
    [
        pytest.param(OTHER_BYTES, KeyMismatch, True, id="other bytes"),
        pytest.param(K2, KeyMismatch, True, id="another id"),
        pytest.param(TOO, KeyMismatch, True, id="other bytes of an older key"),
        pytest.param(None, SealMismatch, True, id="no keys"),
        pytest.param(OTHER_BYTES, KeyMismatch, False, id="other bytes, no mark"),
        pytest.param(K2, KeyMismatch, False, id="another id, no mark"),
        pytest.param(TOO, KeyMismatch, False, id="other bytes of an older key, no mark"),
    ],
)
async def test_a_process_with_other_keys_writes_nothing(
    url: str, other: Sealing | None, error: type[StmError], marked: bool
) -> None:
    """Without a mark, the data was stored by a version that wrote none."""
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
        before = await everything(backend)
        if not marked:
            for tenant in ("acme", ""):
                await backend.driver.delete(mark_key(tenant))
    await refuses(url, other, error)
    async with open_backend(url, sealing=K1) as backend:
        assert await everything(backend) == before
        await add(backend, ADA, "And back.")
        assert await shown(backend, ADA) == ["To Zanzibar!", "And back."]


@pytest.mark.parametrize("user", ["ada", None])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("other", [OTHER_BYTES, K2], ids=["other bytes", "another id"])
async def test_an_erasure_with_other_keys_erases_nothing(
    url: str, other: Sealing, marked: bool, user: str | None
) -> None:
    """The data keys would stay, and the receipt would be complete."""
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
        before = await everything(backend)
        if not marked:
            await backend.driver.delete(mark_key("acme"))
    async with open_backend(url, sealing=other) as backend:
        with pytest.raises(KeyMismatch):
            await backend.sessions.erase_with_receipt("acme", user)
    async with open_backend(url, sealing=K1) as backend:
        assert await everything(backend) == before
        assert (await backend.sessions.erase_with_receipt("acme", user)).complete


async def test_an_erasure_of_a_tenant_that_is_not_there_stores_nothing(url: str) -> None:
    async with open_backend(url, sealing=K1) as backend:
        assert await backend.sessions.erase_user("nobody", "here") == 0
        assert await backend.driver.load(mark_key("nobody")) is None


async def fold(backend: Backend) -> None:
    memory = backend.memory(ADA, SUMMARIES, summarizer=ExtractiveSummarizer())
    assert len(await memory.turns()) == 3
    await memory.flush()


async def reseal(backend: Backend) -> None:
    problems: list[str] = []

    def note(key: Key, problem: str, error: StmError | None) -> None:
        problems.append(str(error))

    await backend.sessions.resealing([Owner("acme")], on_problem=note).run()
    assert problems
    assert all("other bytes of the key 'k2'; nothing was changed" in one for one in problems)


@pytest.mark.parametrize("rewrites", [fold, reseal])
async def test_what_was_read_is_not_sealed_again_with_other_bytes_of_the_new_key(
    url: str, rewrites: Callable[[Backend], Awaitable[None]]
) -> None:
    """The older key opens everything, so nothing but the mark shows that the new one is wrong."""
    async with open_backend(url, sealing=K1) as backend:
        for text in ("one", "two", "three"):
            await add(backend, ADA, text)
    async with open_backend(url, sealing=K1_AND_K2) as backend:
        await add(backend, NEWCOMER)
    async with open_backend(url, sealing=OTHER_PRIMARY) as backend:
        await rewrites(backend)
    async with open_backend(url, sealing=K1_AND_K2) as backend:
        assert await shown(backend, ADA) == ["one", "two", "three"]


async def test_a_tenant_sealed_before_there_were_marks_is_marked_when_it_is_met(url: str) -> None:
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
        await backend.driver.delete(mark_key("acme"))
    async with open_backend(url, sealing=K1) as backend:
        await add(backend, ADA)
    async with open_backend(url) as backend:
        with pytest.raises(SealMismatch, match="nothing was written"):
            await add(backend, NEWCOMER)


async def test_a_process_that_accepts_clear_text_marks_nothing(url: str) -> None:
    """While a datastore is migrated, other processes still write clear text."""
    async with open_backend(url) as clear, open_backend(url, sealing=MIGRATING) as migrating:
        await add(clear, ADA)
        await add(migrating, ADA)
        await add(migrating, NEWCOMER)
    async with open_backend(url) as clear:
        await add(clear, MemoryKey("acme", "bob", "trip"))
    async with open_backend(url, sealing=MIGRATING) as migrating:
        assert (await migrating.sessions.reseal("acme")).ok
    async with open_backend(url, sealing=K1) as sealed:
        await add(sealed, ADA)
        assert len(await shown(sealed, ADA)) == 3
    async with open_backend(url) as clear:
        with pytest.raises(SealMismatch):
            await add(clear, MemoryKey("acme", "eve", "trip"))


async def test_after_a_rotation_the_new_key_alone_writes(url: str) -> None:
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
    async with open_backend(url, sealing=K1_AND_K2) as backend:
        await add(backend, ADA)
    async with open_backend(url, sealing=K1) as backend:
        # A process that has only the older key still writes with it.
        await add(backend, NEWCOMER)
    async with open_backend(url, sealing=K1_AND_K2) as backend:
        for owner in (Owner("acme"), UNOWNED):
            assert (await backend.sessions.resealing([owner]).run()).ok
    async with open_backend(url, sealing=K2) as backend:
        for write in WRITES.values():
            await write(backend)
        assert len(await shown(backend, ADA)) == 3


async def test_resealing_a_tenant_without_records_lets_the_old_key_go(url: str) -> None:
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
        await backend.sessions.erase_user("acme", "ada")
    async with open_backend(url, sealing=K1_AND_K2) as backend:
        assert (await backend.sessions.reseal("acme")).ok
    async with open_backend(url, sealing=K2) as backend:
        await add(backend, ADA)


async def test_an_erased_tenant_begins_again_sealed_or_in_clear(url: str) -> None:
    async with open_backend(url, sealing=K1) as backend:
        await fill(backend)
        await backend.sessions.erase_tenant("acme")
        assert await backend.driver.load(directory_key("acme", "ada")) is None
        await add(backend, ADA)
    async with open_backend(url) as backend:
        await backend.sessions.erase_tenant("acme")
        await add(backend, ADA)
        assert await shown(backend, ADA) == ["To Zanzibar!"]


async def test_a_copy_brings_the_mark_and_puts_no_clear_text_beside_it(tmp_path: Path) -> None:
    there, clear = f"sqlite:///{tmp_path}/there.db", f"sqlite:///{tmp_path}/clear.db"
    async with open_backend(f"sqlite:///{tmp_path}/here.db", sealing=K1) as backend:
        await fill(backend)
    async with open_backend(f"sqlite:///{tmp_path}/here.db") as source, open_backend(there) as target:
        copy = Copy(source.driver, target.driver, [Owner("acme"), UNOWNED])
        await copy.copy()
        await copy.verify()
        assert copy.ok
    await refuses(there, OTHER_BYTES, KeyMismatch)
    async with open_backend(there) as target:
        with pytest.raises(SealMismatch):
            await add(target, NEWCOMER)
    async with open_backend(clear) as source, open_backend(there) as target:
        await add(source, NEWCOMER)
        copy = Copy(source.driver, target.driver, [Owner("acme")])
        await copy.copy()
        assert copy.tally == {"failed": 1}
        assert await target.driver.load(directory_key("acme", "new")) is None
    async with open_backend(there, sealing=K1) as backend:
        await add(backend, ADA)
        await add(backend, NEWCOMER)


@pytest.mark.parametrize("sealing", [None, K1], ids=["in clear text", "sealed"])
async def test_a_process_looks_at_the_mark_of_a_tenant_once_a_minute(sealing: Sealing | None) -> None:
    spy = SpyDriver(MemoryDriver())
    async with Backend(spy, sealing=sealing) as backend:
        for user in ("ada", "bob", "eve"):
            for _ in range(3):
                await add(backend, MemoryKey("acme", user, "trip"))
        for number in range(3):
            await backend.state_store.save_memory_state(f"loose {number}", {})
        # One for the tenant, and one for what names none.
        assert spy.count("load", "seal") == 2
        assert spy.count("replace", "seal") == (0 if sealing is None else 2)


# Keys in a store of their own


def enveloped(store: Driver, wrapping: bytes = OLD) -> Sealing:
    return Sealing(EnvelopeKeys(store, LocalWrapping({"w1": wrapping}, primary="w1")))


@pytest.fixture
def stores(tmp_path: Path) -> Callable[[str], Backend]:
    return lambda name: open_backend(f"sqlite:///{tmp_path}/{name}.db")


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "written before there were marks"])
@pytest.mark.parametrize("wrong", ["an empty store", "another wrapping key", "another store"])
async def test_no_data_key_is_made_where_another_one_is_in_use(
    url: str, stores: Callable[[str], Backend], wrong: str, marked: bool
) -> None:
    async with stores("keys") as store, stores("other") as other:
        async with open_backend(url, sealing=enveloped(store.driver)) as backend:
            await fill(backend)
            before = await everything(backend)
            if not marked:
                await backend.driver.delete(mark_key("acme"))
                await backend.driver.delete(mark_key(""))
        if wrong == "another store":
            async with open_backend("memory://", sealing=enveloped(other.driver)) as backend:
                await fill(backend)
        sealing = enveloped(store.driver, NEW) if wrong == "another wrapping key" else enveloped(other.driver)
        for write in WRITES.values():
            async with open_backend(url, sealing=sealing) as backend:
                with pytest.raises(KeyMismatch):
                    await write(backend)
        if wrong == "an empty store":
            for owner in (("acme", ""), ("acme", "ada"), ("acme", "new"), ("", "")):
                assert await other.driver.load(data_keys_key(*owner)) is None
        async with open_backend(url, sealing=enveloped(store.driver)) as backend:
            assert await everything(backend) == before


async def test_no_data_key_is_made_for_a_user_whose_key_was_lost(
    url: str, stores: Callable[[str], Backend]
) -> None:
    """A store of keys that was restored from a state before the user."""
    async with stores("keys") as store:
        async with open_backend(url, sealing=enveloped(store.driver)) as backend:
            await fill(backend)
        where = data_keys_key("acme", "ada")
        lost = await store.driver.load(where)
        assert lost is not None
        await store.driver.delete(where)
        async with open_backend(url, sealing=enveloped(store.driver)) as backend:
            await add(backend, NEWCOMER)
            with pytest.raises(KeyMismatch, match="does not have"):
                await add(backend, ADA)
            with pytest.raises(KeyMismatch):
                await backend.state_store.save_memory_state("acme:ada:trip", {"a": 2})
            assert await store.driver.load(where) is None
            await backend.sessions.erase_user("acme", "ada")
            await add(backend, ADA)
            assert await shown(backend, ADA) == ["To Zanzibar!"]


async def test_turns_after_an_erasure_are_readable_in_every_process(
    url: str, stores: Callable[[str], Backend]
) -> None:
    """Two processes have the data key, one erases the user, and both go on."""
    async with (
        stores("keys") as store,
        open_backend(url, sealing=enveloped(store.driver)) as one,
        open_backend(url, sealing=enveloped(store.driver)) as two,
    ):
        keys = [MemoryKey("acme", "ada", str(number)) for number in range(6)]
        for key in keys:
            await add(one, key)
            await add(two, key)
        await one.sessions.erase_user("acme", "ada")
        for number, key in enumerate(keys):
            first, second = (one, two) if number % 2 else (two, one)
            await add(first, key, "first")
            await add(second, key, "second")
        await two.state_store.save_memory_state("acme:ada:s", {"a": 1})
        async with open_backend(url, sealing=enveloped(store.driver)) as fresh:
            for backend in (one, two, fresh):
                for key in keys:
                    assert await shown(backend, key) == ["first", "second"]
                assert await backend.state_store.load_memory_state("acme:ada:s") == {"a": 1}
                assert [user async for user in backend.sessions.users("acme")] == ["ada"]
