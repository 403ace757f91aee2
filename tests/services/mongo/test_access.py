"""Which users may do what, by password and over TLS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from stm_backends import open_backend
from stm_backends.drivers.contract import ANY, Key
from stm_backends.errors import ConfigurationError, Denied, Unavailable
from stm_backends.testing import open_at
from stm_backends_mongo import open_driver
from tests.support.contract import opened
from tests.support.mongod import Mongod
from tests.support.tenants import SMALL, serve

WORD = "p/s3cret"

README = (Path(__file__).parents[3] / "stm_backends_mongo" / "README.md").read_text("utf-8")

NARROW = json.loads(re.findall(r"db\.createRole\((\{.*?\n\})\)", README, re.DOTALL)[0])
"""The role of the README."""


@pytest.fixture(scope="module")
def guarded(mongod_program, ca, tmp_path_factory):
    """A server with users, and with TLS for those who ask for it."""
    both = tmp_path_factory.mktemp("certificate") / "both.pem"
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    tls = "--tlsMode", "preferTLS", "--tlsCertificateKeyFile", str(both)
    server = Mongod(mongod_program, tmp_path_factory.mktemp("guarded") / "data", "--auth", *tls)
    server.start()
    with MongoClient(f"mongodb://{server.address}/?directConnection=true") as client:
        roles = [{"role": "root", "db": "admin"}]
        client.admin.command("createUser", "root", pwd=WORD, roles=roles)
    with MongoClient(f"mongodb://root:{quote_plus(WORD)}@{server.address}/?directConnection=true") as client:
        client.chats.command("createRole", NARROW["role"], privileges=NARROW["privileges"], roles=[])
        for name, role in (("writer", "readWrite"), ("reader", "read"), ("narrow", NARROW["role"])):
            client.chats.command("createUser", name, pwd=WORD, roles=[{"role": role, "db": "chats"}])
    yield server
    server.kill()


def url_for(server: Mongod, user: str, secret: str = WORD) -> str:
    return f"mongodb://{user}:{quote_plus(secret)}@{server.address}/chats?deadline_s=3"


@pytest.mark.parametrize("user", ["writer", "narrow"])
async def test_the_permissions_of_the_readme_are_enough(guarded, user):
    async with opened(url_for(guarded, "writer"), create=True):
        pass
    async with opened(url_for(guarded, user)) as driver:
        assert await driver.append(Key("s", user), b"a", initial_version="v", ttl=None) == 1
        assert (await driver.scan("s", limit=1)).names == (user,)
        assert await driver.replace(Key("s", user), b"b", version="w", expect=ANY, ttl=None) is True
        assert await driver.delete(Key("s", user)) is True
    async with open_backend(url_for(guarded, user), max_entry_bytes=SMALL) as backend:
        await serve(backend, "acme")


async def test_the_role_of_the_readme_sets_nothing_up_and_reads_nothing_else(guarded):
    with pytest.raises(Denied):
        async with opened(f"{url_for(guarded, 'narrow')}&collection=other", create=True):
            pass
    with MongoClient(url_for(guarded, "narrow").partition("?")[0], directConnection=True) as client:
        for work in (
            client.chats.other.find_one,
            client.chats.stm_records.drop,
            client.chats.list_collection_names,
            client.other.stm_records.find_one,
        ):
            with pytest.raises(OperationFailure, match="not authorized"):
                work()


async def test_a_server_is_trusted_by_its_certificate_alone(guarded, authority):
    url = f"{url_for(guarded, 'writer')}&tls=true"
    async with opened(f"{url}&tlsCAFile={quote_plus(str(authority))}", create=True) as driver:
        assert await driver.load(Key("s", "tls")) is None
    with pytest.raises(Unavailable, match="certificate is not trusted here"):
        async with opened(url):
            pass
    by_name = url.replace("127.0.0.1", "localhost")
    with pytest.raises(Unavailable, match="certificate is for another host name"):
        async with opened(f"{by_name}&tlsCAFile={quote_plus(str(authority))}"):
            pass


async def test_a_file_for_tls_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "empty.pem").touch()
    for given, says in (
        (f"tlsCAFile={tmp_path}/none.pem", "tlsCAFile names a file that cannot be read"),
        (f"tlsCAFile={tmp_path}/empty.pem", "tlsCAFile names a file that holds no certificate"),
        (f"tlsCertificateKeyFile={tmp_path}/none.pem", "tlsCertificateKeyFile names a file that cannot"),
    ):
        with pytest.raises(ConfigurationError, match=says) as caught:
            await open_at(f"mongodb://localhost:1/?tls=true&{given}")
        assert "none.pem" not in str(caught.value)


async def test_a_user_without_the_right_is_denied_and_no_secret_shows(guarded):
    async with opened(url_for(guarded, "writer"), create=True) as driver:
        await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
    async with opened(url_for(guarded, "reader")) as driver:
        assert await driver.load(Key("s", "n")) is not None
        with pytest.raises(Denied, match=r"mongo\.append: this user"):
            await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
        with pytest.raises(Denied):
            await driver.delete(Key("s", "n"))
    driver = open_driver(url_for(guarded, "writer", "wr0ng"))
    with pytest.raises(Denied, match=r"mongo\.open: MongoDB does not accept these credentials") as caught:
        await driver.open()
    assert "wr0ng" not in f"{caught.value!r} {caught.value.__cause__!r}"
    with pytest.raises(Denied):
        async with opened(f"mongodb://{guarded.address}/chats"):
            pass
