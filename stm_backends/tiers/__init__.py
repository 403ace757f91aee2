"""Three tiers of memory: fleeting, short-term and long-term."""

from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.embedding import Embedder
from stm_backends.tiers.entry import MemoryEntry, MemoryTier
from stm_backends.tiers.fleeting import FleetingMemory
from stm_backends.tiers.gc import MemoryGarbageCollector
from stm_backends.tiers.graph import (
    GraphBackend,
    InProcessGraph,
    SearchableGraph,
    SharedGraph,
    VertexExists,
    VertexNotFound,
)
from stm_backends.tiers.long_term import LongTermMemory
from stm_backends.tiers.manager import MemoryManager
from stm_backends.tiers.shared_session import SharedShortTermMemory
from stm_backends.tiers.short_term import ShortTermMemory

__all__ = [
    "BackendGraph",
    "Embedder",
    "FleetingMemory",
    "GraphBackend",
    "InProcessGraph",
    "LongTermMemory",
    "MemoryEntry",
    "MemoryGarbageCollector",
    "MemoryManager",
    "MemoryTier",
    "SearchableGraph",
    "SharedGraph",
    "SharedShortTermMemory",
    "ShortTermMemory",
    "VertexExists",
    "VertexNotFound",
]
