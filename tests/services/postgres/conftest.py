"""Servers, schemas, roles and open drivers for the tests of PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import uuid
from unittest import mock
from urllib.parse import urlsplit

import pytest

from stm_backends.testing import open_at
from tests.support.postgresql import CountingProxy, Postgres

if importlib.util.find_spec("asyncpg") is None and os.environ.get("CI", "").lower() != "true":
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter):
        terminalreporter.write_line("SKIPPED tests/services/postgres: needs the extra `postgres`")


@pytest.fixture(scope="session")
def url(postgres_url):
    """A database in which tests make schemas of their own."""
    return postgres_url


@pytest.fixture
def server(postgres_binaries, postgres_folder):
    """A server that a test may kill or stop, with everything durable."""
    server = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex)
    server.start()
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.go_on()
    server.stop()


@pytest.fixture(scope="session")
def proxy(url):
    parts = urlsplit(url)
    with CountingProxy(f"{parts.hostname}:{parts.port or 5432}") as proxy:
        yield proxy


@pytest.fixture(scope="session")
def through_proxy(url, proxy):
    """The same database, by way of the proxy, without TLS, so that it can be counted."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    place = f"{user}@127.0.0.1:{proxy.port}" if user else f"127.0.0.1:{proxy.port}"
    return parts._replace(netloc=place, query="sslmode=disable").geturl()


@pytest.fixture
async def admin(url):
    """A connection past the driver, as the owner of the database."""
    import asyncpg  # noqa: PLC0415 -- absent where these tests are not run

    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


@pytest.fixture
async def schema(admin):
    """The name of a schema that is not there yet, and is gone afterwards."""
    name = "stm_test_" + uuid.uuid4().hex[:12]
    yield name
    await admin.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest.fixture
async def driver(url, schema):
    """An open driver on new tables."""
    driver = await open_at(url, schema=schema, create=True)
    yield driver
    await driver.close()


@pytest.fixture
async def role(admin, schema):
    """Makes roles that own nothing and may do what the README says; returns a function of a name's end."""
    made = []

    async def make(suffix, rights="SELECT, INSERT, UPDATE, DELETE"):
        name = f"{schema}_{suffix}"
        made.append(name)
        await admin.execute(f"CREATE ROLE {name} LOGIN")
        if rights:
            await admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
            await admin.execute(f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO {name}")
        return name

    yield make
    for name in made:
        await admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.fixture
async def clock():
    """Moves the event loop's clock, as drivers see it."""
    loop = asyncio.get_running_loop()
    real, later = loop.time, 0.0

    def advance(seconds):
        nonlocal later
        later += seconds

    with mock.patch.object(loop, "time", side_effect=lambda: real() + later):
        yield advance
