"""The contract of a driver and what authors of drivers build on.

`contract` is the contract itself: five atomic operations on records. `plugins` says how a package is found.
`checks`, `urls`, `edge` and `layouts` are shared by the drivers of this library; use them or leave them.
The drivers that need no server are here too: `in_memory` and `sqlite`.
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
from stm_backends.drivers.plugins import BackendPlugin, hookimpl

__all__ = [
    "ABSENT",
    "ANY",
    "KEEP",
    "AbsentType",
    "AnyType",
    "BackendPlugin",
    "Driver",
    "KeepType",
    "Key",
    "Page",
    "Record",
    "Traits",
    "hookimpl",
    "new_version",
]
