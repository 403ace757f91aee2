"""Estimating the tokens of a text without a tokenizer.

The weights were measured on public text with the tokenizers o200k and cl100k: `docs/explanation/tokens.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeAlias

TokenEstimator: TypeAlias = Callable[[str], int]

PER_TOKEN: Final = 16
_ASCII: Final = 4
_LATIN: Final = 16
_BLOCKS: Final = (
    (0x00, _LATIN),  # Latin letters with accents; ASCII has its own weight
    (0x01, 24),  # Latin, as in Polish and Turkish
    (0x02, 28),
    (0x03, 13),  # Greek
    (0x04, 6),  # Cyrillic
    (0x05, 15),  # Hebrew
    (0x06, 11),  # Arabic
    (0x07, 32),
    (0x09, 16),  # Devanagari
    (0x0A, 25),  # Gujarati, Gurmukhi
    (0x0B, 20),  # Tamil
    (0x0C, 25),  # Telugu, Kannada, Malayalam, Sinhala
    (0x0E, 13),  # Thai
    (0x0F, 28),  # Tibetan, Burmese, Georgian
    (0x11, 40),  # Ethiopic
    (0x17, 21),  # Khmer
    (0x18, 40),
    (0x1E, 10),  # Latin, as in Vietnamese
    (0x1F, 48),
    (0x20, 16),  # quotation marks and dashes
    (0x21, 34),  # signs, arrows and symbols
    (0x30, 16),  # Kana
    (0x31, 34),
    (0x4E, 17),  # Chinese characters
    (0xA0, 40),
    (0xAC, 17),  # Hangul
    (0xD8, 19),  # half of an emoji
    (0xE0, 40),
    (0xFE, 12),  # marks of emoji
    (0xFF, 16),  # full-width punctuation
)
"""Weights of characters: the first block of 256 with a weight, which holds up to the next entry."""

_WEIGHTS: Final = bytes(
    weight
    for (first, weight), (following, _) in pairwise((*_BLOCKS, (0x100, 0)))
    for _ in range(first, following)
)


def weigh(text: str) -> int:
    """Return the weight of a text in sixteenths of a token. Weights of parts add up.

    A character of ASCII weighs a quarter of a token. The cost is linear, and constant for ASCII.
    """
    if text.isascii():
        return _ASCII * len(text)
    # The high bytes of UTF-16: the block of each character, or of each half of one beyond U+FFFF.
    blocks = text.encode("utf-16-le", "surrogatepass")[1::2]
    return sum(blocks.translate(_WEIGHTS)) - (_LATIN - _ASCII) * len(text.encode("ascii", "ignore"))


def tokens_of(weight: int) -> int:
    """Return the estimate for a text of this weight."""
    return weight // PER_TOKEN + 1


def default_token_estimator(text: str) -> int:
    """Estimate tokens by the script of each character; four characters of ASCII are a token."""
    return tokens_of(weigh(text))
