"""The library for programs without an event loop: the same objects, with blocking methods.

```python
from stm_backends import sync

with sync.open_backend("sqlite:///memory.db") as backend:
    memory = backend.memory(key, config, summarizer=summarize)
    memory.add_turn(turn)
    memory.get_llm_context()
    backend.state_store.save_memory_state("any key", {"any": "json"})
    tiers = sync.MemoryManager(backend, owner=("acme", "u123"))
    tiers.remember("name", "Alice", importance=0.7)
```

One thread owns the event loop and everything that belongs to it. All objects here are thread-safe. Callbacks
and async summarizers run on the loop's thread, where blocking code delays every other call. A summarizer may
also be a plain function, which is called in a separate thread.

Calls from within a running event loop work, for instance in a notebook, and block that loop until they
return. Calls on the loop's own thread (from a callback) would deadlock, and calls in a process that was
forked after opening have no loop: both raise `ConfigurationError`. Before a backend is opened and after it
is closed, calls raise `Unavailable`.
"""

from stm_backends.sync.backend import Backend, open_backend
from stm_backends.sync.conversation import Conversation
from stm_backends.sync.memory import Memory
from stm_backends.sync.state_store import StateStore, TenantStates
from stm_backends.sync.summarizers import PlainSummarizer
from stm_backends.sync.thread import LoopThread
from stm_backends.sync.tiers import MemoryManager

__all__ = [
    "Backend",
    "Conversation",
    "LoopThread",
    "Memory",
    "MemoryManager",
    "PlainSummarizer",
    "StateStore",
    "TenantStates",
    "open_backend",
]
