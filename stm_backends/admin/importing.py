"""Storing exported conversations; see `exporting` for their lines.

The pages of a transcript are stored first, in a new epoch, and the record that refers to them last.
So an interrupted import shows nothing of them, and leaves pages that `purge` removes after a day.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

from stm_backends.admin import dead_pages, log_lines
from stm_backends.admin.adopting import exported, is_saved
from stm_backends.admin.dead_pages import DeadPages
from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.exporting import FORMAT, FORMAT_VERSION, PAGE_FORMAT, lines_in
from stm_backends.admin.numbers import Numbers
from stm_backends.catalogue.card import SET_BY_USER, Content, checked_changes
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, KeepType, Key, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidState,
    SessionExists,
    Unavailable,
    located,
)
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import entries_of, seal_messages, seal_units, stored_unit
from stm_backends.plain_json import DEEPEST_IN_TURN, encode_json, require_json
from stm_backends.records import confirming, keys, ledger, pages
from stm_backends.records.body import REMEMBERED_IDS, Body, Branch, Forgotten, Transcript, digest
from stm_backends.records.codec import Codec, load_body, load_turn
from stm_backends.records.directory import Directory
from stm_backends.records.large.pointers import new_id
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_in, characters_of
from stm_backends.records.pages import Leaving, Pages
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryHealth, MemoryKey

OnConflict: TypeAlias = Literal["refuse", "merge", "replace"]
"""Action of an import if the conversation already exists."""

Turns: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Turns by id, oldest first."""


@dataclass(frozen=True, slots=True)
class Session:
    """A valid exported conversation. `card` has the fields that were set on its card.

    `transcript` has no epoch; it is `None` if the conversation has none. `missing` has the numbers of turns
    that no page before the conversation has. `branches` has turns that edits have removed from the view.
    """

    key: MemoryKey
    body: Body
    turns: Turns
    card: Content
    transcript: Transcript | None
    missing: Sequence[range] = ()
    branches: Mapping[Branch, Turns] = field(default_factory=dict[Branch, Turns])


@dataclass(frozen=True, slots=True)
class Page:
    """A valid page, or a part of one, whose turns begin at a number. `prev` is the hash of the id before."""

    key: MemoryKey
    first: int
    turns: Turns
    prev: str
    summary: str | None
    upto: int
    rev: int = 0


def is_page(document: Mapping[str, Any]) -> bool:
    """Say whether a line claims to be a page of a transcript."""
    return isinstance(document, Mapping) and document.get("format") == PAGE_FORMAT  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file


def checked_lines(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the lines of a whole document. Raises `InvalidState` and `InvalidKey` for any other."""
    lines, checking = [*lines_in(document)], Lines()
    for line in lines if not log_lines.is_log(document) else ():
        checking.read(line)
    if checking.begun or log_lines.is_page(document):
        raise InvalidState("this is a page of a transcript, which comes before its conversation")
    return lines


class Lines:
    """Reads exported lines, and checks that the pages of a conversation come before it, in order."""

    def __init__(self) -> None:
        self._key: MemoryKey | None = None
        self._numbers = Numbers()
        self._last = ""

    def spoil(self) -> None:
        """Refuse the conversation after one of its pages was refused."""
        if self.begun:
            self._numbers.spoil()

    @property
    def begun(self) -> bool:
        """Pages have come whose conversation has not come yet."""
        return self._key is not None

    def read(self, document: Mapping[str, Any]) -> Session | Page:
        """Return the content of a line. Raises `InvalidState` and `InvalidKey`."""
        if is_page(document):
            return self._page(document)
        session = _parse(document)
        (key, self._key), (numbers, self._numbers) = (self._key, None), (self._numbers, Numbers())
        given, missing = session.transcript, None
        if key is None and given is None:
            return session
        if given is not None and session.body.messages:
            # The remembered ids are those of entries.
            given = replace(given, last=self._last if key else "")
        if given is not None and key in (None, session.key):
            missing = numbers.missing(given.first, given.base, given.extra["missing"])
        if given is None or missing is None:
            raise InvalidState("the pages of the transcript do not all come directly before the conversation")
        return replace(session, transcript=replace(given, extra={}), missing=missing)

    def _page(self, document: Mapping[str, Any]) -> Page:
        _require_version(document)
        key, first, turns = key_of(document), _count_in(document, "first"), _turns_of(document)
        if self._key is None:
            self._key, self._last = key, ""
        prev = self._last if first == self._numbers.end else ""
        fits = 0 < len(turns) <= pages.TURNS - first % pages.TURNS
        if key != self._key or not fits or not self._numbers.add(first, len(turns)):
            raise InvalidState("a page of a transcript is not where an export writes it")
        summary = document.get("summary")
        if summary is not None and not isinstance(summary, str):
            raise InvalidState("summary is not a string")
        upto = first if summary is None else min(first, _count_in(document, "upto"))
        self._last = digest([*turns][-1])
        rev = _count_in({"revision": 0, **document}, "revision")
        return Page(key, first, turns, prev, summary, upto, rev)


class Import:
    """Stores exported conversations, line by line. `ttl` and `on_conflict` are as in `Sessions.import_`."""

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        on_conflict: OnConflict = "refuse",
        ttl: float | None = None,
        guard: Guard = UNLIMITED,
        observer: Observer = SILENT,
    ) -> None:
        if on_conflict not in get_args(OnConflict):
            raise ConfigurationError(f"on_conflict must be one of: {', '.join(get_args(OnConflict))}")
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory)
        self._pages = Pages(driver, codec)
        self._dead_pages = DeadPages(driver, codec)
        self._on_conflict: OnConflict = on_conflict
        self._ttl = ttl
        self._guard = guard
        self._observer = observer
        self._lines = Lines()
        self._log_lines = log_lines.LogLines()
        self._logs = log_lines.LogImport(
            driver, codec, directory, on_conflict=on_conflict, ttl=ttl, guard=guard
        )
        # Epoch of the pages stored for the next conversation; "" if they are left out.
        self._epoch: str | None = None
        self._stored = set[int]()
        # Key of the pages that were stored last, and their epoch.
        self._begun: tuple[MemoryKey, str] | None = None

    async def add(self, document: Mapping[str, Any]) -> MemoryKey | None:
        """Store a line; returns the key of the conversation that it completes, and `None` for a page.

        Also accepts lines of agent frameworks' logs, and saved states that name their key. Raises the errors
        of `Sessions.import_`. A conversation or log is refused if one of its pages was refused.
        """
        try:
            return await self._add(exported(document) if is_saved(document) else document)
        except BaseException:
            self._lines.spoil()
            self._log_lines.spoil()
            self._logs.abandon()
            raise

    async def _add(self, document: Mapping[str, Any]) -> MemoryKey | None:
        if log_lines.is_log(document):
            return await self._add_log(self._log_lines.read(document))
        epoch = self._epoch
        try:
            line = self._lines.read(document)
        finally:
            if not self._lines.begun:
                # Even if the line is refused: the pages of the next conversation have another epoch.
                self._epoch = None
        whose = Whose(line.key.tenant_id, line.key.user_id, line.key.session_id)
        with self._guard.reporting(whose, "import"):
            if isinstance(line, Page):
                await self._store_page(line)
                return None
            try:
                if line.transcript is not None and epoch is None:
                    # None of its pages is stored.
                    epoch = await self._begin(keys.memory_key(line.key), line.key)
                refers = await self._store(line, epoch)
            except SessionExists:
                await self._remove(line.key, epoch)
                raise
            if not refers:
                await self._remove(line.key, epoch)
        self._observer.imported(Subject.of(line.key))
        return line.key

    async def discard(self) -> None:
        """Remove the pages that were stored last, unless the record of their conversation was stored, too."""
        if self._begun is not None:
            key, epoch = self._begun
            await self._remove(key, epoch)
            await self._directory.forget_if_unused(key.tenant_id, key.user_id)

    async def _add_log(self, line: log_lines.Items | log_lines.End) -> MemoryKey | None:
        whose = Whose(line.key.tenant_id, line.key.user_id, line.key.session_id)
        with self._guard.reporting(whose, "import"):
            stored = await self._logs.add(line, _new_epoch())
        if isinstance(line, log_lines.Items):
            return None
        if stored and not keys.is_beside(keys.log_key(line.key, line.kind)):
            await self._catalogue.touch(line.key, ttl=self._ttl)
        self._observer.imported(Subject.of(line.key))
        return line.key

    async def _remove(self, key: MemoryKey, epoch: str | None) -> None:
        """Remove the stored pages of a conversation, unless its record refers to them.

        The record may have been stored by a write whose answer was lost, and changed by another process
        since.
        """
        if epoch:
            dead = await self._dead_pages.of_record(keys.memory_key(key), epoch=epoch)
            await pages.remove(self._driver, dead)

    async def _store_page(self, page: Page) -> None:
        where = keys.memory_key(page.key)
        for turn in page.turns.values():
            self._guard.require("turn_characters", partial(_characters, turn))
        if self._epoch is None:
            self._epoch = await self._begin(where, page.key)
        if not self._epoch:
            return
        transcript = Transcript(self._epoch, base=page.first, last=page.prev, rev=page.rev)
        if page.upto < page.first:
            transcript = replace(transcript, gap=page.upto)
        leaving = [Leaving(turn_id, encode_json(turn)) for turn_id, turn in page.turns.items()]
        await self._pages.put_new(where, transcript, leaving, summary=page.summary or "", ttl=self._ttl)
        self._stored.add(page.first // pages.TURNS)

    async def _begin(self, where: Key, key: MemoryKey) -> str:
        """Return the epoch of the next pages; `""` if a merge keeps the conversation that exists."""
        self._stored, self._begun = set[int](), None
        if self._on_conflict != "replace" and (record := await self._driver.load(where)) is not None:
            if self._on_conflict == "refuse":
                raise _exists()
            with located(self._driver.name, "import"):
                if _has_left(Snapshot.of(record, self._codec).body):
                    return ""
        # Listed, so that an erasure of the user finds the pages.
        async with self._directory.listed((key.tenant_id, key.user_id), self._ttl) as listing:
            listing.created = True
        epoch = _new_epoch()
        self._begun = key, epoch
        return epoch

    async def _store(self, session: Session, epoch: str | None) -> bool:
        """Store a conversation after its pages; returns whether it refers to them."""
        if session.transcript is not None:
            kept = replace(session.transcript, epoch=epoch or "")
            session = replace(session, body=replace(session.body, transcript=kept))
        if epoch:
            for branch, turns in session.branches.items():
                await self._store_branch(keys.memory_key(session.key), epoch, branch, turns)
        entries, times = dict[str, bytes](), dict[str, float]()
        for entry_id, data, ts in self._entries(session.turns, session.body.forgotten):
            entries[entry_id], times[entry_id] = data, ts
        where, owner = keys.memory_key(session.key), (session.key.tenant_id, session.key.user_id)
        self._require_within_limits(session, entries.values())
        async with self._directory.listed(owner, self._ttl) as listing:
            target = await self._prepare(session, where)
            listing.created = True
        missing = _missing(session, times, target)
        for turn_id in missing:
            # A turn creates the record if the conversation was just erased.
            listing = self._directory.listed(owner, self._ttl)
            await ledger.append(self._driver, where, entries[turn_id], ttl=self._ttl, listing=listing)
        if self._on_conflict == "replace" and len(missing) > 1:
            await self._put_in_order(where, target, missing)
        if not missing:
            # An interrupted import may have stored them on the server alone, and not on its replicas.
            await confirming.confirm(self._driver, (where.scope,))
        kept = self._on_conflict == "merge" and not missing
        await self._note(session, ttl=KEEP if kept else self._ttl)
        found = target.body.transcript
        return found is not None and found.epoch == epoch

    async def _put_in_order(self, where: Key, target: Snapshot, ids: Sequence[str]) -> None:
        """Put these entries of a replaced conversation in order; entries of others stay in place.

        A concurrent import that replaces it may have continued from this import's record. An import that
        finds another version in the end leaves the order to the last one.
        """

        async def ordered(record: Record | None) -> tuple[ledger.Change | None, None]:
            if record is None or record.body is None or record.version != target.version:
                return None, None
            with located(self._driver.name, "import"):
                opened = Snapshot.of(record, self._codec).opened
            places = dict[str, int]()
            for place, entry in enumerate(opened):
                # The first of several counts.
                places.setdefault(entry if isinstance(entry, str) else entry.id, place)
            stored = [places[one] for one in ids if one in places]
            if stored == sorted(stored) or max(stored) >= self._driver.traits.max_drop:
                return None, None
            tail = [*record.tail[: max(stored) + 1]]
            for place, of in zip(sorted(stored), stored, strict=True):
                tail[place] = record.tail[of]
            return ledger.Change(record.body, rewrite=tail), None

        await ledger.update(self._driver, where, ordered)

    async def _store_branch(self, where: Key, epoch: str, branch: Branch, turns: Turns) -> None:
        """Store the turns that an edit has removed from the view."""
        for turn in turns.values():
            self._guard.require("turn_characters", partial(_characters, turn))
        before = Transcript(epoch, base=branch.first, rev=branch.rev)
        leaving = [Leaving(turn_id, encode_json(turn)) for turn_id, turn in turns.items()]
        await self._pages.put(where, before, leaving, summary=None, ttl=self._ttl)
        self._stored |= {*range(branch.first // pages.TURNS, (branch.end - 1) // pages.TURNS + 1)}

    def _entries(self, turns: Turns, forgotten: Forgotten) -> Iterator[tuple[str, bytes, float]]:
        """Yield the entries that brought these turns and messages: the id, the bytes and the time of each.

        An edit may have taken them out of entries that are remembered as gone.
        """
        for is_said, some in itertools.groupby(turns.values(), lambda turn: "item" in turn):
            units = [(stored_unit(turn), turn) for turn in some]
            if is_said:
                for entry in entries_of(unit for unit, _ in units):
                    entry_id, data = _free(entry.id, forgotten), seal_messages(self._codec, entry)
                    if entry_id != entry.id or "counted" in entry.units[-1].extra:
                        data = seal_units(self._codec, entry_id, entry.units)
                    yield entry_id, data, entry.units[0].turn.ts
            else:
                for unit, turn in units:
                    entry_id, data = _free(unit.id, forgotten), self._codec.seal("turn", turn)
                    if entry_id != unit.id:
                        data = seal_units(self._codec, entry_id, [unit])
                    yield entry_id, data, unit.turn.ts

    async def _note(self, session: Session, *, ttl: float | None | KeepType) -> None:
        """Write the card of an imported conversation. A merge changes nothing that was set there."""
        if self._on_conflict == "replace":
            await self._catalogue.forget(session.key)
        card = await self._catalogue.touch(session.key, ttl=ttl) or {}
        changes = {name: value for name, value in session.card.items() if name not in card}
        if changes:
            await self._catalogue.update(session.key, changes)
        # The index still has the previous conversation, and the last activity may be old.
        owner = (session.key.tenant_id, session.key.user_id)
        words = WordIndex(self._driver, self._codec, self._directory, owner)
        await words.forget(keys.card_key(session.key).name)

    def _require_within_limits(self, session: Session, entries: Collection[bytes]) -> None:
        """Raise `LimitReached` for a document that exceeds the limits of a conversation by itself."""
        for turn in session.turns.values():
            self._guard.require("turn_characters", partial(_characters, turn))
        self._guard.require("conversation_turns", len(entries))
        body = len(self._codec.seal_body(session.body))
        self._guard.require("conversation_bytes", body + sum(map(len, entries)))

    async def _prepare(self, session: Session, where: Key) -> Snapshot:
        """Store the body unless the existing one stays; returns the resulting conversation."""
        body, ttl, on_conflict = self._codec.seal_body(session.body), self._ttl, self._on_conflict
        left_out = session.body.transcript is not None and not session.body.transcript.epoch
        condition = ANY if on_conflict == "replace" else ABSENT
        old = None
        if condition is ANY:
            # Replacing a record that this process has loaded removes its parts, too.
            with suppress(Corrupt):
                old = Snapshot.of(await self._driver.load(where), self._codec).body.transcript
        created = ledger.Change(body, ttl=ttl)
        if session.body.transcript is not None and not left_out:
            await pages.require(self._driver, where, session.body.transcript.epoch, self._stored)
        if not left_out and await ledger.replace(self._driver, where, created, expect=condition):
            if condition is ANY:
                await dead_pages.erase_replaced(self._driver, self._codec, where, old)
            return Snapshot(created.version, session.body)
        if on_conflict == "refuse":
            raise _exists()

        async def merged(record: Record | None) -> tuple[ledger.Change | None, Snapshot]:
            with located(self._driver.name, "import"):
                found = Snapshot.of(record, self._codec)
            if found.version is not None and (_has_left(found.body) or not _has_left(session.body)):
                return None, found
            if left_out:
                # It was kept when its pages came, and then erased.
                return None, Snapshot()
            change = ledger.Change(body, ttl=ttl if record is None else KEEP)
            return change, replace(found, version=change.version, body=session.body)

        target = await ledger.update(self._driver, where, merged)
        if target is None or (left_out and target.version is None):
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self._driver.name,
                operation="import",
            )
        return target


def _new_epoch() -> str:
    return f"{pages.IMPORTED}{new_id(time.time())}"


def _free(entry_id: str, forgotten: Forgotten) -> str:
    """Return an id that is not remembered as gone; the same for each import."""
    while entry_id in forgotten:
        entry_id += "~"
    return entry_id


def _exists() -> SessionExists:
    return SessionExists("there is already a conversation under this key; merge or replace it")


def _characters(turn: Mapping[str, Any]) -> int:
    return characters_in(turn["item"]) if "item" in turn else characters_of(load_turn(turn))


def _has_left(body: Body) -> bool:
    """Say whether turns have left a conversation, so that its body has more than its turns."""
    return bool(body.summary or body.folded or body.dropped or body.forgotten.ages)


def _missing(session: Session, times: Mapping[str, float], target: Snapshot) -> list[str]:
    """Return the ids of the exported entries that a conversation lacks, oldest first; each has its time.

    A conversation remembers the ids of the turns that left it last. If more have left than it remembers, an
    exported turn that it does not know may have left earlier. That is assumed of a turn that comes before all
    known ones, whose position from the beginning is before the remembered ones, or that is older than all
    turns in the record.
    """
    ids = [*times]
    known = [target.holds(turn_id) for turn_id in ids]
    remembered, left = len(target.body.forgotten.each()), target.body.folded + target.body.dropped
    first = 0
    if left > remembered or remembered >= REMEMBERED_IDS:
        # Turns leave in order: after a remembered turn, none has been forgotten.
        first = known.index(True) if any(known) else _first_missing(session, times, target, left - remembered)
    return [turn_id for turn_id, is_known in zip(ids[first:], known[first:], strict=True) if not is_known]


def _first_missing(session: Session, times: Mapping[str, float], target: Snapshot, beyond_memory: int) -> int:
    """Return how many exported entries, none of which is known, left before the remembered ones."""
    before = session.body.folded + session.body.dropped
    oldest = min((stored.turn.ts for stored in target.turns), default=0.0)
    first = 0
    for index, ts in enumerate(times.values()):
        if before + index < beyond_memory or 0.0 < ts < oldest:
            first = index + 1
    return first


def _parse(document: Mapping[str, Any]) -> Session:
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file
        raise InvalidState("this is not an exported conversation")
    _require_version(document)
    key = key_of(document)
    body = _object(document, "body")
    turns = _turns_of(document)
    try:
        loaded = load_body(body)
    except ValueError:
        raise InvalidState("body has a field of the wrong type or with an invalid value") from None
    if loaded.health is MemoryHealth.RECOVERING:
        # Shown, never stored: no attempt on this conversation is running here.
        loaded = replace(loaded, health=MemoryHealth.DEGRADED)
    # A body refers to the pages of another conversation.
    body = replace(loaded.unleased(), transcript=None)
    given: Mapping[str, Any] = _object(document, "card") if "card" in document else {}
    card = checked_changes(**{name: given[name] for name in SET_BY_USER if name in given})
    transcript, branches = _transcript_of(document, body), _branches_of(document)
    revs = [one.rev for one in branches]
    if revs and (transcript is None or revs != sorted({*revs}) or revs[-1] >= transcript.rev):
        raise InvalidState("branches are not in order, or not of revisions before that of the transcript")
    transcript = transcript and replace(transcript, branches=tuple(branches))
    return Session(key, body, turns, card, transcript, branches=branches)


def _branches_of(document: Mapping[str, Any]) -> dict[Branch, Turns]:
    """Return the turns that edits have removed from the view. Raises `InvalidState`."""
    given: object = document.get("branches", [])
    found: dict[Branch, Turns] = {}
    for one in cast("Sequence[object]", given if isinstance(given, (list, tuple)) else [given]):
        content = cast("Mapping[str, Any]", one if isinstance(one, dict) else {})
        rev, first, turns = _count_in(content, "revision"), _count_in(content, "first"), _turns_of(content)
        if not turns:
            raise InvalidState("a branch has no turns")
        found[Branch(rev, first, first + len(turns), digest([*turns][-1]))] = turns
    return found


def _transcript_of(document: Mapping[str, Any], body: Body) -> Transcript | None:
    """Return the transcript before a conversation, as stated in it; `extra` has how many are missing."""
    if "transcript" not in document:
        return None
    given = _object(document, "transcript")
    first, base, missing = (_count_in(given, name) for name in ("first", "base", "missing"))
    gap = None if given.get("gap") is None else _count_in(given, "gap")
    if not first <= (base if gap is None else gap) <= base:
        raise InvalidState("transcript has inconsistent numbers")
    rev = _count_in({"revision": 0, **given}, "revision")
    last, extra = body.forgotten.newest, {"missing": missing}
    return Transcript("", base=base, last=last, gap=gap, rev=rev, first=first, extra=extra)


def _require_version(document: Mapping[str, Any]) -> None:
    if document.get("version") not in range(1, FORMAT_VERSION + 1):
        raise InvalidState(f"this version of the library imports exports up to version {FORMAT_VERSION}")


def key_of(document: Mapping[str, Any]) -> MemoryKey:
    """Return the key of an exported document. Raises `InvalidState` and `InvalidKey`."""
    parts = _object(document, "key")
    key = MemoryKey(*(parts.get(name, "") for name in ("tenant_id", "user_id", "session_id")))
    key.composite()
    return key


def _count_in(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or value < 0:
        raise InvalidState(f"{name} is not a number of turns")
    return value


def _turns_of(document: Mapping[str, Any]) -> Turns:
    """Return the turns of a line, by id. Raises `InvalidState`."""
    listed: object = document.get("turns")
    if not isinstance(listed, (list, tuple)):
        raise InvalidState("turns is not a list")
    turns: dict[str, Mapping[str, Any]] = {}
    for index, turn in enumerate(cast("Sequence[object]", listed)):
        path = f"turns[{index}]"
        # No deeper than stored turns can be read.
        require_json(turn, path, deepest=DEEPEST_IN_TURN + 1)
        try:
            content = cast("Mapping[str, Any]", turn)
            ts = (stored_unit(content).turn if "item" in content else load_turn(content)).ts
        except (ValueError, TypeError, Corrupt):
            # The cause may quote the conversation.
            raise InvalidState(f"{path} is not a turn: a field is of the wrong type") from None
        if (given := content.get("ts")) and not ts:
            raise InvalidState(f"{path}.ts is not a time in seconds since 1970")
        if given != ts and ts:
            content = {**content, "ts": ts}
        turn_id = content.get("turn_id")
        if not isinstance(turn_id, str):
            raise InvalidState(f"{path} has no turn_id")
        turns.setdefault(turn_id, content)
    return turns


def _object(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    require_json(value, name)
    if not isinstance(value, dict):
        raise InvalidState(f"{name} is not an object")
    return cast("Mapping[str, Any]", value)
