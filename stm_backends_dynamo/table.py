"""The setup of the table; safe in many processes concurrently."""

from __future__ import annotations

import asyncio
import logging
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
"""The time limit for creating a table, in seconds; DynamoDB needs about ten."""

CHECK_S: Final = 2.0
"""The time limit for checking the time to live, in seconds. Opening needs nothing else of the table."""

_POLL_S: Final = 0.5

logger = logging.getLogger("stm_backends")


async def prepare(edge: Edge, client: Any, table: str) -> None:
    """Create the table and its time to live if they are missing, and wait until the table can be used.

    Raises `ConfigurationError`, and changes nothing, for a table with other keys or with its time to live on
    another attribute.
    """
    until = asyncio.get_running_loop().time() + PATIENCE_S
    requests = Requests(client, table, until=until)
    await edge.run("open", lambda: _prepare(requests), deadline_s=PATIENCE_S)


async def check(edge: Edge, client: Any, table: str) -> None:
    """Warn if the table has no time to live, which means that DynamoDB never removes expired records.

    Raises nothing: the role may lack `dynamodb:DescribeTimeToLive`, and the first operation reports an
    outage.
    """
    requests = Requests(client, table, until=asyncio.get_running_loop().time() + CHECK_S)
    try:
        ends_nothing = await edge.run("open", lambda: _ends_nothing(requests), deadline_s=CHECK_S)
    except ConfigurationError:
        ends_nothing = True
    except Exception as error:  # noqa: BLE001 -- nothing depends on this check
        logger.debug("dynamo: could not check the time to live of the table: %s", type(error).__name__)
        return
    if ends_nothing:
        logger.warning(
            "the DynamoDB table has no time to live on %r: expired conversations are never shown, but never "
            "removed; enable it with `stm-backends ping --create --url URL`, or with the commands that "
            "`stm-backends schema --url URL` prints",
            TIME_TO_LIVE,
        )


async def _prepare(requests: Requests) -> None:
    description = await _description(requests)
    if description is None:
        try:
            await requests.send(CREATE_TABLE)
        except ClientError as error:
            # Another process has created it.
            if code_of(error) != "ResourceInUseException":
                raise
        description = await _description(requests)
    # For a moment, a new table is not visible on all servers.
    while description is None or description["TableStatus"] in ("CREATING", "UPDATING"):
        await asyncio.sleep(_POLL_S)
        description = await _description(requests)
    kinds = {one["AttributeName"]: one["AttributeType"] for one in description["AttributeDefinitions"]}
    keys = [(one["AttributeName"], one["KeyType"]) for one in description["KeySchema"]]
    if keys != [(KEYS[0], "HASH"), (KEYS[1], "RANGE")] or any(kinds[name] != "S" for name in KEYS):
        raise ConfigurationError("a table with this name has other keys; it was not changed")
    if await _ends_nothing(requests):
        try:
            await requests.send(ENABLE_TIME_TO_LIVE)
        except ClientError as error:
            # Another process has enabled it, or is enabling it.
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
    """Return whether the table has no time to live yet. Raises if it is on another attribute."""
    found = (await requests.send(DESCRIBE_TIME_TO_LIVE))["TimeToLiveDescription"]
    if found["TimeToLiveStatus"] not in ("ENABLED", "ENABLING"):
        return True
    if found["AttributeName"] != TIME_TO_LIVE:
        raise ConfigurationError(
            f"the table's time to live is on another attribute than {TIME_TO_LIVE!r}; it was not changed"
        )
    return False
