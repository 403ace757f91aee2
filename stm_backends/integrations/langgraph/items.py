"""The items of a LangGraph thread, and their stored form; pure functions.

```
put    {"k", "i", "put": {"ns", "id", "parent", "checkpoint", "metadata", "blobs": [[channel, version, ...]]}}
writes {"k", "i", "writes": {"ns", "id", "tasks": [[task, path, [[place, channel, value], ...]], ...]}}
frame  {"k": 0, "i", "thread", "frame": [{"put": ...}, {"writes": ...}, ...], "older", "top"}
value  type, base64  or  type, pieces, the older one, its checksum; see `deltas`
```

A put has what its checkpoint adds: the channels with a new version. Older items have the rest. The `content`
field is the text that a list of conversations shows. Now and then a frame repeats the latest checkpoint
whole, so that it can be read without all items. Reading begins at an item with `k` 0: a frame, or the first
item of the log. `k` counts the items since then, and `i` is a random name. Items after a frame depend on
nothing before it.

A frame has the latest checkpoint of each namespace whose name contains no task. For all namespaces before it,
it has checksums of the names (`older`), and the greatest id of a checkpoint (`top`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends.integrations.langgraph.deltas import (
    delta,
    dump_bytes,
    dump_pieces,
    load_bytes,
    load_pieces,
    patch,
)

Item: TypeAlias = dict[str, Any]
Blob: TypeAlias = tuple[str, bytes]
"""A serialized value: the serializer's name for its type, and its bytes."""

Version: TypeAlias = str | int | float
VersionsOf: TypeAlias = Callable[[Blob], Mapping[str, Version]]
"""A function that returns the channel versions in a serialized checkpoint."""

EMPTY: Final[Blob] = ("empty", b"")
"""A channel of this version has no value."""


class Write(NamedTuple):
    """A pending write of a task."""

    channel: str
    value: Blob
    path: str


class History(NamedTuple):
    """A channel's last value stored by a checkpoint's ancestors, and the writes since.

    `writes` are pairs of a task and a value, oldest first.
    """

    writes: tuple[tuple[str, Blob], ...]
    seed: Blob | None


@dataclass(frozen=True, slots=True)
class Put:
    """A stored checkpoint without its channels.

    `text` is shown in a list of conversations. If there is a `history`, the checkpoint's ancestors have no
    more to add for the channels that have no value in it.
    """

    parent: str | None
    checkpoint: Blob
    metadata: Blob
    text: str = ""
    history: Mapping[str, History] | None = None


class NewPut(NamedTuple):
    """A checkpoint to be stored. `blobs` are its new channels."""

    space: str
    id: str
    put: Put
    versions: Mapping[str, Version]
    blobs: Sequence[tuple[str, Version, Blob]]


class NewWrites(NamedTuple):
    """Writes to be stored: for each task and path, the places, channels and values."""

    space: str
    id: str
    tasks: Sequence[tuple[str, str, Sequence[tuple[int, str, Blob]]]]


New: TypeAlias = NewPut | NewWrites


def dump_put(name: str, checkpoint_id: str, put: Put, checkpoint: list[Any], blobs: list[list[Any]]) -> Item:
    """Return a checkpoint as it is stored; `checkpoint` and `blobs` are stored values."""
    history = {} if put.history is None else {"history": _dump_history(put.history)}
    return {
        "ns": name,
        "id": checkpoint_id,
        "parent": put.parent,
        "checkpoint": checkpoint,
        "metadata": dump_blob(put.metadata),
        "blobs": blobs,
        **history,
    }


def dump_writes(new: NewWrites) -> Item:
    """Return writes as they are stored."""
    tasks = [
        [task, path, [[place, channel, *dump_blob(blob)] for place, channel, blob in each]]
        for task, path, each in new.tasks
    ]
    return {"ns": new.space, "id": new.id, "tasks": tasks}


def dump_blob(blob: Blob, older_name: Version | None = None, older: Blob | None = None) -> list[Any]:
    """Return a value as it is stored: whole, or as the difference from an older one of that name."""
    kind, data = blob
    pieces = None if older is None or older_name is None else delta(older[1], data)
    if older is None or pieces is None:
        return [kind, dump_bytes(data)]
    return [kind, dump_pieces(pieces), older_name, zlib.crc32(older[1])]


def load_blob(stored: list[Any], older: Blob | None = None) -> Blob:
    """Return the value that `dump_blob` stored. Raises `ValueError` without the older one."""
    if len(stored) == 2:
        return str(stored[0]), load_bytes(stored[1])
    kind, pieces, _, checksum = stored
    if older is None or zlib.crc32(older[1]) != checksum:
        raise ValueError("the value that another one is based on is missing")
    return str(kind), patch(older[1], load_pieces(pieces))


def _dump_history(history: Mapping[str, History]) -> Item:
    return {
        channel: [
            [[task, *dump_blob(blob)] for task, blob in said.writes],
            None if said.seed is None else dump_blob(said.seed),
        ]
        for channel, said in history.items()
        if said.writes or said.seed is not None
    }


def load_history(stored: Item | None) -> dict[str, History] | None:
    """Return the history in a stored checkpoint."""
    if stored is None:
        return None
    return {
        channel: History(
            tuple((task, load_blob(blob)) for task, *blob in writes),
            None if seed is None else load_blob(seed),
        )
        for channel, (writes, seed) in stored.items()
    }


def size_of(value: object) -> int:
    """Return the approximate size of a value as JSON, in bytes."""
    if isinstance(value, str):
        return len(value) + 3
    if isinstance(value, Mapping):
        return sum(size_of(each) for pair in cast("Mapping[str, object]", value).items() for each in pair)
    if isinstance(value, list):
        return sum(map(size_of, cast("list[object]", value)))
    return 8
