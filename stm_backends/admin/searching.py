"""What a search finds in the records of one conversation; each text is read before it is shown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from stm_backends.catalogue.matching import Match, Query
from stm_backends.drivers.contract import Driver
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, located
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import read_units
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.pages import TURNS, Pages
from stm_backends.types import MemoryKey, StoredTurn

logger = logging.getLogger("stm_backends")

MATCHES: Final = 3
"""How many turns or messages of one conversation are shown."""


async def search_in(driver: Driver, codec: Codec, key: MemoryKey, query: Query) -> list[Match]:
    """Return the matches in the summary and in the newest turns or messages of a conversation.

    Reads the record, and its pages from the last one to the first until enough is found. What is damaged is
    left out, with a warning.
    """
    where = keys.memory_key(key)

    def damaged(error: Corrupt) -> None:
        if isinstance(error, KeyMismatch | SealMismatch):
            raise error
        name = keys.log_name(where)
        logger.warning("a search leaves out what is damaged: %s (conversation %s)", error, name)

    try:
        record = await driver.load(where)
        with located(driver.name, "search"):
            snapshot = Snapshot.of(record, codec)
    except Corrupt as error:
        damaged(error)
        return []
    body, transcript = snapshot.body, snapshot.body.transcript
    first, base = (0, 0) if transcript is None else (transcript.first, transcript.base)
    said = query.among(_newest(dict(enumerate(snapshot.turns, base))), MATCHES)
    while transcript is not None and base > first and len(said) < MATCHES:
        start = max((base - 1) // TURNS * TURNS, first)
        units = await read_units(Pages(driver, codec), where, transcript, start, base, damaged=damaged)
        said += query.among(_newest(units), MATCHES - len(said))
        base = start
    summary = [Match("summary", query.snippet(body.summary))] if query.is_in(body.summary) else []
    return [*summary, *said]


def _newest(units: Mapping[int, StoredTurn]) -> Iterable[tuple[int, str]]:
    """Yield what was said in turns or messages, with their numbers, the newest first."""
    for number, unit in sorted(units.items(), reverse=True):
        yield number, f"{unit.turn.user_message}\n{unit.turn.assistant_response}"
