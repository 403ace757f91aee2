"""Credentials that are looked at: moto knows users and their policies, and DynamoDB Local does not."""

from __future__ import annotations

import json
from unittest import mock

import boto3
import pytest
from moto import settings as moto_settings

from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import Denied
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from tests.support.moto import moto_server

pytestmark = pytest.mark.full

KEY = Key("acme:u1:memory", "chat")
REGION = "eu-west-1"
TABLE = "stm_credentials"
READ = ("dynamodb:GetItem", "dynamodb:Query", "dynamodb:DescribeTable")


def settings(url, user, **more):
    keys = {"access_key_id": user["AccessKeyId"], "secret_access_key": user["SecretAccessKey"]}
    return DynamoSettings(table=TABLE, region=REGION, endpoint_url=url, **{**keys, **more})


@pytest.fixture(scope="module")
def guarded():
    """A DynamoDB with a table, one user who may do all with it, and one who may read it."""
    with moto_server() as url:
        users = users_of(url)
        with mock.patch.object(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0):
            yield url, users


def users_of(url):
    """Create the two users, and return their keys."""
    anybody = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": REGION}
    iam = boto3.client("iam", endpoint_url=url, **anybody)
    users = {}
    for name, actions in (("writer", ("dynamodb:*",)), ("reader", READ)):
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=document)
        users[name] = iam.create_access_key(UserName=name)["AccessKey"]
    iam.close()
    return users


async def opened(url, user, *, create=False, **more):
    driver = DynamoDriver(settings(url, user, **more), create=create)
    await driver.open()
    return driver


@pytest.fixture
async def written(guarded):
    url, users = guarded
    driver = await opened(url, users["writer"], create=True)
    await driver.replace(KEY, b"a", version="v1", expect=ANY, ttl=None)
    yield
    assert await driver.load(KEY) == Record("v1", b"a", ()), "what was denied has changed nothing"
    await driver.close()


@pytest.mark.parametrize("wrong", [{"secret_access_key": "swordf1sh"}, {"access_key_id": "AKIAnobody"}])
async def test_wrong_credentials_are_denied_and_shown_nowhere(guarded, written, wrong):
    url, users = guarded
    driver = await opened(url, users["writer"], **wrong)
    for work in (
        lambda: driver.load(KEY),
        lambda: driver.append(KEY, b"b", initial_version="v", ttl=None),
        lambda: driver.scan(KEY.scope, limit=1),
    ):
        with pytest.raises(Denied) as caught:
            await work()
        assert "swordf1sh" not in f"{caught.value!r} {caught.value} {driver!r}"
    await driver.close()


async def test_who_may_only_read_reads_and_is_denied_what_would_write(guarded, written):
    url, users = guarded
    driver = await opened(url, users["reader"])
    assert await driver.load(KEY) == Record("v1", b"a", ())
    for write in (
        lambda: driver.append(KEY, b"b", initial_version="v", ttl=None),
        lambda: driver.replace(KEY, b"b", version="v2", expect=ANY, ttl=None),
        lambda: driver.delete(KEY),
    ):
        with pytest.raises(Denied):
            await write()
    await driver.close()
