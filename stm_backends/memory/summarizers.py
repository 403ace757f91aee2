"""A summarizer without a model: it keeps requests, facts, tool results and open questions; it drops the rest.

```
<session_summary>
User: I want a table for 2 on Friday.
<key_facts>
- Assistant: Booked at Sino for 11:30, phone 408-247-8880.
</key_facts>
<tools_used>
- ReserveRestaurant: confirmed
</tools_used>
<pending>
- Assistant asked: Under which name?
</pending>
</session_summary>
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from stm_backends.cutting import SECTION
from stm_backends.errors import ConfigurationError
from stm_backends.handed_in import report
from stm_backends.memory.estimating import guarded_estimator
from stm_backends.tokens import TokenEstimator, default_token_estimator

_LONG: Final = 240
"""Maximum number of characters of a line in a summary."""

_SHORT: Final = 80
"""Maximum number of characters of a line that was shortened to make room."""

_SENTENCES_READ: Final = 64
"""Number of sentences of a message that are examined, which bounds the cost of a pasted document."""

_KEPT_OF_A_MESSAGE: Final = 2

_OBSERVED_READ: Final = 100_000
_LINES_SEARCHED: Final = 50
_TOOLS_READ: Final = 1_000
"""Limits on tools: characters of their results that are read, lines for each tool, and tools of a turn; each
time the newest."""

_OTHER_TAG = re.compile(r"<(/?)([A-Za-z_]+)>")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z\s])|(?<=[\u3002\uff01\uff1f])|[\r\n]+")
_NUMBER = re.compile(r"\d")
_NAME = re.compile(r"(?<=[\w,;] )(?!I\b)[A-Z][\w'-]+")
_WISH = re.compile(
    r"\b(?:i(?:'d| would| do)? (?:like|want|need|prefer|love)|i(?:'m| am) looking|please|let's|can you|"
    r"could you|would you|find|book|reserve|order|cancel|change|instead|must|should|not|never|only|\w+n't)\b",
    re.IGNORECASE,
)
_SETTLED = re.compile(
    r"\b(?:yes|no|confirm\w*|correct|agreed|booked|reserved|scheduled|ordered|cancelled|canceled|"
    r"transferred|added|created|changed|decided|done|failed|unsuccessful)\b",
    re.IGNORECASE,
)
_PLEASANTRY = re.compile(
    r"\W*+(?:(?:no|ok|okay|yes|great|perfect|thanks|thank you|that's all|that is all|that will be all|bye|"
    r"goodbye|hi|hello|so much|very much|a lot|good|nice|day|have a|you're welcome|anything else|for now)\b"
    r"\W*+)++",
    re.IGNORECASE,
)


_OFFER = re.compile(r"\b(?:any|some)thing else\b|\b(?:help|assist) (?:you|with)\b", re.IGNORECASE)

_ASKED: Final = "Assistant asked: "
"""The beginning of the lines of `pending` that the user's next message settles."""


class ExtractiveSummarizer:
    """Fold turns into a summary without a model: deterministic, well-formed and within `max_tokens`.

    The content of the previous summary, which may be any text, is kept. Of each turn it keeps the user's
    requests, sentences with numbers, names and decisions, and the last use of each tool. Questions that the
    last turn leaves open are pending. Equal facts are kept once. To fit the budget, lines are shortened and
    then dropped, oldest first. The cost is linear in the text. If not even one short line fits `max_tokens`,
    that line is the result, because a blank summary would be a failure.
    """

    def __init__(self, *, max_tokens: int = 1000, token_estimator: TokenEstimator | None = None) -> None:
        if max_tokens < 1:
            raise ConfigurationError("max_tokens must be >= 1")
        self._max_tokens = max_tokens
        self._estimate = (
            default_token_estimator if token_estimator is None else guarded_estimator(token_estimator, report)
        )

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return `{"summary": str}` for `{"previous_summary": str, "turns": [...]}`."""
        notes = _parse(str(request.get("previous_summary") or ""))
        for turn in cast("Sequence[Mapping[str, Any]]", request.get("turns") or ()):
            _note_turn(notes, turn)
        if not any(notes.sections().values()):
            # Turns of images and empty texts: without a summary they would never leave the record.
            notes.add_prose("The conversation begins without words.")
        return {"summary": self._fit(notes)}

    def _fit(self, notes: _Notes) -> str:
        """Return the least reduced rendering that is within the budget."""
        steps = notes.reductions()
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            if self._fits(notes.after(steps[:middle])):
                high = middle
            else:
                low = middle + 1
        # The second is for estimators that count more tokens in a shorter text.
        candidates = (notes.after(steps[:low]), notes.after(steps))
        return next(filter(self._fits, candidates), notes.last_line())

    def _fits(self, summary: str) -> bool:
        return self._estimate(summary) <= self._max_tokens


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Shorten or drop one line of one section."""

    section: str
    index: int
    drop: bool


@dataclass(slots=True)
class _Notes:
    """The sections of a summary, oldest line first. Lines contain no line breaks and no section tags."""

    prose: list[str] = field(default_factory=list[str])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    tools: dict[str, str] = field(default_factory=dict[str, str])
    pending: list[str] = field(default_factory=list[str])

    def add_prose(self, text: str) -> None:
        if line := _line(text):
            self.prose.append(line)

    def add_fact(self, text: str) -> None:
        """Add a fact; a known fact becomes the newest."""
        if line := _line(text):
            same = line.casefold()
            self.facts.pop(same, None)
            self.facts[same] = line

    def add_tool(self, tool: str, text: str) -> None:
        """Add the use of a tool; the newest use replaces an older one."""
        if name := _line(tool.replace(":", " ")):
            older = self.tools.pop(name, "")
            self.tools[name] = _line(text) or older

    def add_pending(self, text: str) -> None:
        """Add an open question, once."""
        if (line := _line(text)) and line not in self.pending:
            self.pending.append(line)

    def settle(self, beginning: str) -> None:
        """Remove open questions that begin with this text."""
        self.pending = [line for line in self.pending if not line.startswith(beginning)]

    def sections(self) -> dict[str, list[str]]:
        return {
            "prose": self.prose,
            "key_facts": list(self.facts.values()),
            "tools_used": [f"{name}: {text}" if text else name for name, text in self.tools.items()],
            "pending": self.pending,
        }

    def reductions(self) -> list[_Reduction]:
        """Return the reductions in order: every line shortened, then all but one dropped.

        The oldest first. Prose ages twice as fast as facts do, so that there are about twice as many
        facts in the end; there are few tools, and they age in between. Open questions are kept longest.
        """
        pace = {"prose": 2.0, "tools_used": 1.5, "key_facts": 1.0, "pending": 0.5}
        ages = sorted(
            (-pace[section] * (len(lines) - index), section, index)
            for section, lines in self.sections().items()
            for index in range(len(lines))
        )
        shortened = [_Reduction(section, index, drop=False) for _, section, index in ages]
        dropped = [_Reduction(section, index, drop=True) for _, section, index in ages]
        return shortened + dropped[:-1]

    def after(self, steps: Iterable[_Reduction]) -> str:
        """Return the summary with these reductions made."""
        sections: dict[str, list[str | None]] = {name: [*lines] for name, lines in self.sections().items()}
        for step in steps:
            lines = sections[step.section]
            lines[step.index] = None if step.drop else _cut(lines[step.index] or "", _SHORT)
        summary = ["<session_summary>", *filter(None, sections["prose"])]
        for tag in ("key_facts", "tools_used", "pending"):
            if kept := [f"- {line}" for line in sections[tag] if line]:
                summary += [f"<{tag}>", *kept, f"</{tag}>"]
        return "\n".join([*summary, "</session_summary>"])

    def last_line(self) -> str:
        """Return the newest line, shortened."""
        newest = [lines[-1] for lines in self.sections().values() if lines]
        return _cut(newest[0], _SHORT) if newest else ""


def _parse(summary: str) -> _Notes:
    """Parse any text as a summary; text outside the known sections is prose."""
    notes = _Notes()
    section, position = "", 0
    # Lines never contain section tags, so a tag counts at any position.
    for tag in [*SECTION.finditer(summary), None]:
        for line in summary[position : tag.start() if tag else len(summary)].splitlines():
            _note_line(notes, section, line.strip())
        if tag:
            section, position = "" if tag[1] else tag[2].lower(), tag.end()
    return notes


def _note_line(notes: _Notes, section: str, line: str) -> None:
    if line == "\u2026":
        # The mark of text that a budget left out before.
        return
    if section == "tools_used":
        tool, _, text = line.removeprefix("- ").partition(":")
        notes.add_tool(tool, text)
    elif section == "key_facts":
        notes.add_fact(line.removeprefix("- "))
    elif section == "pending":
        notes.add_pending(line.removeprefix("- "))
    elif _OTHER_TAG.sub("", line).strip():
        notes.add_prose(line)
    else:
        # Other sections, written by a model; as labels they survive the loss of their closing tag.
        notes.add_prose(" ".join(f"{tag[2]}:" for tag in _OTHER_TAG.finditer(line) if not tag[1]))


def _note_turn(notes: _Notes, turn: Mapping[str, Any]) -> None:
    user = _sentences(str(turn.get("user") or ""))
    assistant = _sentences(str(turn.get("assistant") or ""))
    wishes = _best(user, _wish) or ([] if notes.prose else user[:1])
    if wishes:
        notes.add_prose(f"User: {' '.join(wishes)}")
    for fact in _best([s for s in assistant if not s.endswith("?")], _weight):
        notes.add_fact(f"Assistant: {fact}")
    if not (notes.prose or notes.facts) and assistant:
        notes.add_prose(f"Assistant: {assistant[0]}")
    digest = turn.get("trajectory_digest")
    if isinstance(digest, Mapping):
        _note_tools(notes, cast("Mapping[str, Any]", digest))
    if user:
        notes.settle(_ASKED)
    questions = [one for one in assistant if one.endswith(("?", "\uff1f"))]
    for question in [one for one in questions if not (_PLEASANTRY.fullmatch(one) or _OFFER.search(one))][-2:]:
        notes.add_pending(f"{_ASKED}{question}")


def _note_tools(notes: _Notes, digest: Mapping[str, Any]) -> None:
    tools = [str(tool) for tool in digest.get("tools_invoked") or ()][-_TOOLS_READ:]
    observed = str(digest.get("observations_summary") or "")[-_OBSERVED_READ:].splitlines()
    last = {line.partition(":")[0].removeprefix("- "): line for line in observed}
    newest = observed[-_LINES_SEARCHED:][::-1] or [""]
    for tool in tools:
        # As `agents.build_turn` writes it; otherwise a line that mentions the tool.
        text = last.get(tool) or next((line for line in newest if tool in line), newest[0])
        text = text.strip()
        notes.add_tool(tool, text.removeprefix(tool).lstrip(":- "))


def _sentences(text: str) -> list[str]:
    pieces = _SENTENCE_END.split(text[: _LONG * _SENTENCES_READ], maxsplit=_SENTENCES_READ)
    return [line for piece in pieces[:_SENTENCES_READ] if (line := _line(piece))]


def _best(sentences: Sequence[str], weight: Callable[[str], int]) -> list[str]:
    """Return the sentences with the highest weights, in order; none with weight 0."""
    weights = [0 if _PLEASANTRY.fullmatch(sentence) else weight(sentence) for sentence in sentences]
    heaviest = sorted(range(len(sentences)), key=weights.__getitem__, reverse=True)[:_KEPT_OF_A_MESSAGE]
    return [sentences[index] for index in sorted(heaviest) if weights[index]]


def _wish(sentence: str) -> int:
    """Return how clearly a sentence of the user states a request."""
    return 1 + 2 * bool(_WISH.search(sentence)) + sentence.endswith("?") + _weight(sentence)


def _weight(sentence: str) -> int:
    """Return how many kinds of facts a sentence has: numbers, names, decisions."""
    return sum(bool(pattern.search(sentence)) for pattern in (_NUMBER, _NAME, _SETTLED))


def _line(text: str) -> str:
    """Return text as one line without section tags, cut to the limit."""
    # Twice the limit, because joining white space shortens the text.
    joined = " ".join(text.strip()[: 2 * _LONG].split())
    return _cut(SECTION.sub("\u2039\\1\\2\u203a", joined), _LONG)


def _cut(line: str, limit: int) -> str:
    if len(line) <= limit:
        return line
    head = line[: limit - 1]
    words = head.rpartition(" ")[0]
    return (words if len(words) > limit // 2 else head) + "…"
