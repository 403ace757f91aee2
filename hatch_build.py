"""Metadata that is made when the project is built: links, authors, and the readme for the package index.

`[tool.hatch.metadata.hooks.custom]` in pyproject.toml is the one place that says where the project lives.
SECURITY.md has the one address for reports. Both have placeholders until a person sets them. A build with the
variable `RELEASE_TAG`, as for a tag, fails while one is left, or while anything else is not ready.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT: Final = Path(__file__).parent
NAME: Final = "stm-backends"
PLACEHOLDER: Final = "PLACEHOLDER"
UNPUBLISHED: Final = "not on the package index yet"
"""The words by which the readme says that there is no release."""

_CODE: Final = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(!\[[^\]]*)?\]\((?!https?:|mailto:)([^)\s]+)\)")
_ADDRESS: Final = re.compile(r"<([^<>\s@]+@[^<>\s@]+)>")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in what `project.dynamic` names, here and in the projects under `distributions/`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the links, the authors and the readme. Raises `ValueError` if the tag is not ready."""
        settings = read_settings(ROOT)
        if tag := os.environ.get("RELEASE_TAG"):
            found = problems(ROOT, tag) if metadata["name"] == NAME else placeholders(ROOT)
            if found:
                raise ValueError(f"{tag} cannot be built:\n" + "\n".join(f"- {each}" for each in found))
        metadata["urls"] = urls(settings)
        metadata["authors"] = [{"name": settings["authors"], "email": address(ROOT)}]
        if "readme" in metadata["dynamic"]:
            text = (ROOT / "README.md").read_text("utf-8")
            shown = absolute(text, settings["repository"], f"v{metadata['version']}")
            metadata["readme"] = {"content-type": "text/markdown", "text": shown}


def read_settings(root: Path) -> dict[str, str]:
    """Return what pyproject.toml says of the project's places and authors."""
    hooks = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    return hooks["custom"]


def urls(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the links that the package index shows next to the readme."""
    repository = settings["repository"]
    return {
        "Documentation": settings["documentation"],
        "Source": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/security/policy",
    }


def address(root: Path) -> str:
    """Return the address for reports, which SECURITY.md has once."""
    (found,) = {*_ADDRESS.findall((root / "SECURITY.md").read_text("utf-8"))}
    return found


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page of the repository with links that work anywhere: to the files as of a tag.

    A link to a heading of the page itself leads to the repository, too: the index gives headings no anchors.
    """

    def replaced(match: re.Match[str]) -> str:
        picture, target = match[1], match[2]
        path = f"README.md{target}" if target.startswith("#") else target
        kind = "raw" if picture else "blob"
        return f"{picture or ''}]({repository}/{kind}/{tag}/{path})"

    # Every second part is code, which has no links.
    parts = _CODE.split(text)
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


def placeholders(root: Path) -> list[str]:
    """Return where a placeholder is left."""
    found = [f"pyproject.toml: {name}" for name, text in read_settings(root).items() if PLACEHOLDER in text]
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "README.md"):
        lines = (root / name).read_text("utf-8").splitlines()
        found += [f"{name}, line {number}" for number, line in enumerate(lines, 1) if PLACEHOLDER in line]
    return [f"{place} still has a placeholder" for place in found]


def problems(root: Path, tag: str) -> list[str]:
    """Return what keeps this tree from being released under a tag; nothing if it is ready."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    found = placeholders(root)
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and the version in pyproject.toml is {version}")
    if UNPUBLISHED in (root / "README.md").read_text("utf-8"):
        found.append(f"README.md says that it is {UNPUBLISHED}")
    is_final = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version) is not None
    if is_final and not _has_date(root, version):
        found.append(f"CHANGELOG.md has no section with a date: ## [{version}] - YYYY-MM-DD")
    return found


def _has_date(root: Path, version: str) -> bool:
    """Return whether the changelog has a section of a version, with the date of the release."""
    heading = rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$"
    found = re.search(heading, (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    try:
        return found is not None and date.fromisoformat(found[1]) >= date(2026, 1, 1)
    except ValueError:
        return False
