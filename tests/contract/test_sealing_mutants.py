"""Each mutant of sealing is rejected by the test that is named beside it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from stm_backends.errors import StmError
from stm_backends.sealing.driver import SealedDriver
from tests.mutants import SEALS, Caught
from tests.support import sealed
from tests.unit import test_resealing, test_sealing

REJECTED = (AssertionError, pytest.fail.Exception, StmError)


async def run(caught: Caught) -> None:
    """Run one test as pytest does."""
    check: Any = getattr(test_sealing, caught.check, None) or getattr(test_resealing, caught.check)
    world = (
        {"world": await test_resealing.new_world()} if "world" in inspect.signature(check).parameters else {}
    )
    await check(**world, **caught.given)


@pytest.mark.parametrize(("kind", "caught"), SEALS.items(), ids=lambda one: getattr(one, "__name__", ""))
async def test_a_mutant_of_sealing_is_rejected_by_the_test_meant_for_it(
    kind: type[SealedDriver], caught: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(caught)
    monkeypatch.setattr(sealed, "kind", kind)
    with pytest.raises(REJECTED):
        await run(caught)
