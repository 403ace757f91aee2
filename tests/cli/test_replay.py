"""The main job with real processes: nothing is lost, and what is lost is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.command_line import cli, generated, replay

EXAMPLES = Path(__file__).parents[2] / "examples" / "conversations.jsonl"
BACKENDS = Path(__file__).parent / "backends"


def test_the_demo_loses_nothing_and_its_conversations_can_be_shown(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/demo.db"

    done = cli("replay", EXAMPLES, "--url", url, "--full-zone-turns", 3)

    assert done.returncode == 0, done.stderr
    assert "Every acknowledged turn is stored once and in order." in done.stdout
    assert done.stdout.splitlines()[0].endswith(f"as demo:replay, in {url}")
    shown = cli("show", "demo:replay:trip-to-lisbon", "--url", url, "--full-zone-turns", 3)
    assert shown.returncode == 0, shown.stderr
    assert "[turns 0-8]" in shown.stdout
    assert "634 EUR for the flights and 438 EUR for the hotel" in shown.stdout


@pytest.mark.full
def test_processes_that_are_killed_take_nothing_acknowledged_with_them(tmp_path: Path):
    # Leases of the killed expire after some deadlines, which the replay waits for.
    url = f"sqlite:///{tmp_path}/x.db?deadline_s=0.5"
    file = generated(tmp_path, conversations=48, turns=15)

    status, numbers = replay(file, tmp_path, "--url", url, "--kill-every", 0.2, "--full-zone-turns", 2)

    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["transcript"] == numbers["found"]
    assert numbers["in_transcript"] == 720
    assert numbers["bad_reads"] == 0
    assert status == 0
    assert numbers["turns"] == 720
    assert numbers["killed"] > 0
    assert 0 < numbers["seconds"] < numbers["seconds_in_all"]
    assert numbers["summarized"] + numbers["in_full"] == 720
    assert sum(one["turns"] for one in numbers["latencies"] if one["pod"] != "all") == 720


def test_a_replay_says_that_it_took_the_database_of_the_environment(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/env.db"
    file = generated(tmp_path, conversations=2, turns=2)

    done = cli("replay", file, "--pods", 1, "--kill-every", 60, STM_BACKENDS_URL=url)
    assert "reading back" in done.stderr

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        f"Replaying 2 conversations, 4 turns, as demo:replay, in {url} (from STM_BACKENDS_URL)"
    )
    assert "No pod was killed" in done.stdout
    for word in ("process", "worker"):
        assert word not in done.stdout + done.stderr


@pytest.mark.full
def test_truncation_keeps_at_least_the_newest_turns(tmp_path: Path):
    file = generated(tmp_path, conversations=6, turns=15)

    status, numbers = replay(file, tmp_path, "--strategy", "truncation", "--full-zone-turns", 4, "--pods", 2)

    assert status == 0
    assert 6 * 4 <= numbers["in_full"] <= 6 * 9
    assert numbers["tokens_with"] < numbers["tokens_without"]


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    """A path on which the backends of the tests are installed."""
    metadata = tmp_path / "leaky-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: leaky\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stm_backends]\nleaky = leaky\n")
    return os.pathsep.join(filter(None, [str(BACKENDS), str(tmp_path), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(
    ("way", "what", "full_zone_turns"),
    [
        ("ForgetsEveryTenthAppend", "lost", 2),
        ("FoldsOneTurnTooMany", "lost", 2),
        ("ReadsBackwards", "out_of_order", 2),
        ("MixesUpConversations", "foreign", 99),
    ],
)
def test_a_backend_that_breaks_its_promises_is_found_out(
    tmp_path: Path, python_path: str, way: str, what: str, full_zone_turns: int
):
    status, numbers = replay(
        generated(tmp_path, conversations=6, turns=10),
        tmp_path,
        *("--url", f"leaky://{way}/{tmp_path}/x.db", "--pods", 2, "--full-zone-turns", full_zone_turns),
        PYTHONPATH=python_path,
    )

    assert status == 1
    assert numbers["found"][what] > 0
    assert numbers["ok"] is False


def test_a_backend_that_loses_a_part_of_a_transcript_is_found_out(tmp_path: Path, python_path: str):
    status, numbers = replay(
        generated(tmp_path, conversations=4, turns=10),
        tmp_path,
        *("--url", f"leaky://LosesAPageEntry/{tmp_path}/x.db", "--pods", 2, "--full-zone-turns", 2),
        PYTHONPATH=python_path,
    )

    assert status == 1
    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["transcript"]["lost"] > 0
    assert numbers["in_transcript"] == 40 - numbers["transcript"]["lost"]


@pytest.mark.full
def test_summaries_that_race_each_other_lose_and_double_nothing(tmp_path: Path, python_path: str):
    status, numbers = replay(
        generated(tmp_path, conversations=2, turns=30),
        tmp_path,
        *("--url", f"leaky://LeasesToEverybody/{tmp_path}/x.db", "--pods", 3, "--full-zone-turns", 1),
        PYTHONPATH=python_path,
    )

    assert status == 0
    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["lost_races"] > 0
    assert numbers["turns"] == numbers["summarized"] + numbers["in_full"] == 60


def test_a_second_replay_into_the_same_conversations_needs_replace(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/x.db"
    file = generated(tmp_path, conversations=2, turns=3)
    arguments = ("replay", file, "--url", url, "--pods", 1)

    assert cli(*arguments).returncode == 0
    again = cli(*arguments)
    assert again.returncode == 2
    assert "--replace" in again.stderr
    assert cli(*arguments, "--replace").returncode == 0
