"""The table: created if it is missing, by as many as like at once."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from stm_backends.drivers.edge import Edge
from stm_backends.errors import ConfigurationError
from stm_backends_dynamo.client import Requests
from stm_backends_dynamo.errors import INVALID, ClientError, code_of
from stm_backends_dynamo.statements import (
    CREATE_TABLE,
    DESCRIBE_TABLE,
    DESCRIBE_TIME_TO_LIVE,
    ENABLE_TIME_TO_LIVE,
    KEYS,
    TIME_TO_LIVE,
)

PATIENCE_S: Final = 120.0
"""How long creating a table may take; DynamoDB takes some ten seconds."""

_POLL_S: Final = 0.5


async def prepare(edge: Edge, client: Any, table: str) -> None:
    """Create the table and its time to live, each if it is missing, and wait until it can be used.

    Raises `ConfigurationError` for a table that is there and has other keys, or ends its items by
    another attribute; it is left as it is.
    """
    until = asyncio.get_running_loop().time() + PATIENCE_S
    requests = Requests(client, table, until=until)
    await edge.run("open", lambda: _prepare(requests), deadline_s=PATIENCE_S)


async def _prepare(requests: Requests) -> None:
    description = await _description(requests)
    if description is None:
        try:
            await requests.send(CREATE_TABLE)
        except ClientError as error:
            # Another process has been faster.
            if code_of(error) != "ResourceInUseException":
                raise
        description = await _description(requests)
    # For a moment, a table that has just been created is not known everywhere.
    while description is None or description["TableStatus"] in ("CREATING", "UPDATING"):
        await asyncio.sleep(_POLL_S)
        description = await _description(requests)
    kinds = {one["AttributeName"]: one["AttributeType"] for one in description["AttributeDefinitions"]}
    keys = [(one["AttributeName"], one["KeyType"]) for one in description["KeySchema"]]
    if keys != [(KEYS[0], "HASH"), (KEYS[1], "RANGE")] or any(kinds[name] != "S" for name in KEYS):
        raise ConfigurationError("there is a table of this name with other keys; it was left as it is")
    if await _ends_nothing(requests):
        try:
            await requests.send(ENABLE_TIME_TO_LIVE)
        except ClientError as error:
            # Another process has been faster, or is at it.
            if code_of(error) != INVALID or await _ends_nothing(requests):
                raise


async def _description(requests: Requests) -> dict[str, Any] | None:
    try:
        return (await requests.send(DESCRIBE_TABLE))["Table"]
    except ClientError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise
        return None


async def _ends_nothing(requests: Requests) -> bool:
    """Return whether the table has no time to live yet. Raises `ConfigurationError` if it is another's."""
    found = (await requests.send(DESCRIBE_TIME_TO_LIVE))["TimeToLiveDescription"]
    if found["TimeToLiveStatus"] not in ("ENABLED", "ENABLING"):
        return True
    if found["AttributeName"] != TIME_TO_LIVE:
        raise ConfigurationError(
            f"the table's time to live is on another attribute than {TIME_TO_LIVE!r}; it was left as it is"
        )
    return False
