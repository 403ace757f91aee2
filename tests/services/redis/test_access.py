"""Over TLS, with an authority of one's own."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.errors import Unavailable
from stm_backends.testing import open_at
from tests.support.servers import Proxy


@pytest.fixture
def port(redis_url, server_tls):
    """Where on the loopback the shared server is, over TLS alone."""
    parts = urlsplit(redis_url)
    # Redis speaks TLS from the first byte, so that whoever ends it may be another program.
    front = Proxy(parts.hostname or "localhost", parts.port or 6379, tls=server_tls)
    front.start()
    yield front.port
    front.stop()


async def test_a_server_is_trusted_by_its_certificate_and_by_nothing_less(port, authority, other_authority):
    driver = await open_at(f"rediss://localhost:{port}?tls_ca_file={authority}")
    key = Key("scope", f"over TLS at {port}")
    assert await driver.append(key, b"a", initial_version="initial", ttl=60) == 1
    assert await driver.delete(key) is True
    await driver.close()
    for url in (
        f"rediss://localhost:{port}",
        f"rediss://localhost:{port}?tls_ca_file={other_authority}",
        f"rediss://127.0.0.1:{port}?tls_ca_file={authority}",
    ):
        with pytest.raises(Unavailable, match="no connection"):
            await open_at(url)
    unchecked = f"rediss://127.0.0.1:{port}?tls_ca_file={authority}&tls_check_hostname=false"
    await (await open_at(unchecked)).close()


async def test_who_does_not_speak_tls_to_a_server_that_does_is_unavailable(port):
    with pytest.raises(Unavailable):
        await open_at(f"redis://127.0.0.1:{port}?deadline_s=2")
