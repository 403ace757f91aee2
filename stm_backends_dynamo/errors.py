"""The meaning of each error of DynamoDB and its client libraries for the caller."""

from __future__ import annotations

import sys
from typing import Any, Final, cast

from botocore import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none
from botocore.exceptions import BotoCoreError, ClientError  # pyright: ignore[reportMissingTypeStubs]
from botocore.parsers import ResponseParserError  # pyright: ignore[reportMissingTypeStubs]

from stm_backends.drivers.edge import Meaning, passed_through
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable

NoConnection: Final = exceptions.ConnectionError
"""The errors of a failed attempt to connect."""

REFUSED: Final = "ConditionalCheckFailedException"
"""Not an error, but the answer to a write with a condition that does not hold."""

DENIED: Final = "AccessDeniedException"
"""The error of a role without the permission for a request, or for one of its keys."""

INVALID: Final = "ValidationException"
"""The error for a record that becomes too large, and for other invalid requests."""

THROTTLED: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
    }
)
"""Refused temporarily before anything was done; retried."""

CONFLICT: Final = "TransactionConflictException"
"""Refused because of a concurrent transaction on the same item; retried."""

CANCELLED: Final = "TransactionCanceledException"
"""A cancelled transaction; its reasons say why."""

_CONDITION_FAILED: Final = "ConditionalCheckFailed"
_NOT_VALID: Final = "ValidationError"
_ITEM_SIZE: Final = "Item size "
_PASSING_REASONS: Final = frozenset(
    {"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"}
)

_THROTTLED: Final[Meaning] = (Unavailable, "throttled until the deadline; raise the table's throughput")
_CONFLICT: Final[Meaning] = (
    Unavailable,
    "the item is part of a concurrent transaction, or of a write in another region",
)
_NO_TABLE: Final[Meaning] = (
    Unavailable,
    (
        "the table does not exist in this region; open once with create=True (`stm-backends ping --create "
        "--url URL` does), or run what `stm-backends schema --url URL` prints"
    ),
)
_DENIED: Final[Meaning] = (Denied, "these credentials lack a permission, are invalid or have expired")
_NO_CREDENTIALS: Final[Meaning] = (
    Denied,
    (
        "no credentials were found or could be loaded in the usual places of AWS programs: "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, the role of the host"
    ),
)
_CLOCK: Final[Meaning] = (
    Denied,
    "the signature is not valid: the secret key or the host's clock is wrong",
)
_ALTERED: Final[Meaning] = (
    Corrupt,
    "the request does not fit the table or the record: the keys differ, or another program changed it",
)
_FAILED: Final[Meaning] = (OutcomeUnknown, "the server failed")
_NO_CONNECTION: Final[Meaning] = (Unavailable, "no connection could be made")
_LOST: Final[Meaning] = (OutcomeUnknown, "the connection was lost before the answer came")

_BY_CODE: Final[dict[str, Meaning]] = {
    **dict.fromkeys(THROTTLED, _THROTTLED),
    DENIED: _DENIED,
    "ExpiredTokenException": _DENIED,
    "IncompleteSignatureException": _DENIED,
    "InternalServerError": _FAILED,
    "InvalidClientTokenId": _DENIED,
    "InvalidSignatureException": _CLOCK,
    "MissingAuthenticationTokenException": _DENIED,
    "NotAuthorized": _DENIED,
    "OptInRequired": _DENIED,
    "ReplicatedWriteConflictException": _CONFLICT,
    "ResourceNotFoundException": _NO_TABLE,
    CANCELLED: _CONFLICT,
    CONFLICT: _CONFLICT,
    "UnrecognizedClientException": _DENIED,
}

# A firewall or an endpoint's policy in front of DynamoDB has its own error codes.
_BY_STATUS: Final[dict[int, Meaning]] = {401: _DENIED, 403: _DENIED}

_UNKNOWN: Final[Meaning] = (OutcomeUnknown, "DynamoDB returned an unknown error")

_BY_CLASS: Final[dict[type[Exception], Meaning]] = {
    exceptions.EndpointConnectionError: _NO_CONNECTION,
    exceptions.ConnectTimeoutError: _NO_CONNECTION,
    exceptions.ProxyConnectionError: _NO_CONNECTION,
    exceptions.SSLError: (Unavailable, "no secure connection could be made (TLS)"),
    exceptions.NoCredentialsError: _NO_CREDENTIALS,
    exceptions.PartialCredentialsError: _NO_CREDENTIALS,
    exceptions.CredentialRetrievalError: _NO_CREDENTIALS,
    exceptions.TokenRetrievalError: _NO_CREDENTIALS,
    exceptions.SSOError: _NO_CREDENTIALS,
    exceptions.HTTPClientError: _LOST,
    exceptions.ChecksumError: _LOST,
    ResponseParserError: (OutcomeUnknown, "the answer could not be read"),
}


def code_of(error: ClientError) -> str:
    """Return DynamoDB's code of an error."""
    return cast("dict[str, Any]", error.response).get("Error", {}).get("Code", "")


def _status_of(error: ClientError) -> int:
    return cast("dict[str, Any]", error.response).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def is_refused(error: ClientError) -> bool:
    """Return whether a write was refused because of its condition, alone or in a transaction."""
    return code_of(error) == REFUSED or _CONDITION_FAILED in _reasons_of(error)


def is_invalid(error: ClientError) -> bool:
    """Return whether a write was refused as invalid, for example because it makes an item too large."""
    return code_of(error) == INVALID or (not is_refused(error) and _NOT_VALID in _reasons_of(error))


def is_too_large(error: ClientError) -> bool:
    """Return whether a write was refused because an item would become too large."""
    response = cast("dict[str, Any]", error.response)
    refusals = (response.get("Error", {}), _reasons_of(error).get(_NOT_VALID, {}))
    return is_invalid(error) and any(one.get("Message", "").startswith(_ITEM_SIZE) for one in refusals)


def is_passing(error: ClientError) -> bool:
    """Return whether an error is transient and nothing was done, so that the request can be retried."""
    code = code_of(error)
    if code == CANCELLED:
        return _reasons_of(error).keys() - {"None"} <= _PASSING_REASONS
    return code in THROTTLED or code == CONFLICT


def found_by(error: ClientError) -> dict[str, Any]:
    """Return the current item from a refused write; `{}` if it does not exist or the server omits it."""
    response = cast("dict[str, Any]", error.response)
    return response.get("Item") or _reasons_of(error).get(_CONDITION_FAILED, {}).get("Item", {})


def was_sent_again(error: ClientError) -> bool:
    """Return whether the client library had already sent the request, with an unknown outcome."""
    response = cast("dict[str, Any]", error.response)
    return response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0


def _reasons_of(error: ClientError) -> dict[str, dict[str, Any]]:
    """Return the reasons of a cancelled transaction by code; `{}` for other errors."""
    reasons = cast("dict[str, Any]", error.response).get("CancellationReasons", [])
    return {reason.get("Code", "None"): reason for reason in reasons}


def meaning(error: Exception) -> Meaning | None:
    """Return the meaning of an error, without its own text, which may quote a key."""
    if isinstance(error, ClientError):
        if is_invalid(error):
            return _ALTERED
        return _BY_CODE.get(code_of(error)) or _BY_STATUS.get(_status_of(error), _UNKNOWN)
    if isinstance(error, exceptions.EndpointConnectionError) and _was_connected(error):
        return _LOST
    for kind in type(error).__mro__:
        if kind in _BY_CLASS:
            return _BY_CLASS[kind]
    return None


def before_sending(error: BaseException) -> bool:
    """Return whether an error that is not in the tables was raised before anything was sent.

    Credentials are fetched, and may be renewed, when a request is signed.
    """
    return passed_through(error, {"aiobotocore", "botocore"}, {"sign"})


def _was_connected(error: BotoCoreError) -> bool:
    """Return whether a connection was lost. aiobotocore raises the same error for a failed connect."""
    cause: object = cast("Any", error).kwargs.get("error")
    aiohttp = sys.modules.get("aiohttp")
    return (
        aiohttp is not None
        and isinstance(cause, aiohttp.ClientConnectionError)
        and not isinstance(cause, aiohttp.ClientConnectorError)
    )
