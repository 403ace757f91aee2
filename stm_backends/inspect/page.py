"""The page: one HTML file with its script and style, served by `app`, or written with one conversation in it.

Text of the datastore reaches the document only by `textContent` and attributes that name nothing to load.
The content security policy names the hashes of this one script and this one style, so that nothing else runs
even if a text were taken for markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from stm_backends.backend import Backend
from stm_backends.history.log import LogPage
from stm_backends.inspect.happened import covers_of
from stm_backends.inspect.lines import item_as_json
from stm_backends.inspect.reading import (
    Clean,
    described,
    key_parts,
    shared_of,
    snapshot_of,
    unchanged,
    unit_as_json,
)
from stm_backends.memory.shared.reading import read_all_units
from stm_backends.records.keys import LogKind
from stm_backends.types import MemoryKey, ShortTermMemoryConfig

MOST: Final = 10_000
"""A recorded page has this many of the newest turns or items; a browser can open as many at once."""

_HERE: Final = "<!-- record -->"
_SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE: Final = re.compile(r"<style>(.*?)</style>", re.DOTALL)

_FOR_HTML: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}
"""Characters of JSON that mean something in HTML. JSON itself is ASCII."""


class Page(NamedTuple):
    """The page, and what its policy allows: its own script and style."""

    html: str
    policy: str


@cache
def page() -> Page:
    """Return the page as it is shipped."""
    html = (files("stm_backends.inspect") / "page.html").read_text("utf-8")
    script, style = (_hash(one.search(html)) for one in (_SCRIPT, _STYLE))
    return Page(
        html,
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    )


def _hash(found: re.Match[str] | None) -> str:
    text = found[1] if found else ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def served_policy() -> str:
    """Return the policy of the page that is served: it may ask its own server, and stands in no frame."""
    return f"{page().policy}; connect-src 'self'; frame-ancestors 'none'"


def as_html(value: object) -> str:
    """Return JSON that no browser takes for markup, whatever texts it has."""
    return json.dumps(value).translate(_FOR_HTML)


async def record(
    backend: Backend,
    key: MemoryKey,
    *,
    named: str,
    config: ShortTermMemoryConfig | None = None,
    clean: Clean = unchanged,
) -> AsyncIterator[str]:
    """Yield the parts of a page with one conversation, its newest `MOST` turns or messages.

    `named` is how the command line names it, and `clean` is applied to each turn. Raises `SessionNotFound`
    and `Corrupt` before the first part, and may raise `Corrupt` later.
    """
    shared = shared_of(backend, key)
    snapshot = await snapshot_of(backend, shared)
    state = described(snapshot, config)
    covers = await covers_of(shared, snapshot)
    oldest, newest = state["happened"]["oldest"], state["happened"]["newest"]
    start = max(oldest, newest + 1 - MOST)
    notes = notes_on(oldest, start, state["what"], f"stm-backends history {named}")

    async def units() -> AsyncIterator[dict[str, Any]]:
        async with aclosing(read_all_units(shared, after=start - 1)) as each:
            async for one in each:
                if one.number > newest:
                    return
                yield unit_as_json(one, clean)
                if one.number == newest:
                    return

    said = {"key": [*key_parts(key)], "named": named, "notes": notes, "now": time.time()}
    async for part in _parts(said | state | covers.as_json(), units()):
        yield part


async def record_log(
    backend: Backend, key: MemoryKey, kind: LogKind, newest: LogPage, *, named: str
) -> AsyncIterator[str]:
    """Yield the parts of a page with the log of a framework, up to the newest item of a page of it."""
    start = max(newest.oldest, newest.newest + 1 - MOST)
    notes = notes_on(newest.oldest, start, "items", f"stm-backends history {named} --log {kind}")

    async def items() -> AsyncIterator[dict[str, Any]]:
        async with aclosing(backend.item_log(key, kind).each_item(after=start - 1)) as each:
            async for one in each:
                if one.number > newest.newest:
                    return
                yield item_as_json(one)

    said = {"key": [*key_parts(key)], "named": named, "notes": notes, "exists": False, "logs": [kind]}
    async for part in _parts(said | {"what": "items", "newest": newest.newest}, items()):
        yield part


def notes_on(oldest: int, start: int, what: str, again: str) -> list[str]:
    """Return what is said of turns that are not on a recorded page."""
    notes = list[str]()
    if oldest:
        notes.append(f"The {what} before number {oldest} are no longer stored.")
    if start > oldest:
        notes.append(
            f"This page shows the newest {MOST:,} {what}. "
            f"Numbers {oldest} to {start - 1}: {again} --before {start}"
        )
    return notes


async def _parts(said: Mapping[str, Any], units: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield the page with JSON in it: `said`, and then each unit."""
    before, _, after = page().html.partition(_HERE)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{page().policy}">'
    yield before.replace("<!-- policy -->", policy)
    yield f'<script type="application/json" id="record">{as_html(said)[:-1]}, "units": ['
    comma = ""
    async for unit in units:
        yield f"{comma}\n{as_html(unit)}"
        comma = ","
    yield f"]}}</script>{after}"
