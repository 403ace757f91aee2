"""The words of a search, and snippets of texts that have them; pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from stm_backends.catalogue.card import Card
from stm_backends.records.words import words_of

SNIPPET_CHARACTERS: Final = 160
"""Maximum length of a snippet, without the marks of omitted text."""

_BEFORE: Final = 40
"""Number of characters that a snippet shows before the first word that was found, if there are as many."""


@dataclass(frozen=True, slots=True)
class Match:
    """A place where a conversation has all words of a search: its title, its summary, or one turn or message.

    `number` is that of the turn or message, as in a transcript or history. `snippet` is a part of the text,
    in one line.
    """

    where: Literal["title", "summary", "message"]
    snippet: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation that a search has found, and the places: title, summary, then up to three messages.

    The newest message that matches comes first.
    """

    card: Card
    matches: tuple[Match, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """The words that a text must have, all of them."""

    words: frozenset[str]

    @staticmethod
    def of(text: str) -> Query:
        """Return the query of a user's text."""
        return Query(frozenset(words_of(text)))

    def is_in(self, text: str) -> bool:
        """Say whether a text has all words. A query without words matches no text."""
        # Nearly all texts lack a word, which is seen without finding theirs.
        lowered = text.lower()
        may_be = bool(self.words) and all(word in lowered for word in self.words)
        return may_be and self.words <= words_of(text)

    def in_title(self, card: Card) -> list[Match]:
        """Return the match in a title, if there is one."""
        return [Match("title", self.snippet(card.title))] if self.is_in(card.title) else []

    def among(self, texts: Iterable[tuple[int, str]], most: int) -> list[Match]:
        """Return the matches in up to `most` numbered texts, in their order."""
        found: list[Match] = []
        for number, text in texts:
            if len(found) == most:
                break
            if self.is_in(text):
                found.append(Match("message", self.snippet(text), number))
        return found

    def snippet(self, text: str) -> str:
        """Return the part of a text that has the longest word, and as much around it as there is room for."""
        line = " ".join(text.split())
        # Some letters become two in lower case, so that the place may be a little late.
        place = max(line.lower().find(max(self.words, key=lambda word: (len(word), word), default="")), 0)
        start = max(min(place - _BEFORE, len(line) - SNIPPET_CHARACTERS), 0)
        end = start + SNIPPET_CHARACTERS
        if start:
            start = line.rfind(" ", start, place) + 1 or start
        if end < len(line):
            end = max(line.rfind(" ", start, end), place + 1) if " " in line[place:end] else end
        return f"{'…' if start else ''}{line[start:end].strip()}{'…' if end < len(line) else ''}"
