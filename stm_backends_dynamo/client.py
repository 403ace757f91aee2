"""The client of DynamoDB, made by us or handed in, and the requests of one operation to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import random
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from stm_backends.errors import ConfigurationError
from stm_backends_dynamo.errors import (
    BotoCoreError,
    ClientError,
    found_by,
    is_passing,
    is_refused,
    meaning,
)
from stm_backends_dynamo.settings import DynamoSettings
from stm_backends_dynamo.statements import Statement

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
"""How long to wait at most before a throttled request is sent again: doubling, with full jitter."""


class Answer(NamedTuple):
    """What became of a conditional write.

    `content` is the response if it was done; else the item that was met, or `{}` if there is none or if
    the server is too old to say.
    """

    done: bool
    content: dict[str, Any]


class Requests:
    """Sends the requests of one operation, until its deadline on the event loop's clock."""

    def __init__(self, client: Any, table: str, *, until: float) -> None:
        self._client = client
        self._table = table
        self._until = until

    @property
    def left_s(self) -> float:
        """How many seconds are left of the operation."""
        return self._until - asyncio.get_running_loop().time()

    async def send(self, statement: Statement) -> dict[str, Any]:
        """Return the response to a statement; sent again, after a pause, while it is throttled.

        So is what met a transaction of the same item, of which nothing was done either.
        """
        call = functools.partial(getattr(self._client, statement.call), **statement.on(self._table))
        longest = _FIRST_PAUSE_S
        while True:
            try:
                # One of boto3 blocks; cancelling the caller leaves its request to end in its thread.
                return await (call() if is_asynchronous(self._client) else asyncio.to_thread(call))
            except ClientError as error:
                pause = random.uniform(0, longest)
                if not is_passing(error) or pause >= self.left_s:
                    raise
            await asyncio.sleep(pause)
            longest = min(2 * longest, _LONGEST_PAUSE_S)

    async def attempt(self, statement: Statement) -> Answer:
        """Send a conditional write; that it is refused on its condition is an answer, too."""
        try:
            return Answer(True, await self.send(statement))
        except ClientError as error:
            if not is_refused(error):
                raise
            return Answer(False, found_by(error))


def is_asynchronous(client: Any) -> bool:
    """Return whether a client's calls are awaited, as those of aiobotocore are and those of boto3 are not."""
    return inspect.iscoroutinefunction(client.close)


def require_client(client: Any) -> None:
    """Raise `ConfigurationError` for what is no client of DynamoDB."""
    model = getattr(getattr(client, "meta", None), "service_model", None)
    if getattr(model, "service_name", None) != "dynamodb" or not hasattr(client, "put_item"):
        raise ConfigurationError(
            "client is one of boto3, as boto3.client('dynamodb') returns it, or one of aiobotocore that was "
            f"entered with `async with`; not {type(client).__name__}"
        )


@contextlib.asynccontextmanager
async def make_client(settings: DynamoSettings) -> AsyncGenerator[Any]:
    """Make a client of aiobotocore, and close it in the end. Raises `ConfigurationError`."""
    # boto3 alone will do for those who hand their client in.
    aiobotocore: Any = importlib.import_module("aiobotocore.session")
    configuration: Any = importlib.import_module("aiobotocore.config")
    session = aiobotocore.AioSession(profile=settings.profile)
    session.register_component("data_loader", _loader())
    config = configuration.AioConfig(
        # A write whose answer is lost must not be sent again by anybody who cannot tell what that means.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Shorter than the deadline, so that what was never sent is known not to have been done.
        connect_timeout=settings.deadline_s / 2,
        read_timeout=settings.deadline_s,
        max_pool_connections=settings.pool_size,
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(
                session.create_client(
                    "dynamodb",
                    region_name=settings.region,
                    endpoint_url=settings.endpoint_url,
                    # Over plain HTTP there is nothing to verify, and reading the certificates takes 50 ms.
                    verify=False if (settings.endpoint_url or "").startswith("http:") else None,
                    aws_access_key_id=settings.access_key_id,
                    aws_secret_access_key=settings.secret_access_key,
                    aws_session_token=settings.session_token,
                    config=config,
                )
            )
        except (BotoCoreError, ValueError) as error:
            if meaning(error) is not None:
                raise
            raise ConfigurationError(f"no client for DynamoDB can be made like this: {error}") from error
        yield client


@functools.cache
def _loader() -> Any:
    """Return what reads the description of DynamoDB's interface, once for all clients: it takes 0.1 s."""
    aiobotocore: Any = importlib.import_module("aiobotocore.session")
    return aiobotocore.AioSession().get_component("data_loader")
