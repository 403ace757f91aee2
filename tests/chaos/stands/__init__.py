"""The datastores of a run, each with its servers: a file for each kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

Fault: TypeAlias = Callable[[random.Random, float], AbstractAsyncContextManager[dict[str, Any]]]
"""Begins when it is entered and is over when it is left: the healthy state is restored, and waited for.

It receives the run's source of chance and how many seconds it will be held, and yields what goes into the
history as the figures of the fault.
"""


class Stand(Protocol):
    """One datastore as a run uses it."""

    name: str
    """As in the table: `sqlite`, `redis`, `redis-sentinel`, `postgres-standby`."""

    url: str
    """How pods reach it: by way of a proxy where there is a network."""

    direct_url: str
    """How the final reads reach it, past every proxy."""

    versions: Mapping[str, str]
    """The server's and the client library's, for the table."""

    programs: Sequence[str]
    """What it needs beside packages of Python: commands that must be found."""

    pooled: int
    """How many connections the pools of a pod hold when they are full, where those are many."""

    doubts: Sequence[tuple[float, float]]
    """The times in which a deposed server may have answered reads, where the datastore lets it."""

    async def start(self) -> None:
        """Start its servers, with durable settings, and set up what the datastore needs."""
        ...

    async def stop(self) -> None:
        """Stop its servers."""
        ...

    def faults(self) -> Mapping[str, Fault]:
        """What the nemesis may do to the servers and to the network between them and the pods, by name."""
        ...
