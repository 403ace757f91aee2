"""The conformance suite: proof that a driver keeps the contract of `stm_backends.driver`.

```python
class TestMine(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        return Datastore(open=functools.partial(open_mine, tmp_path))
```

Needs pytest and pytest-asyncio; `state_machine` needs hypothesis too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stm_backends.testing.bench import Bench, Datastore, FakeClock, open_at

if TYPE_CHECKING:
    from stm_backends.testing.driver_contract import DriverContract

__all__ = ["Bench", "Datastore", "DriverContract", "FakeClock", "open_at"]


def __getattr__(name: str) -> Any:
    # The worker processes import this package too, and start faster without pytest.
    if name != "DriverContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("pytest").register_assert_rewrite("stm_backends.testing.driver_contract")
    return importlib.import_module("stm_backends.testing.driver_contract").DriverContract
