"""Open the datastore that a command is told, and name it without its secrets."""

from __future__ import annotations

import re
from typing import Final

from stm_backends.backend import Backend, open_backend
from stm_backends.errors import ConfigurationError

_URL: Final = re.compile(
    r"([a-z][a-z0-9+.\-]*)://(?:[^/?#@]*@)?([^/?#@:]*(?::\d+)?(?:/[^?#@]*)?)(?:\?([^#@]*))?(?:#[^@]*)?",
    re.IGNORECASE,
)

_TELLING: Final = ("host", "port", "schema", "key_prefix", "region", "endpoint_url")
"""Settings that tell one place from another, and are no secret."""


def given(url: str | None) -> str:
    """Return the URL that a command was given. Raises `ConfigurationError` if it was given none."""
    if not url:
        raise ConfigurationError(
            "say where the datastore is: give --url, or set STM_BACKENDS_URL (e.g. sqlite:///conversations.db)"
        )
    return url


def existing(name_or_url: str, *, url: str | None = None, create: bool = False) -> Backend:
    """Return a backend that does not create its datastore, if it is one that otherwise would.

    `create=True` has it set up what it needs.
    """
    if create:
        return open_backend(name_or_url, url=url, create=True)
    try:
        return open_backend(name_or_url, url=url, must_exist=True)
    except ConfigurationError:
        # It has no such option, because it never creates anything; or something else is wrong, still.
        return open_backend(name_or_url, url=url)


def shown(name_or_url: str, url: str | None = None) -> str:
    """Return a backend's name, or a URL without user, password and what does not tell where it is.

    Where it is not plain which part is the secret, nothing but the scheme is shown.
    """
    text = url or name_or_url
    found = _URL.fullmatch(text)
    if found is not None:
        settings = (found[3] or "").split("&")
        told = "&".join(setting for setting in settings if setting.partition("=")[0] in _TELLING)
        return f"{found[1]}://{found[2]}{'?' if told else ''}{told}"
    scheme, colon, _ = text.partition(":")
    return f"{scheme}:…" if colon else name_or_url
