"""What the DynamoDB driver says to DynamoDB, and why each operation is atomic.

A record is one item, and every statement reads or writes one item. DynamoDB carries out the writes of an
item one after the other, each with its condition on the very item that it changes; and a consistent read
of one item sees it between two of them. So whatever a statement does to body and tail is one step.

The condition says what the caller expects. A write that is refused on it has changed nothing, and
answers what stands there instead (`ReturnValuesOnConditionCheckFailure`, which servers older than June
2023 do not know: they answer nothing, and the driver asks).

`pk` and `sk` are the scope and the name. `expires` is when a record ends, and judges it; `reap_at` is the
whole second after that, for DynamoDB's own reaper, which comes by hours later.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from stm_backends.driver import KEEP, KeepType, Key
from stm_backends_dynamo.items import Item, attribute, key_of, life, number, text
from stm_backends_dynamo.settings import DynamoSettings

MAX_DROP: Final = 250
"""How many entries one FOLD removes. An expression may take 4,096 bytes, and each is named in it."""

TIME_TO_LIVE: Final = "reap_at"

KEYS: Final = ("pk", "sk")

_BEYOND: Final = 999_999
"""A place in the tail that no item has room for: what is set there is added at the end."""

_ALIVE = "attribute_exists(pk) AND (attribute_not_exists(expires) OR expires > :now)"
_ABSENT = "attribute_not_exists(pk) OR expires <= :now"


class Statement(NamedTuple):
    """One request: the name that both client libraries give it, and its arguments but for the table."""

    call: Literal[
        "get_item",
        "put_item",
        "update_item",
        "delete_item",
        "query",
        "create_table",
        "describe_table",
        "describe_time_to_live",
        "update_time_to_live",
    ]
    arguments: Mapping[str, Any]


Seconds: TypeAlias = float
"""A moment, in seconds since the epoch, with microseconds."""


def load(key: Key) -> Statement:
    """Read the whole item; not what a replica still has, but what was acknowledged last."""
    return Statement("get_item", {"Key": key_of(key), "ConsistentRead": True})


def load_version(key: Key) -> Statement:
    """Read who a record is, without what it holds."""
    return Statement(
        "get_item",
        {"Key": key_of(key), "ConsistentRead": True, "ProjectionExpression": "version, expires"},
    )


def append(key: Key, entry: bytes, *, ttl: float | None, now: Seconds) -> Statement:
    """Add an entry to a living record, and answer the new length; the rest of the tail stays there."""
    setting, removing, values = _lifetime(ttl, now)
    return _update(
        key,
        update=(
            f"SET tail[{_BEYOND}] = :entry, entries = entries + :one{setting}"
            f"{' REMOVE ' if removing else ''}{removing}"
        ),
        condition=_ALIVE,
        values={":entry": attribute(entry), ":one": number(1), ":now": number(now), **values},
        answer="UPDATED_NEW",
    )


def create(key: Key, item: Item, *, now: Seconds) -> Statement:
    """Put a new item where there is none, or in the place of one whose time has come."""
    return _put(key, item, condition=_ABSENT, values={":now": number(now)})


def save(key: Key, item: Item, *, now: Seconds) -> Statement:
    """Put a new item in the place of whatever is there, unless that is this very write, sent again."""
    return _put(
        key,
        item,
        condition="attribute_not_exists(pk) OR version <> :version OR expires <= :now",
        values={":version": item["version"], ":now": number(now)},
    )


def save_keeping(key: Key, body: bytes, *, version: str, now: Seconds) -> Statement:
    """Replace what a living record holds and leave its end alone, unless it carries the version already."""
    return _update(
        key,
        update="SET version = :version, body = :body, tail = :none, entries = :zero",
        condition=f"version <> :version AND {_ALIVE}",
        values={
            ":version": text(version),
            ":body": attribute(body),
            ":none": {"L": []},
            ":zero": number(0),
            ":now": number(now),
        },
    )


def fold(
    key: Key,
    body: bytes,
    *,
    version: str,
    expect: str,
    drop: int,
    ttl: float | None | KeepType,
    now: Seconds,
) -> Statement:
    """Store a body and remove the oldest entries, by their places: those appended since move up and stay."""
    setting, removing, values = _lifetime(ttl, now)
    going = ",".join([*(f"tail[{place}]" for place in range(drop)), *([removing] if removing else [])])
    return _update(
        key,
        update=(
            f"SET version = :version, body = :body, entries = entries - :drop{setting}"
            f"{' REMOVE ' if going else ''}{going}"
        ),
        condition=f"version = :expect AND entries >= :drop AND {_ALIVE}",
        values={
            ":version": text(version),
            ":expect": text(expect),
            ":body": attribute(body),
            ":drop": number(drop),
            ":now": number(now),
            **values,
        },
    )


def delete(key: Key, *, expect: str | None, now: Seconds) -> Statement:
    """Remove a living record; with `expect`, of this version only."""
    return Statement(
        "delete_item",
        {
            "Key": key_of(key),
            "ConditionExpression": _ALIVE if expect is None else f"version = :expect AND {_ALIVE}",
            "ExpressionAttributeValues": {
                ":now": number(now),
                **({} if expect is None else {":expect": text(expect)}),
            },
        },
    )


def scan(scope: str, *, after: str, limit: int, now: Seconds) -> Statement:
    """List the living in the order of their sort key, which DynamoDB compares as UTF-8 bytes.

    The expired are left out after the page was cut, so it may be empty and not the last.
    """
    return Statement(
        "query",
        {
            # A key is never compared with empty text.
            "KeyConditionExpression": "pk = :scope AND sk > :after" if after else "pk = :scope",
            "FilterExpression": "attribute_not_exists(expires) OR expires > :now",
            "ExpressionAttributeValues": {
                ":scope": text(scope),
                ":now": number(now),
                **({":after": text(after)} if after else {}),
            },
            "ProjectionExpression": "sk",
            "ConsistentRead": True,
            "Limit": limit,
        },
    )


CREATE_TABLE: Final = Statement(
    "create_table",
    {
        "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in KEYS],
        "KeySchema": [
            {"AttributeName": name, "KeyType": kind}
            for name, kind in zip(KEYS, ("HASH", "RANGE"), strict=True)
        ],
        "BillingMode": "PAY_PER_REQUEST",
    },
)
DESCRIBE_TABLE: Final = Statement("describe_table", {})
DESCRIBE_TIME_TO_LIVE: Final = Statement("describe_time_to_live", {})
ENABLE_TIME_TO_LIVE: Final = Statement(
    "update_time_to_live",
    {"TimeToLiveSpecification": {"Enabled": True, "AttributeName": TIME_TO_LIVE}},
)


def commands(settings: DynamoSettings) -> str:
    """Return the commands of AWS's command line that set up the table."""
    place = [
        f"{option} {shlex.quote(value)}"
        for option, value in (
            ("--table-name", settings.table),
            ("--region", settings.region),
            ("--endpoint-url", settings.endpoint_url),
            ("--profile", settings.profile),
        )
        if value is not None
    ]
    where = " ".join(place)
    pk, sk = (f"AttributeName={name}" for name in KEYS)
    return (
        f"aws dynamodb create-table {where} \\\n"
        f"  --attribute-definitions {pk},AttributeType=S {sk},AttributeType=S \\\n"
        f"  --key-schema {pk},KeyType=HASH {sk},KeyType=RANGE \\\n"
        f"  --billing-mode PAY_PER_REQUEST\n"
        f"aws dynamodb wait table-exists {where}\n"
        f"aws dynamodb update-time-to-live {where} \\\n"
        f"  --time-to-live-specification Enabled=true,AttributeName={TIME_TO_LIVE}\n"
    )


def _put(key: Key, item: Item, *, condition: str, values: Item) -> Statement:
    return Statement(
        "put_item",
        {
            "Item": {**key_of(key), **item},
            "ConditionExpression": condition,
            "ExpressionAttributeValues": values,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        },
    )


def _update(
    key: Key,
    *,
    update: str,
    condition: str,
    values: Item,
    answer: Literal["NONE", "UPDATED_NEW"] = "NONE",
) -> Statement:
    return Statement(
        "update_item",
        {
            "Key": key_of(key),
            "UpdateExpression": update,
            "ConditionExpression": condition,
            "ExpressionAttributeValues": values,
            "ReturnValues": answer,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        },
    )


def _lifetime(ttl: float | None | KeepType, now: Seconds) -> tuple[str, str, Item]:
    """Return what SET and what REMOVE say of a record's end, and the values that this takes."""
    if ttl is KEEP:
        return "", "", {}
    if ttl is None:
        return "", "expires, reap_at", {}
    values = {f":{name}": value for name, value in life(ttl, now).items()}
    return ", expires = :expires, reap_at = :reap_at", "", values
