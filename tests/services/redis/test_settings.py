"""What a Redis URL says, and what it cannot say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis
from redis.asyncio import Redis

from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError, MissingExtra
from stm_backends_redis import RedisSettings, open_driver
from stm_backends_redis.client import client_options
from stm_backends_redis.plugin import schema

SECRET = "correct" + "-horse"


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("redis://cache", {"hosts": (("cache", 6379),)}),
        ("redis://cache:7000/3", {"hosts": (("cache", 7000),), "db": 3}),
        ("redis://[::1]:7000", {"hosts": (("::1", 7000),)}),
        ("redis://:p%40ss%2Fword@h", {"hosts": (("h", 6379),), "password": "p@ss/word"}),
        ("redis://me:p@h", {"hosts": (("h", 6379),), "username": "me", "password": "p"}),
        ("rediss://h", {"hosts": (("h", 6379),), "tls": True}),
        (
            "rediss://h?tls_ca_file=/ca.pem&tls_check_hostname=false",
            {"hosts": (("h", 6379),), "tls": True, "tls_ca_file": "/ca.pem", "tls_check_hostname": False},
        ),
        ("redis+cluster://a:1,b", {"mode": "cluster", "hosts": (("a", 1), ("b", 6379))}),
        (
            "redis+sentinel://me:p@a,b:2/main/4?sentinel_password=q",
            {
                "mode": "sentinel",
                "hosts": (("a", 26379), ("b", 2)),
                "service": "main",
                "db": 4,
                "username": "me",
                "password": "p",
                "sentinel_password": "q",
            },
        ),
        (
            "redis://h?key_prefix=my:&pool_size=3&deadline_s=2&connect_timeout_s=1&wait_replicas=1&max_entry_bytes=1",
            {
                "hosts": (("h", 6379),),
                "key_prefix": "my:",
                "pool_size": 3,
                "deadline_s": 2.0,
                "connect_timeout_s": 1.0,
                "wait_replicas": 1,
                "max_entry_bytes": 1,
            },
        ),
    ],
)
def test_a_url_says_what_the_options_would(url, settings):
    assert RedisSettings.from_url(url) == RedisSettings(**settings)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://", "needs a host"),
        ("redis://a,b", "redis+cluster://"),
        ("redis://h:port", "not a number between"),
        ("redis://h:0", "not a number between"),
        ("redis://h/zero", "number of a database"),
        ("redis://h/0/1", "longer than"),
        ("redis://h#x", "%23"),
        ("redis+cluster://h/1", "one database"),
        ("redis+sentinel://h", "redis+sentinel://host:26379/service"),
        ("redis://h?tls_ca_file=/x", "rediss://"),
        ("redis://h?sentinel_password=x", "redis+sentinel://"),
        ("redis://h?wait_replicas=-1", "at least 0"),
        ("redis://h?wait_fsync=1", "true or false"),
        ("redis://h?key_prefix={x}", "no braces"),
        ("redis://h?pool_sise=3", "did you mean 'pool_size'"),
        ("redis://h?decode_response=true", "no such setting in a URL"),
        ("redis://user:12?hunter2@h", "no such setting"),
        ("redis://h?pool_size=0", "pool_size"),
        ("redis://h?pool_size=1&pool_size=2", "twice"),
        ("redis://h?deadline_s=soon", "not a number"),
        ("redis://h?connect_timeout_s=0", "positive"),
        ("redis://h?max_entry_bytes=600000000", "max_entry_bytes must be an integer between"),
        ("mysql://h", "begins with redis://"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(url, says):
    with pytest.raises(ConfigurationError) as caught:
        RedisSettings.from_url(url)
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"pool_size": "3"},
        {"pool_size": True},
        {"db": -1},
        {"password": b"p"},
        {"mode": "ring"},
        {"deadline_s": "5"},
        {"tls": "yes"},
        {"hosts": ["h"]},
    ],
    ids=repr,
)
def test_an_option_of_another_type_is_refused_by_its_name(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        open_driver(None, **options)


def test_a_setting_given_differently_in_url_and_option_is_refused():
    with pytest.raises(ConfigurationError, match="give password differently") as caught:
        open_driver(f"redis://:{SECRET}@h", password=SECRET[1:])
    assert SECRET[1:] not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h:port",
        f"redis://me:{SECRET}@h/zero",
        f"redis://me:{SECRET}@h?pool_sise=1",
        f"redis://me:{SECRET}@",
        f"redis://me:{SECRET}@a,b",
        f"mysql://me:{SECRET}@h",
        f"redis://me:{SECRET}@h?sentinel_password={SECRET}",
        f"redis://me:{SECRET}@[h",
    ],
)
def test_no_refusal_shows_a_password(url):
    with pytest.raises(ConfigurationError) as caught:
        open_driver(url)
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.__cause__}"


def test_no_repr_shows_a_password():
    settings = RedisSettings.from_url(f"redis+sentinel://:{SECRET}@h/s?sentinel_password={SECRET}")
    assert SECRET not in repr(settings)
    driver = open_driver(f"redis://:{SECRET}@h")
    assert SECRET not in f"{driver!r} {driver.traits!r}"


def test_a_client_that_is_handed_in_has_its_own_connection_settings():
    client = Redis()
    assert open_driver(None, client=client, key_prefix="mine:", deadline_s=1.0).traits.deadline == 1.0
    with pytest.raises(ConfigurationError, match=r"brings its own connection.*: password$"):
        open_driver(None, client=client, password=SECRET)
    with pytest.raises(ConfigurationError, match=r"brings its own connection.*: hosts, mode, tls$"):
        open_driver("redis://h", client=client)
    with pytest.raises(ConfigurationError, match="did you mean 'key_prefix'"):
        open_driver(None, client=client, key_prefx="x")


def test_a_client_of_another_kind_is_refused_by_its_name():
    with pytest.raises(ConfigurationError, match=r"redis\.asyncio\.Redis .* not a redis\.client\.Redis"):
        open_driver(None, client=redis.Redis())


def test_the_traits_say_what_the_settings_mean():
    traits = open_driver("redis://h?max_entry_bytes=10&max_record_bytes=20&deadline_s=2").traits
    assert (traits.reach, traits.clock) == ("network", "server")
    assert (traits.max_entry, traits.max_record, traits.deadline) == (10, 20, 2.0)
    assert "appendfsync always" in traits.durability
    assert "memory of 2 replica" in open_driver("redis://h?wait_replicas=2").traits.durability
    fsync = open_driver("redis://h?wait_fsync=true&wait_replicas=1").traits.durability
    assert fsync == "acknowledged once on the disk of the server and on the disks of 1 replica(s)"


def test_there_is_nothing_to_set_up():
    assert "no setup" in schema("redis://h")
    with pytest.raises(ConfigurationError, match="did you mean"):
        schema("redis://h?pool_sise=1")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "rediss+cluster"])
def test_the_backend_is_found_by_its_url(scheme):
    assert plugins.open_driver(f"{scheme}://h").name == "redis"


def test_importing_the_package_imports_no_client_library():
    program = (
        "import sys, stm_backends_redis, stm_backends_redis.plugin;"
        "stm_backends_redis.RedisSettings.from_url('redis://h');"
        "print([name for name in sys.modules if name.partition('.')[0] in ('redis', 'hiredis')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_without_the_client_library_opening_says_what_to_install(monkeypatch):
    found = plugins.importlib.util.find_spec
    monkeypatch.setattr(
        plugins.importlib.util, "find_spec", lambda name: None if name == "redis" else found(name)
    )
    with pytest.raises(MissingExtra, match=r'stm-backends\[redis\].*: pip install "redis\[hiredis\]>='):
        plugins.open_driver("redis://h")


@pytest.mark.parametrize("url", ["redis://h", "redis+cluster://h", "redis+sentinel://h/service"])
def test_the_clients_that_we_make_send_nothing_twice(url):
    assert client_options(RedisSettings.from_url(url))["retry"].get_retries() == 0
