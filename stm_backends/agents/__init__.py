"""Memory around any agent: which conversation a call belongs to, what the model is shown, what is kept.

`conversation` does all of it around one call. The parts are there for programs that need them apart.
"""

from stm_backends.agents.around import Exchange, conversation
from stm_backends.agents.prompt import apply_memory, render_memory_message
from stm_backends.agents.resolving import KeyResolver, resolve_memory_key
from stm_backends.agents.turns import ToolStep, build_turn

__all__ = [
    "Exchange",
    "KeyResolver",
    "ToolStep",
    "apply_memory",
    "build_turn",
    "conversation",
    "render_memory_message",
    "resolve_memory_key",
]
