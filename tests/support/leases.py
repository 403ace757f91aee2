"""Leases of another process on a conversation, in its record."""

from __future__ import annotations

from dataclasses import replace

from stm_backends.drivers.contract import KEEP, Driver, Key, Record, new_version
from stm_backends.records.body import Body, Lease
from stm_backends.records.codec import Codec


async def stored_body(driver: Driver, key: Key) -> Body:
    """Return the body of a conversation that exists."""
    record = await driver.load(key)
    assert record is not None
    return Codec().open_body(record.body)


async def rewrite(driver: Driver, key: Key, **changes: object) -> None:
    """Store the body under another version, as another process does, with some fields changed."""
    record = await driver.load(key)
    assert record is not None
    body = Codec().seal_body(replace(Codec().open_body(record.body), **changes))
    assert await driver.replace(key, body, version=new_version(), expect=record.version, ttl=KEEP)


def without_lease(record: Record) -> Record:
    """Return a record of a conversation as if nobody had the lease."""
    if record.body is None:
        return record
    body = replace(Codec().open_body(record.body), lease=None)
    return replace(record, body=Codec().seal_body(body))


async def take(driver: Driver, key: Key, *, at: float = 1e12, ttl: float = 1e6) -> None:
    """Take the lease as another process does."""
    await rewrite(driver, key, lease=Lease(at, ttl))


async def release(driver: Driver, key: Key) -> None:
    """Release the lease of the other process, or have it expire."""
    await rewrite(driver, key, lease=None)
