"""The graph that this library builds on a driver, as the checks of graphs want it."""

from __future__ import annotations

from typing import Any

from stm_backends.backend import Backend
from stm_backends.testing.graph_contract import Graphs
from stm_backends.testing.workbench.drivers import Datastore
from stm_backends.tiers.backend_graph import BackendGraph


def graphs_on(datastore: Datastore, kind: type[BackendGraph] = BackendGraph) -> Graphs:
    """Return the graphs on a datastore's driver, each instance with its own driver instance."""
    opened: dict[int, Backend] = {}

    async def open_one(name: str) -> Any:
        backend = Backend(await datastore.open())
        await backend.open()
        graph = kind(backend, ("acme", name))
        opened[id(graph)] = backend
        return graph

    async def close(graph: Any) -> None:
        await opened.pop(id(graph)).close()

    return Graphs(open=open_one, close=close, outage=datastore.outage)
