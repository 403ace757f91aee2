"""Edits under SIGKILL on each datastore, while others read: all of an edit is done, or nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest

from stm_backends import Backend, open_backend
from stm_backends.testing.workbench.summarizers import covered
from tests.support.dying_edit import EDITS, SAID, backend_at, chat_of, copy_of, talked
from tests.support.places import EACH, Place


async def read(backend: Backend, kind: str, conversation: str) -> bool:
    """Read a conversation that is being edited; says whether the edit was seen."""
    name = copy_of(conversation) if kind == "copy" else conversation
    found = [one.message async for one in chat_of(backend, name).each_message()]
    if found == EDITS[kind].after(SAID) and kind != "copy":
        return True
    assert found == (EDITS[kind].after(SAID) if kind == "copy" and found else SAID[: len(found)])
    return kind == "copy" and bool(found)


async def goes_on(backend: Backend, kind: str, name: str) -> bool:
    """Make an edit that is not done, and continue; says whether it was done."""
    was_done, chat = await read(backend, kind, name), chat_of(backend, name)
    if not was_done:
        await EDITS[kind].make(chat, name)
    if kind == "copy":
        chat = chat_of(backend, copy_of(name))
    after = EDITS[kind].after(SAID) + await talked(chat, *range(20, 26))
    assert [one.message async for one in chat.each_message()] == after, name
    summary, *recent = await chat.messages(max_tokens=10**9)
    assert recent == after[-4:], name
    asked = [one["content"] for one in after[:-4] if one["role"] == "user"]
    assert covered(summary["content"].partition("<session_summary>")[2]) == asked, name
    return was_done


@pytest.mark.parametrize(
    ("datastore", "is_sealed", "every"),
    [
        ("sqlite", True, 11),
        pytest.param("redis", False, 11, marks=pytest.mark.full),
        *(pytest.param(one, False, 2, marks=pytest.mark.full) for one in ("sqlite", *EACH)),
        *(pytest.param(one, True, 5, marks=pytest.mark.full) for one in EACH),
    ],
)
async def test_an_edit_killed_anywhere_is_done_or_not(
    place_on: Callable[[str], Place], datastore: str, is_sealed: bool, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_edit", place.url, str(every)]
    editing = await asyncio.create_subprocess_exec(
        *program, *(["sealed"] if is_sealed else []), stdout=asyncio.subprocess.PIPE
    )
    assert editing.stdout is not None
    edited: list[tuple[str, str]] = []
    outcomes = defaultdict[str, set[bool]](set)
    backend, _ = backend_at(place.url, is_sealed=is_sealed)
    async with backend:
        next_line = asyncio.ensure_future(editing.stdout.readline())
        while True:
            if next_line.done():
                if not next_line.result():
                    break
                kind, name = next_line.result().decode().split()
                edited.append((kind, name))
                next_line = asyncio.ensure_future(editing.stdout.readline())
            if edited:
                await read(backend, *edited[-1])
            await asyncio.wait([next_line], timeout=0.01)
        assert await editing.wait() == 0
    assert {kind for kind, _ in edited} == set(EDITS)
    backend, _ = backend_at(place.url, is_sealed=is_sealed)
    async with backend:
        # At once: one that finds an edit to finish waits a deadline for whoever has made it.
        for (kind, _), was_done in zip(
            edited, await asyncio.gather(*(goes_on(backend, *one) for one in edited)), strict=True
        ):
            outcomes[kind].add(was_done)
    assert all(seen == {False, True} for seen in outcomes.values()), outcomes
