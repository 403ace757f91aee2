"""The policies of the README allow what a tenant does, and nothing of another tenant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stm_backends import open_backend
from tests.services.dynamo.policies import Access, accesses, allows
from tests.support.dynamodb import PRETENDED
from tests.support.tenants import SMALL, serve

README = (Path(__file__).parents[3] / "stm_backends_dynamo" / "README.md").read_text("utf-8")

DOCUMENTS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
(ACME,) = (document["Statement"] for document in DOCUMENTS if isinstance(document, dict))
(PLANNER,) = (document for document in DOCUMENTS if isinstance(document, list))

OF_ITEMS = ("GetItem", "BatchGetItem", "PutItem", "UpdateItem", "DeleteItem", "BatchWriteItem", "Query")


def written_for(pattern: str) -> list[dict[str, Any]]:
    return json.loads(json.dumps(ACME).replace("acme:*", f"{pattern}:*"))


@pytest.fixture
async def recorded(old):
    """What makes a backend behind a proxy, and tells what it asked IAM for."""

    def backend():
        url = f"dynamodb://stm_policies?region=eu-west-1&max_entry_bytes={SMALL}"
        return open_backend(url, endpoint_url=old.url, create=True, **PRETENDED)

    def asked() -> list[Access]:
        requests = zip(old.asked, old.bodies, strict=True)
        return [access for operation, body in requests for access in accesses(operation, body)]

    return backend, asked


@pytest.mark.parametrize(
    ("tenant", "pattern"),
    [("acme", "acme"), ("a:b", "a%3Ab"), ("100%", "100%25"), ("a*b?$c", "a${*}b${?}${$}c")],
)
async def test_the_policy_of_a_tenant_allows_all_that_it_needs(recorded, old, tenant, pattern):
    backend, asked = recorded
    async with backend() as opened:
        old.asked.clear()
        old.bodies.clear()
        await serve(opened, tenant)
    assert {access.action for access in asked()} <= {*OF_ITEMS}
    assert {"GetItem", "PutItem", "UpdateItem", "DeleteItem", "BatchWriteItem", "Query"} <= {
        access.action for access in asked()
    }
    # An erasure asks for states that may be of this tenant or of another, and for notes of work. If denied,
    # it goes on without them.
    of_all = {Access("Query", ("::blob",)), Access("Query", ("::work",))}
    assert of_all <= {*asked()}
    assert not any(allows(written_for(pattern), access) for access in of_all)
    for access in (access for access in asked() if access not in of_all):
        assert allows(written_for(pattern), access), access
        for other in ("acm", "acme2", "victim", "a", "100", "aXb"):
            assert not allows(written_for(other), access), access


@pytest.mark.parametrize("action", [*OF_ITEMS, "Scan", "DescribeTable", "DeleteTable", "PartiQLSelect"])
@pytest.mark.parametrize(
    "keys",
    [(), ("victim:u:memory",), ("acme:u:memory", "victim:u:memory"), ("acme",), ("::planner",)],
    ids=str,
)
def test_what_is_not_of_the_tenant_is_denied(action, keys):
    assert not allows(ACME, Access(action, keys))


def test_without_null_a_request_that_names_no_key_would_be_allowed():
    (statement,) = json.loads(json.dumps(ACME))
    del statement["Condition"]["Null"]
    assert allows([statement], Access("Query", ()))


async def test_a_run_can_be_used_by_its_token_but_runs_cannot_be_listed(recorded, old):
    backend, asked = recorded
    run = {"step": "x" * 5_000, "tool_context": {"tenant_id": "acme", "user_id": "u1"}}
    async with backend() as opened:
        old.asked.clear()
        old.bodies.clear()
        await opened.state_store.save_planner_state("token", run)
        assert await opened.state_store.load_planner_state("token") == run
        found = asked()
        await opened.sessions.erase_tenant("acme")
    assert any(key.startswith("::planner\0") for access in found for key in access.keys), "it has parts"
    for access in found:
        # Of a batch that is denied, the driver reads each record by itself.
        assert access.action == "BatchGetItem" or allows([*ACME, *PLANNER], access), access
    assert not allows([*ACME, *PLANNER], Access("Query", ("::planner",)))
    assert not allows([*ACME, *PLANNER], Access("Query", ("::blob",)))
