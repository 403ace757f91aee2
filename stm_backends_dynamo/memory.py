"""The memory and the store of this driver by name, for those who wire things by hand."""

from __future__ import annotations

from typing import Any

from stm_backends.codec import Codec
from stm_backends.directory import Directory
from stm_backends.distributed import DistributedShortTermMemory
from stm_backends.protocols import Summarizer
from stm_backends.state_store import StateStore
from stm_backends.types import MemoryKey
from stm_backends_dynamo.driver import DynamoDriver
from stm_backends_dynamo.settings import DEFAULT_TABLE, DynamoSettings


class DynamoShortTermMemory(DistributedShortTermMemory):
    """The memory of one conversation in a table, on a client of your own, which is never closed.

    `client` is one of boto3 or aiobotocore. The table must be there. Close it before the client.
    """

    def __init__(
        self,
        client: Any,
        config: object | None = None,
        *,
        key: MemoryKey,
        summarizer: Summarizer | None = None,
        table: str = DEFAULT_TABLE,
    ) -> None:
        driver = DynamoDriver(DynamoSettings(table=table), client=client)
        super().__init__(driver, key, config, summarizer=summarizer)


class DynamoStateStore(StateStore):
    """Saved states in a table, on a client of your own, which is never closed.

    `client` is one of boto3 or aiobotocore. The table must be there.
    """

    def __init__(self, client: Any, *, table: str = DEFAULT_TABLE) -> None:
        driver, codec = DynamoDriver(DynamoSettings(table=table), client=client), Codec()
        super().__init__(driver, codec, Directory(driver, codec))
