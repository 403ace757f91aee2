"""The commands of `stm-backends` on each datastore of many hosts, in processes that are killed at times."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import cli, generated, replay
from tests.support.places import EACH, Place
from tests.support.servers import Proxy

PlaceOn = Callable[[str], Place]


@pytest.mark.parametrize("datastore", EACH)
def test_pods_that_are_killed_take_nothing_acknowledged_with_them(
    datastore: str, proxied: Callable[[str], tuple[Place, Proxy]], tmp_path: Path
) -> None:
    place, proxy = proxied(datastore)
    # Slow enough that some are killed before all is done, however quick the datastore is, and killed no more
    # often than others can start in their place.
    delay_s, kill_every_s = (0.1, 4.0) if datastore == "dynamo" else (0.04, 1.0)
    proxy.slow_down(delay_s)
    # Leases of the killed expire after some deadlines, which the replay waits for.
    url = place.options(deadline_s=3)
    file = generated(tmp_path, conversations=12, turns=20)

    options = ("--pods", 4, "--kill-every", kill_every_s, "--full-zone-turns", 2, "--create")
    status, numbers = replay(file, tmp_path, "--url", url, *options)

    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["bad_reads"] == 0
    assert status == 0
    assert numbers["killed"] >= 2
    assert numbers["turns"] == numbers["summarized"] + numbers["in_full"] == 240


@pytest.mark.parametrize("datastore", EACH)
def test_the_conformance_suite_finds_nothing_broken(datastore: str, place_on: PlaceOn) -> None:
    url = place_on(datastore).url

    done = cli("conformance", datastore, "--url", url, "--quick", "--create", timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Nothing is broken on {datastore} in a quick run" in done.stdout
    assert re.search(r"^\+ driver\.replace\b", done.stdout, re.MULTILINE)
