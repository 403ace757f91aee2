"""A conversation, or the log of an agent framework, as Markdown.

Stored text is in fenced blocks, where no character has a special meaning. A fence is longer than any run of
backticks in its block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from stm_backends.cli import item_logs
from stm_backends.cli.conversation import Conversation
from stm_backends.cli.figures import when
from stm_backends.cli.item_logs import Found
from stm_backends.cli.render import plain
from stm_backends.cli.saying import facts_of
from stm_backends.history.activity import text_of
from stm_backends.history.log import LogItem
from stm_backends.inspect.lines import lines_of
from stm_backends.types import StoredTurn


def document(shown: Conversation) -> str:
    """Return the whole conversation."""
    lines = [f"# Conversation\n\n{_block(shown.key)}"]
    lines.append(_facts(shown.facts()))
    if shown.body.summary:
        lines.append(f"## {shown.summary_title}\n\n{_block(shown.body.summary)}")
    lines += _turns("Pending (not summarized yet)", shown.pending, first=shown.first)
    lines += _turns("Recent", shown.recent, first=shown.first + len(shown.pending))
    return "\n\n".join(lines)


def log(found: Found, key: str) -> str:
    """Return the newest items of a log of an agent framework."""
    facts = item_logs.facts(found.page, len(found.page.items))
    lines = [f"# Log of {found.kind}\n\n{_block(key)}", _facts(facts)]
    return "\n\n".join([*lines, *map(_item, found.page.items)])


def _item(one: LogItem) -> str:
    text, speaker = text_of(one.item), item_logs.speaker(one.item)
    if not speaker:
        # The framework's word for it is stored text, too.
        text = f"{item_logs.who(one.item)}: {text}" if text else json.dumps(one.item, ensure_ascii=False)
    parts = [f"### Item {one.number}{_at(one.at)}", f"{speaker.capitalize() or 'Item'}:", _block(text)]
    return "\n\n".join(parts)


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {value}" for name, value in facts.items())


def _at(ts: float) -> str:
    return f", {when(ts)}" if ts else ""


def _turns(title: str, turns: Sequence[StoredTurn], *, first: int) -> Iterator[str]:
    if turns:
        yield f"## {title}"
    for number, stored in enumerate(turns, first):
        yield _unit(number, stored)


def _unit(number: int, stored: StoredTurn) -> str:
    what = "Turn" if stored.said is None else "Message"
    title = ", ".join([f"### {what} {number}", *facts_of(stored)])
    said = [f"{who.capitalize()}:\n\n{_block(text)}" for who, text in lines_of(stored)]
    return "\n\n".join([title, *said])


def _block(text: str) -> str:
    shown = plain(text)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
