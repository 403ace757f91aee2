"""Short-term memory and state store on your own client.

The tables must exist: `stm-backends schema postgres` prints the commands that create them.
"""

from __future__ import annotations

from stm_backends.on_client import ShortTermMemoryOnClient, StateStoreOnClient
from stm_backends_postgres.plugin import open_driver


class PostgresShortTermMemory(ShortTermMemoryOnClient):
    """The memory of one conversation in PostgreSQL, shared by every process that opens the same key.

    `client` is an `asyncpg.Pool`, and is never closed. `options` are those of
    `open_backend("postgres", client=client, ...)`, such as `schema`.
    """

    open_driver = staticmethod(open_driver)


class PostgresStateStore(StateStoreOnClient):
    """JSON objects under any string in PostgreSQL; satisfies `SupportsMemoryState`.

    Takes the arguments of `PostgresShortTermMemory`.
    """

    open_driver = staticmethod(open_driver)
