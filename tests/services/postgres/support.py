"""What tests of PostgreSQL do on their way."""

import asyncio
import contextlib
import uuid
from unittest import mock
from urllib.parse import urlsplit

import asyncpg

from stm_backends.drivers.contract import ANY, Key

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1"


def run(work):
    """Run something from a fixture that is not asynchronous."""
    return asyncio.run(work)


def fresh_schema():
    """Return a name that no schema has."""
    return f"stm_test_{uuid.uuid4().hex[:12]}"


async def drop(url, schema):
    """Remove a schema and what is in it."""
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        await connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
    finally:
        await connection.close()


async def warm(driver):
    """Have a connection of the driver learn the statement of every operation."""
    key = Key("warm", f"{id(driver)}")
    for _ in range(2):  # the second append knows that the record exists
        await driver.append(key, b"", initial_version="initial", ttl=None)
    await driver.replace(key, b"", version="v2", expect="initial", drop=1, ttl=1)
    await driver.append(key, b"", initial_version="initial", ttl=None)
    await driver.replace(key, b"", version="v3", expect="v2", rewrite=(b"",), ttl=1)
    await driver.replace(key, b"", version="v4", expect=ANY, ttl=1)
    await driver.load(key)
    await driver.scan("warm", limit=1)
    await driver.delete(key)


async def started(driver, *appends):
    """Start appends that share a statement, because another is in progress; returns its task and theirs."""
    lone = driver.append(Key("scope", f"lone {id(driver)}"), b"", initial_version="v", ttl=None)
    tasks = [asyncio.ensure_future(lone)]
    await asyncio.sleep(0)
    return tasks + [asyncio.ensure_future(one) for one in appends]


async def together(driver, *appends):
    """Send appends in one statement; returns their answers and errors."""
    _, *answers = await asyncio.gather(*await started(driver, *appends), return_exceptions=True)
    return answers


@contextlib.contextmanager
def purging(*, after_writes):
    """Have writes be followed by a purge always, or never; without this it is one in so many, by chance."""

    def is_purging():
        # Not a mock, which keeps each call, and so as many objects as there are writes.
        return after_writes

    with mock.patch("stm_backends_postgres.driver._is_purging", is_purging):
        yield


def purging_at_once():
    """Have purges after writes remove what expired a moment ago, and not only what expired long ago."""
    return mock.patch("stm_backends_postgres.driver.DUE_S", 0)


@contextlib.contextmanager
def nothing_follows_writes():
    """Have drivers do nothing after an answer, as if their process had died then."""
    with mock.patch("stm_backends_postgres.cleaning.Cleaner._start", return_value=None):
        yield


async def waiting(connection, schema):
    """Return how many statements on the tables of a schema wait for a lock."""
    # Within a transaction the server would show again what it showed first.
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return await connection.fetchval(WAITING, f"%{schema}%")


async def until(look, *, within_s=30):
    """Wait until something that is asked again and again says yes: a server tells such things to no one."""
    async with asyncio.timeout(within_s):
        while not await look():  # noqa: ASYNC110 -- the event is the server's
            await asyncio.sleep(0.01)


def as_user(url, user):
    """Return the URL of the same database for another user."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()
