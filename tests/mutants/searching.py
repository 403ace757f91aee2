"""Indexes of conversations that are broken: each mistake is patched into the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from stm_backends.admin.searching import Searching
from stm_backends.catalogue.card import Content
from stm_backends.catalogue.matching import Query
from stm_backends.catalogue.portions import Portion
from stm_backends.catalogue.word_index import Indexed, WordIndex
from stm_backends.types import MemoryKey


def forgets_the_log_alone(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: WordIndex, generation: str, card: str, below: int | None) -> int:
        del self, generation, card, below
        return 0

    patch.setattr(WordIndex, "_forget_in", nothing)


def indexes_all_pages_with_each(patch: pytest.MonkeyPatch) -> None:
    broken: Any = Searching
    index = broken._index_page  # noqa: SLF001 -- what is broken is within it

    async def from_the_first(self: Searching, key: MemoryKey, page: int) -> None:
        for each in range(page + 1):
            await index(self, key, each)

    patch.setattr(Searching, "_index_page", from_the_first)


def believes_portions_of_an_earlier_life(patch: pytest.MonkeyPatch) -> None:
    def always(self: Portion, epoch: str, rev: int) -> bool:
        del self, epoch, rev
        return True

    patch.setattr(Portion, "is_of", always)


def does_not_look_for_the_card_afterwards(patch: pytest.MonkeyPatch) -> None:
    broken: Any = Searching
    add = broken._add  # noqa: SLF001 -- what is broken is within it

    async def unaware(self: Any, key: MemoryKey, card: Any, *args: Any, **options: Any) -> None:
        async def same(key: MemoryKey) -> Any:
            del key
            return card

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._catalogue, "load", same)
            await add(self, key, card, *args, **options)

    patch.setattr(Searching, "_add", unaware)


def does_not_look_for_the_card_of_a_title(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Searching, key: MemoryKey, card: Content, words: WordIndex) -> None:
        del self, key, card, words

    patch.setattr(Searching, "_forget_erased", nothing)


def does_not_ask_what_another_search_has_indexed(patch: pytest.MonkeyPatch) -> None:
    known = Searching.known

    async def unaware(self: Searching, owner: tuple[str, str], query: Query) -> dict[str, list[Indexed]]:
        return await known(self, owner, query) if query.words else {}

    patch.setattr(Searching, "known", unaware)


MISTAKES: Final[dict[Callable[[pytest.MonkeyPatch], None], str]] = {
    forgets_the_log_alone: "what_is_erased_leaves_no_word_in_the_index",
    indexes_all_pages_with_each: "a_page_is_indexed_once_as_a_fold_fills_it",
    believes_portions_of_an_earlier_life: "a_portion_that_an_erasure_has_left_hides_nothing",
    does_not_look_for_the_card_afterwards: "a_conversation_that_begins_again_meanwhile_has_its_own_words",
    does_not_look_for_the_card_of_a_title: (
        "a_title_that_is_set_while_its_conversation_is_erased_leaves_no_word"
    ),
    does_not_ask_what_another_search_has_indexed: "searches_at_once_index_a_conversation_once",
}
"""The mistakes, and the check that each must fail."""
