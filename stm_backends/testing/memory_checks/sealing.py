"""Checks that every turn is sealed with keys of its conversation's processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import KeyMismatch, MissingExtra, SealMismatch
from stm_backends.records.keys import data_keys_key
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn
from stm_backends.types import MemoryKey

if TYPE_CHECKING:
    from stm_backends.sealing.wrapping import LocalWrapping

OTHERS: Final = ("other bytes", "another key", "an empty store of keys", "no keys")
"""The keys of a process that did not seal the stored data."""

_TRUNCATION: Final = config("truncation", zone=50)


class Sealed(Contract):
    """Checks that every turn is sealed with keys of its conversation's processes."""

    @pytest.mark.parametrize("other", OTHERS)
    @check("memory.keys")
    async def test_a_process_with_other_keys_is_refused_and_changes_nothing(
        self, bench: MemoryBench, other: str
    ) -> None:
        """Keys are compared only by their ids, or only on reads; adding a turn reads nothing."""
        stored = bench.memories.stored
        if stored is None:
            not_asked("needs `Memories.stored`")
        ours = _enveloped(MemoryStore()) if other == "an empty store of keys" else _static(k1=bytes(32))
        theirs = {
            "other bytes": _static(k1=bytes(range(32))),
            "another key": _static(k2=bytes(range(32))),
            "an empty store of keys": _enveloped(MemoryStore()),
            "no keys": None,
        }[other]
        key = bench.key()
        newcomer = MemoryKey(key.tenant_id, "newcomer", "chat")
        memory = await bench.memory(_TRUNCATION, key=key, sealing=ours)
        await memory.add_turn(turn(1))
        before = await stored(key)
        for where in (key, newcomer):
            refused = await bench.memory(_TRUNCATION, key=where, sealing=theirs)
            with must_raise((KeyMismatch, SealMismatch), f"this process has {other}"):
                await refused.add_turn(turn(2))
        must_be(await stored(key), before, "the process with other keys was refused")
        must_be(await stored(newcomer), None, "the process with other keys was refused for a new user, too")
        await memory.add_turn(turn(3))
        must_be((await shown(memory))["recent"], ["u1", "u3"], "these turns were added with the right keys")

    @check("memory.keys")
    async def test_no_key_is_made_for_a_user_whose_key_was_lost(self, bench: MemoryBench) -> None:
        """A missing data key is taken as that of a new user, and replaced although it had sealed data."""
        stored = bench.memories.stored
        if stored is None:
            not_asked("needs `Memories.stored`")
        key, keys = bench.key(), MemoryStore()
        memory = await bench.memory(_TRUNCATION, key=key, sealing=_enveloped(keys))
        await memory.add_turn(turn(1))
        before, where = await stored(key), data_keys_key(key.tenant_id, key.user_id)
        store = MemoryDriver(keys)
        await store.open()
        must_be(await store.delete(where), True, "the user has a data key")
        later = await bench.memory(_TRUNCATION, key=key, sealing=_enveloped(keys))
        with must_raise(KeyMismatch, "the store of keys was restored from a time before the user"):
            await later.add_turn(turn(2))
        must_be(await store.load(where), None, "another data key cannot read data sealed with the lost one")
        must_be(await stored(key), before, "nothing is written next to data sealed with another key")

    @check("memory.erasure")
    async def test_turns_added_after_an_erasure_are_readable_in_every_process(
        self, bench: MemoryBench
    ) -> None:
        """A process seals with a data key that it remembers, and that another process has erased."""
        key, keys = bench.key(), MemoryStore()
        one, two = [await bench.memory(_TRUNCATION, key=key, sealing=_enveloped(keys)) for _ in range(2)]
        await one.add_turn(turn(1))
        await two.add_turn(turn(2))
        await bench.erase(one)
        await two.add_turn(turn(3))
        await one.add_turn(turn(4))
        fresh = await bench.memory(_TRUNCATION, key=key, sealing=_enveloped(keys))
        for memory in (fresh, one, two):
            must_be((await shown(memory))["recent"], ["u3", "u4"], "these turns were added after the erasure")


def _static(**keys: bytes) -> Sealing:
    """Return the keys of a process that holds one."""
    _ = _wrapping()  # sealing needs the same extra
    (primary,) = keys
    return Sealing(StaticKeys(keys, primary=primary))


def _enveloped(store: MemoryStore) -> Sealing:
    """Return the keys of a process with its data keys in a shared store."""
    return Sealing(EnvelopeKeys(MemoryDriver(store), _wrapping(), owns_store=True))


def _wrapping() -> LocalWrapping:
    try:
        from stm_backends.sealing.wrapping import LocalWrapping  # noqa: PLC0415 -- needs the extra
    except MissingExtra as error:
        not_asked(str(error))
    return LocalWrapping({"w1": bytes(32)}, primary="w1")
