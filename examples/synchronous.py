# pip install . && python examples/synchronous.py
"""Use it without an event loop: from any number of threads, with a plain function as the summarizer."""

from concurrent.futures import ThreadPoolExecutor

from stm_backends import MemoryBudget, MemoryKey, ShortTermMemoryConfig, sync
from stm_backends.agents import build_turn, render_memory_message

CONFIG = ShortTermMemoryConfig(
    strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=2), transcript=True
)


def summarize(request: dict) -> dict:
    """Stand in for a call of your model, which may block."""
    told = [request["previous_summary"], *(turn["user"] for turn in request["turns"])]
    return {"summary": ", ".join(filter(None, told))}


def agent(query: str, context: dict) -> str:
    """Stand in for your agent, which would put the context into its prompt."""
    render_memory_message(context)
    return f"Done: {query}."


def talk(backend: sync.Backend, guest: str) -> list[str]:
    memory = backend.memory(MemoryKey("acme", guest, "chat_001"), CONFIG, summarizer=summarize)
    for query in ("a table for two", "make it three", "in the garden"):
        memory.add_turn(build_turn(query, agent(query, memory.get_llm_context())))
    return [turn.user_message for turn in memory.turns()]


with sync.open_backend("sqlite:///synchronous.db") as backend:
    with ThreadPoolExecutor() as threads:
        guests = ["ann", "bob", "eve"]
        for guest, _ in zip(guests, threads.map(lambda guest: talk(backend, guest), guests), strict=True):
            memory = backend.memory(MemoryKey("acme", guest, "chat_001"), CONFIG, summarizer=summarize)
            memory.flush()  # summaries are written in the background; a service need not wait for them
            context = memory.get_llm_context()["conversation_memory"]
            print(guest, "knows", [turn["user"] for turn in context["recent_turns"]])
            print("    and of a table for two:", "a table for two" in context["summary"])

    backend.state_store.save_memory_state("any key", {"any": "json"})
    print(backend.state_store.load_memory_state("any key"))

# ann knows ['make it three', 'in the garden']
#     and of a table for two: True
# bob knows ['make it three', 'in the garden']
#     and of a table for two: True
# eve knows ['make it three', 'in the garden']
#     and of a table for two: True
# {'any': 'json'}
