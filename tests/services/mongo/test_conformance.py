"""The MongoDB driver keeps the contract: on a replica set, on a single server, and on Motor."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
from pymongo import AsyncMongoClient

from stm_backends.testing import (
    Datastore,
    DriverContract,
    GraphContract,
    HandedIn,
    PodsContract,
    StoreContract,
    graphs_on,
    memories_on,
    open_at,
)
from stm_backends.testing.stores import stores_on
from stm_backends_mongo import MongoDriver
from tests.services.mongo.support import COUNTER, open_on_motor
from tests.support import mongod
from tests.support.contract import deadline_of, reached, slow_checks

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}

CLOSED_FOR_GOOD = "the client that these tests hand in is closed for good with its driver"


@pytest.mark.full
class TestMongoDriver(DriverContract):
    @pytest.fixture
    def datastore(self, request, place, proxy, proxied, settings_of):
        past = place.past

        async def handed_in():
            client = AsyncMongoClient(place.url)

            async def is_open():
                return (await client.admin.command("ping"))["ok"] == 1

            driver = MongoDriver(settings_of(place, deadline_s=5.0), client=client)
            await driver.open()
            return HandedIn(driver=driver, is_open=is_open, close=client.close)

        return Datastore(
            open=functools.partial(open_at, proxied.options(deadline_s=deadline_of(request), **SMALL)),
            damage=past.damage,
            cut=past.cut,
            stored=past.stored,
            peek=past.peek,
            **reached(
                past.client.primary or past.client.address,
                lambda port: mongod.in_database(place.url, place.database, port=port),
                **SMALL,
            ),
            outage=proxy.cut,
            handed_in=handed_in,
            round_trips=lambda: COUNTER.count,
            histories=8,
            server=f"{past.server}, a replica set",
        )


@pytest.mark.full
class TestMongoDriverAsUsersHaveIt(DriverContract):
    """The whole replica set and the default settings."""

    @pytest.fixture
    def datastore(self, place):
        return Datastore(open=functools.partial(open_at, place.url), tick=0.3, histories=3)


@pytest.mark.full
class TestMongoDriverOnMotorAndASingleServer(DriverContract):
    opted_out: ClassVar = {
        **slow_checks("asked of the same driver on PyMongo above"),
        "test_a_driver_whose_event_loop_has_ended_can_be_opened_again": (
            "a client that was handed in keeps the event loop that it was made in"
        ),
        "test_an_opening_that_is_cancelled_does_not_close_what_another_opens": CLOSED_FOR_GOOD,
        "test_a_driver_that_is_opened_while_it_closes_is_open": CLOSED_FOR_GOOD,
    }

    @pytest.fixture
    def datastore(self, single, single_place):
        return Datastore(
            open=functools.partial(
                open_on_motor, f"mongodb://{single.address}", database=single_place.database, **SMALL
            ),
            histories=3,
        )


@pytest.mark.full
class TestPodsOnMongo(PodsContract):
    @pytest.fixture
    def memories(self, request, proxy, proxied):
        deadline_s = deadline_of(request)
        datastore = Datastore(
            open=functools.partial(open_at, proxied.options(deadline_s=deadline_s)), outage=proxy.cut
        )
        return memories_on(datastore, deadline_s=deadline_s)


@pytest.mark.full
class TestStoresOnMongo(StoreContract):
    @pytest.fixture
    def stores(self, request, proxy, proxied):
        return stores_on(
            Datastore(
                open=functools.partial(open_at, proxied.options(deadline_s=deadline_of(request))),
                outage=proxy.cut,
            )
        )


@pytest.mark.full
class TestGraphsOnMongo(GraphContract):
    @pytest.fixture
    def graphs(self, request, proxy, proxied):
        return graphs_on(
            Datastore(
                open=functools.partial(open_at, proxied.options(deadline_s=deadline_of(request))),
                outage=proxy.cut,
            )
        )
