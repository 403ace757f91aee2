"""The activity of an item log, as lists of conversations show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from stm_backends.catalogue.card import Activity, beginning_of
from stm_backends.history.items import Item, Log
from stm_backends.messages import SHAPES


def activity_of(
    log: Log, kind: str, oldest: Sequence[tuple[Item, float]], newest: Sequence[tuple[Item, float]]
) -> Activity | None:
    """Return the last activity that a log with these oldest and newest items shows; `None` without items.

    Each item has the time at which it was added, 0 if that is unknown.
    """
    if not log.count:
        return None
    at = max((when for when in log.added if when > 0), default=0.0)
    at = at or max((when for when, _ in log.folded.forgotten.ages), default=0.0)
    return Activity(
        {kind: log.count},
        at,
        beginning_in(item for item, _ in reversed(newest)),
        beginning_in(item for item, _ in oldest),
        oldest[0][1] if oldest else 0.0,
    )


def beginning_in(items: Iterable[Mapping[str, Any]]) -> str:
    """Return the beginning of the first item with a text; calls of tools have none."""
    return next((beginning for item in items if (beginning := beginning_of(text_of(item)))), "")


def text_of(item: Mapping[str, Any]) -> str:
    """Return the text of an item, which frameworks keep in different places."""
    message: object = item.get("message")
    if isinstance(message, Mapping) and "parts" in message:
        return SHAPES["pydantic-ai"].text(cast("Mapping[str, Any]", message))
    holder = item
    for name in ("message", "data"):
        inner: object = item.get(name)
        if isinstance(inner, Mapping):
            holder = cast("Mapping[str, Any]", inner)
    content: object = holder.get("content", holder.get("contents", holder.get("blocks")))
    if isinstance(content, Mapping):
        content = cast("Mapping[str, Any]", content).get("parts")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    parts = [
        cast("Mapping[str, Any]", part) for part in cast("list[object]", content) if isinstance(part, Mapping)
    ]
    return " ".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
