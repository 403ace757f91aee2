"""The process that measures one library, with an order in JSON as its only argument."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.peers import losses, measure, showing, speaking
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.frameworks import trial
from benchmarks.peers.frameworks.catalogue import Framework
from benchmarks.peers.places import Place

QUICK = measure.Plan(lengths=(10, 100), rounds=10, grow_s=10, blocks=1, seconds=0.2)
FULL = measure.Plan()
WRITES = 200
"""Turns that all writers together add to one conversation."""


def work(order: dict[str, Any]) -> None:
    """Measure one library in this process."""
    kind = Framework if order["what"] == "frameworks" else Peer
    peer = kind(**order["peer"])
    place = Place(**order["place"])
    texts = measure.dialogues(order["dialogues"])

    async def everything() -> None:
        if isinstance(peer, Framework):
            packages = (*peer.packages, "stm-backends")
            measure.say("versions", {package: measure.version_of(package) for package in packages})
            await peer.measure(place, trial.QUICK if order["quick"] else trial.FULL)
            return
        if order["what"] == "messages":
            plan = speaking.QUICK if order["quick"] else speaking.FULL
            if not order["timed"]:
                plan = replace(plan, rounds=0, pages=0)
            await speaking.measure(peer, place, plan, speaking.dialogues(order["dialogues"]), WRITES)
            return
        if order["what"] == "shown":
            await showing.measure(peer, place, showing.QUICK if order["quick"] else showing.FULL, texts)
            return
        await measure.measure(peer, place, QUICK if order["quick"] else FULL, texts)
        with measure.reporting(f"{losses.TASKS} tasks"):
            opened = peer.opened(keeping_all=True)
            counted = await losses.with_tasks(opened, place, WRITES // losses.TASKS)
            measure.say("tasks", asdict(counted))
        with measure.reporting(f"{losses.PROCESSES} processes"):
            counted = await losses.with_processes(peer, place, WRITES // losses.PROCESSES)
            measure.say("processes", asdict(counted))

    with measure.reporting("all"):
        asyncio.run(everything())


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
