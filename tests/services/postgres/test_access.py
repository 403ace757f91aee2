"""Which roles may do what, by password and over TLS."""

import asyncio
import contextlib
import gc
import random
import re
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import ConfigurationError, Denied, StorageError, Unavailable
from stm_backends.testing import open_at
from stm_backends_postgres import PostgresDriver, PostgresSettings
from tests.mutants.postgres import RaisesWhatThePoolRaises
from tests.services.postgres.support import as_user, run
from tests.support.postgresql import Postgres, TlsFront
from tests.support.tenants import SMALL, serve

README = (Path(__file__).parents[3] / "stm_backends_postgres" / "README.md").read_text("utf-8")

KEY = Key("scope", "name")
SECRET = "hunter2/:@é"  # noqa: S105 -- a sample
QUOTED = "hunter2%2F%3A%40%C3%A9"
WRONG = "swordf1sh"


@pytest.fixture(scope="module")
def primary(postgres_binaries, postgres_folder):
    """A server that asks `app` for a password."""
    server = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex, durable=False)
    server.let_in_with_passwords()
    server.start()
    run(_introduce(server.url))
    yield server
    server.kill()


async def _introduce(url):
    connection = await asyncpg.connect(url)
    await connection.execute(
        f"CREATE ROLE app LOGIN PASSWORD '{SECRET}'; GRANT CREATE ON SCHEMA public TO app"
    )
    await connection.close()


def app(server, password=None):
    secret = f":{password}" if password else ""
    return f"postgresql://app{secret}@127.0.0.1:{server.port}/postgres"


@pytest.mark.parametrize("way", ["in the URL", "as an option", "by a function"])
async def test_a_password_lets_in_however_it_is_given(primary, way):
    options = {"as an option": {"password": SECRET}, "by a function": {"password": lambda: SECRET}}
    url = app(primary, QUOTED if way == "in the URL" else None)
    driver = await open_at(url, create=True, **options.get(way, {}))
    assert await driver.replace(KEY, b"a", version="v1", expect=ANY, ttl=None) is True
    assert "hunter2" not in repr(driver)
    await driver.close()


class PanicException(BaseException):
    """As an extension in Rust raises it."""


def fails(error):
    def password():
        raise error(WRONG)

    return password


async def never():
    await asyncio.sleep(3600)


PASSWORDS = {
    "raises": (fails(LookupError), "LookupError"),
    "panics": (fails(PanicException), "raised PanicException"),
    "is cancelled": (fails(asyncio.CancelledError), "cancelled from within"),
    "hangs": (never, "TimeoutError"),
    "nothing": (lambda: None, "it returned NoneType, not a text"),
    "bytes": (WRONG.encode, "it returned bytes, not a text"),
}


@pytest.mark.parametrize(("password", "named"), PASSWORDS.values(), ids=PASSWORDS.keys())
async def test_a_function_for_the_password_that_fails_is_named(primary, password, named, caplog):
    with pytest.raises(Unavailable, match=rf"the function `password` failed .*{named}") as caught:
        await open_at(app(primary), password=password, deadline_s=2.0)
    assert WRONG not in str(caught.value)
    gc.collect()
    assert WRONG not in caplog.text


async def test_a_pool_whose_function_fails_is_unavailable(primary):
    answers = [SECRET]
    pool = await asyncpg.create_pool(app(primary), password=lambda: answers[0], min_size=0)
    backend = open_backend("postgres", client=pool, create=True)
    await backend.open()
    await pool.expire_connections()
    answers.clear()
    with pytest.raises(Unavailable, match="IndexError"):
        await backend.driver.append(KEY, b"a", initial_version="v", ttl=None)
    await backend.close()
    await pool.close()


@pytest.mark.parametrize("password", [WRONG, None], ids=["wrong", "none"])
async def test_a_wrong_password_is_denied_and_shown_nowhere(primary, password):
    with pytest.raises(Denied) as caught:
        await open_at(app(primary, password))
    error = caught.value
    assert error.operation == "open"
    for shown in (str(error), repr(error), repr(error.__cause__)):
        assert WRONG not in shown


async def test_a_changed_password_denies_the_next_connection(primary):
    driver = await open_at(app(primary, QUOTED), create=True, pool_size=1)
    await driver.replace(KEY, b"a", version="v1", expect=ANY, ttl=None)
    admin = await asyncpg.connect(primary.url)
    await admin.execute(f"ALTER ROLE app PASSWORD '{WRONG}'")
    await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
    try:
        # The first to come finds the connection that was ended.
        with pytest.raises(StorageError):
            await driver.load(KEY)
        with pytest.raises(Denied):
            await driver.load(KEY)
    finally:
        await admin.execute(f"ALTER ROLE app PASSWORD '{SECRET}'")
        await admin.close()
    assert await driver.load(KEY) == Record("v1", b"a", ())
    await driver.close()


@pytest.fixture
def over_tls(url, server_tls):
    """The port of the loopback where the shared server is, over TLS alone."""
    parts = urlsplit(url)
    with TlsFront(f"{parts.hostname}:{parts.port or 5432}", tls=server_tls) as front:
        yield front.port


async def test_a_server_is_trusted_by_its_certificate_alone(url, schema, over_tls, authority):
    user = urlsplit(url).netloc.rpartition("@")[0]

    def at(host, mode, trusted=authority):
        options = f"sslmode={mode}&sslrootcert={trusted}&schema={schema}"
        return f"postgresql://{user}@{host}:{over_tls}{urlsplit(url).path}?{options}"

    for place in (at("localhost", "verify-full"), at("127.0.0.1", "verify-ca")):
        driver = await open_at(place, create=True)
        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
        await driver.close()
    with pytest.raises(Unavailable, match="certificate is for another host name"):
        await open_at(at("127.0.0.1", "verify-full"))
    with pytest.raises(Unavailable):
        await open_at(at("localhost", "disable"))


async def test_the_systems_authorities_are_trusted_if_the_url_says_so(
    url, schema, over_tls, authority, monkeypatch
):
    user = urlsplit(url).netloc.rpartition("@")[0]
    place = f"postgresql://{user}@localhost:{over_tls}{urlsplit(url).path}?sslrootcert=system&schema={schema}"
    with pytest.raises(Unavailable, match="certificate is not trusted"):
        await open_at(place, create=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    await (await open_at(place, create=True)).close()
    with pytest.raises(Unavailable, match="certificate is for another host name"):
        await open_at(place.replace("localhost", "127.0.0.1"))


async def test_a_file_for_tls_that_cannot_be_used_is_named(url, over_tls, authority, tmp_path):
    (tmp_path / "empty.pem").touch()
    for given, says in (
        (f"sslrootcert={tmp_path}/none.pem", "sslrootcert names a file that cannot be read"),
        (f"sslrootcert={tmp_path}/empty.pem", "sslrootcert names a file that holds no certificate"),
        (f"sslrootcert={authority}&sslcert={tmp_path}/none.pem", "sslcert names a file that cannot be read"),
        ("", "sslmode=verify-full needs sslrootcert=FILE or sslrootcert=system"),
    ):
        with pytest.raises(ConfigurationError, match=says) as caught:
            await open_at(f"postgresql://postgres@localhost:{over_tls}/postgres?sslmode=verify-full&{given}")
        assert "none.pem" not in str(caught.value)


async def test_an_unverified_connection_to_another_host_is_warned_of(primary, caplog):
    url = app(primary, QUOTED)
    elsewhere = url.replace("127.0.0.1", "127.1")  # the same host, by a name that is not known to be local
    await (await open_at(elsewhere, create=True)).close()
    (record,) = caplog.records
    assert "sslmode=verify-full" in record.getMessage()
    assert "hunter2" not in record.getMessage()
    caplog.clear()
    await (await open_at(url)).close()
    await (await open_at(f"{elsewhere}?sslmode=disable")).close()
    assert not caplog.records


async def test_a_certificate_of_another_authority_is_not_trusted(url, schema, over_tls, other_authority):
    place = f"postgresql://postgres@localhost:{over_tls}/postgres?sslmode=verify-full&sslrootcert={other_authority}"
    with pytest.raises(Unavailable, match="certificate"):
        await open_at(place, schema=schema)


async def test_the_permissions_of_the_readme_are_enough(url, schema, driver, role, admin):
    name = await role("app", "")
    (grants,) = re.findall(r"```sql\n(GRANT.*?)```", README, re.DOTALL)
    await admin.execute(grants.replace("memory", schema).replace("TO app", f"TO {name}"))
    async with open_backend(as_user(url, name), schema=schema, create=True, max_entry_bytes=SMALL) as backend:
        await serve(backend, "acme")
        mine = backend.driver
        assert await mine.append(KEY, b"a", initial_version="initial", ttl=None) == 1
        rewrite = mine.replace(KEY, b"b", version="v1", expect="initial", rewrite=(b"b",), ttl=None)
        assert await rewrite is True
        assert await mine.replace(KEY, b"b", version="v2", expect="v1", drop=1, ttl=None) is True
        assert await mine.scan("scope", limit=1) == (("name",), None)
        assert await mine.delete(KEY) is True


@pytest.mark.parametrize("rights", ["", "SELECT"])
async def test_a_role_without_the_rights_is_denied(url, schema, driver, role, rights):
    name = await role("app", rights)
    with pytest.raises(Denied):
        async with open_backend(as_user(url, name), schema=schema) as backend:
            await backend.driver.append(KEY, b"a", initial_version="initial", ttl=None)


@pytest.fixture
async def few(url, schema, driver, role, admin):
    """The URL of a role that may open two connections."""
    name = await role("few")
    await admin.execute(f"ALTER ROLE {name} CONNECTION LIMIT 2")
    return as_user(url, name)


async def appends_of(driver):
    appends = [driver.append(KEY, b"a", initial_version="v", ttl=None) for _ in range(20)]
    return sorted(await asyncio.gather(*appends))


async def test_a_role_with_few_connections_is_refused_no_append(few, schema):
    driver = await open_at(few, schema=schema, pool_size=10)
    try:
        assert await appends_of(driver) == list(range(1, 21))
    finally:
        await driver.close()


async def test_a_pool_handed_in_that_cannot_grow_is_refused_no_append(few, schema, caplog, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.9)  # no purge after a write, which needs a connection
    async with asyncpg.create_pool(few, min_size=1, max_size=10) as pool:
        driver = PostgresDriver(PostgresSettings(schema=schema), client=pool)
        assert await appends_of(driver) == list(range(1, 21))
        while pool.get_size() < 2:  # the server still counts those that it has just refused
            with contextlib.suppress(asyncpg.TooManyConnectionsError):
                async with pool.acquire(), pool.acquire():
                    pass
        async with pool.acquire(), pool.acquire():
            late = asyncio.create_task(driver.append(KEY, b"a", initial_version="v", ttl=None))
            await asyncio.sleep(0.1)
            assert not late.done()
        assert await late == 21, "another user of the pool gave a connection back"
        await driver.close()
    (record,) = [one for one in caplog.records if one.name == "stm_backends"]
    assert "fewer than 10 connections" in record.getMessage()


async def test_a_pool_handed_in_without_a_connection_is_unavailable(few, schema):
    async with asyncpg.create_pool(few, min_size=0, max_size=10) as pool:
        driver = PostgresDriver(PostgresSettings(schema=schema), client=pool)
        holding = [await asyncpg.connect(few) for _ in range(2)]
        with pytest.raises(Unavailable, match="accepts no more connections"):
            await driver.append(KEY, b"a", initial_version="v", ttl=None)
        for one in holding:
            await one.close()
        await driver.close()


async def test_a_pool_that_raises_when_it_cannot_grow_is_rejected(few, schema, caplog, monkeypatch):
    monkeypatch.setattr("stm_backends_postgres.driver.HandedIn", RaisesWhatThePoolRaises)
    with pytest.raises(Unavailable, match="accepts no more connections"):
        await test_a_pool_handed_in_that_cannot_grow_is_refused_no_append(few, schema, caplog, monkeypatch)


async def test_a_role_that_may_not_create_is_denied_and_creates_nothing(url, schema, role, admin):
    name = await role("app", "")
    with pytest.raises(Denied, match=f"the role may not set tables up in the schema {schema}"):
        await open_at(as_user(url, name), schema=schema, create=True)
    with pytest.raises(Denied, match=r"schema public, .* since PostgreSQL 15"):
        await open_at(as_user(url, name), create=True)
    assert await admin.fetchval("SELECT to_regnamespace($1)", schema) is None


async def test_an_unknown_role_is_denied(url):
    with pytest.raises(Denied) as caught:
        await open_at(as_user(url, "nobody:hunter2"))
    assert "hunter2" not in str(caught.value)


async def test_a_read_only_role_reads_and_its_writes_are_unavailable(url, schema, driver, role, admin):
    name = await role("app")
    await admin.execute(f"ALTER ROLE {name} SET default_transaction_read_only = on")
    async with open_backend(as_user(url, name), schema=schema) as backend:
        assert await backend.driver.load(KEY) is None
        with pytest.raises(Unavailable, match="read-only"):
            await backend.driver.append(KEY, b"a", initial_version="initial", ttl=None)
