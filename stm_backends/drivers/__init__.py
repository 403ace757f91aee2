"""The contract of a driver, and tools for authors of drivers.

`contract` defines five atomic operations on records. `plugins` says how a package is found. `settings` reads
and validates settings from a URL and keyword arguments. `purges` has the optional methods of a driver for
expired records, `Erasing` those for erasures, and `Remains` is the result of its `finish_erasure`. `wrapper`
is the base for drivers around a driver. `home` keeps an open driver from being used in other processes and
event loops. `checks`, `deadlines`, `edge`, `coalesced`, `waiting` and `layouts` are helpers that the drivers
of this library share; using them is optional. The drivers that need no server are also here: `in_memory` and
`sqlite`.
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
