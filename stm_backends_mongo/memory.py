"""The memory and the state store on a client of one's own, for those who wire things by hand.

The collection must be there: `stm-backends schema mongo` prints what sets it up.
"""

from __future__ import annotations

from typing import Any

from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.protocols import Summarizer
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.state_store import StateStore
from stm_backends.types import MemoryKey
from stm_backends_mongo.plugin import open_driver


class MongoShortTermMemory(DistributedShortTermMemory):
    """The memory of one conversation in MongoDB, shared by every process that opens the same key.

    `client` is an `AsyncMongoClient`, or Motor's, and never closed here. `options` are those of
    `open_backend("mongo", client=client, ...)`, such as `database`.
    """

    def __init__(
        self,
        client: Any,
        config: object | None = None,
        *,
        key: MemoryKey,
        summarizer: Summarizer | None = None,
        **options: Any,
    ) -> None:
        driver = LargeEntries(open_driver(None, client=client, **options))
        super().__init__(driver, key, config, summarizer=summarizer)


class MongoStateStore(StateStore):
    """JSON objects under any string in MongoDB; satisfies `SupportsMemoryState`.

    Arguments as for `MongoShortTermMemory`.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        driver, codec = LargeEntries(open_driver(None, client=client, **options)), Codec()
        super().__init__(driver, codec, Directory(driver, codec))
