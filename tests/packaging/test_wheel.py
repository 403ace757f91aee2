"""What is shipped: exactly what belongs in it, and usable with nothing else installed.

Run by `nox -s packaging`, which brings `build`; the wheel is built from the sdist, as an installer would.
With the variable `DIST`, as before a release, the files of that folder are judged, and nothing is built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.metadata import Metadata

pytest.importorskip("build", reason="`nox -s packaging` brings what these tests build with")
hatch_build = pytest.importorskip("hatch_build", reason="`nox -s packaging` brings hatchling")

ROOT = Path(__file__).parents[2]
DRIVERS = ("redis", "dynamo", "mongo", "postgres")
FRAMEWORKS = (
    *("openai", "openai-agents", "langchain", "claude-agent-sdk", "pydantic-ai", "google-adk"),
    *("langgraph", "agent-framework", "strands", "llama-index"),
)
EXTRAS = (
    *DRIVERS,
    "dynamo-boto3",
    "mongo-motor",
    *FRAMEWORKS,
    "otel",
    "encryption",
    "cli",
    "inspect",
    "conformance",
    "all",
)
UV = (sys.executable, "-m", "uv", "pip")
INSTALL = (*UV, "install", "--quiet")
PACKAGES = {"stm_backends", *(f"stm_backends_{driver}" for driver in DRIVERS)}


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command as on a machine where nobody has set Python up in a special way."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("DIST"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(contents: dict[str, bytes]) -> Metadata:
    """Every field validated, as the package index does on an upload."""
    (name,) = (name for name in contents if name.endswith(".dist-info/METADATA"))
    return Metadata.from_email(contents[name], validate=True)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the wheel, what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    executable = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(*INSTALL, "--python", executable, wheel, cwd=folder)
    return executable


def test_the_sdist_builds_a_universal_wheel(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_the_packages_as_they_stand_in_the_tree(contents: dict[str, bytes]) -> None:
    shipped = {name for name in contents if ".dist-info/" not in name}
    in_the_tree = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name.split("/")[0] for name in shipped} == PACKAGES
    assert shipped == in_the_tree
    # So the tests of this tree are tests of the wheel.
    assert [name for name in shipped if contents[name] != (ROOT / name).read_bytes()] == []


def test_every_package_is_marked_as_typed(contents: dict[str, bytes]) -> None:
    assert {name for name in contents if name.endswith("/py.typed")} == {
        f"{name}/py.typed" for name in PACKAGES
    }


def test_the_sdist_holds_what_its_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert PACKAGES | {"tests", "noxfile.py", "pyproject.toml", "README.md", "LICENSE"} <= top
    assert not {".git", ".nox", ".ci", "dist"} & top


def test_the_metadata_carries_the_licence_and_the_readme(
    metadata: Metadata, contents: dict[str, bytes]
) -> None:
    assert metadata.name == "stm-backends"
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    settings, readme = hatch_build.read_settings(ROOT), (ROOT / "README.md").read_text("utf-8")
    shown = hatch_build.absolute(readme, settings["repository"], f"v{metadata.version}")
    assert metadata.description == shown
    (licence,) = (name for name in contents if name.endswith(".dist-info/licenses/LICENSE"))
    assert contents[licence] == (ROOT / "LICENSE").read_bytes()


def test_the_metadata_has_the_links_and_the_authors_that_are_set_in_one_place(metadata: Metadata) -> None:
    settings = hatch_build.read_settings(ROOT)
    assert metadata.project_urls == hatch_build.urls(settings)
    assert metadata.author_email == f"{settings['authors']} <{hatch_build.address(ROOT)}>"


def test_pluggy_is_the_only_requirement_without_an_extra(metadata: Metadata) -> None:
    assert {each.name for each in metadata.requires_dist or () if each.marker is None} == {"pluggy"}


def test_the_extras_are_those_of_the_drivers_the_frameworks_and_the_tools(metadata: Metadata) -> None:
    assert set(metadata.provides_extra or ()) == {*EXTRAS}


@pytest.mark.parametrize(
    ("requirement", "vulnerable"),
    [
        # CVE-2025-68664 (fixed in 1.2.5, and in 0.3.81), CVE-2026-44843 (1.3.3).
        ("langchain-core", ("0.3.80", "0.3.81", "1.2.4", "1.3.2")),
        # CVE-2025-69223 (3.13.3), CVE-2026-47265 (3.14.0), PYSEC-2026-4392 (3.14.4).
        ("aiohttp", ("3.13.2", "3.13.5", "3.14.3")),
    ],
)
def test_versions_with_known_vulnerabilities_are_not_accepted(
    metadata: Metadata, requirement: str, vulnerable: tuple[str, ...]
) -> None:
    found = [each for each in metadata.requires_dist or () if each.name == requirement]
    assert found
    for each in found:
        assert not [*each.specifier.filter(vulnerable)]


def test_the_entry_points_name_the_backends_and_the_command(contents: dict[str, bytes]) -> None:
    (name,) = (name for name in contents if name.endswith(".dist-info/entry_points.txt"))
    parsed = ConfigParser(delimiters="=")
    parsed.read_string(contents[name].decode())
    assert {section: dict(parsed[section]) for section in parsed.sections()} == {
        "console_scripts": {"stm-backends": "stm_backends.cli:main"},
        "stm_backends": {
            "memory": "stm_backends.drivers.in_memory",
            "sqlite": "stm_backends.drivers.sqlite.plugin",
            **{driver: f"stm_backends_{driver}.plugin" for driver in DRIVERS},
        },
    }


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_can_be_installed(extra: str, wheel: Path, python: Path, tmp_path: Path) -> None:
    run(*INSTALL, "--dry-run", "--python", python, f"{wheel}[{extra}]", cwd=tmp_path)


def test_installed_alone_it_brings_pluggy_and_nothing_else(python: Path, tmp_path: Path) -> None:
    listed = run(*UV, "list", "--python", python, "--format", "json", cwd=tmp_path).stdout
    assert {each["name"] for each in json.loads(listed)} == {"pluggy", "stm-backends"}


def test_installed_alone_every_module_imports(python: Path, tmp_path: Path) -> None:
    """All but what extras are for: command line, page, telemetry, the suite, frameworks, encryption."""
    program = """
import importlib, pkgutil, stm_backends
sealing = tuple(f"sealing.{part}" for part in ("cipher", "driver", "marks", "stale", "wrapping"))
page = ("inspect.app", "inspect.serving")
extras = tuple(
    f"stm_backends.{part}" for part in ("cli", "testing", "telemetry", "integrations.", *page, *sealing)
)
for module in pkgutil.walk_packages(stm_backends.__path__, "stm_backends."):
    if not module.name.startswith(extras):
        importlib.import_module(module.name)
"""
    run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path)


def test_installed_alone_sealing_names_its_extra(python: Path, tmp_path: Path) -> None:
    program = """
from stm_backends import Sealing, StaticKeys, open_backend
open_backend("memory", sealing=Sealing(StaticKeys({"k1": bytes(32)}, primary="k1")))
"""
    done = run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("stm_backends.errors.MissingExtra")
    assert "stm-backends[encryption]" in last


@pytest.mark.parametrize("driver", DRIVERS)
def test_installed_alone_a_driver_shows_its_schema_and_names_its_extra(
    driver: str, python: Path, tmp_path: Path
) -> None:
    """Its package, its settings and what it would set up need no client library; opening it does."""
    program = f"""
import stm_backends, stm_backends_{driver}.settings, stm_backends_{driver}.statements
from stm_backends.drivers.plugins import schema
assert schema({driver!r})
stm_backends.open_backend({driver!r})
"""
    done = run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("stm_backends.errors.MissingExtra")
    assert f"stm-backends[{driver}], which is not installed: pip install " in last


def test_with_boto3_alone_the_dynamo_driver_works_on_a_client(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "boto3", cwd=tmp_path)
    executable = tmp_path / "boto3" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(*INSTALL, "--python", executable, f"{wheel}[dynamo-boto3]", cwd=tmp_path)
    program = """
import asyncio, boto3, stm_backends
from botocore.config import Config
client = boto3.client(
    "dynamodb", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b",
    endpoint_url="http://127.0.0.1:1", config=Config(retries={"total_max_attempts": 1}),
)
async def main():
    async with stm_backends.open_backend("dynamo", client=client) as backend:
        await backend.ping()
asyncio.run(main())
"""
    done = run(executable, "-I", "-W", "error", "-c", program, cwd=tmp_path, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("stm_backends.errors.Unavailable: dynamo.load: no connection could be made")


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_a_module_without_its_extra_says_how_to_install_it(extra: str, python: Path, tmp_path: Path) -> None:
    program = f"import stm_backends.integrations.{extra.replace('-', '_')}"
    done = run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path, check=False)
    assert f"stm-backends[{extra}], which is not installed: pip install " in done.stderr


def test_importing_the_core_imports_no_driver_package(python: Path, tmp_path: Path) -> None:
    program = "import stm_backends, sys; print([m for m in sys.modules if m.startswith('stm_backends_')])"
    assert run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path).stdout.strip() == "[]"


def test_installed_alone_the_built_in_backends_open(python: Path, tmp_path: Path) -> None:
    program = """
import asyncio, stm_backends
async def main():
    for url in ("memory://", "sqlite:///alone.db"):
        async with stm_backends.open_backend(url) as backend:
            await backend.state_store.save_memory_state("a:b:c", {"x": 1})
            assert await backend.state_store.load_memory_state("a:b:c") == {"x": 1}
asyncio.run(main())
"""
    run(python, "-I", "-W", "error", "-c", program, cwd=tmp_path)


def test_the_command_without_its_extra_says_how_to_install_it(python: Path, tmp_path: Path) -> None:
    done = run(python.with_name("stm-backends"), "drivers", cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert 'pip install "rich>=' in done.stderr
    assert "Traceback" not in done.stderr
