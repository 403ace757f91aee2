"""LangChain's chat message histories, by their asynchronous methods."""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from benchmarks.peers.conversation import NEWEST, Conversation
from benchmarks.peers.places import REGION, Place


class History(Conversation):
    """A chat message history."""

    def __init__(self, history: BaseChatMessageHistory, newest: BaseChatMessageHistory | None = None) -> None:
        self._history = history
        self._newest = newest

    async def store(self, user: str, assistant: str) -> None:
        await self._history.aadd_messages([HumanMessage(user), AIMessage(assistant)])

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        both = ((HumanMessage(user), AIMessage(assistant)) for user, assistant in turns)
        await self._history.aadd_messages([message for turn in both for message in turn])

    async def read(self) -> object:
        return await self._history.aget_messages()

    async def newest(self) -> Sequence[object]:
        if self._newest is None:
            raise NotImplementedError
        return await self._newest.aget_messages()

    async def questions(self) -> list[str]:
        return [str(one.content) for one in await self._history.aget_messages() if one.type == "human"]

    async def keep(self, *messages: BaseMessage) -> None:
        """Add messages as they are."""
        await self._history.aadd_messages(messages)


@asynccontextmanager
async def sql(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`SQLChatMessageHistory` of langchain-community on aiosqlite, with one shared engine."""
    from langchain_community.chat_message_histories import SQLChatMessageHistory
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{place.url}")
    yield lambda name: History(SQLChatMessageHistory(name, connection=engine))
    await engine.dispose()


@asynccontextmanager
async def ours(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`StmChatMessageHistory` on any datastore."""
    from stm_backends import Backend, MemoryKey, open_backend
    from stm_backends.integrations.langchain import StmChatMessageHistory

    def history(backend: Backend, name: str) -> History:
        key = MemoryKey("acme", "u1", name)
        newest = StmChatMessageHistory(backend, key, limit=NEWEST)
        return History(StmChatMessageHistory(backend, key), newest)

    async with open_backend(place.backend_url, create=True) as backend:
        yield lambda name: history(backend, name)


@asynccontextmanager
async def redis(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`RedisChatMessageHistory` of langchain-redis, on one shared client."""
    import redis as client_library
    from langchain_redis import RedisChatMessageHistory

    # It cannot read what Redis says of its index in version 3 of the protocol, the default of redis-py 8.
    with client_library.Redis.from_url(place.url, protocol=2) as client:
        yield lambda name: History(RedisChatMessageHistory(name.replace(" ", "_"), redis_client=client))


class _Postgres(Conversation):
    """A history takes one connection, which is opened with the first turn."""

    def __init__(self, place: Place, name: str, stack: AsyncExitStack) -> None:
        self._place, self._name, self._stack = place, name, stack
        self._history: History | None = None

    async def _opened(self) -> History:
        from langchain_postgres import PostgresChatMessageHistory
        from psycopg import AsyncConnection

        if self._history is None:
            connection = await AsyncConnection.connect(self._place.url, autocommit=True)
            self._stack.push_async_callback(connection.close)
            name = str(uuid.uuid5(uuid.NAMESPACE_OID, self._name))
            self._history = History(
                PostgresChatMessageHistory("chat_history", name, async_connection=connection)
            )
        return self._history

    async def store(self, user: str, assistant: str) -> None:
        await (await self._opened()).store(user, assistant)

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        await (await self._opened()).seed(turns)

    async def read(self) -> object:
        return await (await self._opened()).read()

    async def questions(self) -> list[str]:
        return await (await self._opened()).questions()

    async def keep(self, *messages: BaseMessage) -> None:
        await (await self._opened()).keep(*messages)


@asynccontextmanager
async def postgres(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`PostgresChatMessageHistory` of langchain-postgres, with a connection for each conversation."""
    from langchain_postgres import PostgresChatMessageHistory
    from psycopg import AsyncConnection

    async with AsyncExitStack() as stack:
        async with await AsyncConnection.connect(place.url, autocommit=True) as connection:
            await PostgresChatMessageHistory.acreate_tables(connection, "chat_history")
        yield lambda name: _Postgres(place, name, stack)


@asynccontextmanager
async def mongo(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`MongoDBChatMessageHistory` of langchain-mongodb, on one shared client."""
    from langchain_mongodb import MongoDBChatMessageHistory
    from pymongo import MongoClient

    with MongoClient(place.url) as client:

        def history(name: str, size: int | None) -> MongoDBChatMessageHistory:
            return MongoDBChatMessageHistory(
                None, name, database_name=place.name, history_size=size, client=client
            )

        yield lambda name: History(history(name, None), history(name, NEWEST))


@asynccontextmanager
async def dynamo(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`DynamoDBChatMessageHistory` of langchain-community: one item for each conversation."""
    import boto3
    from langchain_community.chat_message_histories import DynamoDBChatMessageHistory

    session = boto3.Session(region_name=REGION)
    client = session.client("dynamodb", endpoint_url=place.url)
    if place.name not in client.list_tables()["TableNames"]:
        client.create_table(
            TableName=place.name,
            KeySchema=[{"AttributeName": "SessionId", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "SessionId", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
    yield lambda name: History(
        DynamoDBChatMessageHistory(place.name, name, endpoint_url=place.url, boto3_session=session)
    )
