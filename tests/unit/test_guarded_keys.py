"""A source of keys or a wrapping that a user wrote fails as an outage: typed, named and not quoted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends import ConversationTurn, Corrupt, EnvelopeKeys, Sealing, Unavailable, open_backend
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import StorageError
from stm_backends.sealing.guarded import guarded_source, guarded_wrapping
from stm_backends.sealing.keys import DataKey, OpensStore, Owner, OwnersKeys, StaticKeys
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.types import MemoryKey, ShortTermMemoryConfig
from tests.support import clock

QUOTED = "pin 4711"
KEY = MemoryKey("acme", "ada", "trip")
CONFIG = ShortTermMemoryConfig("truncation")


class PanicException(BaseException):
    """As an extension in Rust raises it."""


async def hangs(*_: object) -> Any:
    await asyncio.sleep(1e6)


def raises(error: type[BaseException]) -> Any:
    async def method(*_: object) -> Any:
        raise error(QUOTED)

    return method


def returns(value: object) -> Any:
    async def method(*_: object) -> Any:
        return value

    return method


METHODS = {
    "raises": (raises(LookupError), "LookupError"),
    "panics": (raises(PanicException), "raised PanicException"),
    "is cancelled": (raises(asyncio.CancelledError), "cancelled from within"),
    "hangs": (hangs, "TimeoutError"),
    "nothing": (returns(None), "it returned NoneType"),
    "text": (returns(QUOTED), "it returned str"),
    "short": (returns(DataKey("k", b"short")), "it returned DataKey"),
}
methods = pytest.mark.parametrize(("method", "named"), METHODS.values(), ids=METHODS.keys())


class Source(StaticKeys):
    """A user's own source, with a store to open."""

    def __init__(self, method: Any) -> None:
        super().__init__({"k": bytes(32)}, primary="k")
        self.primary = method
        self.opened = 0

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.opened -= 1


class Wrapping:
    """A user's own wrapping."""

    def __init__(self, method: Any) -> None:
        self.wrap = self.unwrap = method

    def is_current(self, wrapped: bytes) -> bool:
        return True


@methods
@clock.virtually
async def test_a_source_of_keys_that_fails_is_an_outage(method: Any, named: str) -> None:
    guarded = guarded_source(Source(method))
    with pytest.raises(Unavailable, match=f"`primary` of the keys failed .*{named}") as caught:
        await guarded.primary(Owner("acme", "ada"))
    assert QUOTED not in str(caught.value)


@methods
@clock.virtually
async def test_a_wrapping_that_fails_is_an_outage(method: Any, named: str) -> None:
    store = MemoryDriver(MemoryStore())
    await store.open()
    keys = EnvelopeKeys(store, Wrapping(method))
    async with open_backend("memory://", sealing=Sealing(keys)) as backend:
        with pytest.raises(Unavailable, match=f"`wrap` of the keys failed .*{named}") as caught:
            await backend.memory(KEY, CONFIG).add_turn(ConversationTurn("a", "b"))
    assert QUOTED not in str(caught.value)


def fails(error: type[BaseException]) -> Any:
    def method(wrapped: bytes) -> Any:
        raise error(QUOTED)

    return method


def is_quoted(wrapped: bytes) -> Any:
    return QUOTED


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (fails(LookupError), "LookupError"),
        (fails(PanicException), "raised PanicException"),
        (is_quoted, "it returned str"),
    ],
    ids=["raises", "panics", "text"],
)
async def test_a_wrapping_that_cannot_say_whether_a_key_is_current_is_an_outage(
    method: Any, named: str
) -> None:
    store = MemoryDriver(MemoryStore())
    await store.open()
    wrapping = LocalWrapping({"w": bytes(32)}, primary="w")
    wrapping.is_current = method
    keys = EnvelopeKeys(store, wrapping)
    await keys.primary(Owner("acme", "ada"))
    with pytest.raises(Unavailable, match=f"`is_current` of the keys failed .*{named}") as caught:
        await keys.rewrap(Owner("acme", "ada"))
    assert QUOTED not in str(caught.value)


@clock.virtually
async def test_a_backend_closes_beside_keys_that_never_do() -> None:
    given = Source(returns(DataKey("k", bytes(32))))
    given.close = hangs
    backend = open_backend("memory://", sealing=Sealing(given))
    await backend.open()
    with pytest.raises(Unavailable, match="`close` of the keys failed"):
        await backend.close()


async def test_errors_of_the_library_pass_and_so_does_what_else_a_source_has() -> None:
    given = Source(raises(Corrupt))
    guarded = guarded_source(given)
    with pytest.raises(Corrupt):
        await guarded.primary(Owner("acme", "ada"))
    assert (await guarded.key(Owner("acme", "ada"), "k")).secret == bytes(32)
    assert isinstance(guarded, OpensStore)
    await guarded.open()
    assert given.opened == 1
    assert guarded_wrapping(Wrapping(hangs)).is_current(b"")


@pytest.mark.parametrize("name", ["reread", "open", "close"])
async def test_what_a_source_has_beside_fails_as_an_outage(name: str) -> None:
    given = Source(returns(DataKey("k", bytes(32))))
    setattr(given, name, raises(LookupError))
    with pytest.raises(Unavailable, match=f"`{name}` of the keys failed .LookupError"):
        await getattr(guarded_source(given), name)()
    assert not isinstance(guarded_source(StaticKeys({"k": bytes(32)}, primary="k")), OwnersKeys)


async def test_a_backend_guards_the_keys_that_it_is_given() -> None:
    class Own:
        """Not one of the library's sources."""

        primary = key = rewrap = erase = staticmethod(raises(PanicException))

    async with open_backend("memory://", sealing=Sealing(Own())) as backend:
        with pytest.raises(StorageError):
            await backend.memory(KEY, CONFIG).add_turn(ConversationTurn("a", "b"))
