"""The page about the suite names checks and mutants that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stm_backends.testing import DriverContract, GraphContract, Graphs, Memories, PodsContract
from stm_backends.testing.workbench.drivers import Datastore
from tests import mutants

PAGE = Path(__file__).parents[2] / "docs/explanation/conformance.md"

ROW = re.compile(r"^\| (.+?) \| `(test_\w+)` \| (.+?) \| ?(.*?) ?\|$", re.MULTILINE)

ROWS = ROW.findall(PAGE.read_text())

CONTRACTS = {DriverContract: Datastore, GraphContract: Graphs, PodsContract: Memories}

CAUGHT = {
    kind.__name__: caught.check
    for kinds in (
        *(mutants.DRIVERS, mutants.FILES, mutants.NETWORKED, mutants.OPTIMISTIC),
        *(mutants.PODS, mutants.BACKEND_GRAPHS),
    )
    for kind, caught in kinds.items()
}


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_page_says_how_many_checks_of_a_driver_have_a_mutant() -> None:
    checks = DriverContract.checks().keys()
    have = checks & {*CAUGHT.values()}
    assert f"{len(have)} of the {len(checks)} checks of a driver\n  have such a mutant" in PAGE.read_text()


def test_every_row_of_the_page_is_understood() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    titles = [line for line in lines if line.startswith("| mistake |")]
    assert len(ROWS) == len(lines) - len(titles) >= 20


@pytest.mark.parametrize(("mistake", "check", "kinds", "means"), ROWS)
def test_a_row_names_a_check_the_mutant_it_rejects_and_real_means(
    mistake: str, check: str, kinds: str, means: str
) -> None:
    del mistake
    (means_of,) = (kind for contract, kind in CONTRACTS.items() if check in contract.checks())
    assert words(kinds)
    assert [CAUGHT[kind] for kind in words(kinds)] == [check] * len(words(kinds))
    assert set(words(means)) <= {*means_of.__dataclass_fields__, "max_record"}
