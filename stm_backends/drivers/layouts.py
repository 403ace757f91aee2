"""Checks that this version of the library can use the tables, collection or file that it finds.

Each driver numbers its storage layouts, counted from 1. Two numbers are stored with the data: `version`,
the layout of the data, and `readable_since`, the oldest layout whose code can still use it. A compatible
change raises only `version`, so that processes of both versions run side by side.
"""

from __future__ import annotations

from typing import NamedTuple

from stm_backends.errors import ConfigurationError


class Layout(NamedTuple):
    """The numbers stored with the data."""

    version: int
    readable_since: int


def is_outdated(found: Layout, ours: Layout) -> bool:
    """Return whether migration steps from `found.version` to `ours.version` are due.

    Raises `ConfigurationError` if the layout is too new for this code.
    """
    if found.readable_since > ours.version:
        raise ConfigurationError(
            f"the stored layout is version {found.version}, which this version of the library (layout "
            f"{ours.version}) cannot use; upgrade stm-backends. Nothing was changed"
        )
    return found.version < ours.version


def require_usable(found: Layout, ours: Layout, *, oldest: int) -> None:
    """Raise `ConfigurationError` for a layout that must be migrated before this code can use it.

    `oldest` is the oldest layout that this code can use as it is.
    """
    if found.version < oldest:
        raise ConfigurationError(
            f"the stored layout is version {found.version}, and this version of the library needs at least "
            f"{oldest} (it writes {ours.version}); open once with create=True, or run what "
            "`stm-backends schema` prints. Nothing was changed"
        )
