"""A summarizer that calls a model at any OpenAI-compatible endpoint (extra `openai`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, TypeAlias, cast

from stm_backends.drivers.checks import require_count, require_seconds
from stm_backends.errors import ConfigurationError
from stm_backends.extras import missing_extra
from stm_backends.integrations.summary_prompt import messages_for, summary_in, title_in
from stm_backends.memory.policy import BadSummary

try:
    from openai import AsyncOpenAI, BadRequestError, UnprocessableEntityError
except ModuleNotFoundError as error:
    raise missing_extra("openai", error) from error

_JSON: Final = {"response_format": {"type": "json_object"}}

_Dialects: TypeAlias = tuple[tuple[str, Mapping[str, Any]], ...]

_PLAIN: Final[_Dialects] = (("max_tokens", {}), ("max_completion_tokens", {}))

_DIALECTS: Final[Mapping[bool, _Dialects]] = {
    True: (*((cap, _JSON) for cap, _ in _PLAIN), *_PLAIN),
    False: _PLAIN,
}
"""The name of the output limit and whether to request JSON, in the order in which they are tried, for
JSON answers and for plain text.

Reasoning models reject `max_tokens`; a server that does not know `max_completion_tokens` may ignore it
silently, so it comes second. Some servers reject `response_format`.
"""


class OpenAISummarizer(AbstractAsyncContextManager["OpenAISummarizer"]):
    """A `summarizer` that has a model write a memory's summary, and an `llm_provider` for tiers.

    ```
    async with OpenAISummarizer("gpt-4.1-mini") as summarize, open_backend("sqlite:///memory.db") as backend:
        memory = backend.memory(key, config, summarizer=summarize)
    ```

    `base_url` and `api_key` belong to any endpoint with `/chat/completions`; by default the `openai` client
    takes them from the environment. Instead of both, a `client` can be passed, which is never closed.

    `max_tokens` is the summary length requested from the model; set it to the memory's
    `summary_max_tokens` or less, because longer summaries are cut. `max_output_tokens` limits the answer. It
    defaults to four times `max_tokens`, because reasoning models use part of it before they answer. Requests
    longer than `max_input_tokens`, by the default estimate, are shortened (see `messages_for`).
    `timeout_s` is the time limit of one request in seconds. The client retries up to its `max_retries`; the
    memory's `summarizer_timeout_s` limits the total. With `titles`, the same answer also has a title for the
    conversation; a list of conversations shows it unless the user has set a title.
    """

    def __init__(  # noqa: PLR0913 -- one for each setting
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
        titles: bool = False,
    ) -> None:
        require_count("max_tokens", max_tokens)
        require_count("max_input_tokens", max_input_tokens)
        require_seconds("timeout_s", timeout_s)
        self._max_output_tokens = 4 * max_tokens if max_output_tokens is None else max_output_tokens
        require_count("max_output_tokens", self._max_output_tokens)
        if client is not None and (base_url is not None or api_key is not None):
            raise ConfigurationError("pass base_url and api_key, or a client, not both")
        self._model = model
        self._max_tokens = max_tokens
        self._max_input_tokens = max_input_tokens
        self._timeout_s = timeout_s
        self._titles = titles
        self._ours = client is None
        self._client = client or AsyncOpenAI(base_url=base_url, api_key=api_key)
        self._dialects = dict(_DIALECTS)

    async def __call__(self, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return `{"summary": str}` for `{"previous_summary": str, "turns": [...]}`, and `"title"` if asked.

        Raises what the client raises (`openai.OpenAIError`), and `BadSummary` for an answer that contains no
        summary or was cut off. The memory counts each of these as a failed attempt.
        """
        messages = messages_for(
            request,
            max_tokens=self._max_tokens,
            max_input_tokens=self._max_input_tokens,
            titles=self._titles,
        )
        answer = _text_of(await self._ask(messages))
        title = title_in(answer) if self._titles else ""
        return {"summary": summary_in(answer), **({"title": title} if title else {})}

    async def generate(self, *, messages: list[dict[str, str]]) -> str:
        """Return the model's answer to messages; `MemoryManager` calls this as its `llm_provider`.

        Requests plain text, not JSON. Raises what the client raises, and `BadSummary` for an answer that has
        no text or was cut off. `max_input_tokens` does not apply.
        """
        return _text_of(await self._ask(messages, json=False))

    async def _ask(self, messages: list[dict[str, str]], *, json: bool = True) -> object:
        """Send a request in the first dialect that the endpoint accepts, and remember that dialect.

        If the endpoint rejects it later, that is an error, and the next request tries all dialects again: the
        endpoint may serve another model.
        """
        dialects = self._dialects[json]
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
                    self._dialects[json] = _DIALECTS[json]
                    raise
            else:
                self._dialects[json] = ((cap, options),)
                return answer
        raise AssertionError("there is at least one dialect")

    async def close(self) -> None:
        """Close the client if this object created it. Closing twice is harmless."""
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
    """Return the text of a completion. Raises `BadSummary` if there is none or it was cut off.

    The client does not validate responses, so any attribute may be missing.
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
