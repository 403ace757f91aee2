"""The requests of the DynamoDB driver, and why each operation is atomic.

The head of a record defines its content, and a head is one item. DynamoDB executes the writes to an item one
after the other, each with its condition on this item. A consistent read of an item sees it between two
writes. So a statement that changes the head is atomic.

Parts are items beside the head. A part is put before a head names it, never changed, and deleted after no
head names it; its name is never reused. So a reader of a head finds all its parts, or finds that the head has
changed. `life` is in every condition of a write that names a new part: it changes when the record is erased,
and when parts that no head names are deleted. The first part of a record is put in one transaction with the
head, so that every record with parts has the attributes for it.

The condition states what the caller expects. A write whose condition fails has changed nothing, and returns
the current item (`ReturnValuesOnConditionCheckFailure`; servers older than June 2023 return nothing, and the
driver reads it).

`pk` and `sk` are the scope and the name, or for a part both and the part's name. `expires` is when a record
expires. `reap_at` is the whole second after that, for DynamoDB's time to live, which removes items hours
later. A part is removed no earlier than `kept` in its head says, and a head never expires after that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from stm_backends.drivers.contract import KEEP, KeepType, Key
from stm_backends_dynamo.items import (
    LAYOUT,
    MAX_PLACES,
    Cut,
    Element,
    Head,
    Item,
    Reference,
    attribute,
    key_of,
    life,
    number,
    part_key_of,
    part_of,
    partition_of,
    text,
    weight_of,
)
from stm_backends_dynamo.settings import DynamoSettings

MAX_DROP: Final = 250
"""The most entries that one FOLD removes: each is named in an expression of at most 4,096 bytes."""

LARGEST_ITEM: Final = 400 * 1024
"""The bytes of the largest item that DynamoDB stores."""

MAX_HEADS: Final = 32
"""The most heads that one request reads. The server's limits, 100 items and 16 MB, are beyond it.

More save little, and the event loop waits while an answer is parsed.
"""

MAX_BATCH: Final = 25
"""The most items that DynamoDB deletes in one request."""

TIME_TO_LIVE: Final = "reap_at"

KEYS: Final = ("pk", "sk")

_BEYOND: Final = 999_999
"""A place beyond every tail: a value that is set there is added at the end."""

_ALIVE = "attribute_exists(pk) AND (attribute_not_exists(expires) OR expires > :now)"
_EXPIRED = "expires <= :now"
_ABSENT = "attribute_not_exists(pk) OR expires <= :now"
_WHOLE = "attribute_not_exists(life)"
"""A record without parts."""
_COMPLETE = f"{_WHOLE} AND size(tail) = entries"
"""The same, and none of its entries is missing: a fold of places that are not there would hide that."""
_OF_PARTS: Final = ("life", "seals", "beside", "kept", "readable_since")
"""The attributes of a head whose record has, or had, parts."""


_WRITES: Final = frozenset(
    {"put_item", "update_item", "delete_item", "transact_write_items", "batch_write_item"}
)


class Statement(NamedTuple):
    """One request: its name in both client libraries, and its arguments without the table.

    For `transact_write_items` and the two of a batch, the arguments are those of the items.
    """

    call: Literal[
        "get_item",
        "batch_get_item",
        "put_item",
        "update_item",
        "delete_item",
        "query",
        "transact_write_items",
        "batch_write_item",
        "create_table",
        "describe_table",
        "describe_time_to_live",
        "update_time_to_live",
    ]
    arguments: Mapping[str, Any]

    @property
    def writes(self) -> bool:
        """Whether it may change a record."""
        return self.call in _WRITES

    def on(self, table: str) -> Mapping[str, Any]:
        """Return the arguments with the table's name where this request has it."""
        match self.call:
            case "transact_write_items":
                writes: Sequence[tuple[str, Item]] = self.arguments["writes"]
                return {"TransactItems": [{kind: {"TableName": table, **one}} for kind, one in writes]}
            case "batch_get_item":
                return {"RequestItems": {table: self.arguments}}
            case "batch_write_item":
                return {"RequestItems": {table: self.arguments["requests"]}}
            case _:
                return {"TableName": table, **self.arguments}


Seconds: TypeAlias = float
"""A moment, in seconds since the epoch, with microseconds."""


# one head ------------------------------------------------------------------------------------------------


def load(key: Key) -> Statement:
    """Read the whole head; not what a replica still has, but what was acknowledged last."""
    return Statement("get_item", {"Key": key_of(key), "ConsistentRead": True})


def load_heads(keys: Iterable[Key]) -> Statement:
    """Read at most `MAX_HEADS` different heads, each as a consistent `load` does.

    Each item is read by itself, for the same read units. The answer is in any order, and may leave out some.
    """
    return Statement("batch_get_item", {"Keys": [key_of(key) for key in keys], "ConsistentRead": True})


def append(
    key: Key, entry: bytes, *, ttl: float | None, now: Seconds, most: int, seen: Item | None = None
) -> Statement:
    """Add an entry to a living record, and answer the new length; the rest of the tail stays there.

    Refused if the parts hold more than `most` bytes, or are not kept for as long as the record will live.
    With `seen`, a head in which there was room, parts may hold more if nothing was added since.
    """
    sets, removes, values = _lifetime(ttl, now)
    fits = "attribute_not_exists(beside) OR beside <= :most"
    if seen and "beside" in seen:
        same = "grown = :grown" if "grown" in seen else "attribute_not_exists(grown)"
        fits += f" OR (version = :version AND {same} AND beside <= :beside)"
        values |= {f":{name}": seen[name] for name in ("version", "grown", "beside") if name in seen}
    return _update(
        key,
        sets=[
            f"tail[{_BEYOND}] = :entry",
            "entries = entries + :one",
            "grown = if_not_exists(grown, :zero) + :weight",
            *sets,
        ],
        removes=removes,
        condition=(
            f"{_ALIVE} AND {_kept_for(ttl)} AND ({fits}) AND "
            "(attribute_not_exists(readable_since) OR readable_since <= :layout)"
        ),
        values={
            ":entry": attribute(entry),
            ":one": number(1),
            ":zero": number(0),
            ":weight": number(weight_of(entry)),
            ":most": number(most),
            ":layout": number(LAYOUT),
            ":now": number(now),
            **values,
        },
        answer="UPDATED_NEW",
    )


def append_part(
    key: Key, reference: Reference, *, head: Head, ttl: float | None, now: Seconds, most: int
) -> Statement:
    """Add an entry that is in a part; commutes with every append and with every fold."""
    sets, removes, values = _lifetime(ttl, now)
    same, of_head = _same_life(head)
    return _update(
        key,
        sets=[
            f"tail[{_BEYOND}] = :entry",
            "entries = entries + :one",
            "beside = beside + :size",
            *sets,
        ],
        removes=removes,
        condition=f"{_ALIVE} AND {same} AND beside <= :most",
        values={
            ":entry": attribute(reference),
            ":one": number(1),
            ":size": number(reference.size),
            ":most": number(most),
            ":now": number(now),
            **of_head,
            **values,
        },
        answer="UPDATED_NEW",
    )


def create(key: Key, item: Item, *, now: Seconds) -> Statement:
    """Put a new head if there is none, or in place of an expired one, which it returns."""
    return _put(key, item, condition=_ABSENT, values={":now": number(now)})


def save(key: Key, item: Item, *, now: Seconds) -> Statement:
    """Put a new head in place of one without parts, unless this is a retry of the same write."""
    return _put(
        key,
        item,
        condition=f"(attribute_not_exists(pk) OR version <> :version OR expires <= :now) AND {_WHOLE}",
        values={":version": item["version"], ":now": number(now)},
    )


def save_keeping(key: Key, body: bytes, *, version: str, now: Seconds) -> Statement:
    """Replace the content of a live record without parts, keeping its expiry, unless this is a retry."""
    return _update(
        key,
        sets=["version = :version", "body = :body", "tail = :none", "entries = :zero"],
        removes=[],
        condition=f"version <> :version AND {_WHOLE} AND {_ALIVE}",
        values={
            ":version": text(version),
            ":body": attribute(body),
            ":none": {"L": []},
            ":zero": number(0),
            ":now": number(now),
        },
    )


def save_parts(
    key: Key,
    after: Head,
    *,
    head: Head,
    of_parts: Item,
    ttl: float | None | KeepType,
    now: Seconds,
) -> Statement:
    """Replace the content of a live record if it or the body is in parts; returns the old head."""
    sets, removes, values = _lifetime(ttl, now)
    same, of_head = _same_life(head) if head.life else (_WHOLE, {})
    setting, removing, marks = _marks(of_parts)
    return _update(
        key,
        sets=["version = :version", "body = :body", "tail = :none", "entries = :zero", *setting, *sets],
        removes=[*removing, *removes],
        condition=f"version <> :version AND {same} AND {_ALIVE}{_in_time(marks, ttl)}",
        values={
            ":version": text(after.version),
            ":body": attribute(after.body),
            ":none": {"L": []},
            ":zero": number(0),
            ":now": number(now),
            **marks,
            **of_head,
            **values,
        },
        answer="ALL_OLD",
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
    """Store a body and remove the oldest entries by their places; entries appended since move up and stay.

    Refused if the record has parts, because only the head says what is at a place.
    """
    sets, removes, values = _lifetime(ttl, now)
    return _update(
        key,
        sets=["version = :version", "body = :body", "entries = entries - :drop", *sets],
        removes=[*(f"tail[{place}]" for place in range(drop)), *removes],
        condition=f"version = :expect AND entries >= :drop AND {_COMPLETE} AND {_ALIVE}",
        values={
            ":version": text(version),
            ":expect": text(expect),
            ":body": attribute(body),
            ":drop": number(drop),
            ":now": number(now),
            **values,
        },
    )


def rewrite(
    key: Key,
    body: bytes,
    entries: Sequence[bytes],
    *,
    version: str,
    expect: str,
    ttl: float | None | KeepType,
    now: Seconds,
) -> Statement:
    """Store a body and set the oldest entries by their places; refused as `fold` is."""
    sets, removes, values = _lifetime(ttl, now)
    return _update(
        key,
        sets=[
            "version = :version",
            "body = :body",
            *(f"tail[{place}] = :t{place}" for place in range(len(entries))),
            *sets,
        ],
        removes=removes,
        condition=f"version = :expect AND entries >= :count AND {_COMPLETE} AND {_ALIVE}",
        values={
            ":version": text(version),
            ":expect": text(expect),
            ":body": attribute(body),
            ":count": number(len(entries)),
            ":now": number(now),
            **{f":t{place}": attribute(entry) for place, entry in enumerate(entries)},
            **values,
        },
    )


def fold_parts(
    key: Key,
    after: Head,
    *,
    head: Head,
    front: Sequence[Element],
    cut: Cut,
    of_parts: Item,
    ttl: float | None | KeepType,
    now: Seconds,
) -> Statement:
    """Make of a record with parts what is to be after a fold or a rewrite; no fold and no seal came between.

    `front` replaces what is cut. Places that are set precede those that are removed, so the order of the two
    does not matter. If more places are needed than the cut has, the whole tail is set, and an append since
    refuses the write.
    """
    sets, removes, values = _lifetime(ttl, now)
    same, setting, removing, of_head = _as_seen(head, after, of_parts)
    if cut.rest:
        front = (*front, cut.rest)
    if len(front) <= min(cut.places, MAX_PLACES):
        placing = [f"tail[{place}] = :t{place}" for place in range(len(front))]
        cutting = [f"tail[{place}]" for place in range(len(front), cut.places)]
        placed = {f":t{place}": attribute(element) for place, element in enumerate(front)}
    else:
        same += " AND entries = :entries"
        placing, cutting = ["tail = :tail"], []
        tail = {"L": [attribute(element) for element in after.tail]}
        placed = {":tail": tail, ":entries": number(head.entries)}
    return _update(
        key,
        sets=[
            "version = :version",
            "body = :body",
            "entries = entries - :drop",
            *placing,
            *setting,
            *sets,
        ],
        removes=[*cutting, *removing, *removes],
        condition=f"version = :expect AND {same} AND {_ALIVE}{_in_time(of_head, ttl)}",
        values={
            ":version": text(after.version),
            ":expect": text(head.version),
            ":body": attribute(after.body),
            ":drop": number(head.entries - after.entries),
            ":now": number(now),
            **placed,
            **of_head,
            **values,
        },
    )


def delete(key: Key, *, expect: str | None, now: Seconds, expired: bool = False) -> Statement:
    """Remove a live, or an `expired`, record without parts; with `expect`, only of this version."""
    return Statement(
        "delete_item",
        {
            "Key": key_of(key),
            "ConditionExpression": f"{_expected(expect)}{_WHOLE} AND {_EXPIRED if expired else _ALIVE}",
            "ExpressionAttributeValues": {
                ":now": number(now),
                **({} if expect is None else {":expect": text(expect)}),
            },
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        },
    )


def scan(scope: str, *, after: str, limit: int, now: Seconds, expired: bool = False) -> Statement:
    """List live records, or those that have `expired` and that DynamoDB has not removed yet.

    They are in the order of their sort key, which DynamoDB compares as UTF-8 bytes. The others are left out
    after the page was cut, so it may be empty and not the last. A record whose parts are still being erased
    is listed as live, so that erasing all listed records finds it again.
    """
    return Statement(
        "query",
        {
            # A key is never compared with empty text.
            "KeyConditionExpression": "pk = :scope AND sk > :after" if after else "pk = :scope",
            "FilterExpression": (
                f"{_EXPIRED} AND attribute_not_exists(erased)"
                if expired
                else "attribute_not_exists(expires) OR expires > :now OR attribute_exists(erased)"
            ),
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


# parts ---------------------------------------------------------------------------------------------------


def load_parts(key: Key, *, after: Item | None, names_only: bool = False) -> Statement:
    """Read a page of a record's parts, or of their names, including parts that its head does not name."""
    return Statement(
        "query",
        {
            "KeyConditionExpression": "pk = :record",
            "ExpressionAttributeValues": {":record": partition_of(key)},
            "ConsistentRead": True,
            **({"ProjectionExpression": "sk"} if names_only else {}),
            **({"ExclusiveStartKey": after} if after else {}),
        },
    )


def load_part(key: Key, part: str) -> Statement:
    """Read one part."""
    return Statement("get_item", {"Key": part_key_of(key, part), "ConsistentRead": True})


def put_part(key: Key, part: str, values: Iterable[bytes], *, kept: Seconds | None) -> Statement:
    """Put a part. Its name is new, so a retry is harmless."""
    return Statement("put_item", {"Item": {**part_key_of(key, part), **part_of(values, kept)}})


def keep_part(key: Key, part: str, *, kept: Seconds | None) -> Statement:
    """Keep a part at least until then. Never shortens, so the order of writers does not matter."""
    if kept is None:
        arguments: Mapping[str, Any] = {
            "UpdateExpression": "REMOVE reap_at",
            "ConditionExpression": "attribute_exists(pk)",
        }
    else:
        arguments = {
            "UpdateExpression": "SET reap_at = :kept",
            "ConditionExpression": "reap_at < :kept",
            "ExpressionAttributeValues": {":kept": number(kept)},
        }
    return Statement("update_item", {"Key": part_key_of(key, part), **arguments})


def delete_parts(key: Key, parts: Iterable[str]) -> Statement:
    """Delete at most `MAX_BATCH` parts; missing ones are ignored."""
    deletes = [{"DeleteRequest": {"Key": part_key_of(key, part)}} for part in parts]
    return Statement("batch_write_item", {"requests": deletes})


def together(*statements: Statement) -> Statement:
    """Do several writes in one transaction; refused if a condition of one of them does not hold."""
    kinds = {"put_item": "Put", "update_item": "Update"}
    writes = [
        (kinds[one.call], {name: of for name, of in one.arguments.items() if name != "ReturnValues"})
        for one in statements
    ]
    return Statement("transact_write_items", {"writes": writes})


def seal(
    key: Key,
    after: Head,
    *,
    head: Head,
    sealed: Mapping[int, Reference],
    emptied: Iterable[int],
    of_parts: Item,
) -> Statement:
    """Set references at places of the tail, and remove the other places whose entries they refer to.

    A concurrent append does not conflict; a concurrent fold or seal does. In each run, the place that is set
    precedes those that are removed, and DynamoDB counts places as they were before the update.
    """
    same, setting, removing, values = _as_seen(head, after, of_parts)
    return _update(
        key,
        sets=[*(f"tail[{place}] = :s{place}" for place in sealed), *setting],
        removes=[*(f"tail[{place}]" for place in emptied), *removing],
        condition=f"version = :version AND {same}{_in_time(values, KEEP)}",
        values={
            ":version": text(head.version),
            **{f":s{place}": attribute(reference) for place, reference in sealed.items()},
            **values,
        },
    )


def mark(key: Key, *, head: Head, of_parts: Item) -> Statement:
    """Say of a record that it may have parts, before its first one is put. Changes nothing else."""
    setting, removing, marks = _marks(of_parts)
    return _update(
        key,
        sets=setting,
        removes=removing,
        condition=f"version = :version AND {_WHOLE}{_in_time(marks, KEEP)}",
        values={":version": text(head.version), **marks},
    )


def prolong(key: Key, *, head: Head, kept: Seconds | None) -> Statement:
    """Say that the parts of a head, and there are no others since, are kept until then."""
    same, of_head = _same_life(head)
    return _update(
        key,
        sets=[] if kept is None else ["kept = :until"],
        removes=["kept"] if kept is None else [],
        condition=f"version = :version AND seals = :seals AND beside = :beside AND {same}",
        values={
            ":version": text(head.version),
            ":seals": number(head.seals),
            ":beside": number(head.beside),
            **({} if kept is None else {":until": number(kept)}),
            **of_head,
        },
    )


def fence(key: Key, *, life: Mapping[str, Any], new: str) -> Statement:
    """Let no part that was put so far become a part of the record any more; answer the head."""
    return _update(
        key,
        sets=["life = :new"],
        removes=[],
        condition="life = :life AND attribute_not_exists(erased)",
        values={":new": text(new), ":life": dict(life)},
        answer="ALL_NEW",
    )


def erase(key: Key, *, expect: str | None, now: Seconds, expired: bool = False) -> Statement:
    """End a live, or an `expired`, record with parts, mark it as erased, and return the head."""
    return _update(
        key,
        sets=["expires = :zero", "erased = :true"],
        removes=["reap_at"],
        condition=f"{_expected(expect)}attribute_exists(life) AND {_EXPIRED if expired else _ALIVE}",
        values={
            ":zero": number(0),
            ":true": {"BOOL": True},
            ":now": number(now),
            **({} if expect is None else {":expect": text(expect)}),
        },
        answer="ALL_NEW",
    )


def bury(key: Key, *, life: Mapping[str, Any]) -> Statement:
    """Delete the head of an erased record, unless another record has taken its place."""
    return Statement(
        "delete_item",
        {
            "Key": key_of(key),
            "ConditionExpression": "life = :life AND attribute_exists(erased)",
            "ExpressionAttributeValues": {":life": life},
        },
    )


# the table -----------------------------------------------------------------------------------------------


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
            "ReturnValues": "ALL_OLD",
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        },
    )


def _update(
    key: Key,
    *,
    sets: Sequence[str],
    removes: Sequence[str],
    condition: str,
    values: Item,
    answer: Literal["NONE", "UPDATED_NEW", "ALL_NEW", "ALL_OLD"] = "NONE",
) -> Statement:
    clauses = [f"{word} {', '.join(them)}" for word, them in (("SET", sets), ("REMOVE", removes)) if them]
    return Statement(
        "update_item",
        {
            "Key": key_of(key),
            "UpdateExpression": " ".join(clauses),
            "ConditionExpression": condition,
            "ExpressionAttributeValues": values,
            "ReturnValues": answer,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        },
    )


def _lifetime(ttl: float | None | KeepType, now: Seconds) -> tuple[list[str], list[str], Item]:
    """Return what SET and what REMOVE say of a record's end, and the values that this takes."""
    if ttl is KEEP:
        return [], [], {}
    if ttl is None:
        return [], ["expires", "reap_at"], {}
    values = {f":{name}": value for name, value in life(ttl, now).items()}
    return ["expires = :expires", "reap_at = :reap_at"], [], values


def _kept_for(ttl: float | None) -> str:
    """Return the condition that the parts, if there are any, are kept for as long as the record will live."""
    return f"(attribute_not_exists(kept){'' if ttl is None else ' OR kept >= :expires'})"


def _same_life(head: Head) -> tuple[str, Item]:
    """Return the condition that parts may be named that were put since a head was read, and its values."""
    values = {":seen_life": text(head.life or "")}
    if head.kept is None:
        return "life = :seen_life AND attribute_not_exists(kept)", values
    return "life = :seen_life AND kept = :seen_kept", {**values, ":seen_kept": number(head.kept)}


def _as_seen(head: Head, after: Head, of_parts: Item) -> tuple[str, list[str], list[str], Item]:
    """Return the condition that places mean what they did, what to SET and REMOVE of parts, and the values.

    `of_parts` is what is said of a record that gets its first part. Of another one it is counted by how
    many bytes its parts grow, and that its places have changed.
    """
    if not head.life:
        return _WHOLE, *_marks(of_parts)
    same, values = _same_life(head)
    values |= {
        ":seals": number(head.seals),
        ":beside": number(after.in_parts - head.in_parts),
        ":once": number(1),
    }
    return f"{same} AND seals = :seals", ["beside = beside + :beside", "seals = seals + :once"], [], values


def _in_time(values: Item, ttl: float | None | KeepType) -> str:
    """Return the condition that a record, which will be kept that long, does not live longer by now."""
    return " AND expires <= :kept" if ttl is KEEP and ":kept" in values else ""


def _marks(of_parts: Item) -> tuple[list[str], list[str], Item]:
    """Return what SET and what REMOVE say of a record's parts, and the values that this takes."""
    return (
        [f"{name} = :{name}" for name in of_parts],
        [name for name in _OF_PARTS if name not in of_parts],
        {f":{name}": value for name, value in of_parts.items()},
    )


def _expected(expect: str | None) -> str:
    return "" if expect is None else "version = :expect AND "
