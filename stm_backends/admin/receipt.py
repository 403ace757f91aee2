"""The receipt of an erasure: the erased data, its physical remains, and the findings of a second reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, get_args

FORMAT: Final = "stm-erasure"
FORMAT_VERSION: Final = 1

Counted: TypeAlias = Literal[
    "conversations",
    "logs",
    "states",
    "paused_runs",
    "graph_records",
    "pages",
    "cards",
    "parts",
    "expired",
    "data_keys",
    "directory_entries",
]
"""Counts of a receipt: records by kind; the records of a graph and of its index; the pages of transcripts;
the cards of the catalogue, and the names and words in its index; the pieces of large values; records of any
kind that had expired before; users and tenants whose data keys were erased; users who left the directory of
a tenant."""

COUNTED: Final[tuple[Counted, ...]] = get_args(Counted)

RECORDS: Final[tuple[Counted, ...]] = ("conversations", "logs", "states", "paused_runs", "graph_records")
"""The kinds that are records."""

LEFT_OVER: Final[tuple[Counted, ...]] = ("pages", "parts")
"""The kinds that a conversation has, and that may be left when its record is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The result of an erasure; without a `session_id` of a user, without a `user_id` of a tenant.

    `erased` and `found` have only counts above 0. `found` is the result of a second reading after the
    erasure: records that another process wrote in the meantime. `undecided` counts saved states that were
    not erased, because their keys may belong to another owner, too; it is `None` if the datastore did not
    allow listing them, for example to a role for one tenant. `remains` describes the deleted data that the
    datastore still keeps, and where. `cleaned` is `False` if the driver failed to remove leftovers that it
    can remove, such as SQLite's write-ahead log, and `None` if the driver does not say. `keys_left` is true
    if the data was sealed but the backend had no sealing, so that data keys in a separate store were not
    erased.
    """

    tenant_id: str
    user_id: str | None
    session_id: str | None
    backend: str
    began: datetime
    ended: datetime
    erased: Mapping[Counted, int]
    found: Mapping[Counted, int]
    undecided: int | None
    remains: str
    cleaned: bool | None
    keys_left: bool

    @property
    def records(self) -> int:
        """Number of erased records, without pages, cards, parts, expired records, keys and entries."""
        return sum(self.erased.get(kind, 0) for kind in RECORDS)

    @property
    def existed(self) -> bool:
        """True if anything was erased."""
        return bool(self.erased)

    @property
    def complete(self) -> bool:
        """True if nothing is left that erasing again could remove."""
        return not self.found and self.cleaned is not False and not self.keys_left

    def as_json(self, *, datastore: str = "") -> dict[str, Any]:
        """Return the receipt as a JSON object; `datastore` is its URL without secrets."""
        from importlib import metadata  # noqa: PLC0415 -- takes long, and only this needs it

        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "library": f"stm-backends {metadata.version('stm-backends')}",
            "backend": self.backend,
            "datastore": datastore or self.backend,
            "of": {"tenant_id": self.tenant_id, "user_id": self.user_id, "session_id": self.session_id},
            "began": self.began.isoformat(),
            "ended": self.ended.isoformat(),
            "erased": {kind: self.erased.get(kind, 0) for kind in COUNTED},
            "undecided_states": self.undecided,
            "second_reading": {kind: count for kind, count in self.found.items() if count},
            "remains": self.remains,
            "cleaned": self.cleaned,
            "data_keys_left": self.keys_left,
        }
