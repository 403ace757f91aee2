"""Transcripts that are broken: each mistake is patched into the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory.shared.archive import Archive
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records.body import Transcript
from stm_backends.records.pages import Leaving


def commit_before_archive(patch: pytest.MonkeyPatch) -> None:
    put, left = Archive.put, Archive.left

    async def nothing(self: Archive, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        pass

    async def afterwards(self: Archive, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        await put(self, snapshot, leaving)
        await left(self, snapshot, leaving)

    patch.setattr(Archive, "put", nothing)
    patch.setattr(Archive, "left", afterwards)


def no_gap(patch: pytest.MonkeyPatch) -> None:
    moved = Transcript.moved

    def summarized(self: Transcript, ids: Sequence[str], **_: Any) -> Transcript:
        return moved(self, ids, summarized=True)

    patch.setattr(Transcript, "moved", summarized)


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    moved = Transcript.moved

    def fewer(self: Transcript, ids: Sequence[str], *, summarized: bool) -> Transcript:
        return replace(moved(self, ids, summarized=summarized), base=self.base + max(1, len(ids) - 1))

    patch.setattr(Transcript, "moved", fewer)
