"""A model for the Agents SDK that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, Usage
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)


def says(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(annotations=[], text=text, type="output_text", logprobs=[])
    return ResponseOutputMessage(
        id="msg", content=[content], role="assistant", status="completed", type="message"
    )


def calls(tool: str, arguments: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(arguments=arguments, call_id=f"c-{tool}", name=tool, type="function_call")


class ScriptedModel(Model):
    """Gives its answers in order. An answer that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[list[Any]] = []

    def _next(self, given: Any) -> list[Any]:
        self.asked.append([{"role": "user", "content": given}] if isinstance(given, str) else list(given))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [says(answer) if isinstance(answer, str) else answer]

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:  # noqa: A002 -- the SDK's name
        return ModelResponse(output=self._next(input), usage=Usage(), response_id=None)

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002 -- the SDK's name
        *_: Any,
        **__: Any,
    ) -> AsyncIterator[Any]:
        response = Response(
            id="r",
            created_at=0,
            model="scripted",
            object="response",
            output=self._next(input),
            tool_choice="none",
            tools=[],
            parallel_tool_calls=False,
        )
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=0)
