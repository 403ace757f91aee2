"""A driver on objects with conditional writes, written from the page for authors, keeps the contract."""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from urllib.parse import quote

import boto3
import pytest

from stm_backends.testing import Datastore, DriverContract

pytest.importorskip("moto", reason="the dependency group `services` brings the object store")
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.strangers.objects import Head, open_objects, place, read

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "pretended", "AWS_SECRET_ACCESS_KEY": "pretended"}


@pytest.fixture(scope="module")
def store():
    """The address of an object store: moto, which is atomic because it does one thing at a time."""
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.full
class TestObjectDriver(DriverContract):
    @pytest.fixture
    def datastore(self, store, monkeypatch):
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        bucket = f"stm-{uuid.uuid4().hex}"
        client = boto3.client("s3", region_name="eu-west-1", endpoint_url=f"http://{store}")

        async def damage(key):
            found = client.get_object(Bucket=bucket, Key=place(key))
            data = found["Body"].read()[:-1]
            client.put_object(Bucket=bucket, Key=place(key), Body=data, Metadata=found["Metadata"])

        async def peek(key):
            try:
                found = client.get_object(Bucket=bucket, Key=place(key))
            except client.exceptions.NoSuchKey:
                return None
            return read(Head.of(found), found["Body"].read())

        def at(address, deadline_s=10):
            return f"s3://{bucket}?endpoint_url={quote(f'http://{address}')}&deadline_s={deadline_s}"

        return Datastore(
            open=functools.partial(open_objects, at(store)),
            address=store,
            through=lambda address: open_objects(at(address, deadline_s=2)),
            tick=2.0,
            histories=5,
            damage=damage,
            peek=peek,
            server="moto",
        )
