"""Build the documentation site: `nox -s docs` builds it strictly, `nox -s docs -- serve` serves it.

The pages in `docs/` are copied to `build/docs`, together with generated pages and with the pages and source
files elsewhere in the repository that they link to. So every link works on the site as it does in the
repository. Zensical then builds `build/site`, as `zensical.toml` says.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import Final

import typer
from typer.cli import get_docs_for_click
from typer.core import TyperGroup
from typer.main import get_command

from stm_backends.cli.app import Later, app

ROOT: Final = Path(__file__).parents[1]
STAGED: Final = ROOT / "build" / "docs"

PAGES: Final = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "benchmarks/RESULTS.md": "explanation/benchmark-results.md",
    "benchmarks/SCALE.md": "explanation/scale.md",
    "benchmarks/COST.md": "explanation/cost.md",
    "benchmarks/SEALING.md": "explanation/sealing-cost.md",
    "benchmarks/TRANSCRIPTS.md": "explanation/transcript-cost.md",
    "benchmarks/READERS.md": "explanation/readers.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
    "benchmarks/PEERS.md": "explanation/peers.md",
    **{f"stm_backends_{name}/README.md": f"reference/{name}.md" for name in ("redis", "postgres")},
    **{f"stm_backends_{name}/README.md": f"reference/{name}.md" for name in ("mongo", "dynamo")},
    **{f"{name}.md": f"project/{name.lower()}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")},
    **{f"{name}.md": f"project/{name.lower()}.md" for name in ("SECURITY", "CODE_OF_CONDUCT", "RELEASING")},
}
"""Where pages from outside `docs/` appear on the site."""

MERMAID: Final = "@mermaid-js/tiny@11.17.2"
MERMAID_SHA256: Final = "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8"
"""The library that draws diagrams: one file, served by the site itself."""

_LINK: Final = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=[\s)])")
_FENCE: Final = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


class Site:
    """The pages of the site, as files in `build/docs`."""

    def __init__(self) -> None:
        self._written: set[Path] = set()

    def stage(self) -> None:
        """Write all pages, and remove those of an earlier build that are gone."""
        self._written.clear()
        self._write("reference/command-line.md", _command_line())
        for path in sorted((ROOT / "docs").rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                self._add(path)
        for source in PAGES:
            self._add(ROOT / source)
        for path in STAGED.rglob("*"):
            if path.is_file() and path not in self._written and path.name != "mermaid.js":
                path.unlink()

    def _add(self, path: Path) -> str:
        """Stage one file or folder of the repository; returns its place on the site."""
        place = _place(path)
        if STAGED / place in self._written:
            return place
        if path.suffix == ".md":
            text = path.read_text("utf-8")
        elif place.startswith("source/"):
            text = _listing(path) if path.is_dir() else _source(path)
        else:
            self._write(place, path.read_bytes())
            return place
        # Written before its links are followed, because pages link to each other.
        self._write(place, text)
        self._write(place, self._relinked(text, path, place))
        return place

    def _relinked(self, text: str, path: Path, place: str) -> str:
        folder = path if path.is_dir() else path.parent

        def target(match: re.Match[str]) -> str:
            linked = Path(os.path.normpath(folder / match[1]))
            if not linked.exists() or not linked.is_relative_to(ROOT):
                return match[0]
            to = self._add(linked)
            return os.path.relpath(to, PurePosixPath(place).parent) + (match[2] or "")

        parts: list[str] = []
        end = 0
        for fence in _FENCE.finditer(text):
            parts += [_LINK.sub(target, text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*parts, _LINK.sub(target, text[end:])])

    def _write(self, place: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        path = STAGED / place
        self._written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def _place(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/") and path.is_file():
        return name.removeprefix("docs/")
    if path.suffix in (".svg", ".png"):
        return f"images/{path.name}"
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _source(path: Path) -> str:
    language = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    text = path.read_text("utf-8")
    fence = "`" * 5
    return f"# {path.name}\n\n`{path.relative_to(ROOT).as_posix()}`\n\n{fence}{language}\n{text}{fence}\n"


def _listing(folder: Path) -> str:
    inside = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".toml", ".md", ".jsonl") and "__pycache__" not in path.parts
    )
    return f"# {folder.relative_to(ROOT).as_posix()}\n\n" + "".join(
        f"- [{name}]({name})\n" for name in inside
    )


def _command_line() -> str:
    command = get_command(app)
    assert isinstance(command, TyperGroup), "an application with several commands"
    # Until they are loaded, the commands are known by their first sentences alone.
    listed = [each for each in command.commands.values() if isinstance(each, Later)]
    command.commands = {each.name or "": each.loaded for each in listed}
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="stm-backends")
    # Typer abbreviates the sentences in its list and links nothing.
    for name, each in command.commands.items():
        sentence = each.get_short_help_str(1_000)
        line = f"* [`{name}`](#stm-backends-{name}): {sentence}"
        text = re.sub(rf"^\* `{name}`: .*$", line.replace("\\", r"\\"), text, flags=re.MULTILINE)
    return text.replace("# `stm-backends`", "# Command line", 1)


def fetch_mermaid() -> None:
    """Put the library that draws diagrams beside the pages, unless it is there already."""
    path = STAGED / "assets" / "mermaid.js"
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == MERMAID_SHA256:
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.stderr.write("npm is not installed: the reader's browser will fetch Mermaid from unpkg.com\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([npm, "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as files:
            member = files.extractfile("package/dist/mermaid.tiny.js")
            data = b"" if member is None else member.read()
    if hashlib.sha256(data).hexdigest() != MERMAID_SHA256:
        raise SystemExit(f"{MERMAID} is not the file that was pinned")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main() -> int:
    """Build the site, or serve it and follow changes."""
    site = Site()
    site.stage()
    fetch_mermaid()
    zensical = [sys.executable, "-m", "zensical"]
    if sys.argv[1:] != ["serve"]:
        return subprocess.run([*zensical, "build", "--clean", "--strict"], cwd=ROOT, check=False).returncode
    server = subprocess.Popen([*zensical, "serve"], cwd=ROOT)
    try:
        while server.poll() is None:
            time.sleep(1)
            site.stage()
    except KeyboardInterrupt:
        server.terminate()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
