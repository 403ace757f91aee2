"""Three tiers of memory: fleeting, short-term and long-term."""

from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.graph import GraphBackend, InProcessGraph, SharedGraph, VertexNotFound

__all__ = ["BackendGraph", "GraphBackend", "InProcessGraph", "SharedGraph", "VertexNotFound"]
