"""The record of a vertex, as pure functions.

```
body   {"id", "label", "properties", "created_at", "stamp", "index", "out": [...], "into": [...]}
entry  {"to": target, "label": ..., "properties": ...}    the half of an edge at its source
entry  {"from": source, "label": ...}                     the half of an edge at its target
```

An edge has two halves, each an entry of the vertex at its end, and exists while both do. Adding an edge takes
two appends, which conflict with nothing, and the edge is visible only once both are done. Deleting a vertex
deletes its halves, which ends its edges even if the vertex is added again. A body without a label holds edges
of a vertex that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from stm_backends.drivers.contract import Record
from stm_backends.errors import Corrupt
from stm_backends.plain_json import require_json
from stm_backends.records.codec import Codec
from stm_backends.tiers.graph import Properties, Vertex, same_properties, vertex_of


@dataclass(frozen=True, slots=True)
class Stored:
    """A vertex and its halves of edges. `version` is `None` if the record does not exist.

    `label` is `None` if the vertex does not exist. `stamp` names its entries in the index, and `index` is the
    number of the rule that it was indexed by. `length` is the number of entries in the tail. `out` and `into`
    are halves of edges by their other end and label. `extra` holds fields of a newer version of
    this library.
    """

    version: str | None = None
    length: int = 0
    label: str | None = None
    properties: Properties = field(default_factory=dict[str, Any])
    created_at: str = ""
    stamp: str = ""
    index: int = 0
    out: dict[tuple[str, str], Properties] = field(default_factory=dict[tuple[str, str], Properties])
    into: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def vertex(self) -> Vertex:
        """Return the vertex in the form that graphs return."""
        return vertex_of(self.id, self.label or "", self.properties, self.created_at)


def read(record: Record | None, codec: Codec) -> Stored:
    """Return a stored vertex and its halves of edges. Raises `Corrupt` if any part of it cannot be read."""
    if record is None:
        return Stored()
    stored = _load(record, codec.open("vertex", record.body) if record.body else {})
    for entry in record.tail:
        _add(stored, codec.open("edge", entry))
    return stored


def seal(stored: Stored, codec: Codec) -> bytes:
    """Return the body of a vertex, with its halves of all its edges."""
    content = {
        **stored.extra,
        "id": stored.id,
        "label": stored.label,
        "properties": stored.properties,
        "created_at": stored.created_at,
        "stamp": stored.stamp,
        "index": stored.index,
        "out": [[*edge, properties] for edge, properties in stored.out.items()],
        "into": [[*edge] for edge in stored.into],
    }
    return codec.seal("vertex", content)


def seal_halves(
    source_id: str, target_id: str, label: str, properties: Properties, codec: Codec
) -> tuple[bytes, bytes]:
    """Return the entries of an edge at its source and at its target."""
    require_json(properties, "properties", deepest=_DEEPEST)
    return (
        codec.seal("edge", {"to": target_id, "label": label, "properties": properties}),
        codec.seal("edge", {"from": source_id, "label": label}),
    )


_DEEPEST: Final = 100
"""Maximum nesting depth of properties, which leaves room for the record around them."""

_FIELDS: Final = ("id", "label", "properties", "created_at", "stamp", "index", "out", "into")


def require_properties(properties: Mapping[str, Any]) -> None:
    """Raise `InvalidState`, with the path, for properties that are not JSON."""
    require_json(properties, "properties", deepest=_DEEPEST)


def _load(record: Record, content: Mapping[str, Any]) -> Stored:
    try:
        label = content.get("label")
        return Stored(
            version=record.version,
            length=len(record.tail),
            label=None if label is None else str(label),
            properties=_object(content.get("properties", {})),
            created_at=str(content.get("created_at", "")),
            stamp=str(content.get("stamp", "")),
            index=int(content.get("index", 0)),
            out={(str(to), str(name)): _object(given) for to, name, given in content.get("out", ())},
            into={(str(source), str(name)): None for source, name in content.get("into", ())},
            id=str(content.get("id", "")),
            extra={name: value for name, value in content.items() if name not in _FIELDS},
        )
    except (TypeError, ValueError, OverflowError):
        raise Corrupt("the stored vertex has a field of another type") from None


def _add(stored: Stored, content: Mapping[str, Any]) -> None:
    target, source, label = (content.get(name) for name in ("to", "from", "label"))
    if isinstance(label, str) and isinstance(target, str) and source is None:
        try:
            stored.out[target, label] = _object(content.get("properties"))
        except TypeError:
            raise Corrupt("the stored edge has properties of another type") from None
    elif isinstance(label, str) and isinstance(source, str) and target is None:
        stored.into[source, label] = None
    else:
        raise Corrupt("an entry of the vertex is of a kind that this version of the library does not know")


def same(stored: Stored, wanted: Stored) -> bool:
    """Return whether two states of a vertex have the same label and properties."""
    return stored.label == wanted.label and same_properties(stored.properties, wanted.properties)


def edges_from(
    source_id: str, source: Stored, others: Mapping[str, Stored]
) -> dict[tuple[str, str], Properties]:
    """Return the edges from a vertex to some others, if both of their halves are stored."""
    return {
        (target, label): properties
        for (target, label), properties in source.out.items()
        if target in others and (source_id, label) in others[target].into
    }


def _object(value: object) -> Properties:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return cast("Properties", value)
