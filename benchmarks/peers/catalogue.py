"""The libraries that are compared, with the settings that they are given.

A library's module is imported in the process that measures it. What cannot be imported is reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.peers.conversation import Opened

_HERE = "benchmarks.peers"

OURS = "stm-backends"
"""What a name of ours begins with."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One library on one datastore.

    `open` names a module and a function in it. `keeps_all` names another one, where the
    first drops or summarizes turns, which could not be counted. `shows` is what its reading returns, and
    `settings` what differs from its defaults. `packages` are those whose versions are shown.
    """

    label: str
    datastore: str
    open: str
    packages: tuple[str, ...]
    shows: str
    settings: str
    link: str
    keeps_all: str = ""
    short: str = ""

    def opened(self, *, keeping_all: bool = False) -> Opened:
        """Import what opens it. Raises `ImportError`."""
        module, _, name = ((keeping_all and self.keeps_all) or self.open).partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def module(self) -> str:
        """The module that a process imports before it opens the library."""
        return self.open.partition(":")[0]

    @property
    def is_ours(self) -> bool:
        return self.label.startswith(OURS)


_DATASTORES = ("redis", "postgres", "mongo", "sqlite", "dynamo")
_HISTORY = "every message"
_SUMMARY = "a summary and the recent turns, within a token budget"
_LINKS = {
    "openai": "https://openai.github.io/openai-agents-python/sessions/",
    "langgraph": "https://docs.langchain.com/oss/python/langgraph/persistence",
    "key_value": "https://github.com/strawgate/py-key-value",
    "penguiflow": "https://pypi.org/project/penguiflow/",
    "adk": "https://google.github.io/adk-docs/sessions/session/",
}


def _ours(datastore: str, opened: str) -> Peer:
    folds = opened == "folding"
    return Peer(
        label=OURS if folds else f"{OURS} with every turn",
        short=OURS if folds else "with every turn",
        datastore=datastore,
        open=f"{_HERE}.ours:{opened}",
        keeps_all=f"{_HERE}.ours:keeping_all",
        packages=("stm-backends",),
        shows=_SUMMARY if folds else "every turn",
        settings=(
            "`rolling_summary`, 5 recent turns, `fold_batch_turns=5`"
            if folds
            else "`truncation`, 10,000 recent turns"
        ),
        link="https://pypi.org/project/stm-backends/",
    )


def _our_session(datastore: str) -> Peer:
    return Peer(
        label=f"{OURS} `StmSession`, `limit=20`",
        short="StmSession, limit=20",
        datastore=datastore,
        open=f"{_HERE}.openai_sessions:ours_limited",
        packages=("stm-backends", "openai-agents"),
        shows="the last 20 messages",
        settings="",
        link="https://pypi.org/project/stm-backends/",
    )


def _openai(datastore: str, session: str, settings: str, *packages: str, limited: bool = False) -> Peer:
    opened = {"postgres": "sqlalchemy"}.get(datastore, datastore)
    return Peer(
        label=f"OpenAI Agents `{session}`{', `limit=20`' if limited else ''}",
        short="OpenAI, limit=20" if limited else "OpenAI Agents",
        datastore=datastore,
        open=f"{_HERE}.openai_sessions:{opened}{'_limited' if limited else ''}",
        packages=("openai-agents", *packages),
        shows="the last 20 messages" if limited else _HISTORY,
        settings=settings,
        link=_LINKS["openai"],
    )


def _langchain(datastore: str, history: str, package: str, link: str, settings: str) -> Peer:
    return Peer(
        label=f"LangChain `{history}`",
        short="LangChain",
        datastore=datastore,
        open=f"{_HERE}.langchain_histories:{datastore}",
        packages=(package, "langchain-core"),
        shows=_HISTORY,
        settings=settings,
        link=link,
    )


def _langgraph(datastore: str, saver: str, package: str, settings: str = "", *, delta: bool = False) -> Peer:
    return Peer(
        label=f"LangGraph `{saver}`{', `DeltaChannel`' if delta else ''}",
        short="LangGraph, delta" if delta else "LangGraph",
        datastore=datastore,
        open=f"{_HERE}.langgraph_savers:{datastore}{'_delta' if delta else ''}",
        packages=(package, "langgraph"),
        shows=_HISTORY,
        settings=f'`durability="exit"`{settings}',
        link=_LINKS["langgraph"],
    )


def _key_value(datastore: str, store: str) -> Peer:
    return Peer(
        label=f"py-key-value `{store}`",
        short="py-key-value",
        datastore=datastore,
        open=f"{_HERE}.states:{'disk' if datastore == 'sqlite' else datastore}",
        packages=("py-key-value-aio",),
        shows=_HISTORY,
        settings="all messages as one value: loaded, changed, saved",
        link=_LINKS["key_value"],
    )


PEERS: Mapping[str, Peer] = {
    **{f"ours-{datastore}": _ours(datastore, "folding") for datastore in _DATASTORES},
    **{f"ours-all-{datastore}": _ours(datastore, "keeping_all") for datastore in _DATASTORES},
    **{f"ours-session-{datastore}": _our_session(datastore) for datastore in _DATASTORES},
    "openai-sqlite": _openai("sqlite", "SQLiteSession", "a file"),
    "openai-redis": _openai("redis", "RedisSession", "one shared client", "redis"),
    "openai-redis-limit": _openai("redis", "RedisSession", "one shared client", "redis", limited=True),
    "openai-sqlalchemy": _openai(
        "postgres", "SQLAlchemySession", "asyncpg, one shared engine, `pool_size=32`", "sqlalchemy"
    ),
    "openai-sqlalchemy-limit": _openai(
        "postgres",
        "SQLAlchemySession",
        "asyncpg, one shared engine, `pool_size=32`",
        "sqlalchemy",
        limited=True,
    ),
    "openai-mongo": _openai("mongo", "MongoDBSession", "one shared client", "pymongo"),
    "langchain-redis": _langchain(
        "redis",
        "RedisChatMessageHistory",
        "langchain-redis",
        "https://reference.langchain.com/python/langchain-redis",
        "one shared client, `protocol=2`, because it fails with redis-py's default",
    ),
    "langchain-postgres": _langchain(
        "postgres",
        "PostgresChatMessageHistory",
        "langchain-postgres",
        "https://github.com/langchain-ai/langchain-postgres",
        "a connection for each conversation, `autocommit`",
    ),
    "langchain-mongo": _langchain(
        "mongo",
        "MongoDBChatMessageHistory",
        "langchain-mongodb",
        "https://reference.langchain.com/python/langchain-mongodb/chat_message_histories/MongoDBChatMessageHistory",
        "one shared client",
    ),
    "langchain-dynamo": _langchain(
        "dynamo",
        "DynamoDBChatMessageHistory",
        "langchain-community",
        "https://github.com/langchain-ai/langchain-community/issues/674",
        "one item for each conversation; the package is no longer maintained",
    ),
    "langgraph-sqlite": _langgraph("sqlite", "AsyncSqliteSaver", "langgraph-checkpoint-sqlite"),
    "langgraph-postgres": _langgraph(
        "postgres", "AsyncPostgresSaver", "langgraph-checkpoint-postgres", ", a pool of 32"
    ),
    "langgraph-postgres-delta": _langgraph(
        "postgres",
        "AsyncPostgresSaver",
        "langgraph-checkpoint-postgres",
        ", a pool of 32, messages in a `DeltaChannel` (beta)",
        delta=True,
    ),
    "langgraph-redis": _langgraph(
        "redis", "AsyncShallowRedisSaver", "langgraph-checkpoint-redis", ", only the last checkpoint is kept"
    ),
    "langgraph-mongo": _langgraph("mongo", "MongoDBSaver", "langgraph-checkpoint-mongodb"),
    "langgraph-dynamo": _langgraph(
        "dynamo", "DynamoDBSaver", "langgraph-checkpoint-aws", ", compression, no S3"
    ),
    "penguiflow-redis": Peer(
        label="PenguiFlow `DefaultShortTermMemory`, `persist`",
        datastore="redis",
        open=f"{_HERE}.states:penguiflow",
        keeps_all=f"{_HERE}.states:penguiflow_keeping_all",
        packages=("penguiflow",),
        short="PenguiFlow",
        shows=_SUMMARY,
        settings="`rolling_summary`, 5 recent turns; JSON under one Redis key",
        link=_LINKS["penguiflow"],
    ),
    "key-value-disk": _key_value("sqlite", "DiskStore"),
    "key-value-redis": _key_value("redis", "RedisStore"),
    "key-value-postgres": _key_value("postgres", "PostgreSQLStore"),
    "key-value-mongo": _key_value("mongo", "MongoDBStore"),
    "key-value-dynamo": _key_value("dynamo", "DynamoDBStore"),
}

SHOWING: Mapping[str, Peer] = {
    name: replace(peer, open=f"{_HERE}.ours:shown") if peer.is_ours else peer
    for name, peer in PEERS.items()
    if not name.startswith(("ours-all", "ours-session")) and not name.endswith(("-limit", "-delta"))
}
"""The libraries that are asked for what a product shows, once each: some have several rows above."""


def _our_messages(datastore: str, *, every: bool = False) -> Peer:
    return Peer(
        label=f"{OURS} with every message" if every else OURS,
        datastore=datastore,
        open=f"{_HERE}.ours:{'every_message' if every else 'messages'}",
        packages=("stm-backends",),
        shows=_HISTORY if every else "a summary and the newest messages, from a user's message on",
        settings=(
            "`conversation(..., max_tokens=10_000_000)`"
            if every
            else "`conversation(...)` without a configuration, `messages(max_tokens=8_000)`"
        ),
        link="https://pypi.org/project/stm-backends/",
    )


def _adk(datastore: str, service: str, settings: str, opened: str = "", *, limited: bool = False) -> Peer:
    return Peer(
        label=f"Google ADK `{service}`{', `num_recent_events=20`' if limited else ''}",
        datastore=datastore,
        open=f"{_HERE}.adk_sessions:{opened or datastore}{'_limited' if limited else ''}",
        packages=("google-adk",),
        shows="the last 20 events and what the run adds" if limited else "every event",
        settings=settings,
        link=_LINKS["adk"],
    )


_POOLED = "asyncpg, `pool_size=32`"

MESSAGES: Mapping[str, Peer] = {
    **{f"ours-{datastore}": _our_messages(datastore) for datastore in _DATASTORES},
    **{f"ours-all-{datastore}": _our_messages(datastore, every=True) for datastore in _DATASTORES},
    **{name: peer for name, peer in PEERS.items() if name.startswith(("openai-", "langgraph-"))},
    "adk-redis": _adk("redis", "RedisSessionService", "one shared client"),
    "adk-postgres": _adk("postgres", "DatabaseSessionService", _POOLED),
    "adk-postgres-limit": _adk("postgres", "DatabaseSessionService", _POOLED, limited=True),
    "adk-mongo": _adk("mongo", "MongoDbSessionService", "one shared client; the service is experimental"),
    "adk-sqlite": _adk("sqlite", "SqliteSessionService", "a file"),
    "adk-sqlite-database": _adk("sqlite", "DatabaseSessionService", "aiosqlite", "sqlite_database"),
}
"""The libraries whose messages are compared."""

NOT_OFFERED: Mapping[str, tuple[str, ...]] = {"dynamo": ("OpenAI Agents", "Google ADK")}
"""What of these has no storage of its own on a datastore."""
