"""Redis: a large record is read in slices, and is of one moment all the same."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import pytest

pytest.importorskip("redis")

from stm_backends.drivers.coalesced import ALL
from stm_backends_redis import slices, statements
from stm_backends_redis.slices import LARGE, Slices
from tests.mutants.redis import KnowsRecordsOnly, MixesTwoMoments, ReadsAtOnce, SharesTheConnection

ENTRY = 40_000


class Stored:
    """A record as the server has it, and what was asked for it."""

    def __init__(self, count: int, *, body: bytes = b"", pause_s: float = 0.0) -> None:
        self.elements: list[bytes] = []
        self.asked: list[tuple[int, ...]] = []
        self.sizes: list[int] = []
        self.running = self.most = 0
        self.meanwhile: Callable[[int], None] = lambda number: None
        self._pause_s = pause_s
        self.become("v", [b"%02d" % number * (ENTRY // 2) for number in range(count)], body=body)

    def become(self, version: str, tail: list[bytes], *, body: bytes = b"") -> None:
        measure = b"%d %d %d" % (len(tail), sum(map(len, tail)), len(body))
        self.elements = [version.encode(), measure, body, *tail]

    async def ask(self, statement: statements.Statement, *arguments: int, apart: bool = False) -> list[bytes]:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._pause_s)
        self.running -= 1
        found = self._answer(statement, arguments)
        size = sum(map(len, found))
        assert apart or size <= LARGE, "others wait for a large answer"
        self.asked.append(arguments)
        self.sizes.append(size)
        self.meanwhile(len(self.asked))
        return found

    def _answer(self, statement: statements.Statement, arguments: tuple[int, ...]) -> list[bytes]:
        if statement is statements.LOAD_SMALL:
            most, last = arguments
            found = [*self.elements[:3], *self.elements[max(3, len(self.elements) - last) :]]
            return found if sum(map(len, found)) <= most else self.elements[:2]
        first, last = arguments
        return self.elements[first:] if last == -1 else self.elements[first : last + 1]


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> int:
    """How slices grow with the time of a round trip: not at all, however busy the machine is."""
    rate = slices._BYTES_A_SECOND  # noqa: SLF001 -- restored by the test of it
    monkeypatch.setattr(slices, "_BYTES_A_SECOND", 0)
    return rate


@pytest.fixture
def kind() -> type[Slices]:
    """The reader; a mutant of it where a test is called for one."""
    return Slices


async def test_a_small_record_is_read_at_once_in_any_case() -> None:
    reader, stored = Slices(), Stored(2)
    for _ in range(2):
        assert brief(await reader.read(b"key", stored.ask)) == brief(stored.elements)
    assert stored.asked == [(LARGE, ALL), (0, -1)]
    stored.elements = []
    assert await reader.read(b"other", stored.ask) == []


async def test_a_large_record_is_whole_and_no_answer_is_large(kind: type[Slices]) -> None:
    reader, stored = kind(), Stored(50)
    for _ in range(2):
        assert brief(await reader.read(b"key", stored.ask)) == brief(stored.elements)
    assert max(stored.sizes) <= LARGE
    assert stored.asked.count((LARGE, ALL)) == 1, "it is known to be large then"


async def test_entries_that_are_appended_meanwhile_are_left_out() -> None:
    reader, stored = Slices(), Stored(20)
    before = stored.elements[:]
    stored.meanwhile = lambda _: stored.elements.append(b"new")
    assert brief(await reader.read(b"key", stored.ask)) == brief(before)


async def test_a_record_that_is_folded_meanwhile_is_of_one_moment(kind: type[Slices]) -> None:
    stored = Stored(20)
    folded = stored.elements[8:]

    def fold(number: int) -> None:
        if number == 4:
            stored.become("w", [*folded, *[b"nn" * (ENTRY // 2)] * 8], body=b"summary")

    stored.meanwhile = fold
    assert brief(await kind().read(b"key", stored.ask)) == brief(stored.elements)
    stored.become("v", [b"x" * ENTRY] * 20)
    stored.asked.clear()
    stored.meanwhile = lambda number: stored.elements.clear() if number == 4 else None
    assert await kind().read(b"key", stored.ask) == [], "it was deleted"


async def test_a_record_that_never_stands_still_is_read_at_once() -> None:
    stored = Stored(20)
    stored.meanwhile = lambda number: stored.become(f"v{number}", stored.elements[3:])
    elements = await Slices().read(b"key", stored.ask)
    assert stored.asked[-1][1] == ALL
    assert len(elements) == 23
    reads = [asked for asked in stored.asked if asked == (0, 2)]
    assert len(reads) == 2


async def test_few_large_records_are_read_at_the_same_time() -> None:
    reader = Slices()
    stored = Stored(20)
    for _ in range(2):  # unknown at first
        stored.most = 0
        reads = (reader.read(b"key", stored.ask) for _ in range(10))
        assert all(elements == stored.elements for elements in await asyncio.gather(*reads))
    assert stored.most == 2


async def test_a_far_server_is_asked_for_larger_slices(monkeypatch: pytest.MonkeyPatch, rate: int) -> None:
    monkeypatch.setattr(slices, "_BYTES_A_SECOND", rate)
    stored = Stored(50, pause_s=0.05)
    assert brief(await Slices().read(b"key", stored.ask)) == brief(stored.elements)
    assert len(stored.asked) == 4, "the look, the head, all entries, and the version"


async def test_a_record_that_became_small_is_read_at_once_again() -> None:
    reader, stored = Slices(), Stored(20)
    await reader.read(b"key", stored.ask)
    stored.become("w", [b"small"])
    for _ in range(2):
        assert brief(await reader.read(b"key", stored.ask)) == brief(stored.elements)
    assert stored.asked[-1] == (0, -1)


async def test_a_large_record_with_a_damaged_head_raises() -> None:
    stored = Stored(20)
    reader = Slices()
    await reader.read(b"key", stored.ask)
    for damaged in ([b"v"], [b"v", b"other", b""]):
        stored.elements = damaged
        with pytest.raises(ValueError, match=r"values|literal"):
            await reader.read(b"key", stored.ask)


async def test_no_more_records_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_REMEMBERED", 10)
    reader, stored = Slices(), Stored(1)
    for number in range(20):
        await reader.read(b"%d" % number, stored.ask)
    await reader.read(b"0", stored.ask)
    await reader.read(b"19", stored.ask)
    assert stored.asked[-2:] == [(LARGE, ALL), (0, -1)]


def brief(elements: list[bytes]) -> list[tuple[int, int]]:
    """Return what tells elements apart; how megabytes differ would take minutes to show."""
    return [(len(element), zlib.crc32(element)) for element in elements]


def newest(stored: Stored, last: int) -> list[bytes]:
    """Return what a load of the newest entries has."""
    return [*stored.elements[:3], *stored.elements[max(3, len(stored.elements) - last) :]]


async def test_few_small_entries_of_a_large_record_are_read_at_once(kind: type[Slices]) -> None:
    reader, stored = kind(), Stored(50)
    stored.become("v", [*stored.elements[3:], *[b"small"] * 5])
    await reader.read(b"key", stored.ask)
    stored.asked.clear()
    for last in (5, 5, 0, 1):
        assert brief(await reader.read(b"key", stored.ask, last)) == brief(newest(stored, last))
    assert stored.asked == [(LARGE, last) for last in (5, 5, 0, 1)]


async def test_newest_entries_that_are_large_are_read_in_slices(kind: type[Slices]) -> None:
    reader, stored = kind(), Stored(50)
    for _ in range(2):
        assert brief(await reader.read(b"key", stored.ask, 20)) == brief(newest(stored, 20))
    assert max(stored.sizes) <= LARGE
    assert stored.asked.count((LARGE, 20)) == 1, "they are known to be large then"
    assert brief(await reader.read(b"key", stored.ask, 100)) == brief(stored.elements)


async def test_newest_entries_of_a_record_folded_meanwhile_are_of_one_moment(kind: type[Slices]) -> None:
    stored = Stored(50)
    folded = stored.elements[13:]

    def fold(number: int) -> None:
        if number == 4:
            stored.become("w", [*folded, *[b"nn" * (ENTRY // 2)] * 10], body=b"summary")

    stored.meanwhile = fold
    assert brief(await kind().read(b"key", stored.ask, 20)) == brief(newest(stored, 20))


async def test_entries_that_come_while_the_newest_are_read_are_left_out() -> None:
    stored = Stored(50)
    before = newest(stored, 20)
    stored.meanwhile = lambda _: stored.elements.append(b"new")
    assert brief(await Slices().read(b"key", stored.ask, 20)) == brief(before)


async def test_slices_of_entries_larger_than_the_average_are_small_once_known() -> None:
    reader, stored = Slices(), Stored(20)
    stored.become("v", [*[b"small"] * 4_000, *stored.elements[3:]])
    for _ in range(2):
        stored.sizes.clear()
        assert brief(await reader.read(b"key", stored.ask, 20)) == brief(newest(stored, 20))
    assert max(stored.sizes) <= LARGE


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (MixesTwoMoments, test_a_record_that_is_folded_meanwhile_is_of_one_moment),
        (ReadsAtOnce, test_a_large_record_is_whole_and_no_answer_is_large),
        (MixesTwoMoments, test_newest_entries_of_a_record_folded_meanwhile_are_of_one_moment),
        (SharesTheConnection, test_newest_entries_that_are_large_are_read_in_slices),
        (KnowsRecordsOnly, test_few_small_entries_of_a_large_record_are_read_at_once),
    ],
)
async def test_each_mutant_is_killed_by_its_test(mutant: type[Slices], check: Callable[..., object]) -> None:
    with pytest.raises(AssertionError):
        await check(mutant)  # pyright: ignore[reportGeneralTypeIssues] -- each is a coroutine function
