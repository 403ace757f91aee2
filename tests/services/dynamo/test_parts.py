"""Parts beside a record: every interleaving, every kill, and what it costs."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Corrupt, OutcomeUnknown, TooLarge
from stm_backends.testing import FakeClock
from stm_backends_dynamo.items import Sizes
from stm_backends_dynamo.parts import Parts
from tests.services.dynamo.support import assert_erased, items_of

Work = Callable[[Driver, Key], Awaitable[object]]


class Killed(asyncio.CancelledError):
    """The process ends here. Like a cancellation, no driver takes it for an error of the client."""


@dataclass
class Stepping:
    """A client of boto3 that is stopped before its n-th request, or does something else first."""

    client: Any
    steps: int = 0
    kill_at: int | None = None
    meanwhile_at: int | None = None
    meanwhile: Callable[[], None] = field(default=lambda: None)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if name in ("meta", "close"):
            return found

        def call(**arguments: Any) -> Any:
            step, self.steps = self.steps, self.steps + 1
            if self.kill_at is not None and step >= self.kill_at:
                raise Killed
            if step == self.meanwhile_at:
                self.meanwhile()
            return found(**arguments)

        return call


def append(entry: bytes, ttl: float | None = None) -> Work:
    return lambda driver, key: driver.append(key, entry, initial_version="initial", ttl=ttl)


def replace(body: bytes, **how: Any) -> Work:
    return lambda driver, key: driver.replace(key, body, **{"ttl": KEEP, **how})


def load(driver: Driver, key: Key) -> Awaitable[object]:
    return driver.load(key)


def delete(driver: Driver, key: Key) -> Awaitable[object]:
    return driver.delete(key)


LARGE = b"large body"

SETTINGS: dict[str, list[Work]] = {
    "nothing": [],
    "small entries": [append(b"a"), append(b"b"), append(b"c")],
    "a part and small entries": [append(b"large 1"), append(b"a"), append(b"b"), append(b"c")],
    "parts, a large body and a crowd": [
        *(append(b"%d" % number) for number in range(5)),
        replace(LARGE, version="v1", expect="initial", drop=2),
        *(append(b"large %d" % number) for number in range(6)),
    ],
}

OPERATIONS: dict[str, Work] = {
    "a small append": append(b"x"),
    "a large append": append(b"xxxxxx"),
    "a fold": replace(b"", version="w1", expect="initial", drop=2),
    "a later fold with a large body": replace(LARGE + b"!", version="w2", expect="v1", drop=4),
    "a rewrite": replace(b"", version="w7", expect="initial", rewrite=(b"A", b"B", b"C")),
    "a rewrite with parts": replace(b"", version="w8", expect="initial", rewrite=(b"AAAAAA", b"", b"CCCCCC")),
    "a later rewrite": replace(LARGE, version="w9", expect="v1", rewrite=(b"A" * 6, b"B", b"C" * 6, b"D")),
    "a save": replace(b"s", version="w3", expect=ANY, ttl=None),
    "a large save": replace(LARGE + b"?", version="w4", expect=ANY, ttl=None),
    "a large save that keeps": replace(LARGE + b".", version="w5", expect=ANY),
    "a first replace": replace(LARGE, version="w6", expect=ABSENT, ttl=None),
    "a delete": delete,
    "a load": load,
}

MEANWHILE = (
    "a small append",
    "a large append",
    "a fold",
    "a later fold with a large body",
    "a rewrite with parts",
    "a later rewrite",
    "a save",
    "a delete",
)
"""What another does: one of each kind."""

QUICK = [("a part and small entries", name) for name in ("a fold", "a delete")]
"""The pairs that are in every run; the others take minutes together."""

PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full)
    for pair in itertools.product(SETTINGS, OPERATIONS)
]


async def outcomes(setting: str, *orders: tuple[str, ...]) -> list[tuple[dict[str, object], Record | None]]:
    """Return what the reference answers, and is left with, in each of the orders."""
    found = []
    for order in orders:
        driver, key = MemoryDriver(), Key("s", "n")
        await driver.open()
        for work in SETTINGS[setting]:
            await work(driver, key)
        found.append(({name: await OPERATIONS[name](driver, key) for name in order}, await driver.load(key)))
    return found


# interleavings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "first"), PAIRS)
async def test_a_call_between_two_requests_of_another_comes_before_or_after(
    place, client, driver_on, setting, first
):
    plain = driver_on(client)
    for second in {*MEANWHILE} - {first}:
        allowed = await outcomes(setting, (first, second), (second, first))
        for step in itertools.count():
            key = Key(f"acme:{uuid.uuid4().hex}:memory", "chat")
            for work in SETTINGS[setting]:
                await work(plain, key)
            answers: dict[str, object] = {}

            def meanwhile(second=second, key=key, answers=answers):
                # In another thread, as calls of boto3 are.
                answers[second] = asyncio.run(_do(driver_on(client), second, key))

            stepping = Stepping(client, meanwhile_at=step, meanwhile=meanwhile)
            answers[first] = await OPERATIONS[first](driver_on(stepping), key)
            if second not in answers:
                break
            assert (answers, await plain.load(key)) in allowed, f"{second} before request {step}"
            await assert_erased(plain, client, place, key)


async def _do(driver, name, key):
    return await OPERATIONS[name](driver, key)


# kills ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "operation"), PAIRS)
async def test_a_kill_between_two_requests_leaves_the_old_or_the_new_record(
    place, client, driver_on, setting, operation
):
    plain = driver_on(client)
    allowed = [record for _, record in await outcomes(setting, (), (operation,))]
    for step in itertools.count(1):
        key = Key(f"acme:{uuid.uuid4().hex}:memory", "chat")
        for work in SETTINGS[setting]:
            await work(plain, key)
        stepping = Stepping(client, kill_at=step)
        try:
            await OPERATIONS[operation](driver_on(stepping), key)
        except Killed:
            pass
        else:
            break
        found = await plain.load(key)
        assert found in allowed, f"killed before request {step}"
        # It goes on as if nothing had been.
        length = await plain.append(key, b"large, and after", initial_version="initial", ttl=None)
        assert length == len(found.tail if found else ()) + 1
        if found and found.tail:
            assert await plain.replace(key, LARGE, version="after", expect=found.version, drop=1, ttl=KEEP)
            assert await plain.load(key) == Record("after", LARGE, (*found.tail[1:], b"large, and after"))
        await assert_erased(plain, client, place, key)
        assert (await plain.scan(key.scope, limit=10)).names == ()


async def test_an_erasure_that_was_killed_is_listed_and_finished_by_the_next(place, client, driver_on, key):
    plain = driver_on(client)
    for number in range(3):
        await plain.append(key, b"large %d" % number, initial_version="v1", ttl=None)
    stepping = Stepping(client)
    for step in range(1, 10):
        stepping.kill_at, stepping.steps = step, 0
        with pytest.raises(Killed):
            await driver_on(stepping).delete(key)
        head, parts = items_of(client, place, key)
        if "erased" in head:
            break
    assert parts
    assert await plain.load(key) is None
    assert (await plain.scan(key.scope, limit=10)).names == (key.name,)
    assert await plain.delete(key) is False
    assert items_of(client, place, key) == (None, [])


async def test_parts_of_a_killed_writer_are_removed_by_the_next_fold(place, client, driver_on, key):
    plain = driver_on(client)
    for number in range(3):
        await plain.append(key, b"large %d" % number, initial_version="v1", ttl=None)
    with pytest.raises(Killed):
        # The head is read, and the part put.
        await driver_on(Stepping(client, kill_at=2)).append(key, b"large 3", initial_version="v1", ttl=None)
    assert len(items_of(client, place, key)[1]) == 4
    # A process that does not know the parts lists them all.
    other = driver_on(client)
    record = await other.load(key)
    assert len(record.tail) == 3
    assert await other.replace(key, b"", version="v2", expect="v1", drop=1, ttl=KEEP)
    assert len(items_of(client, place, key)[1]) == 2
    assert await plain.load(key) == Record("v2", b"", (b"large 1", b"large 2"))


# crowds --------------------------------------------------------------------------------------------------


@dataclass
class Resending(Stepping):
    """A client that sends the first write of a head once more, as if its answer had been lost."""

    resent: bool = False

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name != "update_item":
            return call

        def twice(**arguments: Any) -> Any:
            if not self.resent:
                self.resent = True
                call(**arguments)
                self.meanwhile()
            return call(**arguments)

        return twice


async def test_a_write_that_a_client_sent_twice_keeps_its_part(place, client, driver_on, key):
    plain = driver_on(client)
    await plain.append(key, b"large 1", initial_version="initial", ttl=None)
    stray = {"pk": {"S": f"{key.scope}\0{key.name}"}, "sk": {"S": "stray"}, "values": {"L": []}}
    client.put_item(TableName=place.table, Item=stray)

    async def clear() -> None:
        another = driver_on(client)  # in the event loop of another thread
        await another.load(key)
        assert await another.replace(key, b"", version="v2", expect="initial", ttl=KEEP)

    resending = Resending(client, meanwhile=lambda: asyncio.run(clear()))
    # Each sending of it added the entry, and the core drops the repeat.
    assert await driver_on(resending).append(key, b"large 2", initial_version="initial", ttl=None) == 3
    assert await plain.load(key) == Record("v2", b"", (b"large 1", b"large 2", b"large 2"))
    await assert_erased(plain, client, place, key)


async def test_a_part_that_a_listing_does_not_show_yet_is_not_missing(client, driver_on, key):
    # A transaction is one step, but two reads beside it may see its two items one before and one after.
    await driver_on(client).append(key, b"large", initial_version="initial", ttl=None)
    hidden = iter([True])

    class Behind(Stepping):
        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)
            if name == "query" and next(hidden, False):
                return lambda **_: {"Items": []}
            return call

    assert await driver_on(Behind(client)).load(key) == Record("initial", None, (b"large",))


async def test_a_delete_that_could_not_be_finished_is_unknown(client, driver_on, key):
    plain = driver_on(client)
    await plain.append(key, b"large", initial_version="initial", ttl=None)

    class CutOff(Stepping):
        def __getattr__(self, name: str) -> Any:
            def refuse(**_: Any) -> Any:
                raise EndpointConnectionError(endpoint_url="http://there")

            return refuse if name == "query" else super().__getattr__(name)

    with pytest.raises(OutcomeUnknown):
        await driver_on(CutOff(client)).delete(key)
    assert await plain.load(key) is None


async def test_appends_of_every_size_at_once_are_all_there_in_their_places(client, driver_on, key):
    driver = driver_on(client)
    entries = [b"%d" % number * (1 + number % 3) for number in range(60)]
    lengths = await asyncio.gather(
        *(driver.append(key, one, initial_version="v", ttl=None) for one in entries)
    )
    assert sorted(lengths) == list(range(1, 61))
    record = await driver.load(key)
    assert [entries[lengths.index(place)] for place in range(1, 61)] == list(record.tail)
    assert await driver.delete(key)


async def test_folds_go_on_while_appends_of_every_size_arrive(client, driver_on, key):
    driver, appended, folded = driver_on(client), [], []
    await driver.append(key, b"first", initial_version="v0", ttl=None)

    async def add(which: int) -> None:
        for number in range(15):
            entry = b"%d-%d" % (which, number)
            await driver.append(key, entry, initial_version="never", ttl=None)
            appended.append(entry)

    async def fold() -> None:
        for number in range(8):
            record = await driver.load(key)
            drop = min(3, len(record.tail))
            body = b"body %d" % number
            assert await driver.replace(
                key, body, version=f"v{number + 1}", expect=record.version, drop=drop, ttl=KEEP
            )
            folded.extend(record.tail[:drop])

    await asyncio.gather(*map(add, range(3)), fold())
    record = await driver.load(key)
    assert sorted([*folded, *record.tail]) == sorted([b"first", *appended])
    for which in range(3):
        ours = [one for one in (*folded, *record.tail) if one.startswith(b"%d-" % which)]
        assert ours == [b"%d-%d" % (which, number) for number in range(15)]
    assert await driver.delete(key)


# sizes ---------------------------------------------------------------------------------------------------


async def test_ten_turns_of_300_kb_are_stored_and_folded(place, client, driver_on, key):
    driver = driver_on(client, sizes=Sizes())
    turns = [bytes([number]) * 300_000 for number in range(10)]
    for number, turn in enumerate(turns):
        assert await driver.append(key, turn, initial_version="v1", ttl=60) == number + 1
    assert await driver.load(key) == Record("v1", None, tuple(turns))
    assert await driver.replace(key, b"summary", version="v2", expect="v1", drop=7, ttl=KEEP)
    assert await driver.load(key) == Record("v2", b"summary", tuple(turns[7:]))
    assert len(items_of(client, place, key)[1]) == 3
    await assert_erased(driver, client, place, key)


async def test_small_entries_fill_a_record_too(client, driver_on, key):
    sizes = Sizes(large=100, loose=200, record=2_000, crowd=8)
    driver = driver_on(client, sizes=sizes)

    async def fill() -> None:
        for _ in range(1_000):
            await driver.append(key, b"x" * 50, initial_version="v1", ttl=None)

    with pytest.raises(TooLarge) as caught:
        await fill()
    assert caught.value.what == "record"
    record = await driver.load(key)
    assert sizes.record - 50 <= sum(map(len, record.tail)) <= sizes.record + 2 * sizes.loose
    assert await driver.replace(key, b"", version="v2", expect="v1", drop=20, ttl=KEEP)
    assert await driver.append(key, b"x" * 50, initial_version="v1", ttl=None) == len(record.tail) - 19
    assert await driver.delete(key)


@pytest.mark.full
async def test_many_small_parts_become_few(place, client, driver_on, key):
    driver = driver_on(client, sizes=Sizes(crowd=16, large=10, loose=64))
    entries = [b"%03d of two sizes" % n if n % 3 else b"%03d" % n for n in range(200)]
    for entry in entries:
        await driver.append(key, entry, initial_version="v1", ttl=None)
    head, parts = items_of(client, place, key)
    assert len(head["tail"]["L"]) < 40
    assert len(parts) < 40
    assert (await driver.load(key)).tail == tuple(entries)
    assert await driver.delete(key)


# time ----------------------------------------------------------------------------------------------------


async def test_dynamodbs_reaper_never_takes_a_part_before_its_record(place, client, driver_on, key):
    clock = FakeClock(1_900_000_000.0)
    driver = driver_on(client, clock=clock)

    def assert_kept():
        head, parts = items_of(client, place, key)
        assert parts
        for part in parts:
            if "reap_at" in part:
                assert float(part["reap_at"]["N"]) >= float(head.get("expires", {"N": "inf"})["N"])

    await driver.append(key, b"large 1", initial_version="v1", ttl=60)
    assert_kept()
    first = items_of(client, place, key)[1][0]["reap_at"]
    for ttl, entry in itertools.product((60, 30 * 86_400, None, 60), (b"s", b"large 2")):
        clock.now += 50
        await driver.append(key, entry, initial_version="never", ttl=ttl)
        assert_kept()
    assert items_of(client, place, key)[1][0].get("reap_at") != first
    assert await driver.replace(key, LARGE, version="v2", expect="v1", drop=1, ttl=90 * 86_400)
    assert_kept()
    assert len((await driver.load(key)).tail) == 8
    clock.now += 91 * 86_400
    assert await driver.load(key) is None
    # Created again in its place.
    assert await driver.append(key, b"large 3", initial_version="v3", ttl=60) == 1
    assert len(items_of(client, place, key)[1]) == 1
    assert_kept()
    await assert_erased(driver, client, place, key)


async def test_parts_are_prolonged_seldom(place, client, driver_on, key):
    clock, stepping = FakeClock(1_900_000_000.0), Stepping(client)
    driver = driver_on(stepping, clock=clock)
    await driver.append(key, b"large 1", initial_version="v1", ttl=86_400)
    stepping.steps = 0
    for _ in range(6):
        clock.now += 86_000
        await driver.append(key, b"s", initial_version="never", ttl=86_400)
    # One of them seals; none has to touch the parts.
    assert stepping.steps <= 6 + 5
    await driver.delete(key)


async def test_a_part_that_is_missing_or_damaged_is_corrupt(place, client, driver_on, key):
    driver = driver_on(client)
    for damage in ("delete", "REMOVE #values[0]", "REMOVE #values", "SET #values = :text"):
        await driver.append(key, b"large", initial_version="v1", ttl=None)
        (part,) = items_of(client, place, key)[1]
        at = {"TableName": place.table, "Key": {"pk": part["pk"], "sk": part["sk"]}}
        if damage == "delete":
            client.delete_item(**at)
        else:
            values = {"ExpressionAttributeValues": {":text": {"S": "else"}}} if ":text" in damage else {}
            names = {"#values": "values"}
            client.update_item(**at, UpdateExpression=damage, ExpressionAttributeNames=names, **values)
        with pytest.raises(Corrupt, match=r"dynamo\.load: the record is incomplete: a part"):
            await driver_on(client).load(key)
        assert await driver.delete(key) is True
        assert items_of(client, place, key) == (None, [])


async def test_a_part_is_read_once_by_a_process_and_not_by_its_writer(place, client, driver_on, key):
    writer, reader = driver_on(client), driver_on(client)
    await writer.append(key, b"large 1", initial_version="v1", ttl=None)
    record = await reader.load(key)
    assert record == await writer.load(key) == Record("v1", None, (b"large 1",))
    (part,) = items_of(client, place, key)[1]
    client.delete_item(TableName=place.table, Key={"pk": part["pk"], "sk": part["sk"]})
    assert await writer.load(key) == await reader.load(key) == record
    assert await writer.delete(key) is True
    await writer.append(key, b"large 2", initial_version="v2", ttl=None)
    assert await reader.load(key) == Record("v2", None, (b"large 2",))


async def test_remembered_parts_take_a_bounded_number_of_bytes(key):
    parts, value = Parts(10_000), (b"x" * 2_000,)
    for number in range(9):
        parts.keep(key, {f"part {number}": value, "part 0": value})
        assert parts.of(key, ["part 0"]) == {"part 0": value}
    assert [*parts.of(key, [f"part {number}" for number in range(9)])] == [
        "part 0",
        "part 6",
        "part 7",
        "part 8",
    ]
    assert parts.of(key._replace(name="other"), ["part 8"]) == {}
    parts.keep(key, {"too large": (b"x" * 20_000,)})
    assert parts.of(key, ["too large", "part 8"]) == {}


# units ---------------------------------------------------------------------------------------------------


@dataclass
class Units:
    """How many units the requests of a client took, as the engine says."""

    read: float = 0.0
    written: float = 0.0

    def count_on(self, client: Any) -> Any:
        def ask(params, **_):
            params["ReturnConsumedCapacity"] = "TOTAL"

        def note(parsed, model, **_):
            consumed = parsed.get("ConsumedCapacity", [])
            units = sum(
                one["CapacityUnits"] for one in (consumed if isinstance(consumed, list) else [consumed])
            )
            if model.name in ("GetItem", "Query"):
                self.read += units
            else:
                self.written += units

        client.meta.events.register("provide-client-params.dynamodb.*", ask)
        client.meta.events.register("after-call.dynamodb.*", note)
        return client


@pytest.fixture
def units(client):
    units = Units()
    units.count_on(client)
    return units


async def test_a_turn_of_10_kb_onto_200_kb_takes_at_most_25_write_units(client, driver_on, key, units):
    driver = driver_on(client, sizes=Sizes())
    for _ in range(20):
        await driver.append(key, b"x" * 10_000, initial_version="v1", ttl=None)
    units.written = 0.0
    await driver.append(key, b"x" * 10_000, initial_version="v1", ttl=None)
    assert units.written <= 25
    await driver.delete(key)


@pytest.mark.full
async def test_items_of_1_kb_cost_about_their_size_however_many_there_are(client, driver_on, key, units):
    driver = driver_on(client, sizes=Sizes())
    for _ in range(180):
        await driver.append(key, b"x" * 1_000, initial_version="v1", ttl=None)
    units.written = 0.0
    for _ in range(20):
        await driver.append(key, b"x" * 1_000, initial_version="v1", ttl=None)
    assert units.written / 20 <= 15
    await driver.delete(key)


async def test_names_are_listed_without_paying_for_what_they_name(client, driver_on, key, units):
    driver = driver_on(client, sizes=Sizes())
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        await driver.replace(Key(key.scope, name), b"x" * 50_000, version="v1", expect=ANY, ttl=None)
    units.read = 0.0
    assert list((await driver.scan(key.scope, limit=100)).names) == names
    assert units.read <= math.ceil(20 * 300 / 4_096)
    for name in names:
        await driver.delete(Key(key.scope, name))


@pytest.mark.parametrize(
    "expression",
    ["REMOVE tail[0] SET tail[2] = :x, entries = :two", "SET tail[2] = :x, entries = :two REMOVE tail[0]"],
)
async def test_list_positions_in_an_update_mean_those_before_it(place, client, driver_on, key, expression):
    """Moving entries into a part relies on this promise of the engine."""
    driver = driver_on(client)
    for entry in (b"a", b"b", b"c"):
        await driver.append(key, entry, initial_version="v1", ttl=None)
    client.update_item(
        TableName=place.table,
        Key={"pk": {"S": key.scope}, "sk": {"S": key.name}},
        UpdateExpression=expression,
        ExpressionAttributeValues={":x": {"B": b"x"}, ":two": {"N": "2"}},
    )
    assert await driver.load(key) == Record("v1", None, (b"b", b"x"))
    await driver.delete(key)
