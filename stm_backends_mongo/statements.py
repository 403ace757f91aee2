"""What the MongoDB driver says to MongoDB, and why each operation is atomic.

A record is one document, `{_id: {scope, name}, version, expires, size, body, tail}`, and every operation
is one command that touches this one document. MongoDB runs a command on one document atomically: it reads
the document, evaluates conditions and update against what it has read, and writes the result, or starts
over if somebody was faster. So whatever has to be decided is decided here, in expressions that the
server evaluates, and never in between two commands.

`$$NOW` is the server's clock, and the same instant throughout a command. A record that has expired counts
as one that is not there, whenever MongoDB's own reaper gets round to removing it.

The statements are constants. What varies comes by name, as `$$entry` does, from `let`: `values` wraps
each value in `$literal`, so that text with a dollar sign in it is text. Keys and versions are only ever
values, never the names of fields.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from stm_backends.drivers.layouts import Layout

Document: TypeAlias = dict[str, Any]

LARGEST_DOCUMENT: Final = 16 * 1024 * 1024
"""The bytes of the largest document that MongoDB stores."""

# A document that is not there has no `expires` at all, so this is false of it, too.
IS_THERE: Final[Document] = {"$or": [{"$eq": ["$expires", None]}, {"$gt": ["$expires", "$$NOW"]}]}

# Adding null is null, which is for ever.
_ENDS: Final[Document] = {"$add": ["$$NOW", "$$ttl"]}
_ENDS_OR_KEEPS: Final[Document] = {
    "$cond": ["$$keep", {"$cond": [IS_THERE, "$expires", None]}, _ENDS],
}

_GOING: Final[Document] = {"$slice": ["$tail", "$$drop"]}
_STAYING: Final[Document] = {"$slice": ["$tail", "$$drop", {"$max": [1, {"$size": "$tail"}]}]}


def _bytes_of(entries: Document) -> Document:
    return {"$sum": {"$map": {"input": entries, "in": {"$binarySize": "$$this"}}}}


# The filter names nothing but the record, so that MongoDB itself starts over when two writers create the
# same record at once. (It refuses `$expr` in the filter of an upsert, too.) The first stage makes an
# expired record, or none, a new one; the second adds the entry, or changes nothing if it does not fit.
# The answer is how long and how large the record was before.
APPEND: Final[list[Document]] = [
    {
        "$replaceWith": {
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
    {
        "$replaceWith": {
            "$cond": [
                {"$gt": [{"$add": ["$size", {"$binarySize": "$$entry"}]}, "$$limit"]},
                "$$ROOT",
                {
                    "$mergeObjects": [
                        "$$ROOT",
                        {
                            "expires": _ENDS,
                            "size": {"$add": ["$size", {"$binarySize": "$$entry"}]},
                            # What is no array is an error, and null would not be: it would swallow the entry.
                            "tail": {"$concatArrays": [{"$ifNull": ["$tail", False]}, ["$$entry"]]},
                        },
                    ]
                },
            ]
        }
    },
]
BEFORE: Final[Document] = {
    "_id": 0,
    "length": {"$cond": [IS_THERE, {"$size": "$tail"}, 0]},
    "size": {"$cond": [IS_THERE, "$size", 0]},
}

_SAVED: Final[Document] = {
    "_id": "$_id",
    "version": "$$version",
    "expires": _ENDS_OR_KEEPS,
    "size": {"$binarySize": "$$body"},
    "body": "$$body",
    "tail": [],
}

# `expect=ANY`: only a record that carries the new version already stays as it is.
SAVE: Final[list[Document]] = [
    {
        "$replaceWith": {
            "$cond": [{"$and": [IS_THERE, {"$eq": ["$version", "$$version"]}]}, "$$ROOT", _SAVED],
        }
    }
]

# `expect=ABSENT`: any record that is there stays as it is; whose it is, the answer's version tells.
CREATE: Final[list[Document]] = [{"$replaceWith": {"$cond": [IS_THERE, "$$ROOT", _SAVED]}}]

# `expect=<version>`: the filter holds the condition, as nothing is created here. What it lets through is
# changed, unless it carries the new version already or would grow too large; the version in the answer
# tells the two apart.
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
FOLD: Final[list[Document]] = [
    {
        "$replaceWith": {
            "$cond": [
                {"$or": [{"$eq": ["$version", "$$version"]}, {"$gt": [FOLDED_SIZE, "$$limit"]}]},
                "$$ROOT",
                {
                    "$mergeObjects": [
                        "$$ROOT",
                        {
                            "version": "$$version",
                            "expires": _ENDS_OR_KEEPS,
                            "size": FOLDED_SIZE,
                            "body": "$$body",
                            "tail": _STAYING,
                        },
                    ]
                },
            ]
        }
    }
]
AFTER: Final[Document] = {"_id": 0, "version": 1}
AFTER_FOLD: Final[Document] = {"_id": 0, "version": 1, "size": FOLDED_SIZE}

LOADED: Final[Document] = {"_id": 0, "version": 1, "size": 1, "body": 1, "tail": 1}
LISTED: Final[Document] = {"_id": 0, "name": "$_id.name"}

# MongoDB looks about once a minute for documents whose date in this index has come, and removes them.
EXPIRY_INDEX: Final[Document] = {
    "key": {"expires": 1},
    "name": "stm_expires",
    "expireAfterSeconds": 0,
    "partialFilterExpression": {"expires": {"$type": "date"}},
}

LAYOUT: Final = Layout(version=1, readable_since=1)

STEPS: Final[dict[int, tuple[str, Document]]] = {1: ("createIndexes", {"indexes": [EXPIRY_INDEX]})}
"""What makes each layout out of the one before: a command, and what it is given beside the collection."""

_CONFIRMED: Final[Document] = {"writeConcern": {"w": "majority"}}


def values(**named: object) -> Document:
    """Return values for `let`, each of them literal: no text among them is an expression."""
    return {name: {"$literal": value} for name, value in named.items()}


def record(scope: str, name: str) -> Document:
    """Return the filter that names one record. The two parts stay two, so no two keys are one."""
    return {"_id": {"scope": scope, "name": name}}


def names_after(scope: str, after: str) -> Document:
    """Return the filter of a listing, which reads a range of the index that every collection has.

    MongoDB orders documents field by field, and text by the bytes of its UTF-8. Any document comes after
    any text, so `{}` stands behind the last name of the scope.
    """
    return {
        "_id": {"$gt": {"scope": scope, "name": after}, "$lt": {"scope": scope, "name": {}}},
        "$expr": IS_THERE,
    }


def layout() -> Document:
    """Return the filter of the document that says which layout the collection has.

    Its `_id` is text, and that of a record a document; so it is no record, and stands in no listing.
    """
    return {"_id": "stm_layout"}


def setup(collection: str, *, since: int = 0) -> list[Document]:
    """Return the commands that bring a collection up to date. Any number may send them, at once and again."""
    steps = (STEPS[version] for version in range(since + 1, LAYOUT.version + 1))
    # Code that is older than what it finds there does not lower the numbers.
    note = {"q": layout(), "u": {"$max": LAYOUT._asdict()}, "upsert": True}
    return [
        *({command: collection, **arguments, **_CONFIRMED} for command, arguments in steps),
        {"update": collection, "updates": [note], **_CONFIRMED},
    ]
