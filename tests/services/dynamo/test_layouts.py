"""Records that earlier versions stored as one item, and records of a newer layout."""

from __future__ import annotations

import pytest

from stm_backends.drivers.contract import ANY, KEEP, Record
from stm_backends.errors import Corrupt
from stm_backends_dynamo.items import Sizes, item_of
from tests.services.dynamo.support import assert_erased, items_of
from tests.services.dynamo.test_parts import append, load, replace


def put_old(client, place, key, tail, body=None, **attributes):
    """Put a record as versions before parts did."""
    item = item_of("v1", body, tail, ttl=None, now=0.0)
    client.put_item(
        TableName=place.table, Item={"pk": {"S": key.scope}, "sk": {"S": key.name}, **item, **attributes}
    )


@pytest.mark.parametrize("entry", [b"s", b"large" * 1_000])
@pytest.mark.parametrize(("count", "size"), [(3, 10), (1_500, 200), (39, 10_300)])
async def test_a_record_of_one_item_is_loaded_appended_to_and_folded(
    place, client, driver_on, key, count, size, entry
):
    driver = driver_on(client, sizes=Sizes())
    tail = tuple(b"%05d" % number + b"x" * (size - 5) for number in range(count))
    put_old(client, place, key, tail, b"summary")
    assert await driver.load(key) == Record("v1", b"summary", tail)
    for number in range(4):
        assert await driver.append(key, entry, initial_version="never", ttl=None) == count + 1 + number
    tail += (entry,) * 4
    assert await driver.load(key) == Record("v1", b"summary", tail)
    drop = min(count - 1, 250)
    assert await driver.replace(key, b"more", version="v2", expect="v1", drop=drop, ttl=KEEP)
    assert await driver.load(key) == Record("v2", b"more", tail[drop:])
    await assert_erased(driver, client, place, key)


async def test_a_record_of_one_item_that_is_full_takes_more(place, client, driver_on, key):
    driver = driver_on(client, sizes=Sizes())
    tail = tuple(b"%05d" % number + b"x" * 9_995 for number in range(40))
    room = 409_600 - 120 - sum(map(len, tail)) - len(key.scope)
    tail += (b"y" * room,)
    put_old(client, place, key, tail)
    assert await driver.append(key, b"z" * 1_000, initial_version="never", ttl=None) == 42
    assert (await driver.load(key)).tail == (*tail, b"z" * 1_000)
    await assert_erased(driver, client, place, key)


async def test_a_record_without_parts_is_what_earlier_versions_wrote(place, client, driver_on, key):
    driver = driver_on(client)
    await driver.append(key, b"a", initial_version="v1", ttl=60)
    await driver.append(key, b"b", initial_version="v1", ttl=None)
    head, parts = items_of(client, place, key)
    assert set(head) - {"grown"} == {"pk", "sk", "version", "body", "tail", "entries"}
    assert parts == []
    await driver.append(key, b"large", initial_version="v1", ttl=None)
    head, _ = items_of(client, place, key)
    # An older reader takes only bytes for an entry, and so refuses the record.
    assert head["readable_since"] == {"N": "2"}
    assert "B" not in head["tail"]["L"][-1]
    await driver.delete(key)


async def test_a_record_of_a_newer_layout_is_refused_and_left_alone(place, client, driver_on, key):
    driver = driver_on(client)
    put_old(client, place, key, (b"a",), readable_since={"N": "3"}, life={"S": "l"}, kept={"N": "1"})
    before = items_of(client, place, key)
    for work in (
        load,
        append(b"s"),
        append(b"large"),
        replace(b"", version="v2", expect="v1", drop=1),
        replace(b"", version="v2", expect=ANY, ttl=None),
    ):
        with pytest.raises(Corrupt, match="newer version"):
            await work(driver, key)
    assert items_of(client, place, key) == before
