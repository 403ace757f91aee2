"""The contract of a state store, on which a memory relies when it saves itself."""

from __future__ import annotations

import asyncio
import copy
import json
import reprlib
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import pytest

from stm_backends.drivers.contract import MAX_KEY_BYTES
from stm_backends.errors import StmError
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.history import History, Recorded

STATES: Final[dict[str, dict[str, Any]]] = {
    "empty": {},
    "scalars": {"none": None, "yes": True, "no": False, "zero": 0, "minus": -1, "text": "", "half": 0.5},
    "equal numbers of different types": {"one": 1, "one as float": 1.0, "true": True, "minus zero": -0.0},
    "large integers": {"more than 53 bits": 2**53 + 1, "more than 64 bits": -(2**80)},
    "floats at the edge": {"least": 5e-324, "most": 1.7976931348623157e308, "third": 0.1 + 0.2},
    "not quite numbers": {"nan": float("nan"), "inf": float("inf"), "minus inf": float("-inf")},
    "nesting": {"a": [{"b": [[], {}, [None, [1, "x"]]]}], "": {"": {"": ""}}},
    "keys of objects": {"a.b": 1, "$set": 2, "a b": 3, "__class__": 4, "\u00e9": 5, "e\u0301": 6},
    "text": {
        "nul": "a\0b",
        "lines": "\r\n\u2028",
        "emoji": "\U0001f600",
        "cjk": "\u65e5\u672c",
        "quote": "\"'\\",
    },
    "half a character": {"surrogate": "\ud800"},
    "much": {"turns": [{"user": "u" * 200, "number": number} for number in range(1_000)]},
    "a conversation": {
        "version": 1,
        "health": "healthy",
        "summary": "",
        "turns": [{"user_message": "hi", "ts": 1.5, "artifacts_shown": {}, "trajectory_digest": None}],
    },
}
"""States that come back changed from careless stores."""

KEYS: Final = (
    "tenant:user:session",
    "tenant:user:",
    ":user:session",
    "tenant:user:session ",
    "Tenant:user:session",
    "tenant:user:session*",
    "tenant:user:*",
    "tenant:user:session#1",
    "tenant:user:{session}",
    "tenant%3Auser:session:",
    "kv:v1:tenant:user:session",
    "kv:v1:tenant:user:session:suffix",
    "a",
    "A",
    "a/../b",
    "a/b",
    "a//b",
    "a/./b",
    "b",
    "a\0b",
    "a\nb",
    "",
    " ",
    "\u00e9",
    "e\u0301",
    "\U0001f600",
    "'; DROP TABLE states; --",
    "x" * 500,
    "x" * 501,
)
"""Keys that collide or do harm in careless stores."""


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Gives a suite access to the stores of one implementation.

    `open` returns an object with `save_memory_state` and `load_memory_state`; if there can be several
    instances, a new one on the same data each time. `close` ends one.

    The rest is optional; a check that needs a missing part is reported as not asked: `outage()` is a context
    in which the datastore cannot be reached, `damage(key)` makes a saved state unreadable, and `remove(key)`
    removes a state that a check has saved.
    """

    open: Callable[[], Awaitable[Any]]
    close: Callable[[Any], Awaitable[None]] | None = None
    remove: Callable[[str], Awaitable[object]] | None = None
    outage: Callable[[], AbstractAsyncContextManager[object]] | None = None
    damage: Callable[[str], Awaitable[None]] | None = None


class StoreBench:
    """The workbench of one check; leaving it removes the check's states and closes its stores."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.history = History()
        self._word = uuid.uuid4().hex
        self._opened: list[Any] = []
        self._keys: list[str] = []

    async def store(self) -> Any:
        """Return a new store."""
        store = await self.stores.open()
        self._opened.append(store)
        methods = ("save_memory_state", "load_memory_state", "save_if", "load_versioned")
        return Recorded(store, self.history, f"store{len(self._opened)}", methods)

    async def conditional(self) -> Any:
        """Return a store that saves on a condition, or skip the check."""
        store = await self.store()
        if not (hasattr(store, "load_versioned") and hasattr(store, "save_if")):
            not_asked("this store has no conditional saves (`load_versioned` and `save_if`)")
        return store

    def key(self, rest: str = "user:session") -> str:
        """Return a new key that begins with a word that only this check uses."""
        key = f"{self._word}:{rest}"
        self._keys.append(key)
        return key

    async def __aenter__(self) -> StoreBench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.stores.remove is not None:
                for key in self._keys:
                    await self.stores.remove(key)
        finally:
            if self.stores.close is not None:
                for store in self._opened:
                    await self.stores.close(store)


class StoreContract(Contract):
    """Checks of everything in a state store that a memory relies on.

    A subclass supplies the fixture `stores`. Checks use fresh keys.
    """

    @pytest.fixture
    def stores(self) -> Stores:
        """The stores under test; a subclass must override this."""
        raise NotImplementedError("override the fixture `stores`")

    @pytest.fixture
    def bench(self, stores: Stores) -> StoreBench:
        """The workbench of one check, which enters and leaves it."""
        return StoreBench(stores)

    @check("store.load")
    async def test_a_key_that_was_never_saved_is_none(self, bench: StoreBench) -> None:
        """An empty state is invented, or a missing key raises."""
        store = await bench.store()
        must_be(await store.load_memory_state(bench.key()), None, "nothing was ever saved under this key")

    @check("store.load")
    async def test_what_one_instance_saves_another_loads_at_once(self, bench: StoreBench) -> None:
        """Saves are kept in the object and written later."""
        one, two, key = await bench.store(), await bench.store(), bench.key()
        for number in range(5):
            await (one, two)[number % 2].save_memory_state(key, {"n": number})
            loaded = await (two, one)[number % 2].load_memory_state(key)
            must_be(loaded, {"n": number}, "the other instance has saved it")

    @check("store.replace")
    async def test_a_save_replaces_the_whole_state_and_never_merges(self, bench: StoreBench) -> None:
        """The state's fields become columns, hash fields or a document update."""
        store, key = await bench.store(), bench.key()
        await store.save_memory_state(key, {"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2, 3]})
        await store.save_memory_state(key, {"b": {"c": 4}, "e": [5]})
        state = {"b": {"c": 4}, "e": [5]}
        must_be(await store.load_memory_state(key), state, "it was saved last, and nothing is merged")
        await store.save_memory_state(key, {})
        must_be(await store.load_memory_state(key), {}, "an empty state is a state")

    @check("store.json")
    @pytest.mark.parametrize("what", STATES)
    async def test_a_state_comes_back_equal_in_every_type_and_character(
        self, bench: StoreBench, what: str
    ) -> None:
        """Numbers pass through floats, text through an encoding, or keys through paths."""
        store, key = await bench.store(), bench.key()
        await store.save_memory_state(key, copy.deepcopy(STATES[what]))
        # Compared as text, because 1 == 1.0 == True, and NaN does not even equal itself.
        loaded = await store.load_memory_state(key)
        must_be(_text(loaded), _text(STATES[what]), "this is what was saved")

    @check("store.json")
    @pytest.mark.parametrize(
        # An object's `repr` contains its address, but test names must be the same in every process.
        "state",
        [{"x": object()}, {"x": {1: "one"}}, {"x": b"bytes"}, {"x": {1, 2}}, {(1, 2): "x"}],
        ids=["an object", "a number as key", "bytes", "a set", "a pair as key"],
    )
    async def test_a_state_that_is_not_json_is_refused_whole_or_comes_back_equal(
        self, bench: StoreBench, state: dict[str, Any]
    ) -> None:
        """A value that JSON does not know becomes its nearest text (`default=str`), or left out."""
        store, key = await bench.store(), bench.key()
        await store.save_memory_state(key, {"before": 1})
        try:
            await store.save_memory_state(key, state)
        except (TypeError, ValueError, StmError):
            loaded = await store.load_memory_state(key)
            must_be(loaded, {"before": 1}, "no part of a refused state is saved")
        else:
            must_be(await store.load_memory_state(key), state, "it was not refused")

    @check("store.copies")
    async def test_changing_a_saved_or_loaded_object_does_not_change_the_store(
        self, bench: StoreBench
    ) -> None:
        """The caller's own object is stored or returned."""
        store, key = await bench.store(), bench.key()
        mine: dict[str, Any] = {"turns": [{"user": "hi"}]}
        await store.save_memory_state(key, mine)
        mine["turns"][0]["user"] = "changed"
        mine["turns"].append({})
        loaded = await store.load_memory_state(key)
        saved = {"turns": [{"user": "hi"}]}
        must_be(loaded, saved, "the object was changed only after it was saved")
        loaded["turns"].clear()
        must_be(await store.load_memory_state(key), saved, "only a loaded object was changed")

    @check("store.keys")
    async def test_keys_are_any_string_and_never_collide(self, bench: StoreBench) -> None:
        """Keys are trimmed, cut, case-folded, or used as a path or pattern."""
        store = await bench.store()
        keys = [bench.key(rest) for rest in KEYS]
        for number, key in enumerate(keys):
            await store.save_memory_state(key, {"n": number})
        for number, key in enumerate(keys):
            loaded = await store.load_memory_state(key)
            must_be(loaded, {"n": number}, f"a key with {reprlib.repr(KEYS[number])} is not another key")

    @check("store.keys")
    async def test_a_key_that_is_too_long_is_refused_and_never_cut(self, bench: StoreBench) -> None:
        """A column or a file name is shorter than the key."""
        store = await bench.store()
        keys = [bench.key("x" * size + end) for size in (MAX_KEY_BYTES - 100, 5_000) for end in "ab"]
        saved: dict[str, dict[str, str]] = {}
        for key in keys:
            state = {"end": key[-1]}
            try:
                await store.save_memory_state(key, state)
            except (ValueError, StmError):
                continue
            saved[key] = state
        for key, state in saved.items():
            loaded = await store.load_memory_state(key)
            must_be(loaded, state, "keys that differ in their last character are two")

    @check("store.races")
    async def test_of_concurrent_saves_one_is_stored_whole(self, bench: StoreBench) -> None:
        """A state is stored in several writes."""
        stores, key = [await bench.store(), await bench.store()], bench.key()
        states = [{"who": number, "turns": [number] * 50, f"only{number}": number} for number in range(10)]
        await asyncio.gather(
            *(stores[number % 2].save_memory_state(key, state) for number, state in enumerate(states))
        )
        found = await stores[0].load_memory_state(key)
        assert found in states, "the state must be one of the saved ones, whole"
        must_be(await stores[1].load_memory_state(key), found, "nothing was saved since")

    @check("store.races")
    async def test_a_state_is_never_seen_half_saved(self, bench: StoreBench) -> None:
        """The old state is deleted before the new one is written."""
        one, two, key = await bench.store(), await bench.store(), bench.key()
        await one.save_memory_state(key, {"a": 0, "b": 0})
        writing = True

        async def write() -> None:
            for number in range(30):
                await one.save_memory_state(key, {"a": number, "b": number})
                await asyncio.sleep(0)
            nonlocal writing
            writing = False

        async def look() -> None:
            while writing:
                seen = await two.load_memory_state(key)
                assert seen is not None, "a state must never be missing, even briefly"
                must_be(seen, {"a": seen["a"], "b": seen["a"]}, "no state with two numbers was ever saved")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            tasks.create_task(look())

    @check("store.conditional")
    async def test_a_conditional_save_stores_only_over_what_was_loaded(self, bench: StoreBench) -> None:
        """The condition is checked in one round trip, and the write follows in another."""
        store, key = await bench.conditional(), bench.key()
        must_be(await store.load_versioned(key), (None, None), "nothing was ever saved under this key")
        must_be(await store.save_if(key, {"n": 1}, expect=None), True, "there is no state")
        must_be(await store.save_if(key, {"n": 2}, expect=None), False, "there is a state")
        state, version = await store.load_versioned(key)
        must_be(state, {"n": 1}, "the second save was refused")
        must_be(await store.save_if(key, {"n": 3}, expect=version), True, "there was no save since the load")
        must_be(await store.save_if(key, {"n": 4}, expect=version), False, "the version was saved over")
        must_be(await store.load_memory_state(key), {"n": 3}, "the last save was refused")

    @check("store.conditional")
    async def test_a_plain_save_invalidates_every_loaded_version(self, bench: StoreBench) -> None:
        """Only conditional saves change the version."""
        store, key = await bench.conditional(), bench.key()
        await store.save_memory_state(key, {"n": 1})
        _, version = await store.load_versioned(key)
        await store.save_memory_state(key, {"n": 2})
        must_be(await store.save_if(key, {"n": 3}, expect=version), False, "there was a save since the load")
        must_be(await store.load_memory_state(key), {"n": 2}, "the last save was refused")

    @check("store.conditional")
    async def test_of_concurrent_conditional_saves_exactly_one_wins(self, bench: StoreBench) -> None:
        """Comparing and saving are two steps."""
        stores, key = [await bench.conditional(), await bench.conditional()], bench.key()
        version: str | None = None
        for round_ in range(3):
            answers = await asyncio.gather(
                *(
                    stores[number % 2].save_if(key, {"round": round_, "n": number}, expect=version)
                    for number in range(6)
                )
            )
            must_be(sum(answers), 1, "all expected the same version, so only one can win")
            state, version = await stores[0].load_versioned(key)
            must_be(state, {"round": round_, "n": answers.index(True)}, "this save returned True")

    @check("store.outage")
    async def test_an_outage_raises_and_never_returns_none(self, bench: StoreBench) -> None:
        """Client errors are caught, and None is returned."""
        if bench.stores.outage is None:
            not_asked("needs `Stores.outage`")
        store, key = await bench.store(), bench.key()
        await store.save_memory_state(key, {"n": 1})
        async with bench.stores.outage():
            with must_raise(Exception, "the state cannot be loaded"):
                await store.load_memory_state(key)
            with must_raise(Exception, "the state cannot be saved"):
                await store.save_memory_state(key, {"n": 2})
        must_be(await store.load_memory_state(key), {"n": 1}, "the second save was not done")

    @check("store.corruption")
    async def test_a_damaged_state_raises_and_is_never_none(self, bench: StoreBench) -> None:
        """None is returned for data that does not parse, and the next save overwrites it."""
        if bench.stores.damage is None:
            not_asked("needs `Stores.damage`")
        store, key = await bench.store(), bench.key()
        await store.save_memory_state(key, {"n": 1})
        await bench.stores.damage(key)
        with must_raise(Exception, "the state cannot be read"):
            await store.load_memory_state(key)


def _text(state: object) -> str:
    return json.dumps(state, sort_keys=True)
