"""A release is refused while anything is left to do, and the readme reads on the package index.

Run by `nox -s packaging`, which brings hatchling. With the variable `RELEASE_TAG`, this tree has to be ready.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

hatch_build = pytest.importorskip("hatch_build", reason="`nox -s packaging` brings hatchling")

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")
REPOSITORY = "https://example.com/us/stm-backends"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def edit(path: Path, pattern: str, text: str) -> None:
    """Replace each match of a pattern in a file."""
    path.write_text(re.sub(pattern, text, path.read_text("utf-8"), flags=re.MULTILINE), "utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that are judged, made ready for the release of 0.1.0."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    edit(tmp_path / "pyproject.toml", "PLACEHOLDER", "us")
    edit(tmp_path / "pyproject.toml", '^version = ".*"$', 'version = "0.1.0"')
    edit(tmp_path / "SECURITY.md", "PLACEHOLDER@[a-z.]+", "us@example.com")
    edit(tmp_path / "README.md", hatch_build.UNPUBLISHED, "on the package index")
    edit(tmp_path / "CHANGELOG.md", r"^## \[0\.1\.0\].*$", "## [0.1.0] - 2027-01-31")
    return tmp_path


def test_a_tree_in_which_all_is_set_is_ready(tree: Path) -> None:
    assert hatch_build.problems(tree, "v0.1.0") == []


@pytest.mark.parametrize("tag", ["v0.1.1", "0.1.0", "v0.1.0a1"])
def test_a_tag_that_is_not_the_version_is_refused(tree: Path, tag: str) -> None:
    assert hatch_build.problems(tree, tag) == [
        f"the tag is {tag}, and the version in pyproject.toml is 0.1.0"
    ]


@pytest.mark.parametrize("name", ["pyproject.toml", "SECURITY.md", "CODE_OF_CONDUCT.md", "README.md"])
def test_a_placeholder_that_is_left_is_refused(tree: Path, name: str) -> None:
    if name == "pyproject.toml":
        edit(tree / name, "^repository = .*$", 'repository = "https://example.com/PLACEHOLDER/x"')
    else:
        edit(tree / name, r"\Z", "\nPLACEHOLDER\n")
    (found,) = hatch_build.problems(tree, "v0.1.0")
    assert found.startswith(name)
    assert found.endswith(" still has a placeholder")


def test_a_readme_that_knows_of_no_release_is_refused(tree: Path) -> None:
    edit(tree / "README.md", r"\Z", f"\nIt is {hatch_build.UNPUBLISHED}.\n")
    assert hatch_build.problems(tree, "v0.1.0") == [f"README.md says that it is {hatch_build.UNPUBLISHED}"]


@pytest.mark.parametrize("heading", ["", "## [0.1.0] - DATE", "## [0.1.0]", "## [0.1.0] - 2027-02-31"])
def test_a_changelog_without_a_date_is_refused(tree: Path, heading: str) -> None:
    edit(tree / "CHANGELOG.md", r"^## \[0\.1\.0\].*$", heading)
    (found,) = hatch_build.problems(tree, "v0.1.0")
    assert found == "CHANGELOG.md has no section with a date: ## [0.1.0] - YYYY-MM-DD"


def test_a_pre_release_needs_no_section_of_the_changelog(tree: Path) -> None:
    edit(tree / "CHANGELOG.md", r"^## \[0\.1\.0\].*$", "## [Unreleased]")
    edit(tree / "pyproject.toml", '^version = ".*"$', 'version = "0.1.0a1"')
    assert hatch_build.problems(tree, "v0.1.0a1") == []


@pytest.mark.skipif("RELEASE_TAG" not in os.environ, reason="not a build for a tag")
def test_this_tree_is_ready_for_its_tag() -> None:
    assert hatch_build.problems(ROOT, os.environ["RELEASE_TAG"]) == []


def test_the_address_for_reports_stands_in_one_place() -> None:
    address = hatch_build.address(ROOT)
    files = [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    with_it = [path.name for path in files if address in path.read_text("utf-8")]
    assert with_it == ["SECURITY.md"]
    assert "(SECURITY.md" in (ROOT / "CODE_OF_CONDUCT.md").read_text("utf-8")


def test_a_page_has_links_that_work_anywhere() -> None:
    page = """
[one](docs/one.md), [`two`](docs/two.md#part), [three](#part), [four](https://example.com/), ![five](five.svg)
`[six](six.md)`

```md
[seven](seven.md)
```
"""
    assert hatch_build.absolute(page, REPOSITORY, "v1.0.0").split() == [
        f"[one]({REPOSITORY}/blob/v1.0.0/docs/one.md),",
        f"[`two`]({REPOSITORY}/blob/v1.0.0/docs/two.md#part),",
        f"[three]({REPOSITORY}/blob/v1.0.0/README.md#part),",
        "[four](https://example.com/),",
        f"![five]({REPOSITORY}/raw/v1.0.0/five.svg)",
        "`[six](six.md)`",
        *("```md", "[seven](seven.md)", "```"),
    ]


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file() -> None:
    text = hatch_build.absolute((ROOT / "README.md").read_text("utf-8"), REPOSITORY, "v0.1.0")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert [target for target in targets if not target.startswith("https://")] == []
    ours = [re.fullmatch(rf"{REPOSITORY}/(raw|blob)/v0\.1\.0/([^#]+)(#.*)?", target) for target in targets]
    paths = [match[2] for match in ours if match]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    pictures = {match[2] for match in ours if match and match[1] == "raw"}
    assert {Path(path).suffix for path in pictures} == {".svg"}


NAMES = ("redis", "postgres", "mongo", "dynamo")


@pytest.mark.parametrize("name", NAMES)
def test_each_further_name_installs_the_library_with_its_extra(name: str) -> None:
    folder = ROOT / "distributions" / f"stm-backends-{name}"
    file: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    project, hatch = file["project"], file["tool"]["hatch"]
    assert project["name"] == folder.name
    assert project["dependencies"] == [f"stm-backends[{name}]>=0.1.0a1"]
    assert project["requires-python"] == PROJECT["requires-python"]
    assert (folder / hatch["metadata"]["hooks"]["custom"]["path"]).resolve() == ROOT / "hatch_build.py"
    assert hatch["build"]["targets"]["wheel"]["bypass-selection"]


def test_there_are_no_other_names() -> None:
    folders = {path.parent.name for path in (ROOT / "distributions").glob("*/pyproject.toml")}
    assert folders == {f"stm-backends-{name}" for name in NAMES}
