"""Where the planners of these tests keep their memory: in a file, and what matters most on each datastore."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.places import Place


@pytest.fixture
def datastore(request: pytest.FixtureRequest, place_on: Callable[[str], Place]) -> str:
    """The URL of a datastore that several pods open, each for itself; SQLite unless a test names others."""
    return place_on(getattr(request, "param", "sqlite")).url
