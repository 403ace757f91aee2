"""The clauses of the three contracts: what a report is arranged by."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final, NamedTuple

from stm_backends.errors import ConfigurationError


class Clause(NamedTuple):
    """One promise of a contract. `id` is the profile and a word, as in `driver.expiry`."""

    id: str
    promise: str

    @property
    def profile(self) -> str:
        """What is under test: `driver`, `store` or `memory`."""
        return self.id.partition(".")[0]


_PROMISES: Final = {
    "driver.load": "A load is one strongly consistent snapshot, the same through every instance.",
    "driver.append": "An append adds one entry at the end; it never conflicts, never reorders, and leaves "
    "the version alone.",
    "driver.replace": "A replace stores on its condition only; a lost race is False and changes nothing.",
    "driver.fold": "A fold removes exactly the oldest entries that it covers; what was appended since stays.",
    "driver.resent": "A write that is sent twice is done once, and answers True both times.",
    "driver.delete": "A delete removes the whole record, on its condition, and no other record.",
    "driver.scan": "A scan lists the names of one scope by their UTF-8 bytes, each exactly once.",
    "driver.expiry": "Expired means absent, in every operation, at once.",
    "driver.lifetime": "An append and a replace set the time to live anew; KEEP and a refused write do not.",
    "driver.keys": "Keys are arbitrary text: they never collide, never leak, never act as patterns.",
    "driver.bytes": "The bytes that went in come out.",
    "driver.limits": "What is too large is refused before anything is written, and told which limit it met.",
    "driver.arguments": "Arguments that make no sense are a ValueError, and write nothing.",
    "driver.races": "Each operation is atomic, however many writers and instances there are.",
    "driver.processes": "Operating-system processes share the data as instances do, and may be killed.",
    "driver.cancellation": "A cancelled operation was done or was not, never half; the driver stays usable.",
    "driver.lifecycle": "Opening and closing twice is harmless, and closing harms no other instance.",
    "driver.client": "A client that was handed in is never closed by the driver.",
    "driver.outage": "An outage is a typed error that names no conversation, and never an empty answer.",
    "driver.corruption": "Damaged data is Corrupt, never a smaller record, and reading it changes nothing.",
    "driver.round-trips": "One operation is one round trip.",
    "driver.traits": "The traits state facts that make sense.",
    "driver.model": "Any history of operations has the answers that a model of a few lines gives.",
    "store.load": "A load returns what was saved last, through every instance, and None only if nothing was.",
    "store.replace": "A save replaces the whole state and never merges.",
    "store.json": "A state comes back JSON-equal, or is refused whole; nothing is changed in silence.",
    "store.copies": "What was saved and what was loaded are the caller's; changing them changes no state.",
    "store.keys": "A key is any string, and no key reaches another key's state.",
    "store.races": "Of saves at the same time one stands in the end, whole.",
    "store.conditional": "A conditional save stores only over the version that was loaded.",
    "store.outage": "An outage is an error, and never an absent state.",
    "store.corruption": "Damaged data is an error, and never an absent state.",
    "memory.strategies": "Each strategy shows and keeps what it says, in the specified shape.",
    "memory.fidelity": "A turn is stored as it was given, or refused whole.",
    "memory.identity": "Adding a turn id again changes nothing.",
    "memory.summary": "What is no longer recent is pending until a summary covers it: nothing is forgotten.",
    "memory.waiting": "Adding never waits for a summary; a flush waits no longer than it is told.",
    "memory.health": "Failures are retried, degrade, and recover by themselves; a summarizer erases nothing.",
    "memory.budget": "What the model sees is within the budget, which leaves the store alone.",
    "memory.callbacks": "Callbacks report what happened, delay nobody and harm nobody.",
    "memory.isolation": "No conversation shows anything of another.",
    "memory.pods": "Processes that share a conversation lose nothing, double nothing and agree.",
    "memory.lease": "One pod summarizes at a time, and one that dies is replaced.",
    "memory.background": "A conversation has one background in a process, however many memory objects.",
    "memory.round-trips": "Adding a turn and reading are one round trip each, for a conversation of any age.",
    "memory.outage": "An outage is an error, and never an empty memory.",
    "memory.corruption": "What cannot be read is a typed error, and is left as it is.",
}

CLAUSES: Final = {name: Clause(name, promise) for name, promise in _PROMISES.items()}
"""Every clause by its id, in the order of a report."""


def require_clauses(names: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a name that is no clause's; it tells what may have been meant."""
    for name in names:
        if name not in CLAUSES:
            words = {known.partition(".")[2] for known in CLAUSES}
            word = difflib.get_close_matches(name.lower().rpartition(".")[2], words, n=1, cutoff=0.7)
            near = [known for known in CLAUSES if known.partition(".")[2] in word]
            raise ConfigurationError(
                f"no clause is called {name!r}. "
                + (f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(CLAUSES)}")
            )
