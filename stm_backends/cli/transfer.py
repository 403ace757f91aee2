"""Export and import of conversations and graphs as JSON Lines, and erasure."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, TextIO, cast

import typer

from stm_backends.admin.importing import Import, Lines, OnConflict, Session, is_page
from stm_backends.admin.log_lines import End, LogLines, is_log
from stm_backends.admin.log_lines import is_page as is_log_page
from stm_backends.admin.receipt import Receipt
from stm_backends.admin.sessions import Sessions
from stm_backends.backend import Backend, open_backend
from stm_backends.cli import graphs, item_logs
from stm_backends.cli.exports import ExportFile, Line
from stm_backends.cli.figures import spans
from stm_backends.cli.item_logs import is_there
from stm_backends.cli.outcome import Named, counted, fail, say_wrong
from stm_backends.cli.progress import Progress
from stm_backends.cli.render import plain
from stm_backends.cli.replay.conversations import BadFile
from stm_backends.drivers.contract import Key
from stm_backends.errors import (
    Corrupt,
    InvalidKey,
    InvalidState,
    SessionExists,
    SessionNotFound,
    StmError,
    TooLarge,
    Unavailable,
)
from stm_backends.records import keys, operations
from stm_backends.records.keys import memory_key, parse_composite
from stm_backends.tiers.graph import VertexExists
from stm_backends.types import MemoryKey

_ANY = "-"

_SPELLING: Final = "no part is blank; within a part, write ':' as %3A and '%' as %25"

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"})
"""Unicode categories of white space, and of characters that are not shown."""

_HARMLESS: Final = frozenset("-_.@+,=/:%")
"""ASCII characters that are neither letters nor digits, and that no shell, `read` or `xargs` interprets."""

_ESCAPED = re.compile("(?:%(?!25|3A|6B)[0-9A-F]{2})+")


def conversation_key(text: str) -> MemoryKey:
    """Return the key for `TENANT:USER:SESSION`."""
    try:
        return parse_composite(unescaped(text))
    except InvalidKey as error:
        raise InvalidKey(
            f"{plain(text)!r} is not a conversation; write tenant:user:session, as in acme:u123:chat_001 "
            f"({_SPELLING}){_of_user(text)}"
        ) from error


def _of_user(text: str) -> str:
    """Return a hint on listing conversations, if a text may be a user's key."""
    is_user = text.count(":") == 1 and all(text.split(":")) and escaped(unescaped(text)) == text
    return f"; list the conversations of this user with: stm-backends ls {text}" if is_user else ""


def owner(text: str) -> tuple[str, str | None]:
    """Return the tenant, and the user or `None`, for `TENANT` or `TENANT:USER`."""
    if text.count(":") > 1:
        raise InvalidKey(
            f"{plain(text)!r} is a conversation, which `show` and `history` take; write a tenant, as in "
            "acme, or a user, as in acme:u123"
        )
    try:
        composite = f"{text}:{_ANY}" if ":" in text else f"{text}:{_ANY}:{_ANY}"
        key = parse_composite(unescaped(composite))
    except InvalidKey as error:
        raise InvalidKey(
            f"{plain(text)!r} is neither a tenant nor a user; write a tenant, as in acme, or a user, as "
            f"in acme:u123 ({_SPELLING})"
        ) from error
    return key.tenant_id, key.user_id if ":" in text else None


def escaped(composite: str) -> str:
    """Return a key for one line of output, which all commands accept.

    White space, invisible characters, those that a shell may interpret, and `-` at the beginning, are
    written as `%XX` of their UTF-8 bytes. No composite has these itself. So one line is one argument that
    means one key, also for `while read` without `-r`, `xargs` and a variable without quotes.
    """
    return "".join(
        "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        if _is_special(char) or (char == "-" and index == 0)
        else char
        for index, char in enumerate(composite)
    )


def _is_special(char: str) -> bool:
    if char.isascii():
        return not (char.isalnum() or char in _HARMLESS)
    return unicodedata.category(char) in _HIDDEN


def unescaped(text: str) -> str:
    """Return the key that `escaped` wrote; other text is returned as it is."""
    try:
        composite = _ESCAPED.sub(
            lambda found: bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "surrogatepass"), text
        )
    except UnicodeDecodeError:
        return text
    return composite if escaped(composite) == text else text


def user_composite(tenant: str, user: str) -> str:
    """Return `TENANT:USER`, in the form that `owner` accepts."""
    return escaped(MemoryKey(tenant, user, _ANY).composite()).removesuffix(f":{_ANY}")


def tenant_composite(tenant: str) -> str:
    """Return `TENANT`, in the form that `owner` accepts."""
    return user_composite(tenant, _ANY).removesuffix(f":{_ANY}")


def named(key: MemoryKey) -> str:
    """Return a conversation's composite, or a description if it has none."""
    try:
        return escaped(key.composite())
    except InvalidKey:
        return f"a conversation of {user_composite(key.tenant_id, key.user_id)} with a blank session id"


async def selected(
    backend: Backend, wanted: Sequence[MemoryKey], whose: tuple[str, str] | None
) -> AsyncIterator[tuple[MemoryKey, keys.LogKind | None]]:
    """Yield the conversations to export, and logs of agent frameworks with their kind.

    They are all that exist under each key, and all of a user.
    """
    for key in wanted:
        logs: list[keys.LogKind] = [kind for kind in keys.LOG_KINDS if await is_there(backend, key, kind)]
        if not logs or await backend.driver.load(memory_key(key), last=0) is not None:
            yield key, None
        for kind in logs:
            yield key, kind
            owner = (key.tenant_id, key.user_id)
            for _, first in keys.beside_of(keys.log_key(key, kind)):
                async for _, beside in backend.sessions.logs(*owner, kind, prefix=keys.unname(first)):
                    yield beside, kind
    if whose is not None:
        async for key in backend.sessions.list(*whose):
            yield key, None
        async for kind, key in item_logs.of_user(backend, *whose):
            yield key, kind


class Exported:
    """Counts what an export of conversations and a user's graph writes, and reports unreadable ones."""

    def __init__(self, user: str | None) -> None:
        self._told = set[str]()
        self.unread_vertices = graphs.Unread(f"a vertex of the graph of {user}", self._told)
        self._conversations = self._vertices = self._unread = 0
        self._incomplete = set[MemoryKey]()

    @property
    def count(self) -> int:
        """The number of conversations, logs and vertices that were written."""
        return self._conversations + self._vertices

    def __str__(self) -> str:
        """Describe what was written."""
        vertices = f" and {graphs.counted(self._vertices)}" if self._vertices else ""
        return f"{counted(self._conversations, 'conversation')}{vertices}"

    def wrote(self) -> None:
        """Count a conversation or a log that was written."""
        self._conversations += 1

    def wrote_vertex(self) -> None:
        """Count a vertex that was written."""
        self._vertices += 1

    def failed(self, key: MemoryKey, error: StmError) -> None:
        """Report a conversation or a log that is not written."""
        self._unread += 1
        fail(error, what=named(key), told=self._told)

    def left_out(self, key: MemoryKey, what: str, error: StmError) -> None:
        """Report turns or items that are left out."""
        self._incomplete.add(key)
        fail(error, what=f"{named(key)}, {what}", told=self._told)

    def say_unread(self) -> bool:
        """Print how much could not be read; returns whether anything could not."""
        unread, holed, vertices = self._unread, len(self._incomplete), self.unread_vertices.count
        if unread:
            say_wrong(f"{counted(unread, 'conversation')} could not be exported")
        if holed:
            say_wrong(f"{counted(holed, 'conversation')} could not be exported whole")
        if vertices:
            say_wrong(f"{graphs.counted(vertices)} could not be exported")
        return bool(unread or holed or vertices)


async def write_export(
    backend: Backend,
    selected: AsyncIterator[tuple[MemoryKey, keys.LogKind | None]],
    out: TextIO,
    exported: Exported,
) -> None:
    """Write conversations and logs, one per line after its pages.

    Turns and items that cannot be read are left out. A conversation that cannot be read to its end has no
    line in a file.
    """
    async for key, kind in selected:
        unread: dict[str, tuple[StmError, list[int]]] = {}
        start = out.tell() if out.seekable() else None
        try:
            async for line in _lines_of(backend.sessions, key, kind, unread):
                # ASCII, so that lone surrogates survive any encoding of the file.
                out.write(f"{json.dumps(line, separators=(',', ':'))}\n")
        except (Corrupt, InvalidKey, SessionNotFound, Unavailable) as error:
            if isinstance(error, Unavailable) and error.operation != "export":
                raise
            # Not an outage: turns were removed while they were exported. An import takes no pages without
            # their conversation.
            if start is not None:
                out.seek(start)
                out.truncate()
            exported.failed(key, error)
            continue
        for error, missing in unread.values():
            what = f"items {spans(missing)} of its log of {kind}" if kind else f"turns {spans(missing)}"
            exported.left_out(key, what, error)
        exported.wrote()


def _lines_of(
    sessions: Sessions,
    key: MemoryKey,
    kind: keys.LogKind | None,
    unread: dict[str, tuple[StmError, list[int]]],
) -> AsyncIterator[dict[str, Any]]:
    """Return the lines of a conversation or a log. Numbers that they leave out go to `unread`, by reason."""

    def unreadable(error: Corrupt, numbers: Sequence[int]) -> None:
        unread.setdefault(str(error), (error, []))[1].extend(numbers)

    if kind is None:
        return sessions.export_lines(key, unreadable=unreadable)
    return sessions.export_log_lines(key, kind, unreadable=unreadable)


@dataclass(slots=True)
class Imported:
    """Counts of the conversations and graph vertices that were imported, and of those that changed.

    `total` is their number in the file, and `skipped` the number of unwanted lines of others; both are
    set once the whole file was checked. `holes` names the turns and items that the file lacks.
    """

    total: int = 0
    skipped: int = 0
    pages: int = 0
    conversations: int = 0
    vertices: int = 0
    changed: int = 0
    changed_vertices: int = 0
    holes: Named = field(default_factory=Named)

    @property
    def done(self) -> int:
        """The number of imported lines."""
        return self.pages + self.conversations + self.vertices

    def __str__(self) -> str:
        """Describe what was imported."""
        if not self.vertices:
            return counted(self.conversations, "conversation")
        vertices = graphs.counted(self.vertices)
        return (
            f"{counted(self.conversations, 'conversation')} and {vertices}"
            if self.conversations
            else vertices
        )

    def so_far(self, on_conflict: OnConflict) -> str:
        """Describe what was imported, and how to continue after an interruption."""
        if not self.total:
            return "Nothing was imported; run the command again."
        done = f"{self.done:,} of {counted(self.total, 'line')} had been imported"
        if on_conflict == "refuse":
            return f"{done}; run the command again with --merge for the rest."
        return f"{done}; run the command again for the rest."


async def import_all(
    backend: Backend,
    file: ExportFile,
    *,
    on_conflict: OnConflict,
    imported: Imported,
    ttl: float | None = None,
    require_owner: Callable[[str, str], Awaitable[None]],
) -> None:
    """Import conversations and graph vertices; if one is invalid or exists already, none is imported.

    `ttl` of conversations is in seconds; `None` means forever. `require_owner` raises for a tenant and user
    whose data must not be imported. Raises `BadFile` and `SessionExists` with file and line. Updates
    `imported` as it goes.
    """
    seen: set[bytes] = set()
    last: tuple[str, str] | None = None
    checked, lines, logs = 0, Lines(), LogLines()
    with Progress(file.count, "checking", "lines") as progress:
        for line in file:
            key = await _rehearse(backend, line, lines, logs, on_conflict, imported.holes)
            if last != (last := key[:2]):
                await require_owner(*last)
            if on_conflict == "refuse" and not _is_page(line):
                digest = blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest in seen:
                    raise BadFile(f"{line.where}: {_what(line)} occurs twice in the file")
                seen.add(digest)
                if await _exists(backend, line):
                    raise SessionExists(f"{line.where}: {_named(line)} exists already; nothing was imported")
            checked += 1
            progress.show(checked)
    imported.total, imported.skipped = checked, file.skipped
    importing = backend.sessions.importing(on_conflict=on_conflict, ttl=ttl)
    with Progress(checked, "importing", "lines") as progress:
        for line in file:
            try:
                await _import(backend, line, on_conflict, importing, imported)
            except (SessionExists, VertexExists) as error:
                raise SessionExists(f"{line.where}: {_named(line)} was created during the import") from error
            progress.show(imported.done)


async def _import(
    backend: Backend, line: Line, on_conflict: OnConflict, importing: Import, imported: Imported
) -> None:
    if graphs.is_vertex(line.document):
        imported.changed_vertices += await graphs.import_(backend, line.document, on_conflict)
        imported.vertices += 1
        return
    if _is_page(line):
        await importing.add(line.document)
        imported.pages += 1
        return
    where = _where(line)
    before = await backend.driver.load(where)
    await importing.add(line.document)
    imported.conversations += 1
    imported.changed += await backend.driver.load(where) != before


async def _rehearse(
    backend: Backend, line: Line, lines: Lines, logs: LogLines, on_conflict: OnConflict, holes: Named
) -> tuple[str, str, str, str]:
    """Import a line into memory, to find errors early; returns its tenant, user, kind and id.

    A page is only checked: its conversation refers to its pages, and has no place for all of them. Turns and
    items that the file lacks are added to `holes`.
    """
    traits, document = backend.record_traits, line.document
    async with open_backend(
        "memory", max_entry_bytes=traits.max_entry, max_record_bytes=traits.max_record
    ) as rehearsal:
        try:
            if graphs.is_vertex(document):
                await graphs.import_(rehearsal, document, on_conflict)
                return *graphs.owner_of(document), "vertex", graphs.id_of(document)
            if is_log(document):
                log = logs.read(document)
                if isinstance(log, End) and log.missing:
                    holes.add(
                        named(log.key), f"the file has no items {spans(log.missing)} of its log of {log.kind}"
                    )
                return log.key.tenant_id, log.key.user_id, log.kind, log.key.session_id
            read = lines.read(document)
            key = read.key
            if isinstance(read, Session) and read.missing:
                holes.add(named(key), f"the file has no turns {spans(read.missing)}")
            if not is_page(document):
                alone = {name: value for name, value in document.items() if name != "transcript"}
                await rehearsal.sessions.import_(alone, on_conflict=on_conflict)
        except (InvalidState, InvalidKey) as error:
            raise BadFile(f"{line.where}: {error}{_hint(document)}") from error
        except TooLarge as error:
            raise TooLarge(
                error.what, size=error.size, limit=error.limit, backend=backend.name, operation="import"
            ) from error
    return key.tenant_id, key.user_id, "conversation", key.session_id


async def _exists(backend: Backend, line: Line) -> bool:
    if graphs.is_vertex(line.document):
        return await graphs.exists(backend, line.document)
    return await backend.driver.load(_where(line), last=0) is not None


def _is_page(line: Line) -> bool:
    """Say whether a line has a part of a conversation or log that comes after it."""
    return is_page(line.document) or is_log_page(line.document)


def _where(line: Line) -> Key:
    """Return the key of the record of a conversation or log that was checked before."""
    kind = item_logs.kind_in(str(line.document.get("log"))) if is_log(line.document) else None
    return keys.log_key(_key_of(line), kind) if kind else memory_key(_key_of(line))


def _what(line: Line) -> str:
    return "this vertex" if graphs.is_vertex(line.document) else "this conversation"


def _named(line: Line) -> str:
    if graphs.is_vertex(line.document):
        return f"a vertex of the graph of {user_composite(*graphs.owner_of(line.document))}"
    return named(_key_of(line))


def _key_of(line: Line) -> MemoryKey:
    """Return the key of a conversation that was checked before."""
    parts = line.document.get("key")
    if not isinstance(parts, dict):
        raise BadFile(f"{line.where}: the file was changed while it was read")
    key = cast("dict[str, str]", parts)
    return MemoryKey(*(key.get(name, "") for name in ("tenant_id", "user_id", "session_id")))


def _hint(document: dict[str, object]) -> str:
    if "format" not in document and ("messages" in document or "turns" in document):
        return "; this is a file for: stm-backends replay FILE"
    if "format" not in document and "content" in document:
        return (
            "; this looks like a message. `import` takes what `export` writes, and the guide "
            "`from-your-own-table` makes such lines of yours"
        )
    return ""


def check(what: str) -> None:
    """Raise `InvalidKey` unless this is a conversation, a user or a tenant."""
    if what.count(":") > 1:
        conversation_key(what)
    else:
        owner(what)


async def count_others(backend: Backend, tenant: str, user: str, *, graph: bool) -> list[str]:
    """Return counts of a user's other data, such as `2 saved states`, without counts of zero.

    The vertices of the `graph` are only counted if asked for. Without a `user`, the states are those of the
    tenant as a whole.
    """

    async def count(scope: str, prefix: str = "") -> int:
        return len([name async for name in operations.names_of(backend.driver, scope, prefix)])

    states = await count(keys.scope(tenant, user, "blob") if user else keys.shared_scope(tenant))
    in_graph = await count(keys.scope(tenant, user, "graph"), keys.VERTICES) if graph and user else 0
    found = {
        counted(states, "saved state"): states,
        f"{graphs.counted(in_graph)} (long-term memory)": in_graph,
    }
    return [what for what, number in found.items() if number]


def mention(others: Sequence[str], done: str) -> None:
    """Mention other data of the user, which a command leaves out."""
    if others:
        typer.echo(f"Not {done}: {', '.join(others)}. `copy` and `erase` include them.", err=True)


async def erase(backend: Backend, what: str) -> Receipt:
    """Erase a conversation, a user or a tenant; returns the receipt."""
    if what.count(":") > 1:
        key = conversation_key(what)
        return await backend.sessions.erase_with_receipt(key.tenant_id, key.user_id, key.session_id)
    return await backend.sessions.erase_with_receipt(*owner(what))
