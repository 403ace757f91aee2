"""The clauses of the four contracts, by which a report is organized."""

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
        """The subject under test: `driver`, `store`, `graph` or `memory`."""
        return self.id.partition(".")[0]


_PROMISES: Final = {
    "driver.load": "A load returns one strongly consistent snapshot, the same through every instance.",
    "driver.last": (
        "A load of the newest entries returns these in order, with the body and the number of older ones."
    ),
    "driver.append": "An append adds one entry at the end; it never conflicts, never reorders, and leaves "
    "the version alone.",
    "driver.replace": (
        "A replace stores only if its condition holds; otherwise it returns False and changes nothing."
    ),
    "driver.fold": (
        "A fold removes exactly the oldest entries that it covers and keeps entries appended since."
    ),
    "driver.rewrite": (
        "A rewrite replaces the oldest entries one for one, together with the body, and no other entry."
    ),
    "driver.resent": "A retried write is applied once and returns True each time.",
    "driver.delete": "A delete removes the whole record if its condition holds, and no other record.",
    "driver.scan": (
        "A scan lists the names of one scope in the order of their UTF-8 bytes, each exactly once."
    ),
    "driver.expiry": "An expired record is absent in every operation, at once.",
    "driver.clock": "Expiry is judged by the clock that the traits name.",
    "driver.lifetime": "An append and a replace reset the time to live; KEEP and a refused write do not.",
    "driver.keys": "Keys are arbitrary text; they never collide, leak or act as patterns.",
    "driver.bytes": "Stored bytes are returned unchanged.",
    "driver.limits": (
        "A value that is too large raises TooLarge, which names the limit, before anything is written."
    ),
    "driver.arguments": "Invalid arguments raise ValueError and write nothing.",
    "driver.races": "Each operation is atomic for any number of writers and instances.",
    "driver.processes": (
        "Operating-system processes share the data as instances do, and may be killed at any moment."
    ),
    "driver.cancellation": (
        "A cancelled operation is applied completely or not at all; the driver stays usable."
    ),
    "driver.lifecycle": (
        "Opening or closing twice or at once is harmless, and closing does not affect other instances."
    ),
    "driver.home": (
        "An open driver belongs to its process and event loop: elsewhere it raises ConfigurationError, and "
        "disturbs nothing."
    ),
    "driver.client": (
        "The driver never closes a client that the caller passed in, and leaves nothing on it."
    ),
    "driver.outage": (
        "An outage raises a typed error that names no conversation, and is never an empty answer."
    ),
    "driver.corruption": (
        "Damaged data raises Corrupt, is never a smaller record, and only a delete or a replace of ANY "
        "record ends that."
    ),
    "driver.transactions": "No operation leaves a transaction or a lock behind, whether it answers or fails.",
    "driver.logs": "No message names a key or shows stored bytes, and none comes with each write.",
    "driver.round-trips": "One operation is one round trip.",
    "driver.traits": "The traits are valid.",
    "driver.optional": "An optional method, besides the five operations, does what its protocol says.",
    "driver.model": "Any history of operations returns what a small model of the contract returns.",
    "store.load": (
        "A load returns the state saved last, through every instance, and None only if there is none."
    ),
    "store.replace": "A save replaces the whole state and never merges.",
    "store.json": "A state comes back JSON-equal or is refused as a whole; nothing is changed silently.",
    "store.copies": "Changing an object after saving or loading it does not change the stored state.",
    "store.keys": "A key is any string, and no key reaches the state of another.",
    "store.races": "Of concurrent saves, one is stored whole.",
    "store.conditional": "A conditional save stores only over the version that was loaded.",
    "store.outage": "An outage raises an error and is never an absent state.",
    "store.corruption": "Damaged data raises an error and is never an absent state.",
    "graph.vertices": "A vertex is returned as it was written last, through every instance, and None only if "
    "there is none.",
    "graph.json": "Properties come back JSON-equal or are refused as a whole; nothing is changed silently.",
    "graph.copies": "Changing an object after writing or reading it does not change the graph.",
    "graph.ids": "An id is any text, and no id reaches the vertex of another.",
    "graph.edges": "An edge leads from its source to its target, once for each label, while both exist.",
    "graph.trace": "A trace has the vertices of a run and the edges between them, and no others.",
    "graph.clear": "Clearing removes every vertex and every edge.",
    "graph.isolation": "No graph shows anything of another.",
    "graph.changes": (
        "A change receives the stored properties and replaces them; None removes the vertex and its edges."
    ),
    "graph.races": "Of concurrent changes, updates and edges none is lost.",
    "graph.listing": "A listing has each vertex of a label exactly once.",
    "graph.search": "A search finds the vertices with every word of the text, as they are stored now.",
    "graph.failover": "An edge that a former server does not show is not dropped on its word.",
    "graph.outage": "An outage raises an error and is never an empty answer.",
    "memory.strategies": "Each strategy shows and keeps what it specifies, in the specified shape.",
    "memory.fidelity": "A turn is stored as given, or refused as a whole.",
    "memory.identity": "Adding a turn id again changes nothing.",
    "memory.summary": (
        "A turn that is no longer recent stays pending until a summary covers it; none is lost."
    ),
    "memory.waiting": "Adding never waits for a summary; a flush ends at its timeout.",
    "memory.health": "Failed summaries are retried, degrade the memory and recover; they erase nothing.",
    "memory.budget": "The model's view is within the budget; the budget does not change stored turns.",
    "memory.callbacks": "Callbacks report what happened; they delay no operation and cause no failure.",
    "memory.isolation": "No conversation shows anything of another.",
    "memory.pods": "Processes that share a conversation lose nothing, duplicate nothing and agree.",
    "memory.lease": "One pod summarizes at a time, and another takes over if it dies.",
    "memory.background": "All memory objects of a conversation in one process share one background task.",
    "memory.round-trips": (
        "Adding a turn and reading take one round trip each, however long the conversation."
    ),
    "memory.keys": "A process whose keys did not seal the stored data is refused, and changes nothing.",
    "memory.erasure": "A turn added after an erasure can be read by every process.",
    "memory.transcript": (
        "Where a transcript is kept, every turn can be read, once and in order, after it has left the record."
    ),
    "memory.failover": "A turn that a former server does not show is not dropped on its word.",
    "memory.outage": "An outage raises an error and never shows an empty memory.",
    "memory.corruption": "Data that cannot be read raises a typed error and is left unchanged.",
}

CLAUSES: Final = {name: Clause(name, promise) for name, promise in _PROMISES.items()}
"""Every clause by its id, in the order of a report."""


def require_clauses(names: Iterable[str]) -> None:
    """Raise `ConfigurationError` for an unknown name, with the nearest known names."""
    for name in names:
        if name not in CLAUSES:
            words = {known.partition(".")[2] for known in CLAUSES}
            word = difflib.get_close_matches(name.lower().rpartition(".")[2], words, n=1, cutoff=0.7)
            near = [known for known in CLAUSES if known.partition(".")[2] in word]
            raise ConfigurationError(
                f"no clause is called {name!r}. "
                + (f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(CLAUSES)}")
            )
