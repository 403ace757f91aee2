"""The files of certificates and keys that settings name: a missing one is a mistake, and never an outage."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stm_backends.errors import ConfigurationError


def require_files(named: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for a setting that names a file which cannot be read.

    `None` and an empty string name no file. The message shows the name of the setting and no path.
    """
    for name, path in named.items():
        try:
            if path:
                Path(path).open("rb").close()
        except OSError as error:
            raise ConfigurationError(
                f"{name} names a file that cannot be read ({type(error).__name__})"
            ) from None


def require_authorities(named: Mapping[str, Any]) -> None:
    """Do the same, and raise for a file without certificates or revocation lists."""
    require_files(named)
    for name, path in named.items():
        try:
            if path:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            raise ConfigurationError(f"{name} names a file that holds no certificate in PEM format") from None
