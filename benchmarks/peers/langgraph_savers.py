"""LangGraph's checkpointers: a graph of one node that reads all messages and adds an answer.

Where messages are compared, the node adds the call of a tool and its result, too. The graph runs with
`durability="exit"`, which stores one checkpoint for a turn and is documented as the fastest; the default,
`"async"`, stores one for each step. It is measured where our checkpointer is compared with LangGraph's own.
"""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, MessagesState, StateGraph

from benchmarks.peers.conversation import SHOWN, Conversation, Message
from benchmarks.peers.places import REGION, TOGETHER, Place


class Thread(Conversation):
    """A thread. Running the graph reads its state before it stores the new one."""

    def __init__(self, graph: Any, name: str, durability: str = "exit") -> None:
        self._graph = graph
        self._name = name
        self._durability = durability

    async def store(self, user: str, assistant: str) -> None:
        await self.exchange(user, assistant, 0)

    async def seed(self, turns: Sequence[tuple[str, str]]) -> None:
        both = ((HumanMessage(user), AIMessage(assistant)) for user, assistant in turns)
        await self._update([message for turn in both for message in turn])

    async def read(self) -> object:
        """Do nothing: `store` has read."""
        return None

    async def exchange(self, user: str, assistant: str, thinking_s: float) -> None:
        await self._run(HumanMessage(user), [AIMessage(assistant)], thinking_s)

    async def sidebar(self) -> Sequence[object]:
        """Return the threads of the latest checkpoints, of which each has one here."""
        latest = self._graph.checkpointer.alist(None, limit=SHOWN)
        return list({one.config["configurable"]["thread_id"] async for one in latest})

    async def questions(self) -> list[str]:
        return [str(one.content) for one in await self.whole() if one.type == "human"]

    async def add(self, *messages: Message) -> None:
        await self._update(convert_to_messages(messages))

    async def seed_messages(self, exchanges: Sequence[Sequence[Message]]) -> None:
        # A checkpoint has the whole state, which need not be stored once for each of them.
        await self.add(*(message for exchange in exchanges for message in exchange))

    async def speak(self, exchange: Sequence[Message], thinking_s: float = 0) -> Sequence[AnyMessage]:
        question, *answer = convert_to_messages(exchange)
        state = await self._run(question, answer, thinking_s)
        return state["messages"][: -len(answer)]

    async def said(self) -> list[str]:
        def text(one: Any) -> str:
            return one.tool_call_id if one.type == "tool" else str(one.content) or one.tool_calls[0]["id"]

        return [text(one) for one in await self.whole()]

    async def whole(self) -> Sequence[Any]:
        state = await self._graph.aget_state({"configurable": {"thread_id": self._name}})
        return state.values.get("messages", [])

    async def step(self) -> int:
        """Return the number of the latest checkpoint: each has the next one."""
        state = await self._graph.aget_state({"configurable": {"thread_id": self._name}})
        return state.metadata["step"]

    async def _run(self, question: AnyMessage, answer: Sequence[AnyMessage], thinking_s: float) -> Any:
        thread = {"thread_id": self._name, "answer": answer, "thinking_s": thinking_s}
        return await self._graph.ainvoke(
            {"messages": [question]}, {"configurable": thread}, durability=self._durability
        )

    async def _update(self, messages: Sequence[AnyMessage]) -> None:
        thread = {"configurable": {"thread_id": self._name}}
        await self._graph.aupdate_state(thread, {"messages": messages}, as_node="model")


async def _model(state: Any, config: RunnableConfig) -> dict[str, list[AnyMessage]]:
    told = config["configurable"]
    if told["thinking_s"]:
        await asyncio.sleep(told["thinking_s"])
    return {"messages": told["answer"]}


def _joined(state: list[AnyMessage], writes: Sequence[Any]) -> list[AnyMessage]:
    return [*state, *(message for write in writes for message in write)]


class _DeltaState(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(_joined)]


def graph_of(saver: Any, state: Any = MessagesState) -> Any:
    """Return the graph with a checkpointer."""
    builder = StateGraph(state)
    builder.add_node("model", _model)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=saver)


def _threads(saver: Any, state: Any = MessagesState) -> Callable[[str], Conversation]:
    graph = graph_of(saver, state)
    return lambda name: Thread(graph, name)


@asynccontextmanager
async def sqlite_saver(place: Place) -> AsyncIterator[Any]:
    """Open an `AsyncSqliteSaver`."""
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async with AsyncSqliteSaver.from_conn_string(place.url) as saver:
        yield saver


@asynccontextmanager
async def sqlite(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`AsyncSqliteSaver`."""
    async with sqlite_saver(place) as saver:
        yield _threads(saver)


@asynccontextmanager
async def postgres_saver(place: Place) -> AsyncIterator[Any]:
    """Open an `AsyncPostgresSaver` on a pool, with the settings that its documentation asks for."""
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from psycopg.rows import dict_row
    from psycopg_pool import AsyncConnectionPool

    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: Any = AsyncConnectionPool(place.url, min_size=4, max_size=TOGETHER, kwargs=options, open=False)
    async with pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield saver


@asynccontextmanager
async def postgres(place: Place, state: Any = MessagesState) -> AsyncIterator[Callable[[str], Conversation]]:
    """`AsyncPostgresSaver`."""
    async with postgres_saver(place) as saver:
        yield _threads(saver, state)


@asynccontextmanager
async def postgres_delta(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """The same, with the messages in a `DeltaChannel`."""
    async with postgres(place, _DeltaState) as threads:
        yield threads


@asynccontextmanager
async def redis(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`AsyncShallowRedisSaver`, which keeps only the last checkpoint."""
    from langgraph.checkpoint.redis.ashallow import AsyncShallowRedisSaver

    async with AsyncShallowRedisSaver.from_conn_string(place.url) as saver:
        yield _threads(saver)


@asynccontextmanager
async def mongo(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`MongoDBSaver`, whose asynchronous methods run in threads."""
    from langgraph.checkpoint.mongodb import MongoDBSaver
    from pymongo import MongoClient

    with MongoClient(place.url) as client:
        yield _threads(MongoDBSaver(client, db_name=place.name))


@asynccontextmanager
async def dynamo(place: Place) -> AsyncIterator[Callable[[str], Conversation]]:
    """`DynamoDBSaver` of langgraph-checkpoint-aws, with compression and without S3."""
    import boto3
    from langgraph_checkpoint_aws import DynamoDBSaver

    client = boto3.client("dynamodb", region_name=REGION, endpoint_url=place.url)
    if place.name not in client.list_tables()["TableNames"]:
        client.create_table(
            TableName=place.name,
            KeySchema=[
                {"AttributeName": "PK", "KeyType": "HASH"},
                {"AttributeName": "SK", "KeyType": "RANGE"},
            ],
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("PK", "SK")],
            BillingMode="PAY_PER_REQUEST",
        )
    saver = DynamoDBSaver(
        place.name, region_name=REGION, endpoint_url=place.url, enable_checkpoint_compression=True
    )
    yield _threads(saver)
