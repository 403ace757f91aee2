"""What a caller can conclude from an error, wherever it has travelled."""

from __future__ import annotations

import copy
import pickle

import pytest

from stm_backends import errors
from stm_backends.errors import (
    AmbiguousBackend,
    ConfigurationError,
    Corrupt,
    Denied,
    EditConflict,
    InvalidKey,
    InvalidState,
    KeyErased,
    KeyMismatch,
    LimitReached,
    MemoryBudgetExceeded,
    MessageNotFound,
    MissingExtra,
    OutcomeUnknown,
    SealMismatch,
    SessionExists,
    SessionNotFound,
    StmError,
    StorageError,
    TooLarge,
    Unavailable,
    UnknownBackend,
    located,
)

STORAGE = [Unavailable, OutcomeUnknown, Corrupt, SealMismatch, KeyMismatch, KeyErased, Denied]


def missing_extra() -> MissingExtra:
    error = MissingExtra("message")
    error.name = "redis"
    return error


EXAMPLES: list[StmError] = [
    *(kind("message", backend="redis", operation="load") for kind in (StorageError, *STORAGE)),
    TooLarge("entry", size=2_000_000, limit=400_000, backend="dynamo", operation="append"),
    LimitReached("conversation_turns", given=501, most=500, backend="redis", operation="add_turn"),
    *(
        kind("message")
        for kind in (
            StmError,
            ConfigurationError,
            UnknownBackend,
            AmbiguousBackend,
            InvalidKey,
            InvalidState,
            SessionNotFound,
            SessionExists,
            MessageNotFound,
            EditConflict,
            MemoryBudgetExceeded,
        )
    ),
    missing_extra(),
]


def _in_a_pickle(error: StmError) -> StmError:
    return pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own bytes


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [_in_a_pickle, copy.copy, copy.deepcopy])
def test_an_error_survives_a_journey_to_another_process(error: StmError, travel: object) -> None:
    arrived = travel(error)  # type: ignore[operator]
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


def test_there_is_an_example_of_every_error() -> None:
    every = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StmError)}
    assert every == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("kind", [type(error) for error in EXAMPLES])
def test_every_error_stands_in_the_tree_of_the_documentation(kind: type) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (ConfigurationError, ValueError),
        (UnknownBackend, LookupError),
        (AmbiguousBackend, LookupError),
        (MissingExtra, ImportError),
        (InvalidKey, ValueError),
        (InvalidState, ValueError),
        (SessionNotFound, LookupError),
        (SessionExists, ValueError),
        (MessageNotFound, LookupError),
        (EditConflict, RuntimeError),
        (MemoryBudgetExceeded, RuntimeError),
    ],
)
def test_a_misuse_of_the_standard_librarys_kind_is_caught_as_that(kind: type, also: type) -> None:
    assert issubclass(kind, also)
    assert issubclass(kind, StmError)


@pytest.mark.parametrize("kind", [*STORAGE, TooLarge])
def test_what_the_datastore_did_is_never_the_programs_fault(kind: type) -> None:
    assert issubclass(kind, StorageError)
    assert not issubclass(kind, (ConfigurationError, ValueError, LookupError, OSError))


def test_done_and_perhaps_done_are_never_confused() -> None:
    assert not issubclass(OutcomeUnknown, Unavailable)
    assert not issubclass(Unavailable, OutcomeUnknown)


def test_a_storage_error_says_where() -> None:
    assert str(Unavailable("refused", backend="redis", operation="load")) == "redis.load: refused"
    assert str(Unavailable("refused", backend="redis")) == "redis: refused"
    assert str(Unavailable("refused")) == "refused"


def test_too_large_says_what_and_by_how_much() -> None:
    error = TooLarge("record", size=1_234_567, limit=400_000, backend="dynamo", operation="append")
    assert (error.what, error.size, error.limit) == ("record", 1_234_567, 400_000)
    assert str(error) == "dynamo.append: the record would take 1,234,567 bytes and at most 400,000 are stored"


def test_an_error_without_a_place_gets_one() -> None:
    with pytest.raises(Corrupt) as caught, located("redis", "export"):
        raise Corrupt("junk")
    assert (caught.value.backend, caught.value.operation) == ("redis", "export")


def test_a_place_that_is_known_is_kept() -> None:
    with pytest.raises(Unavailable) as caught, located("outer", "export"):
        raise Unavailable("down", backend="inner", operation="load")
    assert (caught.value.backend, caught.value.operation) == ("inner", "load")


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(InvalidState, match=r"^state$"), located("redis", "export"):
        raise InvalidState("state")
