"""The memory and the state store on a client of one's own, for those who wire things by hand."""

from __future__ import annotations

from typing import Any

from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.protocols import Summarizer
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.state_store import StateStore
from stm_backends.types import MemoryKey
from stm_backends_redis.plugin import open_driver


class RedisShortTermMemory(DistributedShortTermMemory):
    """The memory of one conversation in Redis, shared by every process that opens the same key.

    `client` is a `redis.asyncio.Redis` or `RedisCluster`, and never closed here. `options` are those of
    `open_backend("redis", client=client, ...)`, such as `key_prefix`.
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


class RedisStateStore(StateStore):
    """JSON objects under any string in Redis; satisfies `SupportsMemoryState`.

    Arguments as for `RedisShortTermMemory`.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        driver, codec = LargeEntries(open_driver(None, client=client, **options)), Codec()
        super().__init__(driver, codec, Directory(driver, codec))
