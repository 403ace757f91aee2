"""Short-term memory and state store on your own client."""

from __future__ import annotations

from stm_backends.on_client import ShortTermMemoryOnClient, StateStoreOnClient
from stm_backends_redis.plugin import open_driver


class RedisShortTermMemory(ShortTermMemoryOnClient):
    """The memory of one conversation in Redis, shared by every process that opens the same key.

    `client` is a `redis.asyncio.Redis` or `RedisCluster`, and is never closed. `options` are those of
    `open_backend("redis", client=client, ...)`, such as `key_prefix`.
    """

    open_driver = staticmethod(open_driver)


class RedisStateStore(StateStoreOnClient):
    """JSON objects under any string in Redis; satisfies `SupportsMemoryState`.

    Takes the arguments of `RedisShortTermMemory`.
    """

    open_driver = staticmethod(open_driver)
