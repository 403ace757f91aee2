"""Which users may do what, by password and over TLS."""

from __future__ import annotations

import gc
import re
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from stm_backends import open_backend
from stm_backends.drivers.contract import Key
from stm_backends.errors import ConfigurationError, Denied, OutcomeUnknown, Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.faults import Proxy
from stm_backends_redis import RedisDriver
from tests.services.redis.conftest import PERMISSIONS, README, login
from tests.services.redis.test_errors import KEY, refused
from tests.support.redis_server import RedisServer
from tests.support.tenants import SMALL, serve

PATIENT = "deadline_s=30&connect_timeout_s=15"
"""So that a busy machine has time for a TLS handshake."""


@pytest.fixture
def port(redis_url, server_tls):
    """Where on the loopback the shared server is, over TLS alone."""
    parts = urlsplit(redis_url)
    # Redis speaks TLS from the first byte, so another program can terminate it.
    with Proxy(f"{parts.hostname or 'localhost'}:{parts.port or 6379}", tls=server_tls) as front:
        yield front.port


async def test_a_server_is_trusted_by_its_certificate_alone(port, authority, other_authority):
    driver = await open_at(f"rediss://localhost:{port}?{PATIENT}&tls_ca_file={authority}")
    key = Key("scope", f"over TLS at {port}")
    assert await driver.append(key, b"a", initial_version="initial", ttl=60) == 1
    assert await driver.delete(key) is True
    await driver.close()
    for url, says in (
        (f"rediss://localhost:{port}?{PATIENT}", "not trusted here"),
        (f"rediss://localhost:{port}?{PATIENT}&tls_ca_file={other_authority}", "not trusted here"),
        (f"rediss://127.0.0.1:{port}?{PATIENT}&tls_ca_file={authority}", "for another host name"),
    ):
        with pytest.raises(Unavailable, match=f"no connection .*certificate is {says}"):
            await open_at(url)
    unchecked = f"rediss://127.0.0.1:{port}?{PATIENT}&tls_ca_file={authority}&tls_check_hostname=false"
    await (await open_at(unchecked)).close()


async def test_a_file_for_tls_that_cannot_be_used_is_named(authority, tmp_path):
    (tmp_path / "empty.pem").touch()
    for given, says in (
        (f"tls_ca_file={tmp_path}/none.pem", "tls_ca_file names a file that cannot be read"),
        (f"tls_ca_file={tmp_path}/empty.pem", "tls_ca_file names a file that holds no certificate"),
        (
            f"tls_ca_file={authority}&tls_key_file={tmp_path}/none.pem",
            "tls_key_file names a file that cannot",
        ),
    ):
        with pytest.raises(ConfigurationError, match=says) as caught:
            await open_at(f"rediss://localhost:1?{given}")
        assert "none.pem" not in str(caught.value)


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
    server.ask("ACL", "SETUSER", "mute", "on", ">p", "~stm:*", "+@all", "-evalsha")
    mute = await open_at(server.url, **login("mute"))
    with pytest.raises(Denied, match="this user lacks permission for the command 'evalsha'"):
        await mute.load(KEY)
    await mute.close()
    assert await narrow.load(KEY) is None, "what was denied has changed nothing"
    await narrow.close()
    outside = await open_at(server.url, **login("narrow"), key_prefix="other:")
    with pytest.raises(Denied, match="this user"):
        await outside.load(KEY)
    await outside.close()
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


TENANT = re.findall(r"```\n(~stm:\{acme:\S+)\n```", README)[0]
"""The pattern of one tenant's keys, from the README."""


def only(server: RedisServer, name: str, pattern: str, *more: str) -> None:
    """Make a user who may use the keys of a pattern alone."""
    server.ask("ACL", "SETUSER", name, "reset", "on", ">p", pattern, *PERMISSIONS, *more)


def denied(server: RedisServer) -> list[bytes]:
    """Return what was denied, except CLIENT SETINFO, by which the client library introduces itself."""
    return [one[b"object"] for one in server.ask("ACL", "LOG") if one[b"object"] != b"client"]


async def test_a_user_of_one_tenant_is_served_and_denied_all_others(server):
    only(server, "acme", TENANT)
    server.ask("ACL", "LOG", "RESET")
    async with open_backend(server.url, **login("acme"), max_entry_bytes=SMALL) as backend:
        assert denied(server) == [], "opening asks for nothing that is denied"
        await serve(backend, "acme")
        # An erasure asks for states that may be of this tenant or of another, and for notes of work, and goes
        # on without them.
        assert sorted(denied(server)) == [b"stm:{::blob}", b"stm:{::work}"]
        receipt = await backend.sessions.erase_with_receipt("acme", "u1")
        assert (receipt.found, receipt.undecided) == ({}, None)
        for other in ("acme2", "ac", "victim", "a:acme"):
            for work in (
                lambda other=other: backend.driver.load(Key(f"{other}:u:memory", "n")),
                lambda other=other: backend.driver.scan(f"{other}:u:memory", limit=1),
                lambda other=other: serve(backend, other),
                lambda other=other: backend.sessions.erase_tenant(other),
            ):
                with pytest.raises(Denied, match="this user"):
                    await work()
        with pytest.raises(Denied, match="this user"):
            await backend.ping()
        assert await backend.ping("acme") > 0
        with pytest.raises(Denied, match="this user"):
            await backend.ping("victim")
        with pytest.raises(Denied, match="this user"):
            await backend.state_store.load_planner_state("token")
    assert server.ask("DBSIZE") == 0


@pytest.mark.parametrize(
    ("tenant", "written"),
    [
        ("a:b", "a%253Ab"),
        ("100%", "100%2525"),
        ("a}b", "a%7Db"),
        ("a*?[b]^", r"a\*\?\[b\]\^"),
        ("a\\", r"a\\"),
    ],
)
async def test_a_tenant_is_written_in_a_pattern_as_the_readme_says(server, tenant, written):
    only(server, "one", TENANT.replace("acme", written))
    async with open_backend(server.url, **login("one"), max_entry_bytes=SMALL) as backend:
        await serve(backend, tenant)
        with pytest.raises(Denied):
            await serve(backend, "ab")


async def test_a_user_of_one_tenant_may_wait_and_use_a_client(server):
    only(server, "acme", TENANT)
    with pytest.raises(Denied, match="this user"):
        await open_at(server.url, **login("acme"), wait_replicas=1)
    only(server, "acme", TENANT, "+wait")
    driver = await open_at(server.url, **login("acme"), wait_replicas=1, deadline_s=2)
    with pytest.raises(OutcomeUnknown, match="not confirmed in time"):
        await driver.append(Key("acme:u:memory", "n"), b"a", initial_version="v", ttl=60)
    await driver.close()
    async with (
        Redis(port=server.port, protocol=3, **login("acme")) as client,
        open_backend("redis", client=client, max_entry_bytes=SMALL) as backend,
    ):
        await backend.sessions.erase_tenant("acme")
        await serve(backend, "acme")


async def test_paused_runs_need_the_pattern_that_the_readme_names(server):
    (pattern,) = re.findall(r"`(~stm:\{::planner\S+)`", README)
    only(server, "acme", TENANT, pattern)
    async with open_backend(server.url, **login("acme")) as backend:
        run = {"step": 1, "tool_context": {"tenant_id": "acme", "user_id": "u1"}}
        await backend.state_store.save_planner_state("token", run)
        assert await backend.state_store.load_planner_state("token") == run
        with pytest.raises(Denied, match="this user"):
            await backend.state_store.save_planner_state("of the tenant `default`", {"step": 1})
        assert await backend.state_store.load_planner_state("of the tenant `default`") is None


class Broken(CredentialProvider):
    """A source of credentials that fails for a while."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def get_credentials(self) -> tuple[str]:
        if self.error is not None:
            raise self.error
        return ("right",)


class PanicException(BaseException):
    """As an extension in Rust raises it."""


@pytest.mark.parametrize("connections", [None, 2], ids=["shared", "one by one"])
@pytest.mark.parametrize("error", [LookupError, PanicException])
async def test_credentials_that_fail_are_unavailable_and_not_quoted(start, caplog, error, connections):
    server = start()
    server.ask("CONFIG", "SET", "requirepass", "right")
    provider = Broken(error("hunter2"))
    given = {"credential_provider": provider, "max_connections": connections}
    async with Redis(port=server.port, **given) as client:
        driver = RedisDriver(client=client)
        with pytest.raises(Unavailable, match=error.__name__) as caught:
            await driver.append(KEY, b"a", initial_version="v", ttl=60)
        assert "hunter2" not in str(caught.value)
        provider.error = None
        assert await driver.append(KEY, b"a", initial_version="v", ttl=60) == 1
        await driver.close()
    gc.collect()
    assert "hunter2" not in caplog.text
