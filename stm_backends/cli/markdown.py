"""A conversation as Markdown.

Stored text is in fenced blocks, where no character has a meaning. A fence is longer than any run of
backticks in its block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stm_backends.cli.conversation import Conversation
from stm_backends.cli.figures import when
from stm_backends.cli.render import plain, tools
from stm_backends.types import ConversationTurn, StoredTurn


def document(shown: Conversation) -> str:
    """Return the whole conversation."""
    lines = [f"# Conversation\n\n{_block(shown.key)}"]
    lines.append("\n".join(f"- **{name}**: {value}" for name, value in shown.facts().items()))
    if shown.body.summary:
        lines.append(f"## {shown.summary_title}\n\n{_block(shown.body.summary)}")
    lines += _turns("Pending (not summarized yet)", shown.pending, first=shown.first)
    lines += _turns("Recent", shown.recent, first=shown.first + len(shown.pending))
    return "\n\n".join(lines)


def _turns(title: str, turns: Sequence[StoredTurn], *, first: int) -> Iterator[str]:
    if turns:
        yield f"## {title}"
    for number, stored in enumerate(turns, first):
        yield _turn(number, stored.turn)


def _turn(number: int, turn: ConversationTurn) -> str:
    parts = [
        f"### Turn {number}{f', {when(turn.ts)}' if turn.ts else ''}",
        "User:",
        _block(turn.user_message),
    ]
    if used := tools(turn):
        parts += ["Tools:", _block(used)]
    return "\n\n".join([*parts, "Assistant:", _block(turn.assistant_response)])


def _block(text: str) -> str:
    shown = plain(text)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
