"""What a recorded page has in it."""

from __future__ import annotations

import json
import re
from typing import Any


def recorded(page: str) -> dict[str, Any]:
    """Return the conversation that a page of `show --html` or `inspect --record` has."""
    (found,) = re.findall(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def texts_of(page: str) -> list[str]:
    """Return what is said on a page, in order."""
    return [text for unit in recorded(page)["units"] for _, text in unit["lines"]]


def section_of(state: dict[str, Any], unit: dict[str, Any]) -> str:
    """Return the heading above a turn, as the script of the page chooses it."""
    if unit["number"] >= state["recent_from"]:
        return "Recent"
    if unit["summarized"]:
        return "Covered by the summary"
    if unit["number"] >= state["happened"]["base"]:
        return "Pending (not summarized yet)"
    return "Earlier (covered by no summary)"
