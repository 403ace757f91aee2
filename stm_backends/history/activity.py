"""What a list of conversations shows of an item log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from stm_backends.catalogue.card import Activity, beginning_of
from stm_backends.history.items import Log


def activity_of(log: Log, kind: str) -> Activity | None:
    """Return the last activity that a log shows; `None` if no item is in it."""
    if not log.items:
        return None
    at = max((when for when in log.added if when > 0), default=0.0)
    at = at or max((when for when, _ in log.folded.forgotten.ages), default=0.0)
    preview, opening = beginning_in(reversed(log.items)), beginning_in(log.items)
    return Activity((kind,), at, len(log.items), preview, opening)


def beginning_in(items: Iterable[Mapping[str, Any]]) -> str:
    """Return the beginning of the first item with a text; calls of tools have none."""
    return next((beginning for item in items if (beginning := beginning_of(_text_of(item)))), "")


def _text_of(item: Mapping[str, Any]) -> str:
    """Return the text of an item: of OpenAI's `content`, or of LangChain's `data.content`."""
    data: object = item.get("data")
    holder = cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else item
    content: object = holder.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    parts = [
        cast("Mapping[str, Any]", part) for part in cast("list[object]", content) if isinstance(part, Mapping)
    ]
    return " ".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
