"""What a turn takes on DynamoDB in its own units, as the server reports them.

A write unit is 1 KB of a written item, a read unit 4 KB of a consistent read; half a unit for each is what an
eventually consistent read takes, which the driver does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.datastores import ALL, dynamo_client, folder_for_all, place_for_files
from benchmarks.measuring import DIALOGUE, Talk, note, turn
from benchmarks.pages import reason
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.types import ConversationTurn
from stm_backends_dynamo import DynamoDriver

_READS = frozenset({"GetItem", "BatchGetItem", "Query", "Scan", "TransactGetItems"})


@dataclass
class Units:
    """The requests, units and bytes of one turn; `missing` says why there are none."""

    requests: float = 0.0
    writes: float = 0.0
    reads: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    missing: str = ""


@dataclass
class _Meter:
    total: Units = field(default_factory=Units)

    def watch(self, client: Any) -> None:
        """Ask for the consumed capacity of every request, and add it up."""
        events = client.meta.events
        events.register("provide-client-params.dynamodb", self._ask)
        events.register("before-send.dynamodb", self._sent)
        events.register("after-call.dynamodb", self._answered)

    def _ask(self, params: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {**params, "ReturnConsumedCapacity": "TOTAL"}

    def _sent(self, request: Any, **_: Any) -> None:
        self.total.requests += 1
        self.total.sent += len(request.body or b"")

    def _answered(self, http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        self.total.received += int(http_response.headers.get("content-length", 0))
        consumed: Any = parsed.get("ConsumedCapacity") or []
        for one in [consumed] if isinstance(consumed, dict) else consumed:
            if model.name in _READS:
                self.total.reads += one["CapacityUnits"]
            else:
                self.total.writes += one["CapacityUnits"]


async def measure(turns: int) -> dict[str, Units]:
    """Return the units of a turn, with folding off and on."""
    note("DynamoDB: units")
    with folder_for_all(place_for_files()) as folder:
        try:
            async with ALL["dynamo"](folder) as datastore:
                settings = datastore.address.settings
                return {mode: await of_turns(settings, mode, turns) for mode in ("off", "on")}
        except Exception as error:  # noqa: BLE001 -- the other figures are kept
            note(f"DynamoDB: {error!r}")
            return {mode: Units(missing=reason(error)) for mode in ("off", "on")}


async def of_turns(
    settings: Any, mode: str, turns: int, says: Callable[[int], ConversationTurn] = turn
) -> Units:
    """Return the units of a turn of one conversation, as a mean of so many."""
    meter = _Meter()
    async with dynamo_client(settings) as client:
        meter.watch(client)
        driver = Backend(DynamoDriver(settings, client=client)).driver
        length = DIALOGUE if mode == "off" else 0
        talk = Talk(driver, Directory(driver, Codec()), f"units {mode}", mode, length, says=says)
        if mode != "off":
            await talk.grow(2 * DIALOGUE)
        meter.total = Units()
        for _ in range(turns):
            await talk.call()
            await talk.call()
            await talk.settled()
    names = ("requests", "writes", "reads", "sent", "received")
    return Units(**{name: getattr(meter.total, name) / turns for name in names})


async def folded(turns: int) -> Record:
    """Return the record of a conversation of so many turns, folded five at a time."""
    driver = Backend(MemoryDriver()).driver
    await driver.open()
    talk = Talk(driver, Directory(driver, Codec()), "folded", "on")
    await talk.grow(turns, at_once=1)
    record = await driver.load(talk.key)
    if record is None or record.body is None:
        raise LookupError("the conversation was not folded")
    return record
