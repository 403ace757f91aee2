"""Which users may do what, by password and over TLS."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.errors import Denied, Unavailable
from stm_backends.testing import open_at
from tests.services.redis.conftest import PERMISSIONS, login
from tests.services.redis.test_errors import KEY, refused
from tests.support.servers import Proxy

PATIENT = "deadline_s=30&connect_timeout_s=15"
"""So that a busy machine has time for a TLS handshake."""


@pytest.fixture
def port(redis_url, server_tls):
    """Where on the loopback the shared server is, over TLS alone."""
    parts = urlsplit(redis_url)
    # Redis speaks TLS from the first byte, so another program can terminate it.
    front = Proxy(parts.hostname or "localhost", parts.port or 6379, tls=server_tls)
    front.start()
    yield front.port
    front.stop()


async def test_a_server_is_trusted_by_its_certificate_alone(port, authority, other_authority):
    driver = await open_at(f"rediss://localhost:{port}?{PATIENT}&tls_ca_file={authority}")
    key = Key("scope", f"over TLS at {port}")
    assert await driver.append(key, b"a", initial_version="initial", ttl=60) == 1
    assert await driver.delete(key) is True
    await driver.close()
    for url in (
        f"rediss://localhost:{port}?{PATIENT}",
        f"rediss://localhost:{port}?{PATIENT}&tls_ca_file={other_authority}",
        f"rediss://127.0.0.1:{port}?{PATIENT}&tls_ca_file={authority}",
    ):
        with pytest.raises(Unavailable, match="no connection"):
            await open_at(url)
    unchecked = f"rediss://127.0.0.1:{port}?{PATIENT}&tls_ca_file={authority}&tls_check_hostname=false"
    await (await open_at(unchecked)).close()


async def test_a_client_without_tls_is_refused_as_unavailable(port):
    with pytest.raises(Unavailable):
        await open_at(f"redis://127.0.0.1:{port}?deadline_s=2")


async def test_the_permissions_of_the_readme_are_enough_and_fewer_are_denied(start):
    server = start()
    with pytest.raises(Denied, match="user and password"):
        await open_at(server.url, **login("nobody"))
    server.ask("ACL", "SETUSER", "narrow", "on", ">p", "~stm:*", "+@all", "-zadd")
    narrow = await open_at(server.url, **login("narrow"))
    await refused(narrow, Denied)
    assert await narrow.load(KEY) is None, "what was denied has changed nothing"
    await narrow.close()
    with pytest.raises(Denied, match="this user"):
        await open_at(server.url, **login("narrow"), key_prefix="other:")
    server.ask("ACL", "SETUSER", "enough", "on", ">p", "~stm:*", *PERMISSIONS)
    enough = await open_at(server.url, **login("enough"))
    for ttl in (60, None):
        await enough.append(KEY, b"a", initial_version="b", ttl=ttl)
    assert await enough.replace(KEY, b"", version="r", expect="b", rewrite=(b"A",), ttl=60)
    assert await enough.replace(KEY, b"", version="v", expect="r", drop=1, ttl=60)
    assert (await enough.scan(KEY.scope, limit=1)).names == (KEY.name,)
    assert await enough.delete(KEY)
    await enough.close()
    with pytest.raises(Denied, match="this user"):
        await open_at(server.url, **login("enough"), db=1)
    server.ask("ACL", "SETUSER", "enough", "+select")
    await (await open_at(server.url, **login("enough"), db=1)).close()
    server.ask("CONFIG", "SET", "requirepass", "p")
    with pytest.raises(Denied, match="user and password"):
        await open_at(server.url)
