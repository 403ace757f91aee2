"""The examples run unchanged, and print what the comment at their end says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_examples_were_found() -> None:
    names = {path.stem for path in EXAMPLES}
    embedded = {"basic", "truncation", "persistence", "callbacks", "custom_memory", "planner"}
    assert names >= embedded | {
        "on_redis",
        "openai_agents",
        "synchronous",
        "telemetry",
        "audit",
        "two_agents",
    }


def run(example: Path, folder: Path, **environment: str) -> list[str]:
    """Run an example, which must succeed, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_begins_with_the_command_that_runs_it_in_a_clone(example: Path) -> None:
    first = example.read_text("utf-8").splitlines()[0]
    # The library itself comes first: a fresh clone does not have it, and an index may have another version.
    clone = r'(\.|"\.\[[\w,-]+\]")( [\w.=-]+)?'
    assert re.fullmatch(rf"# pip install {clone} && python examples/{example.name}", first)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_what_its_end_says(
    example: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needed = {"REDIS_URL": request.getfixturevalue("redis_url")} if example.stem == "on_redis" else {}
    end = example.read_text("utf-8").rpartition("\n\n")[2]
    assert end.startswith("# ")
    assert run(example, tmp_path, **needed) == [line.removeprefix("# ") for line in end.splitlines()]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("planner", "penguiflow"),
        ("openai_agents", "agents"),
        ("telemetry", "opentelemetry"),
        ("on_redis", "redis"),
    ],
)
def test_an_example_without_its_framework_says_how_to_install_it(
    name: str, module: str, tmp_path: Path
) -> None:
    example = ROOT / "examples" / f"{name}.py"
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; "
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    # The command with which the example begins.
    command = example.read_text("utf-8").splitlines()[0].removeprefix("# ").partition(" && ")[0]
    assert line.startswith("this example needs ")
    assert line.endswith(f": {command}")


def test_where_no_redis_answers_its_example_says_what_to_start(tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}"
    (line,) = run(ROOT / "examples" / "on_redis.py", tmp_path, REDIS_URL=nowhere)
    assert line == "no Redis answers: start one with `redis-server`, or name yours in REDIS_URL"
