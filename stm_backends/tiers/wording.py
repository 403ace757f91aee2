"""The search terms of a graph's vertex: words, and exact values of some properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stm_backends.records.words import words_of

RULE: Final = 1
"""The version of the rules of `terms_of`. A write indexes a vertex again if it has another version."""

WORDS_OF: Final = ("key", "content", "tags")
"""The properties whose words are indexed."""

EXACT: Final = ("run_id", "source_agent", "source_run_id")
"""The properties that are indexed by value."""


def terms_of(properties: Mapping[str, Any]) -> frozenset[str]:
    """Return the search terms of a vertex. A superseded one has only those of its run."""
    exact = {exact_term(name, properties[name]) for name in EXACT if isinstance(properties.get(name), str)}
    if properties.get("superseded_by"):
        return frozenset(term for term in exact if term.startswith("run_id="))
    words = set[str]().union(*(words_of(properties.get(name)) for name in WORDS_OF))
    return frozenset(words | exact)


def exact_term(name: str, value: str) -> str:
    """Return the term of an exact value; no word has a `=`."""
    return f"{name}={value}"
