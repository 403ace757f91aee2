"""The documentation site and the files around the project agree with what they describe.

`nox -s docs` builds the site with warnings as errors; here is what it cannot see.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NAVIGATION = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
WORKFLOWS = ROOT / ".github" / "workflows"


def pages(navigation: list[Any]) -> list[str]:
    """Return the pages of a navigation, from top to bottom."""
    found: list[str] = []
    for entry in navigation:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            found += pages(target) if isinstance(target, list) else [target]
    return found


def test_the_first_page_leads_to_every_explanation() -> None:
    text = (DOCS / "index.md").read_text("utf-8")
    # The pages of the benchmarks are named together.
    pages = {path.name for path in (DOCS / "explanation").glob("*.md") if "benchmark" not in path.name}
    assert pages <= set(re.findall(r"\(explanation/([\w-]+\.md)\)", text))


def test_every_page_is_in_the_navigation_exactly_once() -> None:
    pytest.importorskip("typer", reason="the site documents the command line")
    site = importlib.import_module("docs.site")
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    added = {"reference/command-line.md", *site.PAGES.values()} - {"project/readme.md"}
    assert sorted(pages(NAVIGATION)) == sorted(written | added)


def test_every_page_from_elsewhere_exists() -> None:
    pytest.importorskip("typer", reason="the site documents the command line")
    site = importlib.import_module("docs.site")
    assert [source for source in site.PAGES if not (ROOT / source).is_file()] == []


@pytest.mark.parametrize("package", ["", ".agents", ".drivers", ".messages", ".sync", ".testing", ".tiers"])
def test_the_api_reference_has_every_public_name(package: str) -> None:
    module = importlib.import_module(f"stm_backends{package}")
    page = (API / f"{package.removeprefix('.') or 'stm_backends'}.md").read_text("utf-8")
    # A function that has the name of its module is named with both.
    found = re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)(?:\.(\w+))?$", page, re.MULTILINE)
    documented = [name for name, inner in found if inner in ("", name)]
    assert sorted(documented) == sorted({*module.__all__} - {"__version__"})


def test_pre_commit_runs_the_ruff_that_the_lint_session_runs() -> None:
    (pinned,) = (each for each in PYPROJECT["dependency-groups"]["lint"] if each.startswith("ruff=="))
    config = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert re.findall(r"rev: v(\S+)", config) == [pinned.removeprefix("ruff==")]


def test_the_workflow_tests_every_python_that_is_said_to_be_supported() -> None:
    named = {each.rpartition(" ")[2] for each in PYPROJECT["project"]["classifiers"] if ":: 3." in each}
    (matrix,) = re.findall(r"python: \[(.*)\]", (WORKFLOWS / "tests.yml").read_text("utf-8"))
    assert named <= set(re.findall(r'"([\d.]+)"', matrix))


def test_the_workflows_use_actions_as_of_a_commit() -> None:
    used = [
        line.partition("uses:")[2].strip()
        for path in WORKFLOWS.glob("*.yml")
        for line in path.read_text("utf-8").splitlines()
        if "uses:" in line and "uses: ./" not in line
    ]
    # The version in the comment is for readers, and for the program that raises it.
    assert [each for each in used if not re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []
    versions: dict[str, set[str]] = {}
    for each in used:
        versions.setdefault(each.partition("@")[0], set()).add(each)
    assert [action for action, found in versions.items() if len(found) > 1] == []


def test_only_the_jobs_that_publish_have_rights_beyond_reading() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        text = path.read_text("utf-8")
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), path.name
        if path.name not in ("release.yml", "names.yml"):
            assert ": write" not in text, path.name
        assert "secrets." not in text, path.name


def test_the_workflows_run_nox_sessions_that_exist() -> None:
    run = {name for path in WORKFLOWS.glob("*.yml") for name in re.findall(r"nox -s (\S+)", path.read_text())}
    defined = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE))
    assert run <= defined
    assert run
