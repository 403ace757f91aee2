"""Pods of an earlier version and of this one on one datastore: each reads what the other wrote.

The earlier code comes from the repository's history, so these tests need a clone that has it.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import versioned_pod
from tests.support.places import EACH, Place
from tests.support.versioned_pod import CONVERSATIONS, RACED, SHARED, SUMMARIZED

ROOT = Path(__file__).parents[2]

EARLIER: Final = "90447d8efb75bab3308953e24391b80ad00dbd66"
"""A commit of 0.1.0 before its drivers, its suite and its commands were changed for long runs of faults."""

PACKAGES = ("stm_backends", *(f"stm_backends_{datastore}" for datastore in EACH))

pytestmark = [pytest.mark.full, pytest.mark.parametrize("datastore", ["sqlite", *EACH])]

Pod = Callable[..., Any]
"""Runs a command of a pod of one version, `old` or `new`, under a name of its own; returns its answer."""


@pytest.fixture(scope="session")
def trees(
    tmp_path_factory: pytest.TempPathFactory, unobtainable: Callable[[str], None]
) -> Mapping[str, Path]:
    """Where the code of each version is."""
    command = ["git", "-C", ROOT, "archive", EARLIER, *PACKAGES]
    try:
        found = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        why = f"the commit {EARLIER[:7]} is not here: git fetch --unshallow"
        if not has_history():
            pytest.skip(f"an archive or a shallow clone has no earlier version; {why}")
        unobtainable(why)
        raise
    old = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        archive.extractall(old, filter="data")
    return {"old": old, "new": ROOT}


def has_history() -> bool:
    """Say whether this is a clone with all of its history."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    answer = (
        subprocess.run(asked, capture_output=True, text=True, check=False)
        if (ROOT / ".git").exists()
        else None
    )
    return answer is not None and answer.stdout.strip() == "false"


@pytest.fixture
def pod(trees: Mapping[str, Path], place_on: Callable[[str], Place], datastore: str) -> Pod:
    """Pods on an empty place, which the first of them sets up."""
    url = place_on(datastore).url

    def run(version: str, command: str, name: str = "") -> Any:
        done = subprocess.run(
            [sys.executable, "-P", versioned_pod.__file__, url, command, name or version],
            env={**os.environ, "PYTHONPATH": str(trees[version])},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["from"] == str(trees[version])
        return answer["answer"]

    return run


@pytest.mark.parametrize(("first", "second"), list(permutations(("old", "new"))))
def test_each_version_reads_and_goes_on_with_what_the_other_wrote(pod: Pod, first: str, second: str) -> None:
    pod(first, "write")
    seen = pod(first, "look")
    assert pod(second, "look") == seen
    assert_complete(seen, first)

    pod(second, "write")
    both = pod(second, "look")
    assert pod(first, "look") == both
    assert_complete(both, first, second)

    assert pod(first, "erase")
    nothing = pod(second, "look")
    assert not nothing["stored"]
    assert nothing["log"] == nothing["remembered"] == []


def assert_complete(seen: Mapping[str, Any], *writers: str) -> None:
    """Check that everything is there once, in order."""
    turns = [f"{writer}-{number}" for writer in writers for number in range(6)]
    for session in CONVERSATIONS:
        stored = seen["stored"][session]
        assert texts(stored) == turns
        assert bool(stored["body"]["summary"]) == (session == SUMMARIZED)
        assert len(stored["turns"]) == (3 if session == SUMMARIZED else len(turns))
        shown = seen["shown"][session]["conversation_memory"]
        newest = [turn["user"] for turn in shown["recent_turns"]]
        assert [*shown.get("summary", "").split(), *newest] == turns
    large = seen["stored"]["large"]["turns"]
    assert [len(turn["assistant_response"]) for turn in large].count(versioned_pod.LARGE) == len(writers)
    assert [(one["by"], one["number"]) for one in seen["log"]] == [(w, n) for w in writers for n in range(5)]
    assert {state["by"] for state in seen["states"] if state} == set(writers)
    assert {key for key, _ in seen["remembered"]} == set(writers)


def texts(stored: Mapping[str, Any]) -> list[str]:
    """Return the texts of all turns, those first that a summary covers."""
    return [*stored["body"]["summary"].split(), *(turn["user_message"] for turn in stored["turns"])]


async def test_versions_at_once_lose_and_double_nothing(pod: Pod) -> None:
    pod("old", "look")
    racers = (("old", "a"), ("new", "b"), ("old", "c"), ("new", "d"))
    racing = (asyncio.to_thread(pod, version, "race", name) for version, name in racers)
    acknowledged = await asyncio.gather(*racing)
    assert acknowledged == [[f"{name}-{number}" for number in range(RACED)] for name in "abcd"]

    seen = pod("new", "look")
    assert pod("old", "look") == seen
    for session in SHARED:
        stored = texts(seen["stored"][session])
        assert sorted(stored) == sorted(turn for turns in acknowledged for turn in turns)
        for turns in acknowledged:
            assert [turn for turn in stored if turn in turns] == turns
        assert seen["stored"][session]["body"]["summary"]
