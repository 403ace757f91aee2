"""The report as a self-contained page, without scripts, fonts or network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from stm_backends.testing.runner.results import OUTCOMES, Result, Run, Standing, standing
from stm_backends.testing.workbench.clauses import Clause

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --line: #e4e7ec; --card: #fff; --page:
  #f6f7f9;
  --passed: #12805c; --failed: #c4320a; --asked: #8a94a6; --opted: #b54708; --code: #f2f4f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --line: #2a3140; --card:
  #171c26;
  --page: #0f131a; --passed: #4cc38a; --failed: #ff8a65; --asked: #7d889b; --opted: #f7b955; --code:
  #10151d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .75rem; color: var(--dim); font-weight: 600; }
.verdict { font-size: 1.1rem; margin: 0 0 1.5rem; } .good { color: var(--passed); } .bad { color:
  var(--failed); } .some { color: var(--opted); }
.bar { display: flex; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); gap:
  2px; }
.tally { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; margin: .7rem 0 0; padding: 0; list-style:
  none; }
.tally b { font-variant-numeric: tabular-nums; }
.dot { display: inline-block; width: .6rem; height: .6rem; border-radius: 50%; margin-right: .45rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .75rem; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .6rem
  .8rem; }
.facts dt { color: var(--dim); font-size: .8rem; } .facts dd { margin: 0; overflow-wrap: anywhere; }
details { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; margin: .5rem 0; }
details[open] summary { border-bottom: 1px solid var(--line); }
summary { display: grid; grid-template-columns: 1.2rem 1fr auto; gap: .6rem; padding: .65rem .9rem;
  cursor: pointer;
  list-style: none; align-items: baseline; } summary::-webkit-details-marker { display: none; }
summary code { color: var(--dim); font-size: .8rem; display: block; }
summary .count { color: var(--dim); font-variant-numeric: tabular-nums; white-space: nowrap; }
.checks { list-style: none; margin: 0; padding: .4rem .9rem .8rem; }
.checks > li { padding: .35rem 0; display: grid; grid-template-columns: 1.2rem 1fr auto; gap: .6rem; }
.checks small { color: var(--dim); font-variant-numeric: tabular-nums; }
.why { color: var(--dim); font-size: .9rem; } .gap { display: block; font-size: .8rem; }
.checks code { color: var(--dim); font-size: .8rem; overflow-wrap: anywhere; }
details[open] .gap { display: none; }
pre { grid-column: 2 / -1; background: var(--code); border-radius: .4rem; padding: .7rem .85rem; margin:
  .3rem 0;
  overflow-x: auto; font: .82rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap:
  anywhere; }
.passed { color: var(--passed); } .failed { color: var(--failed); } .not-asked { color: var(--asked); }
.opted-out { color: var(--opted); } .bg-passed { background: var(--passed); } .bg-failed { background:
  var(--failed); }
.bg-not-asked { background: var(--asked); } .bg-opted-out { background: var(--opted); }
.partly { color: var(--opted); } .left-out { color: var(--asked); } .bg-left-out { background:
  var(--line); }
"""

_SIGNS: Final[dict[Standing, str]] = {
    "passed": "✓",
    "partly": "~",
    "failed": "✗",
    "not asked": "–",  # noqa: RUF001 -- a sign on a page
    "left out": "·",
    "opted out": "○",
}

_PROFILES: Final = {"driver": "Driver", "store": "State store", "graph": "Graph", "memory": "Memory"}


def page(run: Run) -> str:
    """Return a run as an HTML page."""
    verdict = ("good" if run.complete and run.grade > 1 else "some") if run.ok else "bad"
    title = f"Conformance of {run.backend}" if run.backend else "Conformance"
    profiles: dict[str, list[tuple[Clause, list[Result]]]] = {}
    for clause, results in run.by_clause():
        profiles.setdefault(clause.profile, []).append((clause, results))
    first = {cause: results[0] for cause, results in run.alike().items()}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {verdict}">{escape(run.verdict())}</p>',
        f'<p class="why">{escape(unasked)}</p>' if (unasked := run.unasked()) else "",
        _tally(run),
        *(f"<pre class='bad'>{escape(text)}</pre>" for text in run.findings.values()),
        _broken(run),
        *(_alike(results) for results in run.alike().values()),
        *(f"<p class='bad'>Could not be run: {escape(text)}</p>" for text in dict.fromkeys(run.broken)),
        *(_profile(_PROFILES[name], clauses, first) for name, clauses in profiles.items()),
        _facts("Versions", run.versions()),
        _facts("Traits of the driver", {name: _shown(value) for name, value in run.traits.items()}),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _tally(run: Run) -> str:
    counts = {outcome: len(run.of(outcome)) for outcome in (*OUTCOMES, "left out")}
    bar = "".join(
        f'<span class="bg-{_class(outcome)}" style="flex:{count}"></span>'
        for outcome, count in counts.items()
        if count
    )
    items = "".join(
        f'<li><span class="dot bg-{_class(outcome)}"></span><b>{count}</b> {outcome}</li>'
        for outcome, count in counts.items()
    )
    return f'<div class="bar" role="presentation">{bar}</div><ul class="tally">{items}</ul>'


def _broken(run: Run) -> str:
    clauses = [clause.id for clause, results in run.by_clause() if standing(results) == "failed"]
    links = ", ".join(f'<a class="bad" href="#{clause}">{clause}</a>' for clause in clauses)
    return f"<p>Broken: {links}</p>" if links else ""


def _alike(results: Sequence[Result]) -> str:
    first = results[0]
    return (
        f"<p>{len(results)} checks fail in the same way, which is shown once, at "
        f'<a class="bad" href="#{escape(first.id)}">{escape(first.sentence)}</a></p>'
    )


def _profile(title: str, clauses: Sequence[tuple[Clause, list[Result]]], first: Mapping[str, Result]) -> str:
    return f"<h2>{title}</h2>" + "".join(_clause(clause, results, first) for clause, results in clauses)


def _clause(clause: Clause, results: Sequence[Result], first: Mapping[str, Result]) -> str:
    stands = standing(results)
    passed = sum(result.outcome == "passed" for result in results)
    return (
        f'<details id="{clause.id}"{" open" if stands in ("failed", "opted out") else ""}><summary>'
        f"{_sign(stands)}<span>{escape(clause.promise)}<code>{clause.id}</code>{_gaps(results)}</span>"
        f'<span class="count">{passed} of {len(results)}</span></summary>'
        f'<ul class="checks">{"".join(_check(result, first) for result in results)}</ul></details>'
    )


def _gaps(results: Sequence[Result]) -> str:
    """Return the reasons why some checks of a closed clause did not run, each one once."""
    reasons = dict.fromkeys(
        f"{result.outcome.capitalize()}: {result.reason}" for result in results if result.reason
    )
    return "".join(f'<span class="why gap">{escape(reason)}</span>' for reason in reasons)


def _check(result: Result, first: Mapping[str, Result]) -> str:
    what = escape(result.sentence)
    if "[" in result.name:
        what += f' <span class="why">[{escape(result.name.partition("[")[2])}</span>'
    if result.reason:
        what += f'<br><span class="why">{escape(result.outcome.capitalize())}: {escape(result.reason)}</span>'
    if result.outcome == "failed":
        what += f"<br><code>{escape(result.id)}</code>"
    took = "" if result.outcome == "left out" else f"{result.seconds * 1e3:,.0f} ms"
    found = "\n\n".join(text for text in (result.message, result.explanation) if text)
    same = first.get(result.cause, result)
    if same is not result:
        found = ""
        what += f'<br><span class="why">As in <a href="#{escape(same.id)}">{escape(same.sentence)}</a></span>'
    name = f' id="{escape(result.id)}"' if result.cause in first and same is result else ""
    return (
        f"<li{name}>{_sign(result.outcome)}<span>{what}</span><small>{took}</small>"
        f"{f'<pre>{escape(found)}</pre>' if found else ''}</li>"
    )


def _facts(title: str, facts: dict[str, str]) -> str:
    if not facts:
        return ""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()
    )
    return f'<h2>{title}</h2><dl class="facts">{cells}</dl>'


def _sign(outcome: Standing) -> str:
    return f'<span class="{_class(outcome)}" title="{outcome}">{_SIGNS[outcome]}</span>'


def _class(outcome: str) -> str:
    return outcome.replace(" ", "-")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
