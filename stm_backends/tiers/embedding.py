"""Embedders for semantic recall: functions from texts to vectors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from stm_backends import handed_in, logs
from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends.tiers import relevance

Embedder: TypeAlias = Callable[[list[str]], Awaitable[Sequence[Sequence[float]]]]
"""Returns one vector for each text, in order. Vectors of different lengths are not similar."""

EMBED_S: Final = 60.0
"""The time limit of an embedder, in seconds."""


class GuardedEmbedder:
    """Calls a user's embedder. Each failure becomes a typed error and is passed to `failed`."""

    def __init__(self, embedder: Embedder, failed: handed_in.Report) -> None:
        self._embedder = embedder
        self._failed = failed

    async def vectors(self, contents: Iterable[Any]) -> list[list[float]]:
        """Return the vectors of contents.

        Raises `Unavailable` if the embedder fails or takes longer than `EMBED_S`, and `ConfigurationError`
        for a result of another form.
        """
        texts = [str(content) for content in contents]
        if not texts:
            return []
        try:
            found = await handed_in.call(_awaited, self._embedder, texts, within=EMBED_S)
            return _vectors_in(found, len(texts))
        except handed_in.WrongType as error:
            self._failed("embedder", error)
            raise ConfigurationError(str(error)) from error
        except Exception as error:
            self._failed("embedder", error)
            raise Unavailable(
                f"the embedder failed ({handed_in.described(error)})", operation="embed"
            ) from error

    async def wanted(self, query: str, least: float) -> Wanted:
        """Return a predicate for vectors with a cosine similarity to the query of at least `least`."""
        [vector] = await self.vectors([query])
        return Wanted(vector, least, self._failed)


class Wanted:
    """The vector of a query, and the minimum similarity of the vectors that it finds.

    Vectors of another length come from another model: the first is logged and reported, and none matches.
    """

    def __init__(self, vector: list[float], least: float, failed: handed_in.Report) -> None:
        self._vector = vector
        self._least = least
        self._failed = failed
        self._reported = False

    def is_near(self, vector: list[float]) -> bool:
        """Return whether a vector is similar to the query's vector."""
        if len(vector) == len(self._vector):
            return relevance.cosine(self._vector, vector) >= self._least
        if not self._reported:
            self._reported = True
            error = handed_in.Misbehaved("its vectors have a different length from earlier ones")
            logs.failed(
                "the embedder has changed (%s); entries are found by their words until they are stored again",
                error,
            )
            self._failed("embedder", error)
        return False


async def _awaited(embedder: Embedder, texts: list[str]) -> object:
    answer: object = embedder(texts)
    if not inspect.isawaitable(answer):
        raise handed_in.WrongType("the embedder", answer, "an awaitable: it must be an async function")
    return await answer


def _vectors_in(found: Any, count: int) -> list[list[float]]:
    try:
        vectors = [[float(x) for x in vector] for vector in found]
    except Exception:  # noqa: BLE001 -- an answer of another form may raise anything
        vectors = []
    if len(vectors) != count or not all(math.isfinite(x) for vector in vectors for x in vector):
        raise handed_in.WrongType("the embedder", found, "one vector of finite numbers for each text")
    if len({len(vector) for vector in vectors}) > 1:
        raise handed_in.WrongType("the embedder", found, "vectors of one length")
    return vectors


def vector_in(properties: Mapping[str, Any]) -> list[float] | None:
    """Return the vector stored with an entry, unless it belongs to an earlier content."""
    stored = properties.get("vector")
    if not isinstance(stored, dict):
        return None
    vector = cast("dict[str, Any]", stored)
    return vector["of"] if vector.get("text") == str(properties.get("content")) else None
