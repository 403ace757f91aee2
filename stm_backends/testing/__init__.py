"""The conformance suite: checks that a driver, a store, a graph or a memory keeps its contract.

```python
class TestMine(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        return Datastore(open=functools.partial(open_at, f"mine:///{tmp_path}/data"))
```

Subclass `StoreContract`, `GraphContract`, `MemoryContract` and `PodsContract` likewise, with the fixtures
`stores`, `graphs` and `memories`. `quick = True` on a class selects the quick form. If the datastore needs
tables, `open_at(url, create=True)` creates them.

This package is also a pytest plugin, which `-p stm_backends.testing` turns on. It adds the options, such as
`--stm-quick` for the quick form of all classes, and the report per clause. With it, no class is needed for an
installed backend: `pytest -p stm_backends.testing --stm-backend=NAME --stm-url=URL --pyargs
stm_backends.testing`, or `stm-backends conformance NAME --url URL`. Needs the extra `conformance`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from stm_backends.testing.workbench.drivers import Bench, Datastore, FakeClock, HandedIn, open_at

if TYPE_CHECKING:
    from stm_backends.testing.driver_contract import DriverContract
    from stm_backends.testing.graph_contract import GraphContract, Graphs
    from stm_backends.testing.graphs import graphs_on
    from stm_backends.testing.memory_contract import MemoryContract
    from stm_backends.testing.pods import memories_on
    from stm_backends.testing.pods_contract import PodsContract
    from stm_backends.testing.store_contract import StoreContract, Stores
    from stm_backends.testing.stores import stores_on
    from stm_backends.testing.workbench.memories import Memories

__all__ = [
    "Bench",
    "Datastore",
    "DriverContract",
    "FakeClock",
    "GraphContract",
    "Graphs",
    "HandedIn",
    "Memories",
    "MemoryContract",
    "PodsContract",
    "StoreContract",
    "Stores",
    "graphs_on",
    "memories_on",
    "open_at",
    "stores_on",
]

pytest_plugins: Final = ("stm_backends.testing.runner.plugin",)
"""The plugin that pytest loads with `-p stm_backends.testing`. Worker processes run without it."""

_LATE: Final = {
    "DriverContract": "driver_contract",
    "GraphContract": "graph_contract",
    "Graphs": "graph_contract",
    "Memories": "workbench.memories",
    "MemoryContract": "memory_contract",
    "PodsContract": "pods_contract",
    "StoreContract": "store_contract",
    "Stores": "store_contract",
    "stores_on": "stores",
    "graphs_on": "graphs",
    "memories_on": "pods",
}


def __getattr__(name: str) -> Any:
    # The worker processes import this package, too, and start faster without pytest.
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Makes a failing assertion show its values, even if the plugin is not loaded.
    importlib.import_module("pytest").register_assert_rewrite(
        "stm_backends.testing.driver_checks",
        "stm_backends.testing.graph_contract",
        "stm_backends.testing.workbench.expectations",
        "stm_backends.testing.memory_checks",
        "stm_backends.testing.pods_contract",
        "stm_backends.testing.workbench.processes",
        "stm_backends.testing.store_contract",
    )
    return getattr(importlib.import_module(f"stm_backends.testing.{_LATE[name]}"), name)
