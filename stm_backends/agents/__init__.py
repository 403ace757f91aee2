"""Memory around any agent: find the conversation of a call, build the context, store the turn.

`conversation` does all of it around one call; programs that need only some of the steps use the other names.
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
