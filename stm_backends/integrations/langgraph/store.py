"""`StmStore`: LangGraph's long-term store on any backend."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from langgraph.store.base import (
    BaseStore,
    Embeddings,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    get_text_at_path,
    tokenize_path,
    validate_op_namespace,
)

from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_items, require_seconds
from stm_backends.drivers.tasks import all_of, to_its_end
from stm_backends.errors import ConfigurationError, Corrupt, InvalidKey, Unavailable
from stm_backends.handed_in import WrongType, call_now, described
from stm_backends.integrations.blocking import Waits, refuse
from stm_backends.integrations.langgraph.matching import (
    Namespace,
    is_match,
    matches,
    similarity,
    without_wildcards,
)
from stm_backends.races import Lost, contend
from stm_backends.records.identity import DEFAULT_TENANT
from stm_backends.records.keys import require_part, user_state
from stm_backends.records.state_store import States, TenantStates

Owner: TypeAlias = tuple[str, str | None]
"""A tenant and one of its users, or `None` for the tenant as a whole."""

Vectors: TypeAlias = dict[str, list[float]]

PREFIX: Final = "langgraph-store:"
"""Distinguishes the keys of items from those of an owner's other states."""

AT_ONCE: Final = 64
"""Number of items loaded concurrently."""

_ESCAPED: Final = (("~", "~0"), ("/", "~1"), (":", "~2"))
"""The name of a namespace ends with "/", and a state's key must have no other ":"."""


def _of_nobody(namespace: Namespace) -> Owner:
    """Return the owner of items that belong to no particular user."""
    del namespace
    return DEFAULT_TENANT, None


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of an item, or of all items of an owner: its states, and a key or a prefix of keys."""

    states: States
    key: str


@dataclass(frozen=True, slots=True)
class _Found:
    """An item with its stored form: its state, and the place and version of that."""

    item: Item
    state: dict[str, Any]
    place: _Place
    version: str

    @property
    def vectors(self) -> Vectors:
        return self.state.get("vectors") or {}


class StmStore(BaseStore):
    """A store whose items are shared by every process that uses the same backend.

    ```
    graph = builder.compile(store=StmStore(backend, owner_of=lambda namespace: ("acme", namespace[1])))
    ```

    An item is a saved state of the tenant and the user that `owner_of(namespace)` returns, so erasing a user
    erases the user's items. The user `None` means the tenant as a whole. By default, all items belong to the
    tenant `default` as a whole. A search may name only the beginning of a namespace: if that does not
    identify an owner, `owner_of` returns `None`, and all items of `tenants` are searched.

    An item that is put again keeps its creation time. `index` is as for LangGraph's other stores: its `embed`
    makes vectors of stored values and of queries. A search loads all items under its prefix and compares
    them. `ttl` is LangGraph's, in minutes; expired items disappear at once. `run` is as for `StmSaver`. All
    methods raise `StorageError`; an outage is never an empty store. The constructor reads and writes nothing.
    """

    supports_ttl = True

    def __init__(
        self,
        backend: Backend,
        *,
        owner_of: Callable[[Namespace], Owner | None] | None = None,
        tenants: Sequence[str] = (),
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
        run: Waits | None = None,
    ) -> None:
        super().__init__()
        require_backend(backend)
        require_items("tenants", tenants)
        if owner_of is not None and not callable(owner_of):  # pyright: ignore[reportUnnecessaryComparison] -- callers are not all typed
            raise ConfigurationError("owner_of must be a function that returns a namespace's tenant and user")
        self.ttl_config = ttl
        self._backend = backend
        self._owner_of = owner_of or _of_nobody
        self._tenants = tenants
        self._embeddings: Embeddings | None = None
        self._fields: list[tuple[str, list[str] | str]] = []
        if index is not None:
            self._embeddings = ensure_embeddings(index.get("embed"))
            self._fields = [_field(path) for path in index.get("fields") or ["$"]]
        self._run = run

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Run some operations; reads see the store as it was before the writes.

        Of two writes to one item, the last one counts. Operations run concurrently and independently. A
        cancelled call has ended when the cancellation is raised.
        """
        asked = [*ops]
        for op in asked:
            validate_op_namespace(op)
        results: list[Result] = await all_of(map(self._answer, asked))
        puts = {(op.namespace, op.key): op for op in asked if isinstance(op, PutOp)}
        vectors = await self._embedded([*puts.values()])
        await to_its_end(all_of(self._put(op, vectors.get(place, {})) for place, op in puts.items()))
        return results

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run some operations; see `abatch`."""
        if self._run is None:
            refuse("batch", "use abatch (graph.ainvoke instead of graph.invoke)")
        return self._run(self.abatch(ops))

    async def _answer(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            found = await self._load(self._place(op.namespace, op.key))
            if found is not None and op.refresh_ttl:
                await self._refresh(found)
            return found and found.item
        if isinstance(op, SearchOp):
            return await self._search(op)
        if isinstance(op, ListNamespacesOp):
            return await self._namespaces(op)
        return None

    # Reading

    async def _search(self, op: SearchOp) -> list[SearchItem]:
        query = None
        if op.query and self._embeddings is not None:
            query = await self._embeddings.aembed_query(op.query)
        found = [
            one
            async for one in self._under(op.namespace_prefix)
            if all(matches(one.item.value.get(name), wanted) for name, wanted in (op.filter or {}).items())
        ]
        # The items put last come first, as in LangGraph's store on PostgreSQL.
        found.sort(key=lambda one: one.item.updated_at, reverse=True)
        end = op.offset + op.limit
        scored: list[tuple[float | None, _Found]]
        if query is None:
            scored = [(None, one) for one in found[op.offset : end]]
        else:
            with_vectors = [
                (max(similarity(query, vector) for vector in one.vectors.values()), one)
                for one in found
                if one.vectors
            ]
            with_vectors.sort(key=lambda one: one[0], reverse=True)
            scored = [*with_vectors[op.offset : end]]
            rest = [(None, one) for one in found if not one.vectors]
            scored += rest[: max(0, op.limit - len(scored))]
        if op.refresh_ttl:
            await all_of(self._refresh(one) for _, one in scored)
        return [
            SearchItem(
                namespace=one.item.namespace,
                key=one.item.key,
                value=one.item.value,
                created_at=one.item.created_at,
                updated_at=one.item.updated_at,
                score=score,
            )
            for score, one in scored
        ]

    async def _namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        prefixes = [one.path for one in conditions if one.match_type == "prefix"]
        prefix = max((without_wildcards(path) for path in prefixes), key=len, default=())
        found = {_named_by(place.key)[0] async for place in self._places(prefix)}
        matching = {one for one in found if all(is_match(condition, one) for condition in conditions)}
        if op.max_depth is not None:
            matching = {one[: op.max_depth] for one in matching}
        return sorted(matching)[op.offset : op.offset + op.limit]

    async def _under(self, prefix: Namespace) -> AsyncIterator[_Found]:
        places = [place async for place in self._places(prefix)]
        for start in range(0, len(places), AT_ONCE):
            for one in await all_of(map(self._load, places[start : start + AT_ONCE])):
                if one is not None:
                    yield one

    async def _places(self, prefix: Namespace) -> AsyncIterator[_Place]:
        """Yield the places of all items whose namespaces begin with a prefix."""
        owner = self._owner(prefix)
        owners = self._all_owners() if owner is None else _just(owner)
        async for each in owners:
            place = self._beginning(each, prefix)
            if isinstance(place.states, TenantStates):
                names = place.states.names(place.key)
            else:
                names = self._backend.state_store.states_of(each[0], each[1] or "", place.key)
            async for key in names:
                yield _Place(place.states, key)

    async def _all_owners(self) -> AsyncIterator[Owner]:
        if not self._tenants:
            raise ConfigurationError(
                "this namespace does not identify an owner, and not all tenants can be found: pass "
                "tenants=[...] to say which tenants to search"
            )
        for tenant in self._tenants:
            yield tenant, None
            async for user in self._backend.sessions.users(tenant):
                yield tenant, user

    async def _load(self, place: _Place) -> _Found | None:
        state, version = await place.states.load_versioned(place.key)
        if state is None or version is None:
            return None
        namespace, name = _named_by(place.key)
        try:
            item = Item(
                value=state["value"],
                key=name,
                namespace=namespace,
                created_at=datetime.fromtimestamp(state["created"], UTC),
                updated_at=datetime.fromtimestamp(state["updated"], UTC),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            raise Corrupt(
                "a saved state is not an item of a store", backend=self._backend.name, operation="load"
            ) from None
        return _Found(item, state, place, version)

    async def _refresh(self, found: _Found) -> None:
        """Restart an item's time to live, if it has one, unless it was put again meanwhile."""
        minutes: float | None = found.state.get("ttl")
        if minutes is not None:
            states, key = found.place.states, found.place.key
            await states.save_if(key, found.state, expect=found.version, ttl=60.0 * minutes)

    # Writing

    async def _put(self, op: PutOp, vectors: Vectors) -> None:
        place, value = self._place(op.namespace, op.key), op.value
        states, key = place.states, place.key
        if value is None:
            await states.delete_memory_state(key)
            return
        if op.ttl is not None:
            require_seconds("ttl", op.ttl)
        seconds = None if op.ttl is None else 60.0 * op.ttl

        async def attempt() -> bool | Lost:
            now = time.time()
            state, version = await states.load_versioned(key)
            created: object = None if state is None else state.get("created")
            new = {
                "value": dict(value),
                "created": created if isinstance(created, float) else now,
                "updated": now,
                "ttl": op.ttl,
                "vectors": vectors,
            }
            saved = await states.save_if(key, new, expect=version, ttl=seconds)
            return saved or Lost(version)

        if await contend(attempt) is None:
            raise Unavailable("others keep putting this item", backend=self._backend.name, operation="put")

    async def _embedded(self, puts: Sequence[PutOp]) -> dict[tuple[Namespace, str], Vectors]:
        """Return the vectors of the values to put, by the paths of the texts."""
        texts: list[str] = []
        places: list[tuple[Namespace, str, str]] = []
        for op in puts if self._embeddings is not None else ():
            if op.value is None or op.index is False:
                continue
            fields = self._fields if op.index is None else [_field(path) for path in op.index]
            for path, tokens in fields:
                found = get_text_at_path(op.value, tokens)
                for nth, text in enumerate(found):
                    texts.append(text)
                    places.append((op.namespace, op.key, path if len(found) == 1 else f"{path}.{nth}"))
        vectors: dict[tuple[Namespace, str], Vectors] = {}
        if self._embeddings is None or not texts:
            return vectors
        made = await self._embeddings.aembed_documents(texts)
        if len(made) != len(texts):
            raise ConfigurationError(f"the embedder returned {len(made)} vectors for {len(texts)} texts")
        for (namespace, key, path), vector in zip(places, made, strict=True):
            vectors.setdefault((namespace, key), {})[path] = [float(number) for number in vector]
        return vectors

    # Places

    def _place(self, namespace: Namespace, key: str) -> _Place:
        owner = self._owner(namespace)
        if owner is None:
            raise InvalidKey("the function `owner_of` names no owner of this namespace")
        place = self._beginning(owner, namespace)
        return _Place(place.states, f"{place.key}/{_escaped(key)}")

    def _beginning(self, owner: Owner, namespace: Namespace) -> _Place:
        """Return the place of an owner's items whose namespaces begin with `namespace`."""
        tenant, user = owner
        beginning = PREFIX + "".join(f"{_escaped(label)}/" for label in namespace)
        if user is None:
            return _Place(self._backend.tenant_state(tenant), beginning)
        return _Place(self._backend.state_store, user_state(tenant, user, beginning))

    def _owner(self, namespace: Namespace) -> Owner | None:
        try:
            owner = call_now(self._owner_of, namespace)
            if owner is None:
                return None
            if not isinstance(owner, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
                raise WrongType("it", owner, "a tenant and a user")
            tenant, user = owner
        except Exception as error:
            raise InvalidKey(f"the function `owner_of` failed ({described(error)})") from error
        return require_part("tenant_id", tenant), None if user is None else require_part("user_id", user)


def _named_by(key: str) -> tuple[Namespace, str]:
    """Return the namespace and the name of the item with a state's key."""
    labels, _, name = key.rpartition(":")[2].partition("//")
    return tuple(map(_unescaped, labels.split("/"))), _unescaped(name)


def _escaped(text: str) -> str:
    for plain, escaped in _ESCAPED:
        text = text.replace(plain, escaped)
    return text


def _unescaped(text: str) -> str:
    for plain, escaped in reversed(_ESCAPED):
        text = text.replace(escaped, plain)
    return text


def _field(path: str) -> tuple[str, list[str] | str]:
    return path, path if path == "$" else tokenize_path(path)


async def _just(owner: Owner) -> AsyncIterator[Owner]:
    yield owner
