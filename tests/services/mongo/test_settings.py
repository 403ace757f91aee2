"""What a MongoDB URL says, what it cannot say, and what never shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.common import URI_OPTIONS_VALIDATOR_MAP

from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError, MissingExtra
from stm_backends_mongo import MongoDriver, MongoSettings, open_driver
from stm_backends_mongo.client import make_client
from stm_backends_mongo.plugin import schema
from stm_backends_mongo.settings import CLIENT_OPTIONS

WORD = "s3cret"


def test_a_url_holds_our_settings_among_mongodbs_own():
    settings = MongoSettings.from_url(
        "mongodb://h1:1,h2:2/chats?replicaSet=rs0&collection=turns&deadline_s=2.5&linearizable=true"
        "&max_entry_bytes=10&max_record_bytes=20&maxPoolSize=7"
    )
    assert settings == MongoSettings(
        url="mongodb://h1:1,h2:2/chats?replicaSet=rs0&maxPoolSize=7",
        database="chats",
        collection="turns",
        deadline_s=2.5,
        linearizable=True,
        max_entry_bytes=10,
        max_record_bytes=20,
    )


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("mongodb://h", "stm"),
        ("mongodb://h/", "stm"),
        ("mongodb://h/?tls=true", "stm"),
        ("mongodb://h?tls=true", "stm"),
        ("mongodb://u:p%2Fq%3F%40@h/chats", "chats"),
        ("mongodb://[::1]:27017,[::2]:27018/chats", "chats"),
        ("mongodb://%2Ftmp%2Fmongodb-27017.sock/chats", "chats"),
        ("MONGODB://h/chats", "chats"),
        ("mongodb+srv://cluster0.example.net/chats?retryWrites=true&w=majority&appName=Cluster0", "chats"),
    ],
)
def test_a_url_as_mongodb_writes_it_is_taken(url, database):
    settings = MongoSettings.from_url(url)
    assert settings.database == database
    make_client(settings)


def test_only_reads_of_the_primary_alone_show_what_is_not_in_its_journal():
    assert MongoDriver(MongoSettings(durability="primary")).traits.shows_unconfirmed
    assert not MongoDriver(MongoSettings()).traits.shows_unconfirmed


def test_our_client_retries_no_writes_by_default():
    assert make_client(MongoSettings()).options.retry_writes is False
    assert make_client(MongoSettings.from_url("mongodb://h/?retryWrites=true")).options.retry_writes is True
    assert make_client(MongoSettings.from_options(retrywrites=True)).options.retry_writes is True


def test_options_of_the_connection_may_stand_beside_the_url():
    settings = MongoSettings.from_url(
        "mongodb://h/chats", maxPoolSize=3, authsource="admin", tls=True, username="u", password=WORD
    )
    pool = make_client(settings).options.pool_options
    assert pool.max_pool_size == 3
    assert (settings.database, settings.client_options["authSource"]) == ("chats", "admin")
    assert make_client(settings).options._options["tls"] is True  # noqa: SLF001 -- what came of it


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h", "begins with mongodb://"),
        ("mongodb:h", "begins with mongodb://"),
        ("mongodb://", "needs a host"),
        ("mongodb:///chats", "needs a host"),
        ("mongodb://h/chats#x", "%23"),
        ("mongodb://h/?tls=true;w=majority", "join options by '&'"),
        ("mongodb://h/?colection=x", "did you mean 'collection'"),
        ("mongodb://h/?maxPolSize=5", "did you mean 'maxPoolSize'"),
        ("mongodb://h/?client=x", "no such setting in a URL"),
        ("mongodb://h/?username=x", "precede the host"),
        ("mongodb://h/?collection=a&collection=b", "sets collection twice"),
        ("mongodb://h/?tls=true&TLS=true", "sets tls twice"),
        ("mongodb://h/?database=x", "the database is the URL's path"),
        ("mongodb://h/?timeoutMS=5", "deadline_s limits"),
        ("mongodb://h/?wtimeoutMS=5", "deadline_s limits"),
        ("mongodb://h/?readPreferenceTags=dc:ny", "nothing is read from a secondary"),
        ("mongodb://h/?readPreference=secondary", "leave out readPreference"),
        ("mongodb://h/?readConcernLevel=local", "the settings durability"),
        ("mongodb://h/?w=1", "the setting durability"),
        ("mongodb://h/?journal=false", "the setting durability"),
        ("mongodb://h/?durability=primary&w=majority", "the setting durability"),
        ("mongodb://h/?durability=full", "'majority' or 'primary'"),
        ("mongodb://h/?durability=primary&linearizable=true", "need durability='majority'"),
        ("mongodb://h/?linearizable=yes", "not true or false"),
        ("mongodb://h/?deadline_s=soon", "not a number"),
        ("mongodb://h/?deadline_s=0", "positive"),
        ("mongodb://h/?max_entry_bytes=0", "max_entry_bytes must be an integer between"),
        ("mongodb://h/?max_record_bytes=16777216", "max_record_bytes must be an integer between"),
        ("mongodb://h/?collection=a$b", "name of a collection"),
        ("mongodb://h/?collection=", "collection must be a name"),
        ("mongodb://h/?collection=system.users", "MongoDB's own"),
        ("mongodb://h/a.b", "name of a database"),
        ("mongodb://h/?maxPoolSize=many", "value of maxPoolSize"),
        ("mongodb://h/?tls=maybe", "value of tls"),
        ("mongodb://h/?tlsCAFile=/nowhere", "tlsCAFile names a file that cannot be read"),
        ("mongodb://h/?directConnection=true&loadBalanced=true", "does not accept this URL"),
        ("mongodb://user:pa/ss@h", "percent-encode"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(url, says):
    with pytest.raises(ConfigurationError) as caught:
        open_driver(url)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": "5"},
        {"max_entry_bytes": 0},
        {"linearizable": "yes"},
        {"database": 5},
        {"collection": None},
        {"maxPoolSize": "many"},
    ],
    ids=repr,
)
def test_an_option_of_another_type_is_refused_by_its_name(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        open_driver(None, **options)


def test_an_unknown_option_is_refused_with_a_near_miss():
    with pytest.raises(ConfigurationError, match="did you mean 'deadline_s'"):
        open_driver("mongodb://h", deadline=1)
    with pytest.raises(ConfigurationError, match="did you mean 'tlsCAFile'"):
        open_driver("mongodb://h", tls_ca_file="x")


def test_a_setting_given_differently_in_url_and_option_is_refused():
    with pytest.raises(ConfigurationError, match="give database differently"):
        MongoSettings.from_url("mongodb://h/chats", database="other")
    assert MongoSettings.from_url("mongodb://h/chats", database="chats").database == "chats"
    with pytest.raises(ConfigurationError, match="both set maxPoolSize"):
        MongoSettings.from_url("mongodb://h/?maxpoolsize=3", maxPoolSize=4)


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://user:s3cret@h/chats",
        "mongodb://h/?tlsCertificateKeyFilePassword=s3cret&tls=maybe",
        "mongodb://user:s3cret/x@h/chats",
        "mongodb://user:so?s3cret@h/chats",
        "mongodb://user:x@s3cret:s3cret/chats",
        "mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:s3cret",
        "mongodb://h/?s3crett=1&maxPolSize=s3cret",
    ],
)
def test_a_secret_never_shows(url):
    shown = ""
    try:
        shown += repr(MongoSettings.from_url(url))
        shown += repr(vars(open_driver(url))["_settings"])
    except ConfigurationError as error:
        shown += f"{error!r} {error.__cause__!r}"
    assert "s3cret" not in shown.replace("s3crett", "")
    assert "s3cret" not in repr(MongoSettings.from_options(password=WORD))


def test_the_options_that_we_pass_on_are_those_that_pymongo_knows():
    assert {name.lower() for name in CLIENT_OPTIONS} <= URI_OPTIONS_VALIDATOR_MAP.keys()


async def test_a_client_that_is_handed_in_brings_its_own_connection():
    async with AsyncMongoClient("mongodb://h") as client:
        assert open_driver(None, client=client, database="chats").traits.reach == "network"
        for url, options in (("mongodb://h", {}), (None, {"tls": True})):
            with pytest.raises(ConfigurationError, match="brings its own connection"):
                open_driver(url, client=client, **options)
    with (
        MongoClient("mongodb://h", connect=False) as synchronous,
        pytest.raises(ConfigurationError, match=r"pass pymongo.AsyncMongoClient"),
    ):
        MongoDriver(MongoSettings(), client=synchronous)


def test_the_traits_say_what_the_settings_mean():
    traits = open_driver("mongodb://h/?max_entry_bytes=10&max_record_bytes=20&deadline_s=2").traits
    assert (traits.reach, traits.clock) == ("network", "server")
    assert (traits.max_entry, traits.max_record, traits.deadline) == (10, 20, 2.0)
    assert "minority" in traits.durability
    assert "a failover may undo" in open_driver("mongodb://h/?durability=primary").traits.durability


def test_the_printed_schema_is_the_command_that_create_sends():
    text = schema("mongodb://user:s3cret@h/chats?collection=turns")
    assert text.startswith('db.getSiblingDB("chats").runCommand({\n  "createIndexes": "turns"')
    assert '"expireAfterSeconds": 0' in text
    assert "s3cret" not in text
    with pytest.raises(ConfigurationError, match="did you mean 'collection'"):
        schema("mongodb://h/chats?colection=turns")


def test_neither_the_package_nor_the_schema_brings_the_client_library():
    program = """
import sys, stm_backends_mongo, stm_backends_mongo.plugin as plugin
stm_backends_mongo.MongoSettings.from_url("mongodb://h/?tls=true")
plugin.schema("mongodb://h/chats")
print(sorted({"pymongo", "bson", "motor"} & sys.modules.keys()), len(stm_backends_mongo.__all__))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "[] 7\n"


def test_each_public_name_is_there_and_no_other():
    import stm_backends_mongo  # noqa: PLC0415 -- looked at here

    for name in stm_backends_mongo.__all__:
        assert getattr(stm_backends_mongo, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'RedisDriver'"):
        _ = stm_backends_mongo.RedisDriver


def test_without_the_client_library_opening_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'stm-backends\[mongo\].*: pip install "pymongo>='):
        plugins.open_driver("mongo")
