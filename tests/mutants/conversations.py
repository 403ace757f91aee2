"""Conversations of messages that are broken: each mistake is patched into the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.memory.shared import folds
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import Messages
from stm_backends.records.body import Body, Transcript


def cuts_between_any_messages(patch: pytest.MonkeyPatch) -> None:
    def anywhere(self: Snapshot, count: int, most: int, *, max_drop: int) -> int:
        return min(count, most)

    patch.setattr(Snapshot, "cut", anywhere)


def divides_turns_in_pages(patch: pytest.MonkeyPatch) -> None:
    def anywhere(turns: Sequence[Any], count: int, *, ends: bool) -> int:
        del turns, ends
        return count

    patch.setattr(folds, "whole_turns", anywhere)


def numbers_calls(patch: pytest.MonkeyPatch) -> None:
    moved = Transcript.moved

    def by_calls(self: Transcript, ids: Sequence[str], *, summarized: bool) -> Transcript:
        calls = {one.rpartition(".")[0] for one in ids}
        return replace(moved(self, ids, summarized=summarized), base=self.base + len(calls))

    patch.setattr(Transcript, "moved", by_calls)


def keeps_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Messages, "answer", property(lambda self: f"{self.id}~"))


def forgets_instructions(patch: pytest.MonkeyPatch) -> None:
    told = Snapshot.told

    def without(self: Snapshot, body: Body, count: int) -> Body:
        return replace(told(self, body, count), lead=())

    patch.setattr(Snapshot, "told", without)


def counts_what_stays(patch: pytest.MonkeyPatch) -> None:
    told = Snapshot.told

    def counted(self: Snapshot, body: Body, count: int) -> Body:
        return replace(told(self, body, count), usage=self.usage)

    patch.setattr(Snapshot, "told", counted)


def counts_only_what_is_there(patch: pytest.MonkeyPatch) -> None:
    told = Snapshot.told

    def uncounted(self: Snapshot, body: Body, count: int) -> Body:
        return replace(told(self, body, count), usage={})

    patch.setattr(Snapshot, "told", uncounted)


MISTAKES = (
    cuts_between_any_messages,
    divides_turns_in_pages,
    numbers_calls,
    keeps_checkpoints,
    forgets_instructions,
    counts_what_stays,
    counts_only_what_is_there,
)
