"""Proxies and certificates for the tests of all drivers."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from stm_backends.testing.faults import Proxy
from tests.support.places import Place


@pytest.fixture
def proxied(place_on: Callable[[str], Place]) -> Iterator[Callable[[str], tuple[Place, Proxy]]]:
    """What makes an empty place on a datastore, and a proxy before it that the place is reached through."""
    started: list[Proxy] = []

    def make(datastore: str) -> tuple[Place, Proxy]:
        place = place_on(datastore)
        started.append(Proxy("{}:{}".format(*place.address)))
        started[-1].start()
        return place.by_way_of(started[-1].port), started[-1]

    yield make
    for proxy in started:
        proxy.stop()


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """The certificate authority of the tests."""
    return trustme.CA()


@pytest.fixture(scope="session")
def server_tls(ca: trustme.CA) -> ssl.SSLContext:
    """What a server needs for TLS: a certificate of that authority, for `localhost` and for no address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture(scope="session")
def authority(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of that authority, for clients that trust it."""
    return _written(ca, tmp_path_factory)


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of another authority, which has signed nothing."""
    return _written(trustme.CA(), tmp_path_factory)


def _written(authority: trustme.CA, folder: pytest.TempPathFactory) -> Path:
    path = folder.mktemp("authority") / "authority.pem"
    authority.cert_pem.write_to_path(path)
    return path
