"""The commands of the MongoDB driver, and the reasons why each operation is atomic.

A record is one document, `{_id: {scope, name}, version, expires, size, body, tail}`, and every write is one
command on this one document. MongoDB runs a command on one document atomically: it reads the document,
evaluates conditions and update, and writes the result, or starts over if the document has changed in between.
So every decision is made here, in expressions that the server evaluates, never between two commands.

Concurrent loads share a command that matches several documents. MongoDB reads each of them at one moment, so
each answer is a snapshot of one record.

`$$NOW` is the server's clock, and constant throughout a command. An expired record counts as absent, whether
or not MongoDB's TTL monitor has removed it.

The statements are constants. Variable values are passed by name in `let`, such as `$$entry`. `values` wraps
each value in `$literal`, so that a dollar sign has no special meaning. Keys and versions are always values,
never field names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from stm_backends.drivers.coalesced import ALL, LARGE_BYTES
from stm_backends.drivers.contract import Key
from stm_backends.drivers.layouts import Layout

Document: TypeAlias = dict[str, Any]

LARGEST_DOCUMENT: Final = 16 * 1024 * 1024
"""Maximum size in bytes of a document in MongoDB."""

# An absent document has no `expires`, so this is false for it, too.
IS_THERE: Final[Document] = {"$or": [{"$eq": ["$expires", None]}, {"$gt": ["$expires", "$$NOW"]}]}

# Adding null gives null, which means that the record never expires.
_ENDS: Final[Document] = {"$add": ["$$NOW", "$$ttl"]}
_ENDS_OR_KEEPS: Final[Document] = {
    "$cond": ["$$keep", {"$cond": [IS_THERE, "$expires", None]}, _ENDS],
}

_GOING: Final[Document] = {"$slice": ["$tail", "$$drop"]}
_STAYING: Final[Document] = {"$slice": ["$tail", "$$drop", {"$max": [1, {"$size": "$tail"}]}]}


def _bytes_of(entries: Document | str) -> Document:
    return {"$sum": {"$map": {"input": entries, "in": {"$binarySize": "$$this"}}}}


_GROWN: Final[Document] = {"$add": ["$$record.size", {"$binarySize": "$$entry"}]}

# The filter names only the record, so that MongoDB itself retries when two writers create the same record at
# once. (It also does not allow `$expr` in the filter of an upsert.) `record` is the live record, or a new one
# in place of an absent or expired one. The update adds the entry, or changes nothing if it does not fit. The
# answer is the previous length and size of the record; the length of an expired one is -1.
APPEND: Final[list[Document]] = [
    {
        "$replaceWith": {
            "$let": {
                "vars": {
                    "record": {
                        "$cond": [
                            IS_THERE,
                            "$$ROOT",
                            {
                                "_id": "$_id",
                                "version": "$$initial_version",
                                "expires": None,
                                "size": 0,
                                "body": None,
                                "tail": [],
                            },
                        ]
                    }
                },
                "in": {
                    "$cond": [
                        {"$gt": [_GROWN, "$$limit"]},
                        "$$record",
                        {
                            "$mergeObjects": [
                                "$$record",
                                {
                                    "expires": _ENDS,
                                    "size": _GROWN,
                                    # A missing array must be an error; null would silently drop the entry.
                                    "tail": {
                                        "$concatArrays": [{"$ifNull": ["$$record.tail", False]}, ["$$entry"]]
                                    },
                                },
                            ]
                        },
                    ]
                },
            }
        }
    }
]
BEFORE: Final[Document] = {
    "_id": 0,
    "length": {"$cond": [IS_THERE, {"$size": "$tail"}, -1]},
    "size": 1,
}

_SAVED: Final[Document] = {
    "_id": "$_id",
    "version": "$$version",
    "expires": _ENDS_OR_KEEPS,
    "size": {"$binarySize": "$$body"},
    "body": "$$body",
    "tail": [],
}

# `expect=ANY`: every record is changed, unless it already carries the new version.
SAVE: Final[list[Document]] = [
    {
        "$replaceWith": {
            "$cond": [{"$and": [IS_THERE, {"$eq": ["$version", "$$version"]}]}, "$$ROOT", _SAVED],
        }
    }
]

# `expect=ABSENT`: an existing record is not changed; the version in the answer shows which write won.
CREATE: Final[list[Document]] = [{"$replaceWith": {"$cond": [IS_THERE, "$$ROOT", _SAVED]}}]

# `expect=<version>`: the filter contains the condition, because nothing is created here. A matching record is
# changed, unless it already carries the new version or would become too large; the version in the answer
# distinguishes the two.
FOLDABLE: Final[Document] = {
    "$and": [
        IS_THERE,
        {
            "$or": [
                {"$eq": ["$version", "$$version"]},
                {"$and": [{"$eq": ["$version", "$$expect"]}, {"$gte": [{"$size": "$tail"}, "$$drop"]}]},
            ]
        },
    ]
}
FOLDED_SIZE: Final[Document] = {
    "$subtract": [
        {"$add": ["$size", {"$binarySize": "$$body"}]},
        {"$add": [{"$ifNull": [{"$binarySize": "$body"}, 0]}, _bytes_of(_GOING)]},
    ]
}


def _folding(size: Document, tail: Document) -> list[Document]:
    return [
        {
            "$replaceWith": {
                "$cond": [
                    {"$or": [{"$eq": ["$version", "$$version"]}, {"$gt": [size, "$$limit"]}]},
                    "$$ROOT",
                    {
                        "$mergeObjects": [
                            "$$ROOT",
                            {
                                "version": "$$version",
                                "expires": _ENDS_OR_KEEPS,
                                "size": size,
                                "body": "$$body",
                                "tail": tail,
                            },
                        ]
                    },
                ]
            }
        }
    ]


FOLD: Final[list[Document]] = _folding(FOLDED_SIZE, _STAYING)
# A rewrite is a fold of the same number of entries, with the new ones before the remaining ones.
REWRITTEN_SIZE: Final[Document] = {"$add": [FOLDED_SIZE, _bytes_of("$$rewrite")]}
REWRITE: Final[list[Document]] = _folding(REWRITTEN_SIZE, {"$concatArrays": ["$$rewrite", _STAYING]})
AFTER: Final[Document] = {"_id": 0, "version": 1}
AFTER_FOLD: Final[Document] = {"_id": 0, "version": 1, "size": FOLDED_SIZE}
AFTER_REWRITE: Final[Document] = {"_id": 0, "version": 1, "size": REWRITTEN_SIZE}

LOADED: Final[Document] = {"_id": 1, "version": 1, "size": 1, "body": 1, "tail": 1}

LEFT_OUT: Final = 8
"""The server reads whole documents. Leaving out this many bytes takes as long as returning one."""

# A damaged record is returned as it is: an error would affect all records of the command.
_LENGTH: Final[Document] = {"$size": {"$cond": [{"$isArray": "$$tail"}, "$$tail", []]}}
_IS_CUT: Final[Document] = {"$and": [{"$isNumber": "$size"}, {"$lt": ["$$last", "$$length"]}]}
# The comparison of `weight`, without a division.
_IS_LIGHT: Final[Document] = {
    "$cond": [
        "$$is_cut",
        {
            "$lte": [
                {"$multiply": ["$size", {"$add": ["$$length", {"$multiply": [LEFT_OUT - 1, "$$last"]}]}]},
                {"$multiply": [LEFT_OUT * LARGE_BYTES, "$$length"]},
            ]
        },
        {"$lte": ["$size", LARGE_BYTES]},
    ]
}


def _newest(last: Document | str, condition: Document | bool) -> Document:
    """Return a projection to the newest entries and to the total number, which `newest` contains.

    Unless the condition holds, it includes neither the body nor entries. Each `$tail` reads all entries, so
    only one is used.
    """
    entries: Document = {
        "$cond": ["$$is_cut", {"$slice": ["$$tail", {"$multiply": [-1, "$$last"]}]}, "$$tail"]
    }
    parts: Document = {"length": "$$length"}
    found: Document = {"$cond": [condition, parts | {"body": "$body", "tail": entries}, parts]}
    steps: list[Document] = [{"tail": "$tail", "last": last}, {"length": _LENGTH}, {"is_cut": _IS_CUT}]
    for step in reversed(steps):
        found = {"$let": {"vars": step, "in": found}}
    return {"_id": 1, "version": 1, "size": 1, "newest": found}


LOADED_LAST: Final = _newest("$$last", condition=True)
"""The newest `$$last` entries of one record."""
LOADED_TOGETHER: Final = _newest("$$last", _IS_LIGHT)
"""The newest `$$last` entries of each record; for large ones, neither the body nor entries."""
LOADED_MIXED: Final = _newest({"$arrayElemAt": ["$$lasts", {"$indexOfArray": ["$$ids", "$_id"]}]}, _IS_LIGHT)
"""The same, with the number of entries for each record in `$$ids` at the same index of `$$lasts`."""
WAS_THERE: Final[Document] = {"_id": 0, "there": IS_THERE}
LISTED: Final[Document] = {"_id": 0, "name": "$_id.name"}
SCOPE: Final[Document] = {"_id": 0, "scope": "$_id.scope"}

# About once a minute, MongoDB removes documents whose date in this index has passed.
EXPIRY_INDEX: Final[Document] = {
    "key": {"expires": 1},
    "name": "stm_expires",
    "expireAfterSeconds": 0,
    "partialFilterExpression": {"expires": {"$type": "date"}},
}

LAYOUT: Final = Layout(version=1, readable_since=1)

STEPS: Final[dict[int, tuple[str, Document]]] = {1: ("createIndexes", {"indexes": [EXPIRY_INDEX]})}
"""The migration to each layout from the previous one: a command and its arguments, without the collection."""

_CONFIRMED: Final[Document] = {"writeConcern": {"w": "majority"}}


def weight(size: int, length: int, last: int) -> int:
    """Return the cost in bytes of loading the newest `last` entries, with a part of those that are left out.

    It is based on the average entry.
    """
    return -(-size * (length + (LEFT_OUT - 1) * last) // (LEFT_OUT * length))


def values(**named: object) -> Document:
    """Return values for `let`, all literal, so that no text is taken as an expression."""
    return {name: {"$literal": value} for name, value in named.items()}


def record(scope: str, name: str) -> Document:
    """Return the filter for one record. Scope and name are separate fields, so no two keys collide."""
    return {"_id": {"scope": scope, "name": name}}


def newest(lasts: Mapping[Key, int]) -> tuple[Document, Document]:
    """Return the projection and the `let` for the newest entries of one or several records."""
    if len({*lasts.values()}) > 1:
        ids = [record(*key)["_id"] for key in lasts]
        return LOADED_MIXED, values(ids=ids, lasts=[*lasts.values()])
    (last,) = {*lasts.values()}
    if len(lasts) > 1:
        return LOADED_TOGETHER, values(last=last)
    return (LOADED, {}) if last == ALL else (LOADED_LAST, values(last=last))


def records(keys: Iterable[Key]) -> Document:
    """Return the filter for the existing ones of several records."""
    ids = [record(*key)["_id"] for key in keys]
    return {"_id": ids[0] if len(ids) == 1 else {"$in": ids}, "$expr": IS_THERE}


def names_after(scope: str, after: str, *, expired: bool = False) -> Document:
    """Return the filter for a listing of existing records or, with `expired`, of expired ones.

    It reads a range of the index that every collection has. MongoDB orders documents field by field, and text
    by its UTF-8 bytes. Any document sorts after any text, so `{}` sorts after the last name of the scope.
    """
    return {
        "_id": {"$gt": {"scope": scope, "name": after}, "$lt": {"scope": scope, "name": {}}},
        "$expr": {"$not": [IS_THERE]} if expired else IS_THERE,
    }


def scopes_after(scope: str) -> Document:
    """Return the filter for the records of all later scopes, which reads the same index."""
    return {"_id": {"$gt": {"scope": scope, "name": {}}}}


def layout() -> Document:
    """Return the filter of the document that stores the layout of the collection.

    Its `_id` is text, not a document like a record's, so it is not a record and no listing contains it.
    """
    return {"_id": "stm_layout"}


def setup(collection: str, *, since: int = 0) -> list[Document]:
    """Return the commands that bring a collection up to date. Safe to run repeatedly and concurrently."""
    steps = (STEPS[version] for version in range(since + 1, LAYOUT.version + 1))
    # Older code must not lower the numbers.
    note = {"q": layout(), "u": {"$max": LAYOUT._asdict()}, "upsert": True}
    return [
        *({command: collection, **arguments, **_CONFIRMED} for command, arguments in steps),
        {"update": collection, "updates": [note], **_CONFIRMED},
    ]
