"""The seam for semantic recall: a function from texts to vectors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from stm_backends import handed_in
from stm_backends.errors import ConfigurationError, Unavailable

Embedder: TypeAlias = Callable[[list[str]], Awaitable[Sequence[Sequence[float]]]]
"""Returns one vector for each text, in order. Vectors of different lengths are not similar."""

EMBED_S: Final = 60.0
"""How many seconds an embedder may take."""


async def embed(embedder: Embedder, contents: Iterable[Any]) -> list[list[float]]:
    """Return the vectors of contents.

    Raises `Unavailable` if the embedder fails or takes longer than `EMBED_S`, and `ConfigurationError` for a
    result of another form.
    """
    texts = [str(content) for content in contents]
    if not texts:
        return []
    try:
        found: Any = await handed_in.call(_awaited, embedder, texts, within=EMBED_S)
    except ConfigurationError:
        raise
    except Exception as error:
        raise Unavailable(f"the embedder failed ({handed_in.described(error)})", operation="embed") from error
    try:
        vectors = [[float(x) for x in vector] for vector in found]
    except Exception:  # noqa: BLE001 -- an answer of another form may raise anything
        vectors = []
    if len(vectors) != len(texts) or not all(math.isfinite(x) for vector in vectors for x in vector):
        raise ConfigurationError("the embedder must return one vector of finite numbers for each text")
    if len({len(vector) for vector in vectors}) > 1:
        raise ConfigurationError("the embedder must return vectors of one length")
    return vectors


async def _awaited(embedder: Embedder, texts: list[str]) -> object:
    answer: object = embedder(texts)
    if not inspect.isawaitable(answer):
        raise ConfigurationError("embedder must be an async function of a list of texts")
    return await answer


def vector_in(properties: Mapping[str, Any]) -> list[float] | None:
    """Return the vector stored with an entry, unless it belongs to an earlier content."""
    stored = properties.get("vector")
    if not isinstance(stored, dict):
        return None
    vector = cast("dict[str, Any]", stored)
    return vector["of"] if vector.get("text") == str(properties.get("content")) else None
