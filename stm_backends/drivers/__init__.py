"""The contract of a driver and what authors of drivers build on.

`contract` defines five atomic operations on records. `plugins` says how a package is found. `settings` reads
and validates settings from a URL and keyword arguments. `purges` is what a driver may offer for expired
records, `Erasing` for erasures, and `Remains` what its `finish_erasure` returns. `wrapper` is the base for
drivers around a driver. `home` keeps other processes and event loops from an open driver. `checks`,
`deadlines`, `edge`, `coalesced`, `waiting` and `layouts` are helpers that the drivers of this library
share; using them is optional. The drivers that need no server are here too: `in_memory` and `sqlite`.
"""

from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
    new_version,
)
from stm_backends.drivers.erasing import Erasing, Remains
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.purges import Purges
from stm_backends.drivers.settings import Settings, setting
from stm_backends.drivers.wrapper import WrapperDriver

__all__ = [
    "ABSENT",
    "ANY",
    "KEEP",
    "AbsentType",
    "AnyType",
    "BackendPlugin",
    "Driver",
    "Erasing",
    "KeepType",
    "Key",
    "Page",
    "Purges",
    "Record",
    "Remains",
    "Settings",
    "Traits",
    "WrapperDriver",
    "hookimpl",
    "new_version",
    "setting",
]
