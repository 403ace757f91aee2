"""The example drivers of a release, as they were, open and pass: drivers of others are like them."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from stm_backends.testing import Datastore, DriverContract
from tests.conformance.pages import ROOT, printed_files
from tests.conformance.running import command, pytest_in
from tests.support import mariadb

RELEASE = Path(__file__).parent / "release_0_1"
LMDB, MARIADB = "stm-backends-lmdb", "stm-backends-mariadb"


def installed(package: str, folder: Path) -> Path:
    """Return a copy of a package from which it can be imported, and is found, as if it was installed."""
    copy = folder / package
    shutil.copytree(RELEASE / package, copy)
    project = tomllib.loads((copy / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    metadata = copy / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entries = project["entry-points"]["stm_backends"].items()
    (metadata / "entry_points.txt").write_text(
        "[stm_backends]\n" + "".join(f"{name} = {module}\n" for name, module in entries)
    )
    return copy


def test_what_was_released_is_as_it_was() -> None:
    lines = (RELEASE / "SHA256SUMS").read_text().splitlines()
    files = (path for path in RELEASE.rglob("*") if path.suffix in (".py", ".toml"))
    found = {
        path.relative_to(RELEASE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert found == {name: digest for digest, name in map(str.split, lines)}


def test_until_a_release_is_published_its_folder_has_the_present_examples() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if re.search(r"^## \[0\.1\.0\] - \d", changes, re.MULTILINE):
        pytest.skip("it is published")
    strangers = (
        path
        for path in (ROOT / "tests/strangers").glob("*.py")
        if not path.name.startswith(("test_", "etcd_", "nats_"))  # packages, as the shipped drivers are
    )
    example = ROOT / "examples" / LMDB
    files = (path for path in example.rglob("*") if path.suffix in (".py", ".toml"))
    present = {
        **{f"strangers/{path.name}": path.read_text("utf-8") for path in strangers},
        **{f"{LMDB}/{path.relative_to(example).as_posix()}": path.read_text("utf-8") for path in files},
        **{
            f"{MARIADB}/{name}": text for name, text in printed_files("sql-server-driver.md", MARIADB).items()
        },
    }
    stale = [name for name, text in present.items() if (RELEASE / name).read_text("utf-8") != text]
    assert stale == [], "see the README beside this file"


def test_a_package_of_an_earlier_release_is_found_and_works(tmp_path: Path) -> None:
    pytest.importorskip("lmdb", reason="the dependency group `test` brings it")
    options = ("--url", f"lmdb:///{tmp_path}/data", "--quick", "--clause", "driver.fold")
    status, printed = command(tmp_path, "lmdb", *options, path=installed(LMDB, tmp_path))
    assert status == 0, printed
    assert "driver stm-backends-lmdb 0.1.0" in printed


@pytest.mark.full
def test_the_package_for_lmdb_passes_by_its_name_and_by_its_own_class(tmp_path: Path) -> None:
    pytest.importorskip("lmdb", reason="the dependency group `test` brings it")
    package = installed(LMDB, tmp_path)
    named = ("--stm-backend=lmdb", f"--stm-url=lmdb:///{tmp_path}/data", "--stm-quick")
    status, printed = pytest_in(tmp_path, *named, "--pyargs", "stm_backends.testing", path=package)
    assert status == 0, printed
    status, printed = pytest_in(tmp_path, "--stm-quick", package / "tests", path=package)
    assert status == 0, printed


@pytest.fixture(scope="module")
def mariadb_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mariadb.reached(tmp_path_factory.mktemp("mariadb")) as url:
        yield url


@pytest.mark.full
def test_the_package_for_mariadb_passes_by_its_name_and_by_its_own_class(
    tmp_path: Path, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(MARIADB, tmp_path)
    named = ("--stm-backend=mariadb", f"--stm-url={mariadb_url}", "--stm-create")
    quick = ("--stm-quick", "--pyargs", "stm_backends.testing")
    status, printed = pytest_in(tmp_path, *named, *quick, path=package)
    assert status == 0, printed
    monkeypatch.setenv("MARIADB_URL", mariadb_url)
    status, printed = pytest_in(tmp_path, "--stm-quick", package / "tests", path=package)
    assert status == 0, printed


@pytest.mark.full
class TestFrozenDuckDriver(DriverContract):
    quick = True

    @pytest.fixture
    def datastore(self, tmp_path: Path) -> Datastore:
        pytest.importorskip("duckdb", reason="the dependency group `strangers` brings it")
        from tests.frozen.release_0_1.strangers.duck import open_duck  # noqa: PLC0415 -- it needs that

        return Datastore(open=functools.partial(open_duck, f"duck:///{tmp_path}/file.duckdb?deadline_s=30"))


@pytest.mark.full
class TestFrozenRocksDriver(DriverContract):
    quick = True

    @pytest.fixture
    def datastore(self, tmp_path: Path) -> Datastore:
        pytest.importorskip("rocksdict", reason="the dependency group `strangers` brings it")
        from tests.frozen.release_0_1.strangers.rocks import open_rocks  # noqa: PLC0415 -- it needs that

        return Datastore(open=functools.partial(open_rocks, f"rocks:///{tmp_path}?deadline_s=30"))


@pytest.fixture(scope="module")
def objects() -> Iterator[str]:
    """The address of an object store."""
    pytest.importorskip("moto", reason="the dependency group `services` brings the object store")
    from tests.support.moto import moto_server  # noqa: PLC0415 -- it needs that, and takes a second

    with moto_server() as url:
        yield url.removeprefix("http://")


@pytest.mark.full
class TestFrozenObjectDriver(DriverContract):
    quick = True

    @pytest.fixture
    def datastore(self, objects: str, monkeypatch: pytest.MonkeyPatch) -> Datastore:
        from tests.frozen.release_0_1.strangers.objects import open_objects  # noqa: PLC0415 -- as above

        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "pretended")
        bucket = f"stm-{uuid.uuid4().hex}"

        def at(address: str, deadline_s: int = 10) -> str:
            return f"s3://{bucket}?endpoint_url={quote(f'http://{address}')}&deadline_s={deadline_s}"

        return Datastore(
            open=functools.partial(open_objects, at(objects)),
            address=objects,
            through=lambda address: open_objects(at(address, deadline_s=2)),
            tick=2.0,
        )
