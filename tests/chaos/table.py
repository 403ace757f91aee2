"""Publishes results and writes the page's tables: `python -m tests.chaos.table OUT/*/results.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.pages import table
from tests.chaos.nemesis.pods import ROOT

Run: TypeAlias = dict[str, Any]
"""What a run came to, as in its `results.json`."""

PUBLISHED: Final = Path(__file__).with_name("results.json")
PAGE: Final = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN: Final = "<!-- results: written by `python -m tests.chaos.table` -->\n"
END: Final = "<!-- end of results -->\n"
GROUPS: Final = {
    "pod": "pod",
    "network": "network",
    "model": "model",
    "people": "administration",
    "command": "administration",
}
"""Rows of kinds, by how their names begin; all others are faults of servers and their data."""

OUTCOMES: Final = {
    "turns acknowledged": "turns acknowledged",
    "failed": "turns failed",
    "unknown": "turns unknown",
    "dropped": "turns dropped",
    "summaries": "summaries ok",
    "reads": "reads ok",
    "reads in doubt": "reads in doubt, of a change of master",
    "erasures acknowledged": "erasures ok",
    "conversations": "conversations",
    "not judged": "conversations not judged",
    "turns in these": "turns in conversations not judged",
}
"""Columns, and the figures that they show."""

JUDGED: Final = {
    "reads whose health was judged": "reads whose health was judged",
    "calls that failed while all was well": "calls that failed while all was well",
    "conversations whose end was": "conversations whose end was settled",
    "pairs of leases": "pairs of leases judged",
    "pairs of summarizer calls": "pairs of summarizer calls judged",
    "turns added again after an erasure": "turns that were added again after an erasure",
}
"""Columns that say how much the rules had to judge that are not about each turn."""

WATCHED: Final = """\
For each datastore, the pod that was watched longest, in the first and the last third of that time without the
warm-up:
"""

PARTS: Final = ("tasks", "connections", "descriptors")


def load(files: Iterable[Path], earlier: Iterable[Run] = ()) -> list[Run]:
    """Return what runs came to, and earlier ones, in the order of the tables.

    Raises `ValueError` for one without a fault, with a mutant, or given twice: that is nothing to publish.
    """
    runs = [*earlier]
    for file in files:
        run: Run = json.loads(file.read_text(encoding="utf-8"))
        if not sum(run["faults"].values()):
            raise ValueError(f"{file}: the run had no faults")
        if run.get("mutant"):
            raise ValueError(f"{file}: the run had the mutant {run['mutant']}")
        if run in runs:
            raise ValueError(f"{file}: the same run comes twice")
        runs.append(run)
    return sorted(runs, key=itemgetter("stand", "seed"))


def stored(runs: Sequence[Run]) -> str:
    """Return runs as the text of the published file: a line for each."""
    lines = (json.dumps(run, separators=(",", ":"), sort_keys=True) for run in runs)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def page(text: str, runs: Sequence[Run]) -> str:
    """Return the page with the tables of these runs between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(runs)}\n{END}{rest.partition(END)[2]}"


def tables(runs: Sequence[Run]) -> str:
    """Return the tables: outcomes of the runs, figures of pods, and disturbances by kind."""
    stands: dict[str, list[Run]] = {}
    for run in runs:
        stands.setdefault(_name(run), []).append(run)
    results = [[name, *_outcome(of)] for name, of in stands.items()]
    return "\n".join(
        (
            table(
                ("datastore", "minutes", "disturbances", "violations", *OUTCOMES),
                [*results, ["**all**", *_outcome(runs)]],
            ),
            "Judged operations; `-` where the checker of that run did not count them:\n",
            table(
                ("datastore", *JUDGED),
                [
                    [name, *(_total(of, one) for one in JUDGED.values())]
                    for name, of in (*stands.items(), ("**all**", runs))
                ],
            ),
            WATCHED,
            table(
                ("datastore", "minutes", "memory (MB)", *PARTS, "pods judged"),
                [*([name, *_pods(of)] for name, of in stands.items()), _all_pods(runs)],
            ),
            f"{_sum(runs)}, by kind:\n",
            _words(("on", "disturbances", "kinds"), _kinds(runs)),
            *_struck(runs),
        )
    )


def _name(run: Run) -> str:
    """Return what a run was on: a stand, and what its pods were if they were not as usual."""
    sealed, other = run.get("sealed"), run.get("other")
    return f"{run['stand']}{', sealed' if sealed else ''}{f', with pods of {other}' if other else ''}"


def _words(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of words, which are left-aligned."""
    return table(columns, rows).replace("---:", "---")


def _outcome(runs: Sequence[Run]) -> list[str]:
    minutes = round(sum(run["minutes"] for run in runs))
    counts = minutes, _faults(runs).total(), _violations(runs)
    return [*(f"{n:,.0f}" for n in counts), *(_total(runs, one) for one in OUTCOMES.values())]


def _total(runs: Sequence[Run], figure: str) -> str:
    """Return the sum of a figure of runs; `-` if they are older than the figure."""
    found = [run["figures"][figure] for run in runs if figure in run["figures"]]
    return f"{sum(found):,.0f}" if found else "-"


def _violations(runs: Sequence[Run]) -> int:
    return sum(len(run["violations"]) for run in runs)


def _faults(runs: Sequence[Run]) -> Counter[str]:
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run["faults"])
    return total


def _sum(runs: Sequence[Run]) -> str:
    """Return how many disturbances there were, and how many of them were no faults."""
    total = _faults(runs)
    others = sum(count for name, count in total.items() if _group(name) == "administration")
    faults = f"{total.total() - others:,} are faults and {others:,} administrative operations"
    return f"{total.total():,} disturbances, of which {faults}"


def _group(name: str) -> str:
    return GROUPS.get(name.partition("-")[0], "servers")


def _pods(runs: Sequence[Run]) -> list[str]:
    pods = [pod for run in runs for pod in run["pods"].values()]
    # The others lived too short.
    judged = f"{len(pods)} of {_total(runs, 'pods')}"
    if not pods:
        return ["-"] * (2 + len(PARTS)) + [judged]
    pod: Mapping[str, Any] = max(pods, key=itemgetter("seconds"))
    memory = _change([bytes_ / 1e6 for bytes_ in pod["memory"]])
    return [f"{pod['seconds'] / 60:.0f}", memory, *(_change(pod[part]) for part in PARTS), judged]


def _all_pods(runs: Sequence[Run]) -> list[str]:
    return ["**all**", *["-"] * (2 + len(PARTS)), _pods(runs)[-1]]


def _change(ends: Sequence[float]) -> str:
    return " → ".join(f"{end:,.0f}" for end in ends)


def _kinds(runs: Sequence[Run]) -> Iterable[list[str]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    totals: Counter[str] = Counter()
    for name, count in _faults(runs).items():
        group, (begin, _, rest) = _group(name), name.partition("-")
        # People and commands both copy and purge.
        kind = name if group == "servers" or begin == "command" else rest
        groups.setdefault(group, []).append((kind, f"{count:,}{_hit(runs, name, count)}"))
        totals[group] += count
    for group, kinds in sorted(groups.items()):
        yield [group, f"{totals[group]:,}", ", ".join(f"{kind} {n}" for kind, n in sorted(kinds))]


def _hit(runs: Sequence[Run], name: str, count: int) -> str:
    """Return how many disturbances of a kind hit something; earlier runs have not stored it."""
    stored = [run for run in runs if name in run.get("hits", {})]
    of = sum(run["faults"][name] for run in stored)
    hits, perhaps = (sum(run[figure][name] for run in stored) for figure in ("hits", "perhaps"))
    if not stored:
        return ""
    return f" ({hits:,}{f' of {of:,}' * (of < count)} hit{f', {perhaps:,} perhaps' * bool(perhaps)})"


def _struck(runs: Sequence[Run]) -> Iterable[str]:
    """Yield what kills and pauses have struck; earlier runs have not stored it."""
    total: dict[str, Counter[str]] = {}
    for run in runs:
        for kind, struck in run.get("struck", {}).items():
            total.setdefault(kind.partition("-")[2], Counter()).update(struck)
    if total:
        rows = (
            [kind, ", ".join(f"{what} {n:,}" for what, n in sorted(of.items()))] for kind, of in total.items()
        )
        yield "Operations under way in a struck pod, each kind once:\n"
        yield _words(("strike", "under way"), sorted(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish the results of runs: those of one datastore are added up."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.table", description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="`results.json` of runs; none: those published")
    parser.add_argument("--add", action="store_true", help="add them to the runs that are published")
    given = parser.parse_args(arguments)
    try:
        runs = load(given.files, published() if given.add or not given.files else ())
    except OSError as error:
        print(f"{error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    PUBLISHED.write_text(stored(runs), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    print(f"{_sum(runs)}; violations: {_violations(runs)}; written: {PUBLISHED}, {PAGE}")
    return 0


def published() -> list[Run]:
    """Return the runs that are published."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
