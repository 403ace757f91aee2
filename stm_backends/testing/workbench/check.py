"""Checks: coroutines that belong to a clause and explain their failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Protocol, cast

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.workbench.clauses import CLAUSES, Clause
from stm_backends.testing.workbench.failures import Met, Untidy, alone, first_of, origin, shorten
from stm_backends.testing.workbench.history import History
from stm_backends.testing.workbench.processes import end_workers
from stm_backends.testing.workbench.watchdog import WATCHDOG

if TYPE_CHECKING:
    from stm_backends.testing.workbench.drivers import Datastore

LOOK_S: Final = 10.0
"""The time limit for loading the record of a failed check again, in seconds."""

LONGEST_CHECK_S: Final = 120.0
"""The time limit of a check. A check still at work then gets it once more: the machine may be busy."""

AT_WORK_S: Final = 30.0
"""A check is at work if one of its operations began or ended within this many seconds."""

_ATTRIBUTE: Final = "__stm_check__"

_ABOUT_TIME: Final = ("driver.expiry", "driver.lifetime", "driver.model")
"""The clauses whose checks all measure time by the datastore's tick."""


@dataclass(frozen=True, slots=True)
class Check:
    """The data about a check in a report. `usual_cause` is the usual reason why implementations fail it.

    `timed` says whether a correct implementation may fail it if operations take longer than a tick.
    """

    name: str
    clause: Clause
    usual_cause: str
    slow: bool | Mapping[str, Collection[object]]
    timed: bool

    @property
    def sentence(self) -> str:
        """The expectation: the check's name, as a sentence."""
        return f"{self.name.removeprefix('test_').replace('_', ' ').capitalize()}."

    def is_slow(self, given: Mapping[str, Any]) -> bool:
        """Return whether a quick run leaves out the check with these values of its parameters."""
        if isinstance(self.slow, bool):
            return self.slow
        return any(value in self.slow.get(name, ()) for name, value in given.items())

    def explain(self, error: BaseException, bench: Workplace) -> str:
        """Return the explanation of a failure: the clause, the expectation, where, and the history.

        The usual cause applies to wrong answers and to the errors of the contract. Any other error has
        another cause, and so do problems that come from an entry being stored again.
        """
        history, parts, usual_cause = bench.history, list[str](), ""
        if isinstance(error, Untidy):
            error = error.error
        else:
            parts = [f"Clause {self.clause.id}: {self.clause.promise}", f"Expected: {self.sentence}"]
            if _is_finding(error) or isinstance(first_of(error), StorageError):
                usual_cause = self.usual_cause
        if where := origin(error):
            parts.append(f"Raised at: {where}")
        if _is_finding(error) and (again := history.stored_again()):
            parts.append(f"Cause: {again}")
        elif usual_cause:
            parts.append(f"Usual cause: {usual_cause}")
        parts += _of_a_busy_machine(self, first_of(error), bench)
        if lines := history.lines():
            parts += ["History:", *(f"  {line}" for line in lines)]
        return "\n".join(parts)

    def with_more_time(self, error: BaseException, bench: Workplace) -> Workplace | None:
        """Return a workplace to repeat a check in, if the machine may have been too slow for it."""
        patient = getattr(bench, "patient", None)
        if patient is None or not self.timed or not _is_finding(error):
            return None
        return patient()


class Workplace(Protocol):
    """The workplace of one check, entered before the check and left after it."""

    history: History

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _is_finding(error: BaseException) -> bool:
    """Return whether the suite itself found something wrong in the answers."""
    error = first_of(error)
    return isinstance(error, AssertionError | pytest.fail.Exception) and not isinstance(error, Met)


def _of_a_busy_machine(check: Check, error: BaseException, bench: Workplace) -> list[str]:
    """Return which time limit may have been too short."""
    traits = getattr(bench, "traits", None)
    if isinstance(error, Unavailable | OutcomeUnknown) and traits is not None:
        # A driver may give up early, such as after half of the time; an immediate error has another reason.
        if bench.history.longest_until(error) < traits.deadline / 2:
            return []
        return [f"On a busy machine it may be the driver's deadline of {traits.deadline:g} s."]
    if check.timed and _is_finding(error) and getattr(bench, "is_late", False):
        longer = "`--stm-tick=SECONDS` or `Datastore.tick` makes it longer"
        return [f"On a busy machine it may be the tick of {bench.tick:g} s: {longer}."]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    return []


class OptedOut(pytest.skip.Exception):
    """A check that the subject opts out of, with the reason."""


class NotAsked(pytest.skip.Exception):
    """A check that needs something that the subject does not provide, with the name of that."""


class Unfit(pytest.fail.Exception):
    """The implementation cannot be tested at all; reported once for a class of checks."""


class Finding(pytest.fail.Exception):
    """A problem that is not a failure of a check, such as one met while tidying up after all of them.

    It is raised once for a class, after a check. Findings with the same `cause` are one.
    """

    cause = ""


class NotReached(pytest.skip.Exception):
    """A check of a class that cannot be tested, as was already reported."""


def not_asked(reason: str) -> NoReturn:
    """End a check that cannot run here; the report gives the reason."""
    raise NotAsked(reason, _use_item_location=True)


WOULD_WRITE: Final = "would write "
"""The beginning of the reason why a check that would write much is not asked."""


def would_write(size: int) -> str:
    """Return the reason why a check that fills a record is not asked, and how to change that."""
    return (
        f"{WOULD_WRITE}{size:,} bytes; give the driver a smaller limit, by an option of the URL if it has "
        "one, such as `max_record_bytes`"
    )


TOO_SLOW: Final = "too slow here: "
"""The beginning of the reason why a check was not asked in full: operations took too long."""


def too_slow(what: str) -> str:
    """Return the reason why a check is not asked on a slow machine or datastore."""
    return f"{TOO_SLOW}{what}"


def check(
    clause: str, *, slow: bool | Mapping[str, Collection[object]] = False, timed: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a coroutine method a check of a clause; its docstring is the usual cause of a failure.

    The result is a plain function that starts an event loop, so it runs the same under every plugin for
    asynchronous tests and under none. A quick run leaves out `slow` checks; for a check with parameters,
    `slow` may name the values to leave out. A check that is `timed`, as all checks of some clauses are, is
    repeated with a longer tick if it fails on a busy machine.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        usual_cause = inspect.cleandoc(body.__doc__ or "")
        known = Check(body.__name__, CLAUSES[clause], usual_cause, slow, timed or clause in _ABOUT_TIME)

        def failure(self: Contract, bench: Workplace, given: Mapping[str, Any]) -> BaseException | None:
            __tracebackhide__ = True
            try:
                answer = body(self, bench, **given)
                if inspect.iscoroutine(answer):
                    what = f"the check {type(self).__name__}.{known.name}"
                    with WATCHDOG.watching(what, LONGEST_CHECK_S):
                        asyncio.run(_within(bench, cast("Coroutine[Any, Any, None]", answer)))
            except (KeyboardInterrupt, pytest.exit.Exception, pytest.skip.Exception):
                raise
            except BaseException as raised:  # noqa: BLE001 -- a driver may raise SystemExit or CancelledError
                return alone(raised)
            return None

        @functools.wraps(body)
        def run(self: Contract, bench: Workplace, **given: Any) -> None:
            __tracebackhide__ = True
            reason = self.opted_out.get(known.name)
            if reason is not None:
                raise OptedOut(f"opted out: {reason}", _use_item_location=True)
            error = failure(self, bench, given)
            while error is not None and (patient := known.with_more_time(error, bench)) is not None:
                bench, error = patient, failure(self, patient, given)
            if error is None:
                return
            shorten(error)
            explanation = known.explain(error, bench)
            tell = getattr(bench, "tell_untidy", None)
            if isinstance(error, Untidy) and tell is not None:
                # The check has passed, and the next ones may meet the same problem.
                tell(error, f"First after: {known.sentence}\n{explanation}")
                return
            error.add_note(explanation)
            # Raised here, so that its context is not the group that contained it.
            raise error

        setattr(run, _ATTRIBUTE, known)
        return run

    return decorate


async def _within(bench: Workplace, body: Coroutine[Any, Any, None]) -> None:
    __tracebackhide__ = True
    loop, longest = asyncio.get_running_loop(), LONGEST_CHECK_S
    limit = asyncio.timeout(longest)

    def go_on() -> None:
        nonlocal longest
        if time.monotonic() - bench.history.latest < AT_WORK_S:
            longest *= 2
            limit.reschedule(loop.time() + longest / 2)
            WATCHDOG.go_on()

    looking = loop.call_later(longest * 0.99, go_on)
    try:
        async with limit, bench:
            try:
                await body
            except Exception as error:
                if _is_finding(error):
                    await _look_again(bench)
                raise
            finally:
                await end_workers()
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(
            f"the check did not end within {longest:g} s; the operations without a result are in its "
            "history. On a busy machine it may be this limit"
        ) from None
    finally:
        looking.cancel()
        body.close()


async def _look_again(bench: Workplace) -> None:
    """Load the record that a failed check was about: its content may explain a wrong answer."""
    places = [event.place for event in bench.history.events if isinstance(event.place, Key)]
    datastore: Datastore | None = getattr(bench, "datastore", None)
    if not places or datastore is None:
        return
    # An error here adds nothing: the check has already failed, perhaps because of a leftover lock.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(LOOK_S):
            driver = await datastore.open()
            try:
                record = await driver.load(places[-1])
            finally:
                await driver.close()
        if record is not None:
            bench.history.found(places[-1], record)


def check_of(function: object) -> Check | None:
    """Return the check of a function; `None` if it is not a check."""
    return getattr(function, _ATTRIBUTE, None)


class Contract:
    """A class of checks; a subclass supplies the implementation under test.

    `opted_out` maps the names of the checks that the implementation does not pass to the reasons, which the
    report prints. A subclass that overrides or removes a check raises `TypeError`. `quick = True` gives one
    class the quick form that `--stm-quick` gives to all: without the slow checks, and with fewer random
    histories and shorter races in the others.
    """

    opted_out: ClassVar[Mapping[str, str]] = {}
    quick: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        checks = cls.checks()
        for name, original in checks.items():
            if inspect.getattr_static(cls, name) is not original:
                raise TypeError(
                    f"{cls.__name__} overrides the check {name}; to leave it out, add it to `opted_out` with "
                    "the reason"
                )
        for name, reason in cls.opted_out.items():
            if name not in checks:
                raise TypeError(f"{cls.__name__} opts out of {name}, which is not a check")
            if not reason.strip():
                raise TypeError(f"{cls.__name__} opts out of {name} without a reason")

    @classmethod
    def is_quick(cls, config: pytest.Config) -> bool:
        """Return whether this class runs in its quick form."""
        return cls.quick or bool(config.getoption("stm_quick", default=False))

    @classmethod
    def checks(cls) -> dict[str, Callable[..., None]]:
        """Return the checks of the contract by name."""
        found: dict[str, Callable[..., None]] = {}
        for base in cls.__mro__:
            found |= {name: member for name, member in vars(base).items() if check_of(member)}
        return found
