"""The base class of drivers' settings, used as the author of another driver would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import SplitResult

import pytest

from stm_backends.drivers import Settings, setting
from stm_backends.drivers.plugins import open_driver as open_by_name
from stm_backends.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class AcmeSettings(Settings):
    backend: ClassVar = "acme"
    url_schemes: ClassVar = ("acme", "acmes")

    host: str = setting("localhost", query=False, connection=True)
    password: str | None = setting(None, query=False, connection=True, secret=True)
    pool_size: int = setting(10, connection=True)
    prefix: str = "stm:"
    mode: Literal["fast", "safe"] = "safe"
    compress: bool = False
    level: Literal["low", "high"] | None = None
    token: str | Callable[[], str] | None = setting(None, connection=True, secret=True)  # noqa: RUF009 -- returns a field
    tags: tuple[str, ...] = ()

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        return {"host": parts.hostname} if parts.hostname else {}


@dataclass(frozen=True, kw_only=True)
class PlainSettings(Settings):
    backend: ClassVar = "plain"
    url_schemes: ClassVar = ("plain",)


def test_a_url_and_options_become_one_validated_object() -> None:
    url = "acmes://db/?pool_size=5&compress=TRUE&mode=fast&deadline_s=2"
    assert AcmeSettings.from_url(url, prefix="mine:", pool_size=5) == AcmeSettings(
        host="db", pool_size=5, compress=True, mode="fast", deadline_s=2.0, prefix="mine:"
    )
    assert AcmeSettings.from_url(None, tags=("a",)) == AcmeSettings(tags=("a",))
    assert AcmeSettings.from_url("acme://") == AcmeSettings()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://db", "begins with acme://, acmes://"),
        ("acme://db#x", "no fragment"),
        ("acme://[db", "host of the acme URL is invalid: only an IPv6 address is in brackets"),
        ("acme://:a[b@db", "percent-encode special characters in a user name or password"),
        ("acme://[db]", "only an IPv6 address is in brackets"),
        ("acme://db?level=medium", "level must be 'low', 'high' or None, not another text"),
        ("acme://db?pool_sise=1", "did you mean 'pool_size'"),
        ("acme://db?dead=1", "did you mean 'deadline_s'"),
        ("acme://db?host=x", "no setting 'host'"),
        ("acme://db?tags=x", "no setting 'tags'"),
        ("acme://db?password=x", "no setting 'password'"),
        ("acme://db?prefix=a&prefix=a", "sets prefix twice"),
        ("acme://db?pool_size=many", "pool_size in the URL is not a number"),
        ("acme://db?compress=1", "compress in the URL is not true or false"),
        ("acme://db?mode=odd", "mode must be 'fast' or 'safe', not another text"),
        ("acme://db?deadline_s=0", "positive number of seconds"),
    ],
)
def test_a_url_that_cannot_work_is_a_configuration_error(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AcmeSettings.from_url(url)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool_size": True}, "pool_size must be an integer, not bool"),
        ({"pool_size": "3"}, "pool_size must be an integer, not str"),
        ({"deadline_s": None}, "deadline_s must be a number, not NoneType"),
        ({"password": b"hush"}, "password must be a string or None, not bytes"),
        ({"tags": ["a"]}, "tags must be of type tuple, not list"),
        ({"compress": "yes"}, "compress must be True or False, not str"),
        ({"token": b"hush"}, "token must be a string, a function or None, not bytes"),
        ({"level": ["hush"]}, "level must be 'low', 'high' or None, not list"),
        ({"prefx": "x"}, "did you mean 'prefix'"),
        ({"cls": "x", "url": "x"}, "no setting 'cls'"),
    ],
)
def test_an_option_of_another_type_is_a_configuration_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AcmeSettings.from_url(None, **options)
    assert says in str(caught.value)
    assert "hush" not in str(caught.value)


def test_the_url_and_the_options_may_not_differ() -> None:
    with pytest.raises(ConfigurationError, match="give pool_size differently"):
        AcmeSettings.from_url("acme://db?pool_size=5", pool_size=6)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("acme://db", {}),
        ("acme://?pool_size=10", {}),
        (None, {"pool_size": 10}),
        (None, {"password": None}),
    ],
)
def test_a_client_refuses_every_setting_of_a_connection(url: str | None, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"client=\.\.\. brings its own connection"):
        AcmeSettings.from_url(url, client=object(), **options)


def test_a_client_goes_with_all_other_settings() -> None:
    settings = AcmeSettings.from_url("acme://?mode=fast", client=object(), prefix="x:", deadline_s=1.0)
    assert settings == AcmeSettings(mode="fast", prefix="x:", deadline_s=1.0)
    assert AcmeSettings.from_url(None, client=None, pool_size=3).pool_size == 3


def test_a_driver_without_connection_settings_takes_no_client() -> None:
    with pytest.raises(ConfigurationError, match="no setting 'client'"):
        PlainSettings.from_url(None, client=object())
    with pytest.raises(ConfigurationError, match="no host and no path"):
        PlainSettings.from_url("plain://host")


def test_a_secret_is_not_in_the_repr() -> None:
    assert "hush" not in repr(AcmeSettings(password="hush"))  # noqa: S106 -- a sample


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host?deadline_s=hunter2",
        "redis://user:secret@host?wait_fsync=hunter2",
        "sqlite:///a.db?synchronous=hunter2",
        "redis://user:sec?hunter2=ret@host",
        "redis://user:sec?deadline_s=hunter2@host",
        "postgresql://user:sec?hunter2@host/db",
    ],
)
def test_no_message_shows_a_value_or_the_end_of_a_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_by_name(url)
    assert "hunter2" not in str(caught.value)
