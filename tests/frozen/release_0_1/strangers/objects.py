"""The five operations on an object store with conditional writes: S3, and what speaks its language.

A record is one object. A write reads the object and its ETag, decides, and puts the new one on the condition
that the ETag is still the same (`If-Match`), or that there is still none (`If-None-Match: *`). A writer that
comes too late is refused by the store, and begins again with what is there now.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import hashlib
import json
import random
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult
from weakref import WeakValueDictionary

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp import ClientConnectorError
from aiohttp import ClientError as ConnectionFailed
from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError

from stm_backends import ConfigurationError, Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Settings, Traits, setting
from stm_backends.drivers.checks import require_drop, require_limit, require_rewrite, require_ttl
from stm_backends.drivers.edge import ConcurrencyLimit, Edge
from stm_backends.drivers.home import Home

MIB = 1024 * 1024
SORTED_BYTES = 300
AT_ONCE = 10

REFUSED = {"PreconditionFailed", "NoSuchKey", "ConditionalRequestConflict", "404", "409", "412"}
"""Another writer was faster, or the object that was to be replaced is gone; nothing was done."""

NOTHING_DONE = {"SlowDown", "ServiceUnavailable"}
DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
FAILURES = (BotoCoreError, ClientError, ConnectionFailed)


@dataclass(frozen=True, kw_only=True)
class ObjectSettings(Settings):
    """The bucket; the credentials are where programs for AWS look for them."""

    backend: ClassVar = "objects"
    url_schemes: ClassVar = ("s3",)

    bucket: str = setting("", query=False)
    endpoint_url: str | None = None
    region: str = "eu-west-1"
    pool_size: int = 10
    max_entry_bytes: int = MIB
    max_record_bytes: int = 4 * MIB

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        if not parts.netloc or parts.path.strip("/"):
            raise ConfigurationError("name a bucket: s3://bucket?endpoint_url=...")
        return {"bucket": parts.netloc}


def folder(scope: str) -> str:
    return hashlib.sha256(scope.encode()).hexdigest() + "/"


def sorted_part(name: str) -> str:
    """Return what places are sorted by: hexadecimal digits keep the order of bytes, and cannot be a path."""
    return name.encode()[:SORTED_BYTES].hex()


def place(key: Key) -> str:
    """Return the name of an object, of at most 1,024 bytes: the beginning of the key, and its hash."""
    digest = hashlib.sha256(key.name.encode()).hexdigest()
    return f"{folder(key.scope)}{sorted_part(key.name)}.{digest}"


class Head(NamedTuple):
    """What is known of a record without its content: S3 keeps it beside the object, as text."""

    name: str
    version: str
    expires: float

    def metadata(self) -> dict[str, str]:
        name = b64encode(self.name.encode()).decode()
        return {"name": name, "version": self.version, "expires": repr(self.expires)}

    @classmethod
    def of(cls, response: dict[str, Any] | None) -> Head | None:
        """Return the head of a record that exists; an expired one does not."""
        if response is None:
            return None
        try:
            kept = response["Metadata"]
            name = b64decode(kept["name"], validate=True).decode()
            head = cls(name, kept["version"], float(kept["expires"]))
        except (KeyError, ValueError) as error:
            raise Corrupt("the metadata of an object are not those of a record") from error
        return head if head.expires > time.time() else None


def written(record: Record) -> bytes:
    values = (record.body, *record.tail)
    return json.dumps([None if one is None else b64encode(one).decode() for one in values]).encode()


def read(head: Head, data: bytes) -> Record:
    body, *tail = (None if one is None else b64decode(one, validate=True) for one in json.loads(data))
    return Record(head.version, body, tuple(tail))


class SentOnce(AIOHTTPSession):
    """An HTTP session that sends each request once; aiohttp has no public name for the switch.

    By default it sends a `PUT` again whose connection was lost. The second one is refused because of the
    first, or finds no server, and says that nothing was sent.
    """

    async def _get_session(self, proxy_url: Any) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # noqa: SLF001
        return session


class ObjectDriver:
    """One bucket that any number of processes share."""

    name = "objects"

    def __init__(self, settings: ObjectSettings, *, create: bool = False) -> None:
        self._settings, self._create = settings, create
        self._start_over()
        self.traits = Traits(
            reach="network",
            clock="client",
            durability="is what the object store says",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=1_000_000,
            deadline=settings.deadline_s,
        )
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    def _start_over(self) -> None:
        self._stack: contextlib.AsyncExitStack | None = None
        # The writers of one process queue for a record, instead of refusing each other at the store.
        self._queues: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def open(self) -> None:
        # One at a time: an opening that is cancelled closes its own client, and no other.
        await self._home.open(self._connect, self._disconnect)

    async def _connect(self) -> None:
        half = self._settings.deadline_s / 2
        self._limit = ConcurrencyLimit(self._settings.pool_size, patience_s=half)
        # A write is never sent twice: the second is refused because of the first, whose answer was lost.
        config = AioConfig(
            retries={"total_max_attempts": 1},
            connect_timeout=half,
            read_timeout=self._settings.deadline_s,
            max_pool_connections=2 * self._settings.pool_size,
            s3={"addressing_style": "path"},
            http_session_cls=SentOnce,
        )
        made = AioSession().create_client(
            "s3", region_name=self._settings.region, endpoint_url=self._settings.endpoint_url, config=config
        )
        async with contextlib.AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(made)
            await self._edge.run("open", self._make_ready)
            self._stack = stack.pop_all()

    async def _make_ready(self) -> None:
        bucket = self._settings.bucket
        try:
            await self._client.head_bucket(Bucket=bucket)
        except ClientError as error:
            if code_of(error) != "404" or not self._create:
                raise
            where = {"LocationConstraint": self._settings.region}
            with contextlib.suppress(self._client.exceptions.BucketAlreadyOwnedByYou):
                await self._client.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)

    async def close(self) -> None:
        await self._home.close(self._disconnect)

    async def _disconnect(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.deadline_s):
                    await self._limit.drain()
            await stack.aclose()

    async def load(self, key: Key) -> Record | None:
        async def work() -> Record | None:
            response = await self._ask("get_object", place(key))
            head = Head.of(response)
            return head and read(head, response["Body"])

        return await self._run("load", work)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))

        def decide(head: Head | None, found: Record | None):
            old = found or Record(initial_version, None, ())
            new = replace(old, tail=(*old.tail, entry))
            return len(new.tail), new, inf if ttl is None else time.time() + ttl

        return await self._write("append", key, decide)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_ttl(ttl)
        require_drop(drop, expect)
        if rewrite:
            require_rewrite(rewrite, drop, expect, self.traits, backend=self.name)
        going = drop or len(rewrite)
        self._edge.require_fits("replace", "entry", len(body))

        def decide(head: Head | None, found: Record | None):
            if found and found.version == version:
                return True, None, inf
            tail: tuple[bytes, ...] = ()
            if isinstance(expect, str):
                if found is None or found.version != expect or going > len(found.tail):
                    return False, None, inf
                tail = (*rewrite, *found.tail[going:])
            elif expect is ABSENT and found:
                return False, None, inf
            expires = head.expires if head else inf
            if ttl is not KEEP:
                expires = inf if ttl is None else time.time() + ttl
            return True, Record(version, body, tail), expires

        return await self._write("replace", key, decide)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        async def work() -> bool:
            while True:
                response = await self._ask("head_object", place(key))
                head = Head.of(response)
                if head is None or expect not in (ANY, head.version):
                    return False
                if await self._done("delete_object", place(key), IfMatch=response["ETag"]):
                    return True

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)

        async def work() -> Page:
            names: list[str] = []
            last = ""
            async for part, head in self._listed(folder(scope), sorted_part(after)):
                # Names that differ past what they are sorted by come in any order, so they are read together.
                if len(names) > limit and part != last:
                    break
                if head is not None and head.name.encode() > after.encode():
                    names.append(head.name)
                last = part
            names.sort(key=str.encode)
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

        return await self._run("scan", work)

    async def _listed(self, prefix: str, start: str) -> AsyncIterator[tuple[str, Head | None]]:
        """Yield the objects of a folder in their order: what each is sorted by, and its head."""
        last = prefix + start
        while True:
            listed = await self._ask("list_objects_v2", Prefix=prefix, StartAfter=last, MaxKeys=AT_ONCE)
            places = [each["Key"] for each in listed.get("Contents", ())]
            heads = await asyncio.gather(*(self._ask("head_object", each) for each in places))
            for each, head in zip(places, heads, strict=True):
                yield each.partition(".")[0], Head.of(head)
            if not listed["IsTruncated"]:
                return
            last = places[-1]

    async def _write(
        self, operation: str, key: Key, decide: Callable[[Head | None, Record | None], Any]
    ) -> Any:
        """Store what `decide` makes of the record, or of its absence, while it is still that; else again."""

        async def work() -> Any:
            while True:
                response = await self._ask("get_object", place(key))
                head = Head.of(response)
                found = head and read(head, response["Body"])
                answer, new, expires = decide(head, found)
                if new is None:
                    return answer
                size = sum(map(len, new.tail), len(new.body or b""))
                self._edge.require_fits(operation, "record", size)
                condition = {"IfMatch": response["ETag"]} if response else {"IfNoneMatch": "*"}
                kept = Head(key.name, new.version, expires).metadata()
                content = {"Body": written(new), "Metadata": kept}
                if await self._done("put_object", place(key), **content, **condition):
                    return answer

        async def in_turn() -> Any:
            async with self._queues.setdefault(key, asyncio.Lock()):
                return await work()

        return await self._run(operation, in_turn)

    async def _done(self, call: str, where: str, **arguments: Any) -> bool:
        """Send a conditional write; returns whether its condition held, after a pause if it did not."""
        try:
            await getattr(self._client, call)(Bucket=self._settings.bucket, Key=where, **arguments)
        except ClientError as error:
            if code_of(error) not in REFUSED:
                raise
            await asyncio.sleep(random.uniform(0, 0.05))
            return False
        return True

    async def _ask(self, call: str, where: str = "", **arguments: Any) -> dict[str, Any] | None:
        """Return an answer that changes nothing, or `None` if the object does not exist.

        What fails here has failed before anything was written.
        """
        place = {"Key": where} if where else {}
        try:
            response = await getattr(self._client, call)(Bucket=self._settings.bucket, **place, **arguments)
            if "Body" in response:
                async with response["Body"] as stream:
                    response["Body"] = await stream.read()
            return response
        except FAILURES as error:
            if code_of(error) in ("404", "NoSuchKey"):
                return None
            kind, message = meaning(error)
            raise (Unavailable if kind is OutcomeUnknown else kind)(message) from error

    async def _run(self, operation: str, work: Callable[[], Any]) -> Any:
        if self._stack is None:
            raise self._edge.not_open(operation)

        async def limited() -> Any:
            async with self._limit:
                return await work()

        return await self._edge.run(operation, limited)


def code_of(error: Exception) -> str:
    return error.response["Error"]["Code"] if isinstance(error, ClientError) else ""


def meaning(error: Exception):
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, binascii.Error)):
        return Corrupt, "the stored bytes are not a record"
    if not isinstance(error, FAILURES):
        return None
    if code_of(error) in DENIED:
        return Denied, "the object store refuses this access"
    if code_of(error) == "NoSuchBucket":
        return Unavailable, "there is no such bucket: open it with create=True"
    # aiobotocore raises `EndpointConnectionError` also for a connection that was lost after the request.
    cause = getattr(error, "kwargs", {}).get("error")
    unsent = isinstance(error, ConnectTimeoutError) or isinstance(cause, ClientConnectorError)
    if code_of(error) in NOTHING_DONE or unsent:
        return Unavailable, "the object store cannot be reached"
    return OutcomeUnknown, "the object store failed, or its answer was lost"


async def open_objects(url: str) -> ObjectDriver:
    """Return an open driver; what `Datastore.open` calls."""
    driver = ObjectDriver(ObjectSettings.from_url(url), create=True)
    await driver.open()
    return driver
