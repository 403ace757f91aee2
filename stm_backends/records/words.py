"""The words of a text, by which the memories of the tiers and conversations are found."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Final, cast

_LONGEST: Final = 64
"""Number of characters of a word that are compared."""

# Scripts that are written without spaces: Thai to Myanmar, Khmer, kana and Han.
_UNSPACED: Final = r"\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
_SPACED_WORD: Final = re.compile(rf"[^\W_{_UNSPACED}]+")
_UNSPACED_RUN: Final = re.compile(f"[{_UNSPACED}]+")


def words_of(value: object) -> set[str]:
    """Return the words of a text, or of all texts and numbers in a JSON value, in lower case.

    Letters and digits make words, so `api_key` has two. In scripts without spaces, each character and each
    pair of neighbours is a word.
    """
    if isinstance(value, dict):
        both = itertools.chain.from_iterable(cast("dict[object, object]", value).items())
        return set[str]().union(*map(words_of, both))
    if isinstance(value, (list, tuple)):
        return set[str]().union(*map(words_of, cast("Iterable[object]", value)))
    if value is None or isinstance(value, bool):
        return set()
    text = str(value).lower()
    found = {word[:_LONGEST] for word in _SPACED_WORD.findall(text)}
    if not text.isascii():
        for run in _UNSPACED_RUN.findall(text):
            found.update(run, map("".join, itertools.pairwise(run)))
    return found
