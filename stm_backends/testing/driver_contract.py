"""The contract of a driver as checks. The name of a check is the sentence that it verifies."""

from __future__ import annotations

import pytest

from stm_backends.testing.driver_checks.clocks import Clocks
from stm_backends.testing.driver_checks.deleting import Deleting
from stm_backends.testing.driver_checks.expiry import Expiry
from stm_backends.testing.driver_checks.faults import Faults
from stm_backends.testing.driver_checks.first_look import look, teller
from stm_backends.testing.driver_checks.histories import Histories
from stm_backends.testing.driver_checks.homes import Homes
from stm_backends.testing.driver_checks.interrupted import Interruptions
from stm_backends.testing.driver_checks.keys import Keys
from stm_backends.testing.driver_checks.leftovers import Leftovers
from stm_backends.testing.driver_checks.limits import Limits
from stm_backends.testing.driver_checks.messages import Messages
from stm_backends.testing.driver_checks.network import Network
from stm_backends.testing.driver_checks.newest import Newest
from stm_backends.testing.driver_checks.optional import Optional
from stm_backends.testing.driver_checks.processes import Processes
from stm_backends.testing.driver_checks.races import Races
from stm_backends.testing.driver_checks.records import Records
from stm_backends.testing.driver_checks.replacing import Replacing
from stm_backends.testing.driver_checks.rewriting import Rewriting
from stm_backends.testing.driver_checks.scanning import Scanning
from stm_backends.testing.driver_checks.snapshots import Snapshots
from stm_backends.testing.driver_checks.stepping import Stepping
from stm_backends.testing.driver_checks.waiting import Waiting
from stm_backends.testing.workbench.drivers import Bench, Datastore


class DriverContract(
    # pytest begins with the last base: failures there are simple, and often cause the later ones.
    Histories,
    Stepping,
    Network,
    Homes,
    Processes,
    Races,
    Waiting,
    Clocks,
    Optional,
    Faults,
    Messages,
    Leftovers,
    Interruptions,
    Snapshots,
    Newest,
    Rewriting,
    Expiry,
    Limits,
    Keys,
    Scanning,
    Deleting,
    Replacing,
    Records,
):
    """Every clause of the contract of `stm_backends.drivers.contract.Driver`, as checks.

    A subclass supplies the fixture `datastore`. Checks use fresh keys and remove only their own.
    """

    @pytest.fixture
    def datastore(self) -> Datastore:
        """The datastore under test; a subclass must override this."""
        raise NotImplementedError("override the fixture `datastore`")

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest, datastore: Datastore) -> Bench:
        """The workbench of one check, which enters and leaves it."""
        look(request, datastore)
        return Bench(datastore, quick=self.is_quick(request.config), tell_untidy=teller(request))
