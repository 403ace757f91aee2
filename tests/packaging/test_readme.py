"""The documents are true: programs run as printed, tables match the code, links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from stm_backends import Limits, MemoryBudget, MemoryIsolation, ShortTermMemoryConfig, errors
from stm_backends.cli.replay.conversations import read_conversations
from stm_backends.drivers.sqlite.settings import SqliteSettings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
COMMAND_LINE = (DOCS / "how-to" / "command-line.md").read_text("utf-8")
# `tests/conformance/test_example.py` builds the package that the pages for authors of backends print.
FOR_AUTHORS = {"writing-a-backend.md", "sql-server-driver.md"}
PAGES = [
    ROOT / "README.md",
    *(
        page
        for pattern in ("*.md", "how-to/*.md", "explanation/*.md", "reference/*.md")
        for page in sorted(DOCS.glob(pattern))
        if page.name not in FOR_AUTHORS
    ),
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted(ROOT.glob("stm_backends_*/README.md")),
]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A fenced block of a page, and the `text` block right below it."""

    language: str
    text: str
    output: str | None

    @property
    def file(self) -> str | None:
        """The name that a program is to be saved under, as its first line says."""
        found = re.match(r"# (\w+\.py)\n", self.text) if self.language == "python" else None
        return found and found[1]

    @property
    def runs(self) -> bool:
        """Whether it is run: programs that are not saved, and commands that run those that are.

        tiktoken fetches its data; `tests/unit/test_tokens.py` runs the program with another in its place.
        """
        if "import tiktoken" in self.text:
            return False
        return (self.language == "python" and not self.file) or (
            self.language == "sh" and self.text.startswith("python ")
        )


def blocks(page: Path) -> Iterator[Block]:
    found = re.findall(
        r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return (Block(language, text, output or None) for language, text, output in found)


WITH_PROGRAMS = [page for page in PAGES if any(block.runs for block in blocks(page))]
IN_EVERY_RUN = {"README", "tutorial", "around-your-agent", "without-an-event-loop"}
EACH_PAGE = [
    pytest.param(page, marks=() if page.stem in IN_EVERY_RUN else pytest.mark.full) for page in WITH_PROGRAMS
]
COMMANDS = sorted(set(re.findall(r"^stm-backends ([a-z]+)", COMMAND_LINE, re.MULTILINE)))


def run(*command: str, cwd: Path) -> str:
    """Run a command as a reader would, and return what it prints."""
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,  # ends what hangs
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_shell(commands: str, cwd: Path) -> str:
    here = f'python() {{ "{sys.executable}" "$@"; }}\n'
    here += f'stm-backends() {{ "{sys.executable}" -m stm_backends "$@"; }}\n'
    return run("bash", "-euc", here + commands, cwd=cwd)


@pytest.mark.parametrize("page", EACH_PAGE, ids=named)
def test_the_programs_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for number, block in enumerate(blocks(page)):
        if block.language == "python":
            file = tmp_path / (block.file or f"program_{number}.py")
            file.write_text(block.text, "utf-8")
        if block.runs and block.language == "python":
            printed = run(sys.executable, file.name, cwd=tmp_path)
        elif block.runs:
            printed = run_in_shell(block.text, tmp_path)
        else:
            continue
        if block.output is not None:
            assert printed == block.output


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_has_saved_is_used_on_it(page: Path) -> None:
    run_there = "\n".join(block.text for block in blocks(page) if block.runs)
    for file in filter(None, (block.file for block in blocks(page))):
        assert re.search(rf"python {file}|^from {Path(file).stem} import", run_there, re.MULTILINE)


def test_the_pages_with_programs_were_found() -> None:
    names = {page.stem for page in WITH_PROGRAMS}
    guides = {"fastapi-service", "penguiflow", "openai-agents", "langchain", "telemetry"}
    assert IN_EVERY_RUN | guides <= names


def test_what_a_page_shows_of_an_example_stands_in_it() -> None:
    page, example = DOCS / "how-to" / "fastapi-service.md", ROOT / "examples" / "chat" / "server.py"
    shown = [block.text for block in blocks(page) if block.language == "py"]
    assert len(shown) >= 2
    assert [text for text in shown if text not in example.read_text("utf-8")] == []


def test_the_first_example_is_on_the_first_screen() -> None:
    (program,) = (block.text for block in blocks(ROOT / "README.md") if block.runs)
    assert len(program.splitlines()) <= 15
    assert README[: README.index(program)].count("\n") <= 20


def test_the_readme_can_be_skimmed() -> None:
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_the_page_exists(command: str) -> None:
    app = pytest.importorskip("stm_backends.cli.app").app
    done = pytest.importorskip("typer.testing").CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0, done.output
    assert f" {command} " in done.output


def test_the_page_of_the_command_line_names_every_command() -> None:
    app = pytest.importorskip("stm_backends.cli.app").app
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == {*COMMANDS}


@pytest.mark.full
def test_the_commands_run_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    (block,) = re.findall(
        r"```sh\npip install [^\n]*\n(export STM_BACKENDS_URL.*?)```", COMMAND_LINE, re.DOTALL
    )
    assert block.count("\nstm-backends ") >= 11
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "acme:u123:trip-to-lisbon" in run_in_shell(block, tmp_path)


def test_the_conversation_that_shows_the_format_can_be_replayed(tmp_path: Path) -> None:
    (shape,) = re.findall(r"```json\n(.*?)```", COMMAND_LINE, re.DOTALL)
    (tmp_path / "c.jsonl").write_text(shape, "utf-8")
    (conversation,) = read_conversations(tmp_path / "c.jsonl")
    digest = conversation.turns[0].trajectory_digest
    assert digest is not None
    assert digest.tools_invoked == ["book"]


def test_the_table_of_settings_has_each_with_its_default() -> None:
    page = (DOCS / "reference" / "settings.md").read_text("utf-8")
    memory, _, drivers = page.partition("\n## `open_backend`")
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", memory, re.MULTILINE))
    expected = {field.name: _default(field) for field in dataclasses.fields(ShortTermMemoryConfig)}
    del expected["budget"], expected["isolation"]
    for prefix, cls in (("budget", MemoryBudget), ("isolation", MemoryIsolation)):
        expected |= {f"{prefix}.{field.name}": _default(field) for field in dataclasses.fields(cls)}
    assert rows == expected
    sqlite = drivers.partition("\n## SQLite")[2]
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", sqlite, re.MULTILINE))
    expected = {field.name: _default(field) for field in dataclasses.fields(SqliteSettings)}
    # The URL gives it.
    del expected["path"]
    assert rows == expected


def test_the_table_of_limits_has_each() -> None:
    page = (DOCS / "reference" / "settings.md").read_text("utf-8")
    table = page.partition("\n## Limits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(Limits)]


def _default(field: dataclasses.Field[object]) -> str:
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


def test_the_page_of_errors_names_every_error() -> None:
    page = (DOCS / "reference" / "errors.md").read_text("utf-8")
    every = {
        name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)
    }
    assert {name for name in every if not re.search(rf"\b{name}\b", page)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_leads_to_a_file_and_a_heading_in_it(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", prose(document))
    assert [link for link in links if not leads_somewhere(document, link)] == []


def leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path) if path else document
    return target.exists() and (not anchor or anchor in anchors(target))


def prose(document: Path) -> str:
    """Return a document without its fences and code spans."""
    text = re.sub(r"^( *)```.*?^\1```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set[str]()
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        kept = (c for c in words if c in "-_ " or unicodedata.category(c)[0] in "LN")
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    paths = re.findall(
        r"`((?:stm_backends|tests|docs|examples|benchmarks)/[\w./-]+)`", document.read_text("utf-8")
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_module_map_has_every_folder_and_module() -> None:
    chapters = (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("\n## ")
    (chapter,) = (chapter for chapter in chapters if chapter.startswith("Module map"))
    rows = {
        room.strip("/"): set(re.findall(r"`(\w+)`", modules))
        for room, modules in re.findall(r"^\| `([\w/]+)` \|(.*)$", chapter, re.MULTILINE)
    }
    core = ROOT / "stm_backends"
    rooms = {path.parent.relative_to(core).as_posix(): set[str]() for path in core.rglob("*.py")}
    for path in core.rglob("*.py"):
        rooms[path.parent.relative_to(core).as_posix()].add(path.stem)
    rooms["stm_backends"] = rooms.pop(".")
    rooms |= {path.parent.name: set[str]() for path in ROOT.glob("stm_backends_*/plugin.py")}
    assert rows.keys() == rooms.keys()
    whole = [room for room in rooms if not room.startswith(("cli", "testing"))]
    missing = {room: rooms[room] - rows[room] - {"__init__", "__main__"} for room in whole}
    assert {room: names for room, names in missing.items() if names} == {}
