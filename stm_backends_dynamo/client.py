"""The DynamoDB client, created here or passed in, and the requests of one operation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import random
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from botocore.exceptions import NoRegionError  # pyright: ignore[reportMissingTypeStubs]

from stm_backends.drivers.tls_files import require_files
from stm_backends.errors import ConfigurationError
from stm_backends_dynamo.errors import (
    BotoCoreError,
    ClientError,
    NoConnection,
    found_by,
    is_passing,
    is_refused,
    meaning,
    was_sent_again,
)
from stm_backends_dynamo.settings import DynamoSettings
from stm_backends_dynamo.statements import Statement

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
"""Maximum pause before a throttled request is sent again; it doubles each time, with full jitter."""


class Answer(NamedTuple):
    """The result of a conditional write.

    `content` is the response if the write was done. Otherwise it is the current item, or `{}` if it does not
    exist or the server is too old to return it. `again` says that the client sent the request more than once,
    as a passed-in client may; the first one may have been done.
    """

    done: bool
    content: dict[str, Any]
    again: bool = False


class Requests:
    """Sends the requests of one operation, until its deadline on the event loop's clock."""

    def __init__(self, client: Any, table: str, *, until: float) -> None:
        self._client = client
        self._table = table
        self._until = until
        self.is_in_doubt = False
        """True if the client retried a failed write by itself: the first attempt may have been done."""
        self.throttled: ClientError | None = None
        """The last error while an operation that has written nothing pauses, with no request on its way."""
        self._unanswered = 0
        self._has_written = False

    @property
    def left_s(self) -> float:
        """The seconds left until the deadline of the operation."""
        return self._until - asyncio.get_running_loop().time()

    async def send(self, statement: Statement) -> dict[str, Any]:
        """Return the response to a statement, retrying after pauses while it is throttled.

        A statement that conflicts with a transaction on the same item is also retried; it was not done.
        """
        call = functools.partial(getattr(self._client, statement.call), **statement.on(self._table))
        longest = _FIRST_PAUSE_S
        while True:
            self.throttled = None
            self._unanswered += 1
            try:
                # boto3 blocks, so it runs in a thread; cancelling the caller does not stop the request.
                answer = await (call() if is_asynchronous(self._client) else asyncio.to_thread(call))
            except NoConnection:
                # An earlier attempt may have been sent before it lost its connection; the error does not say.
                self.is_in_doubt |= statement.writes and repeats(self._client)
                raise
            except ClientError as error:
                self.is_in_doubt |= statement.writes and was_sent_again(error)
                self._unanswered -= 1
                pause = random.uniform(0, longest)
                if not is_passing(error) or pause >= self.left_s:
                    raise
                self.throttled = None if self._unanswered or self._has_written else error
            except Exception as error:
                # The client calls its credential provider before each attempt.
                self.is_in_doubt |= statement.writes and repeats(self._client) and meaning(error) is None
                raise
            else:
                self._unanswered -= 1
                self._has_written |= statement.writes
                return answer
            await asyncio.sleep(pause)
            longest = min(2 * longest, _LONGEST_PAUSE_S)

    async def attempt(self, statement: Statement) -> Answer:
        """Send a conditional write; a failed condition is an answer, not an error."""
        try:
            return Answer(True, await self.send(statement))
        except ClientError as error:
            if not is_refused(error):
                raise
            return Answer(False, found_by(error), was_sent_again(error))


def is_asynchronous(client: Any) -> bool:
    """Return whether a client's calls are awaited, as in aiobotocore but not in boto3."""
    return inspect.iscoroutinefunction(client.close)


def repeats(client: Any) -> bool:
    """Return whether a client may retry failed requests by itself, which is the default."""
    retries: dict[str, Any] = client.meta.config.retries or {}
    return retries.get("total_max_attempts", 2) > 1


def require_client(client: Any) -> None:
    """Raise `ConfigurationError` for anything but a DynamoDB client."""
    model = getattr(getattr(client, "meta", None), "service_model", None)
    if getattr(model, "service_name", None) != "dynamodb" or not hasattr(client, "put_item"):
        raise ConfigurationError(
            "client must be one of boto3, as boto3.client('dynamodb') returns it, or one of aiobotocore "
            f"that was entered with `async with`; not {type(client).__name__}"
        )
    if not is_asynchronous(client) and _translates(client):
        raise ConfigurationError(
            "the client of a boto3.resource translates values between DynamoDB's types and Python's; pass "
            "boto3.client('dynamodb')"
        )


def _translates(client: Any) -> bool:
    """Return whether a client of boto3 belongs to a resource, whose handlers copy the arguments first."""
    answers = client.meta.events.emit("provide-client-params.dynamodb", params={}, model=None, context={})
    return any(handler.__module__.startswith("boto3.") for handler, _ in answers)


@contextlib.asynccontextmanager
async def make_client(settings: DynamoSettings) -> AsyncGenerator[Any]:
    """Create an aiobotocore client and close it at the end. Raises `ConfigurationError`."""
    # Imported here, because boto3 alone is enough for a client that is passed in.
    aiobotocore: Any = importlib.import_module("aiobotocore.session")
    configuration: Any = importlib.import_module("aiobotocore.config")
    aiobotocore_version: str = importlib.import_module("aiobotocore").__version__
    session = aiobotocore.AioSession(profile=settings.profile)
    session.register_component("data_loader", _loader())
    # Over plain HTTP there is nothing to verify, and reading the certificates takes 50 ms.
    is_plain = (settings.endpoint_url or "").startswith("http:")
    config = configuration.AioConfig(
        # Without these two, each request would validate our own arguments and describe this machine again,
        # which takes a quarter of its processor time.
        parameter_validation=False,
        user_agent=f"stm-backends aiobotocore/{aiobotocore_version}",
        # The core retries writes whose outcome is unknown; the client must not.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Shorter than the deadline, so that a failure to connect is known before it; then nothing was sent.
        connect_timeout=settings.deadline_s / 2,
        read_timeout=settings.deadline_s,
        max_pool_connections=settings.pool_size,
        # After an operation has failed on a dead connection, no other idle connection is used again.
        connector_args={"keepalive_timeout": settings.deadline_s},
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            if not is_plain:
                require_files({"AWS_CA_BUNDLE": session.get_config_variable("ca_bundle")})
            client = await stack.enter_async_context(
                session.create_client(
                    "dynamodb",
                    region_name=settings.region,
                    endpoint_url=settings.endpoint_url,
                    verify=False if is_plain else None,
                    aws_access_key_id=settings.access_key_id,
                    aws_secret_access_key=settings.secret_access_key,
                    aws_session_token=settings.session_token,
                    config=config,
                )
            )
        except ConfigurationError:
            raise
        except (BotoCoreError, ValueError) as error:
            if meaning(error) is not None:
                raise
            if isinstance(error, NoRegionError):
                raise ConfigurationError(
                    "no region: set one, as in dynamodb://TABLE?region=eu-west-1, or set AWS_DEFAULT_REGION"
                ) from None
            # Its message may quote a value.
            raise ConfigurationError(
                "cannot create a DynamoDB client with these settings; check region, profile, endpoint_url,"
                f" the environment and the shared files ({type(error).__name__})"
            ) from None
        yield client


@functools.cache
def _loader() -> Any:
    """Return the loader of DynamoDB's API description, shared by all clients because it takes 0.1 s."""
    aiobotocore: Any = importlib.import_module("aiobotocore.session")
    return aiobotocore.AioSession().get_component("data_loader")
