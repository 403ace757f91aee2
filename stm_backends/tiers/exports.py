"""An exported vertex, as a JSON object.

```
{"format": "stm-vertex", "version": 1,
 "key": {"tenant_id": ..., "user_id": ..., "vertex_id": ...},
 "label": ..., "properties": {...}, "created_at": ISO 8601 in UTC,
 "edges": [{"target_id": ..., "label": ..., "properties": {...}}, ...]}     from this vertex
```

A vertex with the label `memory` is an entry of the long-term memory, with all of its fields. A target may be
a vertex that does not exist yet. Edges whose source does not exist yet are not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, cast

from stm_backends.errors import InvalidState
from stm_backends.plain_json import require_json
from stm_backends.tiers.graph import Properties
from stm_backends.tiers.stored import LABEL, require_entry, vertex_id
from stm_backends.tiers.vertices import Stored, require_properties

FORMAT: Final = "stm-vertex"
FORMAT_VERSION: Final = 1


def dump(
    owner: tuple[str, str], stored: Stored, edges: Mapping[tuple[str, str], Properties]
) -> dict[str, Any]:
    """Return a vertex, and the edges that lead from it, as a JSON object."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "key": {"tenant_id": owner[0], "user_id": owner[1], "vertex_id": stored.id},
        "label": stored.label,
        "properties": stored.properties,
        "created_at": stored.created_at,
        "edges": [
            {"target_id": target, "label": label, "properties": properties}
            for (target, label), properties in edges.items()
        ],
    }


def parse(document: Mapping[str, Any]) -> Stored:
    """Return the vertex in an exported one. Raises `InvalidState` with the path of the invalid value."""
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file
        raise InvalidState("this is not an exported vertex")
    if document.get("version") != FORMAT_VERSION:
        raise InvalidState(f"this version of the library imports only version {FORMAT_VERSION} of vertices")
    edges: object = document.get("edges")
    if not isinstance(edges, list):
        raise InvalidState("edges is not a list")
    out: dict[tuple[str, str], Properties] = {}
    for index, edge in enumerate(cast("list[object]", edges)):
        path = f"edges[{index}]"
        fields = _object(edge, path)
        ends = _text(fields, "target_id", path), _text(fields, "label", path)
        out[ends] = _properties(fields, path)
    label, properties = _text(document, "label"), _properties(document)
    id_ = _text(_object(document.get("key"), "key"), "vertex_id", "key")
    if label == LABEL:
        require_entry(properties)
        if id_ != vertex_id(properties["key"]):
            raise InvalidState("key.vertex_id is not the id of the entry's vertex")
    return Stored(
        id=id_,
        label=label,
        properties=properties,
        created_at=_time(document),
        out=out,
    )


def _time(document: Mapping[str, Any]) -> str:
    text = _text(document, "created_at")
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise InvalidState("created_at is not a time in ISO 8601") from None
    return text


def _properties(fields: Mapping[str, Any], path: str = "") -> Properties:
    properties = _object(fields.get("properties"), _path(path, "properties"))
    require_properties(properties)
    return properties


def _text(fields: Mapping[str, Any], name: str, path: str = "") -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidState(f"{_path(path, name)} is not text")
    return value


def _object(value: object, path: str) -> dict[str, Any]:
    require_json(value, path)
    if not isinstance(value, dict):
        raise InvalidState(f"{path} is not an object")
    return cast("dict[str, Any]", value)


def _path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
