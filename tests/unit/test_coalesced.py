"""Loads that share requests: each caller gets its own answer, as fresh as if it had asked alone."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Sequence
from typing import Any

import pytest

from stm_backends.drivers.coalesced import ALL, LARGE_BYTES, Coalesced, LargeKeys, LoadKey
from stm_backends.drivers.contract import Key
from stm_backends.errors import Unavailable

A, B, C, D = (Key("scope", name) for name in "abcd")


class Datastore:
    """Records of one datastore. Each request waits until the test lets it be answered."""

    def __init__(self, kind: type[Coalesced[Any, bytes]] = Coalesced, **limits: int) -> None:
        self.records = {key: key.name.encode() for key in (A, B, C)}
        self.requests: list[tuple[Key, ...]] = []
        self.answers: list[asyncio.Future[None]] = []
        self.loads = kind(self.fetch, size=len, **limits)

    async def fetch(self, keys: Sequence[Key]) -> dict[Key, bytes]:
        found = {key: self.records[key] for key in reversed(keys) if key in self.records}
        self.requests.append(tuple(keys))
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]
        return found

    async def load(self, key: Key) -> bytes | None:
        """Load a record while nothing else is loaded."""
        (load,) = self.start(key)
        await self.sent(len(self.requests) + 1)
        self.answer(-1)
        return await load

    def start(self, *keys: Key) -> list[asyncio.Task[bytes | None]]:
        return [asyncio.create_task(self.loads.load(key)) for key in keys]

    async def sent(self, count: int) -> None:
        await settle()
        assert len(self.requests) >= count

    def answer(self, request: int, error: Exception | None = None) -> None:
        if error:
            self.answers[request].set_exception(error)
        else:
            self.answers[request].set_result(None)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_concurrent_loads_share_a_request_and_get_their_own_answers() -> None:
    store = Datastore()
    loads = store.start(A, C, D, B, C)
    await store.sent(2)
    assert store.requests == [(A,), (C, D, B)]
    store.answer(1)
    store.answer(0)
    assert await asyncio.gather(*loads) == [b"a", b"c", None, b"b", b"c"]


async def test_a_load_alone_is_a_request_without_a_task() -> None:
    store = Datastore()
    load = asyncio.ensure_future(store.loads.load(A))
    await store.sent(1)
    assert asyncio.all_tasks() == {asyncio.current_task(), load}
    store.answer(0)
    assert await load == b"a"


async def test_a_load_sees_the_write_that_was_acknowledged_before_it() -> None:
    store = Datastore(in_flight=1)
    before = store.start(A, B)
    await store.sent(1)
    store.answer(0)
    await store.sent(2)  # the request for B has read its record
    store.records[B] = b"newer"
    (after,) = store.start(B)
    await settle()
    store.answer(1)
    await store.sent(3)
    store.answer(2)
    assert await asyncio.gather(*before, after) == [b"a", b"b", b"newer"]


async def test_no_more_requests_than_allowed_are_in_progress() -> None:
    store = Datastore(in_flight=2, max_keys=2)
    loads = store.start(A, B, C, D, A)
    await settle()
    assert store.requests == [(A,), (B, C)]
    store.answer(0)
    await settle()
    assert store.requests[2:] == [(D, A)]
    store.answer(1)
    store.answer(2)
    assert await asyncio.gather(*loads) == [b"a", b"b", b"c", None, b"a"]


async def test_large_answers_make_the_requests_smaller() -> None:
    store = Datastore(max_bytes=1_000)
    store.records = dict.fromkeys((A, B, C, D), bytes(1_000))
    for request in range(20):
        (load,) = store.start(A)
        await store.sent(request + 1)
        store.answer(request)
        await load
    loads = store.start(A, B, C, D)
    await settle()
    assert store.requests[20:] == [(A,), (B,)]
    for request in range(20, 24):
        await store.sent(request + 1)
        store.answer(request)
    assert await asyncio.gather(*loads) == [bytes(1_000)] * 4


async def test_loads_that_end_unanswered_share_smaller_requests_next() -> None:
    store = Datastore(in_flight=1)
    (first,) = store.start(D)
    await store.sent(1)
    late = store.start(A, B, C, D)
    await settle()
    store.answer(0)
    await store.sent(2)
    for load in late:
        load.cancel()
    await settle()
    again = store.start(A, A, B, C, D)
    for request in range(2, 5):
        await store.sent(request + 1)
        store.answer(request)
    assert store.requests[1:] == [(A, B, C, D), (A,), (A, B), (C, D)]
    assert await asyncio.gather(first, *again) == [None, b"a", b"a", b"b", b"c", None]


async def test_a_cancelled_load_that_waits_is_never_sent() -> None:
    store = Datastore(in_flight=1)
    first, second, third = store.start(A, B, C)
    await store.sent(1)
    second.cancel()
    await settle()
    store.answer(0)
    await store.sent(2)
    store.answer(1)
    assert (await first, await third) == (b"a", b"c")
    assert store.requests == [(A,), (C,)]
    assert second.cancelled()


async def test_a_request_ends_only_when_no_caller_is_left() -> None:
    store = Datastore(in_flight=2)
    first, second, third = store.start(A, B, C)
    await store.sent(2)
    second.cancel()
    await settle()
    assert not store.answers[1].cancelled()
    third.cancel()
    await settle()
    assert store.answers[1].cancelled()
    store.answer(0)
    assert await first == b"a"
    (again,) = store.start(B)
    await store.sent(3)
    store.answer(2)
    assert await again == b"b"


async def test_an_error_reaches_the_callers_of_its_request_only() -> None:
    store = Datastore()
    first, second, third = store.start(A, B, C)
    await store.sent(2)
    store.answer(1, ConnectionResetError())
    store.answer(0)
    for load in (second, third):
        with pytest.raises(ConnectionResetError):
            await load
    assert await first == b"a"


async def test_closing_ends_what_waits_and_what_is_in_progress() -> None:
    store = Datastore(in_flight=2, max_keys=1)
    first, *others = store.start(A, B, C)
    await store.sent(2)
    await store.loads.close()
    for load in others:
        with pytest.raises(Unavailable, match="closed"):
            await load
    store.answer(0)
    assert await first == b"a"
    await store.loads.close()


async def test_a_shared_request_runs_in_the_context_of_no_caller() -> None:
    """A caller's context holds its timeouts, as that of PyMongo does, and they are not those of others."""
    caller, seen = contextvars.ContextVar("caller", default="none"), list[str]()

    class Noting(Datastore):
        async def fetch(self, keys: Sequence[Key]) -> dict[Key, bytes]:
            seen.append(caller.get())
            return await super().fetch(keys)

    store = Noting(in_flight=1)
    token = caller.set("one")
    first = store.start(A)
    await store.sent(1)
    loads = store.start(B, C)
    caller.reset(token)
    await settle()
    store.answer(0)
    await store.sent(2)
    store.answer(1)
    assert await asyncio.gather(*first, *loads) == [b"a", b"b", b"c"]
    assert seen == ["one", "none"]


LARGE = bytes(LARGE_BYTES + 1)


class Cutting(Datastore):
    """A datastore that sends the first byte only of what is large, unless it is alone in its request."""

    def __init__(self, kind: type[Coalesced[Any, bytes]] = Coalesced, **limits: int) -> None:
        super().__init__(kind, **limits)
        self.loads = kind(
            self.fetch, size=lambda found: len(LARGE if found == LARGE[:1] else found), **limits
        )

    async def fetch(self, keys: Sequence[Key]) -> dict[Key, bytes]:
        found = await super().fetch(keys)
        return {key: one[:1] if one == LARGE and len(keys) > 1 else one for key, one in found.items()}


async def test_small_loads_wait_for_none_that_is_known_to_be_large() -> None:
    store = Cutting(large_in_flight=1)
    store.records[A] = LARGE
    assert await store.load(A) == LARGE
    large = store.start(A, A)
    await store.sent(2)
    small = store.start(B, C)
    await store.sent(4)
    assert store.requests[1:] == [(A,), (B,), (C,)], "one large request at a time, beside two others"
    store.answer(2)
    store.answer(3)
    assert await asyncio.gather(*small) == [b"b", b"c"]
    assert not any(load.done() for load in large)
    store.answer(1)
    await store.sent(5)
    store.answer(4)
    assert await asyncio.gather(*large) == [LARGE] * 2
    assert store.requests[4:] == [(A,)]


async def test_loads_of_a_large_record_that_wait_at_once_share_a_request() -> None:
    store = Cutting(large_in_flight=1)
    store.records[A] = store.records[B] = LARGE
    assert [await store.load(key) for key in (A, A, B, B)] == [LARGE] * 4
    sent = len(store.requests)
    loads = store.start(A, A, A, B, B, B)
    for number, key in enumerate((A, A, B)):
        await store.sent(sent + number + 1)
        assert store.requests[-1] == (key,)
        store.answer(-1)
    assert await asyncio.gather(*loads) == [LARGE] * 6


async def test_a_large_record_that_was_not_known_delays_no_other() -> None:
    store = Cutting(in_flight=1)
    store.records[A] = LARGE
    first, large, small = store.start(C, A, B)
    await store.sent(1)
    store.answer(0)
    await store.sent(2)
    store.answer(1)
    await store.sent(3)
    assert store.requests[1:] == [(A, B), (A,)]
    assert (await first, await small) == (b"c", b"b")
    store.answer(2)
    assert await large == LARGE


async def test_a_large_record_is_whole_though_the_other_caller_gave_up() -> None:
    store = Cutting(in_flight=1)
    store.records[A] = LARGE
    first, large, small = store.start(C, A, B)
    await store.sent(1)
    store.answer(0)
    await store.sent(2)
    small.cancel()
    await settle()
    store.answer(1)
    await store.sent(3)
    store.answer(2)
    assert (await first, await large) == (b"c", LARGE)


async def test_a_record_that_became_small_shares_requests_again() -> None:
    store = Cutting(in_flight=1)
    store.records[A] = LARGE
    assert await store.load(A) == LARGE
    store.records[A] = b"a"
    assert await store.load(A) == b"a"
    loads = store.start(C, A, B)
    await store.sent(3)
    store.answer(2)
    await store.sent(4)
    store.answer(3)
    assert await asyncio.gather(*loads) == [b"c", b"a", b"b"]
    assert store.requests[2:] == [(C,), (A, B)]


def test_no_more_large_keys_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stm_backends.drivers.coalesced.REMEMBERED", 2)
    keys = LargeKeys()
    for key in (A, B, A, C):
        assert keys.note(key, LARGE_BYTES + 1)
    assert [key in keys for key in (A, B, C)] == [True, False, True]
    assert not keys.note(A, LARGE_BYTES)
    assert A not in keys


class Newest:
    """Records of several entries, of which each load wants a number. Requests are answered at once.

    Of what is large among several, no entry is sent.
    """

    def __init__(self, kind: type[Coalesced[Any, Any]] = Coalesced) -> None:
        self.records = {key: [b"1", b"2", b"3"] for key in (A, B, C)}
        self.requests: list[tuple[LoadKey, ...]] = []
        self.loads: Coalesced[LoadKey, list[bytes]] = kind(self.fetch, size=self.size, in_flight=1)

    async def fetch(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, list[bytes]]:
        self.requests.append(tuple(wanted))
        await asyncio.sleep(0)
        found = {one: self.records[one.key][-one.last :] if one.last else [] for one in wanted}
        several = len(wanted) > 1
        return {
            one: [LEFT_OUT] if several and self.size(each) > LARGE_BYTES else each
            for one, each in found.items()
        }

    @staticmethod
    def size(found: list[bytes]) -> int:
        return LARGE_BYTES + 1 if found == [LEFT_OUT] else sum(map(len, found))

    async def load(self, *wanted: LoadKey) -> list[list[bytes] | None]:
        return await asyncio.gather(*map(self.loads.load, wanted))


LEFT_OUT = b"left out"


async def test_loads_of_different_numbers_of_entries_share_a_request() -> None:
    store = Newest()
    wanted = [LoadKey(A, 1), LoadKey(B, ALL), LoadKey(A, 2), LoadKey(A, ALL), LoadKey(C, 0), LoadKey(B, ALL)]
    whole = [b"1", b"2", b"3"]
    assert await store.load(*wanted) == [whole[2:], whole, whole[1:], whole, [], whole]
    assert store.requests == [(wanted[0],), tuple(wanted[1:5])]


async def test_few_entries_of_a_large_record_share_requests() -> None:
    store = Newest()
    store.records[A] = [LARGE, b"1", b"2"]
    assert await store.load(LoadKey(A, ALL)) == [store.records[A]]
    small = [LoadKey(B, 1), LoadKey(A, 2), LoadKey(C, 1)]
    assert await store.load(*small) == [[b"3"], [b"1", b"2"], [b"3"]]
    assert store.requests[1:] == [(small[0],), (small[1], small[2])]


async def test_newest_entries_that_are_large_are_loaded_alone() -> None:
    store = Newest()
    store.records[A] = [b"1", LARGE]
    wanted = [LoadKey(B, 1), LoadKey(A, 1), LoadKey(C, 1)]
    for _ in range(2):
        assert await store.load(*wanted) == [[b"3"], [LARGE], [b"3"]]
    assert store.requests[:3] == [(wanted[0],), tuple(wanted[1:]), (wanted[1],)], "it was not known"
    assert sorted(store.requests[3:]) == [(one,) for one in sorted(wanted)], "it is known"


def test_no_load_wants_more_entries_than_datastores_can_count() -> None:
    assert [LoadKey.of(A, last).last for last in (0, 20, ALL, ALL + 1, None)] == [0, 20, ALL, ALL, ALL]


class SharesAnswersOfARecord(Coalesced[Any, Any]):
    """A mutant: loads of a record in one request get the answer that the first of them wants."""

    async def _fetch_all(self, keys: Sequence[Any]) -> Any:
        first = {one.key: one for one in reversed(keys)}
        found = await super()._fetch_all([*first.values()])
        return {one: found[first[one.key]] for one in keys}


class KnowsRecordsOnly(Coalesced[Any, Any]):
    """A mutant: remembers of a record whether all of it is large, for loads of its newest entries too."""

    async def load(self, key: Any) -> Any:
        whole = LoadKey(key.key, ALL)
        return await (self._alone.load(key) if whole in self._large else super().load(key))


class JoinsWhatWasSent(Coalesced[Any, bytes]):
    """A mutant: a load joins the request that was sent last, though it may have read the record already."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        requests = self._shared
        requests._batch_for = functools.cache(requests._batch_for)  # noqa: SLF001 -- a fault in there


class SharesWhatIsLarge(Coalesced[Any, bytes]):
    """A mutant: does not remember which records are large."""

    def _note(self, key: Key, found: bytes | None) -> bool:
        del key
        return found is not None and self._size(found) > LARGE_BYTES


class TakesWhatIsLeftForTheWhole(Coalesced[Any, bytes]):
    """A mutant: takes a large record's answer in a shared request for all of it."""

    def _note(self, key: Key, found: bytes | None) -> bool:
        super()._note(key, found)
        return False


class AnswersByPosition(Coalesced[Any, bytes]):
    """A mutant: hands the answers out in the order of the datastore, which leaves out absent records."""

    async def _fetch_all(self, keys: Sequence[Key]) -> Any:
        return dict(zip(keys, (await super()._fetch_all(keys)).values(), strict=False))


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (JoinsWhatWasSent, test_a_load_sees_the_write_that_was_acknowledged_before_it),
        (SharesWhatIsLarge, test_small_loads_wait_for_none_that_is_known_to_be_large),
        (TakesWhatIsLeftForTheWhole, test_a_large_record_that_was_not_known_delays_no_other),
        (AnswersByPosition, test_concurrent_loads_share_a_request_and_get_their_own_answers),
        (SharesAnswersOfARecord, test_loads_of_different_numbers_of_entries_share_a_request),
        (KnowsRecordsOnly, test_few_entries_of_a_large_record_share_requests),
        (SharesWhatIsLarge, test_newest_entries_that_are_large_are_loaded_alone),
    ],
)
async def test_each_mutant_is_killed_by_its_test(mutant: Any, check: Any, monkeypatch: Any) -> None:
    for kind in (Datastore, Cutting, Newest):
        monkeypatch.setattr(kind.__init__, "__defaults__", (mutant,))
    with pytest.raises(AssertionError):
        await check()
