"""What each release has stored is read by this version, with the same answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends.drivers import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings
from tests.frozen import stored

RELEASES = sorted(Path(__file__).parent.glob("release_*"))
pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def answers(release: Path) -> dict[str, object]:
    pytest.importorskip("cryptography", reason="the files have sealed records")
    return json.loads((release / "stored" / stored.ANSWERS).read_text("utf-8"))


@pytest.fixture
def drivers(release: Path, tmp_path: Path) -> dict[str, Callable[[], Driver]]:
    """How a driver is made on a separate store, by the name of its datastore."""
    store, file = MemoryStore(), tmp_path / "as_it_was.db"
    shutil.copy(release / "stored" / stored.FILE, file)
    return {
        "memory": lambda: MemoryDriver(store),
        "sqlite": lambda: SqliteDriver(SqliteSettings(path=str(tmp_path / "loaded.db"))),
        "file": lambda: SqliteDriver(SqliteSettings(path=str(file))),
    }


@pytest.mark.parametrize("datastore", ["memory", "sqlite", "file"])
async def test_what_was_stored_is_read_as_it_was(
    release: Path, datastore: str, drivers: dict[str, Callable[[], Driver]]
) -> None:
    expected, make = answers(release), drivers[datastore]
    if datastore != "file":
        driver = make()
        await driver.open()
        await stored.load((release / "stored" / stored.RECORDS).read_text("utf-8").splitlines(), driver)
        await driver.close()
    assert {**await stored.read(make()), **await stored.read_sealed(make())} == expected


def test_the_files_have_each_kind_of_record(release: Path) -> None:
    text = (release / "stored" / stored.RECORDS).read_text("utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    scopes = {record["scope"].rpartition(":")[2] for record in records}
    kept = ("memory", "blob", "page", "part", "card", "recent", "graph", "langchain", "users", "seal")
    assert {*kept} <= scopes
    headers = {
        part.partition(b"\n")[0].split()[1].decode()
        for record in records
        for text in (record["body"], *record["tail"])
        if text is not None and (part := stored.data_of(text)).startswith(b"stm/")
    }
    kinds = {"turn", "items", "body", "conversation", "page", "card", "state", "log", "user", "vertex"}
    assert kinds <= headers


async def test_what_this_version_stores_is_read_with_answers_of_the_same_shape(release: Path) -> None:
    expected = answers(release)
    await stored.write(store := MemoryStore())
    found = {**await stored.read(MemoryDriver(store)), **await stored.read_sealed(MemoryDriver(store))}
    assert found.keys() == expected.keys()
    # Without the times, which are those of the run.
    same = ("copy", "history", "before the edit")
    told = {name: [[*one[:3], *one[4:]] for one in found[name]] for name in same}
    kept = {name: [[*one[:3], *one[4:]] for one in expected[name]] for name in same}
    assert told == kept
