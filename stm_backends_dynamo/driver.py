"""The DynamoDB driver: one table. A record is one item, its head, and further items for large values.

Conditions of DynamoDB cannot read a server's clock, so the client's host decides expiry: hosts whose clocks
differ by a second disagree for a second about when a record ends.

An operation is one request, with these exceptions. Concurrent loads share requests for the heads. Because a
condition can only succeed or fail:

- An append that creates a record takes two: one that finds no live record, and one that creates it.
- A replace with `expect=ANY, ttl=KEEP` of an absent record takes two.
- A refused write takes another read if the answer does not include the current item: on servers older than
  June 2023, and when there was nothing to delete.

Because a value in a part is another item (`statements.py` says why the operation is still atomic):

- A load of a record with parts takes two, and one more for each further megabyte. With `last`, it takes one
  for each part that it needs, after the head; these are sent together.
- An entry or a body of more than 2 KB takes three: a look at the head, the part, and the head. The first part
  of a record takes a transaction, after a look and, for an entry, a mark in the head.
- A fold of a record with parts first takes a look, perhaps at a part, and later a request that deletes parts.
- A rewrite of entries in parts, or of more than 4 KB or 100 entries, takes a look, the new parts, the head,
  and a request that deletes parts. If the new entries need more places than the old ones, a concurrent append
  makes it start again. A part that also has other entries is kept, with the old entries in it.
- An append that fills the head moves its entries into a part: a look, two writes, a look.
- Erasing a record with parts takes six or more.
- An operation that conflicts with another writer reads again and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar

from stm_backends.drivers.checks import (
    checked_clock,
    require_append,
    require_last,
    require_limit,
    require_replace,
)
from stm_backends.drivers.coalesced import Coalesced
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
    new_version,
)
from stm_backends.drivers.edge import ConcurrencyLimit, Edge
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.home import Home
from stm_backends.errors import Denied, OutcomeUnknown, TooLarge, Unavailable
from stm_backends_dynamo import statements, table
from stm_backends_dynamo.client import Requests, is_asynchronous, make_client, require_client
from stm_backends_dynamo.errors import (
    DENIED,
    ClientError,
    before_sending,
    code_of,
    is_invalid,
    is_passing,
    is_too_large,
    meaning,
)
from stm_backends_dynamo.items import (
    Element,
    Head,
    Item,
    Reference,
    Sizes,
    elements_of,
    head_of,
    is_alive,
    item_of,
    new_part,
    owner_of,
    weight_of,
)
from stm_backends_dynamo.parts import Parts
from stm_backends_dynamo.settings import DynamoSettings
from stm_backends_dynamo.stored import ROUNDS, Stored

T = TypeVar("T")

_REMAINS: Final = Remains(
    "DynamoDB: the deleted items remain in the table's stream for 24 hours if it has one, in point-in-time "
    "recovery for its recovery period (35 days at most), and in on-demand backups and exports until these "
    "are deleted. Extra items of an expired conversation that DynamoDB had already removed go at their own "
    "time to live."
)

_SENT_AGAIN: Final = "the client may have sent it already, and it may have been done"

_MAX_PAGE: Final = 10_000
"""Maximum page size; DynamoDB itself ends a page after a megabyte."""

_MOST_NOTED: Final = 1_000
"""Maximum number of records remembered as having parts, or parts not named by their heads."""


class DynamoDriver:
    """The five operations on a table. A client that was passed in works without `open()` and is never closed.

    `clock` is the host's, in seconds since the epoch, and should agree for all hosts that share the table.
    `create=True` lets `open` create the table, and its time to live, if they are missing.
    """

    name = "dynamo"

    def __init__(
        self,
        settings: DynamoSettings,
        *,
        client: Any = None,
        create: bool = False,
        clock: Callable[[], float] = time.time,
        sizes: Sizes = Sizes(),  # noqa: B008 -- it cannot be changed
    ) -> None:
        if client is not None:
            require_client(client)
        self._settings = settings
        self._given = client
        self._start_over()
        # Threads may share a boto3 client; processes may not.
        is_bound = client is not None and is_asynchronous(client)
        self._home = Home(self._start_over, client=client, asynchronous=is_bound)
        self._create = create
        self._clock = checked_clock(clock)
        self._sizes = sizes
        self._parts = Parts()
        self._littered: set[Key] = set()
        self._with_parts: set[Key] = set()
        self._is_checked = False
        self._shares_loads = True
        self.traits = Traits(
            reach="network",
            clock="client",
            durability="an acknowledged write is stored in several availability zones of the region",
            max_entry=settings.max_entry_bytes,
            max_record=sizes.record,
            max_drop=statements.MAX_DROP,
            # Hosts whose clocks differ by half a second agree for half a second that such a record exists.
            min_ttl=1.0,
            deadline=settings.deadline_s,
        )
        self._edge = Edge(
            backend=self.name,
            traits=self.traits,
            meaning=meaning,
            before_sending=before_sending,
            home=self._home,
        )

    async def open(self) -> None:
        """Create the client and, with `create=True`, the table. Opening twice is harmless."""
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        """Wait for operations in progress; close the client unless it was passed in. Harmless twice."""
        await self._home.close(self._end)

    async def _begin(self) -> None:
        if self._client is None:
            self._use(self._given or await self._edge.run("open", self._open_client))
        if self._create:
            await table.prepare(self._edge, self._client, self._settings.table)
            self._create = False
        elif not self._is_checked:
            await table.check(self._edge, self._client, self._settings.table)
        self._is_checked = True

    async def _end(self) -> None:
        self._client = None
        closing, self._closing = self._closing, AsyncExitStack()
        try:
            if self._running:
                await asyncio.wait(self._running)
            await self._loads.close()
        finally:
            await closing.aclose()

    def _start_over(self) -> None:
        """Create the objects that belong to one event loop."""
        self._use(self._given)
        # The owner of a passed-in client decides how many operations it runs concurrently.
        self._limit: ConcurrencyLimit | None = None
        self._closing = AsyncExitStack()
        self._running: set[asyncio.Future[None]] = set()

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        require_last(last)
        loads = self._loads

        async def work(stored: Stored) -> Record | None:
            head = await loads.load(key) if self._shares_loads else None
            return await stored.load(await stored.item() if head is None else head, last)

        return await self._on(key, "load", work)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end. Keeps the version and resets the time to live."""
        require_append(entry, ttl, self.traits, backend=self.name)
        add = self._append_part if len(entry) > self._sizes.large else self._append

        async def work(stored: Stored) -> int:
            return await add(stored, entry, initial_version, ttl)

        return await self._on(key, "append", work, size=len(entry))

    async def _append(self, stored: Stored, entry: bytes, initial_version: str, ttl: float | None) -> int:
        key, now = stored.key, stored.now
        # A condition cannot add up the bytes in the head. If they could matter, the head is read first.
        most, seen = self.traits.max_record - len(entry) - statements.LARGEST_ITEM, Item()
        for _ in range(ROUNDS):
            adding = statements.append(key, entry, ttl=ttl, now=now, most=most, seen=seen)
            added = await stored.requests.attempt(adding)
            if added.done:
                grown, loose = int(added.content["Attributes"]["grown"]["N"]), self._sizes.loose
                # Exactly one of all appends passes each multiple.
                if grown // loose != (grown - weight_of(entry)) // loose:
                    await stored.aside(stored.seal(least=loose // 2))
                return int(added.content["Attributes"]["entries"]["N"])
            found = added.content
            head = await stored.look(found) if found else None
            if head is None:
                # There is no live record, so create one, replacing an expired one if necessary.
                item = item_of(initial_version, None, (entry,), ttl=ttl, now=now)
                created = await stored.requests.attempt(statements.create(key, item, now=now))
                if created.done:
                    await stored.replaced(created.content.get("Attributes", {}))
                    return 1
                found = created.content or await stored.item()
                head = await stored.look(found) if found else None
                if created.again and head is not None and head.version == initial_version:
                    # The first of the two has created it, with this entry.
                    return 1
            if head is not None:
                seen = found if await stored.admit(head, len(entry), ttl) else Item()
        raise stored.unsettled()

    async def _append_part(
        self, stored: Stored, entry: bytes, initial_version: str, ttl: float | None
    ) -> int:
        """Add an entry in a separate part."""
        key, now = stored.key, stored.now
        for _ in range(ROUNDS):
            before = await stored.item()
            head = await stored.look(before) if before else None
            reference = Reference(new_part(), 0, 1, len(entry))
            kept = stored.kept_of(head, ttl)
            if head is None:
                marks = stored.of_parts(new_version(), len(entry), kept)
                item = item_of(initial_version, None, (reference,), ttl=ttl, now=now) | marks
                statement = statements.create(key, item, now=now)
            elif not await stored.admit(head, len(entry), ttl):
                continue
            elif not head.life:
                await stored.mark(head)
                continue
            else:
                most = self.traits.max_record - len(entry) - (head.size - head.in_parts)
                statement = statements.append_part(key, reference, head=head, ttl=ttl, now=now, most=most)
            added = await stored.write({reference.part: [entry]}, statement, head=head, kept=kept)
            if added.done:
                if head is None:
                    await stored.replaced(before)
                    return 1
                if stored.is_crowded(len(head.tail)):
                    await stored.aside(stored.seal(least=self._sizes.loose // 2))
                return int(added.content["Attributes"]["entries"]["N"])
        raise stored.unsettled()

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
        if drop > self.traits.max_drop:
            raise ValueError(f"one replace drops at most {self.traits.max_drop} entries, not {drop}")
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)

        async def work(stored: Stored) -> bool:
            if version == expect:
                # Either it was already done, or there is nothing for it to replace.
                head = await stored.look()
                return head is not None and head.version == version
            if isinstance(expect, str):
                done = await self._fold(stored, body, version, expect, drop, rewrite, ttl)
            else:
                done = await self._save(stored, body, version, expect, ttl)
            if done and (stored.littered or key in self._littered):
                stored.littered = False
                self._littered.discard(key)
                await stored.aside(stored.sweep())
            return done

        return await self._on(key, "replace", work, size=len(body))

    async def _fold(
        self,
        stored: Stored,
        body: bytes,
        version: str,
        expect: str,
        drop: int,
        rewrite: Sequence[bytes],
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body and drop the oldest entries, or rewrite them."""
        key, now, going = stored.key, stored.now, drop or len(rewrite)
        head: Head | None = None
        for _ in range(ROUNDS):
            found: Item = {}
            # New names in each round, because parts that were not named may be deleted at any time.
            element: Element = body
            front, parts = elements_of(rewrite, self._sizes) if rewrite else ((), {})
            if len(body) > self._sizes.large:
                element = Reference(new_part(), 0, 1, len(body))
                parts[element.part] = [body]
            # A refused write is billed, too, so it is not tried if parts were seen before.
            has_parts = head.life if head else key in self._with_parts
            if not (parts or has_parts):
                direct = (
                    statements.rewrite(key, body, rewrite, version=version, expect=expect, ttl=ttl, now=now)
                    if rewrite
                    else statements.fold(
                        key, body, version=version, expect=expect, drop=drop, ttl=ttl, now=now
                    )
                )
                folded = await stored.requests.attempt(direct)
                if folded.done:
                    return True
                found = folded.content
            head = await stored.look(found)
            if head is None or head.version != expect or head.entries < going:
                return head is not None and head.version == version
            if not (head.life or parts):
                continue
            cut = await stored.cut(head, going)
            if cut is None:
                continue
            entries = head.entries - drop
            after = replace(head, version=version, body=element, tail=(*front, *cut.left), entries=entries)
            if not await stored.admit(head, after.size - head.size, ttl):
                continue
            if len(parts) > 1 and not head.life:
                # A transaction has a limit on its items and its bytes.
                await stored.mark(head)
                continue
            kept = stored.kept_of(head, ttl)
            folding = statements.fold_parts(
                key,
                after,
                head=head,
                front=front,
                cut=cut,
                of_parts=stored.of_parts(new_version(), after.in_parts, kept),
                ttl=ttl,
                now=now,
            )
            if parts:
                folded = await stored.write(parts, folding, head=head, kept=kept)
            else:
                folded = await stored.requests.attempt(folding)
            if folded.done:
                await stored.discard(head, after)
                return True
        raise stored.unsettled()

    async def _save(
        self,
        stored: Stored,
        body: bytes,
        version: str,
        expect: AbsentType | AnyType,
        ttl: float | None | KeepType,
    ) -> bool:
        key, now = stored.key, stored.now
        fresh = item_of(version, body, (), ttl=None if ttl is KEEP else ttl, now=now)
        if len(body) > self._sizes.large:
            whole: list[statements.Statement] = []
        elif expect is ABSENT:
            whole = [statements.create(key, fresh, now=now)]
        elif ttl is KEEP:
            keeping = statements.save_keeping(key, body, version=version, now=now)
            whole = [keeping, statements.create(key, fresh, now=now)]
        else:
            whole = [statements.save(key, fresh, now=now)]
        for _ in range(ROUNDS):
            before: Item = {}
            for statement in whole:
                saved = await stored.requests.attempt(statement)
                if saved.done:
                    await stored.replaced(saved.content.get("Attributes", {}))
                    return True
                before = saved.content
            before = before or await stored.item()
            head = await stored.look(before) if before else None
            if head is not None and (head.version == version or expect is ABSENT):
                return head.version == version
            if head is None or head.life or not whole:
                element = body if whole else Reference(new_part(), 0, 1, len(body))
                if await self._save_parts(stored, element, body, version, ttl, before, head):
                    return True
        raise stored.unsettled()

    async def _save_parts(
        self,
        stored: Stored,
        element: Element,
        body: bytes,
        version: str,
        ttl: float | None | KeepType,
        before: Item,
        head: Head | None,
    ) -> bool:
        """Replace the record that was read with a body, if either has parts."""
        key, now = stored.key, stored.now
        kept, life = stored.kept_of(head, ttl), new_version()
        if head is not None and head.life and stored.keeps(head, ttl):
            # Kept unchanged, so that concurrent saves do not conflict.
            life = head.life
        elif head is not None and head.life:
            kept = stored.kept_of(None, ttl)
        after = Head.of_body(version, element)
        marks = stored.of_parts(life, after.in_parts, kept)
        if head is not None:
            statement = statements.save_parts(key, after, head=head, of_parts=marks, ttl=ttl, now=now)
        else:
            fresh = item_of(version, element, (), ttl=None if ttl is KEEP else ttl, now=now)
            statement = statements.create(key, fresh | (marks if after.parts else {}), now=now)
        if isinstance(element, Reference):
            saved = await stored.write({element.part: [body]}, statement, head=head, kept=kept)
        else:
            saved = await stored.requests.attempt(statement)
        if saved.done and head is None:
            await stored.replaced(before)
        elif saved.done and "life" in (was := saved.content.get("Attributes", {})):
            await stored.discard(head_of(was), after)
        return saved.done

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`, and return whether it did.

        An expired record that DynamoDB has not removed yet counts as absent, and is removed, too.
        """
        version = None if expect is ANY else expect

        async def work(stored: Stored) -> bool:
            expired = False
            for _ in range(ROUNDS):
                deleting = statements.delete(key, expect=version, now=stored.now, expired=expired)
                deleted = await stored.requests.attempt(deleting)
                if deleted.done:
                    return not expired
                found = deleted.content or await stored.item()
                if "erased" in found:
                    await stored.finish_erasing(found)
                is_another = version is not None and found.get("version") != {"S": version}
                if not found or "erased" in found or is_another:
                    if stored.requests.is_in_doubt:
                        raise OutcomeUnknown(_SENT_AGAIN)
                    return False
                expired = not is_alive(found, stored.now)
                erasing = statements.erase(key, expect=version, now=stored.now, expired=expired)
                if "life" in found:
                    erased = await stored.requests.attempt(erasing)
                    if erased.done:
                        try:
                            await stored.finish_erasing(erased.content["Attributes"])
                        except Exception as error:
                            # The record is already gone, so `Unavailable` would be wrong.
                            if (meaning(error) or (None,))[0] is not Unavailable:
                                raise
                            raise OutcomeUnknown(
                                "erased, but its parts could not be deleted yet; delete it again"
                            ) from error
                        return not expired
            raise stored.unsettled()

        return await self._on(key, "delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self._names(scope, after, limit, expired=False)

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that have expired and still have an item; `delete` removes them."""
        return await self._names(scope, after, limit, expired=True)

    async def finish_erasure(self) -> Remains:
        """Describe what remains of deleted records."""
        return _REMAINS

    async def _names(self, scope: str, after: str, limit: int, *, expired: bool) -> Page:
        require_limit(limit)

        async def work(requests: Requests, now: float) -> Page:
            statement = statements.scan(
                scope, after=after, limit=min(limit, _MAX_PAGE), now=now, expired=expired
            )
            found = await requests.send(statement)
            names = tuple(item["sk"]["S"] for item in found["Items"])
            last = found.get("LastEvaluatedKey")
            return Page(names, last["sk"]["S"] if last else None)

        return await self._run("scan", work)

    def _use(self, client: Any) -> None:
        """Use this client from now on; loads in progress continue on the client they began with."""
        self._client = client
        self._loads = Coalesced(
            functools.partial(self._fetch, client),
            # Even the largest items fit into one answer, so their bytes need not be counted.
            size=lambda _: 1,
            max_keys=statements.MAX_HEADS,
        )

    async def _fetch(self, client: Any, keys: Sequence[Key]) -> dict[Key, Item]:
        """Return the heads of several records, `{}` for absent ones. Those left out must be read one by one.

        So the caller of a throttled record waits for it alone, until its own deadline.
        """
        table = self._settings.table
        requests = Requests(client, table, until=0.0)  # retries nothing
        try:
            if len(keys) == 1:
                return {keys[0]: (await requests.send(statements.load(keys[0]))).get("Item", {})}
            answer = await requests.send(statements.load_heads(keys))
        except ClientError as error:
            if len(keys) > 1 and code_of(error) == DENIED:
                # The role may lack only this permission, or may not read one of these records.
                self._shares_loads = False
            elif not is_passing(error):
                raise
            return {}
        unread = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", ())
        heads: dict[Key, Item] = {key: {} for key in keys}
        heads |= {owner_of(item): item for item in answer["Responses"][table]}
        return {key: heads[key] for key in heads.keys() - map(owner_of, unread)}

    async def _open_client(self) -> Any:
        closing = AsyncExitStack()
        client = await closing.enter_async_context(make_client(self._settings))
        # Assigned together at the end, so that a concurrent `close` closes either nothing or all of it.
        self._closing = closing
        self._limit = ConcurrencyLimit(self._settings.pool_size, patience_s=self._settings.deadline_s / 2)
        return client

    async def _run(self, operation: str, work: Callable[[Requests, float], Awaitable[T]]) -> T:
        """Run the requests of one operation within the deadline; expiry is decided at one point in time."""
        if self._client is None:
            raise self._edge.not_open(operation)
        loop = asyncio.get_running_loop()
        requests = Requests(self._client, self._settings.table, until=loop.time() + self._settings.deadline_s)

        async def in_turn() -> T:
            async with self._limit or contextlib.nullcontext():
                return await work(requests, round(self._clock(), 6))

        ended: asyncio.Future[None] = loop.create_future()
        self._running.add(ended)
        try:
            return await self._edge.run(operation, in_turn)
        except (Unavailable, TooLarge, Denied) as error:
            if not requests.is_in_doubt:
                raise
            message = f"{error.args[0]}; before that, {_SENT_AGAIN}"
            raise OutcomeUnknown(message, backend=self.name, operation=operation) from error
        except OutcomeUnknown as error:
            refusal = requests.throttled and meaning(requests.throttled)
            if refusal is None or requests.is_in_doubt:
                raise
            # The deadline ended a pause. No request was on its way, and the last one was refused.
            kind, message = refusal
            raise kind(message, backend=self.name, operation=operation) from error
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    async def _on(
        self, key: Key, operation: str, work: Callable[[Stored], Awaitable[T]], *, size: int = 0
    ) -> T:
        """Run an operation on one record; a write adds a value of `size` bytes."""

        async def on(requests: Requests, now: float) -> T:
            stored = Stored(requests, key, now=now, sizes=self._sizes, parts=self._parts)
            try:
                return await work(stored)
            except ClientError as error:
                if not is_invalid(error) or operation not in ("append", "replace"):
                    raise
                # A head written by an earlier version may have the maximum size of an item.
                await stored.seal(least=1)
                with self._refusing(size):
                    return await work(stored)
            finally:
                for keys, is_one in ((self._littered, stored.littered), (self._with_parts, stored.has_parts)):
                    if is_one:
                        keys.add(key)
                    if len(keys) > _MOST_NOTED:
                        keys.pop()

        return await self._run(operation, on)

    @contextlib.contextmanager
    def _refusing(self, size: int) -> Generator[None]:
        """Raise `TooLarge` if the server has no room for a value of `size` bytes that the traits allow."""
        try:
            yield
        except ClientError as error:
            if not is_too_large(error):
                raise
            if size > self._sizes.large:
                raise TooLarge("entry", size=size, limit=size - 1) from error
            most = statements.LARGEST_ITEM
            raise TooLarge("record", size=most + size, limit=most) from error
