"""What the documents say is true: the examples run as printed, the tables hold, the links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stm_backends import MemoryBudget, MemoryIsolation, ShortTermMemoryConfig
from stm_backends.cli.replay.conversations import read_conversations
from stm_backends.drivers.sqlite.settings import SqliteSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
GUIDES = [
    (ROOT / "docs" / name).read_text("utf-8") for name in ("penguiflow.md", "agents.md", "telemetry.md")
]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

EXAMPLES = [
    example
    for page in (README, *GUIDES)
    for example in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", page, re.DOTALL)
]
COMMANDS = sorted(set(re.findall(r"^stm-backends ([a-z]+)", README, re.MULTILINE)))


def run(*arguments: str, cwd: Path) -> str:
    """Run Python as a reader would, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("program", "output"), EXAMPLES)
def test_an_example_runs_as_printed_and_prints_what_stands_below_it(
    program: str, output: str, tmp_path: Path
) -> None:
    (tmp_path / "example.py").write_text(program, "utf-8")
    printed = run("example.py", cwd=tmp_path)
    if output:
        assert printed == output


def test_the_first_example_is_on_the_first_screen() -> None:
    program, _ = EXAMPLES[0]
    assert len(program.splitlines()) <= 15
    assert README[: README.index(program)].count("\n") <= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_readme_exists(command: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    assert command in run("-m", "stm_backends.cli", command, "--help", cwd=tmp_path)


def test_the_commands_run_from_top_to_bottom_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    (block,) = re.findall(r"```sh\npip install [^\n]*\n(export STM_BACKENDS_URL.*?)```", README, re.DOTALL)
    assert block.count("\nstm-backends ") >= 11
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = f'stm-backends() {{ "{sys.executable}" -m stm_backends "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euc", command + block],  # noqa: S607 -- whichever there is
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "acme:u123:trip-to-lisbon" in done.stdout
    assert "Error" not in done.stderr


def test_the_conversation_that_shows_the_shape_of_a_file_can_be_replayed(tmp_path: Path) -> None:
    (shape,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    (tmp_path / "c.jsonl").write_text(shape, "utf-8")
    (conversation,) = read_conversations(tmp_path / "c.jsonl")
    digest = conversation.turns[0].trajectory_digest
    assert digest is not None
    assert digest.tools_invoked == ["book"]


def test_the_readme_names_the_command_of_each_kind() -> None:
    assert {"replay", "drivers", "schema", "ping", "show", "ls", "export", "import", "copy", "erase"} <= set(
        COMMANDS
    )


def test_the_table_of_settings_has_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", README, re.MULTILINE))
    expected = {field.name: _default(field) for field in dataclasses.fields(ShortTermMemoryConfig)}
    del expected["budget"], expected["isolation"]
    for prefix, cls in (("budget", MemoryBudget), ("isolation", MemoryIsolation)):
        expected |= {f"{prefix}.{field.name}": _default(field) for field in dataclasses.fields(cls)}
    expected |= {field.name: _default(field) for field in dataclasses.fields(SqliteSettings)}
    # The URL gives it.
    del expected["path"]
    assert rows == expected


def _default(field: dataclasses.Field[object]) -> str:
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text("utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    named = re.findall(
        r"`((?:stm_backends|tests|docs|examples|benchmarks)/[\w./]+)`", document.read_text("utf-8")
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_page_names_every_module_and_driver() -> None:
    chapters = (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("\n## ")
    (house,) = (chapter for chapter in chapters if chapter.startswith("The house"))
    core = ROOT / "stm_backends"
    modules = {path.name for path in core.glob("*.py")} | {
        f"{path.parent.name}/" for path in core.glob("*/*.py")
    }
    drivers = {f"{path.parent.name}/" for path in ROOT.glob("stm_backends_*/plugin.py")}
    assert set(re.findall(r"`(\w+\.py|\w+/)`", house)) == (modules | drivers) - {"__init__.py"}
