"""What each error of DynamoDB means to a caller, and records that another program has changed."""

from __future__ import annotations

import pytest

from stm_backends.drivers.contract import ANY
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from tests.services.dynamo.support import KEY, opened, opened_on


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "AccessDeniedException", Denied),
        (400, "UnrecognizedClientException", Denied),
        (400, "ExpiredTokenException", Denied),
        (400, "InvalidSignatureException", Denied),
        (400, "ResourceNotFoundException", Unavailable),
        (400, "ReplicatedWriteConflictException", Unavailable),
        (400, "ValidationException", Corrupt),
        (500, "InternalServerError", OutcomeUnknown),
        (503, "ServiceUnavailable", OutcomeUnknown),
        (400, "SomethingNewException", OutcomeUnknown),
    ],
)
async def test_every_error_has_a_meaning_and_shows_nothing_of_the_key(old, status, code, kind):
    async with opened_on(old) as driver:
        for write in (
            lambda: driver.append(KEY, b"a", initial_version="v1", ttl=None),
            lambda: driver.replace(KEY, b"a", version="v1", expect=ANY, ttl=None),
            lambda: driver.delete(KEY),
        ):
            # What is refused as invalid is looked at, and that is refused here, too.
            old.script = [(status, code)] * (2 if code == "ValidationException" else 1)
            with pytest.raises(kind) as caught:
                await write()
            assert KEY.scope not in str(caught.value)
        # A read is retried a few times.
        old.script = [(status, code)] * 4
        with pytest.raises(Unavailable if kind is OutcomeUnknown else kind):
            await driver.load(KEY)
        old.script = []


async def test_a_missing_table_is_unavailable_and_says_how_to_create_it(place):
    async with opened(place, table="stm_not_there") as driver:
        with pytest.raises(Unavailable, match="open once with create=True"):
            await driver.load(KEY)


async def test_missing_credentials_are_denied(place, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    driver = DynamoDriver(
        DynamoSettings(table=place.table, region=place.region, endpoint_url=place.endpoint_url)
    )
    await driver.open()
    try:
        with pytest.raises(Denied, match="no credentials"):
            await driver.append(KEY, b"a", initial_version="v1", ttl=None)
    finally:
        await driver.close()


@pytest.mark.parametrize(
    "damage",
    [
        "REMOVE tail[0]",
        "REMOVE tail",
        "REMOVE body",
        "REMOVE version",
        "REMOVE entries",
        "SET tail = :text",
        "SET body = :text",
        "SET expires = :text",
    ],
)
async def test_missing_and_mistyped_attributes_are_corrupt(place, key, damage):
    client = place.client()
    async with opened(place) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=60)
        client.update_item(
            TableName=place.table,
            Key={"pk": {"S": key.scope}, "sk": {"S": key.name}},
            UpdateExpression=damage,
            **({"ExpressionAttributeValues": {":text": {"S": "else"}}} if ":text" in damage else {}),
        )
        with pytest.raises(Corrupt, match=r"dynamo\.load: the record is incomplete"):
            await driver.load(key)
    client.close()
