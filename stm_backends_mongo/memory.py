"""Short-term memory and state store on your own client.

The collection must exist: `stm-backends schema mongo` prints the commands that create it.
"""

from __future__ import annotations

from stm_backends.on_client import ShortTermMemoryOnClient, StateStoreOnClient
from stm_backends_mongo.plugin import open_driver


class MongoShortTermMemory(ShortTermMemoryOnClient):
    """The memory of one conversation in MongoDB, shared by every process that opens the same key.

    `client` is an `AsyncMongoClient`, or Motor's, and is never closed. `options` are those of
    `open_backend("mongo", client=client, ...)`, such as `database`.
    """

    open_driver = staticmethod(open_driver)


class MongoStateStore(StateStoreOnClient):
    """JSON objects under any string in MongoDB; satisfies `SupportsMemoryState`.

    Takes the arguments of `MongoShortTermMemory`.
    """

    open_driver = staticmethod(open_driver)
