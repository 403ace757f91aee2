"""`open_dynamo`: the backend with typed options, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from stm_backends.backend import Backend, open_backend
from stm_backends.opening import BackendOptions


class DynamoOptions(BackendOptions, total=False):
    """The options of `open_dynamo`: those of every backend, and the settings in `DynamoSettings`."""

    client: Any
    clock: Callable[[], float]
    deadline_s: float
    max_entry_bytes: int
    table: str
    region: str | None
    endpoint_url: str | None
    profile: str | None
    access_key_id: str | None
    secret_access_key: str | None
    session_token: str | None
    pool_size: int


def open_dynamo(url: str | None = None, **options: Unpack[DynamoOptions]) -> Backend:
    """Return a backend on DynamoDB, as `open_backend("dynamo", url=url, ...)` does.

    `client` is one of boto3 or aiobotocore, which stays open. With one, settings of a connection are refused.
    """
    return open_backend("dynamo", url=url, **options)
