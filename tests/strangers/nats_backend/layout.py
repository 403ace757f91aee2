"""How a record is stored: one message, on a subject of its own; imports no client library."""

from __future__ import annotations

import hashlib
import json
import zlib
from math import inf
from typing import NamedTuple

from stm_backends import Corrupt
from stm_backends.drivers import Key, Record
from tests.strangers.nats_backend.settings import OVERHEAD

GONE = b"gone"
"""The message that a delete writes over a record, before it removes the message itself."""


def scope_of(stream: str, scope: str) -> str:
    """Return what the subjects of a scope begin with."""
    return f"{stream}.{hashlib.sha256(scope.encode()).hexdigest()}."


def subject_of(stream: str, key: Key) -> str:
    """Return the subject of a record: hexadecimal digits are no wildcards, and keep the order of bytes."""
    return scope_of(stream, key.scope) + key.name.encode().hex()


def name_of(subject: str) -> str:
    """Return the name in the subject of a record."""
    return bytes.fromhex(subject.rpartition(".")[2]).decode()


class Stored(NamedTuple):
    """A record, and when it expires."""

    record: Record
    expires: float


def size_of(record: Record) -> int:
    """Return how many bytes of `max_record` a record takes."""
    values = record.tail if record.body is None else (record.body, *record.tail)
    return sum(map(len, values)) + OVERHEAD * len(values)


def encode(record: Record, expires: float) -> bytes:
    """Return the message of a record: a checksum of all that follows, a line of JSON, and the values."""
    values = [b"" if record.body is None else record.body, *record.tail]
    head = {
        "version": record.version,
        "expires": None if expires == inf else expires,
        "has_body": record.body is not None,
        "sizes": [len(value) for value in values],
    }
    line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    rest = b"".join((line, *values))
    return b"%08x" % zlib.crc32(rest) + rest


def decode(data: bytes) -> Stored:
    """Return the record in a message; raises `Corrupt` unless it is whole."""
    try:
        if int(data[:8], 16) != zlib.crc32(data[8:]):
            raise Corrupt("the stored bytes do not have their checksum")
        line, _, rest = data[8:].partition(b"\n")
        head = json.loads(line)
        values: list[bytes] = []
        at = 0
        for size in head["sizes"]:
            values.append(rest[at : at + size])
            at += size
        body, *tail = values
        expires = inf if head["expires"] is None else float(head["expires"])
        return Stored(Record(head["version"], body if head["has_body"] else None, tuple(tail)), expires)
    except (ValueError, KeyError, TypeError):
        raise Corrupt("the stored bytes are not a record") from None
