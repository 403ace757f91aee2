"""Where the servers come from: one of the user's own, or one that the tests start, or an honest refusal."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def unobtainable() -> Callable[[str], None]:
    """What a fixture calls whose server cannot be had: skips, and with `CI=true` fails."""

    def refuse(reason: str) -> None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"{reason}; with CI=true nothing is skipped", pytrace=False)
        pytest.skip(reason)

    return refuse
