"""The content of the index of a user's conversations, as bytes; pure functions. See `word_index`.

```
log     body   {"generations": [name, ...]}
        entry  {"portion": {"card": ..., "first": 64, "count": 64, ...}, "add": " word:mask word:mask "}
        entry  {}                                        of a portion that was forgotten
list    body   {"portions": [portion or null, ...]}      those of a generation, by their numbers
bucket  body   {"terms": {word: {number of the portion: mask, ...}, ...}}     as of a graph: `postings`
```

A mask is a number in hexadecimal digits: bit 0 says that the title has the word, bit 1 the summary, and bit
2 + i the turn or message `first + i`. An entry has its words in one text: a search for one of 2,000 words
opens that in a third of the time that an object takes. No word has a space or a colon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, cast

from stm_backends.drivers.contract import Record
from stm_backends.errors import Corrupt
from stm_backends.records import postings
from stm_backends.records.codec import Codec
from stm_backends.records.words import words_of

TITLE: Final = 1
SUMMARY: Final = 2

_FIRST_BIT: Final = 2

UNITS: Final = 64
"""Maximum number of turns or messages of a portion."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Turns or messages of one conversation that are indexed together: `first` to `first + count - 1`.

    `card` is the name of its card. They were read in the life `epoch` of its record, "" if that says none,
    after `rev` changes of units that had left it. If `settled` is set, a slot (see `card.slot_of`), all that
    was there by that hour is indexed with them.
    """

    card: str
    epoch: str = ""
    rev: int = 0
    first: int = 0
    count: int = 0
    settled: str = ""

    @property
    def end(self) -> int:
        """The number after the last one."""
        return self.first + self.count

    def unsettled(self) -> Portion:
        """Return the same once the title and the summary are no longer indexed with it."""
        return replace(self, settled="")

    def numbers_in(self, mask: int) -> list[int]:
        """Return the numbers of the turns or messages whose bits are set."""
        return [self.first + place for place in range(self.count) if mask >> (_FIRST_BIT + place) & 1]

    def is_of(self, epoch: str, rev: int) -> bool:
        """Say whether this is true of a record in its life `epoch` after `rev` changes."""
        return not self.count or (self.epoch in ("", epoch) and self.rev == rev)


class Logged(NamedTuple):
    """A portion with the masks of its words."""

    portion: Portion
    words: Mapping[str, int]

    def keeping(self, bits: int) -> Logged:
        """Return the same with only these bits of its masks."""
        left = {word: kept for word, mask in self.words.items() if (kept := mask & bits)}
        return Logged(self.portion.unsettled(), left)


def masks_of(texts: Iterable[str], *, title: str = "", summary: str = "") -> dict[str, int]:
    """Return the words of texts that are indexed together, with their masks."""
    found: dict[str, int] = {}
    for place, text in enumerate((title, summary, *texts)):
        for word in words_of(text):
            found[word] = found.get(word, 0) | 1 << place
    return found


def seal_logged(logged: Logged | None, codec: Codec) -> bytes:
    """Return the entry of the log for a portion; `None` takes the place of one that is forgotten."""
    if logged is None:
        return codec.seal("portion", {})
    words = "".join(f" {word}:{mask:x}" for word, mask in logged.words.items())
    return codec.seal("portion", {"portion": asdict(logged.portion), "add": f"{words} "})


def open_logged(entry: bytes, codec: Codec, *, only: Collection[str] | None = None) -> Logged | None:
    """Return the content of an entry of the log; `None` if it was forgotten. Raises `Corrupt`.

    With `only`, it has only these words.
    """
    content = codec.open("portion", entry)
    if not content:
        return None
    try:
        words = content["add"].split() if only is None else _those_of(only, content["add"])
        pairs = (one.rsplit(":", 1) for one in words)
        return Logged(_portion(content["portion"]), {word: int(mask, 16) for word, mask in pairs})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Corrupt(_DAMAGED) from None


def _those_of(words: Iterable[str], add: str) -> Iterator[str]:
    """Yield the words of an entry that are looked for, with their masks."""
    for word in words:
        place = add.find(f" {word}:")
        if place >= 0:
            yield add[place + 1 : add.index(" ", place + 1)]


def seal_generations(names: Sequence[str], codec: Codec) -> bytes:
    """Return the body of the log."""
    return codec.seal("portion", {"generations": list(names)})


def open_generations(record: Record | None, codec: Codec) -> list[str]:
    """Return the names of the generations in the body of the log. Raises `Corrupt`."""
    names: object = codec.open("portion", record.body).get("generations") if record and record.body else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast("list[object]", names)):
        raise Corrupt(_DAMAGED)
    return cast("list[str]", names)


def seal_list(listed: Sequence[Portion | None], codec: Codec) -> bytes:
    """Return the body of the list of a generation; `None` for a portion that was forgotten."""
    return codec.seal("portion", {"portions": [one and asdict(one) for one in listed]})


def open_list(record: Record | None, codec: Codec) -> list[Portion | None]:
    """Return the portions in the list of a generation. Raises `Corrupt`."""
    if record is None or not record.body:
        return []
    try:
        return [
            None if one is None else _portion(one) for one in codec.open("portion", record.body)["portions"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Corrupt(_DAMAGED) from None


def buckets_of(logged: Sequence[Logged]) -> dict[int, postings.Bucket]:
    """Return the buckets of a generation of these portions, numbered in this order."""
    terms: dict[str, dict[str, str]] = {}
    for number, one in enumerate(logged):
        for word, mask in one.words.items():
            terms.setdefault(word, {})[str(number)] = f"{mask:x}"
    return {
        bucket: postings.Bucket({word: terms[word] for word in words})
        for bucket, words in postings.by_bucket(terms).items()
    }


def without(bucket: postings.Bucket, kept: Mapping[str, int]) -> postings.Bucket:
    """Return a bucket with only the bits that `kept` has for the numbers of portions that it names."""
    terms = {
        word: {number: left for number, mask in masks.items() if (left := _kept(mask, kept.get(number, -1)))}
        for word, masks in bucket.terms.items()
    }
    return replace(bucket, terms={word: masks for word, masks in terms.items() if masks})


def _kept(mask: str, bits: int) -> str:
    """Return a mask with only these bits, and `""` if none is left."""
    left = int(mask, 16) & bits
    return f"{left:x}" if left else ""


def kept_bits(portion: Portion, below: int | None) -> int:
    """Return the bits of a portion that stay if the numbers below one are removed, or all for `None`.

    With some of its numbers, those of its title and its summary are removed, too. A title that was set stays.
    """
    if below is None:
        return 0
    if below <= portion.first or not (portion.count or portion.settled):
        return -1
    return 0 if below >= portion.end else -1 << (_FIRST_BIT + below - portion.first)


def with_all(words: Iterable[str], terms: Mapping[str, Mapping[str, str]], number: str) -> int:
    """Return the bits of the texts that have all words in a portion of a generation."""
    common = -1
    for word in words:
        common &= _mask(terms.get(word, {}).get(number, "0"))
    return max(common, 0)


def logged_with_all(words: Iterable[str], logged: Logged) -> int:
    """Return the same for a portion in the log."""
    common = -1
    for word in words:
        common &= logged.words.get(word, 0)
    return max(common, 0)


_DAMAGED: Final = "the stored index of conversations lacks a field, or a field has the wrong type"


def _portion(content: Mapping[str, Any]) -> Portion:
    values: list[object] = [content[name] for name in Portion.__match_args__]
    if not all(map(isinstance, values, (str, str, int, int, int, str))):
        raise TypeError
    found = Portion(*cast("tuple[str, str, int, int, int, str]", tuple(values)))
    if found.first < 0 or not 0 <= found.count <= UNITS:
        raise ValueError
    return found


def _mask(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise Corrupt(_DAMAGED) from None
