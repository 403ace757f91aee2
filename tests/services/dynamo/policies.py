"""Whether a policy of IAM allows a request to DynamoDB, by the rules that AWS documents.

Neither DynamoDB Local nor moto compares requests with the conditions of a policy. This covers what the
README's policies use: `Allow`, actions, `ForAllValues:StringLike` and `Null` on `dynamodb:LeadingKeys`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

KEYS = "dynamodb:LeadingKeys"


class Access(NamedTuple):
    """One action, and the partition keys that it names; IAM judges each write of a transaction by itself."""

    action: str
    keys: tuple[str, ...]


def accesses(operation: str, body: dict[str, Any]) -> Iterable[Access]:
    """Yield what IAM has to allow for a request."""
    match operation:
        case "GetItem" | "UpdateItem" | "DeleteItem":
            yield Access(operation, (body["Key"]["pk"]["S"],))
        case "PutItem":
            yield Access(operation, (body["Item"]["pk"]["S"],))
        case "Query":
            (name,) = re.findall(r"pk = (:\w+)", body["KeyConditionExpression"])
            yield Access(operation, (body["ExpressionAttributeValues"][name]["S"],))
        case "BatchGetItem":
            (of_table,) = body["RequestItems"].values()
            yield Access(operation, tuple(key["pk"]["S"] for key in of_table["Keys"]))
        case "BatchWriteItem":
            (writes,) = body["RequestItems"].values()
            yield Access(operation, tuple(one["DeleteRequest"]["Key"]["pk"]["S"] for one in writes))
        case "TransactWriteItems":
            for one in body["TransactItems"]:
                ((kind, write),) = one.items()
                yield from accesses(f"{kind}Item", write)
        case _:
            yield Access(operation, ())


def allows(statements: Sequence[dict[str, Any]], access: Access) -> bool:
    """Return whether one of the statements allows an access; what none allows is denied."""
    return any(
        one["Effect"] == "Allow"
        and f"dynamodb:{access.action}" in one["Action"]
        and all(_holds(operator, of, access.keys) for operator, of in one.get("Condition", {}).items())
        for one in statements
    )


def _holds(operator: str, of: dict[str, Any], keys: Sequence[str]) -> bool:
    ((name, expected),) = of.items()
    assert name == KEYS
    match operator:
        case "ForAllValues:StringLike":  # also true if there is no key
            return all(any(_like(pattern, key) for pattern in expected) for key in keys)
        case "Null":
            return expected == "false" if keys else expected == "true"
        case _:
            raise AssertionError(operator)


def _like(pattern: str, key: str) -> bool:
    parts = re.findall(r"\$\{[*?$]\}|.", pattern, re.DOTALL)
    kinds = {"*": ".*", "?": "."}
    text = "".join(
        re.escape(part[2]) if len(part) > 1 else kinds.get(part, re.escape(part)) for part in parts
    )
    return re.fullmatch(text, key, re.DOTALL) is not None
