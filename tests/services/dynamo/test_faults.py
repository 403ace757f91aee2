"""Clocks that differ, listings of expired names, and the largest records."""

from __future__ import annotations

import functools
import time

import pytest

from stm_backends.drivers.contract import ABSENT, Key, Page, Record, new_version
from stm_backends.errors import (
    TooLarge,
)
from stm_backends.testing import FakeClock
from stm_backends.testing.workbench.drivers import names_in
from stm_backends_dynamo.items import item_of, key_of
from tests.services.dynamo.support import opened

# clocks --------------------------------------------------------------------------------------------------


async def test_hosts_half_a_second_apart_agree_about_the_shortest_expiry(place, key):
    now = time.time()
    slow, fast = FakeClock(now), FakeClock(now + 0.5)
    async with opened(place, clock=slow) as one, opened(place, clock=fast) as two:
        ttl = one.traits.min_ttl
        assert one.traits.clock == "client"
        for holder, other in ((one, two), (two, one)):
            assert await holder.replace(key, b"", version="v1", expect=ABSENT, ttl=ttl) is True
            for clock in (slow, fast):
                clock.now += 0.49
            assert await other.replace(key, b"", version="v2", expect=ABSENT, ttl=ttl) is False
            for clock in (slow, fast):
                clock.now += ttl + 0.02
            assert await other.replace(key, b"", version="v3", expect=ABSENT, ttl=ttl) is True
            await other.delete(key)


async def test_dynamodbs_own_reaper_never_comes_before_the_end(place, key):
    clock = FakeClock(1_900_000_000.25)
    async with opened(place, clock=clock) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=0.5)
        client = place.client()
        item = client.get_item(TableName=place.table, Key={"pk": {"S": key.scope}, "sk": {"S": key.name}})[
            "Item"
        ]
        client.close()
        assert item["expires"] == {"N": "1900000000.75"}
        assert item["reap_at"] == {"N": "1900000001"}


# listings ------------------------------------------------------------------------------------------------


async def test_a_page_of_expired_names_is_empty_and_not_the_last(place, key):
    clock = FakeClock(time.time())
    async with opened(place, clock=clock) as driver:
        for number in range(4):
            await driver.append(Key(key.scope, f"{number}"), b"a", initial_version="v", ttl=60)
        await driver.append(Key(key.scope, "9"), b"a", initial_version="v", ttl=None)
        clock.now += 61
        assert await driver.scan(key.scope, limit=2) == Page((), "1")
        assert await driver.scan(key.scope, after="1", limit=2) == Page((), "3")
        assert await names_in(driver, key.scope, limit=2) == ["9"]


async def test_a_listing_goes_on_after_the_megabyte_that_a_page_ends_at(place, key):
    client = place.client()
    async with opened(place) as driver:
        names = [f"{number}" for number in range(5)]
        for name in names:
            # As earlier versions stored it; large values are now stored beside the listed item.
            item = item_of("v", None, [b"x" * 300_000], ttl=None, now=0.0)
            client.put_item(TableName=place.table, Item={**key_of(Key(key.scope, name)), **item})
        page = await driver.scan(key.scope, limit=100)
        assert 0 < len(page.names) < 5
        assert page.after == page.names[-1]
        assert await names_in(driver, key.scope) == names
        for name in names:
            await driver.delete(Key(key.scope, name))
    client.close()


# limits --------------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_the_largest_record_under_the_longest_key_fits(place):
    key = Key("s" * 1000, "\u00e9" * 500)
    async with opened(place, deadline_s=30.0) as driver:
        largest = b"x" * driver.traits.max_entry
        count = driver.traits.max_record // len(largest)
        for number in range(count):
            assert await driver.append(key, largest, initial_version=new_version(), ttl=60) == number + 1
        with pytest.raises(TooLarge):
            await driver.append(key, largest, initial_version=new_version(), ttl=60)
        assert (await driver.load(key)).tail == (largest,) * count
        assert await driver.delete(key) is True


@pytest.mark.full
async def test_the_largest_drop_fits_and_a_larger_one_is_refused(place, key):
    async with opened(place) as driver:
        most = driver.traits.max_drop
        for number in range(most + 2):
            await driver.append(key, b"%d" % number, initial_version="v1", ttl=None)
        with pytest.raises(ValueError, match="drops at most 250"):
            await driver.replace(key, b"", version="v2", expect="v1", drop=most + 1, ttl=None)
        fold = functools.partial(driver.replace, key, b"", expect="v1", drop=most)
        assert await fold(version="v2", ttl=60) is True
        assert await driver.load(key) == Record("v2", b"", (b"250", b"251"))
        await driver.delete(key)


@pytest.mark.full
async def test_the_largest_rewrites_fit_and_a_larger_one_is_refused(place, key):
    async with opened(place, deadline_s=30.0) as driver:
        most = driver.traits.max_drop
        for number in range(most + 2):
            await driver.append(key, b"%d" % number, initial_version="v1", ttl=None)
        with pytest.raises(ValueError, match="rewrites at most 250"):
            await driver.replace(key, b"", version="v2", expect="v1", rewrite=[b""] * (most + 1), ttl=None)
        tail = (await driver.load(key)).tail
        # In the head, in parts, in more places than before, in fewer, and of no bytes at all.
        for number, size in enumerate((10, 200, 3_000, 20_000, 100, 0)):
            rewrite = [b"%d" % (place % 10) * size for place in range(most)]
            expect = f"v{number + 1}"
            assert await driver.replace(
                key, b"", version=f"v{number + 2}", expect=expect, rewrite=rewrite, ttl=60
            )
            assert await driver.load(key) == Record(f"v{number + 2}", b"", (*rewrite, *tail[most:]))
        await driver.delete(key)
