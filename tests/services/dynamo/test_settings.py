"""What a DynamoDB URL says, and what it cannot say; none of this needs a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stm_backends_dynamo
from stm_backends import open_backend
from stm_backends.drivers import plugins
from stm_backends.errors import ConfigurationError, MissingExtra
from stm_backends_dynamo import DynamoSettings, open_driver, statements
from stm_backends_dynamo.plugin import schema, stm_backend
from tests.support.command_line import without_coverage

SECRETS = {"access_key_id": "AKIAHUSH", "secret_access_key": "hush-secret", "session_token": "hush-token"}

README = Path(stm_backends_dynamo.__file__).with_name("README.md").read_text("utf-8")


def test_a_url_names_a_table_and_settings_follow_as_parameters():
    settings = DynamoSettings.from_url(
        "dynamodb://My.Table_1?region=eu-west-1&endpoint_url=http://127.0.0.1:8000&profile=dev"
        "&pool_size=7&deadline_s=2.5&max_entry_bytes=1000"
    )
    assert settings == DynamoSettings(
        table="My.Table_1",
        region="eu-west-1",
        endpoint_url="http://127.0.0.1:8000",
        profile="dev",
        pool_size=7,
        deadline_s=2.5,
        max_entry_bytes=1000,
    )


def test_a_table_and_a_place_have_defaults():
    assert DynamoSettings.from_url("dynamodb://?region=eu-west-1").table == "stm_backends"
    assert open_driver("dynamodb://table").traits.max_entry == 401_408
    assert open_driver(None, table="table", deadline_s=1.0).traits.deadline == 1.0


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://table", "begins with dynamodb://"),
        ("dynamodb://AKIAHUSH:hush-secret@table", "cannot contain credentials"),
        ("dynamodb://127.0.0.1:8000", "endpoint_url=http://HOST:PORT"),
        ("dynamodb://table/other", "names only a table"),
        ("dynamodb://table#other", "no fragment"),
        ("dynamodb://ab", "3 to 255"),
        ("dynamodb://a%20table", "3 to 255"),
        ("dynamodb://table?regoin=eu-west-1", "did you mean 'region'"),
        ("dynamodb://table?secret_access_key=hush-secret", "no setting 'secret_access_key'"),
        ("dynamodb://table?region=", "region must be a string"),
        ("dynamodb://table?region=a&region=b", "twice"),
        ("dynamodb://table?endpoint_url=127.0.0.1:8000", "endpoint_url must be a URL"),
        ("dynamodb://table?endpoint_url=http://u:hush-secret@h", "no user"),
        ("dynamodb://table?endpoint_url=http://[h", "endpoint_url must be a URL"),
        ("dynamodb://[table", "only an IPv6 address is in brackets"),
        ("dynamodb://table?hush-secret@h", "no such setting"),
        ("dynamodb://table?pool_size=0", "pool_size must be an integer between"),
        ("dynamodb://table?pool_size=many", "not a number"),
        ("dynamodb://table?deadline_s=0", "positive"),
        ("dynamodb://table?max_entry_bytes=405505", "max_entry_bytes must be an integer between"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy_and_without_a_secret(url, says):
    with pytest.raises(ConfigurationError) as caught:
        DynamoSettings.from_url(url)
    assert says in str(caught.value)
    assert "hush-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tabel": "x"}, "did you mean 'table'"),
        ({"table": 5}, "table must be"),
        ({"access_key_id": "a"}, "given together"),
        ({"secret_access_key": "hush-secret"}, "given together"),
        ({"session_token": "hush-secret"}, "needs an access_key_id"),
        ({"region": 5}, "region must be a string or None"),
        ({"endpoint_url": 5}, "endpoint_url must be a string"),
        ({"clock": 5}, "clock must be a function"),
        ({"client": object()}, "boto3.client('dynamodb')"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, says):
    with pytest.raises(ConfigurationError) as caught:
        open_driver("dynamodb://", **options)
    assert says in str(caught.value)
    assert "hush-secret" not in str(caught.value)


def test_a_setting_given_differently_in_url_and_option_is_refused():
    with pytest.raises(ConfigurationError, match="give table differently"):
        open_driver("dynamodb://table", table="other")


def test_secrets_are_shown_by_nothing():
    settings = DynamoSettings(**SECRETS)
    driver = open_driver("dynamodb://table", **SECRETS)
    shown = f"{settings!r} {settings} {driver!r} {schema('dynamodb://table', **SECRETS)}"
    assert "hush" not in shown.lower()


def test_a_client_brings_its_own_place_and_credentials():
    boto3 = pytest.importorskip("boto3")
    client = boto3.client("dynamodb", region_name="eu-west-1")
    for name, value in {"region": "eu-west-1", "pool_size": 3, "access_key_id": "AKIAHUSH"}.items():
        with pytest.raises(ConfigurationError, match=f"brings its own connection.*: {name}$"):
            open_driver("dynamodb://table", client=client, **{name: value})
    for query in ("pool_size=50", "region=eu-west-1"):
        with pytest.raises(ConfigurationError, match="brings its own connection"):
            open_driver(f"dynamodb://table?{query}", client=client)
    # A default that is given explicitly is refused too.
    with pytest.raises(ConfigurationError, match="brings its own connection"):
        open_driver(None, client=client, pool_size=50)
    assert open_driver("dynamodb://table", client=client, deadline_s=2.0).traits.deadline == 2.0
    with pytest.raises(ConfigurationError, match="not S3"):
        open_driver("dynamodb://table", client=boto3.client("s3", region_name="eu-west-1"))
    with pytest.raises(ConfigurationError, match=re.escape("pass boto3.client('dynamodb')")):
        open_driver(
            "dynamodb://table", client=boto3.resource("dynamodb", region_name="eu-west-1").meta.client
        )
    client.close()


async def test_a_missing_region_is_a_configuration_error(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for options, says in (
        ({}, r"dynamodb://TABLE\?region="),
        ({"profile": "nobody", "region": "eu-west-1"}, "ProfileNotFound"),
    ):
        driver = open_driver("dynamodb://table", **SECRETS, **options)
        with pytest.raises(ConfigurationError, match=says):
            await driver.open()


def test_the_schema_is_what_a_command_line_of_aws_would_be_told():
    text = schema("dynamodb://talks?region=eu-west-1&endpoint_url=http://127.0.0.1:8000")
    assert text.count("--table-name talks --region eu-west-1 --endpoint-url http://127.0.0.1:8000") == 3
    for part in ("create-table", "PAY_PER_REQUEST", "AttributeName=pk,KeyType=HASH", "AttributeName=reap_at"):
        assert part in text


def test_importing_the_package_imports_no_client_library():
    program = (
        "import json, sys, stm_backends_dynamo.plugin, stm_backends_dynamo as d; d.DynamoSettings; "
        "d.plugin.schema('dynamodb://table'); print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=without_coverage(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(json.loads(ran.stdout))
    assert not loaded & {"boto3", "botocore", "aiobotocore", "aiohttp"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stm_backends_dynamo.nothing


def test_without_its_extra_opening_says_the_line_that_installs_it(monkeypatch):
    find = plugins.importlib.util.find_spec
    monkeypatch.setattr(
        plugins.importlib.util, "find_spec", lambda name: None if name == "aiobotocore" else find(name)
    )
    with pytest.raises(
        MissingExtra, match=r'stm-backends\[dynamo\].*: pip install "aiobotocore>=.*" "aiohttp>='
    ):
        open_backend("dynamodb://table")
    assert stm_backend().requires == ("aiobotocore", "botocore")


async def test_a_client_of_boto3_needs_no_other_library(place):
    program = """
import sys
sys.modules |= dict.fromkeys(("aiobotocore", "aiohttp"))
import asyncio, json, boto3
from stm_backends import ConversationTurn, MemoryKey, MissingExtra, ShortTermMemoryConfig, open_backend
table, aws = json.loads(sys.argv[1])
try:
    open_backend("dynamo", table=table)
except MissingExtra as error:
    print(error.name)
async def main():
    async with open_backend("dynamo", table=table, client=boto3.client("dynamodb", **aws)) as backend:
        config = ShortTermMemoryConfig(strategy="truncation")
        memory = backend.memory(MemoryKey("acme", "boto3", "chat"), config)
        await memory.add_turn(ConversationTurn("Hello", "Hi"))
        print((await memory.turns())[0].user_message)
        await backend.sessions.erase(MemoryKey("acme", "boto3", "chat"))
asyncio.run(main())
"""
    given = json.dumps([place.table, place.aws])
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, given), stdout=subprocess.PIPE, env=without_coverage()
    )
    said, _ = await ran.communicate()
    assert (ran.returncode, said.decode().split()) == (0, ["aiobotocore", "Hello"])


def test_the_policy_in_the_readme_allows_what_the_driver_does_and_no_more():
    policy, _ = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    (statement,) = json.loads(policy)["Statement"]
    asked = set(re.findall(r'Statement\(\s*"(\w+_item|query)"', Path(statements.__file__).read_text()))
    assert {f"dynamodb:{''.join(map(str.title, call.split('_')))}" for call in asked} == set(
        statement["Action"]
    )
    assert statement["Condition"] == {
        "ForAllValues:StringLike": {"dynamodb:LeadingKeys": ["acme:*"]},
        "Null": {"dynamodb:LeadingKeys": "false"},
    }


def test_the_readme_lists_every_setting():
    for field in dataclasses.fields(DynamoSettings):
        assert f"`{field.name}`" in README
