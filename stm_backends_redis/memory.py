"""The core's memory and state store on a Redis client of one's own, for those who wire things by hand."""

from __future__ import annotations

from stm_backends.codec import Codec
from stm_backends.directory import Directory
from stm_backends.distributed import DistributedShortTermMemory
from stm_backends.protocols import Summarizer
from stm_backends.state_store import StateStore
from stm_backends.types import MemoryKey
from stm_backends_redis.clients import Client
from stm_backends_redis.driver import RedisDriver
from stm_backends_redis.settings import RedisSettings


class RedisShortTermMemory(DistributedShortTermMemory):
    """The memory of one conversation in Redis, shared by every process that opens the same key.

    `client` is a `redis.asyncio.Redis` or `RedisCluster`, and is never closed here. `settings` are those of
    the driver that are not the client's own, such as `key_prefix`.
    """

    def __init__(
        self,
        client: Client,
        config: object | None = None,
        *,
        key: MemoryKey,
        summarizer: Summarizer | None = None,
        settings: RedisSettings | None = None,
    ) -> None:
        super().__init__(RedisDriver(settings, client=client), key, config, summarizer=summarizer)


class RedisStateStore(StateStore):
    """JSON objects under any string in Redis; satisfies `SupportsMemoryState`. Never closes its `client`."""

    def __init__(self, client: Client, *, settings: RedisSettings | None = None) -> None:
        driver, codec = RedisDriver(settings, client=client), Codec()
        super().__init__(driver, codec, Directory(driver, codec))
