"""What tests of PostgreSQL do on their way."""

import asyncio
import uuid
from unittest import mock
from urllib.parse import urlsplit

import asyncpg

from stm_backends.driver import ANY, Key


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
    """Have a connection of the driver learn every statement, those that purge in passing included."""
    key = Key("warm", f"{id(driver)}")
    for purging in (False, True):
        with mock.patch("stm_backends_postgres.driver._is_purging", return_value=purging):
            await driver.append(key, b"", birth="birth", ttl=1)
            await driver.replace(key, b"", version="v2", expect="birth", drop=1, ttl=1)
            await driver.replace(key, b"", version="v3", expect=ANY, ttl=1)
        await driver.load(key)
        await driver.scan("warm", limit=1)
        await driver.delete(key)


def as_user(url, user):
    """Return the URL of the same database for somebody else."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()
