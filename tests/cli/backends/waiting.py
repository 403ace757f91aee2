"""A backend that waits for ever in one operation on a conversation, to be interrupted there.

`waiting://append-8/PATH` is the SQLite database at PATH. A process whose eighth `append` to a conversation
begins makes the file `PATH.waiting-PID` and goes no further.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from stm_backends.drivers.contract import Key
from stm_backends.drivers.plugins import BackendPlugin, hookimpl, open_driver


class Waiting:
    name = "waiting"

    def __init__(self, path: str, operation: str, number: int) -> None:
        driver = open_driver(f"sqlite:///{path}")
        self.traits = driver.traits
        for each in ("open", "close", "load", "append", "replace", "delete", "scan"):
            setattr(self, each, getattr(driver, each))
        self._begun = 0
        mark = Path(f"{path}.waiting-{os.getpid()}").touch

        async def wait(key: Key, *arguments: Any, **options: Any) -> Any:
            self._begun += key.scope.endswith(":memory")
            if self._begun == number:
                mark()
                await asyncio.Event().wait()
            return await getattr(driver, operation)(key, *arguments, **options)

        setattr(self, operation, wait)


def open_waiting(url: str, *, create: bool = False) -> Any:
    where, _, path = url.removeprefix("waiting://").partition("/")
    operation, _, number = where.partition("-")
    return Waiting(path, operation, int(number))


@hookimpl
def stm_backend() -> BackendPlugin:
    return BackendPlugin(name="waiting", url_schemes=("waiting",), open=open_waiting)
