"""One conversation as JSON objects, the lines of a file.

```
{"format": "stm-transcript", "version": 1,                 a page of the transcript: 64 turns or less
 "key":   {"tenant_id": ..., "user_id": ..., "session_id": ...},
 "first": the number of its first turn,
 "turns": [...],                                           as below
 "summary": ..., "upto": ...}                              the checkpoint, if it has one
{"format": "stm-session", "version": 1,                    the conversation
 "key":   {...},
 "body":  {"summary", "health", "attempts", "next_attempt_at", "folded", "dropped",
           "forgotten": {"digests", "ages"}},              as in `body.Body`
 "turns": [{"turn_id", "user_message", "assistant_response", "trajectory_digest",
            "artifacts_shown", "artifacts_hidden_refs", "ts"}, ...],     oldest first
 "card":  {"title", "metadata", "pinned", "archived"},     as far as they were set for the catalogue
 "transcript": {"first", "base", "missing", "gap", "revision"},   if pages come before it
 "branches": [{"revision", "first", "turns"}]}             turns that edits have removed from the view
```

`missing` counts the numbers from `first` to `base - 1` that are on no page: their turns are no longer stored,
or could not be read. `gap` is left out if there is none. A conversation whose turns are all in its record has
one line, which every version can import. A version without transcripts refuses a page, and so the file,
before it imports anything. In a single document, `pages` has the pages without `format`, `version` and `key`.
A message is one of the `turns`: {"turn_id": "ENTRY.PLACE", "item": message, "at": ...}. After an edit, pages
have the `revision`, too.

`version` is 2 if an older version would import only a part: for a document with pages, and for messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.numbers import Unreadable
from stm_backends.catalogue.card import SET_BY_USER
from stm_backends.drivers.contract import Driver
from stm_backends.errors import Corrupt, SessionNotFound, Unavailable, located
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import page_content, stored_unit
from stm_backends.records import keys, pages
from stm_backends.records.body import Branch, Transcript
from stm_backends.records.codec import Codec, dump_body, dump_turn
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Copy, Pages
from stm_backends.types import MemoryKey, StoredTurn

FORMAT: Final = "stm-session"
PAGE_FORMAT: Final = "stm-transcript"
FORMAT_VERSION: Final = 2
"""Version of messages, and of a document with pages: older ones would import only a part. Others have 1."""

_OF_PAGES: Final = frozenset(("format", "version", "key"))
"""Fields that a page shares with its conversation."""


def dump_key(key: MemoryKey) -> dict[str, str]:
    """Return the key of an exported conversation as JSON."""
    return {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}


def joined(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lines of one conversation as one document."""
    *pages, conversation = lines
    own = [{name: value for name, value in page.items() if name not in _OF_PAGES} for page in pages]
    return {**conversation, "version": FORMAT_VERSION, "pages": own} if own else {**conversation}


def lines_in(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines that were joined, before any check; anything else is yielded as it is."""
    found: object = document.get("pages") if isinstance(document, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file
    if not isinstance(found, list):
        yield document
        return
    common = {name: document.get(name) for name in ("version", "key")}
    of = {**common, "format": PAGE_FORMAT}
    for page in cast("list[object]", found):
        yield {**(cast("dict[str, Any]", page) if isinstance(page, dict) else {}), **of}
    yield {name: value for name, value in document.items() if name != "pages"} | common


class Export:
    """The export of one conversation, which is not changed."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, key: MemoryKey) -> None:
        self._driver = driver
        self._codec = codec
        self._pages = Pages(driver, codec)
        self._catalogue = catalogue_on(driver, codec, directory)
        self._of = key
        self._key = dump_key(key)
        self._where = keys.memory_key(key)
        self._version = 1

    async def document(self) -> dict[str, Any]:
        """Return the conversation without its transcript."""
        document, _ = await self._loaded()
        return document

    async def lines(self, unreadable: Unreadable) -> AsyncGenerator[dict[str, Any]]:
        """Yield the pages of the transcript, if there are any, and the conversation.

        `unreadable` is called for the turns of a page that cannot be read.
        """
        document, transcript = await self._loaded()
        if transcript is not None and (transcript.first < transcript.base or transcript.branches):
            count = 0
            for page in range(transcript.first // pages.TURNS, (transcript.base - 1) // pages.TURNS + 1):
                for line in await self._page(transcript, page, unreadable):
                    count += len(line["turns"])
                    yield line
            missing = transcript.base - transcript.first - count
            if missing:
                await self._require_unchanged(transcript)
            document["transcript"] = {
                "first": transcript.first,
                "base": transcript.base,
                "missing": missing,
                **({} if transcript.gap is None else {"gap": transcript.gap}),
                **({"revision": transcript.rev} if transcript.rev else {}),
            }
            if transcript.branches:
                branches = [await self._branch(transcript, one) for one in transcript.branches]
                document["branches"] = [one for one in branches if one["turns"]]
        yield document

    async def _loaded(self) -> tuple[dict[str, Any], Transcript | None]:
        record = await self._driver.load(self._where)
        if record is None:
            raise SessionNotFound("there is no conversation under this key")
        with located(self._driver.name, "export"):
            snapshot = Snapshot.of(record, self._codec)
            self._version = FORMAT_VERSION if snapshot.body.messages else 1
            turns = [
                _turn(stored, page_content(self._codec, stored, record.tail[start]))
                for stored, start in zip(snapshot.turns, snapshot.starts, strict=True)
            ]
        card = await self._catalogue.readable(keys.card_key(self._of)) or {}
        shown = {name: card[name] for name in SET_BY_USER if name in card}
        document = {
            "format": FORMAT,
            "version": self._version,
            "key": self._key,
            # Without the transcript: an import creates another one.
            "body": dump_body(replace(snapshot.body.unleased(), transcript=None)),
            "turns": turns,
            **({"card": shown} if shown else {}),
        }
        return document, snapshot.body.transcript

    async def _require_unchanged(self, transcript: Transcript) -> None:
        """Raise an error if turns are missing because they were removed after the conversation was loaded."""
        _, again = await self._loaded()
        before = (transcript.epoch, transcript.first, transcript.rev)
        if again is None or (again.epoch, again.first, again.rev) != before:
            raise Unavailable(
                "the conversation was edited, or turns were removed, while it was exported; export it again",
                backend=self._driver.name,
                operation="export",
            )

    async def _page(self, transcript: Transcript, page: int, unreadable: Unreadable) -> list[dict[str, Any]]:
        """Return the lines of one page: one, or more if turns are missing within it."""
        errors: list[Corrupt] = []
        first, after = page * pages.TURNS, min((page + 1) * pages.TURNS, transcript.base)
        first = max(first, transcript.first)
        copies = await self._pages.between(self._where, transcript, first, after, damaged=errors.append)
        lines: list[dict[str, Any]] = []
        missing: list[int] = []
        end = -1
        for number in range(first, after):
            copy, turn = copies.get(number), None
            try:
                with located(self._driver.name, "export"):
                    turn = None if copy is None else _turn(stored_unit(copy.turn), copy.turn)
            except Corrupt as error:
                errors.append(error)
            if copy is None or turn is None:
                missing.append(number)
                continue
            if number != end:
                lines.append(self._line(number, copy, transcript.rev))
            lines[-1]["turns"].append(turn)
            end = number + 1
        if errors and missing:
            unreadable(errors[0], missing)
        return lines

    async def _branch(self, transcript: Transcript, branch: Branch) -> dict[str, Any]:
        """Return the turns that an edit has removed from the view, as far as they are stored."""
        first = max(branch.first, transcript.first)
        found = await self._pages.between(self._where, transcript.as_of(branch), first, branch.end)
        first = max([first - 1, *(number for number in range(first, branch.end) if number not in found)]) + 1
        with located(self._driver.name, "export"):
            turns = [
                _turn(stored_unit(found[number].turn), found[number].turn)
                for number in range(first, branch.end)
            ]
        return {"revision": branch.rev, "first": first, "turns": turns}

    def _line(self, number: int, copy: Copy, rev: int) -> dict[str, Any]:
        notes = {name: copy.notes[name] for name in ("summary", "upto") if name in copy.notes}
        return {
            "format": PAGE_FORMAT,
            "version": self._version,
            "key": self._key,
            "first": number,
            "turns": [],
            **notes,
            **({"revision": rev} if rev else {}),
        }


def _turn(stored: StoredTurn, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn or a message with all fields, those of a newer version included."""
    if stored.said is not None:
        return dict(content)
    # The time as it is read: an import refuses an invalid one, and NaN is not JSON.
    return {**dump_turn(stored), **content, "ts": stored.turn.ts}
