"""URLs as hosts print them work, or are refused by the name of the parameter that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stm_backends.drivers.settings import Settings
from stm_backends.errors import ConfigurationError
from stm_backends_mongo.settings import MongoSettings
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_redis.settings import RedisSettings

DRIVERS: Mapping[str, type[Settings]] = {
    **dict.fromkeys(("postgres", "postgresql"), PostgresSettings),
    **dict.fromkeys(("redis", "rediss"), RedisSettings),
    **dict.fromkeys(("mongodb", "mongodb+srv"), MongoSettings),
}

NEON = "postgresql://me:npg_pw@ep-cool-1.eu-central-1.aws.neon.tech/neondb?sslmode=require"
SUPABASE = "postgresql://postgres.ref:pw@aws-0-eu-central-1.pooler.supabase.com:6543/postgres"
VERCEL = "postgres://me:pw@ep-cool-1-pooler.eu.aws.neon.tech/verceldb?pgbouncer=true&connect_timeout=15"
HEROKU = "postgres://me:pw@ec2-1-2-3-4.eu-west-1.compute.amazonaws.com:5432/d1"
AIVEN = "postgres://avnadmin:pw@pg-1.aivencloud.com:12691/defaultdb?sslmode=require"
RDS = "postgresql://me:pw@db.1.eu-west-1.rds.amazonaws.com:5432/db"
AZURE = "postgres://me%40server:pw@server.postgres.database.azure.com/postgres?sslmode=require"
COCKROACH = "postgresql://me:pw@free.cockroachlabs.cloud:26257/db?options=--cluster%3Dx-1"
DOCDB = "mongodb://me:pw@docdb.cluster-1.eu-west-1.docdb.amazonaws.com:27017/?tls=true&replicaSet=rs0"
ATLAS = "mongodb+srv://me:pw@cluster0.abcd.mongodb.net/?retryWrites=true&w=majority&appName=Cluster0"
COSMOS = "mongodb://me:a2V5==@me.mongo.cosmos.azure.com:10255/?ssl=true&replicaSet=globaldb&appName=@me@"
VCORE = "mongodb+srv://me:pw@x.mongocluster.cosmos.azure.com/?tls=true&authMechanism=SCRAM-SHA-256"


def dsn(url: str) -> str:
    """Return a URL without its query, as asyncpg is given it."""
    return url.partition("?")[0].replace("postgres:", "postgresql:")


def read(url: str) -> Any:
    return DRIVERS[url.partition(":")[0]].from_url(url)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (NEON, {"dsn": NEON}),
        (f"{NEON}&options=endpoint%3Dep-cool-1", {"dsn": f"{NEON}&options=endpoint%3Dep-cool-1"}),
        (f"{SUPABASE}?pgbouncer=true", {"pgbouncer": True, "dsn": SUPABASE}),
        (VERCEL, {"connect_timeout_s": 15.0, "pgbouncer": True, "dsn": dsn(VERCEL)}),
        (f"{HEROKU}?connect_timeout=0", {"connect_timeout_s": None, "dsn": dsn(HEROKU)}),
        (AIVEN, {"is_open_to_others": False}),
        (f"{RDS}?sslmode=verify-full&sslrootcert=global-bundle.pem", {"trusts_system": False}),
        (f"{RDS}?sslrootcert=system", {"trusts_system": True, "is_open_to_others": False}),
        (f"{RDS}?sslmode=verify-full&sslrootcert=system", {"trusts_system": True}),
        (AZURE, {"dsn": f"{dsn(AZURE)}?sslmode=require"}),
        (COCKROACH, {"dsn": COCKROACH}),
        (
            "rediss://default:pw@eu1-x-1.upstash.io:6379",
            {"tls": True, "username": "default", "password": "pw"},
        ),
        (
            "redis://default:pw@redis-1.c1.eu.ec2.redis-cloud.com:12345",
            {"hosts": (("redis-1.c1.eu.ec2.redis-cloud.com", 12345),)},
        ),
        ("rediss://:a%3Cb>c@host", {"password": "a<b>c"}),
        ("rediss://:pw%3D@me.redis.cache.windows.net:6380/0", {"password": "pw=", "username": ""}),
        (
            f"{DOCDB}&retryWrites=false",
            {
                "database": "stm",
                "given_options": {"tls": "true", "replicaSet": "rs0", "retryWrites": "false"},
            },
        ),
        (ATLAS, {"given_options": {"retryWrites": "true", "w": "majority", "appName": "Cluster0"}}),
        (
            f"{COSMOS}&retrywrites=false&maxIdleTimeMS=120000",
            {"url": f"{COSMOS}&retrywrites=false&maxIdleTimeMS=120000"},
        ),
        (f"{VCORE}&retrywrites=false", {"url": f"{VCORE}&retrywrites=false"}),
    ],
)
def test_a_url_as_a_host_prints_it_works(url: str, found: dict[str, Any]) -> None:
    settings = read(url)
    assert {name: getattr(settings, name) for name in found} == found


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"{NEON}&channel_binding=require", "channel_binding cannot be given here: .*sslrootcert=system"),
        (f"{SUPABASE}?pgbouncer=true&connection_limit=1", "connection_limit .*: pool_size"),
        (SUPABASE.replace(":pw@", ":[YOUR-PASSWORD]@"), "a placeholder such as"),
        (f"{HEROKU}?ssl=true", "ssl cannot be given here: sslmode=require"),
        (f"{HEROKU}?sslmode=no-verify", "sslmode must be one of"),
        (f"{RDS}?keepalives_idle=30", "keepalives_idle cannot be given here: .*deadline_s"),
        (f"{RDS}?sslmode=require&sslrootcert=system", "sslrootcert=system needs sslmode=verify-full"),
        (f"{RDS}?sslcert=me.pem&sslrootcert=system", "without sslcert; pass ssl="),
        (f"{RDS}?connect_timeout=soon", "connect_timeout_s in the URL is not a number"),
        (f"{RDS}?connect_timeout=-1", "connect_timeout_s must be a positive number"),
        (f"{DOCDB}&readPreference=secondaryPreferred", "leave out readPreference: nothing is read"),
        (f"{DOCDB}&ssl_ca_certs=rds.pem", "ssl_ca_certs cannot be given here: tlsCAFile"),
        (ATLAS.replace(":pw@", ":<db_password>@"), "the password belongs"),
        (NEON.replace(":npg_pw@", ":<password>@"), "the password belongs"),
        ("redis://default:<password>@host:6379/0", "the password belongs"),
        ("rediss://<user>:pw@host", "the user or the password belongs"),
        ("rediss://:a<b>c@host", "write %3C for a < that is part of it"),
        (
            "rediss://:pw@ec2-1.compute.amazonaws.com:6380?ssl_cert_reqs=none",
            "ssl_cert_reqs .*: .*tls_ca_file",
        ),
        ("redis://host?socket_timeout=5", "socket_timeout cannot be given here: deadline_s"),
        ("redis://host?db=3", "db cannot be given here: the database is the URL's path"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        read(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("character", "@:/?#[]&%;=+ ")
@pytest.mark.parametrize("scheme", ["postgresql", "redis", "mongodb"])
@pytest.mark.parametrize("password", ["pw{}hunter", "12{}z4", "{}hunter", "hunter{}"])
def test_a_password_that_is_not_encoded_works_or_is_recognized(
    scheme: str, character: str, password: str
) -> None:
    written = password.format(character)
    try:
        settings = read(f"{scheme}://me:{written}@host:1234/0")
    except ConfigurationError as error:
        refusal = str(error)
    else:
        # Others of MongoDB are refused by PyMongo.
        assert (
            written
            in {
                "redis": lambda: settings.password,
                "postgresql": lambda: settings.dsn.replace("%40", "@"),
                "mongodb": lambda: settings.url,
            }[scheme]()
        )
        return
    assert "percent-encode" in refusal or "as %" in refusal
    assert written not in refusal
