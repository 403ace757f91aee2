"""A sealed backend works as any other, and nothing of a conversation is readable in its datastore."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Corrupt,
    EnvelopeKeys,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    open_backend,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.drivers.contract import Key
from stm_backends.errors import SealMismatch
from stm_backends.records.keys import directory_key, memory_key
from stm_backends.sealing.wrapping import LocalWrapping

ADA, BOB = MemoryKey("acme", "ada", "trip"), MemoryKey("acme", "bob", "trip")
CONFIG = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=2))
SEALING = Sealing(StaticKeys({"k1": bytes(range(32))}, primary="k1"))
WORDS = (b"Zanzibar", b"Kilimanjaro")


async def converse(backend: Backend, key: MemoryKey, turns: int = 6) -> None:
    memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
    for number in range(turns):
        await memory.add_turn(
            ConversationTurn(f"I want {number} rooms in Zanzibar.", f"Kilimanjaro {number}.")
        )
    await memory.flush()


async def shown(backend: Backend, key: MemoryKey) -> str:
    memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
    return str(await memory.get_llm_context())


def raw_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Backend]:
    folder = tmp_path / "keys"
    folder.mkdir()
    async with open_backend(f"sqlite:///{folder}/keys.db") as opened:
        yield opened


async def test_no_word_of_a_conversation_is_in_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    url = f"sqlite:///{folder}/stm.db"
    async with open_backend(url, sealing=SEALING) as backend:
        await converse(backend, ADA)
        await backend.state_store.save_memory_state("acme:ada:state", {"place": "Zanzibar"})
        assert not any(word in raw_bytes(folder) for word in WORDS)
        assert "Zanzibar" in await shown(backend, ADA)
        assert await backend.state_store.load_memory_state("acme:ada:state") == {"place": "Zanzibar"}
        assert [user async for user in backend.sessions.users("acme")] == ["ada"]
    assert not any(word in raw_bytes(folder) for word in WORDS)
    async with open_backend(url) as unsealed:
        with pytest.raises(Corrupt):
            await shown(unsealed, ADA)


async def test_a_conversation_moves_from_clear_to_sealed_and_back(tmp_path: Path) -> None:
    async with (
        open_backend(f"sqlite:///{tmp_path}/clear.db") as clear,
        open_backend(f"sqlite:///{tmp_path}/sealed.db", sealing=SEALING) as sealed,
        open_backend(f"sqlite:///{tmp_path}/back.db") as back,
    ):
        await converse(clear, ADA)
        document = await clear.sessions.export(ADA)
        for source, target in ((clear, sealed), (sealed, back)):
            await target.sessions.import_(await source.sessions.export(ADA))
        assert await back.sessions.export(ADA) == document


async def test_a_clear_conversation_goes_on_sealed_while_clear_is_accepted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as clear:
        await converse(clear, ADA, turns=2)
    async with open_backend(url, sealing=SEALING) as strict:
        with pytest.raises(Corrupt, match="not sealed"):
            await shown(strict, ADA)
    async with open_backend(url, sealing=Sealing(SEALING.keys, accept_clear=True)) as migrating:
        await converse(migrating, ADA)
    async with open_backend(url, sealing=SEALING) as strict:
        # The clear turns were folded, and the summary is sealed.
        assert "Zanzibar" in await shown(strict, ADA)


async def test_erasing_a_user_erases_the_data_key_and_nobody_elses(tmp_path: Path, store: Backend) -> None:
    keys = EnvelopeKeys(store.driver, LocalWrapping({"w1": bytes(32)}, primary="w1"), lifetime_s=0.001)
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", sealing=Sealing(keys)) as backend:
        for key in (ADA, BOB):
            await converse(backend, key)
        raw = backend.driver.inner.inner  # type: ignore[attr-defined]
        backup = await raw.load(memory_key(ADA))
        assert backup is not None
        await backend.sessions.erase_user("acme", "ada")
        await raw.append(memory_key(ADA), backup.tail[0], initial_version="restored", ttl=None)
        with pytest.raises(Corrupt, match="erased"):
            await shown(backend, ADA)
        assert "Zanzibar" in await shown(backend, BOB)
        await backend.sessions.erase_tenant("acme")
        later = MemoryKey("acme", "ada", "later")
        await converse(backend, later)
        assert "Zanzibar" in await shown(backend, later)


@pytest.mark.parametrize(("first", "then"), [(SEALING, None), (None, SEALING)], ids=["sealed", "clear"])
async def test_clear_text_is_not_written_beside_sealed_data_of_a_user(
    tmp_path: Path, first: Sealing | None, then: Sealing | None
) -> None:
    url, new = f"sqlite:///{tmp_path}/data.db", MemoryKey("acme", "ada", "new")
    async with open_backend(url, sealing=first) as backend:
        await converse(backend, ADA)
        entry = await backend.driver.inner.load(directory_key("acme", "ada"))
    async with open_backend(url, sealing=then) as backend:
        with pytest.raises(SealMismatch):
            await converse(backend, new, turns=1)
        with pytest.raises(SealMismatch):
            await backend.state_store.save_memory_state(new.composite(), {"a": 1})
        expiring = await backend.sessions.expire("acme", ttl=3600.0)
        assert (expiring.conversations, expiring.failed) == (0, 1)
        assert await backend.sessions.other_seal("acme", "ada") == ("clear" if first is None else "sealed")
    async with open_backend(url, sealing=first) as backend:
        assert [key async for key in backend.sessions.list("acme", "ada")] == [ADA]
        assert await backend.driver.inner.load(directory_key("acme", "ada")) == entry
        await converse(backend, new, turns=1)


async def test_a_purge_without_sealing_continues_behind_a_sealed_user(tmp_path: Path) -> None:
    """While a datastore is migrated, a user's entry may be sealed beside conversations in clear text."""
    url, old = (
        f"sqlite:///{tmp_path}/data.db",
        ConversationTurn("To Zanzibar!", "Booked.", ts=1_700_000_000.0),
    )
    async with open_backend(url, sealing=Sealing(SEALING.keys, accept_clear=True)) as backend:
        await backend.memory(ADA, CONFIG, summarizer=ExtractiveSummarizer()).add_turn(old)
        # A log, too: what was popped from it is looked for.
        await backend.item_log(ADA, "langchain").add([{"text": "To Zanzibar!"}])
    async with open_backend(url) as backend:
        await backend.memory(BOB, CONFIG, summarizer=ExtractiveSummarizer()).add_turn(old)
        record = await backend.driver.load(memory_key(BOB))
        assert record is not None
        clear = Key(memory_key(ADA).scope, "clear")
        await backend.driver.append(clear, record.tail[0], initial_version="v", ttl=None)
        purged = await backend.sessions.purge("acme", older_than=86_400.0)
        assert (purged.conversations, purged.unreadable) == (1, 3)
        assert (await backend.driver.load(clear)) is not None


async def test_sealed_data_without_sealing_is_erased_and_the_keys_reported(
    tmp_path: Path, store: Backend
) -> None:
    url = f"sqlite:///{tmp_path}/data.db"
    sealing = Sealing(EnvelopeKeys(store.driver, LocalWrapping({"w": bytes(32)}, primary="w")))
    async with open_backend(url, sealing=sealing) as backend:
        await converse(backend, ADA)
    async with open_backend(url) as backend:
        receipt = await backend.sessions.erase_with_receipt("acme")
        assert (receipt.records, receipt.keys_left, receipt.complete) == (1, True, False)
    async with open_backend(url, sealing=sealing) as backend:
        receipt = await backend.sessions.erase_with_receipt("acme", "ada")
        assert (receipt.erased, receipt.complete) == ({"data_keys": 1}, True)


async def test_a_copy_made_without_keys_is_recognized_as_sealed(tmp_path: Path, store: Backend) -> None:
    """The copy lists its users in clear text, because it has no keys."""
    sealing = Sealing(EnvelopeKeys(store.driver, LocalWrapping({"w": bytes(32)}, primary="w")))
    async with open_backend(f"sqlite:///{tmp_path}/from.db", sealing=sealing) as backend:
        await converse(backend, ADA)
    async with (
        open_backend(f"sqlite:///{tmp_path}/from.db") as source,
        open_backend(f"sqlite:///{tmp_path}/to.db") as target,
        open_backend(f"sqlite:///{tmp_path}/to.db", sealing=sealing) as moved,
    ):
        copy = Copy(source.driver.inner, target.driver.inner, [Owner("acme")])
        await copy.copy()
        assert copy.tally == {"copied": 1}
        assert await target.sessions.other_seal("acme") == "sealed"
        assert await moved.sessions.other_seal("acme") is None
        receipt = await target.sessions.erase_with_receipt("acme")
        assert (receipt.records, receipt.keys_left, receipt.complete) == (1, True, False)
        assert await target.sessions.other_seal("acme", "ada") is None


def test_sealing_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sealing is a Sealing"):
        open_backend("memory://", sealing=SEALING.keys)  # type: ignore[arg-type]
