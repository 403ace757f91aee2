"""The frameworks that are compared: what they have of their own, on which datastore, with which settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.frameworks.trial import Plan
from benchmarks.peers.places import Place

_HERE = "benchmarks.peers.frameworks"

Measure: TypeAlias = Callable[[Place, Plan], Awaitable[None]]
"""Measures a framework's own back end at a place, and ours beside it, and reports each figure."""


@dataclass(frozen=True, kw_only=True)
class Framework(Peer):
    """What a framework has of its own on one datastore. `open` names the function that measures both sides.

    `label` names the framework and its class `own`, and `ours` is our class, which is given the same calls.
    """

    framework: str
    own: str
    ours: str
    shows: str = ""

    @property
    def measure(self) -> Measure:
        """Import what measures it. Raises `ImportError`."""
        return cast("Measure", self.opened())


def _framework(datastore: str, own: str, settings: str, packages: str, **about: Any) -> Framework:
    return Framework(
        label=f"{about['framework']} `{own}`",
        own=f"`{own}`",
        datastore=datastore,
        packages=tuple(packages.split()),
        settings=settings,
        **{**about, "open": f"{_HERE}.{about['open']}:measure"},
    )


_CLAUDE = {
    "framework": "Claude Agent SDK",
    "ours": "`StmSessionStore`",
    "open": "claude",
    "link": "https://pypi.org/project/claude-agent-sdk/",
}
_PYDANTIC = {
    "framework": "Pydantic AI",
    "ours": "`StmConversationStore`",
    "open": "pydantic_ai",
    "link": "https://pypi.org/project/pydantic-ai-slim/",
}
_ADK = {
    "framework": "Google ADK",
    "ours": "`StmSessionService`",
    "open": "adk",
    "link": "https://google.github.io/adk-docs/sessions/session/",
}
_LANGGRAPH = {
    "framework": "LangGraph",
    "ours": "`StmSaver`",
    "open": "langgraph",
    "link": PEERS["langgraph-sqlite"].link,
}
_AGENT_FRAMEWORK = {
    "framework": "Agent Framework",
    "ours": "`StmHistoryProvider`",
    "open": "agent_framework",
    "link": "https://pypi.org/project/agent-framework-redis/",
}
_STRANDS = {
    "framework": "Strands",
    "ours": "`StmSessionRepository`",
    "open": "strands",
    "link": "https://pypi.org/project/strands-agents/",
}
_OPENAI = {
    "framework": "OpenAI Agents",
    "ours": "`StmSession`",
    "open": "openai_agents",
    "link": PEERS["openai-sqlite"].link,
}
_LANGCHAIN = {
    "framework": "LangChain",
    "ours": "`StmChatMessageHistory`",
    "open": "langchain",
    "link": PEERS["langchain-redis"].link,
}
_LLAMA_INDEX = {
    "framework": "LlamaIndex",
    "ours": "`StmChatStore`",
    "open": "llama_index",
    "link": "https://pypi.org/project/llama-index-core/",
}

FRAMEWORKS: Mapping[str, Framework] = {
    "claude-memory": _framework("memory", "InMemorySessionStore", "", "claude-agent-sdk", **_CLAUDE),
    "pydantic-ai-memory": _framework(
        "memory", "InMemoryConversationStore", "", "pydantic-ai-slim", **_PYDANTIC
    ),
    "adk-sqlite": _framework(
        "sqlite", "DatabaseSessionService", "aiosqlite", "google-adk sqlalchemy", **_ADK
    ),
    "adk-postgres": _framework(
        "postgres",
        "DatabaseSessionService",
        "asyncpg, `pool_size=32`",
        "google-adk sqlalchemy",
        **_ADK,
    ),
    "langgraph-sqlite": _framework(
        "sqlite", "AsyncSqliteSaver", "", "langgraph langgraph-checkpoint-sqlite", **_LANGGRAPH
    ),
    "langgraph-postgres": _framework(
        "postgres",
        "AsyncPostgresSaver",
        "a pool of 32",
        "langgraph langgraph-checkpoint-postgres",
        **_LANGGRAPH,
    ),
    "agent-framework-redis": _framework(
        "redis",
        "RedisHistoryProvider",
        "one shared client",
        "agent-framework-core agent-framework-redis redis",
        **_AGENT_FRAMEWORK,
    ),
    "strands-sqlite": _framework(
        "sqlite",
        "FileSessionManager",
        "files in a directory; ours in SQLite, with `RepositorySessionManager`",
        "strands-agents",
        **_STRANDS,
    ),
    "openai-sqlite": _framework("sqlite", "SQLiteSession", "a file", "openai-agents", **_OPENAI),
    "openai-postgres": _framework(
        "postgres",
        "SQLAlchemySession",
        "asyncpg, one shared engine, `pool_size=32`",
        "openai-agents sqlalchemy",
        **_OPENAI,
    ),
    "openai-redis": _framework(
        "redis", "RedisSession", "one shared client", "openai-agents redis", **_OPENAI
    ),
    "langchain-sqlite": _framework(
        "sqlite",
        "SQLChatMessageHistory",
        "aiosqlite, one shared engine",
        "langchain-community langchain-core",
        **_LANGCHAIN,
    ),
    "langchain-postgres": _framework(
        "postgres",
        "PostgresChatMessageHistory",
        "one connection, `autocommit`",
        "langchain-postgres langchain-core",
        **_LANGCHAIN,
    ),
    "langchain-redis": _framework(
        "redis",
        "RedisChatMessageHistory",
        "one shared client, `protocol=2`",
        "langchain-redis langchain-core redis",
        **_LANGCHAIN,
    ),
    "llama-index-sqlite": _framework(
        "sqlite",
        "SQLiteChatStore",
        "aiosqlite, one shared engine",
        "llama-index-core llama-index-storage-chat-store-sqlite",
        **_LLAMA_INDEX,
    ),
    "llama-index-redis": _framework(
        "redis",
        "RedisChatStore",
        "one shared client",
        "llama-index-core llama-index-storage-chat-store-redis redis",
        **_LLAMA_INDEX,
    ),
}
"""What is compared: each framework on the datastores for which it has a back end of its own, but for some."""
