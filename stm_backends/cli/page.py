"""A whole conversation or log as one self-contained HTML page, without scripts, fonts or network access.

Every text of the datastore passes through `_text`, and none becomes an attribute. In addition, the content
security policy of the page forbids scripts and requests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from html import escape
from typing import Final

from stm_backends.cli import item_logs
from stm_backends.cli.conversation import Conversation, Whole
from stm_backends.cli.figures import when
from stm_backends.cli.item_logs import Found
from stm_backends.cli.render import plain
from stm_backends.cli.saying import SPEAKERS, TOOLS, facts_of, lines_of
from stm_backends.history.activity import text_of
from stm_backends.history.log import LogItem
from stm_backends.memory.shared.reading import Numbered
from stm_backends.types import ConversationTurn, StoredTurn, TrajectoryDigest

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #5d687a; --line: #dfe3ea; --card: #fff;
  --page: #f5f6f8; --user: #e8f0fe; --good: #12805c; --some: #b54708; --bad: #c4320a; --code: #f0f2f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #9aa4b5; --line: #2a3140;
  --card: #171c26; --page: #0f131a; --user: #1b2a44; --good: #4cc38a; --some: #f7b955; --bad: #ff8a65;
  --code: #10151d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 52rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.35rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h1 small { display: block; font-size: .8rem; font-weight: 600; color: var(--dim); }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; color: var(--dim); }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0; }
dl div { flex: 1 1 11rem; }
dl div, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .6rem .85rem; }
dt { color: var(--dim); font-size: .8rem; } dd { margin: 0; overflow-wrap: anywhere; }
.healthy { color: var(--good); } .retry { color: var(--some); } .degraded { color: var(--bad); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
article { margin: 0 0 1.1rem; content-visibility: auto; contain-intrinsic-size: auto 9rem; }
article.folded { border-inline-start: .25rem solid var(--line); padding-inline-start: .75rem; }
article > p { margin: 0 0 .3rem; color: var(--dim); font-size: .8rem; }
.who { color: var(--dim); font-size: .75rem; font-weight: 600; }
.card + .card { margin-top: .4rem; }
.user { background: var(--user); border-color: transparent; margin-inline-end: 8%; }
.assistant { margin-inline-start: 8%; }
.tools { margin-inline-start: 8%; font-size: .88rem; background: var(--code); }
.tools ul { display: flex; flex-wrap: wrap; gap: .35rem; list-style: none; margin: .1rem 0 .3rem;
  padding: 0; }
.tools li { border: 1px solid var(--line); border-radius: 1rem; padding: 0 .6rem; overflow-wrap: anywhere;
  font: .82rem/1.6 ui-monospace, monospace; }
pre { margin: .3rem 0 0; font: .82rem/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.esc { color: var(--bad); font: .85em ui-monospace, monospace; border: 1px dotted; border-radius: .2rem; }
.none { color: var(--dim); }
@media print { body { background: none; } .card, dl div { break-inside: avoid; } }
"""

_END: Final = "</main></body></html>\n"

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


async def page(shown: Conversation, whole: Whole[Numbered]) -> AsyncIterator[str]:
    """Yield the parts of the page of a conversation, a turn at a time."""
    body, section, expected = shown.body, "", whole.start
    yield _head("Conversation", shown.key, shown.facts(), body.health.value)
    if body.summary:
        yield f"<h2>{_text(shown.summary_title)}</h2>{_card('', body.summary)}\n"
    for note in whole.notes():
        yield _note(note)
    async for one in whole.each:
        if one.number > expected:
            yield _note(whole.hole(expected, one.number - 1))
        if section != (section := shown.section_of(one)):
            yield f"<h2>{_text(section)}</h2>\n"
        yield _unit(one)
        expected = one.number + 1
    if not (body.summary or section):
        yield _note("Nothing was said in this conversation.")
    yield _END


async def log_page(found: Found, key: str, whole: Whole[LogItem]) -> AsyncIterator[str]:
    """Yield the parts of the page of a log of an agent framework, an item at a time."""
    expected, end = whole.start, found.page.newest + 1
    yield _head(f"Log of {found.kind}", key, item_logs.facts(found.page, end - whole.start))
    for note in whole.notes():
        yield _note(note)
    async for one in whole.each:
        if one.number > expected:
            yield _note(whole.hole(expected, one.number - 1))
        yield _item(one)
        expected = one.number + 1
    if end <= whole.start:
        yield _note("This log has no items.")
    yield _END


def _head(what: str, key: str, facts: Mapping[str, str], health: str = "") -> str:
    # The title is plain text: within it, a browser interprets no tags but those that end it.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="robots" content="noindex"><meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(plain(key))}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n<h1><small>{_text(what)}</small>{_text(key)}</h1>\n"
        f"<dl>{''.join(_fact(name, value, health) for name, value in facts.items())}</dl>\n"
    )


def _note(text: str) -> str:
    return f'<p class="none">{_text(text)}</p>\n'


def _fact(name: str, value: str, health: str) -> str:
    # The class is one of the names of `MemoryHealth`.
    kind = f' class="{health}"' if name == "health" else ""
    return f"<div><dt>{_text(name)}</dt><dd{kind}>{_text(value)}</dd></div>"


def _item(one: LogItem) -> str:
    text, who = text_of(one.item), item_logs.who(one.item)
    shown = f'<div class="text" dir="auto">{_text(text)}</div>' if text else _json(one.item)
    card = f'<div class="card {item_logs.speaker(one.item) or "tools"}">{_label(who)}{shown}</div>'
    return f"<article>{_above([f'#{one.number}', *_at(one.at)])}{card}</article>\n"


def _above(facts: Iterable[str]) -> str:
    return f"<p>{_text(' · '.join(facts))}</p>"


def _at(ts: float) -> list[str]:
    return [when(ts)] if ts else []


def _unit(one: Numbered) -> str:
    covered = ["covered by the summary"] if one.summarized else []
    above = _above([f"#{one.number}", *facts_of(one.stored), *covered])
    cards = _turn(one.stored.turn) if one.stored.said is None else _message(one.stored)
    kind = ' class="folded"' if one.summarized else ""
    return f"<article{kind}>{above}{''.join(cards)}</article>\n"


def _turn(turn: ConversationTurn) -> Iterator[str]:
    yield _card("user", turn.user_message)
    if turn.trajectory_digest is not None:
        yield _tools(turn.trajectory_digest)
    yield _card("assistant", turn.assistant_response)
    yield _artifacts(turn)


def _message(stored: StoredTurn) -> Iterator[str]:
    for who, text in lines_of(stored):
        yield _card(who if who in SPEAKERS else TOOLS, text, who)


def _card(look: str, text: str, who: str = "") -> str:
    said = f'<div class="text" dir="auto">{_text(text)}</div>'
    return f'<div class="card {look}">{_label(who or look)}{said}</div>'


def _label(who: str) -> str:
    return f'<div class="who">{_text(who)}</div>' if who else ""


def _json(value: object) -> str:
    return f"<pre>{_text(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _tools(digest: TrajectoryDigest) -> str:
    names = f"<ul>{_items(digest.tools_invoked)}</ul>" if digest.tools_invoked else ""
    texts = (digest.observations_summary, digest.reasoning_summary, ", ".join(digest.artifacts_refs))
    said = "".join(f'<div class="text" dir="auto">{_text(text)}</div>' for text in texts if text)
    return f'<div class="card tools"><div class="who">tools</div>{names}{said}</div>' if names or said else ""


def _artifacts(turn: ConversationTurn) -> str:
    if not turn.artifacts_shown:
        return ""
    return f'<div class="card tools">{_label("artifacts")}{_json(turn.artifacts_shown)}</div>'


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{_text(text)}</li>" for text in texts)


def _text(text: str) -> str:
    """Return text as HTML, characters that cannot be seen as visible escapes."""
    return plain(escape(text), lambda escapes: f'<span class="esc">{escapes}</span>')
