"""The command that copies threads of LangGraph from another checkpointer to a backend.

```
python -m stm_backends.integrations.langgraph SOURCE TARGET [--key-of MODULE:FUNCTION] [--thread ID]...
```
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from langgraph.checkpoint.base import BaseCheckpointSaver

from stm_backends.backend import open_backend
from stm_backends.errors import ConfigurationError, StmError
from stm_backends.integrations.langgraph.moving import copy_threads
from stm_backends.integrations.langgraph.saver import StmSaver
from stm_backends.sealing.naming import load_sealing, named_object

_AIO: Final = {
    "sqlite": ("langgraph.checkpoint.sqlite.aio", "AsyncSqliteSaver", "langgraph-checkpoint-sqlite"),
    "postgresql": (
        "langgraph.checkpoint.postgres.aio",
        "AsyncPostgresSaver",
        "langgraph-checkpoint-postgres",
    ),
    "redis": ("langgraph.checkpoint.redis.aio", "AsyncRedisSaver", "langgraph-checkpoint-redis"),
}
_MONGODB: Final = ("langgraph.checkpoint.mongodb", "MongoDBSaver", "langgraph-checkpoint-mongodb")
_DYNAMODB: Final = ("langgraph_checkpoint_aws", "DynamoDBSaver", "langgraph-checkpoint-aws")
"""LangGraph's checkpointers by URL scheme, with module and package. A program installs those that it uses."""

_SAME: Final = {"postgres": "postgresql", "rediss": "redis", "mongodb+srv": "mongodb"}


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[BaseCheckpointSaver[Any]]:
    """Open the checkpointer of a URL. Raises `ConfigurationError` for an unknown URL or a missing package."""
    parts = urlsplit(url)
    scheme = _SAME.get(parts.scheme, parts.scheme)
    if scheme in _AIO:
        name = url
        if scheme == "sqlite":
            name = _existing(parts.path.removeprefix("/"))
        async with _class(*_AIO[scheme]).from_conn_string(name) as saver:
            yield saver
    elif scheme == "mongodb":
        database = parts.path.strip("/")
        with _class(*_MONGODB).from_conn_string(url, **({"db_name": database} if database else {})) as saver:
            yield saver
    elif scheme == "dynamodb":
        given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        yield _class(*_DYNAMODB)(
            parts.netloc, region_name=given.get("region"), endpoint_url=given.get("endpoint_url")
        )
    else:
        raise ConfigurationError(
            "the source must begin with sqlite:///, postgresql://, redis://, mongodb:// or dynamodb://"
        )


def _existing(file: str) -> str:
    """Return the name of a file. Raises `ConfigurationError` if it does not exist; it would be created."""
    if not Path(file).is_file():
        raise ConfigurationError("the source is not an SQLite file: write sqlite:///FILE or sqlite:////FILE")
    return file


def _class(module: str, name: str, package: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the source needs a package: pip install {package}") from error


async def copied(
    source: str, target: str, *, key_of: str | None, sealing: str | None, threads: Sequence[str] | None
) -> int:
    """Copy threads from one URL to another; returns how many checkpoints were copied."""
    function: Any = named_object("--key-of", key_of, FunctionType) if key_of else None
    async with (
        opened(source) as saver,
        open_backend(target, create=True, sealing=load_sealing(sealing)) as backend,
    ):
        return await copy_threads(saver, StmSaver(backend, key_of=function), threads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m stm_backends.integrations.langgraph",
        description="Copy threads of LangGraph from another checkpointer to a backend. Stop the graphs that "
        "use them first. The command may be repeated: it copies nothing twice. The source is not changed.",
    )
    parser.add_argument(
        "source",
        help="sqlite:///FILE, postgresql://, redis://, mongodb://HOST/DATABASE, dynamodb://TABLE?region=",
    )
    parser.add_argument("target", help="the URL of a backend, such as redis://host:6379/0; it is set up")
    parser.add_argument("--key-of", metavar="MODULE:FUNCTION", help="the key_of function of your StmSaver")
    parser.add_argument("--sealing", metavar="MODULE:OBJECT", help="the sealing of the backend")
    parser.add_argument(
        "--thread", metavar="ID", action="append", help="copy this thread; may be repeated [default: all]"
    )
    given = parser.parse_args(arguments)
    work = copied(
        given.source, given.target, key_of=given.key_of, sealing=given.sealing, threads=given.thread
    )
    try:
        count = asyncio.run(work)
    except StmError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{count} checkpoints were copied\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
