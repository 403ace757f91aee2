"""The MongoDB driver: conversations in one collection of a replica set, a cluster or a single server.

A record is one document, and an operation is one command on it. Concurrent loads share a command. The client
is PyMongo's `AsyncMongoClient`, or a Motor client that was passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, ReadPreference, ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from stm_backends.drivers.checks import (
    LONGEST_S,
    require_append,
    require_last,
    require_limit,
    require_replace,
)
from stm_backends.drivers.coalesced import LARGE_BYTES, Coalesced, LoadKey
from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import Home
from stm_backends.drivers.layouts import Layout, is_outdated, require_usable
from stm_backends.errors import ConfigurationError, Corrupt, TooLarge, Unavailable, located
from stm_backends_mongo import statements
from stm_backends_mongo.calls import Calls
from stm_backends_mongo.client import make_client, require_client, retries_writes
from stm_backends_mongo.errors import (
    BEYOND_A_DOCUMENT,
    NOT_SET_UP,
    OF_ANOTHER_KIND,
    before_sending,
    meaning,
    meaning_of_last,
)
from stm_backends_mongo.settings import MongoSettings
from stm_backends_mongo.statements import Document, values
from stm_backends_mongo.turns import Turns

T = TypeVar("T")
Client: TypeAlias = AsyncMongoClient[Any]
Collection: TypeAlias = AsyncCollection[Document]
Pipeline: TypeAlias = list[RawBSONDocument]

_FIRST_LAYOUT: Final = Layout(version=1, readable_since=1)

_REMAINS: Final = Remains(
    "MongoDB: the deleted documents remain in free blocks of the data files until later documents "
    "overwrite them, in the journal until its next checkpoints, in secondaries until they apply the "
    "deletion, and in snapshots and backups. Turns also remain in the oplog until its oldest entries make "
    "room."
)

_MAX_PAGE: Final = 10_000
"""Maximum page size; a larger page, with names of up to 1,000 bytes, may not fit into one answer."""


def _encoded(update: list[Document]) -> Pipeline:
    """Return an update as BSON, which PyMongo copies into each command unchanged."""
    return [RawBSONDocument(bson.encode(stage)) for stage in update]


_APPEND: Final = _encoded(statements.APPEND)
_CREATE: Final = _encoded(statements.CREATE)
_SAVE: Final = _encoded(statements.SAVE)
_FOLD: Final = _encoded(statements.FOLD)
_REWRITE: Final = _encoded(statements.REWRITE)


class MongoDriver:
    """The five operations on one collection.

    A `client` that was passed in, an `AsyncMongoClient` or Motor's `AsyncIOMotorClient`, is never closed,
    and works without `open()`. A client belongs to one event loop, and so does an open driver. With
    `create=True`, `open` sets the collection up.
    """

    name = "mongo"

    def __init__(
        self, settings: MongoSettings, *, client: Client | None = None, create: bool = False
    ) -> None:
        self._settings = settings
        self._create = create
        self._given = client
        if client is None:
            # Does not connect; raises for invalid settings.
            repeats = retries_writes(make_client(settings))
        else:
            require_client(client)
            repeats = retries_writes(client)
        # PyMongo gives up before the edge does, so it can say whether anything was sent. While it selects a
        # server, it checks its clock only every half second.
        self._patience_s = max(settings.deadline_s - 0.6, settings.deadline_s / 2)
        self._start_over()
        self._home = Home(self._start_over, client=client)
        self.traits = Traits(
            reach="network",
            clock="server",
            durability=(
                "survives the death of any minority of the replica set, and a power cut"
                if settings.durability == "majority"
                else "survives a power cut; a failover may undo the last writes"
            ),
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=settings.max_record_bytes,
            deadline=settings.deadline_s,
            # The read concern `local` shows data that is not in the journal yet.
            shows_unconfirmed=settings.durability != "majority",
        )
        self._edge = Edge(
            backend=self.name,
            traits=self.traits,
            meaning=meaning_of_last if repeats else meaning,
            before_sending=before_sending,
            home=self._home,
        )

    async def open(self) -> None:
        """Connect, and check that the collection is set up. Opening twice is harmless.

        Raises `Unavailable` for a collection that is not set up, and `ConfigurationError` for one that is set
        up differently.
        """
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        """Close the client, unless it was passed in, within the deadline. Closing twice is harmless."""
        await self._home.close(self._end)

    async def _begin(self) -> None:
        if self._client is None:
            self._client = make_client(self._settings) if self._given is None else self._given
        records = self._collection_of(self._client)
        with located(self.name, "open"):
            await self._prepare(records)
        self._records = records

    async def _end(self) -> None:
        client, self._client, self._records = self._client, None, None
        with pymongo.timeout(self._patience_s):
            try:
                await self._loads.close()
                await self._calls.ended(within=self._settings.deadline_s)
            finally:
                # Also if the caller gives up, because no later `close` would do it.
                if client is not None and client is not self._given:
                    await client.close()

    def _start_over(self) -> None:
        """Create the objects that belong to one event loop."""
        self._client: Client | None = self._given
        self._records = None if self._given is None else self._collection_of(self._given)
        # This leaves the last write of a queue time to be done.
        self._turns = Turns(patience_s=self._patience_s - min(0.5, self._patience_s / 4))
        self._loads = Coalesced(self._fetch, size=_size_of)
        self._calls = Calls()

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        require_last(last)
        wanted = LoadKey.of(key, last)

        async def work(_: Collection) -> Document | None:
            # MongoDB promises linearizable reads only for a filter that matches one document.
            if self._settings.linearizable:
                return (await self._fetch((wanted,))).get(wanted)
            return await self._loads.load(wanted)

        found = await self._run("load", work)
        return None if found is None else self._record_of(found).newest(last)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end. Keeps the version and resets the time to live."""
        require_append(entry, ttl, self.traits, backend=self.name)
        self._edge.require_fits("append", "record", len(entry))
        before = await self._write(
            "append",
            key,
            _APPEND,
            values(
                entry=entry,
                initial_version=initial_version,
                ttl=_milliseconds(ttl),
                limit=self.traits.max_record,
            ),
            answer=statements.BEFORE,
            upsert=True,
            when=ReturnDocument.BEFORE,
        )
        if before is None or before["length"] < 0:
            return 1
        self._edge.require_fits("append", "record", before["size"] + len(entry))
        return int(before["length"]) + 1

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body and its version if the record meets the condition."""
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        self._edge.require_fits("replace", "record", sum(map(len, rewrite), len(body)))
        keep = ttl is KEEP
        given = values(body=body, version=version, keep=keep, ttl=None if ttl is KEEP else _milliseconds(ttl))
        if not isinstance(expect, str):
            after = await self._write(
                "replace",
                key,
                _CREATE if expect is ABSENT else _SAVE,
                given,
                answer=statements.AFTER,
                upsert=True,
            )
            return after is not None and after["version"] == version
        given |= values(expect=expect, drop=drop or len(rewrite), limit=self.traits.max_record)
        after = await self._write(
            "replace",
            key,
            _REWRITE if rewrite else _FOLD,
            given | values(rewrite=list(rewrite)) if rewrite else given,
            answer=statements.AFTER_REWRITE if rewrite else statements.AFTER_FOLD,
            condition=statements.FOLDABLE,
        )
        if after is None:
            return False
        if after["version"] != version:
            self._edge.require_fits("replace", "record", after["size"])
        return True

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`, and return whether it did."""
        query = statements.record(*key)
        if expect is not ANY:
            query["version"] = expect

        async def work(records: Collection) -> Document | None:
            # Also removes an expired document that the TTL monitor has not removed yet.
            return await self._in_turn(
                key, lambda: records.find_one_and_delete(query, projection=statements.WAS_THERE)
            )

        deleted = await self._run("delete", work)
        return deleted is not None and deleted["there"]

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self._names(statements.names_after(scope, after), limit)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that have expired and still have a document; `delete` removes them."""
        return await self._names(statements.names_after(scope, after, expired=True), limit)

    async def finish_erasure(self) -> Remains:
        """Describe what remains of deleted records."""
        return _REMAINS

    async def _names(self, query: Document, limit: int) -> Page:
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)
        found = await self._run(
            "scan",
            # The first answer contains the whole page, so it is one round trip.
            lambda records: self._calls.run(
                records.find(
                    query, statements.LISTED, sort=[("_id", 1)], limit=limit + 1, batch_size=limit + 1
                ).to_list(limit + 1)
            ),
        )
        names = [document["name"] for document in found]
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

    async def next_scope(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`."""
        query = statements.scopes_after(after)
        found = await self._run(
            "scan",
            lambda records: self._calls.run(
                records.find(query, statements.SCOPE, sort=[("_id", 1)], limit=1).to_list(1)
            ),
        )
        return found[0]["scope"] if found else None

    async def _fetch(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, Document]:
        """Return the documents for several loads with one command; each document is one snapshot.

        A document has at least the requested entries. Among several, large ones come without contents.
        """
        if self._records is None:
            raise self._edge.not_open("load")
        lasts: dict[Key, int] = {}
        for key, last in wanted:
            lasts[key] = max(last, lasts.get(key, 0))
        count, (parts, given) = len(lasts), statements.newest(lasts)
        # A shared request runs in no caller's context, so it has its own timeout.
        with pymongo.timeout(self._patience_s):
            found = await self._calls.run(
                self._records.find(
                    statements.records(lasts), parts, limit=count, batch_size=count, let=given
                ).to_list(count)
            )
        by_key = {Key(one["_id"]["scope"], one["_id"]["name"]): one | one.get("newest", {}) for one in found}
        return {one: by_key[one.key] for one in wanted if one.key in by_key}

    async def _prepare(self, records: Collection) -> None:
        """Check the collection, after setting it up if `create` is true; each command has its own deadline.

        Plain commands are the same in PyMongo and in Motor.
        """

        async def send(command: Document) -> Document:
            with pymongo.timeout(self._patience_s):
                return await self._edge.run(
                    "open", lambda: self._calls.run(_carry_out(command, records.database))
                )

        ours = statements.LAYOUT
        noted = await send({"find": records.name, "filter": statements.layout(), "limit": 1})
        found = _layout_in(noted["cursor"]["firstBatch"])
        if not self._create:
            # The first version of this driver did not store the layout in the collection.
            found = found or _FIRST_LAYOUT
            is_outdated(found, ours)
            require_usable(found, ours, oldest=_FIRST_LAYOUT.version)

        async def set_up(since: int) -> None:
            for command in statements.setup(records.name, since=since):
                await send(command)

        async def indexes() -> Sequence[Document]:
            return (await send({"listIndexes": records.name}))["cursor"]["firstBatch"]

        if self._create and (found is None or is_outdated(found, ours)):
            await set_up(since=found.version if found else 0)
        present = await indexes()
        if any("collation" in index for index in present if index["key"] == {"_id": 1}):
            raise ConfigurationError(
                "the collection has a collation, so different keys may be equal; choose another collection"
            )
        if self._create and not _removes_expired(present):
            # The index was dropped after the layout was stored.
            await set_up(since=0)
            present = await indexes()
        if not _removes_expired(present):
            raise _not_set_up("it has no index that removes expired records")

    def _collection_of(self, client: Client) -> Collection:
        settings = self._settings
        majority = settings.durability == "majority"
        level = "linearizable" if settings.linearizable else "majority" if majority else "local"
        return client[settings.database].get_collection(
            settings.collection,
            # A client that was passed in may decode to other classes.
            codec_options=cast("CodecOptions[Document]", CodecOptions()),
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern(w="majority" if majority else 1, j=True),
            # A failover cannot undo data on a majority, so a fold never covers entries that may disappear.
            read_concern=ReadConcern(level),
        )

    async def _write(
        self,
        operation: str,
        key: Key,
        update: Pipeline,
        given: Document,
        *,
        answer: Document,
        condition: Document | None = None,
        upsert: bool = False,
        when: bool = ReturnDocument.AFTER,
    ) -> Document | None:
        """Update one document and return its projection `answer`; `None` if no document matches."""
        query = {**statements.record(*key), **({} if condition is None else {"$expr": condition})}

        async def work(records: Collection) -> Document | None:
            try:
                return await self._in_turn(
                    key,
                    lambda: records.find_one_and_update(
                        query, update, projection=answer, upsert=upsert, return_document=when, let=given
                    ),
                )
            except OperationFailure as error:
                if error.code not in BEYOND_A_DOCUMENT:
                    raise
                # The numbers of the entries fill the document; the server does not say by how much.
                size, limit = statements.LARGEST_DOCUMENT + 1, statements.LARGEST_DOCUMENT
                raise TooLarge("record", size=size, limit=limit) from error

        return await self._run(operation, work)

    async def _in_turn(self, key: Key, send: Callable[[], Awaitable[T]]) -> T:
        """Send a write in its turn, or never if it is cancelled before that.

        The turn lasts until the request has ended, which is before its deadline. A request that is still on
        its way when its caller gives up must not be overtaken: it would bring back a record that the next
        write deletes.
        """
        async with self._turns.turn(key) as hand_over:
            request = asyncio.ensure_future(send())
            hand_over(request)
            return await self._calls.run(request)

    async def _run(self, operation: str, work: Callable[[Collection], Awaitable[T]]) -> T:
        records = self._records
        if records is None:
            raise self._edge.not_open(operation)
        # PyMongo passes the remaining time to the server as maxTimeMS.
        with pymongo.timeout(self._patience_s):
            return await self._edge.run(operation, lambda: work(records))

    def _record_of(self, found: Document) -> Record:
        version, body, tail, size = (found.get(name, ...) for name in ("version", "body", "tail", "size"))
        if isinstance(version, str) and isinstance(tail, list) and isinstance(size, int):
            entries = tuple(cast("list[bytes]", tail))
            skipped = found.get("length", len(entries)) - len(entries)
            parts = entries if body is None else (body, *entries)
            if all(type(part) is bytes for part in parts):
                loaded = sum(map(len, parts))
                if loaded == size or (skipped and loaded < size):
                    return Record(version, body, entries, skipped)
        raise Corrupt("a part of the record is missing", backend=self.name, operation="load")


async def _carry_out(command: Document, database: AsyncDatabase[Document]) -> Document:
    """Run a command of the setup or of the check."""
    try:
        return await database.command(command)
    except OperationFailure as error:
        if error.code in NOT_SET_UP:
            raise _not_set_up("it does not exist") from None
        if error.code in OF_ANOTHER_KIND:
            raise ConfigurationError(
                "the collection is of another kind (a view, capped, a time series), or already "
                "has an index with this name; it was not changed: choose another collection"
            ) from error
        raise


def _milliseconds(ttl: float | None) -> int | None:
    """Return a time to live in milliseconds, at least one."""
    return None if ttl is None else max(1, int(min(ttl, LONGEST_S) * 1000))


def _size_of(found: Document) -> int:
    """Return the bytes of a load, or 0 if another program has changed the number."""
    size, tail = found.get("size"), found.get("tail")
    if not isinstance(size, int):
        return 0
    if not isinstance(tail, list):
        return LARGE_BYTES + 1  # nothing was returned
    entries = cast("list[object]", tail)
    if (length := found.get("length", len(entries))) == len(entries):
        return size
    loaded = sum(len(one) for one in (found.get("body"), *entries) if isinstance(one, bytes))
    return max(loaded, statements.weight(size, length, len(entries)))


def _layout_in(documents: list[Document]) -> Layout | None:
    """Return the layout that is stored in the collection, if there is one."""
    for document in documents:
        return Layout(document["version"], document["readable_since"])
    return None


def _removes_expired(indexes: Sequence[Document]) -> bool:
    """Return whether one of these indexes makes the server remove expired records."""
    key = statements.EXPIRY_INDEX["key"]
    return any(index["key"] == key and index.get("expireAfterSeconds") == 0 for index in indexes)


def _not_set_up(why: str) -> Unavailable:
    return Unavailable(
        f"the collection is not set up ({why}); open it once with create=True (`stm-backends ping --create "
        "--url URL` does), or run what `stm-backends schema --url URL` prints"
    )
