"""Settings that a URL spells out in its query, read alike by every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from stm_backends.drivers.checks import require_known
from stm_backends.errors import ConfigurationError


def truth(text: str) -> bool:
    """Return what `true` or `false` says, in any case; raises `ValueError` for anything else."""
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def from_query(query: str, known: Mapping[str, Callable[[str], object]], *, backend: str) -> dict[str, Any]:
    """Return the settings of a URL's query. `known` says of each setting how its text is read.

    Raises `ConfigurationError` for a setting that is not known (with a near miss), is given twice or is
    not the number or the truth that it should be.
    """
    given: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        require_known([name], known, backend=backend)
        if name in given:
            raise ConfigurationError(f"the URL sets {name} twice")
        try:
            given[name] = known[name](text)
        except ValueError:
            expected = "true or false" if known[name] is truth else "a number"
            raise ConfigurationError(f"{name} in the URL is not {expected}: {text!r}") from None
    return given


def merged(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a URL and the keyword arguments beside it.

    Raises `ConfigurationError` for a setting that the two give differently; the values are not shown,
    because one of them may be a password.
    """
    for name in given.keys() & options.keys():
        if given[name] != options[name]:
            raise ConfigurationError(
                f"the URL and the options give {name} differently; leave one of them out"
            )
    return {**given, **options}
