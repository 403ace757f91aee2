"""The Claude Agent SDK: the transcripts of its sessions on any backend (extra `claude-agent-sdk`).

A session is an item log with the entries of its transcript. It also has a log for each subagent, and a log of
the summaries that sessions are listed by, where the newest one counts. A summary states how many entries it
covers and which entry was the last. If a process is killed before it stores the next summary, a listing reads
the entries that are not covered, and the next append stores a summary that covers them. A summary whose last
entry is missing, such as one of an earlier session under the same key, is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

from stm_backends import logs
from stm_backends.backend import Backend
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_backend, require_items, require_seconds
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    KeyMismatch,
    SealMismatch,
    StorageError,
    TooLarge,
)
from stm_backends.extras import missing_extra
from stm_backends.history.log import ItemLog
from stm_backends.integrations.whose import key_from
from stm_backends.plain_json import DEEPEST_IN_TURN, encode_json, require_json
from stm_backends.records.keys import LogKind
from stm_backends.types import MemoryKey

try:
    from claude_agent_sdk import (
        SessionKey,
        SessionListSubkeysKey,
        SessionStore,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
        fold_session_summary,
    )
except ModuleNotFoundError as error:
    raise missing_extra("claude-agent-sdk", error) from error

logger = logging.getLogger("stm_backends")

KIND: Final[LogKind] = "claude-agent-sdk"

SUMMARY: Final = "summary"
SUBAGENT: Final = "agent/"
"""The name of the log with the summaries, and the prefix of the names of subagents' logs."""

AT_ONCE: Final = 16
"""Number of summaries a listing reads at once."""

REWRITTEN: Final = 16
"""Number of summaries after which their log is replaced by the newest one."""

REMEMBERED: Final = 1_024
"""Maximum number of sessions whose state a store remembers, so that an append need not read it."""

KeyOf: TypeAlias = Callable[[str, str], MemoryKey]


def session_key(project_key: str, session_id: str) -> MemoryKey:
    """Return the key of a session under the tenant `default` and the user `anonymous`.

    The keys of a project's sessions begin with the key for the session id `""`. No two sessions share one.
    """
    project, session = (
        _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", one) for one in (project_key, session_id)
    )
    return MemoryKey("default", "anonymous", f"{project}/{session}")


class StmSessionStore(SessionStore):
    """The sessions of the Claude Agent SDK on a backend, shared by every process.

    ```
    options = ClaudeAgentOptions(session_store=StmSessionStore(backend, key_of), resume=session_id)
    ```

    The SDK names a project and a session, but no user. `key_of(project_key, session_id)` returns the key of a
    session, and must always return the same one. By default, all sessions belong to the tenant `default` and
    the user `anonymous`, so erasing a user does not find them: pass a function that names the user. A listing
    calls it with the session id `""`, and lists the sessions of that tenant and user whose keys begin with
    the result.

    A session expires `ttl_s` seconds after its last append, and a subagent's transcript after the last append
    to that transcript; `None` means never. The constructor reads and writes nothing.

    All methods raise `StorageError`; an outage is never an empty session. They raise `InvalidKey` for a key
    that names no session, and if `key_of` fails.
    """

    def __init__(self, backend: Backend, key_of: KeyOf = session_key, *, ttl_s: float | None = None) -> None:
        require_backend(backend)
        if not callable(key_of):
            raise ConfigurationError(
                f"key_of must be a function of a project and a session, not {type(key_of).__name__}"
            )
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        self._backend = backend
        self._key_of = key_of
        self._ttl_s = ttl_s
        self._known: Bounded[MemoryKey, _Known] = Bounded(REMEMBERED)
        # The batch that failed last: its content and its id.
        self._unsettled: Bounded[tuple[MemoryKey, str], tuple[str, str]] = Bounded(REMEMBERED)

    # Called by the SDK

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries at the end, then store the summary that includes them. An empty list is a no-op.

        Takes three round trips, reading few entries, if this store made the last append to the session, and
        one for a subagent. If the summary cannot be stored, this is logged and the next append stores it.

        A batch with a `uuid` that is sent again is stored once, whichever process sends it. A batch without
        one is stored once if this store sends it again after an error. Entries that are too large for one
        write are added in several. A failed or cancelled call may have added them, and can be repeated.
        Raises `InvalidState`, naming the path, for values that are not JSON; `TooLarge` for a single entry of
        more than 64 MiB; `LimitReached`.
        """
        require_items("entries", entries)
        batch = [_checked(entry, f"entries[{index}]") for index, entry in enumerate(entries)]
        if not batch:
            return
        session, subpath = self._session(key), _subpath_of(key)
        place, content = (session.key, subpath or ""), _digest(batch)
        batch_id = self._id_of(place, batch, content)
        try:
            await self._add(session, subpath, batch, batch_id)
        except BaseException:
            # The next append must read which entries of this one were stored.
            self._known.pop(session.key)
            self._unsettled[place] = (content, batch_id)
            raise
        self._unsettled.pop(place)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return all entries in order, each `uuid` once; `None` if the session has none.

        Takes one round trip, plus one for each eight pages of a long transcript.
        """
        seen = set[str]()
        entries: list[SessionStoreEntry] = []
        for item in (await self._session(key).log_of(_subpath_of(key)).read()).items:
            uuid: object = item.get("uuid")
            if not isinstance(uuid, str) or uuid not in seen:
                entries.append(cast("SessionStoreEntry", item))
            if isinstance(uuid, str):
                seen.add(uuid)
        return entries or None

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return the sessions of a project and the time of each one's last append, in no order.

        Costs the same as `list_session_summaries`.
        """
        return [
            {"session_id": one["session_id"], "mtime": one["mtime"]}
            for one in await self.list_session_summaries(project_key)
        ]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the summaries of a project's sessions, in no order; each covers all entries.

        Reads the names of the sessions, and two records of each, 16 sessions at once.
        """
        beginning = self._key(project_key, "")
        owner, prefix = (beginning.tenant_id, beginning.user_id), beginning.session_id
        listed = self._backend.sessions.logs(*owner, KIND, prefix=prefix, beside=False)
        found = [key async for _, key in listed]
        summaries: list[SessionSummaryEntry] = []
        for start in range(0, len(found), AT_ONCE):
            some = found[start : start + AT_ONCE]
            read = await all_of(self._listed(project_key, prefix, key) for key in some)
            summaries += [one for one in read if one is not None]
        return summaries

    async def delete(self, key: SessionKey) -> None:
        """Erase a session with its subagents and its summary; with a `subpath`, this subagent alone.

        Raises `OutcomeUnknown` if they may have been erased.
        """
        session, subpath = self._session(key), _subpath_of(key)
        if subpath is not None:
            await session.log_of(subpath).clear()
            return
        self._known.pop(session.key)
        # First, so that the session is listed, and can be deleted again, until nothing is left.
        await self._clear_beside(session)
        await session.log.clear()
        # Clear the summaries again: an append too late for the transcript may still have stored its summary.
        await self._clear_beside(session)

    async def _clear_beside(self, session: _Session) -> None:
        async for name in session.log.names_beside():
            await session.log.beside(name).clear()

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of a session's subagents, in order; reads only their names."""
        log = self._session(key).log
        return [name.removeprefix(SUBAGENT) async for name in log.names_beside(SUBAGENT)]

    # Keys

    def _session(self, key: SessionKey | SessionListSubkeysKey) -> _Session:
        """Return the logs of a session."""
        project = _required("project_key", key.get("project_key"))
        session_id = _required("session_id", key.get("session_id"))
        return self._at(self._key(project, session_id), project, session_id)

    def _at(self, key: MemoryKey, project_key: str, session_id: str) -> _Session:
        known = self._known.get(key)
        # Reuse the object: it knows what it has added, so it reads less and counts the additions.
        log = self._backend.item_log(key, KIND, ttl_s=self._ttl_s) if known is None else known.log
        # Raises `InvalidKey` for the key of a log that belongs to another session.
        return _Session(key, {"project_key": project_key, "session_id": session_id}, log, log.beside(SUMMARY))

    def _key(self, project_key: str, session_id: str) -> MemoryKey:
        """Return the key that `key_of` returns."""
        return key_from("key_of", self._key_of, _required("project_key", project_key), session_id)

    # Appending

    def _id_of(self, place: tuple[MemoryKey, str], batch: Sequence[Mapping[str, Any]], content: str) -> str:
        """Return the id under which a batch is stored once.

        A batch whose entries have ids gets the same id wherever it comes from. A batch without ids may
        legitimately come twice, as the same title does: it counts as the same only right after an error.
        """
        if any(isinstance(entry.get("uuid"), str) for entry in batch):
            return content
        before = self._unsettled.get(place)
        return before[1] if before and before[0] == content else secrets.token_hex(16)

    async def _add(
        self, session: _Session, subpath: str | None, batch: Sequence[dict[str, Any]], batch_id: str
    ) -> None:
        """Add a batch, in halves if it is too large for one write."""
        try:
            if subpath is None:
                await self._add_to_session(session, batch, batch_id)
            else:
                await session.log_of(subpath).add(batch, batch_id)
        except TooLarge as error:
            if error.what != "entry" or len(batch) == 1:
                raise
            middle = len(batch) // 2
            await self._add(session, subpath, batch[:middle], f"{batch_id}.0")
            await self._add(session, subpath, batch[middle:], f"{batch_id}.1")

    async def _add_to_session(
        self, session: _Session, batch: Sequence[dict[str, Any]], batch_id: str
    ) -> None:
        """Add a batch to a transcript and update the summary. A failure to do the latter is only logged."""
        known, tip = self._known.use(session.key), None
        if known is not None:
            tip = await session.log.add_after(known.tip, batch, batch_id)
        if tip is None:
            await session.log.add(batch, batch_id)
        try:
            # An unchanged tip means that the batch was already stored and is covered.
            if known is None or tip in (None, known.tip):
                known, missing = await self._read(session, len(batch))
                await self._store(session, known, missing, known.tip)
            else:
                await self._store(session, known, batch, tip)
        except StorageError as error:
            self._known.pop(session.key)
            _warn(
                "the next append has to store the summary of a session: %s (conversation %s)", error, session
            )

    async def _read(self, session: _Session, added: int = 0) -> tuple[_Known, Sequence[Mapping[str, Any]]]:
        """Return the state of a session after `added` entries were added, and the entries not in its summary.

        A summary whose last entry is missing is ignored: it belongs to an earlier session, or to entries that
        have expired or were purged.
        """
        noted = await session.summaries.read(1)
        summary, wanted = _Summary.of(noted.items), added + AT_ONCE
        if not added and summary.tip and (await session.log.newest(0)).tip == summary.tip:
            return _Known(session.log, summary.tip, summary, noted.count), ()
        while True:
            found = await session.log.read(wanted)
            lacks = found.count - summary.covered
            last = len(found.items) - lacks - 1
            if 0 <= last < len(found.items) and _digest(found.items[last : last + 1]) == summary.last:
                return _Known(session.log, found.tip, summary, noted.count), found.items[last + 1 :]
            if wanted is None or len(found.items) < wanted:
                return _Known(session.log, found.tip, _Summary(), noted.count), found.items
            # More entries may have been added before these are read.
            wanted = lacks + AT_ONCE if last < 0 else None

    async def _store(
        self, session: _Session, known: _Known, entries: Sequence[Mapping[str, Any]], tip: str
    ) -> None:
        """Store the summary after these entries, the last before `tip`.

        With several writers, the last summary stored may cover fewer entries. Readers notice that.
        """
        stored = known.stored
        if entries:
            known = known._replace(summary=known.summary.after(session.names, entries, tip=tip, at=_now()))
            items = [known.summary.item()]
            before = await session.summaries.read(0) if stored >= REWRITTEN else None
            if before is not None and await session.summaries.rewrite(before.tip, items) is not None:
                stored = 1
            else:
                await session.summaries.add(items)
                stored += 1
        self._known[session.key] = _Known(session.log, tip, known.summary, stored)

    # Listing

    async def _listed(self, project_key: str, prefix: str, key: MemoryKey) -> SessionSummaryEntry | None:
        """Return the summary of a session; `None` if it is empty, damaged, or belongs to another project."""
        session = self._at(key, project_key, key.session_id.removeprefix(prefix))
        try:
            known, missing = await self._read(session)
        except (KeyMismatch, SealMismatch):
            raise
        except Corrupt as error:
            _warn("a session is not listed because it cannot be read: %s (conversation %s)", error, session)
            return None
        # `key_of` may have changed the id; the summary has the original one.
        for one in (session.names["session_id"], known.summary.session_id):
            if one and self._key(project_key, one) == key and (missing or known.summary.covered):
                names: SessionKey = {"project_key": project_key, "session_id": one}
                newest = (await session.log.transcript(limit=1)).items if missing else ()
                at = int(max((item.at for item in newest), default=0.0) * 1000)
                return known.summary.after(names, missing, tip=known.tip, at=at).entry(one)
        return None


class _Session(NamedTuple):
    """A session: its key, its names, the log of its transcript and the log of its summaries."""

    key: MemoryKey
    names: SessionKey
    log: ItemLog
    summaries: ItemLog

    def log_of(self, subpath: str | None) -> ItemLog:
        """Return the log of a subagent, or of the session itself."""
        return self.log if subpath is None else self.log.beside(f"{SUBAGENT}{subpath}")


class _Known(NamedTuple):
    """The last known state of a session: its tip, its summary, and the number of stored summaries.

    `log` is the object that read the transcript and added to it.
    """

    log: ItemLog
    tip: str
    summary: _Summary
    stored: int


class _Summary(NamedTuple):
    """The summary of the first `covered` entries of a transcript, which had this `tip` then.

    `last` is the digest of the last of them.
    """

    session_id: str = ""
    mtime: int = 0
    data: Mapping[str, Any] = {}
    covered: int = 0
    last: str = ""
    tip: str = ""

    @classmethod
    def of(cls, items: Sequence[Mapping[str, Any]]) -> _Summary:
        """Return the newest summary in a log; an empty one if none can be read."""
        fields = [items[-1].get(name) for name in cls._fields] if items else []
        kinds = (str, int, dict, int, str, str)
        is_known = fields and all(map(isinstance, fields, kinds))
        return cls(*cast("list[Any]", fields)) if is_known else cls()

    def item(self) -> dict[str, Any]:
        """Return the summary as it is stored."""
        return {"type": SUMMARY, **self._asdict()}

    def entry(self, session_id: str) -> SessionSummaryEntry:
        """Return the summary in the SDK's form."""
        return {"session_id": session_id, "mtime": self.mtime, "data": dict(self.data)}

    def after(
        self, names: SessionKey, entries: Sequence[Mapping[str, Any]], *, tip: str, at: int
    ) -> _Summary:
        """Return the summary after these entries, which were added `at` this time in epoch milliseconds."""
        if not entries:
            return self
        session_id = names["session_id"]
        before = self.entry(session_id) if self.covered else None
        data = _folded(before, names, cast("list[SessionStoreEntry]", [*entries]))["data"]
        # Later than the previous one, whatever its writer's clock said.
        covered, last = self.covered + len(entries), _digest(entries[-1:])
        return _Summary(session_id, max(at, self.mtime + 1), data, covered, last, tip)


def _folded(
    before: SessionSummaryEntry | None, names: SessionKey, entries: list[SessionStoreEntry]
) -> SessionSummaryEntry:
    """Return the SDK's summary after these entries, skipping those that it cannot read; they stay stored."""
    try:
        return fold_session_summary(before, names, entries)
    except Exception as error:  # noqa: BLE001 -- the SDK's command line tool writes the entries
        if len(entries) == 1:
            logs.failed("the SDK cannot summarize an entry (%s); the summary lacks it", error)
            return before or fold_session_summary(None, names, [])
    for entry in entries:
        before = _folded(before, names, [entry])
    return before or fold_session_summary(None, names, [])


def _digest(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest that identifies entries: of their ids, or of the contents of those without one."""
    digest = hashlib.sha256()
    for entry in entries:
        uuid: object = entry.get("uuid")
        digest.update(encode_json(uuid if isinstance(uuid, str) else entry) + b"\n")
    return digest.hexdigest()


def _checked(entry: object, path: str) -> dict[str, Any]:
    """Return an entry as an item. Raises `InvalidState` unless it is a JSON object."""
    if not isinstance(entry, Mapping):
        raise InvalidState(f"{path} is {type(entry).__name__}, not an object")
    item = dict(cast("Mapping[str, Any]", entry))
    require_json(item, path, deepest=DEEPEST_IN_TURN)
    return item


def _required(name: str, value: object) -> str:
    """Return a part of the SDK's key. Raises `InvalidKey` unless it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise InvalidKey(f"{name} must be a non-empty string")
    return value


def _subpath_of(key: SessionKey) -> str | None:
    """Return the subpath of a subagent; `None` for the key of a session."""
    subpath: object = key.get("subpath")
    return None if subpath is None else _required("subpath", subpath)


def _warn(message: str, error: StorageError, session: _Session) -> None:
    logger.warning(message, error, logs.conversation(session.key.composite()))


def _now() -> int:
    return int(time.time() * 1000)


_UNSAFE: Final = re.compile("[%/+]")
"""Matches the separator of the parts of a session id, and the character that escapes it."""
