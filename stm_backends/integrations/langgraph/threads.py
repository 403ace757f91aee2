"""A thread of LangGraph at one instant: the content of its items, as pure functions."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stm_backends.errors import Corrupt
from stm_backends.integrations.langgraph.deltas import dump_bytes, load_bytes
from stm_backends.integrations.langgraph.items import (
    EMPTY,
    Blob,
    History,
    Item,
    New,
    NewPut,
    NewWrites,
    Put,
    Version,
    VersionsOf,
    Write,
    dump_blob,
    dump_put,
    dump_writes,
    load_blob,
    load_history,
    size_of,
)

FRAME_BYTES: Final = 64 * 1024
"""Minimum number of bytes between two frames, which must also be twice the size of the last frame.

So frames take half as much space as the rest, and a reader of the latest checkpoint reads at most three times
the size of a frame.
"""

_TASK: Final = ":"
"""The character before a task's id in a namespace. Such a namespace is seldom used after the task."""


@dataclass(slots=True)
class Space:
    """The checkpoints of one namespace; `newest` has the last version of each channel that has a value."""

    puts: dict[str, Put] = field(default_factory=dict[str, Put])
    writes: dict[str, dict[tuple[str, int], Write]] = field(
        default_factory=dict[str, "dict[tuple[str, int], Write]"]
    )
    blobs: dict[tuple[str, Version], Blob] = field(default_factory=dict[tuple[str, Version], Blob])
    newest: dict[str, Version] = field(default_factory=dict[str, Version])
    last: str = ""

    def pending(self, checkpoint_id: str) -> list[tuple[str, Write]]:
        """Return the writes of a checkpoint, in the order that LangGraph applies tasks' writes."""
        said = self.writes.get(checkpoint_id, {})
        return [(task, said[task, nth]) for task, nth in sorted(said, key=lambda one: (said[one].path, *one))]


class View:
    """The content of a thread's items, from a frame or from the first item on.

    `whole` means that no older items exist. `size` is the approximate size of the items in bytes, and `start`
    that of the first one.
    """

    def __init__(self, thread: str, *, whole: bool = True) -> None:
        self.thread = thread
        self.whole = whole
        self.spaces: dict[str, Space] = {}
        self.last = ""
        self.size = self.start = 0
        self.top = ""
        self._older: frozenset[int] = frozenset()
        self._framed: set[str] = set()
        self._next = 0

    def space(self, name: str) -> Space:
        """Return the known checkpoints of a namespace."""
        return self.spaces.get(name) or Space()

    def latest(self, name: str) -> str | None:
        """Return the id of the latest checkpoint of a namespace, valid only if `knows_latest`."""
        return max(self.space(name).puts, default=None)

    def knows_latest(self, name: str) -> bool:
        """Return whether no older item can have a later checkpoint of a namespace."""
        found = self.latest(name)
        if self.whole or name in self._framed:
            return True
        return _checksum(name) not in self._older if found is None else found >= self.top

    def missing(self, new: NewPut) -> list[tuple[str, Version]]:
        """Return the channels that a checkpoint shares with earlier ones but no item here has."""
        known = self.space(new.space).blobs.keys() | {(channel, version) for channel, version, _ in new.blobs}
        return [one for one in new.versions.items() if one not in known]

    def history(
        self, name: str, checkpoint_id: str, channels: Collection[str], versions_of: VersionsOf
    ) -> dict[str, History] | None:
        """Return the history of some channels before a checkpoint; `None` if older items have more of it."""
        space = self.space(name)
        writes: dict[str, list[tuple[str, Blob]]] = {channel: [] for channel in channels}
        seeds: dict[str, Blob] = {}
        put = target = space.puts.get(checkpoint_id)
        while put is not None and writes.keys() - seeds.keys():
            left = writes.keys() - seeds.keys()
            if put.history is not None:
                if put is target and not self.whole and self._with_values(space, put, left, versions_of):
                    return None
                for channel in left & put.history.keys():
                    said = put.history[channel]
                    writes[channel] += reversed(said.writes)
                    if said.seed is not None:
                        seeds[channel] = said.seed
                break
            parent = put.parent
            if parent is None:
                break
            put = space.puts.get(parent)
            if put is None:
                if not self.whole:
                    return None
                break
            for task, write in reversed(space.pending(parent)):
                if write.channel in left:
                    writes[write.channel].append((task, write.value))
            versions = versions_of(put.checkpoint)
            for channel in left & versions.keys():
                if (blob := space.blobs.get((channel, versions[channel]), EMPTY)) != EMPTY:
                    seeds[channel] = blob
        return {
            channel: History(tuple(reversed(said)), seeds.get(channel)) for channel, said in writes.items()
        }

    @staticmethod
    def _with_values(space: Space, put: Put, channels: Collection[str], versions_of: VersionsOf) -> bool:
        """Return whether any of some channels has a value in a checkpoint."""
        versions = versions_of(put.checkpoint)
        named = ((channel, versions[channel]) for channel in versions.keys() & set(channels))
        return any(space.blobs.get(one, EMPTY) != EMPTY for one in named)

    def item(self, new: New) -> Item:
        """Return the item that adds a checkpoint or writes after those of this view."""
        if isinstance(new, NewWrites):
            return self._named({"writes": dump_writes(new)})
        space = self.space(new.space)
        older = space.puts.get(space.last)
        blobs = [
            [channel, version, *dump_blob(blob, space.newest.get(channel), space.blobs.get(base))]
            for channel, version, blob in new.blobs
            for base in [(channel, space.newest.get(channel, ""))]
        ]
        checkpoint = dump_blob(new.put.checkpoint, space.last, older and older.checkpoint)
        shown = {"content": new.put.text} if new.put.text else {}
        return self._named({"put": dump_put(new.space, new.id, new.put, checkpoint, blobs), **shown})

    @property
    def count(self) -> int:
        """The number of items, from the frame on."""
        return self._next

    @property
    def is_frame_due(self) -> bool:
        """True if enough was added since the last frame."""
        return self.size - self.start > max(FRAME_BYTES, 2 * self.start)

    def frame(self, versions_of: VersionsOf) -> Item | None:
        """Return the item that repeats the latest checkpoints; `None` if older items have a part of one."""
        bodies: list[Item] = []
        root = max(self.space("").puts, default="")
        for name, space in self.spaces.items():
            latest = max(space.puts, default=None)
            kept = {one for one in space.writes if one not in space.puts and one > (latest or root)}
            if latest is not None and _TASK not in name:
                body = self._repeated(name, latest, versions_of)
                if body is None:
                    return None
                bodies.append({"put": body})
                kept.add(latest)
            # Writes may arrive before their checkpoint.
            bodies += [
                {"writes": dump_writes(written(name, one, space))} for one in kept & space.writes.keys()
            ]
        older = self._older | {_checksum(name) for name in self.spaces}
        packed = b"".join(one.to_bytes(4, "big") for one in sorted(older))
        top = max([self.top, *(one for space in self.spaces.values() for one in space.puts)])
        return {
            "k": 0,
            "i": _new_name(),
            "thread": self.thread,
            "frame": bodies,
            "older": dump_bytes(packed),
            "top": top,
        }

    def _repeated(self, name: str, latest: str, versions_of: VersionsOf) -> Item | None:
        space = self.spaces[name]
        put = space.puts[latest]
        versions = versions_of(put.checkpoint)
        if not self.whole and not all(one in space.blobs for one in versions.items()):
            return None
        blobs = {one: space.blobs.get(one, EMPTY) for one in versions.items()}
        empty = [channel for (channel, _), blob in blobs.items() if blob == EMPTY]
        history = self.history(name, latest, empty, versions_of)
        whole = [[channel, version, *dump_blob(blob)] for (channel, version), blob in blobs.items()]
        return dump_put(name, latest, replace(put, history=history), dump_blob(put.checkpoint), whole)

    def apply(self, item: Item) -> None:
        """Add an item's content. Raises `Corrupt`, which quotes nothing of it."""
        try:
            self._apply(item)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise Corrupt(
                "an item of the thread is of a kind that this version of the library does not know"
            ) from None

    def _apply(self, item: Item) -> None:
        size = size_of(item)
        if self._next == 0:
            self.thread, self.start = str(item.get("thread", self.thread)), size
        if "frame" not in item:
            self._say(item)
        else:
            if self._next == 0:
                packed = load_bytes(item["older"])
                self._older = frozenset(
                    int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)
                )
                self.top = str(item["top"])
            for body in item["frame"]:
                self._say(body, again=True)
                if self._next == 0 and "put" in body:
                    self._framed.add(body["put"]["ns"])
        self.last, self._next = item["i"], item["k"] + 1
        self.size += size

    def _say(self, body: Item, *, again: bool = False) -> None:
        said = body["put"] if "put" in body else body["writes"]
        space = self.spaces.setdefault(said["ns"], Space())
        if "put" in body:
            # A frame repeats known checkpoints, unless it was read first; then their ancestors are unknown.
            if again and said["id"] in space.puts:
                return
            for channel, version, *blob in said["blobs"]:
                base = space.blobs.get((channel, blob[2])) if len(blob) > 2 else None
                space.blobs[channel, version] = value = load_blob(blob, base)
                if value != EMPTY:
                    space.newest[channel] = version
            older = space.puts.get(said["checkpoint"][2]) if len(said["checkpoint"]) > 2 else None
            space.puts[said["id"]] = Put(
                said["parent"],
                load_blob(said["checkpoint"], older and older.checkpoint),
                load_blob(said["metadata"]),
                str(body.get("content", "")),
                load_history(said.get("history")),
            )
            space.last = said["id"]
            return
        writes = space.writes.setdefault(said["id"], {})
        for task, path, each in said["tasks"]:
            for place, channel, *blob in each:
                # The first write at a place counts, as in LangGraph's savers; at a special one, the last.
                if place < 0 or (task, place) not in writes:
                    writes[task, place] = Write(channel, load_blob(blob), path)

    def _named(self, body: Item) -> Item:
        thread = {} if self._next else {"thread": self.thread}
        return {"k": self._next, "i": _new_name(), **thread, **body}


def latest_view(thread: str, items: Sequence[Item], *, whole: bool) -> View | None:
    """Return the view from the last frame on; `None` if reading cannot begin at any of these items."""
    return _view_from(thread, items, reversed(range(len(items))), whole=whole)


def widest_view(thread: str, items: Sequence[Item], *, whole: bool) -> View | None:
    """Return the view from the first item that reading can begin at; `None` if there is none."""
    return _view_from(thread, items, range(len(items)), whole=whole)


def _view_from(thread: str, items: Sequence[Item], places: Iterable[int], *, whole: bool) -> View | None:
    if not items:
        return View(thread, whole=whole)
    start = next((place for place in places if items[place].get("k") == 0), None)
    if start is None:
        return None
    return extended(View(thread, whole=whole and (start == 0 or isinstance(places, range))), items[start:])


def extended(view: View, items: Iterable[Item]) -> View:
    """Return a view with more items. The given one is changed."""
    for item in items:
        view.apply(item)
    return view


def continued(view: View, items: Iterable[Item]) -> View:
    """Return a view with more items, beginning at the last frame among them. The given one is changed."""
    for item in items:
        if "frame" in item:
            view = View(view.thread, whole=False)
        view.apply(item)
    return view


def written(name: str, checkpoint_id: str, space: Space) -> NewWrites:
    """Return the writes of a checkpoint as they are stored."""
    tasks: dict[tuple[str, str], list[tuple[int, str, Blob]]] = {}
    for (task, place), write in space.writes.get(checkpoint_id, {}).items():
        tasks.setdefault((task, write.path), []).append((place, write.channel, write.value))
    return NewWrites(name, checkpoint_id, [(*task, each) for task, each in tasks.items()])


def rebuilt(
    view: View, keep: Callable[[str, str], bool], versions_of: VersionsOf, thread: str | None = None
) -> list[Item]:
    """Return the items of a thread that has only some checkpoints of a whole view, with their writes.

    A checkpoint whose parent is dropped gets its nearest kept ancestor as parent, and the history that the
    dropped ancestors have of its empty channels. Writes that wait for their checkpoint are kept.
    """
    new, items = View(thread or view.thread), list[Item]()

    def add(one: New) -> None:
        nonlocal new
        items.append(new.item(one))
        new = continued(new, items[-1:])
        if new.is_frame_due and (frame := new.frame(versions_of)) is not None:
            items.append(frame)
            new = continued(new, items[-1:])

    kept = {name: {one for one in space.puts if keep(name, one)} for name, space in view.spaces.items()}
    root = max(kept.get("", ()), default="")
    for checkpoint_id, name in sorted((one, name) for name, ids in kept.items() for one in ids):
        space = view.spaces[name]
        versions = versions_of(space.puts[checkpoint_id].checkpoint)
        put = _without_ancestors(view, name, checkpoint_id, versions, kept[name], versions_of)
        stored = new.space(name).blobs
        blobs = [(*one, space.blobs.get(one, EMPTY)) for one in versions.items() if one not in stored]
        add(NewPut(name, checkpoint_id, put, versions, blobs))
        if space.writes.get(checkpoint_id):
            add(written(name, checkpoint_id, space))
    for name, space in view.spaces.items():
        for one in space.writes:
            if root and one not in space.puts and one > max(kept[name], default=root):
                add(written(name, one, space))
    return items


def _without_ancestors(
    view: View,
    name: str,
    checkpoint_id: str,
    versions: Mapping[str, Version],
    kept: Collection[str],
    versions_of: VersionsOf,
) -> Put:
    """Return a checkpoint whose parent is one of the kept checkpoints."""
    space = view.spaces[name]
    put = space.puts[checkpoint_id]
    if put.parent is None or put.parent in kept or put.parent not in space.puts:
        return put
    empty = [
        channel
        for channel, version in versions.items()
        if space.blobs.get((channel, version), EMPTY) == EMPTY
    ]
    history, parent = view.history(name, checkpoint_id, empty, versions_of), put.parent
    while parent is not None and parent not in kept:
        ancestor = space.puts.get(parent)
        parent = ancestor and ancestor.parent
    return replace(put, parent=parent, history=history)


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass"))


def _new_name() -> str:
    return secrets.token_hex(6)
