"""The figures about messages: a section of the page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import machine, table
from benchmarks.peers.catalogue import MESSAGES, NOT_OFFERED
from benchmarks.peers.figures import HISTORY, Measured
from benchmarks.peers.report import (
    DATASTORES,
    at_length,
    beside,
    counted,
    kilo,
    lengths_of,
    not_measured,
    number,
    settings_of,
    sum_of,
    write_section,
)

_BEGINNING = """\
## Messages

Written by `python3 -m nox -s peers -- --messages{counts} --write`. {date}; {machine}; a load of {load:.1f}
at the end.

An **exchange** stores a question, reads what the model is shown, and stores the answer: the call of a tool,
its result, and a text. The dialogues are the turns of `examples/conversations.jsonl` in which one tool was
called. The four messages have about 600 bytes as OpenAI's chat completions have them. Each library is given
them in its own form: items of the Responses API, messages of LangChain, events of ADK.

- **Time** is the median of one exchange, in 40 conversations of 12 messages and in one of 1,000, alternating
  with `stm-backends`, whose figure is in parentheses. Its summaries are written between the timed exchanges.
- **On the wire** are the bytes of one exchange, sent and received, and **round trips** those of one; for
  `stm-backends` with the summaries.
- **Lost** exchanges were acknowledged, and their question, call, result or text cannot be read back;
  **doubled** ones are stored more than once. Four processes add 50 each to one conversation. What raises is
  not acknowledged, and is named with its error.
- **Shown** are the messages that the model is shown, of 1,000; a summary counts as one.
- **History** is 50 messages from the middle of those. **whole**: no call of the library returns only these,
  so that all were read.
"""

_UNTIMED = """\
Another program kept the machine busy. So there are no times, only what does not change with them; how many
exchanges are lost does.
"""

_SETTINGS = """\
### Settings of messages

"""

_NOTES = """\
- The runners of the SDK and of ADK store the messages of an answer as they come. Here, a session of the SDK
  is given them in one call; the services of ADK take one event at a time.
- ADK's services on SQL and MongoDB refuse what was not loaded last, with `StaleSessionError`. A question that
  was stored before stays without its answer, and the run ends: to lose nothing, the program has to run it
  again. `RedisSessionService` rewrites the whole session for each event, and keeps it for seven days by
  default.
- ADK can [compact](https://google.github.io/adk-docs/context/compaction/) what its model is shown, and OpenAI
  has a [session that compacts](https://openai.github.io/openai-agents-python/sessions/). Both ask a model,
  which is not measured here; ADK's sessions are read whole nevertheless.
- A limit of items or events counts no turns: what the model is shown may begin with the result of a call.
- LangGraph's graph has one node, as above. It stores the question with the answer.
"""


def section(results: Sequence[Measured]) -> str:
    """Return the section of a run with `--messages`."""
    lengths = lengths_of(results)
    timed = any(at.ms is not None for one in results for at in one.lengths.values())
    beginning = _BEGINNING.format(
        date=time.strftime("%-d %B %Y"),
        machine=machine(),
        load=os.getloadavg()[0],
        counts="" if timed else " --counts",
    )
    parts = [beginning, *([] if timed else [_UNTIMED])]
    for datastore, name in DATASTORES.items():
        chosen = [one for one in results if MESSAGES[one.name].datastore == datastore]
        if chosen:
            rows = [_row(one, lengths) for one in chosen]
            rows += [[label, "not offered", *[""] * 5] for label in NOT_OFFERED.get(datastore, ())]
            parts.append(table(_columns(name, lengths), rows))
    parts += not_measured(results, MESSAGES)
    return "\n".join([*parts, _SETTINGS + settings_of(results, MESSAGES), _NOTES])


def _columns(name: str, lengths: Sequence[int]) -> list[str]:
    after = f"after {' / '.join(f'{length:,}' for length in lengths)} messages"
    return [
        name,
        f"ms for an exchange, and (ours), {after}",
        "kB on the wire",
        "round trips",
        "lost + doubled, of those that 4 processes added",
        "shown",
        "history, and (ours)",
    ]


def _row(one: Measured, lengths: Sequence[int]) -> list[str]:
    ats = [at_length(one, length) for length in lengths]
    return [
        MESSAGES[one.name].label,
        " / ".join(beside(at.ms, at.ours_ms) for at in ats),
        " / ".join(kilo(sum_of(at.sent, at.received)) for at in ats),
        " / ".join(number(at.round_trips) for at in ats),
        counted(one.processes),
        number(ats[-1].shown if ats else None, digits=0),
        _history(one),
    ]


def _history(one: Measured) -> str:
    page = one.shown.get(HISTORY)
    if page is None:
        return "-"
    if page.ms is None:
        return "whole" if page.whole else "a page"
    return f"{'whole: ' if page.whole else ''}{beside(page.ms, page.ours_ms)}"


def write(results: Sequence[Measured], root: Path) -> None:
    """Write the section of PEERS.md."""
    write_section(section(results), root)
