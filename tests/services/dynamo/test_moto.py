"""The driver on moto, which programs that use boto3 are tested with: it has limits of its own."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import ClassVar

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import ABSENT, Key
from stm_backends.errors import TooLarge
from stm_backends.testing import Bench, Datastore, DriverContract, open_at
from stm_backends.testing.memory_contract import config, turn
from stm_backends.types import MemoryKey
from stm_backends_dynamo.settings import LARGEST_ENTRY
from tests.services.dynamo.support import opened
from tests.services.dynamo.test_conformance import TestDynamoDriver as _TestDynamoDriver
from tests.support.dynamodb import PRETENDED, Place, fresh_table, with_table


def place_on(url: str) -> Place:
    """Return a new table's place on a server of moto."""
    return Place(
        endpoint_url=url,
        region="eu-west-1",
        table=fresh_table(),
        credentials=PRETENDED,
        version=f"moto {version('moto')}",
    )


@pytest.fixture(scope="module")
def place(moto):
    with with_table(place_on(moto)) as place:
        yield place


@pytest.mark.full
class TestDynamoDriverOnMoto(_TestDynamoDriver):
    """The contract is kept on moto, too."""

    quick: ClassVar = True  # what takes long is asked of DynamoDB Local

    opted_out: ClassVar = {
        "test_connections_that_died_unnoticed_are_replaced": "64 appends take one thread of moto about 2 s",
        "test_many_entries_can_be_rewritten_at_once": "moto answers 500 to an update of 250 elements",
        "test_a_record_of_many_entries_is_removed_as_a_whole": "its entries take moto over two minutes",
    }


@pytest.mark.parametrize(
    "check",
    [
        "test_the_largest_entry_fits_and_one_byte_more_is_too_large",
        "test_the_largest_body_fits_and_one_byte_more_is_too_large",
    ],
)
def test_what_the_driver_takes_by_default_fits_on_moto(place, check):
    opening = functools.partial(open_at, place.url, **place.credentials)
    getattr(DriverContract(), check)(Bench(Datastore(open=opening)))


async def test_an_item_that_the_server_refuses_for_its_size_is_too_large(place, key):
    async with opened(place, max_entry_bytes=LARGEST_ENTRY) as driver:
        for write in (
            lambda: driver.append(key, bytes(LARGEST_ENTRY), initial_version="v1", ttl=None),
            lambda: driver.replace(key, bytes(LARGEST_ENTRY), version="v1", expect=ABSENT, ttl=None),
        ):
            with pytest.raises(TooLarge) as caught:
                await write()
            assert (caught.value.what, caught.value.size) == ("entry", LARGEST_ENTRY)
        assert await driver.load(key) is None


async def test_a_turn_larger_than_an_item_is_stored_on_moto(place, key: Key):
    backend = Backend(await open_at(place.url, **place.credentials))
    async with backend:
        memory = backend.memory(MemoryKey("acme", key.scope, "chat"), config("truncation"))
        await memory.add_turn(turn(1, "x" * 600_000))
        assert [len(one.assistant_response) for one in await memory.turns()] == [600_000]
