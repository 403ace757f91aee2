"""Short-term memory and state store on your own client.

The table must exist: `stm-backends schema dynamo` prints the commands that create it.
"""

from __future__ import annotations

from stm_backends.on_client import ShortTermMemoryOnClient, StateStoreOnClient
from stm_backends_dynamo.plugin import open_driver


class DynamoShortTermMemory(ShortTermMemoryOnClient):
    """The memory of one conversation in DynamoDB, shared by every process that opens the same key.

    `client` is from boto3 or aiobotocore, and is never closed. `options` are those of
    `open_backend("dynamo", client=client, ...)`, such as `table`.
    """

    open_driver = staticmethod(open_driver)


class DynamoStateStore(StateStoreOnClient):
    """JSON objects under any string in DynamoDB; satisfies `SupportsMemoryState`.

    Takes the arguments of `DynamoShortTermMemory`.
    """

    open_driver = staticmethod(open_driver)
