"""Sealed values: what an attacker with write access to the datastore tries, and what the reader says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import ConfigurationError, Corrupt
from stm_backends.sealing.cipher import ENTRY, OVERHEAD, Cipher, body_slot, key_id_of
from stm_backends.sealing.keys import DataKey, Owner, Sealing, StaticKeys, is_key_id
from tests.support.sealed import sealed

SECRET, OTHER = bytes(range(32)), bytes(range(32, 64))
KEY = Key("acme:u1:memory", "chat")
TEXT = b"the patient's name is Ada"


def cipher(secret: bytes = SECRET, key_id: str = "k1", key: Key = KEY) -> Cipher:
    return Cipher(secret, key_id, key)


def refused(opener: Cipher, slot: bytes, sealed: bytes) -> bool:
    try:
        opener.open(slot, sealed)
    except Corrupt as error:
        return error.__context__ is None  # no exception of the client, which might show data
    return False


def test_a_value_comes_back_from_its_own_place_only() -> None:
    sealed = cipher().seal(ENTRY, TEXT)
    assert cipher().open(ENTRY, sealed) == TEXT
    for elsewhere in (
        Key("acme:u1:memory", "other"),
        Key("globex:u1:memory", "chat"),
        Key("acme:u1:memorychat", ""),
        Key("acme:u1:memor", "ychat"),
        Key("acme:u1:lease", "chat"),
    ):
        assert refused(cipher(key=elsewhere), ENTRY, sealed)
    for slot in (b"", body_slot(""), body_slot("entry")):
        assert refused(cipher(), slot, sealed)


def test_a_body_is_bound_to_its_version() -> None:
    sealed = cipher().seal(body_slot("v1"), TEXT)
    assert cipher().open(body_slot("v1"), sealed) == TEXT
    assert refused(cipher(), body_slot("v2"), sealed)
    assert refused(cipher(), ENTRY, sealed)


def test_a_wrong_key_and_a_wrong_key_id_are_refused() -> None:
    sealed = cipher().seal(ENTRY, TEXT)
    assert refused(cipher(OTHER), ENTRY, sealed)
    assert refused(cipher(key_id="k2"), ENTRY, sealed)
    assert refused(cipher(key_id="k2"), ENTRY, sealed.replace(b" k1\n", b" k2\n"))


def test_every_flipped_bit_is_found() -> None:
    sealed = cipher().seal(ENTRY, TEXT)
    for at, bit in itertools.product(range(len(sealed)), range(8)):
        altered = bytearray(sealed)
        altered[at] ^= 1 << bit
        assert refused(cipher(), ENTRY, bytes(altered)), (at, bit)


def test_every_truncation_and_extension_is_found() -> None:
    sealed = cipher().seal(ENTRY, TEXT)
    assert all(refused(cipher(), ENTRY, sealed[:size]) for size in range(len(sealed)))
    assert refused(cipher(), ENTRY, sealed + b"\0")


def test_the_same_value_is_sealed_with_another_nonce_each_time() -> None:
    values = {cipher().seal(ENTRY, TEXT) for _ in range(1_000)}
    assert len({value[-len(TEXT) - 28 : -len(TEXT) - 16] for value in values}) == 1_000


def test_the_overhead_is_what_the_limits_are_reduced_by() -> None:
    assert len(cipher(key_id="k" * 32).seal(ENTRY, TEXT)) == len(TEXT) + OVERHEAD


def test_known_answers_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    # Computed by another program, with the `crypto` module of Node.js, from the text in `cipher`.
    monkeypatch.setattr("os.urandom", bytes)
    assert cipher().seal(ENTRY, b"text").hex() == KNOWN_ENTRY
    assert cipher().seal(body_slot("v1"), b"text").hex() == KNOWN_BODY


KNOWN_ENTRY = (
    "73746d2f32207365616c6564206b310a1b1ae284d4b3f6ad7c1b11e71d23dcbc"
    "000000000000000000000000a051102b3302aa604f665447704b2f9508d55cd4"
)
KNOWN_BODY = (
    "73746d2f32207365616c6564206b310a1b1ae284d4b3f6ad7c1b11e71d23dcbc"
    "000000000000000000000000a051102b22be2a044c4e52a01aa5036fa1bfdeba"
)


@pytest.mark.parametrize("key_id", ["", "a b", "a\n", "ä", "x" * 33, "k1/../k2"])
def test_an_id_of_another_alphabet_is_no_key_id(key_id: str) -> None:
    assert not is_key_id(key_id)
    with pytest.raises(ConfigurationError, match="letters, digits"):
        StaticKeys({key_id: SECRET}, primary=key_id)


def test_what_is_sealed_names_its_key_and_other_bytes_name_none() -> None:
    assert key_id_of(cipher().seal(ENTRY, TEXT)) == "k1"
    assert key_id_of(b"stm/1 turn\n{}") is None
    for altered in (b"stm/2 sealed \n", b"stm/2 sealed k1", b"stm/2 sealed \xff\n", b"stm/2 sealed a b\n"):
        with pytest.raises(Corrupt):
            key_id_of(altered)


@pytest.mark.parametrize("keys", [{}, {"k1": b"short"}, {"k1": "text" * 8}, {1: SECRET}, ["k1"], None])
def test_keys_of_another_shape_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigurationError) as found:
        StaticKeys(keys, primary="k1")
    assert "text" not in str(found.value)
    assert "short" not in str(found.value)


def test_no_repr_shows_a_key() -> None:
    keys = StaticKeys({"k1": SECRET}, primary="k1")
    shown = f"{keys!r} {Sealing(keys)!r} {DataKey('k1', SECRET)!r}"
    assert "k1" in shown
    assert repr(SECRET)[2:10] not in shown


class World:
    """A sealed driver and the datastore under it."""

    def __init__(self, **options: Any) -> None:
        self.raw = MemoryDriver()
        self.clear = 0
        keys = options.pop("keys", StaticKeys({"k1": SECRET, "k2": OTHER}, primary="k1"))
        self.driver = sealed(self.raw, Sealing(keys, **options), clear_met=self._count)

    def _count(self) -> None:
        self.clear += 1

    async def __aenter__(self) -> World:
        await self.driver.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.driver.close()

    async def store(self, key: Key = KEY, version: str = "v1") -> Record:
        """Store a body and an entry; return the record as the datastore has it."""
        await self.driver.replace(key, TEXT, version=version, expect=ABSENT, ttl=None)
        await self.driver.append(key, TEXT, initial_version="v0", ttl=None)
        record = await self.raw.load(key)
        assert record is not None
        assert record.body is not None
        return record


async def test_nothing_in_clear_reaches_the_datastore() -> None:
    async with World() as world:
        record = await world.store()
        assert not any(b"Ada" in value for value in (record.body or b"", *record.tail))
        assert await world.driver.load(KEY) == Record("v1", TEXT, (TEXT,))


async def test_values_of_another_record_or_another_slot_are_corrupt() -> None:
    async with World() as world:
        record = await world.store()
        assert record.body is not None
        for key, value in ((Key("globex:u1:memory", "chat"), record.tail[0]), (KEY, record.body)):
            await world.raw.append(key, value, initial_version="v0", ttl=None)
            with pytest.raises(Corrupt, match="moved") as found:
                await world.driver.load(key)
            assert (found.value.backend, found.value.operation) == ("memory", "load")


async def test_an_older_body_under_a_newer_version_is_corrupt() -> None:
    async with World() as world:
        record = await world.store()
        assert record.body is not None
        await world.raw.replace(KEY, record.body, version="v2", expect="v1", ttl=None)
        with pytest.raises(Corrupt):
            await world.driver.load(KEY)


async def test_every_altered_bit_of_a_stored_record_is_found() -> None:
    async with World() as world:
        record = await world.store()
        assert record.body is not None
        for slot, value in (("body", record.body), ("entry", record.tail[0])):
            for at, bit in itertools.product(range(len(value)), range(8)):
                altered = bytearray(value)
                altered[at] ^= 1 << bit
                await world.raw.delete(KEY)
                if slot == "body":
                    await world.raw.replace(KEY, bytes(altered), version="v1", expect=ABSENT, ttl=None)
                else:
                    await world.raw.append(KEY, bytes(altered), initial_version="v1", ttl=None)
                with pytest.raises(Corrupt):
                    await world.driver.load(KEY)


async def test_no_two_values_of_a_record_have_the_same_nonce() -> None:
    async with World() as world:
        for _ in range(100):
            await world.driver.append(KEY, TEXT, initial_version="v0", ttl=None)
        record = await world.raw.load(KEY)
        assert record is not None
        ends = len(TEXT) + 16
        assert len({value[-ends - 12 : -ends] for value in record.tail}) == 100


async def test_clear_values_are_corrupt_unless_accepted() -> None:
    for accept in (False, True):
        async with World(accept_clear=accept) as world:
            await world.raw.append(KEY, b"stm/1 turn\n{}", initial_version="v0", ttl=None)
            if accept:
                assert await world.driver.load(KEY) == Record("v0", None, (b"stm/1 turn\n{}",))
                assert world.clear == 1
            else:
                with pytest.raises(Corrupt, match="not sealed"):
                    await world.driver.load(KEY)


async def test_a_rotated_key_opens_what_was_sealed_before() -> None:
    async with World() as world:
        await world.store()
        rotated = StaticKeys({"k1": SECRET, "k2": OTHER}, primary="k2")
        second = sealed(world.raw, Sealing(rotated))
        await second.append(KEY, b"newer", initial_version="v0", ttl=None)
        assert await world.driver.load(KEY) == await second.load(KEY) == Record("v1", TEXT, (TEXT, b"newer"))
        without = sealed(world.raw, Sealing(StaticKeys({"k2": OTHER}, primary="k2")))
        with pytest.raises(Corrupt, match="'k1', which this process does not have"):
            await without.load(KEY)


async def test_a_source_of_keys_is_asked_for_the_owner_of_the_record() -> None:
    asked: list[Owner] = []

    class Source(StaticKeys):
        async def primary(self, owner: Owner) -> DataKey:
            asked.append(owner)
            return await super().primary(owner)

    async with World(keys=Source({"k1": SECRET}, primary="k1")) as world:
        for scope in ("acme:u%3A1:memory", "acme::users", "::planner", "anything"):
            await world.driver.append(Key(scope, "x"), b"", initial_version="v0", ttl=None)
    assert asked == [Owner("acme", "u:1"), Owner("acme", ""), Owner("", ""), Owner("", "")]


@pytest.mark.parametrize("keys", [None, "k", b"k", {"k1": bytes(32)}, StaticKeys])
def test_keys_of_another_type_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigurationError, match="keys of a Sealing are StaticKeys, EnvelopeKeys or another"):
        Sealing(keys)


def test_a_sealing_shows_no_key() -> None:
    assert repr(Sealing(StaticKeys({"k1": bytes(32)}, primary="k1"))) == "Sealing(accept_clear=False)"
