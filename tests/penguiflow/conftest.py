"""Where the planners of these tests keep their memory: each datastore in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.places import EACH, Place


@pytest.fixture(params=["sqlite", *EACH])
def datastore(request: pytest.FixtureRequest, place_on: Callable[[str], Place]) -> str:
    """The URL of a datastore that several pods open, each for itself."""
    return place_on(request.param).url
