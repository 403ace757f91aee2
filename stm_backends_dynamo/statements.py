"""The requests of the DynamoDB driver, and the reasons why each operation is atomic.

The head of a record defines its content, and a head is one item. DynamoDB executes the writes to an item one
after another, each with its condition on this item. A consistent read sees an item between two writes. So a
statement that changes the head is atomic.

Parts are separate items. A part is put before any head names it, never changed, and deleted only once no head
names it; its name is never reused. So a reader of a head finds all its parts, or finds that the head has
changed. `life` is in the condition of every write that names a new part: it changes when the record is
erased, and when parts that no head names are deleted. The first part of a record is put in one transaction
with the head, so that every record with parts has the attributes for them.

The condition states the caller's expectation. A write with a failed condition has changed nothing, and
returns the current item (`ReturnValuesOnConditionCheckFailure`; servers older than June 2023 return nothing,
so the driver reads it).

`pk` and `sk` are the scope and the name; for a part, `pk` combines both, and `sk` is the part's name.
`expires` is the time of expiry. `reap_at` is the whole second after that, for DynamoDB's time to live, which
removes items hours later. A part is removed no earlier than its head's `kept`, and a head never expires after
that.
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
"""Maximum number of entries that one FOLD removes; each is named in an expression of up to 4,096 bytes."""

LARGEST_ITEM: Final = 400 * 1024
"""Maximum size in bytes of an item in DynamoDB."""

MAX_HEADS: Final = 32
"""Maximum number of heads read by one request. The server's limits, 100 items and 16 MB, are higher.

More would save little, and the event loop waits while an answer is parsed.
"""

MAX_BATCH: Final = 25
"""Maximum number of items that DynamoDB deletes in one request."""

TIME_TO_LIVE: Final = "reap_at"

KEYS: Final = ("pk", "sk")

_BEYOND: Final = 999_999
"""An index beyond every tail; a value set there is added at the end."""

_ALIVE = "attribute_exists(pk) AND (attribute_not_exists(expires) OR expires > :now)"
_EXPIRED = "expires <= :now"
_ABSENT = "attribute_not_exists(pk) OR expires <= :now"
_WHOLE = "attribute_not_exists(life)"
"""A record without parts."""
_COMPLETE = f"{_WHOLE} AND size(tail) = entries"
"""A record without parts and with all its entries: a fold of missing places would hide the loss."""
_OF_PARTS: Final = ("life", "seals", "beside", "kept", "readable_since")
"""The attributes of the head of a record that has or had parts."""


_WRITES: Final = frozenset(
    {"put_item", "update_item", "delete_item", "transact_write_items", "batch_write_item"}
)


class Statement(NamedTuple):
    """One request: its name in both client libraries, and its arguments without the table.

    For `transact_write_items` and the two batch requests, the arguments are those of the items.
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
        """True if it may change a record."""
        return self.call in _WRITES

    def on(self, table: str) -> Mapping[str, Any]:
        """Return the arguments with the table's name added where this request needs it."""
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
"""A time in seconds since the epoch, with microseconds."""


# one head ------------------------------------------------------------------------------------------------


def load(key: Key) -> Statement:
    """Read the whole head with its last acknowledged content, not a replica's older one."""
    return Statement("get_item", {"Key": key_of(key), "ConsistentRead": True})


def load_heads(keys: Iterable[Key]) -> Statement:
    """Read at most `MAX_HEADS` different heads, each as a consistent `load` does.

    Each item is read independently, for the same read units. The answer is unordered, and may be incomplete.
    """
    return Statement("batch_get_item", {"Keys": [key_of(key) for key in keys], "ConsistentRead": True})


def append(
    key: Key, entry: bytes, *, ttl: float | None, now: Seconds, most: int, seen: Item | None = None
) -> Statement:
    """Add an entry to a live record, and return the new length; the rest of the tail is not returned.

    Refused if the parts hold more than `most` bytes, or are not kept for the record's new lifetime. With
    `seen`, a head that had room, parts may hold more if nothing was added since.
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
    """Add an entry stored in a part; commutes with every append and every fold."""
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
    """Put a new head if none exists, or in place of an expired one, which is returned."""
    return _put(key, item, condition=_ABSENT, values={":now": number(now)})


def save(key: Key, item: Item, *, now: Seconds) -> Statement:
    """Put a new head in place of a head without parts, unless this is a retry of the same write."""
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
    """Replace the content of a live record if it or the body is in parts. Returns the old head."""
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
    """Store a body and remove the oldest entries by place; entries appended since move up and stay.

    Refused if the record has parts, because only the head knows the content of each place.
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
    """Store a body and set the oldest entries by place; refused like `fold`."""
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
    """Store the result of a fold or rewrite of a record with parts, if no fold or seal came between.

    `front` replaces the cut places. Places that are set precede those that are removed, so the order of the
    two does not matter. If more places are needed than were cut, the whole tail is set, and an append in
    between makes the write fail.
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
    """Remove a live, or an `expired`, record without parts; with `expect`, only in this version."""
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
    """List live records, or `expired` ones that DynamoDB has not removed yet.

    They are in the order of their sort key, which DynamoDB compares as UTF-8 bytes. Other records are
    filtered out after the page was cut, so an empty page may not be the last. A record with parts that are
    still being erased is listed as live, so that erasing all listed records finds it again.
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
    """Put a part. Its name is unique, so a retry is harmless."""
    return Statement("put_item", {"Item": {**part_key_of(key, part), **part_of(values, kept)}})


def keep_part(key: Key, part: str, *, kept: Seconds | None) -> Statement:
    """Keep a part at least until `kept`. Never shortens the time, so the order of writers does not matter."""
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
    """Do several writes in one transaction; refused if any of their conditions fails."""
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
    """Set references at places of the tail, and remove the other places whose entries they include.

    A concurrent append does not conflict; a concurrent fold or seal does. In each run, the place that is set
    precedes those that are removed, and DynamoDB counts places as before the update.
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
    """Mark a record as one that may have parts, before its first part is put. Changes nothing else."""
    setting, removing, marks = _marks(of_parts)
    return _update(
        key,
        sets=setting,
        removes=removing,
        condition=f"version = :version AND {_WHOLE}{_in_time(marks, KEEP)}",
        values={":version": text(head.version), **marks},
    )


def prolong(key: Key, *, head: Head, kept: Seconds | None) -> Statement:
    """Note that the parts of a head are kept until `kept`, if it has no new ones since."""
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
    """Prevent all parts put so far from becoming parts of the record, and return the head."""
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
    """Delete the head of an erased record, unless a new record has taken its place."""
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
    """Return the AWS command line's commands that set up the table."""
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
    """Return the SET and REMOVE clauses for a record's expiry, and their values."""
    if ttl is KEEP:
        return [], [], {}
    if ttl is None:
        return [], ["expires", "reap_at"], {}
    values = {f":{name}": value for name, value in life(ttl, now).items()}
    return ["expires = :expires", "reap_at = :reap_at"], [], values


def _kept_for(ttl: float | None) -> str:
    """Return the condition that the parts, if any, are kept for the record's lifetime."""
    return f"(attribute_not_exists(kept){'' if ttl is None else ' OR kept >= :expires'})"


def _same_life(head: Head) -> tuple[str, Item]:
    """Return the condition that allows naming parts put since a head was read, and its values."""
    values = {":seen_life": text(head.life or "")}
    if head.kept is None:
        return "life = :seen_life AND attribute_not_exists(kept)", values
    return "life = :seen_life AND kept = :seen_kept", {**values, ":seen_kept": number(head.kept)}


def _as_seen(head: Head, after: Head, of_parts: Item) -> tuple[str, list[str], list[str], Item]:
    """Return the condition that places are unchanged, the SET and REMOVE clauses for parts, and the values.

    `of_parts` has the attributes for a record that gets its first part. For other records, the growth of the
    parts in bytes and the change of the places are counted.
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
    """Return the condition that the record does not by now live longer than its parts are kept."""
    return " AND expires <= :kept" if ttl is KEEP and ":kept" in values else ""


def _marks(of_parts: Item) -> tuple[list[str], list[str], Item]:
    """Return the SET and REMOVE clauses for a record's parts, and their values."""
    return (
        [f"{name} = :{name}" for name in of_parts],
        [name for name in _OF_PARTS if name not in of_parts],
        {f":{name}": value for name, value in of_parts.items()},
    )


def _expected(expect: str | None) -> str:
    return "" if expect is None else "version = :expect AND "
