"""Faults at random, and a checker of what came of them: `python -m tests.chaos --help`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import pkgutil
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import stands
from tests.chaos.checker import SHOWN
from tests.chaos.mutants import MUTANTS
from tests.chaos.options import no_such_fault, no_such_stand, positive, there_already
from tests.chaos.run import NoSuchFaultError, Order, Result, known_faults, no_such_commit, run
from tests.chaos.stands import Stand

SINGLE = ("sqlite", "redis", "postgres", "mongo", "dynamo")


def names() -> list[str]:
    """Return the names of all stands, the single ones first."""
    modules = [one.name for one in pkgutil.iter_modules(stands.__path__)]
    has = [one.replace("_", "-") for one in modules if one not in {"common", "disk", "network"}]
    return sorted(has, key=lambda name: (name not in SINGLE, name))


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Pods share conversations over a datastore while faults befall pods, servers, the "
        "network, the model and people. Then what happened is checked. Exits with 1 on a violation.",
    )
    found.add_argument(
        "stand",
        nargs="*",
        default=SINGLE,
        help=f"what to run on: {', '.join(names())}; by default the five datastores without their ensembles",
    )
    found.add_argument("--minutes", type=positive(float), default=2.0, help="how long, for each stand (2)")
    found.add_argument(
        "--faults",
        type=positive(int),
        default=0,
        help="end a stand after so many faults and operations of people, if that comes first",
    )
    found.add_argument("--seed", type=int, help="repeats a schedule of faults; by default a new one")
    found.add_argument("--pods", type=positive(int), default=4, help="how many processes (4)")
    found.add_argument(
        "--pause",
        type=positive(float),
        default=0.1,
        help="seconds between two calls of a pod's worker (0.1)",
    )
    found.add_argument(
        "--mutant",
        choices=sorted(MUTANTS),
        default="",
        metavar="NAME",
        help=f"a fault in the library that the run must find: {', '.join(sorted(MUTANTS))}",
    )
    found.add_argument(
        "--sealed", action="store_true", help="pods seal what they store, with keys that change"
    )
    found.add_argument(
        "--other",
        default="",
        metavar="COMMIT",
        help="every second pod uses the library as of this commit",
    )
    found.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FAULT",
        help="how the faults' names begin, such as pod-; may be given again (all)",
    )
    found.add_argument(
        "--out", type=Path, help="a folder for the histories and results; by default a new one"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    options.stand = [*dict.fromkeys(options.stand)]
    if said := refusal(options):
        print(said, file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    out: Path = options.out or Path(tempfile.mkdtemp(prefix="stm-chaos-"))
    print(f"seed {seed}; histories and results in {out}")
    results: list[Result] = []
    try:
        for name in options.stand:
            folder = (out / name).absolute()
            folder.mkdir(parents=True)
            order = Order(
                stand=name,
                folder=folder,
                seed=seed,
                faults=options.faults,
                minutes=options.minutes,
                pods=options.pods,
                pause=options.pause,
                mutant=options.mutant,
                other=options.other,
                sealed=options.sealed,
                only=options.only,
            )
            results.append(asyncio.run(run(order, stand_of(name, folder))))
    except NoSuchFaultError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was started is stopped", file=sys.stderr)
        return 130
    finally:
        show(results, out)
    return int(any(result.violations for result in results))


def refusal(options: argparse.Namespace) -> str:
    """Return why nothing can be run in this way, as far as that shows before anything starts, or `""`."""
    said = no_such_stand(options.stand, names()) or there_already(options.out, options.stand)
    if said := said or (options.other and no_such_commit(options.other)):
        return said
    for name in options.stand:
        stand = stand_of(name, Path())
        if absent := [program for program in stand.programs if shutil.which(program) is None]:
            return f"to run on {name}, install {' and '.join(absent)}"
        there = known_faults(stand, sealed=options.sealed)
        if said := no_such_fault(there, options.only):
            return f"on {name}, {said}"
    return ""


def stand_of(name: str, folder: Path) -> Stand:
    """Return the stand of this name, which has not started."""
    return importlib.import_module(f"tests.chaos.stands.{name.replace('-', '_')}").stand(folder)


def show(results: Sequence[Result], out: Path) -> None:
    """Print what the runs came to."""
    if not results:
        return
    print(f"\n{'datastore':<18}{'minutes':>8}{'faults':>8}{'turns':>10}{'violations':>12}")
    for one in results:
        adds = one.figures["turns acknowledged"]
        figures = f"{one.minutes:>8.1f}{sum(one.faults.values()):>8,}{adds:>10,}{len(one.violations):>12}"
        print(f"{one.stand:<18}{figures}")
    for one in results:
        show_violations(one, out)
        if not one.pods:
            print(f"\n{one.stand}: no pod lived long enough for its growth to be judged")
    if not any(one.violations for one in results):
        print("\nno violations")
    for one in results:
        events = out / one.stand / "events"
        print(f"seed {one.seed}; judge again: {sys.executable} -m tests.chaos.checker {events}")


def show_violations(result: Result, out: Path) -> None:
    """Print how many violations there are of each kind, and the first of each."""
    kinds: dict[str, list[str]] = {}
    for violation in result.violations:
        kind = violation.partition(":")[0].partition(" in ")[0]
        # What the harness says has no kind.
        kinds.setdefault(kind if kind.isalpha() else "run", []).append(violation)
    if len(kinds) > 1:
        counts = ", ".join(f"{len(found):,} of {kind}" for kind, found in kinds.items())
        print(f"\n{result.stand}: {counts}")
    for kind, found in kinds.items():
        for violation in found[:SHOWN]:
            print(f"\n{result.stand}: {violation}")
        if len(found) > SHOWN:
            more, where = len(found) - SHOWN, out / result.stand / "results.json"
            print(f"\n{result.stand}: and {more:,} more of {kind}, in {where}")


if __name__ == "__main__":
    sys.exit(main())
