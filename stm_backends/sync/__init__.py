"""The library for programs without an event loop: the same objects, whose methods return when it is done.

```python
from stm_backends import sync

with sync.open_backend("sqlite:///memory.db") as backend:
    memory = backend.memory(key, config, summarizer=summarize)
    memory.add_turn(turn)
    memory.get_llm_context()
    backend.state_store.save_memory_state("any key", {"any": "json"})
```

A thread owns the event loop and everything that belongs to it. All objects here may be used by any number
of threads. Callbacks and async summarizers run on the loop's thread, where whatever blocks holds up every
other call; a plain function may summarize as well, and gets a thread of its own.

A call from within a running event loop works, in a notebook for instance, and blocks that loop until it is
answered. A call on the loop's own thread, from a callback, would wait for itself and is refused, and so is
one in a process forked since: both raise `ConfigurationError`. Before a backend is opened and after it is
closed, calls raise `Unavailable`.
"""

from stm_backends.sync.backend import Backend, open_backend
from stm_backends.sync.memory import Memory
from stm_backends.sync.state_store import StateStore
from stm_backends.sync.summarizers import PlainSummarizer
from stm_backends.sync.thread import LoopThread

__all__ = ["Backend", "LoopThread", "Memory", "PlainSummarizer", "StateStore", "open_backend"]
