"""The distributed memory keeps the contract of every short-term memory, and that of one shared by pods."""

import functools

import pytest

from stm_backends.testing import Datastore, PodsContract, memories_on, open_at
from stm_backends.testing.workbench.faulty import faulty_datastore
from tests.support.contract import deadline_of

QUICK_S = 0.5
"""A short deadline, so that the lease of a killed pod does not stand long."""


class TestDistributedMemoryInProcess(PodsContract):
    @pytest.fixture
    def memories(self):
        return memories_on(faulty_datastore(deadline_s=QUICK_S), deadline_s=QUICK_S)


class TestDistributedMemoryOnAFile(PodsContract):
    @pytest.fixture
    def memories(self, request, tmp_path):
        deadline_s = deadline_of(request)
        url = f"sqlite:///{tmp_path}/stm.db?deadline_s={deadline_s}"
        return memories_on(Datastore(open=functools.partial(open_at, url)), deadline_s=deadline_s)
