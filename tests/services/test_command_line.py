"""The commands of `stm-backends` on each datastore of many hosts, in processes that are killed at times."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import cli, generated, replay
from tests.support.places import EACH, Place, quick_on
from tests.support.servers import Proxy

PlaceOn = Callable[[str], Place]


@pytest.mark.full
@pytest.mark.parametrize("datastore", EACH)
def test_pods_that_are_killed_take_nothing_acknowledged_with_them(
    datastore: str, proxied: Callable[[str], tuple[Place, Proxy]], tmp_path: Path
) -> None:
    place, proxy = proxied(datastore)
    # Slow enough that some are killed before all is done, however quick the datastore is, and killed no more
    # often than others can start in their place.
    proxy.slow_down(0.12)
    # Leases of the killed expire after some deadlines, which the replay waits for.
    url = place.options(deadline_s=4)
    file = generated(tmp_path, conversations=12, turns=12)

    options = ("--pods", 4, "--kill-every", 2.5, "--full-zone-turns", 2, "--create")
    status, numbers = replay(file, tmp_path, "--url", url, *options)

    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["bad_reads"] == 0
    assert status == 0
    assert numbers["killed"] >= 2
    assert numbers["turns"] == numbers["summarized"] + numbers["in_full"] == 144


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
def test_the_conformance_command_finds_nothing_broken(datastore: str, place_on: PlaceOn) -> None:
    """In some clauses, because all of them are a class in the driver's own directory."""
    url = place_on(datastore).url
    clauses = [f"--clause=driver.{clause}" for clause in ("append", "replace", "fold", "scan")]

    done = cli("conformance", datastore, "--url", url, "--quick", "--create", *clauses)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{datastore} passes a selection" in done.stdout
    assert re.search(r"^\+ driver\.replace\b", done.stdout, re.MULTILINE)
