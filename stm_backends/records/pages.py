"""The pages of a transcript: turns that have left a conversation's record, found by their numbers.

The items of a log go to pages, too, as turns with other fields (see `history.items`). A page reads only the
`turn_id` of a turn.

Page `k` has the turns `64 * k` to `64 * k + 63`. Before a body drops turns, one `append` adds them to their
page, or two where they cross its end. Then one conditional `replace` of the record drops them and says so.

```
acme:u1:page / DIGEST:EPOCH:000000001f      body: the whole page, once it is complete
                                            tail: entries of the turns that left together
{"first":1984,"prev":"h2Xk0aQ-","summary":"...","upto":1984,"turns":[{"turn_id":...},...]}
```

The appends have no condition and are never undone: while the body of a record says `base`, the number of a
turn of its tail is the same for every process. So turns added by a process that lost a race, or ended, are
copies of those that the next one adds. A reader takes one of the copies: of the highest `rev` that the body
knows, and of those the one that the turn after it names in `prev`. Copies of one `rev` differ if a datastore
lost turns that it had acknowledged, or if a process took its own turn for the one after those that it had
seen: its write of the record is refused, but not that of the page.

A page is never deleted while it may grow, because an append does not change its version. An erasure deletes
pages after the record; the epoch ensures that the next record under the same key has others.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from stm_backends.drivers.checks import require_count, require_integer
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    KeyMismatch,
    SealMismatch,
    StorageError,
    TooLarge,
    Unavailable,
    located,
)
from stm_backends.plain_json import encode_json
from stm_backends.records import confirming, keys, ledger, operations
from stm_backends.records.body import Branch, Patch, Transcript, digest
from stm_backends.records.codec import Codec
from stm_backends.records.compression import Preset

logger = logging.getLogger("stm_backends")

TURNS: Final = 64
"""Number of turns in a page. Part of the format."""

MOST: Final = 1_000
"""Maximum number of turns that one call returns."""

IMPORTED: Final = "import-"
"""The prefix of the epoch of pages that come before their record; an id with the time follows."""

SPILLS: Final = 1_000
"""Maximum number of records of a page: data that does not fit into one goes to the next."""

_ENTRY_LEVEL: Final = 3
"""Takes two thirds of the time of level 6 for five turns of prose, and 4% more bytes."""


PageEvent: TypeAlias = Literal["written", "read"]


class Leaving(NamedTuple):
    """A turn that is about to leave the record: its id, and its JSON as the page will have it.

    `rev` is set if it is more than that of the transcript.
    """

    id: str
    data: bytes
    rev: int = 0


class Copy(NamedTuple):
    """One copy of a turn in a page. `notes` has the checkpoint, and other notes of its entry on it."""

    rev: int
    turn: Mapping[str, Any]
    prev: str
    notes: Mapping[str, Any]


LoadMark: TypeAlias = Callable[[], Awaitable[tuple[str | None, Transcript | None]]]
"""Loads a record; returns its version and its transcript, `None` if it has none."""


Damaged: TypeAlias = Callable[[Corrupt], None]
"""Called with the error of a part of a page that cannot be read."""


def refused(error: Corrupt) -> None:
    """Raise the error: no part is left out."""
    raise error


def _left_out(error: Corrupt) -> None:
    pass


class _Held(NamedTuple):
    """The content of one record, except for what it `lacks`. If it `is_whole`, its body has the page."""

    contents: Sequence[Mapping[str, Any]]
    is_whole: bool = False
    lacks: bool = False


class _Candidates(NamedTuple):
    """The copies of a page's turns that may count, see `candidates`, except for what the page `lacks`."""

    copies: Mapping[int, Sequence[Copy]]
    lacks: bool


class Pages:
    """Writes and reads the pages of any conversation of a driver.

    `most` is the number of turns that the pages of a conversation keep; `None` means all. `counted` is called
    for records of pages that were written, or read for their turns.
    """

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        *,
        most: int | None = None,
        counted: Callable[[PageEvent, int], None] = lambda event, count: None,
    ) -> None:
        self.most = most
        self._counted = counted
        self._driver = driver
        self._codec = codec.after(Preset())
        # Entries stay until their page is complete, so time counts for more than size.
        self._entries = codec.after(Preset(level=_ENTRY_LEVEL))

    # Writing

    async def put(
        self,
        key: Key,
        transcript: Transcript,
        leaving: Sequence[Leaving],
        *,
        summary: str | None,
        ttl: float | None,
    ) -> None:
        """Store turns that are about to leave the record, which has this transcript and this summary.

        They are the oldest ones of its tail. Storing them again is harmless. Without a summary, no checkpoint
        is stored. The pages are written at once, so that many turns leave as fast as few, and faster than
        others are added.
        """
        parts: list[tuple[Transcript, Sequence[Leaving]]] = []
        while len(leaving) > (count := TURNS - transcript.base % TURNS):
            parts.append((transcript, leaving[:count]))
            # The summary is that from before they leave.
            transcript = transcript.moved([one.id for one in leaving[:count]], summarized=False)
            leaving = leaving[count:]
        if leaving:
            parts.append((transcript, leaving))
        await operations.together(parts, lambda part: self._append(key, *part, summary, ttl))

    async def _append(
        self,
        key: Key,
        transcript: Transcript,
        leaving: Sequence[Leaving],
        summary: str | None,
        ttl: float | None,
    ) -> None:
        """Store turns of one page as one entry or, if that is too large, as several.

        A turn that leaves no room for a checkpoint is stored without one.
        """
        page = transcript.base // TURNS
        try:
            data = self._entries.seal_encoded("page", _content(transcript, leaving, summary))
            for spill in range(SPILLS):
                try:
                    where = keys.page_key(key, transcript.epoch, page, spill)
                    await ledger.append(self._driver, where, data, ttl=ttl)
                    self._counted("written", 1)
                    return
                except TooLarge as error:
                    if error.what != "record" or spill + 1 == SPILLS:
                        raise
        except TooLarge as error:
            half = len(leaving) // 2
            if error.what != "entry" or (not half and summary is None):
                raise
            if not half:
                await self._append(key, transcript, leaving, None, ttl)
                return
            await self._append(key, transcript, leaving[:half], summary, ttl)
            rest = transcript.moved([one.id for one in leaving[:half]], summarized=False)
            await self._append(key, rest, leaving[half:], summary, ttl)

    async def put_new(
        self,
        key: Key,
        transcript: Transcript,
        leaving: Sequence[Leaving],
        *,
        summary: str | None,
        ttl: float | None,
    ) -> None:
        """Store turns of one page of an epoch that no other process uses: a complete page is one body."""
        if len(leaving) == TURNS:
            where = keys.page_key(key, transcript.epoch, transcript.base // TURNS)
            try:
                body = self._codec.seal_encoded("page", _content(transcript, leaving, summary))
                change = ledger.Change(body, ttl=ttl)
                if await ledger.replace(self._driver, where, change, expect=ABSENT):
                    self._counted("written", 1)
                    return
            except TooLarge:
                pass
        await self.put(key, transcript, leaving, summary=summary, ttl=ttl)

    async def complete(self, key: Key, before: Transcript, leaving: Sequence[Leaving]) -> range:
        """Rewrite the pages that became full as turns left a record whose transcript was `before`.

        These turns are those that the record dropped. Returns the numbers of these pages. Only logs a
        failure: a page can be read as it was.
        """
        end = before.base + len(leaving)
        full = range(before.base // TURNS, end // TURNS)
        if not full:
            return full
        known = {before.base - 1: before.last}
        known |= {number: digest(one.id) for number, one in enumerate(leaving, before.base)}
        rev = max([before.rev, *(one.rev for one in leaving)])
        branches = before.branches

        async def rewrite(page: int) -> None:
            try:
                await self.compact(key, before.epoch, page, known, rev=rev, branches=branches)
            except StorageError as error:
                logger.warning(
                    "could not rewrite a full page of a transcript, which takes more room as it is: %s "
                    "(conversation %s)",
                    error,
                    keys.log_name(key),
                )

        await operations.together(full, rewrite)
        return full

    async def compact(
        self,
        key: Key,
        epoch: str,
        page: int,
        known: Mapping[int, str],
        *,
        rev: int = 0,
        branches: Sequence[Branch] = (),
    ) -> bool:
        """Write a page as one body and drop the entries that were read; returns whether that was done.

        `known` has short hashes of ids by number. A page that is not full, or has spilled, stays as it is. So
        does a page with copies above `rev`: the record may never come to that. Copies of `branches` stay.
        """
        where, spill = (keys.page_key(key, epoch, page, spill) for spill in (0, 1))
        record = await self._driver.load(where)
        if record is None or not record.tail or len(record.tail) > self._driver.traits.max_drop:
            return False
        opened = self.opened(record)
        copies = candidates(opened)
        if any(one.rev > rev for of_turn in copies.values() for one in of_turn):
            # Another process has seen more changes than the writer of this record.
            return False
        found = resolved(copies, known)
        numbers = range(page * TURNS, (page + 1) * TURNS)
        if found.keys() != {*numbers} or await self._driver.load(spill) is not None:
            return False
        counted = [found[number] for number in numbers]
        revs = [copy.rev for copy in counted]
        content = {
            **counted[0].notes,
            "first": numbers[0],
            "prev": counted[0].prev,
            **({"revs": revs} if any(revs) else {}),
            "turns": [copy.turn for copy in counted],
            **({"others": others} if (others := _others(opened, branches, found)) else {}),
        }
        change = ledger.Change(self._codec.seal("page", content), drop=len(record.tail))
        empty = ledger.unchanged_by(lambda _: self.nothing())
        done = await ledger.fold(self._driver, where, record, change, unchanged=empty)
        if done:
            self._counted("written", 1)
        return done

    async def put_patches(self, key: Key, transcript: Transcript, *, ttl: float | None) -> None:
        """Store edited units in pages, as far as they are not there."""
        patches = {one.number: one for one in transcript.patches if "item" in one.turn}
        if not patches:
            return
        found = await self.between(key, transcript, min(patches), max(patches) + 1)
        due = (number for number in sorted(patches) if number in found)
        for run in runs(number for number in due if found[number].rev < patches[number].rev):
            first = found[run[0]]
            upto, summary = first.notes.get("upto", run[0]), first.notes.get("summary")
            if any(one.number < upto for one in transcript.patches):
                summary = None
            gap = upto if upto < run[0] else None
            before = replace(transcript, base=run[0], last=first.prev, rev=0, gap=gap)
            leaving = [
                Leaving(one.turn["turn_id"], encode_json(one.turn), one.rev)
                for one in (patches[number] for number in run)
            ]
            await self.put(key, before, leaving, summary=summary, ttl=ttl)

    async def scrub(
        self, key: Key, epoch: str, patches: Sequence[Patch], *, first: int | None = None
    ) -> None:
        """Remove from pages the content of units before edits, and the checkpoints that may tell it.

        Begins with the page of the number `first`, by default that of the first edit. A reader of an older
        record misses the number, and reads the record again.
        """
        least = (min(one.number for one in patches) if first is None else first) // TURNS
        places = [
            one for one in await listed(self._driver, key, epoch) if keys.page_number(one.name) >= least
        ]

        await self._rewrite(places, lambda content: _scrubbed(content, _is_edited(patches), patches))

    async def forget_removed(self, key: Key, transcript: Transcript) -> bool:
        """Remove from pages the items that were popped from their end; returns whether there were any.

        They are those of earlier revisions: of numbers from `base` on, and of numbers that later items have.
        """
        numbered: dict[int, list[Key]] = {}
        for place in await listed(self._driver, key, transcript.epoch):
            numbered.setdefault(keys.page_number(place.name), []).append(place)
        done = False
        for page, places in numbered.items():
            start, end = max(page * TURNS, transcript.first), min((page + 1) * TURNS, transcript.base)
            counted = await self.between(key, transcript, start, end)
            revs = {number: copy.rev for number, copy in counted.items()}

            def is_old(
                number: int, turn: Mapping[str, Any], rev: int, revs: Mapping[int, int] = revs
            ) -> bool:
                del turn
                # Another process may be storing items of this revision from `base` on at this moment.
                return rev < (revs.get(number, 0) if number < transcript.base else transcript.rev)

            done |= await self._rewrite(places, lambda content, is_old=is_old: _scrubbed(content, is_old))
        return done

    async def _rewrite(
        self, places: Sequence[Key], change: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> bool:
        """Change the content of pages' entries; returns whether any changed."""

        def changed(value: bytes) -> bytes | None:
            try:
                content = self._codec.open("page", value)
            except (KeyMismatch, SealMismatch):
                raise
            except Corrupt:
                return None
            left = change(_checked(content))
            return None if left == content else self._codec.seal("page", left)

        async def decided(record: Record | None) -> tuple[ledger.Change | None, bool]:
            if record is None:
                return None, False
            body = changed(record.body) if record.body else None
            tail = [*map(changed, record.tail[: self._driver.traits.max_drop])]
            count = max((place for place, one in enumerate(tail, 1) if one is not None), default=0)
            if body is None and not count:
                return None, False
            rewrite = [one or old for one, old in zip(tail[:count], record.tail, strict=False)]
            return ledger.Change(body or record.body or self.nothing(), rewrite=rewrite), True

        async def one(where: Key) -> bool:
            empty = ledger.unchanged_by(lambda _: self.nothing())
            done = await ledger.update(self._driver, where, decided, unchanged=empty)
            if done is None:
                raise Unavailable("a page kept changing", backend=self._driver.name, operation="edit")
            return done

        return any(await operations.together(places, one)) if places else False

    def nothing(self) -> bytes:
        """Return the body of a page that has its turns in entries, if any."""
        return self._codec.seal("page", {"first": 0, "turns": []})

    # Reading

    async def between(
        self, key: Key, transcript: Transcript, first: int, end: int, *, damaged: Damaged = refused
    ) -> dict[int, Copy]:
        """Return the copies that count of the turns from `first` to `end - 1` by number, below `base`.

        Loads pages concurrently. A number without a turn is in no page. `damaged` is called with the error
        for each part of a page that cannot be read, and by default raises it; if it does not, that part is
        left out.
        """
        if end <= first:
            return {}
        page, stop = first // TURNS, (end - 1) // TURNS + 1
        loaded = [
            *await operations.together(
                range(page, stop), lambda one: self._candidates(key, transcript, one, damaged)
            )
        ]
        # Where the last turn of a page has copies that differ, only the next page says which of them counts.
        while stop * TURNS < transcript.base and _differ(loaded[-1].copies, stop * TURNS - 1):
            loaded.append(await self._candidates(key, transcript, stop, _left_out))
            stop += 1
            if not _differ(loaded[-1].copies, (stop - 1) * TURNS):
                break
        known = {transcript.base - 1: transcript.last}
        found: dict[int, Copy] = {}
        for candidates in reversed(loaded):
            stop -= 1
            copies = resolved(candidates.copies, known, lacks=candidates.lacks)
            if stop * TURNS in copies and stop * TURNS < transcript.base:
                known[stop * TURNS - 1] = copies[stop * TURNS].prev
            found |= {number: copy for number, copy in copies.items() if first <= number < end}
        for _, number, turn in transcript.patches:
            copy = found.get(number)
            if copy is not None and "item" in turn and copy.turn["turn_id"] == turn["turn_id"]:
                found[number] = copy._replace(turn=turn)
        return dict(sorted(found.items()))

    async def _candidates(self, key: Key, transcript: Transcript, page: int, damaged: Damaged) -> _Candidates:
        wanted = range(max(page * TURNS, transcript.first), min((page + 1) * TURNS, transcript.base))
        known = {transcript.base - 1: transcript.last}
        contents: list[Mapping[str, Any]] = []
        copies: Mapping[int, Sequence[Copy]] = {}
        lacks = False
        for spill in range(SPILLS):
            held = await self._held(keys.page_key(key, transcript.epoch, page, spill), damaged)
            if held is None:
                break
            contents += held.contents
            lacks = lacks or held.lacks
            copies = candidates(contents, transcript.rev)
            # Turns that were changed later may be in a later record; so may those that the next turns name.
            # No turn names the last one of a page that others follow.
            named = transcript.base - 1 in wanted and _are_named(copies, wanted, known)
            if not transcript.rev and (held.is_whole or named):
                return _Candidates(copies, lacks)
        if not copies.keys() >= {*wanted}:
            # Records that a page spills to may live longer than those before them.
            scope, name = keys.page_key(key, transcript.epoch, page)
            async for later in operations.names_of(self._driver, scope, f"{name}."):
                held = await self._held(Key(scope, later), damaged) or _Held(())
                contents += held.contents
                lacks = lacks or held.lacks
            copies = candidates(contents, transcript.rev)
        return _Candidates(copies, lacks)

    async def _held(self, where: Key, damaged: Damaged) -> _Held | None:
        """Return the content of one record; `None` if it does not exist."""
        errors: list[Corrupt] = []

        def noted(error: Corrupt) -> None:
            errors.append(error)
            damaged(error)

        try:
            record = await self._driver.load(where)
        except Corrupt as error:
            damaged(error)
            return _Held((), lacks=True)
        if record is None:
            return None
        self._counted("read", 1)
        contents = self.opened(record, damaged=noted)
        is_whole = bool(record.body and not errors and len(contents[0]["turns"]) == TURNS)
        return _Held(contents, is_whole, lacks=bool(errors))

    async def oldest(self, key: Key, transcript: Transcript) -> int:
        """Return the number that the oldest page which is stored begins with; `base` if none is."""
        scope, prefix = keys.pages_of_epoch(key, transcript.epoch)
        async for name in operations.names_of(self._driver, scope, prefix):
            return min(keys.page_number(name) * TURNS, transcript.base)
        return transcript.base

    def opened(self, record: Record, *, damaged: Damaged = refused) -> list[Mapping[str, Any]]:
        """Return the content of a page's entries, its body first; `damaged` is that of `between`.

        The last ones are those that the body has for branches.
        """
        found: list[Mapping[str, Any]] = []
        with located(self._driver.name, "transcript"):
            for value in [*([record.body] if record.body else []), *record.tail]:
                try:
                    found.append(_checked(self._codec.open("page", value)))
                except Corrupt as error:
                    damaged(error)
        others: Sequence[Mapping[str, Any]] = found[0].get("others", ()) if found else ()
        return [*found, *others]


async def listed(driver: Driver, key: Key, epoch: str = "") -> list[Key]:
    """Return the pages of a record that are stored, of one epoch or of all, in order."""
    scope, prefix = keys.pages_of_epoch(key, epoch) if epoch else keys.pages_of(key)
    return [Key(scope, name) async for name in operations.names_of(driver, scope, prefix)]


async def remove(driver: Driver, places: Iterable[Key]) -> int:
    """Remove pages, several at a time; returns how many there were."""
    removed = 0

    async def each() -> AsyncIterator[Key]:
        for place in places:
            yield place

    async def one(place: Key) -> None:
        nonlocal removed
        done = await ledger.erase(driver, place)
        removed += done

    await operations.each(each(), one)
    return removed


async def erase(driver: Driver, key: Key, epoch: str = "") -> int:
    """Remove the pages of a record, of one epoch or of all; returns how many. The record comes first."""
    return await remove(driver, await listed(driver, key, epoch))


async def require(driver: Driver, key: Key, epoch: str, numbers: Collection[int]) -> None:
    """Raise `Unavailable` if a page of an epoch that was stored is gone, as after an erasure."""
    if not numbers:
        return
    scope, prefix = keys.pages_of_epoch(key, epoch)
    await confirming.confirm(driver, (scope,))
    there = {keys.page_number(name) async for name in operations.names_of(driver, scope, prefix)}
    if not there.issuperset(numbers):
        raise Unavailable(
            "pages that were stored before were erased meanwhile; import it again",
            backend=driver.name,
            operation="import",
        )


def may_refer(version: str | None, transcript: Transcript | None, epoch: str) -> bool:
    """Say whether a record has pages of an epoch, or may come to have them; from its version and its body.

    A first fold or trim stores pages before the body says so, in the epoch of the version that it is about to
    replace. A record that has another version or another epoch never comes to have these pages: no version
    comes back.
    """
    return epoch == (version if transcript is None else transcript.epoch)


async def dead(driver: Driver, key: Key, places: Sequence[Key], load: LoadMark) -> list[Key]:
    """Return those of the pages of a record that it neither has nor comes to have.

    They were listed before, because a page comes after its record. A server that others have replaced shows
    an earlier record, to which later pages are unknown.
    """

    async def compared(places: Sequence[Key]) -> list[Key]:
        mark = await load()
        return [place for place in places if not may_refer(*mark, keys.page_epoch(place.name))]

    found = await compared(places) if places else []
    if found and driver.traits.shows_unconfirmed:
        await confirming.confirm(driver, (key.scope,))
        found = await compared(found)
    return found


async def erase_dead(driver: Driver, key: Key, load: LoadMark, *, epoch: str = "") -> bool:
    """Remove the dead pages of a record, of one epoch or of all; returns whether all were dead."""
    places = await listed(driver, key, epoch)
    gone = await dead(driver, key, places, load)
    await remove(driver, gone)
    return len(gone) == len(places)


class Numbered(Protocol):
    """A turn or item with its number."""

    @property
    def number(self) -> int:
        """Counts from 0."""
        ...


class Part(Protocol):
    """Some turns or items as of one moment, and the numbers that have none."""

    @property
    def oldest(self) -> int:
        """The number of the oldest one that is stored."""
        ...

    @property
    def newest(self) -> int:
        """The number of the newest one."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """The requested numbers that have none."""
        ...


One = TypeVar("One", bound=Numbered)


async def each_after(
    after: int | None, read: Callable[[int], Awaitable[tuple[Part, Sequence[One]]]]
) -> AsyncGenerator[One]:
    """Yield all turns or items after a number, oldest first; all for `None`. `read` returns some of them."""
    after = -1 if after is None else after
    while True:
        part, found = await read(after)
        for one in found:
            yield one
        after = max([after, part.oldest - 1, *part.missing[-1:], *(one.number for one in found[-1:])])
        if after >= part.newest:
            return


def require_one_place(before: int | None, after: int | None, at: int | None, limit: int) -> None:
    """Raise `ConfigurationError` for arguments that name no page."""
    require_count("limit", limit, most=MOST)
    if sum(given is not None for given in (before, after, at)) > 1:
        raise ConfigurationError("give one of before, after and at")
    for name, number, least in (("before", before, 0), ("after", after, -1), ("at", at, 0)):
        if number is not None:
            require_integer(name, number, least=least)


def numbers_asked_for(
    oldest: int, end: int, *, before: int | None, after: int | None, at: int | None, limit: int
) -> tuple[int, int]:
    """Return the first number, and that after the last, of up to `limit` turns from `oldest` to `end - 1`.

    They are those before a number, after one or around one; by default the newest ones.
    """
    if before is not None:
        stop = max(oldest, min(before, end))
        start = stop - limit
    elif after is not None or at is not None:
        start = after + 1 if after is not None else (at or 0) - limit // 2
        start = max(start, oldest)
        stop = start + limit
    else:
        start, stop = end - limit, end
    return max(start, oldest), min(stop, end)


def _content(transcript: Transcript, leaving: Sequence[Leaving], summary: str | None) -> bytes:
    """Return the JSON of turns that begin at `base`, with a checkpoint if they begin a page.

    Without a `summary` there is none.
    """
    fields: dict[str, Any] = {"first": transcript.base, "prev": transcript.last}
    revs = [max(transcript.rev, one.rev) for one in leaving]
    if len({*revs}) > 1:
        fields["revs"] = revs
    elif revs[0]:
        fields["rev"] = revs[0]
    if transcript.base % TURNS == 0 and summary is not None:
        fields |= {"summary": summary, "upto": transcript.summarized}
    head, turns = encode_json(fields)[:-1], b",".join(one.data for one in leaving)
    return b'%b,"turns":[%b]}' % (head, turns)


def candidates(contents: Iterable[Mapping[str, Any]], rev: int | None = None) -> dict[int, list[Copy]]:
    """Return by number the copies of each turn that may count, the last one first.

    They are those of the highest `rev`, of up to the given one.
    """
    found: dict[int, list[Copy]] = {}
    for content in contents:
        for number, copy in _copies(content):
            if rev is None or copy.rev <= rev:
                found.setdefault(number, []).append(copy)
    for number, copies in found.items():
        if len(copies) > 1:
            newest = max(copy.rev for copy in copies)
            found[number] = [copy for copy in reversed(copies) if copy.rev == newest]
    return found


def resolved(
    candidates: Mapping[int, Sequence[Copy]], known: Mapping[int, str], *, lacks: bool = False
) -> dict[int, Copy]:
    """Return the copy of each turn that counts, by number.

    It is the one whose id has the short hash that `known` has, or that the turn after it names, and otherwise
    the last one. If the page `lacks` unreadable data, this copy may be missing: no other copy takes the place
    of the one that is named, nor does any copy before a number that is left out for this reason.
    """
    found: dict[int, Copy] = {}
    for number in sorted(candidates, reverse=True):
        after = found.get(number + 1)
        name = known.get(number, after.prev if after else "")
        named = next((one for one in candidates[number] if _name(one) == name), None)
        if named is not None:
            found[number] = named
        elif not lacks or not (name or (after is None and number + 1 in candidates)):
            found[number] = candidates[number][0]
    return found


def _others(
    contents: Sequence[Mapping[str, Any]], branches: Sequence[Branch], counted: Mapping[int, Copy]
) -> list[dict[str, Any]]:
    """Return the copies of branches in a page, besides those that count, as entries."""
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for branch in branches:
        for number, copies in candidates(contents, branch.rev).items():
            for rev, turn, prev, _ in reversed(copies if branch.first <= number < branch.end else ()):
                if (rev, turn) != counted[number][:2]:
                    one = {"first": number, "prev": prev, "rev": rev, "turns": [turn]}
                    found[number, rev, turn["turn_id"]] = one
    return [*found.values()]


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers, which ascend, in lists without gaps."""
    found: list[list[int]] = []
    for number in numbers:
        if not found or number != found[-1][-1] + 1:
            found.append([])
        found[-1].append(number)
    return found


IsOld: TypeAlias = Callable[[int, Mapping[str, Any], int], bool]
"""Says whether a turn of a page is removed, by its number and its revision."""


def _is_edited(patches: Sequence[Patch]) -> IsOld:
    """Return a function that says whether a turn is as it was before edits."""

    def is_old(number: int, turn: Mapping[str, Any], rev: int) -> bool:
        return any(
            number == one.number and rev < one.rev and turn["turn_id"] == one.turn["turn_id"]
            for one in patches
        )

    return is_old


def _scrubbed(content: Mapping[str, Any], is_old: IsOld, patches: Sequence[Patch] = ()) -> dict[str, Any]:
    """Return an entry without old turns, and without a checkpoint that may tell what edits replaced."""
    first, turns, left = content["first"], content["turns"], dict(content)
    revs = content.get("revs") or [content.get("rev", 0)] * len(turns)
    left["turns"] = [
        {"turn_id": turn["turn_id"], "gone": True} if is_old(number, turn, rev) else turn
        for number, (turn, rev) in enumerate(zip(turns, revs, strict=True), first)
    ]
    if "upto" in left and any(revs[0] < one.rev and one.number < left["upto"] for one in patches):
        del left["summary"], left["upto"]
    if "others" in left:
        left["others"] = [_scrubbed(one, is_old, patches) for one in left["others"]]
    return left


def _differ(candidates: Mapping[int, Sequence[Copy]], number: int) -> bool:
    """Say whether the copies of a turn that may count are of several turns."""
    return len({copy.turn["turn_id"] for copy in candidates.get(number, ())}) > 1


def _are_named(
    candidates: Mapping[int, Sequence[Copy]], numbers: Iterable[int], known: Mapping[int, str]
) -> bool:
    """Say whether all of these turns are there as `known` and the turn after each name them."""
    found = resolved(candidates, known)
    for number in numbers:
        after = found.get(number + 1)
        name = known.get(number, after.prev if after else None)
        if name is None or number not in found or name not in ("", _name(found[number])):
            return False
    return True


def _name(copy: Copy) -> str:
    return digest(copy.turn["turn_id"])


def _copies(content: Mapping[str, Any]) -> list[tuple[int, Copy]]:
    """Return the turns of one entry with their numbers."""
    turns, first = content["turns"], content["first"]
    revs = content.get("revs") or [content.get("rev", 0)] * len(turns)
    prev, notes = content.get("prev", ""), {name: content[name] for name in content if name not in _OWN}
    found: list[tuple[int, Copy]] = []
    for number, (turn, rev) in enumerate(zip(turns, revs, strict=True), first):
        if "gone" not in turn:
            found.append((number, Copy(rev, turn, prev, notes)))
        prev, notes = digest(turn["turn_id"]), {}
    return found


_OWN: Final = frozenset(("first", "prev", "rev", "revs", "turns", "others"))


def _checked(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of an entry; raises `Corrupt` if it lacks a required field."""
    turns = content.get("turns")
    if not isinstance(content.get("first"), int) or not isinstance(turns, list):
        raise Corrupt("an entry of a page lacks a field")
    for turn in cast("list[object]", turns):
        if not isinstance(turn, dict) or not isinstance(cast("dict[str, Any]", turn).get("turn_id"), str):
            raise Corrupt("a turn of a page has no id")
    return content
