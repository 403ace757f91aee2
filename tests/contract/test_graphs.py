"""Our graphs keep the contract of every graph."""

import functools

import pytest

from stm_backends.testing import Datastore, GraphContract, Graphs, graphs_on, open_at
from stm_backends.testing.workbench.faulty import faulty_datastore
from stm_backends.tiers.graph import InProcessGraph


class TestGraphOnTheReferenceDriver(GraphContract):
    @pytest.fixture
    def graphs(self):
        return graphs_on(faulty_datastore())


class TestGraphOnAFile(GraphContract):
    @pytest.fixture
    def graphs(self, tmp_path):
        return graphs_on(Datastore(open=functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db")))


class TestGraphInThisProcess(GraphContract):
    @pytest.fixture
    def graphs(self):
        made = {}

        async def open_one(name):
            return made.setdefault(name, InProcessGraph())

        return Graphs(open=open_one)
