# pip install . && python examples/two_agents.py
"""Two agents in two processes share their memories: a researcher finds out what a writer then uses.

They meet in the datastore that `STM_BACKENDS_URL` names, or in a new file `two_agents.db`.
"""

import asyncio
import os
from multiprocessing import get_context

from stm_backends import MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.agents import conversation, render_memory_message
from stm_backends.tiers import MemoryManager, MemoryTier

URL = os.environ.get("STM_BACKENDS_URL", "sqlite:///two_agents.db")
OWNER = ("acme", "u123")
CONFIG = ShortTermMemoryConfig(strategy="truncation", transcript=True)


async def researcher() -> None:
    """Keep one finding for good at once, and one when the session ends."""
    async with open_backend(URL) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        async with conversation(backend, MemoryKey(*OWNER, "research"), CONFIG, tiers=memory) as turn:
            await memory.remember("plan", "read two papers", tier=MemoryTier.FLEETING)
            await memory.remember(
                "finding_1",
                "Quantum computers use qubits",
                tier=MemoryTier.LONG_TERM,
                importance=0.9,
                source_agent="researcher",
            )
            await memory.remember(
                "finding_2", "A qubit can be in two states", importance=0.8, source_agent="researcher"
            )
            await memory.remember("weather", "It rained during the research", importance=0.1)
            turn.record("What is quantum computing?", "I have two findings.")
            turn.end_session()
        kept = sorted(entry.key for entry in await memory.long_term.listed())
        print("researcher keeps:", ", ".join(kept))


async def writer() -> None:
    """Recall what the researcher found, and see it in the prompt."""
    async with open_backend(URL) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        found = await memory.recall("finding", tiers=[MemoryTier.LONG_TERM])
        for entry in sorted(found, key=lambda entry: entry.key):
            print(f"writer recalls: {entry.content} (from the {entry.source_agent})")
        async with conversation(backend, MemoryKey(*OWNER, "report"), CONFIG, tiers=memory) as turn:
            prompt = render_memory_message(turn.context)
            print("for the prompt:", prompt.splitlines()[0])
            print("knows of qubits:", "Quantum computers use qubits" in prompt)
            print("knows the plan:", "read two papers" in prompt)
            turn.record("Write the report.", "Quantum computers use qubits, which ...")


def run(name: str) -> None:
    """Run one agent; each has a process of its own."""
    asyncio.run({"researcher": researcher, "writer": writer}[name]())


if __name__ == "__main__":
    for agent in ("researcher", "writer"):
        process = get_context("spawn").Process(target=run, args=(agent,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)

# researcher keeps: finding_1, finding_2
# writer recalls: Quantum computers use qubits (from the researcher)
# writer recalls: A qubit can be in two states (from the researcher)
# for the prompt: <read_only_background_memory>
# knows of qubits: True
# knows the plan: False
