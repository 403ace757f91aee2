"""The library's state store on a driver, in the form that the store checks need."""

from __future__ import annotations

from typing import Any

from stm_backends.backend import Backend
from stm_backends.drivers.contract import KEEP
from stm_backends.records.keys import blob_key
from stm_backends.testing.pods import FUTURE
from stm_backends.testing.store_contract import Stores
from stm_backends.testing.workbench.drivers import Datastore


def stores_on(datastore: Datastore) -> Stores:
    """Return the state stores on a datastore's driver, each with its own driver instance."""
    opened: dict[int, Backend] = {}

    async def open_one() -> Any:
        backend = Backend(await datastore.open())
        await backend.open()
        opened[id(backend.state_store)] = backend
        return backend.state_store

    async def close(store: Any) -> None:
        await opened.pop(id(store)).close()

    async def remove(key: str) -> object:
        store = await open_one()
        try:
            return await store.delete_memory_state(key)
        except ValueError:
            # A refused key has no record.
            return False
        finally:
            await close(store)

    async def damage(key: str) -> None:
        driver = await datastore.open()
        try:
            record = await driver.load(blob_key(key))
            assert record is not None, "the record to damage must exist"
            await driver.replace(blob_key(key), FUTURE, version="v", expect=record.version, ttl=KEEP)
        finally:
            await driver.close()

    return Stores(open=open_one, close=close, remove=remove, outage=datastore.outage, damage=damage)
