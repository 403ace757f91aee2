"""LangGraph: checkpoints and a store on any backend (extra `langgraph`)."""

from __future__ import annotations

from stm_backends.extras import missing_extra

try:
    from stm_backends.integrations.langgraph.moving import copy_threads
    from stm_backends.integrations.langgraph.saver import StmSaver
    from stm_backends.integrations.langgraph.store import StmStore
except ModuleNotFoundError as error:
    raise missing_extra("langgraph", error) from error

__all__ = ["StmSaver", "StmStore", "copy_threads"]
