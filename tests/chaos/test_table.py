"""The page's tables are those that the published runs make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import table

CONVERSATIONS = {"pods": 12, "conversations": 40, "conversations not judged": 2}


def result(**more: Any) -> dict[str, Any]:
    return {
        "stand": "redis",
        "seed": 7,
        "library": "0.2.0 (abc1234)",
        "mutant": "",
        "versions": {"python": "3.13.1", "redis-server": "8.2.3"},
        "minutes": 60.4,
        "faults": {"pod-kill": 1_100, "network-cut": 40, "server-kill": 2},
        "violations": [],
        "figures": {"turns acknowledged": 5_000, "turns unknown": 9, "erasures ok": 3, **CONVERSATIONS},
        "pods": {
            "p0.1": {
                "seconds": 3_600,
                "memory": [48e6, 51e6],
                "tasks": [5, 5],
                "connections": [3, 4],
                "descriptors": [12, 13],
            }
        },
        **more,
    }


def files(folder: Path, *results: dict[str, Any]) -> list[Path]:
    found: list[Path] = []
    for number, one in enumerate(results):
        found.append(folder / f"{number}.json")
        found[-1].write_text(json.dumps(one), encoding="utf-8")
    return found


def test_the_page_is_written_from_the_published_runs() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    runs = table.published()
    assert table.page(page, runs) == page, "python -m tests.chaos.table writes it"
    assert table.stored(runs) == table.PUBLISHED.read_text(encoding="utf-8")


def test_runs_of_one_datastore_are_added_up(tmp_path: Path) -> None:
    other = result(seed=3, minutes=10, violations=["lost in c0-1: ..."], pods={})
    written = table.tables(table.load(files(tmp_path, result(), other, result(stand="sqlite"))))
    assert "| redis | 70 | 2,284 | 1 | 10,000 | - | 18 | - | - | - | - | 6 | 80 | 4 | - |" in written
    assert "| **all** | 131 | 3,426 | 1 | 15,000 | - | 27 | - | - | - | - | 9 | 120 | 6 | - |" in written
    assert "| redis | 60 | 48 → 51 | 5 → 5 | 3 → 4 | 12 → 13 | 1 of 24 |" in written
    assert "| **all** | - | - | - | - | - | 2 of 36 |" in written
    assert "| pod | 3,300 | kill 3,300 |" in written
    assert "| servers | 6 | server-kill 6 |" in written


def test_what_a_run_did_not_count_is_no_number(tmp_path: Path) -> None:
    counted = result(
        seed=8, stand="mongo", figures={**result()["figures"], "pairs of leases judged": 70, "reads ok": 0}
    )
    written = table.tables(table.load(files(tmp_path, result(), counted)))
    assert "| redis | - | - | - | - | - | - |" in written
    assert "| mongo | - | - | - | 70 | - | - |" in written
    assert "| **all** | - | - | - | 70 | - | - |" in written


def test_administration_is_told_from_faults(tmp_path: Path) -> None:
    done = {"people-copy": 3, "people-erase": 4, "command-copy": 5, "command-purge": 6, "command-reseal": 7}
    written = table.tables(table.load(files(tmp_path, result(faults={"pod-kill": 1_000, **done}))))
    kinds = "command-copy 5, command-purge 6, command-reseal 7, copy 3, erase 4"
    assert f"| administration | 25 | {kinds} |" in written
    assert "\n1,025 disturbances, of which 1,000 are faults and 25 administrative operations" in written


def test_kinds_say_how_many_of_them_hit_something(tmp_path: Path) -> None:
    of = {"pod-kill": 900, "network-cut": 40, "server-kill": 2}
    hit = result(hits={"pod-kill": 700, "network-cut": 9, "server-kill": 2}, perhaps=of | {"server-kill": 0})
    hit["faults"] = of | {"pod-kill": 1_000}
    written = table.tables(table.load(files(tmp_path, hit)))
    assert "| pod | 1,000 | kill 1,000 (700 hit, 900 perhaps) |" in written
    assert "| servers | 2 | server-kill 2 (2 hit) |" in written
    written = table.tables(table.load(files(tmp_path, hit, result(seed=8))))
    assert "| pod | 2,100 | kill 2,100 (700 of 1,000 hit, 900 perhaps) |" in written


def test_what_kills_and_pauses_struck_is_added_up(tmp_path: Path) -> None:
    first = result(struck={"pod-kill": {"add": 3, "nothing": 1}, "pod-pause": {"summarize": 1_000}})
    second = result(seed=8, struck={"pod-kill": {"add": 1}})
    written = table.tables(table.load(files(tmp_path, first, second, result(seed=9))))
    assert "| kill | add 4, nothing 1 |\n| pause | summarize 1,000 |" in written
    assert "struck" not in table.tables([result()])


def test_sealed_pods_and_those_of_two_versions_have_rows_of_their_own(tmp_path: Path) -> None:
    several = result(), result(sealed=True), result(other="abc1234")
    written = table.tables(table.load(files(tmp_path, *several)))
    for name in ("redis", "redis, sealed", "redis, with pods of abc1234", "**all**"):
        assert f"\n| {name} | " in written


@pytest.mark.parametrize("change", [{"faults": {}}, {"faults": {"pod-kill": 0}}, {"mutant": "two-leases"}])
def test_a_run_that_shows_nothing_is_refused(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = files(tmp_path, result(**change))
    assert table.main([str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([str(tmp_path / "results.json")]) == 2
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'results.json'} cannot be read: No such file or directory\n"


def test_the_same_run_is_not_counted_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        table.load(files(tmp_path, result(), result()))


def test_runs_are_added_to_those_that_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PUBLISHED", tmp_path / "published.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    table.PAGE.write_text(f"before\n{table.BEGIN}old\n{table.END}after\n", encoding="utf-8")
    first, second = files(tmp_path, result(), result(seed=8))
    assert table.main([str(first)]) == 0
    assert table.main(["--add", str(second)]) == 0
    assert table.main(["--add", str(second)]) == 2
    assert table.main([]) == 0
    assert [run["seed"] for run in table.published()] == [7, 8]
    page = table.PAGE.read_text(encoding="utf-8")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
