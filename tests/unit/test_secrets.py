"""No message, repr, log line or traceback shows a value that was given as a setting."""

from __future__ import annotations

import dataclasses
import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends import ConfigurationError, EnvelopeKeys, Limits, MemoryBudget, StaticKeys, StmError
from stm_backends.backend import Backend, open_backend
from stm_backends.drivers import plugins
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.plugins import open_driver, schema
from stm_backends.drivers.settings import Settings
from stm_backends.drivers.sqlite.settings import SqliteSettings

SECRET = "".join(("can", "ary", "3f9"))
"""Put together, so that the lines of this file in a traceback do not have it."""

LEADING: dict[str, str] = {
    "memory": "memory://",
    "sqlite": "sqlite:///file.db",
    "redis": "redis://host/0",
    "postgres": "postgresql://host/db",
    "mongo": "mongodb://host/db",
    "dynamo": "dynamodb://table",
}


def settings_of(backend: str) -> type[Settings] | None:
    if backend == "redis":
        return pytest.importorskip("stm_backends_redis.settings").RedisSettings
    if backend == "postgres":
        return pytest.importorskip("stm_backends_postgres.settings").PostgresSettings
    if backend == "mongo":
        return pytest.importorskip("stm_backends_mongo.settings").MongoSettings
    if backend == "dynamo":
        return pytest.importorskip("stm_backends_dynamo.settings").DynamoSettings
    return SqliteSettings if backend == "sqlite" else None


def told(attempt: Callable[[], object]) -> tuple[str, object]:
    """Return all that an attempt says, and what it returns; anything but our own error fails the test."""
    try:
        made = attempt()
    except StmError as error:
        lines = traceback.format_exception(error)
        return "".join((str(error), repr(error), *map(str, error.args), *lines)), None
    return "", made


def values() -> list[Any]:
    """Return values in which the secret is, or that are no value of any setting."""
    return [SECRET, [SECRET], {SECRET: SECRET}]


def attempts(backend: str) -> list[Callable[[], object]]:
    """Return every way of giving a secret where it does not belong."""
    found: list[Callable[[], object]] = []
    leading, cls = LEADING[backend], settings_of(backend)
    names = [one.name for one in dataclasses.fields(cls)] if cls else ["name", "clock", "deadline_s"]
    names += ["create", "url", "client", "unknown"]
    for name in names:
        found += [lambda name=name, value=value: open_driver(backend, **{name: value}) for value in values()]
        queries = (f"{name}={SECRET}", f"{name}={SECRET}&{name}=1", f"{name}=1&{name}={SECRET}", name)
        found += [lambda query=query: open_driver(f"{leading}?{query}") for query in queries]
    scheme = leading.partition("://")[0]
    for text in (
        # What an unescaped password makes of a URL.
        *(
            f"{scheme}://user:{before}{SECRET}@host/0"
            for before in ("", "?", "#", "/", "@", "[", "]", "%", ":")
        ),
        *(
            f"{scheme}://user:{SECRET}{after}rest@host/0"
            for after in ("?", "#", "/", "@", "[", "]", "%", ":")
        ),
        *(f"{scheme}://user:1{middle}{SECRET}=x@host/0" for middle in "?#/&"),
        *(f"{scheme}://user:1{middle}x={SECRET}@host/0" for middle in "?#/&"),
        f"{scheme}://host/0?pass%77ord={SECRET}",
        f"{scheme}://host/0?{SECRET}",
        f"{scheme}://host/0?{SECRET}=1",
        f"{scheme}://host/0?a{SECRET}=1&pool_size=2",
        f"{scheme}:{SECRET}",
        f"{scheme}:user:{SECRET}@host",
        f"{scheme}:/[{SECRET}",
        f"{scheme}://[",
        f"{scheme}://[{SECRET}",
        f"{scheme}://host:{SECRET}/0",
        f"{scheme}://[::1]{SECRET}/0?[",
        f"{scheme}+x://user:{SECRET}@host",
        f"user:{SECRET}@host",
        f"x://{SECRET}",
    ):
        found.append(lambda text=text: open_driver(text))
        found.append(lambda text=text: open_driver(backend, url=text))
        found.append(lambda text=text: schema(text))
    return found


@pytest.fixture
def found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for installed backends once, which takes most of the time."""
    monkeypatch.setattr(plugins, "_claims", functools.cache(plugins._claims))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- it has no other effect


@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize("backend", LEADING)
def test_no_error_about_settings_shows_a_value(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "stm_backends")
    said = [(number, told(attempt)[0]) for number, attempt in enumerate(attempts(backend))]
    assert [(number, text) for number, text in said if SECRET in text] == []
    assert sum(bool(text) for _, text in said) > 50
    assert SECRET not in caplog.text


@pytest.mark.parametrize("backend", ["redis", "postgres", "mongo", "dynamo"])
def test_no_repr_of_settings_shows_a_secret(backend: str) -> None:
    cls = settings_of(backend)
    assert cls is not None
    scheme = LEADING[backend].partition("://")[0]
    urls = [
        f"{scheme}://user:{before}{SECRET}{after}@host/0"
        for before in ("", "1?", "1#", "1/", "1@", "%2F")
        for after in ("", "?x", "#x", "/x", "@x")
    ]
    for url in urls:
        _, made = told(lambda url=url: cls.from_url(url))
        assert SECRET not in repr(made), url
    for one in dataclasses.fields(cls):
        if not one.repr:
            for value in (SECRET, {SECRET: SECRET}):
                given = {one.name: value}
                _, made = told(lambda given=given: cls.from_url(None, **given))
                assert SECRET not in repr(made), one.name


def test_no_error_about_an_object_shows_a_value() -> None:
    given: list[Callable[[], object]] = [
        *(lambda value=value: Limits(turn_characters=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), max_summaries=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), close_timeout_s=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), limits=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), sealing=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), transforms=value) for value in values()),
        *(lambda value=value: Backend(MemoryDriver(), observer=value) for value in values()),
        *(lambda value=value: MemoryBudget(overflow_policy=value) for value in values()),
        *(lambda value=value: MemoryBudget(full_zone_turns=value) for value in values()),
        *(lambda value=value: StaticKeys(value, primary=SECRET) for value in values()),
        lambda: StaticKeys({SECRET: b"short"}, primary=SECRET),
        lambda: EnvelopeKeys(None, per=SECRET, wrapping=None),
    ]  # pyright: ignore[reportAssignmentType] -- every one of them is a mistake
    for attempt in given:
        with pytest.raises((ConfigurationError, TypeError)) as error:
            attempt()
        assert SECRET not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("url", ["sqlite://[", "redis://[", "memory://[", "mongodb://[", "dynamodb://[", "["])
def test_a_url_with_a_broken_host_is_a_typed_error(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_backend(url)
