"""Read a file of exported conversations and vertices by lines, so that memory is bounded by its longest line.

The file is read once to check its lines, and again for each use. Input that cannot be read again, such as a
pipe, is first copied to a temporary file without a name, which only this process can read.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Final, TextIO, cast

from stm_backends.admin.adopting import exported, is_saved
from stm_backends.admin.exporting import lines_in
from stm_backends.cli.files import is_standard, reading
from stm_backends.cli.replay.conversations import BadFile
from stm_backends.errors import InvalidKey, InvalidState
from stm_backends.types import MemoryKey

MIB: Final = 1024 * 1024

_PORTION: Final = MIB // 4
"""Number of characters read at once."""

_HINT: Final = "an export has one conversation or graph vertex per line"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of a file: characters of a line and in all, and turns of a conversation."""

    line: int = 64 * MIB
    total: int = 4096 * MIB
    turns: int = 100_000


@dataclass(frozen=True, slots=True)
class Line:
    """One conversation or graph vertex of an export file; `where` is its file and line."""

    where: str
    document: dict[str, object]


class ExportFile:
    """The conversations and graph vertices of a file, read from its beginning by each iteration.

    `only` is a tenant, or a tenant and a user: lines of others are left out. A saved state comes as an
    exported conversation; `of` is the conversation of the only one that does not name its own. `count` is the
    number of lines, and `skipped` the number left out. Raises `BadFile` for the first line that is not
    JSON, is a state of an unknown conversation, or exceeds a limit.
    """

    def __init__(
        self,
        name: str,
        text: TextIO,
        *,
        limits: FileLimits,
        only: tuple[str, str | None] | None,
        of: MemoryKey | None = None,
    ) -> None:
        self._name = name
        self._text = text
        self._limits = limits
        self._only = only
        self._of = of
        self.skipped = 0
        self.count = sum(1 for _ in self)

    def __iter__(self) -> Iterator[Line]:
        self.skipped = 0
        self._text.seek(0)
        of = self._of
        for number, text in self._written():
            where = f"{self._name}:{number}"
            document = _object(where, text)
            if is_saved(document):
                named = document.get("key") is not None
                document = _exported(where, document, None if named else of)
                # Two conversations must never become one.
                of = of if named else None
            _require_few_turns(where, document, self._limits)
            if self._is_wanted(document):
                for each in lines_in(document):
                    yield Line(where, {**each})
            else:
                self.skipped += 1
        if of is not None:
            raise BadFile(f"{self._name}: --key is for a saved state that does not name its conversation")

    def _written(self) -> Iterator[tuple[int, str]]:
        """Yield the lines that are not blank, without a step for each blank one: there may be millions."""
        for first, lines in _limited(self._name, self._text, self._limits):
            yield from compress(enumerate(lines, first), map(str.strip, lines))

    def _is_wanted(self, document: dict[str, object]) -> bool:
        key = document.get("key")
        if self._only is None or not isinstance(key, dict):  # the latter is refused with a reason later
            return True
        parts = cast("dict[str, object]", key)
        tenant, user = self._only
        return parts.get("tenant_id") == tenant and user in (None, parts.get("user_id"))


@contextlib.contextmanager
def export_file(
    path: Path,
    *,
    limits: FileLimits,
    only: tuple[str, str | None] | None = None,
    of: MemoryKey | None = None,
) -> Generator[ExportFile]:
    """Open an export file, or standard input for `-`; raises what `ExportFile` raises."""
    name = "standard input" if is_standard(path) else str(path)
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(reading(path))
        if is_standard(path) or not text.seekable():
            copy = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n"))
            for _, lines in _limited(name, text, limits):
                copy.write("\n".join([*lines, ""]))
            copy.seek(0)
            text = cast("TextIO", copy)
        yield ExportFile(name, text, limits=limits, only=only, of=of)


def _limited(name: str, text: TextIO, limits: FileLimits) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines without their ends, many at once, with the number of the first; checks the limits."""
    number, total, begun = 1, 0, ""
    # A long line is read in portions that double, so that it is not copied again for each of them.
    while portion := text.read(
        min(max(_PORTION, len(begun)), limits.line + 1 - len(begun), limits.total + 1 - total)
    ):
        total += len(portion)
        *lines, begun = (begun + portion).split("\n")
        where = f"{name}:{number + len(lines)}"
        if len(begun) > limits.line:
            raise BadFile(f"{where}: longer than {limits.line:,} characters; see --max-line-mib")
        if total > limits.total:
            raise BadFile(
                f"{where}: the file is longer than {limits.total:,} characters; see --max-total-mib"
            )
        yield number, lines
        number += len(lines)
    yield number, [begun]


def _object(where: str, text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{where}: not JSON: {error} ({_HINT})") from None
    if not isinstance(document, dict):
        raise BadFile(f"{where}: the line is not a JSON object ({_HINT})")
    return cast("dict[str, object]", document)


def _exported(where: str, state: dict[str, Any], of: MemoryKey | None) -> dict[str, object]:
    """Return a saved state as an exported conversation."""
    if of is None and state.get("key") is None:
        raise BadFile(
            f"{where}: a saved state does not name its conversation; add it to each line, as in "
            '"key": "acme:u123:chat_001", or name that of a single one with --key'
        )
    try:
        return exported(state, of)
    except (InvalidKey, InvalidState) as error:
        raise BadFile(f"{where}: {error}") from error


def _require_few_turns(where: str, document: dict[str, object], limits: FileLimits) -> None:
    turns = document.get("turns")
    if isinstance(turns, list) and len(cast("list[object]", turns)) > limits.turns:
        raise BadFile(f"{where}: more than {limits.turns:,} turns; see --max-turns")
