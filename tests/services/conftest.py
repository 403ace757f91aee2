"""What tests of a driver on a place of its own have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.places import Place
from tests.support.servers import Proxy


@pytest.fixture
def proxied(place_on: Callable[[str], Place]) -> Iterator[Callable[[str], tuple[Place, Proxy]]]:
    """What makes an empty place on a datastore, and a proxy before it that the place is reached through."""
    started: list[Proxy] = []

    def make(datastore: str) -> tuple[Place, Proxy]:
        place = place_on(datastore)
        started.append(Proxy(*place.address))
        started[-1].start()
        return place.by_way_of(started[-1].port), started[-1]

    yield make
    for proxy in started:
        proxy.stop()
