"""The contract of a driver, one check a clause; a check's name is the sentence that it holds a driver to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import pytest
import pytest_asyncio

from stm_backends.driver import ABSENT, ANY, KEEP, MAX_KEY_BYTES, Driver, Key, Record, new_version
from stm_backends.errors import StmError, TooLarge, Unavailable
from stm_backends.testing.bench import Bench, Datastore, names_in
from stm_backends.testing.processes import Task, Worker, fold, ledger

NAMES: Final = (
    " ",
    "!",
    "a",
    "A",
    "a ",
    "aa",
    "ab",
    "a:b",
    "a::b",
    "a%3Ab",
    "a*",
    "a?",
    "a[b]",
    "a_b",
    "a%",
    "a%b",
    "a#b",
    "a{b}",
    "{a}b",
    "a/b",
    "../a",
    "a\\b",
    "a'b",
    'a"b',
    "a;b--",
    "$a",
    "a.b",
    "a\nb",
    "a\tb",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "\u200b",
    "\uffff",
    "\U0001f600",
    "\U0010ffff",
    "x" * MAX_KEY_BYTES,
    "x" * (MAX_KEY_BYTES - 1),
    "\U0001f600" * (MAX_KEY_BYTES // 4),
)
"""Names that mean something to somebody's pattern, path, statement, collation or normal form."""

SHIFTED: Final = (
    (Key("a", "b:c"), Key("a:b", "c")),
    (Key("a:", "b"), Key("a", ":b")),
    (Key("ab", "c"), Key("a", "bc")),
    (Key("a#b", "c"), Key("a", "b#c")),
    (Key("a/b", "c"), Key("a", "b/c")),
    (Key("a%3Ab", "c"), Key("a:b", "c")),
    (Key("a\\", ":b"), Key("a", "\\:b")),
    (Key("{a}", "b"), Key("a", "b")),
)
"""Pairs of keys that become one when scope and name are joined carelessly."""

VALUES: Final = (
    b"",
    b"\0",
    b"a\0b\0",
    b"\xff\xfe\x80",
    b"\r\n",
    b" a ",
    "é".encode(),
    bytes(range(256)) * 40,
)
"""Bytes that are not text, or lose something when taken for it."""


class DriverContract:
    """Every clause of the contract of `stm_backends.driver.Driver`, as checks.

    A subclass supplies the fixture `datastore`. Checks use fresh keys and remove only their own.
    """

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def datastore(self) -> Datastore:
        """The datastore under test; a subclass must override this."""
        raise NotImplementedError("override the fixture `datastore`")

    @pytest_asyncio.fixture
    async def bench(self, datastore: Datastore) -> AsyncIterator[Bench]:
        """Where one check works."""
        async with Bench(datastore) as bench:
            yield bench

    # load, append ------------------------------------------------------------------------------------

    async def test_a_record_that_is_not_there_is_none(self, bench: Bench) -> None:
        driver = await bench.driver()
        assert await driver.load(bench.key()) is None

    async def test_an_append_creates_a_record_with_its_birth_and_no_body(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.append(key, b"one", birth="birth", ttl=None) == 1
        assert await driver.load(key) == Record("birth", None, (b"one",))

    async def test_an_append_adds_at_the_end_and_returns_the_length_of_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        lengths = [await driver.append(key, b"%d" % n, birth="birth", ttl=None) for n in range(12)]
        assert lengths == list(range(1, 13))
        record = await _loaded(driver, key)
        assert record.tail == tuple(b"%d" % n for n in range(12))

    async def test_an_append_does_not_change_the_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", birth="birth", ttl=None)
        await driver.append(key, b"two", birth="other", ttl=None)
        assert (await _loaded(driver, key)).version == "birth"
        await driver.replace(key, b"body", version="second", expect="birth", ttl=None)
        await driver.append(key, b"three", birth="third", ttl=None)
        assert await driver.load(key) == Record("second", b"body", (b"one", b"two", b"three"))

    async def test_the_same_entry_twice_stands_there_twice(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.append(key, b"same", birth="birth", ttl=None) == 1
        assert await driver.append(key, b"same", birth="birth", ttl=None) == 2
        assert (await _loaded(driver, key)).tail == (b"same", b"same")

    async def test_instances_on_one_datastore_see_each_others_writes_at_once(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        for number in range(10):
            writer, reader = (one, two) if number % 2 else (two, one)
            assert await writer.append(key, b"%d" % number, birth="birth", ttl=None) == number + 1
            assert len((await _loaded(reader, key)).tail) == number + 1

    # replace -----------------------------------------------------------------------------------------

    async def test_replace_any_stores_a_body_where_nothing_was(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None) is True
        assert await driver.load(key) == Record("v1", b"body", ())

    async def test_replace_any_replaces_what_is_there_and_empties_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", birth="birth", ttl=None)
        assert await driver.replace(key, b"body", version="v2", expect=ANY, ttl=None) is True
        assert await driver.load(key) == Record("v2", b"body", ())
        assert await driver.append(key, b"two", birth="birth", ttl=None) == 1
        assert await driver.load(key) == Record("v2", b"body", (b"two",))

    async def test_replace_absent_stores_only_where_nothing_is(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.replace(key, b"mine", version="v1", expect=ABSENT, ttl=None) is True
        assert await driver.replace(key, b"theirs", version="v2", expect=ABSENT, ttl=None) is False
        assert await driver.load(key) == Record("v1", b"mine", ())

    async def test_a_record_that_only_has_a_tail_is_not_absent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", birth="birth", ttl=None)
        assert await driver.replace(key, b"body", version="v2", expect=ABSENT, ttl=None) is False
        assert await driver.load(key) == Record("birth", None, (b"one",))

    async def test_replace_with_a_version_stores_only_over_that_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.replace(key, b"b", version="v2", expect="v1", ttl=None) is False
        assert await driver.load(key) is None
        await driver.replace(key, b"a", version="v1", expect=ANY, ttl=None)
        assert await driver.replace(key, b"b", version="v3", expect="v2", ttl=None) is False
        assert await driver.load(key) == Record("v1", b"a", ())
        assert await driver.replace(key, b"b", version="v3", expect="v1", ttl=None) is True
        assert await driver.load(key) == Record("v3", b"b", ())

    async def test_replace_with_a_version_keeps_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, b"a", b"b")
        assert await driver.replace(key, b"body", version="v2", expect="birth", ttl=None) is True
        assert await driver.load(key) == Record("v2", b"body", (b"a", b"b"))

    async def test_a_fold_removes_exactly_the_oldest_entries(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, b"a", b"b", b"c", b"d")
        assert await driver.replace(key, b"ab", version="v2", expect="birth", drop=2, ttl=None) is True
        assert await driver.load(key) == Record("v2", b"ab", (b"c", b"d"))
        assert await driver.append(key, b"e", birth="birth", ttl=None) == 3
        assert await driver.replace(key, b"abcde", version="v3", expect="v2", drop=3, ttl=None) is True
        assert await driver.load(key) == Record("v3", b"abcde", ())

    async def test_a_fold_keeps_what_was_appended_after_it_had_read(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await _append_all(one, key, b"a", b"b")
        read = await _loaded(one, key)
        await two.append(key, b"c", birth="birth", ttl=None)
        assert await one.replace(key, b"ab", version="v2", expect=read.version, drop=2, ttl=None) is True
        assert await two.load(key) == Record("v2", b"ab", (b"c",))

    async def test_a_drop_larger_than_the_tail_is_a_lost_race_and_changes_nothing(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, b"a", b"b")
        assert await driver.replace(key, b"abc", version="v2", expect="birth", drop=3, ttl=None) is False
        assert await driver.load(key) == Record("birth", None, (b"a", b"b"))

    async def test_a_write_that_is_sent_twice_is_true_twice_and_done_once(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, b"a", b"b", b"c")
        for _ in range(2):
            assert await driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=None) is True
        assert await driver.load(key) == Record("v2", b"a", (b"b", b"c"))

    async def test_a_lease_that_is_taken_twice_with_one_token_is_taken(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for _ in range(2):
            assert await driver.replace(key, b"me", version="v1", expect=ABSENT, ttl=None) is True
        assert await driver.load(key) == Record("v1", b"me", ())

    async def test_a_blob_that_is_saved_twice_with_one_token_keeps_what_came_after(
        self, bench: Bench
    ) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        await driver.append(key, b"a", birth="birth", ttl=None)
        assert await driver.replace(key, b"other", version="v1", expect=ANY, ttl=None) is True
        assert await driver.load(key) == Record("v1", b"body", (b"a",))

    async def test_a_write_sent_again_does_not_change_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=bench.tick)
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None

    # delete ------------------------------------------------------------------------------------------

    async def test_a_delete_removes_body_and_tail_and_says_whether_it_did(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.delete(key) is False
        await _append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="birth", ttl=None)
        assert await driver.delete(key) is True
        assert await driver.load(key) is None
        assert await driver.delete(key) is False

    async def test_a_record_made_anew_has_nothing_of_the_deleted_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="birth", drop=1, ttl=None)
        await driver.delete(key)
        assert await driver.append(key, b"c", birth="anew", ttl=None) == 1
        assert await driver.load(key) == Record("anew", None, (b"c",))

    async def test_a_delete_with_a_version_removes_only_that_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.delete(key, expect="v1") is False
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        assert await driver.delete(key, expect="v2") is False
        assert await driver.load(key) == Record("v1", b"body", ())
        assert await driver.delete(key, expect="v1") is True
        assert await driver.load(key) is None

    async def test_a_delete_touches_no_other_record(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in NAMES:
            await driver.append(Key(scope, name), name.encode(), birth="birth", ttl=None)
        left = set(NAMES)
        for name in NAMES:
            assert await driver.delete(Key(scope, name)) is True, f"{name!r} was gone"
            left.remove(name)
            assert set(await names_in(driver, scope)) == left, f"deleting {name!r} removed others"

    # time to live ------------------------------------------------------------------------------------

    async def test_an_expired_record_is_absent_in_load(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.load(key) is None

    async def test_an_expired_record_is_absent_in_append(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.append(key, b"new", birth="anew", ttl=None) == 1
        assert await driver.load(key) == Record("anew", None, (b"new",))

    async def test_an_expired_record_is_absent_in_replace_absent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.replace(key, b"new", version="anew", expect=ABSENT, ttl=None) is True
        assert await driver.load(key) == Record("anew", b"new", ())

    async def test_an_expired_record_is_absent_in_replace_any(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.replace(key, b"new", version="old", expect=ANY, ttl=KEEP) is True
        assert await driver.load(key) == Record("old", b"new", ())

    async def test_an_expired_record_is_absent_in_replace_with_its_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.replace(key, b"new", version="anew", expect="old", ttl=None) is False
        assert await driver.replace(key, b"new", version="old", expect="old", ttl=None) is False
        assert await driver.load(key) is None

    async def test_an_expired_record_is_absent_in_delete(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        assert await driver.delete(key, expect="old") is False
        assert await driver.delete(key) is False

    async def test_an_expired_record_is_absent_in_scan(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await _expired(bench)
        await driver.append(Key(key.scope, "young"), b"a", birth="birth", ttl=None)
        assert await names_in(driver, key.scope) == ["young"]

    async def test_a_record_lives_until_its_time_has_come(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick * 4)
        await bench.pass_time(bench.tick)
        assert (await _loaded(driver, key)).tail == (b"a",)

    async def test_a_new_record_is_not_mistaken_for_the_expired_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"old", birth=new_version(), ttl=bench.tick)
        read = await _loaded(driver, key)
        await bench.pass_time(bench.tick * 1.1)
        await driver.append(key, b"new", birth=new_version(), ttl=None)
        late = await driver.replace(key, b"old", version=new_version(), expect=read.version, drop=1, ttl=None)
        assert late is False, "a writer that slept through the expiry took the new record for the old one"
        record = await _loaded(driver, key)
        assert (record.body, record.tail) == (None, (b"new",))

    async def test_an_append_sets_the_time_to_live_anew(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        await driver.append(key, b"b", birth="birth", ttl=bench.tick * 6)
        await bench.pass_time(bench.tick * 1.1)
        assert (await _loaded(driver, key)).tail == (b"a", b"b")
        await driver.append(key, b"c", birth="birth", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None

    async def test_an_append_without_a_time_to_live_makes_the_record_last(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        await driver.append(key, b"b", birth="birth", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        assert (await _loaded(driver, key)).tail == (b"a", b"b")

    async def test_a_replace_sets_the_time_to_live_anew(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.replace(key, b"body", version="v2", expect="birth", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None
        await driver.replace(key, b"body", version="v3", expect=ABSENT, ttl=bench.tick)
        await driver.replace(key, b"body", version="v4", expect="v3", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) == Record("v4", b"body", ())

    async def test_keep_never_lengthens_and_never_ends_a_life(self, bench: Bench) -> None:
        driver, mortal, lasting = await bench.driver(), bench.key(), bench.key()
        await driver.append(mortal, b"a", birth="birth", ttl=bench.tick)
        await driver.append(lasting, b"a", birth="birth", ttl=None)
        for key in (mortal, lasting):
            assert await driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP) is True
            assert await driver.load(key) == Record("v2", b"a", ())
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(mortal) is None
        assert await driver.load(lasting) == Record("v2", b"a", ())

    async def test_keep_on_a_record_that_was_not_there_is_for_ever(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.replace(key, b"body", version="v1", expect=ABSENT, ttl=KEEP) is True
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) == Record("v1", b"body", ())

    async def test_a_refused_write_does_not_change_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        assert await driver.replace(key, b"x", version="v2", expect="other", ttl=None) is False
        assert await driver.replace(key, b"x", version="v2", expect=ABSENT, ttl=None) is False
        assert await driver.replace(key, b"x", version="v2", expect="birth", drop=2, ttl=None) is False
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None

    async def test_a_lease_whose_holder_died_can_be_taken_when_its_time_has_come(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        assert await one.replace(key, b"one", version="v1", expect=ABSENT, ttl=bench.tick) is True
        assert await two.replace(key, b"two", version="v2", expect=ABSENT, ttl=bench.tick) is False
        await one.close()
        await bench.pass_time(bench.tick * 1.1)
        assert await two.replace(key, b"two", version="v3", expect=ABSENT, ttl=bench.tick * 4) is True

    # keys and bytes ----------------------------------------------------------------------------------

    async def test_keys_never_collide_and_never_act_as_patterns(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for number, name in enumerate(NAMES):
            length = await driver.append(Key(scope, name), b"%d" % number, birth=f"v{number}", ttl=None)
            assert length == 1, f"{name!r} collides with another name"
        for number, name in enumerate(NAMES):
            assert await driver.load(Key(scope, name)) == Record(f"v{number}", None, (b"%d" % number,)), name

    async def test_scopes_never_collide_and_never_act_as_patterns(self, bench: Bench) -> None:
        driver, root = await bench.driver(), bench.scope()
        scopes = [f"{root}{suffix}" for suffix in ("", *(name for name in NAMES if len(name) < 20))]
        for scope in scopes:
            bench.clean(scope)
            length = await driver.append(Key(scope, "same"), scope.encode(), birth="birth", ttl=None)
            assert length == 1, f"{scope!r} collides with another scope"
        for scope in scopes:
            assert (await _loaded(driver, Key(scope, "same"))).tail == (scope.encode(),)
            assert await names_in(driver, scope) == ["same"]

    async def test_scope_and_name_are_joined_injectively(self, bench: Bench) -> None:
        driver, root = await bench.driver(), bench.scope()
        for left, right in SHIFTED:
            keys = [Key(f"{root}:{key.scope}", key.name) for key in (left, right)]
            for key in keys:
                bench.clean(key.scope)
            for key in keys:
                length = await driver.append(key, repr(key).encode(), birth="birth", ttl=None)
                assert length == 1, f"{left} and {right} collide"
            for key in keys:
                assert (await _loaded(driver, key)).tail == (repr(key).encode(),)
                assert key.name in await names_in(driver, key.scope)
                await driver.delete(key)

    async def test_what_went_in_comes_out_byte_for_byte(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await _append_all(driver, key, *VALUES)
        assert (await _loaded(driver, key)).tail == VALUES
        for number, value in enumerate(VALUES):
            assert await driver.replace(key, value, version=f"v{number}", expect=ANY, ttl=None)
            assert await driver.load(key) == Record(f"v{number}", value, ())

    async def test_an_empty_body_is_a_body_and_an_empty_entry_an_entry(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"", version="v1", expect=ABSENT, ttl=None)
        assert await driver.load(key) == Record("v1", b"", ())
        assert await driver.append(key, b"", birth="birth", ttl=None) == 1
        assert await driver.load(key) == Record("v1", b"", (b"",))
        assert await driver.replace(key, b"", version="v2", expect="v1", drop=1, ttl=None) is True
        assert await driver.load(key) == Record("v2", b"", ())

    # limits ------------------------------------------------------------------------------------------

    async def test_the_largest_entry_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = _noise(driver.traits.max_entry)
        assert await driver.append(key, largest, birth="birth", ttl=None) == 1
        with pytest.raises(TooLarge) as caught:
            await driver.append(key, largest + b"x", birth="birth", ttl=None)
        assert caught.value.what == "entry"
        record = await _loaded(driver, key)
        assert record.tail == (largest,), "a refused entry was written, or cut"

    async def test_the_largest_body_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = _noise(driver.traits.max_entry)
        await driver.append(key, b"a", birth="birth", ttl=None)
        with pytest.raises(TooLarge) as caught:
            await driver.replace(key, largest + b"x", version="v2", expect="birth", drop=1, ttl=None)
        assert caught.value.what == "entry"
        assert await driver.load(key) == Record("birth", None, (b"a",))
        assert await driver.replace(key, largest, version="v2", expect="birth", drop=1, ttl=None) is True
        assert await driver.load(key) == Record("v2", largest, ())

    async def test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room(
        self, bench: Bench
    ) -> None:
        driver, key = await bench.driver(), bench.key()
        entry = _noise(driver.traits.max_entry)
        count = driver.traits.max_record // len(entry)
        await _append_all(driver, key, *[entry] * count)
        with pytest.raises(TooLarge) as caught:
            await driver.append(key, entry, birth="birth", ttl=None)
        assert caught.value.what == "record"
        assert (await _loaded(driver, key)).tail == (entry,) * count
        with pytest.raises(TooLarge) as caught:
            await driver.replace(key, entry, version="v2", expect="birth", ttl=None)
        assert caught.value.what == "record"
        assert (await _loaded(driver, key)).version == "birth"
        assert await driver.replace(key, b"body", version="v2", expect="birth", drop=count, ttl=None) is True
        assert await driver.append(key, entry[:-4], birth="birth", ttl=None) == 1

    async def test_nonsense_arguments_are_a_value_error_and_write_nothing(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.append(key, b"a", birth="birth", ttl=0),
            lambda: driver.append(key, b"a", birth="birth", ttl=-1.0),
            lambda: driver.append(key, b"a", birth="birth", ttl=float("nan")),
            lambda: driver.replace(key, b"a", version="v", expect=ANY, ttl=0),
            lambda: driver.replace(key, b"a", version="v", expect=ANY, drop=1, ttl=None),
            lambda: driver.replace(key, b"a", version="v", expect=ABSENT, drop=1, ttl=None),
            lambda: driver.replace(key, b"a", version="v", expect="u", drop=-1, ttl=None),
            lambda: driver.scan(key.scope, limit=0),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r".+"):
                await call()
        assert await driver.load(key) is None

    # scan --------------------------------------------------------------------------------------------

    async def test_a_scan_lists_names_in_the_order_of_their_utf8_bytes(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in NAMES:
            await driver.replace(Key(scope, name), b"", version="v", expect=ANY, ttl=None)
        expected = sorted(NAMES, key=str.encode)
        for limit in (1, 2, 7, len(NAMES), 1000):
            assert await names_in(driver, scope, limit=limit) == expected, f"in pages of {limit}"

    async def test_a_page_holds_no_more_than_its_limit(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for number in range(5):
            await driver.append(Key(scope, f"{number}"), b"", birth="v", ttl=None)
        for limit in (1, 3, 5, 6):
            assert len((await driver.scan(scope, limit=limit)).names) <= limit

    async def test_a_scan_begins_after_any_name_even_one_that_is_not_there(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in ("a", "c", "e"):
            await driver.append(Key(scope, name), b"", birth="v", ttl=None)
        assert (await driver.scan(scope, after="b", limit=10)).names == ("c", "e")
        assert (await driver.scan(scope, after="c", limit=10)).names == ("e",)
        assert (await driver.scan(scope, after="e", limit=10)).names == ()

    async def test_a_scan_of_an_empty_scope_ends(self, bench: Bench) -> None:
        driver = await bench.driver()
        assert await names_in(driver, bench.scope()) == []

    async def test_a_name_that_is_there_throughout_is_listed_exactly_once_while_others_write(
        self, bench: Bench
    ) -> None:
        driver, other, scope = await bench.driver(), await bench.driver(), bench.scope()
        staying = [f"{number:03}" for number in range(0, 90, 2)]
        for name in staying:
            await driver.append(Key(scope, name), b"", birth="v", ttl=None)
        coming = (f"{number:03}" for number in itertools.cycle(range(1, 90, 2)))
        listed: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await driver.scan(scope, after=after, limit=4)
            listed += page.names
            after = page.after
            name = Key(scope, next(coming))
            await other.append(name, b"", birth="v", ttl=None)
            await other.append(Key(scope, staying[len(listed) % len(staying)]), b"x", birth="v", ttl=None)
            await other.append(Key(scope, f"0{len(listed)}-"), b"", birth="v", ttl=None)
            await other.delete(name)
        assert [name for name in listed if name in set(staying)] == staying

    async def test_deleting_what_was_listed_does_not_hide_what_follows(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        names = [f"{number:02}" for number in range(20)]
        for name in names:
            await driver.append(Key(scope, name), b"", birth="v", ttl=None)
        listed: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await driver.scan(scope, after=after, limit=3)
            for name in page.names:
                await driver.delete(Key(scope, name))
            listed += page.names
            after = page.after
        assert listed == names

    # at the same time --------------------------------------------------------------------------------

    async def test_appends_at_the_same_time_are_all_there_each_writers_in_order(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        lengths: list[int] = []

        async def write(label: int) -> None:
            for number in range(10):
                entry = f"{label}:{number}".encode()
                lengths.append(await drivers[label % 2].append(key, entry, birth=new_version(), ttl=None))

        await asyncio.gather(*(write(label) for label in range(8)))
        tail = [entry.decode() for entry in (await _loaded(drivers[0], key)).tail]
        _assert_complete_and_in_order(tail, {str(label): 10 for label in range(8)})
        assert sorted(lengths) == list(range(1, 81)), "two appends were told the same length"

    async def test_folds_never_lose_an_append_and_loads_never_see_half_a_fold(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        acknowledged: set[str] = set()
        writing = True

        async def write(driver: Driver, label: str) -> None:
            for number in range(30):
                await driver.append(key, f"{label}:{number}".encode(), birth=new_version(), ttl=None)
                acknowledged.add(f"{label}:{number}")
                await _steps(number % 4)

        async def keep_folding(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                await fold(driver, key, 3)
                await _steps(1 + turn % 3)

        async def keep_looking(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                expected = set(acknowledged)
                entries = await ledger(driver, key)
                assert len(entries) == len(set(entries)), "an entry is in the body and in the tail"
                assert expected <= set(entries), "an entry is neither in the body nor in the tail"
                await _steps(1 + turn % 5)

        async with asyncio.TaskGroup() as tasks:
            for driver in (one, two):
                tasks.create_task(keep_folding(driver))
                tasks.create_task(keep_looking(driver))
            await asyncio.gather(write(one, "a"), write(two, "b"), write(two, "c"))
            writing = False
        _assert_complete_and_in_order(await ledger(one, key), {"a": 30, "b": 30, "c": 30})

    async def test_of_writers_that_expect_the_same_version_exactly_one_wins(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        for round_ in range(5):
            await _append_all(drivers[0], key, b"a", b"b", birth=f"birth{round_}")
            version = (await _loaded(drivers[0], key)).version
            answers = await asyncio.gather(
                *(
                    drivers[number % 2].replace(
                        key,
                        b"%d" % number,
                        version=f"{round_}-{number}",
                        expect=version,
                        drop=1,
                        ttl=None,
                    )
                    for number in range(8)
                )
            )
            assert sum(answers) == 1
            winner = answers.index(True)
            record = await _loaded(drivers[1], key)
            assert (record.version, record.body) == (f"{round_}-{winner}", b"%d" % winner)
            assert record.tail == (b"b",)
            await drivers[0].delete(key)

    async def test_of_those_who_want_a_lease_exactly_one_gets_it(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        answers = await asyncio.gather(
            *(
                drivers[number % 2].replace(key, b"", version=f"v{number}", expect=ABSENT, ttl=60)
                for number in range(10)
            )
        )
        assert sum(answers) == 1
        assert (await _loaded(drivers[0], key)).version == f"v{answers.index(True)}"

    async def test_a_record_is_born_once_when_many_append_first(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        births = [f"birth{number}" for number in range(10)]
        lengths = await asyncio.gather(
            *(drivers[n % 2].append(key, b"", birth=birth, ttl=None) for n, birth in enumerate(births))
        )
        assert sorted(lengths) == list(range(1, 11))
        assert (await _loaded(drivers[0], key)).version == births[lengths.index(1)]

    # cancelled, closed -------------------------------------------------------------------------------

    async def test_a_cancelled_append_is_wholly_there_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        acknowledged: list[bytes] = []
        for steps in range(24):
            entry = b"%d" % steps
            if await _cancelled_after(steps, driver.append(key, entry, birth="birth", ttl=None)):
                acknowledged.append(entry)
        await driver.append(key, b"end", birth="birth", ttl=None)
        tail = (await _loaded(driver, key)).tail
        assert len(tail) == len(set(tail))
        assert list(tail) == [*sorted(tail[:-1], key=int), b"end"]
        assert set(acknowledged) <= set(tail)

    async def test_a_cancelled_fold_is_wholly_there_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for steps in range(24):
            await _append_all(driver, key, b"a", b"b")
            write = driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP)
            done = await _cancelled_after(steps, write)
            await driver.append(key, b"c", birth="birth", ttl=None)
            after = Record("v2", b"a", (b"b", b"c"))
            before = Record("birth", None, (b"a", b"b", b"c"))
            assert await driver.load(key) in ((after,) if done else (before, after)), f"{steps} steps in"
            await driver.delete(key)

    async def test_a_cancelled_read_leaves_the_driver_usable(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        for steps in range(24):
            await _cancelled_after(steps, driver.load(key))
            await _cancelled_after(steps, driver.scan(key.scope, limit=1))
            await _cancelled_after(steps, driver.delete(key, expect="other"))
            assert await driver.load(key) == Record("birth", None, (b"a",))

    async def test_a_closed_driver_raises_and_never_answers(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.load(key),
            lambda: driver.append(key, b"b", birth="birth", ttl=None),
            lambda: driver.replace(key, b"b", version="v", expect=ANY, ttl=None),
            lambda: driver.delete(key),
            lambda: driver.scan(key.scope, limit=1),
        ]
        for call, operation in zip(calls, ("load", "append", "replace", "delete", "scan"), strict=True):
            with pytest.raises(Unavailable) as caught:
                await call()
            assert (caught.value.backend, caught.value.operation) == (driver.name, operation)
            assert key.scope not in str(caught.value), "an error names a conversation"
        other = await bench.driver()
        assert await other.load(key) == Record("birth", None, (b"a",))

    async def test_opening_and_closing_twice_is_harmless(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.open()
        assert (await _loaded(driver, key)).tail == (b"a",)
        await driver.close()
        await driver.close()

    async def test_closing_one_instance_leaves_the_others_and_the_data(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await one.append(key, b"a", birth="birth", ttl=None)
        await one.close()
        assert (await _loaded(two, key)).tail == (b"a",)

    async def test_closing_while_operations_run_ends_each_of_them_one_way_or_the_other(
        self, bench: Bench
    ) -> None:
        driver, other, key = await bench.driver(), await bench.driver(), bench.key()
        appends = [
            asyncio.ensure_future(driver.append(key, b"%d" % n, birth=new_version(), ttl=None))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        await driver.close()
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert all(isinstance(outcome, (int, StmError)) for outcome in outcomes)
        done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, int)}
        not_done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, Unavailable)}
        record = await other.load(key)
        there = set(record.tail if record else ())
        assert done <= there
        assert not not_done & there, "Unavailable says that nothing was done"

    async def test_the_traits_are_facts_that_make_sense(self, bench: Bench) -> None:
        driver = await bench.driver()
        traits = driver.traits
        assert driver.name
        assert traits.durability
        assert 0 < traits.max_entry <= traits.max_record
        assert traits.max_drop > 0
        assert traits.min_ttl > 0
        assert traits.deadline > 0

    # other processes ---------------------------------------------------------------------------------

    async def test_what_four_processes_append_and_fold_is_all_there_in_order(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        if driver.traits.reach == "process":
            pytest.skip("this driver's reach ends with the process, as its traits say")
        workers = [
            await Worker.start(
                Task(open=bench.datastore.open, key=key, label=f"w{n}", count=60, fold_every=8 * (n % 2))
            )
            for n in range(4)
        ]
        await asyncio.gather(*(worker.finish() for worker in workers))
        assert [len(worker.acknowledged) for worker in workers] == [60] * 4
        _assert_complete_and_in_order(await ledger(driver, key), {f"w{n}": 60 for n in range(4)})

    async def test_what_a_killed_process_had_acknowledged_is_there(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        if driver.traits.reach == "process":
            pytest.skip("this driver's reach ends with the process, as its traits say")
        victims = [
            await Worker.start(Task(open=bench.datastore.open, key=key, label=f"w{n}", count=1_000_000))
            for n in range(2)
        ]
        await asyncio.gather(*(victim.read(until=25) for victim in victims))
        await asyncio.gather(*(victim.kill() for victim in victims))
        entries = await ledger(driver, key)
        for n, victim in enumerate(victims):
            label = f"w{n}"
            there = [entry for entry in entries if entry.startswith(f"{label}:")]
            assert there == [f"{label}:{number}" for number in range(len(there))]
            # One more may have been done whose acknowledgement the process did not live to report.
            assert len(there) - len(victim.acknowledged) in (0, 1)
        assert await driver.append(key, b"after", birth="birth", ttl=None) == len(entries) + 1


async def _loaded(driver: Driver, key: Key) -> Record:
    record = await driver.load(key)
    assert record is not None, "the record is not there"
    return record


async def _append_all(driver: Driver, key: Key, *entries: bytes, birth: str = "birth") -> None:
    for entry in entries:
        await driver.append(key, entry, birth=birth, ttl=None)


async def _expired(bench: Bench) -> Key:
    """Return the key of a record of version `old`, with body and tail, whose time has come."""
    driver, key = await bench.driver(), bench.key()
    await driver.replace(key, b"old body", version="old", expect=ABSENT, ttl=bench.tick * 2)
    await driver.append(key, b"old entry", birth="older", ttl=bench.tick)
    await bench.pass_time(bench.tick * 1.1)
    return key


async def _cancelled_after(steps: int, work: Coroutine[Any, Any, object]) -> bool:
    """Cancel `work` after so many steps of the event loop; returns whether it had ended before."""
    task = asyncio.ensure_future(work)
    await _steps(steps)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


async def _steps(count: int) -> None:
    """Let the event loop take so many steps."""
    for _ in range(count):
        await asyncio.sleep(0)


def _assert_complete_and_in_order(entries: list[str], counts: dict[str, int]) -> None:
    for label, count in counts.items():
        mine = [entry for entry in entries if entry.startswith(f"{label}:")]
        assert mine == [f"{label}:{number}" for number in range(count)], f"writer {label}"
    assert len(entries) == sum(counts.values())


def _noise(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]
