"""Ways to MongoDB past the driver, and what counts the driver's commands."""

from __future__ import annotations

from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import MongoClient, monitoring

from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends_mongo import MongoDriver, MongoSettings


class Counter(monitoring.CommandListener):
    """Counts the commands that this process sends to servers."""

    count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.count += event.command_name not in ("endSessions", "hello")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...
    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


COUNTER = Counter()
monitoring.register(COUNTER)


class OnMotor(MongoDriver):
    """A driver on a Motor client, which it closes because the suite does not."""

    async def close(self) -> None:
        await super().close()
        assert self._given is not None
        self._given.close()


async def open_on_motor(url: str, **settings: Any) -> Driver:
    """Return an open driver on a Motor client that was handed in."""
    client: Any = AsyncIOMotorClient(url)
    driver = OnMotor(MongoSettings.from_options(**settings), client=client)
    await driver.open()
    return driver


class Past:
    """The datastore past the driver."""

    def __init__(self, client: MongoClient[dict[str, Any]], database: str) -> None:
        self.client = client
        self.records = client[database]["stm_records"]

    @property
    def server(self) -> str:
        """Say which server this is."""
        return f"MongoDB {self.client.server_info()['version']}"

    async def damage(self, key: Key) -> None:
        """Lose the last entry of a record, as no driver would."""
        self.records.update_one({"_id": key._asdict()}, {"$pop": {"tail": 1}})

    async def cut(self, key: Key) -> None:
        """Lose the end of the last entry of a record."""
        found = self.records.find_one({"_id": key._asdict()}) or {}
        *others, last = found["tail"]
        self.records.update_one({"_id": found["_id"]}, {"$set": {"tail": [*others, last[:-1]]}})

    async def stored(self, key: Key) -> list[dict[str, Any]]:
        """Return the document of a record, expired or not."""
        return list(self.records.find({"_id": key._asdict()}))

    async def peek(self, key: Key) -> Record | None:
        """Read a record as it is stored."""
        found = self.records.find_one({"_id": key._asdict()})
        return found and Record(found["version"], found["body"], tuple(found["tail"]))
