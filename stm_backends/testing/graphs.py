"""The library's graph on a driver, in the form that the graph checks need."""

from __future__ import annotations

from typing import Any

from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key, Record
from stm_backends.records.keys import vertex_key
from stm_backends.testing.graph_contract import Graphs
from stm_backends.testing.workbench.drivers import Datastore
from stm_backends.testing.workbench.former import FormerServer, fail_over
from stm_backends.tiers.backend_graph import BackendGraph


def graphs_on(datastore: Datastore, kind: type[BackendGraph] = BackendGraph) -> Graphs:
    """Return the graphs on a datastore's driver; each instance has its own driver instance."""
    opened: dict[int, Backend] = {}
    former: dict[str, tuple[Key, Record]] = {}

    async def open_one(name: str) -> Any:
        driver = await datastore.open()
        backend = Backend(FormerServer(driver, *former.pop(name)) if name in former else driver)
        await backend.open()
        graph = kind(backend, ("acme", name))
        opened[id(graph)] = backend
        return graph

    async def close(graph: Any) -> None:
        await opened.pop(id(graph)).close()

    async def lose_edges(name: str, vertex_id: str, lost: int) -> None:
        driver, where = await datastore.open(), vertex_key("acme", name, vertex_id)
        try:
            former[name] = where, await fail_over(driver, where, lost)
        finally:
            await driver.close()

    return Graphs(open=open_one, close=close, outage=datastore.outage, fail_over=lose_edges)
