"""The Claude Agent SDK: the transcripts of its sessions on any backend (extra `claude-agent-sdk`).

A session is an item log with the entries of its transcript. Beside it, and belonging to it, are a log for
each subagent, and one with the summaries that the session is listed by, of which the newest counts. A summary
says how many entries it covers, and which was the last of them. Where it lacks some, because a process was
killed before it stored the next, the next append stores one with them, and a listing reads them. One whose
last entry is not there, such as that of an earlier session under the same key, does not count.
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
"""The name of the log with the summaries, and what the names of the logs of subagents begin with."""

AT_ONCE: Final = 16
"""How many summaries a listing reads at once."""

REWRITTEN: Final = 16
"""After how many summaries their log is replaced by the newest one."""

REMEMBERED: Final = 1_024
"""Of how many sessions a store knows the state, which saves an append from reading it."""

KeyOf: TypeAlias = Callable[[str, str], MemoryKey]


def session_key(project_key: str, session_id: str) -> MemoryKey:
    """Return the key of a session, of the tenant `default` and the user `anonymous`.

    The keys of a project's sessions begin with the one for the session id `""`. No two sessions share one.
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

    The SDK names a project and a session, and no user. `key_of(project_key, session_id)` returns the key of a
    session, always the same one. By default, all sessions belong to the tenant `default` and the user
    `anonymous`, so that no erasure of a user finds them: give a function that names the user. A listing calls
    it with the session id `""`, and lists those sessions of that tenant and user whose keys begin with that
    one.

    A session expires `ttl_s` seconds after the last append, and the transcript of a subagent after the last
    append to that; `None`: never. The constructor reads and writes nothing.

    All methods raise `StorageError`; an outage is never an empty session. They raise `InvalidKey` for a key
    that names no session, and if `key_of` fails.
    """

    def __init__(self, backend: Backend, key_of: KeyOf = session_key, *, ttl_s: float | None = None) -> None:
        require_backend(backend)
        if not callable(key_of):
            raise ConfigurationError(
                f"key_of is a function of a project and a session, not {type(key_of).__name__}"
            )
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        self._backend = backend
        self._key_of = key_of
        self._ttl_s = ttl_s
        self._known: Bounded[MemoryKey, _Known] = Bounded(REMEMBERED)
        # The batch that failed last: its content and its id.
        self._unsettled: Bounded[tuple[MemoryKey, str], tuple[str, str]] = Bounded(REMEMBERED)

    # What the SDK calls

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries at the end, then store the summary that they lead to. An empty list is a no-op.

        Takes three round trips if this store made the last append to the session, which then reads few
        entries, and one for a subagent. If the summary cannot be stored, logs that, and the next append does.

        A batch with a `uuid` that is sent again is stored once, by whichever process; one without, if this
        store sends it again after an error. Entries that are too large for one write are added in several.
        A call that fails or is cancelled may have added them, and can be repeated. Raises `InvalidState`,
        naming the path, for what is not JSON; `TooLarge` for a single entry of more than 64 MiB;
        `LimitReached`.
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
            # The next append has to read what was stored of this one.
            self._known.pop(session.key)
            self._unsettled[place] = (content, batch_id)
            raise
        self._unsettled.pop(place)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return all entries in order, each `uuid` once; `None` if there are none.

        Takes one round trip, and one for each eight pages of a long transcript.
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
        """Return the sessions of a project, and when something was last added to each, in no order.

        Takes what `list_session_summaries` does.
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
        # Again: an append that comes too late for the transcript may still have stored its summary.
        await self._clear_beside(session)

    async def _clear_beside(self, session: _Session) -> None:
        async for name in session.log.names_beside():
            await session.log.beside(name).clear()

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of a session's subagents, in order; reads their names alone."""
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
        # The same object, which knows what it has added: it reads less, and sees how much that was.
        log = self._backend.item_log(key, KIND, ttl_s=self._ttl_s) if known is None else known.log
        # Raises `InvalidKey` for the key of a log that belongs to another.
        return _Session(key, {"project_key": project_key, "session_id": session_id}, log, log.beside(SUMMARY))

    def _key(self, project_key: str, session_id: str) -> MemoryKey:
        """Return what `key_of` says."""
        return key_from("key_of", self._key_of, _required("project_key", project_key), session_id)

    # Appending

    def _id_of(self, place: tuple[MemoryKey, str], batch: Sequence[Mapping[str, Any]], content: str) -> str:
        """Return the id under which a batch is stored once.

        One whose entries have ids is the same wherever it comes from. One without may well come twice, as the
        same title does: it is the same only if nothing came between it and an error.
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
        """Add a batch to a transcript, and bring the summary up to it; only logs a failure of that."""
        known, tip = self._known.use(session.key), None
        if known is not None:
            tip = await session.log.add_after(known.tip, batch, batch_id)
        if tip is None:
            await session.log.add(batch, batch_id)
        try:
            # With the same tip, the batch was stored before, and is covered.
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
        """Return the state of a session to which so many entries were added, and those not in its summary.

        If its last entry is not there, the summary counts for nothing: that of an earlier session, or one of
        entries that have expired, or were purged.
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
            # More may have come when these are read.
            wanted = lacks + AT_ONCE if last < 0 else None

    async def _store(
        self, session: _Session, known: _Known, entries: Sequence[Mapping[str, Any]], tip: str
    ) -> None:
        """Store the summary after these entries, the last before `tip`.

        Of several writers, one that covers less may be the last. Whoever reads it finds that it lacks some.
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
        """Return the summary of a session; `None` if it has no entries, is of another project, or damaged."""
        session = self._at(key, project_key, key.session_id.removeprefix(prefix))
        try:
            known, missing = await self._read(session)
        except (KeyMismatch, SealMismatch):
            raise
        except Corrupt as error:
            _warn("a session is not listed, because it cannot be read: %s (conversation %s)", error, session)
            return None
        # `key_of` may have changed the id. A summary says it.
        for one in (session.names["session_id"], known.summary.session_id):
            if one and self._key(project_key, one) == key and (missing or known.summary.covered):
                names: SessionKey = {"project_key": project_key, "session_id": one}
                newest = (await session.log.transcript(limit=1)).items if missing else ()
                at = int(max((item.at for item in newest), default=0.0) * 1000)
                return known.summary.after(names, missing, tip=known.tip, at=at).entry(one)
        return None


class _Session(NamedTuple):
    """A session: its key, its names, the log of its transcript, and that of its summaries."""

    key: MemoryKey
    names: SessionKey
    log: ItemLog
    summaries: ItemLog

    def log_of(self, subpath: str | None) -> ItemLog:
        """Return the log of a subagent, or that of the session."""
        return self.log if subpath is None else self.log.beside(f"{SUBAGENT}{subpath}")


class _Known(NamedTuple):
    """A session as it was read or stored: the tip of its transcript, its summary, and how many are stored.

    `log` is the object that the transcript was read and added to with.
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
        """Return the newest summary in a log; one that covers nothing if there is none that can be read."""
        fields = [items[-1].get(name) for name in cls._fields] if items else []
        kinds = (str, int, dict, int, str, str)
        is_known = fields and all(map(isinstance, fields, kinds))
        return cls(*cast("list[Any]", fields)) if is_known else cls()

    def item(self) -> dict[str, Any]:
        """Return the summary as it is stored."""
        return {"type": SUMMARY, **self._asdict()}

    def entry(self, session_id: str) -> SessionSummaryEntry:
        """Return the summary as the SDK has it."""
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
        # Later than the one before, whichever clock that had.
        covered, last = self.covered + len(entries), _digest(entries[-1:])
        return _Summary(session_id, max(at, self.mtime + 1), data, covered, last, tip)


def _folded(
    before: SessionSummaryEntry | None, names: SessionKey, entries: list[SessionStoreEntry]
) -> SessionSummaryEntry:
    """Return the SDK's summary after these entries, without those that it cannot read: they are stored."""
    try:
        return fold_session_summary(before, names, entries)
    except Exception as error:  # noqa: BLE001 -- entries are what the command line tool of the SDK writes
        if len(entries) == 1:
            logs.failed("the SDK cannot summarize an entry (%s); the summary lacks it", error)
            return before or fold_session_summary(None, names, [])
    for entry in entries:
        before = _folded(before, names, [entry])
    return before or fold_session_summary(None, names, [])


def _digest(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return what tells entries from others: their ids, or what is in those without one."""
    digest = hashlib.sha256()
    for entry in entries:
        uuid: object = entry.get("uuid")
        digest.update(encode_json(uuid if isinstance(uuid, str) else entry) + b"\n")
    return digest.hexdigest()


def _checked(entry: object, path: str) -> dict[str, Any]:
    """Return an entry as an item. Raises `InvalidState` for what is not a JSON object."""
    if not isinstance(entry, Mapping):
        raise InvalidState(f"{path} is {type(entry).__name__}, not an object")
    item = dict(cast("Mapping[str, Any]", entry))
    require_json(item, path, deepest=DEEPEST_IN_TURN)
    return item


def _required(name: str, value: object) -> str:
    """Return a part of the SDK's key. Raises `InvalidKey` unless it is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidKey(f"{name} is a text that is not empty")
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
"""What separates the parts of a session id, and what escapes it."""
