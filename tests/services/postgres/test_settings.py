"""What a PostgreSQL URL says, what it cannot say, and that a password is never shown."""

import ssl
import subprocess
import sys

import pytest

from stm_backends import open_backend
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import ConfigurationError, MissingExtra
from stm_backends_postgres import PostgresSettings
from stm_backends_postgres.plugin import schema


@pytest.mark.parametrize(
    ("url", "dsn"),
    [
        ("postgresql://host/db", "postgresql://host/db"),
        ("postgres://u:p%40ss@host:6432/db", "postgresql://u:p%40ss@host:6432/db"),
        ("postgresql://one:1,two:2/db?target_session_attrs=primary&schema=mine", None),
        ("postgresql:///db?host=/run/postgresql", "postgresql:///db?host=%2Frun%2Fpostgresql"),
        ("postgresql://%2Frun%2Fpostgresql/db", "postgresql://%2Frun%2Fpostgresql/db"),
        ("postgresql://[::1]:5432/db?sslmode=verify-full&sslrootcert=ca.pem", None),
    ],
)
def test_a_url_is_left_to_asyncpg_but_for_settings_of_ours(url, dsn):
    settings = PostgresSettings.from_url(url)
    assert "schema" not in settings.dsn
    if dsn:
        assert settings.dsn == dsn


def test_settings_follow_as_parameters():
    settings = PostgresSettings.from_url(
        "postgresql://host/db?schema=mine&pool_size=3&synchronous_commit=off&deadline_s=2.5"
        "&max_entry_bytes=10&max_record_bytes=20&row_security=setting&tenant=acme&application_name=app"
    )
    assert settings == PostgresSettings(
        dsn="postgresql://host/db?application_name=app",
        schema="mine",
        pool_size=3,
        synchronous_commit="off",
        deadline_s=2.5,
        max_entry_bytes=10,
        max_record_bytes=20,
        row_security="setting",
        tenant="acme",
    )
    assert settings.server_settings() == {
        "synchronous_commit": "off",
        "client_min_messages": "warning",
        "default_transaction_isolation": "read committed",
        "statement_timeout": "1250",
        "enable_seqscan": "off",
        "jit": "off",
        "stm.tenant": "acme",
    }
    assert PostgresSettings.from_url("postgresql://h?pgbouncer=true").server_settings() == {}


@pytest.mark.parametrize(
    ("query", "near"),
    [("shema=x", "schema"), ("ssl_mode=require", "sslmode"), ("poolsize=3", "pool_size")],
)
def test_an_unknown_parameter_is_refused_with_a_near_miss(query, near):
    with pytest.raises(ConfigurationError, match=f"did you mean '{near}'"):
        PostgresSettings.from_url(f"postgresql://host/db?{query}")


def test_an_unknown_option_is_refused_with_a_near_miss():
    with pytest.raises(ConfigurationError, match="did you mean 'schema'"):
        open_backend("postgres", url="postgresql://host", shema="x")


@pytest.mark.parametrize(
    "url",
    [
        "postgres:/someone:hunter2@host",
        "postgresql:someone:hunter2@host",
        "mysql://someone:hunter2@host",
        "postgresql://someone:hunter2@host:port/db",
        "postgresql://someone:hunter2@host:0/db",
        "postgresql://someone:hunter2@host/db#fragment",
        "postgresql://someone:hunter2@host/db?port=hunter2",
        "postgresql://someone:hunter2@host/db?sslmode=verify",
        "postgresql://someone:hunter2@host/db?user=a&user=b",
        "postgresql://someone:hunter2@host/db?schema=a&schema=b",
        "postgresql://someone:hunter2@[host/db",
        "postgresql://someone:so?hunter2@host/db",
        "postgresql://someone:hunter2@host/db?pgbouncer=yes",
        "postgresql://someone:hunter2@host/db?pgbouncer=true&synchronous_commit=off",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_showing_its_password(url):
    with pytest.raises(ConfigurationError) as caught:
        PostgresSettings.from_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"schema": "no space"},
        {"schema": 'in"jection'},
        {"schema": "1st"},
        {"schema": "pg_mine"},
        {"schema": "x" * 64},
        {"schema": ""},
        {"schema": None},
        {"pool_size": 0},
        {"pool_size": "3"},
        {"synchronous_commit": "yes"},
        {"row_security": True},
        {"row_security": "role", "tenant": "acme"},
        {"row_security": "setting", "tenant": ""},
        {"row_security": "setting", "tenant": "a\nb"},
        {"tenant": "acme"},
        {"pgbouncer": "true"},
        {"pgbouncer": True, "row_security": "setting", "tenant": "acme"},
        {"deadline_s": 0},
        {"max_entry_bytes": 2, "max_record_bytes": 1},
        {"password": 5},
        {"ssl": True},
    ],
)
def test_a_setting_that_cannot_work_is_refused(options):
    with pytest.raises(ConfigurationError):
        PostgresSettings.from_options(**options)


def test_what_is_given_twice_is_refused():
    url = "postgresql://someone:hunter2@host/db?sslmode=require&schema=one"
    for options in (
        {"password": "other"},
        {"ssl": ssl.create_default_context()},
        {"schema": "two"},
        {"client": object()},
    ):
        with pytest.raises(ConfigurationError) as caught:
            open_driver("postgres", url=url, **options)
        assert "hunter2" not in str(caught.value)


def test_no_repr_shows_a_password():
    settings = PostgresSettings.from_url("postgresql://someone:hunter2@host/db?sslpassword=hunter2")
    assert "hunter2" not in repr(settings) + str(settings)
    assert "hunter2" not in repr(PostgresSettings(password="hunter2"))  # noqa: S106 -- a sample
    backend = open_backend("postgresql://someone:hunter2@host/db")
    assert "hunter2" not in repr(backend) + repr(backend.driver) + repr(backend.traits)


def test_the_schema_is_text_that_needs_neither_server_nor_client_library():
    text = schema("postgresql://host/db?schema=Mine")
    assert text.startswith("BEGIN;\n")
    assert 'CREATE TABLE IF NOT EXISTS "Mine".stm_record (' in text
    assert "CREATE POLICY" not in text
    assert "CREATE POLICY stm_tenant" in schema(None, row_security="role")
    assert "current_setting('stm.tenant')" in schema("postgres://h?row_security=setting")


def test_importing_the_package_imports_no_client_library():
    program = (
        "import sys, stm_backends_postgres as p, stm_backends_postgres.plugin as q; q.schema(None); "
        "q.stm_backend(); p.PostgresSettings(); assert 'asyncpg' not in sys.modules; "
        "p.PostgresStateStore, p.PostgresDriver; assert 'asyncpg' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_the_client_library_opening_says_what_to_install(monkeypatch):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "asyncpg" else real(name))
    with pytest.raises(MissingExtra, match=r'stm-backends\[postgres\].*: pip install "asyncpg>='):
        open_backend("postgresql://host/db")


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import stm_backends_postgres  # noqa: PLC0415

    with pytest.raises(AttributeError, match="PostgressDriver"):
        _ = stm_backends_postgres.PostgressDriver


@pytest.mark.parametrize(
    ("url", "environment", "is_open"),
    [
        ("postgresql://app@db.example/agents", {}, True),
        ("postgresql://app@db.example/agents?sslmode=prefer", {}, True),
        ("postgresql://app@db.example/agents?sslmode=allow", {}, True),
        ("postgresql://app@db.example/agents", {"PGSSLMODE": "prefer"}, True),
        ("postgresql://app@localhost,db.example:5433/agents", {}, True),
        ("postgresql://app@[2001:db8::1]:5432/agents", {}, True),
        ("postgresql:///agents?host=db.example", {}, True),
        ("postgresql:///agents", {"PGHOST": "db.example"}, True),
        ("postgresql://app@localhost.example/agents", {}, True),
        ("postgresql://app@127.0.0.1.example/agents", {}, True),
        ("postgresql://app@db.example/agents?sslmode=require", {}, False),
        ("postgresql://app@db.example/agents?sslmode=verify-full", {}, False),
        ("postgresql://app@db.example/agents?sslmode=disable", {}, False),
        ("postgresql://app@db.example/agents", {"PGSSLMODE": "verify-full"}, False),
        ("postgresql://app@db.example/agents?service=main", {}, False),
        ("postgresql://app:p%40ss@localhost:5432/agents", {}, False),
        ("postgresql://app@127.3.2.1/agents", {}, False),
        ("postgresql://app@[::1]/agents", {}, False),
        ("postgresql://app@%2Frun%2Fpostgresql/agents", {}, False),
        ("postgresql:///agents?host=/run/postgresql", {}, False),
        ("postgresql:///agents", {}, False),
    ],
)
def test_a_connection_that_others_may_read_is_known_as_such(monkeypatch, url, environment, is_open):
    for name in ("PGSSLMODE", "PGHOST", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert PostgresSettings.from_url(url).is_open_to_others is is_open


def test_a_context_of_ones_own_decides_whether_a_certificate_is_checked():
    settings = PostgresSettings.from_url("postgresql://db.example/agents", ssl=ssl.create_default_context())
    assert settings.is_open_to_others is False
