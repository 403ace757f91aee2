"""The log of an agent framework as JSON objects, the lines of a file, and storing them.

```
{"format": "stm-log-page", "version": 1,                   items with one number after the other
 "key":   {"tenant_id": ..., "user_id": ..., "session_id": ...},
 "log":   "langchain" or another of `keys.LOG_KINDS`,
 "first": the number of the first item, "items": [{"item": {...}, "at": seconds since 1970, or 0}, ...]}
{"format": "stm-log", "version": 1, "key": {...}, "log": ..., the log, after all of its items
 "first", "end": the numbers of the oldest item and after the newest,
 "missing": the number of these without an item: no longer stored, or unreadable}
```

An import stores the items in pages of a new epoch, and the record that refers to them last. So an import that
is interrupted shows nothing, and leaves pages that `purge` removes after a day.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from stm_backends.admin import dead_pages
from stm_backends.admin.dead_pages import DeadPages
from stm_backends.admin.numbers import Numbers, Unreadable
from stm_backends.drivers.contract import ABSENT, ANY, Driver, Key
from stm_backends.errors import Corrupt, InvalidState, SessionExists, SessionNotFound
from stm_backends.history import items
from stm_backends.history.items import Item
from stm_backends.history.log import ItemLog
from stm_backends.plain_json import DEEPEST_IN_TURN, encode_json, require_json
from stm_backends.records import keys, ledger, pages
from stm_backends.records.body import Forgotten, Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.records.limits import Guard, characters_in
from stm_backends.records.pages import Leaving, Pages
from stm_backends.types import MILLISECONDS, MemoryKey

FORMAT: Final = "stm-log"
PAGE_FORMAT: Final = "stm-log-page"
VERSION: Final = 1


def is_log(document: Mapping[str, Any]) -> bool:
    """Say whether a line claims to be of a log."""
    return isinstance(document, Mapping) and document.get("format") in (FORMAT, PAGE_FORMAT)  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file


def is_page(document: Mapping[str, Any]) -> bool:
    """Say whether a line claims to have items of a log that comes after it."""
    return is_log(document) and document["format"] == PAGE_FORMAT


async def lines_of(
    driver: Driver, codec: Codec, key: MemoryKey, kind: LogKind, unreadable: Unreadable
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the items of a log, page by page, then the log; all as of one moment.

    `unreadable` is called for the items of a page that cannot be read. Raises `SessionNotFound`.
    """
    if await driver.load(keys.log_key(key, kind), last=0) is None:
        raise SessionNotFound(f"there is no log of {kind} under this key")
    of = {
        "version": VERSION,
        "key": {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id},
        "log": kind,
    }
    first = end = missing = 0
    errors: list[Corrupt] = []
    async for page in ItemLog(driver, key, kind, codec=codec).each_page(damaged=errors.append):
        if errors and page.missing:
            unreadable(errors[0], page.missing)
        errors.clear()
        first, end, missing = page.oldest, page.newest + 1, missing + len(page.missing)
        line: dict[str, Any] = {}
        for one in page.items:
            if not line or line["first"] + len(line["items"]) != one.number:
                if line:
                    yield line
                line = {"format": PAGE_FORMAT, **of, "first": one.number, "items": []}
            line["items"].append({"item": one.item, "at": one.at})
        if line:
            yield line
    yield {"format": FORMAT, **of, "first": first, "end": end, "missing": missing}


@dataclass(frozen=True, slots=True)
class Items:
    """A valid line with items of a log, each with its time, numbered from `first`."""

    key: MemoryKey
    kind: LogKind
    first: int
    items: Sequence[tuple[Item, float]]


@dataclass(frozen=True, slots=True)
class End:
    """The valid line after all items of a log. `missing` are the numbers without one."""

    key: MemoryKey
    kind: LogKind
    first: int
    end: int
    missing: Sequence[range]


class LogLines:
    """Reads the lines of logs, and checks that the items of a log come before it, in order."""

    def __init__(self) -> None:
        self._whose: tuple[MemoryKey, LogKind] | None = None
        self._numbers = Numbers()

    def read(self, document: Mapping[str, Any]) -> Items | End:
        """Return the content of a line. Raises `InvalidState` and `InvalidKey`."""
        key, kind, first = _key_of(document), _kind_of(document), _count_in(document, "first")
        if is_page(document):
            self._whose = self._whose or (key, kind)
            found = _items_of(document)
            fits = 0 < len(found) <= pages.TURNS - first % pages.TURNS
            if self._whose != (key, kind) or not fits or not self._numbers.add(first, len(found)):
                raise InvalidState("a page of a log is not where an export writes it")
            return Items(key, kind, first, found)
        end, count = _count_in(document, "end"), _count_in(document, "missing")
        is_other, self._whose = self._whose not in (None, (key, kind)), None
        numbers, self._numbers = self._numbers, Numbers()
        missing = numbers.missing(first, end, count)
        if is_other or missing is None:
            raise InvalidState("the items of a log do not all come directly before it")
        return End(key, kind, first, end, missing)

    def spoil(self) -> None:
        """Refuse the log after one of its pages was refused."""
        if self._whose is not None:
            self._numbers.spoil()


class LogImport:
    """Stores the lines of logs. A log that exists stays as it is with `merge`."""

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        on_conflict: str,
        ttl: float | None,
        guard: Guard,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._pages = Pages(driver, codec)
        self._dead_pages = DeadPages(driver, codec)
        self._on_conflict = on_conflict
        self._ttl = ttl
        self._guard = guard
        self._transcript: Transcript | None = None
        self._at = 0.0
        self._stored = set[int]()

    async def add(self, line: Items | End, epoch: str) -> bool:
        """Store a line; `epoch` is that of a log that begins with it. Returns whether a log was stored."""
        where, owner = keys.log_key(line.key, line.kind), (line.key.tenant_id, line.key.user_id)
        if self._transcript is None:
            if self._on_conflict == "refuse" and await self._driver.load(where, last=0) is not None:
                raise SessionExists("there is already a log under this key; merge or replace it")
            # Listed, so that an erasure of the user finds the pages.
            async with self._directory.listed(owner, self._ttl) as listing:
                listing.created = True
            self._transcript, self._at = Transcript(epoch, base=line.first, first=line.first), 0.0
            self._stored = set[int]()
        if isinstance(line, Items):
            self._transcript = await self._store(where, line, self._transcript)
            return False
        transcript, self._transcript = _reaching(self._transcript, line.end), None
        # As old as the original.
        forgotten = Forgotten().adding([epoch], now=self._at or 0.0, keep_for=1.0)
        body = items.seal_folded(items.Folded(forgotten=forgotten, transcript=transcript), self._codec)
        await pages.require(self._driver, where, transcript.epoch, self._stored)
        expect = ANY if self._on_conflict == "replace" else ABSENT
        old = await self._driver.load(where, last=0) if expect is ANY else None
        async with self._directory.listed(owner, self._ttl) as listing:
            change = ledger.Change(body, ttl=self._ttl)
            listing.created = stored = await ledger.replace(self._driver, where, change, expect=expect)
        if not stored:
            # The record may have been stored by a write whose answer was lost, and changed since.
            dead = await self._dead_pages.of_record(where, epoch=transcript.epoch)
            await pages.remove(self._driver, dead)
            if self._on_conflict == "refuse":
                raise SessionExists("there is already a log under this key; merge or replace it")
        elif expect is ANY:
            before = None if old is None else items.open_folded(old.body, self._codec).transcript
            await dead_pages.erase_replaced(self._driver, self._codec, where, before)
        return stored

    def abandon(self) -> None:
        """Start over with the next line, as after a refused one."""
        self._transcript = None

    async def _store(self, where: Key, line: Items, transcript: Transcript) -> Transcript:
        """Store items in their page; returns the transcript after them."""
        transcript = _reaching(transcript, line.first)
        leaving: list[Leaving] = []
        for number, (item, at) in enumerate(line.items, line.first):
            self._guard.require("turn_characters", partial(characters_in, item))
            item_id = f"{transcript.epoch}.{number}"
            content = {"turn_id": item_id, "item": item, **({"at": at} if at else {})}
            leaving.append(Leaving(item_id, encode_json(content)))
            self._at = max(self._at, at)
        await self._pages.put_new(where, transcript, leaving, summary=None, ttl=self._ttl)
        self._stored.add(line.first // pages.TURNS)
        return transcript.moved([one.id for one in leaving], summarized=True)


def _reaching(transcript: Transcript, base: int) -> Transcript:
    """Return a transcript after numbers without items, if there are any."""
    return transcript if transcript.base == base else replace(transcript, base=base, last="")


def _key_of(document: Mapping[str, Any]) -> MemoryKey:
    parts: object = document.get("key")
    if not isinstance(parts, dict):
        raise InvalidState("key is not an object")
    found = cast("dict[str, Any]", parts)
    key = MemoryKey(*(found.get(name, "") for name in ("tenant_id", "user_id", "session_id")))
    key.composite()
    return key


def _kind_of(document: Mapping[str, Any]) -> LogKind:
    if document.get("version") != VERSION:
        raise InvalidState(f"this version of the library imports only version {VERSION} of exports")
    for kind in keys.LOG_KINDS:
        if kind == document.get("log"):
            return kind
    raise InvalidState(f"log is one of: {', '.join(keys.LOG_KINDS)}")


def _count_in(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or value < 0:
        raise InvalidState(f"{name} is not a number of items")
    return value


def _items_of(document: Mapping[str, Any]) -> list[tuple[Item, float]]:
    listed: object = document.get("items")
    if not isinstance(listed, list):
        raise InvalidState("items is not a list")
    found: list[tuple[Item, float]] = []
    for index, one in enumerate(cast("list[object]", listed)):
        entry = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        item: object = entry.get("item")
        at: object = entry.get("at", 0.0)
        if not isinstance(item, dict) or not isinstance(at, (int, float)) or not 0 <= at < MILLISECONDS:
            raise InvalidState(f"items[{index}] has no item, or no time in seconds since 1970")
        content = cast("Item", item)
        require_json(content, f"items[{index}].item", deepest=DEEPEST_IN_TURN)
        found.append((content, float(at)))
    return found
