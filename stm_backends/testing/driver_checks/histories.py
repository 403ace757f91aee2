"""Checks of random histories of operations; hypothesis shrinks one that fails."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType] -- it has no annotations
)

from stm_backends.testing.driver_checks.state_machine import driver_machine
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import QUICK_HISTORIES, Bench, Datastore

LASTING_S = 1_000_000.0
"""A tick that never passes within a check, for histories in which no record expires."""


class Histories(Contract):
    """Checks of random histories of operations; hypothesis shrinks one that fails."""

    @check("driver.model")
    def test_any_history_without_expiry_matches_the_model(self, bench: Bench) -> None:
        """See the falsifying example, the shortest history on which driver and model disagree."""
        _run(replace(bench.datastore, tick=LASTING_S), times=(), histories=bench.datastore.histories)

    @check("driver.model", slow=True)
    def test_any_history_with_expiry_matches_the_model(self, bench: Bench) -> None:
        """See the falsifying example, the shortest history on which driver and model disagree."""
        # On a real clock, each history waits for several ticks.
        share = 10 if bench.datastore.waits else 1
        _run(bench.datastore, times=(1.0, 2.0, 3.0), histories=bench.datastore.histories // share)


def _run(datastore: Datastore, *, times: tuple[float, ...], histories: int) -> None:
    # Shrinking repeats a history many times; if time is real or short, the first failing one must do.
    patient = not (times and datastore.waits) and datastore.histories > QUICK_HISTORIES
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if patient else [])]
    machine = driver_machine(lambda: datastore, times=times)
    run_state_machine_as_test(
        machine if datastore.seed is None else seed(datastore.seed)(machine),
        settings=settings(
            max_examples=max(1, histories),
            stateful_step_count=20,
            deadline=None,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        ),
    )
