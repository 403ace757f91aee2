"""The memory and the state store on a MongoDB client, for those who wire things by hand."""

from __future__ import annotations

from typing import Any

from stm_backends.codec import Codec
from stm_backends.directory import Directory
from stm_backends.distributed import DistributedShortTermMemory
from stm_backends.protocols import Summarizer
from stm_backends.state_store import StateStore
from stm_backends.types import MemoryKey
from stm_backends_mongo.plugin import open_driver


class MongoShortTermMemory(DistributedShortTermMemory):
    """The memory of one conversation in MongoDB, shared by every process that opens the same key.

    `client` is an `AsyncMongoClient` (or Motor's), which stays the caller's. `settings` are the fields of
    `MongoSettings` that do not say how to connect, such as `database`. The collection must have been set up.
    """

    def __init__(
        self,
        client: Any,
        config: object | None = None,
        *,
        key: MemoryKey,
        summarizer: Summarizer | None = None,
        **settings: Any,
    ) -> None:
        driver = open_driver(None, client=client, **settings)
        super().__init__(driver, key, config, summarizer=summarizer)


class MongoStateStore(StateStore):
    """Saved states in MongoDB; satisfies `SupportsMemoryState`. Arguments as for `MongoShortTermMemory`."""

    def __init__(self, client: Any, **settings: Any) -> None:
        driver, codec = open_driver(None, client=client, **settings), Codec()
        super().__init__(driver, codec, Directory(driver, codec))
