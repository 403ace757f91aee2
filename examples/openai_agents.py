# pip install ".[openai-agents]" && python examples/openai_agents.py
"""Run the OpenAI Agents SDK on two pods that share one conversation. See docs/how-to/openai-agents.md."""

import asyncio

from stm_backends import MemoryKey, open_backend

try:
    from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText
except ModuleNotFoundError:
    raise SystemExit('this example needs the OpenAI Agents SDK: pip install ".[openai-agents]"') from None

from stm_backends.integrations.openai_agents import StmSession

KEY = MemoryKey("acme", "u123", "chat_001")
set_tracing_disabled(True)  # traces need an OpenAI key


class ScriptedModel(Model):
    """Stand in for a model, to run without one: leave out `model=` below, or name yours."""

    async def get_response(self, system_instructions, input, *_, **__) -> ModelResponse:  # noqa: A002
        answer = "Teal, you said." if "teal" in str(input[:-1]) else "I will remember that."
        text = ResponseOutputText(text=answer, type="output_text", annotations=[], logprobs=[])
        message = ResponseOutputMessage(
            id="m", content=[text], role="assistant", status="completed", type="message"
        )
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *_, **__):
        raise NotImplementedError


async def pod(query: str) -> None:
    """Answer as a separate process does: with its own backend and agent."""
    async with open_backend("sqlite:///agents.db") as backend:
        agent = Agent(name="Assistant", model=ScriptedModel())
        result = await Runner.run(agent, query, session=StmSession(backend, KEY))
        print(result.final_output)


async def take_back() -> None:
    """Remove the last question and its answer, so that the conversation continues before them."""
    async with open_backend("sqlite:///agents.db") as backend:
        session = StmSession(backend, KEY)
        await session.pop_item()
        question = await session.pop_item()
        print("taken back:", question["content"])
        print("left:", len(await session.get_items()))


asyncio.run(pod("My favourite colour is teal."))
asyncio.run(pod("What is my favourite colour?"))
asyncio.run(take_back())

# I will remember that.
# Teal, you said.
# taken back: What is my favourite colour?
# left: 2
