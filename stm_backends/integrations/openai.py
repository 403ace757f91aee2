"""A summarizer that asks a model, at any endpoint that speaks OpenAI's protocol (extra `openai`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, cast

from stm_backends.drivers.checks import require_count, require_seconds
from stm_backends.errors import ConfigurationError
from stm_backends.extras import missing_extra
from stm_backends.integrations.summary_prompt import messages_for, summary_in
from stm_backends.memory.policy import BadSummary

try:
    from openai import AsyncOpenAI, BadRequestError, UnprocessableEntityError
except ModuleNotFoundError as error:
    raise missing_extra("openai", error) from error

_JSON: Final = {"response_format": {"type": "json_object"}}

_DIALECTS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("max_tokens", _JSON),
    ("max_completion_tokens", _JSON),
    ("max_tokens", {}),
    ("max_completion_tokens", {}),
)
"""How an endpoint may want to be told the cap, and whether it can be told to answer in JSON.

Models that reason refuse `max_tokens`; a server that does not know `max_completion_tokens` may ignore it
without a word, so it comes second. Some servers refuse `response_format`.
"""


class OpenAISummarizer(AbstractAsyncContextManager["OpenAISummarizer"]):
    """Fold turns into a summary by asking a model; hand it to a memory as its `summarizer`.

    ```
    async with OpenAISummarizer("gpt-4.1-mini") as summarize, open_backend("sqlite:///memory.db") as backend:
        memory = backend.memory(key, config, summarizer=summarize)
    ```

    `base_url` and `api_key` are those of any endpoint with `/chat/completions`; unless given, they are what
    the `openai` client takes from the environment. With a `client` of one's own both are left out, and that
    client is never closed by us.

    `max_tokens` is what the summary may take, and what the model is told: no more than the memory's
    `summary_max_tokens`, which cuts. `max_output_tokens` ends an answer (four times as much unless given:
    models that reason spend of it before they answer). Longer requests than `max_input_tokens` are
    shortened, see `messages_for`; a token is counted as four characters. `timeout_s` is how many seconds
    one request may take. What is worth another attempt the client sends again, as often as its
    `max_retries` says; the memory's `summarizer_timeout_s` ends all of it.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        client: AsyncOpenAI | None = None,
        max_tokens: int = 1000,
        max_output_tokens: int | None = None,
        max_input_tokens: int = 32_000,
        timeout_s: float = 20.0,
    ) -> None:
        require_count("max_tokens", max_tokens)
        require_count("max_input_tokens", max_input_tokens)
        require_seconds("timeout_s", timeout_s)
        self._max_output_tokens = 4 * max_tokens if max_output_tokens is None else max_output_tokens
        require_count("max_output_tokens", self._max_output_tokens)
        if client is not None and (base_url is not None or api_key is not None):
            raise ConfigurationError("base_url and api_key belong to the client that was given")
        self._model = model
        self._max_tokens = max_tokens
        self._max_input_tokens = max_input_tokens
        self._timeout_s = timeout_s
        self._ours = client is None
        self._client = client or AsyncOpenAI(base_url=base_url, api_key=api_key)
        self._dialects = _DIALECTS

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Answer `{"summary": str}` to `{"previous_summary": str, "turns": [...]}`.

        Raises what the client raises (`openai.OpenAIError`), and `BadSummary` for an answer that holds no
        summary or was cut off. To a memory each of these is one failed attempt.
        """
        messages = messages_for(request, max_tokens=self._max_tokens, max_input_tokens=self._max_input_tokens)
        return {"summary": summary_in(_text_of(await self._ask(messages)))}

    async def _ask(self, messages: list[dict[str, str]]) -> object:
        """Send a request in the dialect that the endpoint understands, which is found out once.

        A refusal of that dialect is an error like any other, after which it is found out anew: behind an
        endpoint there may be another model by now.
        """
        dialects = self._dialects
        for cap, options in dialects:
            try:
                answer = await cast("Any", self._client.chat.completions).create(
                    model=self._model,
                    messages=messages,
                    timeout=self._timeout_s,
                    **{cap: self._max_output_tokens},
                    **options,
                )
            except (BadRequestError, UnprocessableEntityError):
                if (cap, options) == dialects[-1]:
                    self._dialects = _DIALECTS
                    raise
            else:
                self._dialects = ((cap, options),)
                return answer
        raise AssertionError("there is a dialect")

    async def close(self) -> None:
        """Close the client if we made it. Closing twice is harmless."""
        if self._ours:
            await self._client.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _text_of(answer: Any) -> str:
    """Return the text of a completion. Raises `BadSummary` for an answer without one, or cut off.

    The client takes whatever an endpoint sends for a completion, so nothing about it is certain.
    """
    try:
        choice = answer.choices[0]
        text, reason = choice.message.content, choice.finish_reason
    except (AttributeError, IndexError, KeyError, TypeError):
        raise BadSummary("the endpoint's answer is not a completion") from None
    if reason == "length":
        raise BadSummary("the model's answer was cut off at max_output_tokens")
    if not isinstance(text, str):
        raise BadSummary("the model's answer has no text")
    return text
