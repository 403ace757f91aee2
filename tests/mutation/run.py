"""Run the suite on mutants of what it checks: `nox -s mutation -- memory sqlite --sample 100 --seed 1`.

Each mutant stands in a copy of the tree, so other processes of a test import it too. It is noticed once a
stage fails or does not end; the stages run in their order, and only what survived one meets the next.

`known.json` has patterns of mutants' names, each with the reason: `equivalent:` to what was there, as far as
anyone can tell; `beyond:` what these tests are about, so that others have to notice it (neither is run);
`survives:`, which counts against the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_name("known.json")
OPTIONS = ("-qx", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist")
LEAST_LIMIT_S = 60.0
LIMIT = 6
"""How much longer than the unmutated code a mutant may take, until it counts as one that does not end."""


@dataclass(frozen=True)
class Target:
    """Modules, and how they are tested: arguments of pytest, the quickest first."""

    modules: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]


CONTRACT = "tests/contract"
SQLITE = "stm_backends/drivers/sqlite"
TARGETS = {
    # The classes of the shipped suite alone, and none of the tests beside them.
    "memory": Target(
        ("stm_backends/drivers/in_memory.py",),
        (
            ("--stm-quick", f"{CONTRACT}/test_reference_driver.py::TestMemoryDriver"),
            (f"{CONTRACT}/test_reference_driver.py::TestMemoryDriver",),
            (f"{CONTRACT}/test_reference_driver.py::TestMemoryDriverOnARealClock",),
        ),
    ),
    "sqlite": Target(
        tuple(
            f"{SQLITE}/{name}.py" for name in ("driver", "statements", "thread", "jobs", "purging", "errors")
        ),
        (
            ("--stm-quick", f"{CONTRACT}/test_sqlite_driver.py::TestSqliteDriver"),
            (f"{CONTRACT}/test_sqlite_driver.py::TestSqliteDriver",),
        ),
    ),
    "decisions": Target(
        tuple(f"stm_backends/memory/{name}.py" for name in ("policy", "view", "local/merge", "shared/due")),
        (
            tuple(f"tests/unit/test_{name}.py" for name in ("policy", "view", "merge")),
            ("-m", "not full", "tests/unit/test_distributed.py", "tests/unit/test_default_memory.py",
             "tests/unit/test_default_state.py", "tests/unit/test_background.py"),
        ),
    ),
}  # fmt: skip


class Copy:
    """A copy of the tree, where one mutant at a time stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in (*ROOT.glob("stm_backends*"), ROOT / "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

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
        code = 1
        try:
            code = int(pytest.main([*OPTIONS, *stage]))
        except BaseException:  # noqa: BLE001 -- the parent goes on
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run tests on mutants.")
    parser.add_argument("targets", nargs="*", default=[], help=f"of {', '.join(TARGETS)}; all without")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants of a target, at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only mutants with this in their name")
    parser.add_argument("--stages", type=int, default=9, help="only the first so many stages")
    parser.add_argument("--json", type=Path, default=Path("mutation.json"))
    given = parser.parse_args()
    known = json.loads(KNOWN.read_text("utf-8"))
    results = {name: run(name, given, known) for name in given.targets or TARGETS}
    for name, found in results.items():
        print(f"{name}: {found['summary']}")
    sys.exit(any(not all(found["survived"].values()) for found in results.values()))


def run(name: str, given: argparse.Namespace, known: dict[str, dict[str, str]]) -> dict[str, object]:
    """Run the stages of a target on its mutants, those of a sample if there is one; writes what it found."""
    target = TARGETS[name]
    originals = {path: (ROOT / path).read_text("utf-8") for path in target.modules}
    made = [one for path, source in originals.items() for one in mutants_of(path, source)]
    all_of_them = [one for one in made if given.only in f"{one.path}::{one.name}"]
    reasons = {one: reason_of(one, known.get(one.path, {})) for one in all_of_them}
    asked = [one for one in all_of_them if not reasons[one].startswith(("equivalent", "beyond"))]
    alive = asked
    if 0 < given.sample < len(alive):
        alive = random.Random(given.seed).sample(alive, given.sample)
    tested = len(alive)
    noticed: dict[str, str] = {}
    found: dict[str, object] = {
        "mutants": len(all_of_them),
        "set aside": len(all_of_them) - len(asked),
        "tested": tested,
        "seed": given.seed,
        "noticed": noticed,
    }
    with tempfile.TemporaryDirectory(prefix="stm-mutants-") as folder:
        copy = Copy(Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):  # imports pytest and its plugins for all forks
            pytest.main([*OPTIONS, "--collect-only", *target.stages[0]])
        for number, stage in enumerate(target.stages[: given.stages], 1):
            began = time.monotonic()
            clean = copy.test(stage, 3_000)
            assert clean == "passed", f"the unmutated code does not pass: {stage}"
            limit = max(LEAST_LIMIT_S, LIMIT * (time.monotonic() - began))
            for place, mutant in enumerate(list(alive), 1):
                copy.write(mutant.path, mutant.source)
                answer = copy.test(stage, limit)
                copy.write(mutant.path, originals[mutant.path])
                if answer != "passed":
                    alive.remove(mutant)
                    noticed[f"{mutant.path}::{mutant.name}"] = f"stage {number}: {answer}"
                report(name, found, alive, reasons, given.json, f"stage {number}: {place} tried")
    return found


def reason_of(mutant: Mutant, patterns: dict[str, str]) -> str:
    """Return why a mutant need not be noticed, or is not; or `""`."""
    escaped = {name.replace("[", "[[]"): why for name, why in patterns.items()}
    matching = (why for name, why in escaped.items() if fnmatch.fnmatchcase(mutant.name, name))
    return next(matching, "")


def report(name, found, alive, reasons, path, at) -> None:
    """Write what was found so far; a run that is ended early has lost nothing."""
    found["survived"] = {f"{one.path}:{one.line}::{one.name}": reasons[one] for one in alive}
    noticed, tested = len(found["noticed"]), found["tested"]
    found["summary"] = (
        f"{noticed} of {tested} noticed ({noticed / max(1, tested):.1%}), "
        f"{sum(map(bool, found['survived'].values()))} survivors explained; "
        f"of {found['mutants']} mutants {found['set aside']} set aside; {at}"
    )
    written = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**written, name: found}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
