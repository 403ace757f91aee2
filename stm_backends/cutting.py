"""Cut the middle out of text and JSON, and leave a mark in its place; pure functions.

Text that is cut to a budget keeps its beginning, which says what it is about, and its end, which is newest.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, cast

SHORTEST_CUT: Final = 8
"""A value that would keep fewer than this many characters of each text is not shown."""

_WHOLE: Final = "session_summary"
_CLOSING_TAG: Final = f"</{_WHOLE}>"
_TAG: Final = re.compile(r"<(/?)([A-Za-z_]+)>")
SECTION: Final = re.compile(r"<(/?)(session_summary|key_facts|tools_used|pending)>", re.IGNORECASE)
"""The tags of a summary's sections."""

_OMITTED: Final = "\n\u2026\n"
"""The mark in place of the middle of a summary."""

_FIRST: Final = 32
"""The length that a search tries first: most texts shown are short."""


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, if fitting is monotonic; 0 is not tested.

    Doubles from below, so that the cost depends on the result and not on the limit.
    """
    low, high = 0, min(limit, _FIRST)
    while low < high and fits(high):
        low, high = high, min(limit, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_blank(summary: str) -> bool:
    """Say whether a summary consists only of white space and tags."""
    return not _TAG.sub("", summary).strip()


def without_sections(summary: str) -> str:
    """Return the text of a summary without the tags of its sections, which no one has said."""
    return SECTION.sub(" ", summary)


def cut_summary(summary: str, fits: Callable[[str], bool]) -> str:
    """Cut as much from the middle of a summary as needed to fit, and keep its closing tag.

    The end has the newest facts, and the head says what the conversation is about: each keeps half. No tag is
    cut, and a section of which only the end is kept is opened again. Returns `""` if nothing would be left.
    """
    if fits(summary):
        return summary
    text = summary.rstrip()
    closing = f"\n{_CLOSING_TAG}" if text.endswith(_CLOSING_TAG) else ""
    text = text.removesuffix(_CLOSING_TAG)
    cuts = _Cuts(text)

    def cut(length: int) -> str:
        head, before = cuts.at(length - length // 2)
        tail, after = cuts.at(len(text) - length // 2, following=True)
        same = before == after
        left = text[:head].rstrip() + (f"\n</{before}>" if before and not same else "")
        right = (f"<{after}>\n" if after and not same else "") + text[tail:].strip()
        return left + _OMITTED + right + closing

    most = max(len(text) - len(_OMITTED), 0)
    kept = cut(largest(most, lambda length: fits(cut(length))))
    return "" if is_blank(kept.replace(_OMITTED, "")) or not fits(kept) else kept


class _Cuts:
    """The tags of a text: where it can be cut, and which section is open there."""

    def __init__(self, text: str) -> None:
        tags = [*_TAG.finditer(text)]
        self._starts = [tag.start() for tag in tags]
        self._ends = [tag.end() for tag in tags]
        self._open = ["" if tag[1] or tag[2] == _WHOLE else tag[2] for tag in tags]

    def at(self, position: int, *, following: bool = False) -> tuple[int, str]:
        """Return where to cut, before or after a tag that the cut would break, and which section is open."""
        tags = bisect_left(self._starts, position)
        if tags and self._ends[tags - 1] > position:
            if following:
                position = self._ends[tags - 1]
            else:
                tags -= 1
                position = self._starts[tags]
        return position, self._open[tags - 1] if tags else ""


def cut_json(value: Any, length: int) -> Any:
    """Return JSON with each text and each list cut to `length` characters and a mark.

    A text that would not become shorter is not cut.
    """
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: cut_json(item, length) for name, item in items}
    if isinstance(value, list):
        return _cut_list(cast("list[Any]", value), length)
    if not isinstance(value, str):
        return value
    mark = f"[... {len(value) - length:,} characters omitted ...]"
    if len(value) <= length + len(mark):
        return value
    tail = length // 2
    return f"{value[: length - tail]}{mark}{value[len(value) - tail :]}"


def _cut_list(items: list[Any], length: int) -> list[Any]:
    """Return the first items of a list, up to `length` characters, and the number of omitted ones."""
    for index, item in enumerate(items):
        length -= len(str(item))
        if length < 0:
            return [*items[:index], f"[... {len(items) - index:,} more omitted ...]"]
    return items
