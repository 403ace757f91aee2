"""Open the datastore of a command, and display its URL without secrets."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from stm_backends.backend import Backend, open_backend
from stm_backends.cli.observing import observer
from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError
from stm_backends.inspect.read_only import ReadOnlyDriver
from stm_backends.memory.schedule import MAX_SUMMARIES
from stm_backends.sealing.keys import Sealing
from stm_backends.sealing.naming import load_sealing

_URL: Final = re.compile(
    r"([a-z][a-z0-9+.\-]*)://(?:[^/?#@]*@)?([^/?#@:]*(?::\d+)?(?:/[^?#@]*)?)(?:\?([^#@]*))?(?:#[^@]*)?",
    re.IGNORECASE,
)

_TELLING: Final = ("host", "port", "schema", "key_prefix", "region", "endpoint_url")
"""Settings that identify a datastore and are not secret."""


def given(url: str | None) -> str:
    """Return the URL of a command. Raises `ConfigurationError` if there is none."""
    if not url:
        raise ConfigurationError(
            "no datastore given: use --url, or set STM_BACKENDS_URL (e.g. sqlite:///conversations.db)"
        )
    return url


def existing(
    name_or_url: str,
    *,
    url: str | None = None,
    create: bool = False,
    sealing: Sealing | None = None,
    max_summaries: int = MAX_SUMMARIES,
) -> Backend:
    """Return a backend that does not create its datastore on opening, unless `create=True`."""
    opened = partial(
        open_backend, name_or_url, url=url, sealing=sealing, observer=observer(), max_summaries=max_summaries
    )
    if create:
        return opened(create=True)
    try:
        return opened(must_exist=True)
    except ConfigurationError:
        # This backend has no such option, because it never creates anything; or there is another error.
        return opened()


def chosen(
    backend: str | None,
    url: str | None,
    *,
    create: bool = False,
    sealing: str | None = None,
    max_summaries: int = MAX_SUMMARIES,
) -> Backend:
    """Return the existing backend that the options `--backend`, `--url` and `--sealing` name."""
    seal = load_sealing(sealing)
    if backend:
        return existing(backend, url=url, create=create, sealing=seal, max_summaries=max_summaries)
    return existing(given(url), create=create, sealing=seal, max_summaries=max_summaries)


def shown(name_or_url: str, url: str | None = None) -> str:
    """Return a backend's name, or a URL without user, password and settings that may be secret.

    If the secret part cannot be determined, only the scheme is returned.
    """
    text = url or name_or_url
    found = _URL.fullmatch(text)
    if found is not None:
        settings = (found[3] or "").split("&")
        told = "&".join(setting for setting in settings if setting.partition("=")[0] in _TELLING)
        return f"{found[1]}://{found[2]}{'?' if told else ''}{told}"
    scheme, colon, _ = text.partition(":")
    return f"{scheme}:…" if colon else name_or_url


def read_only(backend: str | None, url: str | None, *, sealing: str | None = None) -> Backend:
    """Return the backend that `chosen` returns, on a driver that writes nothing."""
    seal = load_sealing(sealing)
    where, apart = (backend, url) if backend else (given(url), None)
    try:
        driver = plugins.open_driver(where, url=apart, must_exist=True)
    except ConfigurationError:
        # This backend has no such option, because it never creates anything; or there is another error.
        driver = plugins.open_driver(where, url=apart)
    return Backend(ReadOnlyDriver(driver), sealing=seal, observer=observer())
