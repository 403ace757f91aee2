"""Every stand has the attributes that a run reads; no type checker looks at tests."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.chaos.__main__ import names, stand_of
from tests.chaos.stands import Stand


@pytest.mark.parametrize("name", names())
def test_a_stand_has_every_attribute_that_a_run_reads(name: str, tmp_path: Path) -> None:
    stand = stand_of(name, tmp_path)
    read = inspect.get_annotations(Stand)
    # Some are properties, which answer once the servers have started.
    assert not [one for one in read if not hasattr(stand, one) and not hasattr(type(stand), one)]
