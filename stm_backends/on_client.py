"""The base of the named classes: a memory and a state store on your own client, without a backend.

They take only the driver's options. `sealing`, `limits`, `transforms` and an `observer` are options of a
backend: `open_backend("redis", client=client, sealing=...)`. They write nothing for a tenant whose data is
sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from stm_backends.drivers.contract import Driver
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import require_dialogue
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.seals import Clear
from stm_backends.records.state_store import StateStore
from stm_backends.types import MemoryKey


class ShortTermMemoryOnClient(DistributedShortTermMemory):
    """A shared memory of one conversation; a driver package derives from it and names its `open_driver`."""

    open_driver: ClassVar[Callable[..., Driver]]

    def __init__(
        self,
        client: Any,
        config: ConfigLike | None = None,
        *,
        key: MemoryKey,
        summarizer: Summarizer | None = None,
        **options: Any,
    ) -> None:
        require_dialogue(key)
        driver = LargeEntries(self.open_driver(None, client=client, **options))
        codec = Codec()
        directory = Directory(driver, codec, seals=Clear(driver))
        driver.before_parts = directory.note_parts
        super().__init__(driver, key, config, summarizer=summarizer, codec=codec, directory=directory)


class StateStoreOnClient(StateStore):
    """JSON objects under any string; a driver package derives from it and names its `open_driver`."""

    open_driver: ClassVar[Callable[..., Driver]]

    def __init__(self, client: Any, **options: Any) -> None:
        driver, codec = LargeEntries(self.open_driver(None, client=client, **options)), Codec()
        directory = Directory(driver, codec, seals=Clear(driver))
        driver.before_parts = directory.note_parts
        super().__init__(driver, codec, directory)
