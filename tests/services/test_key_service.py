"""Data keys wrapped by moto's KMS, which checks the encryption context as the real service does."""

from __future__ import annotations

import threading
from typing import Any

import boto3  # pyright: ignore[reportMissingTypeStubs] -- it has none
import pytest
from moto import mock_aws

from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import ConfigurationError, Corrupt, Unavailable
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.keys import Owner
from stm_backends.sealing.wrapping import KmsWrapping

ADA, BOB, ACME = Owner("acme", "ada"), Owner("acme", "bob"), Owner("acme", "")


@pytest.fixture
def client() -> Any:
    with mock_aws():
        # `mock_aws` sets credentials of its own in the environment.
        yield boto3.client("kms", "eu-west-1")  # pyright: ignore[reportUnknownMemberType] -- untyped


async def test_a_key_wrapped_by_the_service_comes_back_to_its_owner_only(client: Any) -> None:
    wrapping = KmsWrapping(client, key=client.create_key()["KeyMetadata"]["KeyId"])
    wrapped = await wrapping.wrap(bytes(32), ADA, "k1")
    assert await wrapping.unwrap(wrapped, ADA, "k1") == bytes(32)
    for owner, key_id in ((BOB, "k1"), (ACME, "k1"), (ADA, "k2")):
        with pytest.raises(Corrupt):
            await wrapping.unwrap(wrapped, owner, key_id)


async def test_processes_share_data_keys_that_the_service_wraps(client: Any) -> None:
    wrapping = KmsWrapping(client, key=client.create_key()["KeyMetadata"]["KeyId"])
    store = MemoryDriver()
    await store.open()
    one, two = EnvelopeKeys(store, wrapping), EnvelopeKeys(store, wrapping)
    assert await one.primary(ADA) == await two.primary(ADA)


async def test_keys_that_the_service_wraps_need_no_rewrapping(client: Any) -> None:
    wrapping = KmsWrapping(client, key=client.create_key()["KeyMetadata"]["KeyId"])
    store = MemoryDriver()
    await store.open()
    keys = EnvelopeKeys(store, wrapping)
    before = await keys.primary(ADA)
    assert await keys.rewrap(ADA) == 0
    assert await EnvelopeKeys(store, wrapping).key(ADA, before.id) == before


async def test_a_service_that_fails_is_unavailable() -> None:
    class Failing:
        def encrypt(self, **_: object) -> None:
            raise ConnectionError("secret-host:443")

        decrypt = encrypt

    with pytest.raises(Unavailable, match="ConnectionError") as found:
        await KmsWrapping(Failing(), key="k").wrap(bytes(32), ADA, "k1")
    assert "secret-host" not in str(found.value)


async def test_a_service_that_does_not_answer_is_unavailable() -> None:
    answer = threading.Event()

    class Frozen:
        def encrypt(self, **_: object) -> None:
            answer.wait()

        decrypt = encrypt

    try:
        with pytest.raises(Unavailable, match="TimeoutError"):
            await KmsWrapping(Frozen(), key="k", deadline_s=0.01).wrap(bytes(32), ADA, "k1")
    finally:
        answer.set()


def test_an_object_that_is_no_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="KMS client"):
        KmsWrapping(object(), key="k")
