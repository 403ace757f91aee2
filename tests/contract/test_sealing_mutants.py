"""Each mutant of sealing is rejected by the test that is named beside it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.errors import StmError
from stm_backends.sealing import driver
from stm_backends.sealing.driver import SealedDriver
from tests.contract import test_wrong_keys
from tests.mutants import SEALS, Caught
from tests.support import sealed
from tests.unit import test_erased_keys, test_resealing, test_sealing

TESTS = (test_sealing, test_resealing, test_erased_keys, test_wrong_keys)
REJECTED = (AssertionError, pytest.fail.Exception, StmError)


async def run(caught: Caught, folder: Path) -> None:
    """Run one test as pytest does."""
    (check,) = [getattr(module, caught.check) for module in TESTS if hasattr(module, caught.check)]
    fixtures: dict[str, Any] = {
        "url": f"sqlite:///{folder}/data.db",
        "stores": lambda name: open_backend(f"sqlite:///{folder}/{name}.db"),
    }
    if "world" in (wanted := inspect.signature(check).parameters):
        fixtures["world"] = await test_resealing.new_world()
    await check(**{name: fixtures[name] for name in fixtures.keys() & wanted}, **caught.given)


@pytest.mark.parametrize(("kind", "caught"), SEALS.items(), ids=lambda one: getattr(one, "__name__", ""))
async def test_a_mutant_of_sealing_is_rejected_by_the_test_meant_for_it(
    kind: type[SealedDriver], caught: Caught, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / "right", tmp_path / "mutant"]
    for folder in folders:
        folder.mkdir()
    await run(caught, folders[0])
    monkeypatch.setattr(sealed, "kind", kind)
    monkeypatch.setattr(driver, "SealedDriver", kind)
    with pytest.raises(REJECTED):
        await run(caught, folders[1])
