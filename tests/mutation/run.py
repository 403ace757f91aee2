"""Run the suite on mutants of what it checks: `nox -s mutation -- memory sqlite --sample 100 --seed 1`.

Each mutant stands in a copy of the tree, so other processes of a test import it too. It is noticed once a
stage fails or does not end; the stages run in their order, and only what survived one meets the next.

`known.json` has reasons, each with patterns of mutants' names: `equivalent:` to what was there, as far as
anyone can tell; `beyond:` what these tests are about, so that others have to notice it (neither is run);
`survives:`, which counts against the tests.

Not mutmut, which leaves out code outside of functions, nor cosmic-ray, which starts a new pytest for
each mutant; neither changes conditions in SQL.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import functools
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_name("known.json")
OPTIONS = ("-qx", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist")
LEAST_LIMIT_S = 60.0
LIMIT = 4
"""How much longer than the unmutated code a mutant may take, until it counts as one that does not end."""


@dataclass(frozen=True)
class Target:
    """Modules, and how they are tested: arguments of pytest, the quickest first."""

    modules: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]


def units(module: str, *names: str) -> Target:
    """Return a module before files of unit tests."""
    stages = tuple(("-m", "not full", f"tests/unit/test_{name}.py") for name in names)
    return Target((f"stm_backends/{module}.py",), stages)


MEMORY = "tests/contract/test_reference_driver.py::TestMemoryDriver"
SQLITE = "tests/contract/test_sqlite_driver.py::TestSqliteDriver"
QUICK = ("--stm-quick", "-k", "not history and not survive_a_kill")
"""What notices most mutants within a second; random histories and processes take longer."""
TARGETS = {
    # The classes of the shipped suite alone, and none of the tests beside them.
    "memory": Target(
        ("stm_backends/drivers/in_memory.py",),
        ((*QUICK, MEMORY), (MEMORY,), (f"{MEMORY}OnARealClock",)),
    ),
    "sqlite": Target(
        tuple(
            f"stm_backends/drivers/sqlite/{name}.py"
            for name in ("driver", "statements", "thread", "jobs", "purging", "errors")
        ),
        ((*QUICK, SQLITE), (SQLITE,), (f"{SQLITE}AsUsersHaveIt",)),
    ),
    # Pure functions, before unit tests.
    "policy": units("memory/policy", "policy", "default_summarizing", "distributed"),
    "view": units("memory/view", "view", "default_memory", "distributed"),
    "cutting": units("cutting", "view", "default_memory"),
    "merge": units("memory/local/merge", "merging", "default_write_back", "default_persistence", "merge"),
    "due": units("memory/shared/due", "due", "distributed", "background"),
    # What every write and every driver uses, before unit tests.
    "races": units("races", "races", "lost_races"),
    "ledger": units("records/ledger", "ledger", "confirmed_drops", "lost_races", "directory", "state_store"),
    "bounded": units("drivers/bounded", "bounded"),
    "home": units("drivers/home", "home"),
    "coalesced": units("drivers/coalesced", "coalesced"),
}  # fmt: skip


class Copy:
    """A copy of the tree, where one mutant at a time stands."""

    def __init__(self, parent: str, stage: tuple[str, ...]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=parent))
        for path in (*ROOT.glob("stm_backends*"), ROOT / "tests"):
            shutil.copytree(path, self.folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        with contextlib.redirect_stdout(io.StringIO()):  # imports pytest and its plugins for all forks
            pytest.main([*OPTIONS, "--collect-only", *stage])

    def write(self, path: str, source: str) -> None:
        """Put a module in place, and forget what was compiled of another one in the same second."""
        where = self.folder / path
        where.write_text(source, "utf-8")
        Path(importlib.util.cache_from_source(str(where))).unlink(missing_ok=True)

    def test(self, stage: tuple[str, ...], limit_s: float) -> str:
        """Return `passed`, `failed` or `timeout`.

        The test runs in a fork of this process, which has one thread and has imported pytest.
        """
        child = os.fork()
        if not child:
            self._test_here(stage)
        until, ended = time.monotonic() + limit_s, 0
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has started, too
        if not ended:
            os.waitpid(child, 0)
            return "timeout"
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)
        code = os.waitstatus_to_exitcode(status)
        assert code != pytest.ExitCode.NO_TESTS_COLLECTED, f"no test is selected: {stage}"
        return "failed" if code else "passed"

    def _test_here(self, stage: tuple[str, ...]) -> NoReturn:
        """Run the tests in this process, which is a fork, and end it."""
        os.setsid()
        with (self.folder / "output").open("wb") as output:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
        os.chdir(self.folder)
        os.environ.update(PYTHONPATH=str(self.folder), TMPDIR=str(self.folder))
        sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.startswith(("stm_backends", "tests"))]:
            del sys.modules[name]
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("stm_backends")]:
            logging.getLogger(name).filters.clear()  # of the modules that were there
        code = 1
        try:
            code = int(pytest.main([*OPTIONS, *stage]))
        except BaseException:  # noqa: BLE001 -- the parent goes on
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


copy_of_this_worker = functools.cache(Copy)


def tried(parent: str, mutant: Mutant | None, stage: tuple[str, ...], limit_s: float) -> str:
    """Return what a stage answers to a mutant, or to the unmutated code; runs in a worker."""
    copy = copy_of_this_worker(parent, stage)
    if mutant is None:
        if (answer := copy.test(stage, limit_s)) != "passed":
            print((copy.folder / "output").read_text("utf-8")[-2_000:])
        return answer
    original = (copy.folder / mutant.path).read_text("utf-8")
    copy.write(mutant.path, mutant.source)
    try:
        return copy.test(stage, limit_s)
    finally:
        copy.write(mutant.path, original)


@dataclass
class Found:
    """The outcome of each mutant of a target, and the reasons, `""` where there is none."""

    seed: int
    aside: dict[Mutant, str]
    survived: dict[Mutant, str]
    noticed: dict[Mutant, str] = field(default_factory=dict[Mutant, str])

    def __str__(self) -> str:
        kinds = collections.Counter(why.partition(":")[0] for why in self.aside.values())
        endless = sum(how.endswith("timeout") for how in self.noticed.values())
        noticed, explained = len(self.noticed), sum(map(bool, self.survived.values()))
        tested = noticed + len(self.survived)
        return (
            f"{noticed} of {tested} mutants noticed ({noticed / max(1, tested):.1%}), {endless} by not "
            f"ending; {explained} survivors are explained; set aside: {dict(kinds)}"
        )

    def written(self) -> dict[str, object]:
        """Return all of it as JSON has it."""
        named = {
            name: {f"{one.path}:{one.line}: {one.name}": what for one, what in getattr(self, name).items()}
            for name in ("survived", "noticed", "aside")
        }
        return {"summary": str(self), "seed": self.seed, **named}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description="Run tests on mutants.")
    parser.add_argument("targets", nargs="*", default=[], help=f"any of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants of a target, at random")
    parser.add_argument("--seed", type=int, default=1, help="which sample (1)")
    parser.add_argument("--only", default="", help="only mutants with this in their name")
    parser.add_argument("--stages", type=int, default=9, help="only the first so many stages")
    parser.add_argument("--workers", type=int, default=2, help="how many mutants are tested at a time")
    parser.add_argument(
        "--json", type=Path, default=Path("mutation.json"), help="the results (mutation.json)"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    known = json.loads(KNOWN.read_text("utf-8"))
    unexplained = 0
    for name in given.targets or TARGETS:
        found = run(name, given, known)
        print(f"{name}: {found}")
        for mutant, why in found.survived.items():
            print(f"  {mutant.path}:{mutant.line}: {mutant.name}\n    {why or 'not explained'}")
        unexplained += sum(not why for why in found.survived.values())
    sys.exit(bool(unexplained))


def run(name: str, given: argparse.Namespace, known: dict[str, dict[str, list[str]]]) -> Found:
    """Run the stages of a target on its mutants, those of a sample if there is one; writes what it found."""
    target = TARGETS[name]
    reasons: dict[Mutant, str] = {}
    for path in target.modules:
        reasons |= reasons_of(mutants_of(path, (ROOT / path).read_text("utf-8")), known.get(path, {}))
    reasons = {one: why for one, why in reasons.items() if given.only in f"{one.path}: {one.name}"}
    aside = {one: why for one, why in reasons.items() if why.startswith(("equivalent", "beyond"))}
    asked = [one for one in reasons if one not in aside]
    if 0 < given.sample < len(asked):
        asked = random.Random(given.seed).sample(asked, given.sample)
    found = Found(given.seed, aside, {one: reasons[one] for one in asked})
    with (
        tempfile.TemporaryDirectory(prefix="stm-mutants-", ignore_cleanup_errors=True) as parent,
        ProcessPoolExecutor(given.workers, multiprocessing.get_context("fork")) as pool,
    ):
        for number, stage in enumerate(target.stages[: given.stages], 1):
            began = time.monotonic()
            clean = pool.submit(tried, parent, None, stage, 3_000).result()
            assert clean == "passed", f"the unmutated code does not pass: {stage}"
            limit = max(LEAST_LIMIT_S, LIMIT * (time.monotonic() - began))
            trying = {pool.submit(tried, parent, one, stage, limit): one for one in found.survived}
            for place, done in enumerate(as_completed(trying), 1):
                if (answer := done.result()) != "passed":
                    del found.survived[trying[done]]
                    found.noticed[trying[done]] = f"stage {number}: {answer}"
                write(given.json, name, found)
                if place % 20 == 0 or place == len(trying):
                    print(f"{name}: stage {number}, {place} of {len(trying)} tried", flush=True)
    return found


def reasons_of(mutants: Iterable[Mutant], known: dict[str, list[str]]) -> dict[Mutant, str]:
    """Return why each mutant need not be noticed, or is not; or `""`."""
    reasons = dict.fromkeys(mutants, "")
    for why, patterns in known.items():
        for pattern in patterns:
            matching = [one for one in reasons if fnmatch.fnmatchcase(one.name, pattern.replace("[", "[[]"))]
            if not matching:
                print(f"known.json sets aside what there is no more: {pattern}")
            reasons.update(dict.fromkeys(matching, why))
    return reasons


def write(path: Path, name: str, found: Found) -> None:
    """Write what was found so far; a run that is ended early has lost nothing."""
    written = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**written, name: found.written()}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
