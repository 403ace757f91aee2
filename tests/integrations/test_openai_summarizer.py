"""A summarizer that asks a model: a real client, a real server that misbehaves, a memory around them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from stm_backends import (
    ConfigurationError,
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    Unavailable,
    open_backend,
)
from stm_backends.integrations.openai import OpenAISummarizer
from stm_backends.memory.policy import BadSummary
from stm_backends.tiers import MemoryManager, MemoryTier
from tests.integrations.endpoint import Endpoint, Reply, completion, refusal

KEY = MemoryKey("acme", "u1", "chat")
REQUEST = {"previous_summary": "", "turns": [{"user": "A table, please.", "assistant": "Booked."}]}
GOOD = "<session_summary>\nThey booked a table.\n</session_summary>"
ANSWER = completion(json.dumps({"summary": GOOD}))

Summarizers = Callable[..., OpenAISummarizer]


@pytest.fixture
async def ask() -> AsyncIterator[Summarizers]:
    """Makes summarizers that ask an endpoint; the client's retries wait for no longer than they are told."""
    made: list[openai.AsyncOpenAI] = []

    def make(endpoint: Endpoint, *, max_retries: int = 0, **options: Any) -> OpenAISummarizer:
        made.append(openai.AsyncOpenAI(base_url=endpoint.url, api_key="sk-secret", max_retries=max_retries))
        return OpenAISummarizer("m", client=made[-1], **options)

    yield make
    for client in made:
        await client.close()


async def test_a_model_is_asked_for_json_with_a_cap_and_answers(ask: Summarizers) -> None:
    with Endpoint(ANSWER) as endpoint:
        assert await ask(endpoint, max_tokens=100)(REQUEST) == {"summary": GOOD}
        assert endpoint.paths == ["/v1/chat/completions"]
        (request,) = endpoint.requests
    assert request["model"] == "m"
    assert request["max_tokens"] == 400
    assert request["response_format"] == {"type": "json_object"}
    assert "A table, please." in request["messages"][1]["content"]
    assert "100 tokens" in request["messages"][0]["content"]


async def test_a_model_names_the_conversation_if_asked(ask: Summarizers) -> None:
    named = json.dumps({"title": "A table", "summary": GOOD})
    with Endpoint(completion(named)) as endpoint:
        assert await ask(endpoint, titles=True)(REQUEST) == {"summary": GOOD, "title": "A table"}
        assert await ask(endpoint)(REQUEST) == {"summary": GOOD}
        assert ["title" in request["messages"][0]["content"] for request in endpoint.requests] == [
            True,
            False,
        ]


async def test_the_previous_summary_is_carried_over_to_the_model(ask: Summarizers) -> None:
    with Endpoint(ANSWER) as endpoint:
        await ask(endpoint)({**REQUEST, "previous_summary": "They like tea."})
        assert "They like tea." in endpoint.requests[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{json.dumps({'summary': GOOD})}\n```",
        f"Here you are: {json.dumps({'summary': GOOD})} Anything else?",
        json.dumps({"summary": "They booked a table."}),
        f'{{"summary": "{GOOD}"}}',
    ],
    ids=["code fences", "prose around", "missing tags", "raw line breaks"],
)
async def test_an_answer_with_a_usual_mistake_is_repaired(ask: Summarizers, text: str) -> None:
    with Endpoint(completion(text)) as endpoint:
        assert await ask(endpoint)(REQUEST) == {"summary": GOOD}


CHOICE = {"index": 0, "finish_reason": "stop"}

NO_SUMMARIES = {
    "no JSON": completion("I cannot do that."),
    "no choices": Reply({"choices": []}),
    "choices that are null": Reply({"choices": None}),
    "choices of another type": Reply({"choices": "none"}),
    "a choice of another type": Reply({"choices": ["text"]}),
    "a message that is null": Reply({"choices": [{**CHOICE, "message": None}]}),
    "a message of another type": Reply({"choices": [{**CHOICE, "message": "text"}]}),
    "no text": completion(None),
    "text of another type": completion([{"type": "text", "text": json.dumps({"summary": GOOD})}]),
    "a summary of another type": completion(json.dumps({"summary": 7})),
    "a number": Reply(7),
    "a list": Reply([1]),
    "null": Reply(None),
    "an empty object": Reply({}),
    "another content type": Reply(b"<html>Bad gateway</html>", headers={"Content-Type": "text/html"}),
    "an answer that was cut off": completion(
        '{"summary": "<session_summary>They boo', finish_reason="length"
    ),
    "a whole answer that says it was cut off": completion(
        json.dumps({"summary": GOOD}), finish_reason="length"
    ),
}


@pytest.mark.parametrize("reply", NO_SUMMARIES.values(), ids=NO_SUMMARIES)
async def test_an_answer_without_a_summary_is_a_failed_attempt(ask: Summarizers, reply: Reply) -> None:
    with Endpoint(reply) as endpoint, pytest.raises(BadSummary):
        await ask(endpoint)(REQUEST)


async def test_an_answer_that_is_half_of_json_is_a_failed_attempt(ask: Summarizers) -> None:
    with Endpoint(Reply(b'{"choices": [{"mess')) as endpoint, pytest.raises(ValueError, match="Unterminated"):
        await ask(endpoint)(REQUEST)


async def test_an_endpoint_that_is_busy_is_asked_again_by_the_client(ask: Summarizers) -> None:
    with Endpoint(refusal(429, Retry_After="0.01"), refusal(500, Retry_After="0.01"), ANSWER) as endpoint:
        assert await ask(endpoint, max_retries=2)(REQUEST) == {"summary": GOOD}
        assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
        (429, openai.RateLimitError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
    ],
)
async def test_an_endpoint_that_goes_on_failing_is_an_error(
    ask: Summarizers, status: int, error: type[Exception]
) -> None:
    with Endpoint(refusal(status)) as endpoint:
        with pytest.raises(error):
            await ask(endpoint)(REQUEST)
        assert len(endpoint.requests) == 1


async def test_an_endpoint_that_hangs_is_waited_for_no_longer_than_the_timeout(ask: Summarizers) -> None:
    with Endpoint(Reply(hang=True)) as endpoint:
        async with asyncio.timeout(30):
            with pytest.raises(openai.APITimeoutError):
                await ask(endpoint, timeout_s=0.3)(REQUEST)


async def test_an_endpoint_that_is_not_there_is_an_error(ask: Summarizers) -> None:
    with Endpoint(ANSWER) as endpoint:
        pass
    with pytest.raises(openai.APIConnectionError):
        await ask(endpoint)(REQUEST)


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("refused", [["response_format"], ["max_tokens"], ["response_format", "max_tokens"]])
async def test_what_an_endpoint_refuses_is_left_out_and_not_tried_again(
    ask: Summarizers, status: int, refused: list[str]
) -> None:
    def reply(body: Any) -> Reply:
        return refusal(status) if any(name in body for name in refused) else ANSWER

    with Endpoint(reply) as endpoint:
        summarize = ask(endpoint)
        assert await summarize(REQUEST) == {"summary": GOOD}
        before = len(endpoint.requests)
        assert await summarize(REQUEST) == {"summary": GOOD}
        assert len(endpoint.requests) == before + 1
    last = endpoint.requests[-1]
    assert not [name for name in refused if name in last]
    assert ("max_tokens" in last) != ("max_completion_tokens" in last)


async def test_a_request_that_is_refused_in_any_case_is_an_error(ask: Summarizers) -> None:
    with Endpoint(ANSWER, refusal(400)) as endpoint:
        summarize = ask(endpoint)
        await summarize(REQUEST)
        with pytest.raises(openai.BadRequestError):
            await summarize(REQUEST)
        # It is known what the endpoint understands, so the request itself is at fault.
        assert len(endpoint.requests) == 2
        with pytest.raises(openai.BadRequestError):
            await ask(endpoint)(REQUEST)
        assert len(endpoint.requests) == 6


async def test_a_changed_model_behind_the_endpoint_works_at_the_next_attempt(
    ask: Summarizers,
) -> None:
    refused = "max_completion_tokens"

    def reply(body: Any) -> Reply:
        return refusal(400) if refused in body else ANSWER

    with Endpoint(reply) as endpoint:
        summarize = ask(endpoint)
        await summarize(REQUEST)
        refused = "max_tokens"
        with pytest.raises(openai.BadRequestError):
            await summarize(REQUEST)
        assert await summarize(REQUEST) == {"summary": GOOD}


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_output_tokens": 0},
        {"max_input_tokens": "many"},
        {"timeout_s": 0},
        {"timeout_s": None},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        OpenAISummarizer("m", api_key="k", **options)


@pytest.mark.parametrize("option", ["base_url", "api_key"])
async def test_what_a_client_has_is_not_given_beside_it(option: str) -> None:
    async with openai.AsyncOpenAI(api_key="k") as client:
        with pytest.raises(ConfigurationError, match="or a client, not both"):
            OpenAISummarizer("m", client=client, **{option: "http://localhost/v1"})


async def test_a_given_client_stays_open_and_an_owned_client_is_closed() -> None:
    with Endpoint(ANSWER) as endpoint:
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="k") as client:
            async with OpenAISummarizer("m", client=client) as summarize:
                await summarize(REQUEST)
            assert not client.is_closed()
        async with OpenAISummarizer("m", base_url=endpoint.url, api_key="k") as summarize:
            assert await summarize(REQUEST) == {"summary": GOOD}
        with pytest.raises((RuntimeError, openai.APIConnectionError)):
            await summarize(REQUEST)
        assert len(endpoint.requests) == 2
        await summarize.close()


def test_no_repr_shows_the_key_of_the_endpoint() -> None:
    assert "sk-secret" not in repr(OpenAISummarizer("m", api_key="sk-secret"))


# The memory around it


def config(**options: Any) -> ShortTermMemoryConfig:
    given: dict[str, Any] = {"retry_backoff_base_s": 0.05, "degraded_retry_interval_s": 0.05, **options}
    budget = MemoryBudget(full_zone_turns=1)
    return ShortTermMemoryConfig(strategy="rolling_summary", budget=budget, **given)


def echo(body: Any) -> Reply:
    """Summarize as a model would that writes down all that it is shown."""
    shown = body["messages"][1]["content"].removeprefix("<conversation_json>\n")
    known = json.loads(shown.removesuffix("\n</conversation_json>"))
    said = " ".join(turn["user"] for turn in known["turns"])
    kept = known["previous_summary"].removeprefix("<session_summary>").removesuffix("</session_summary>")
    return completion(f"Sure!\n```json\n{json.dumps({'summary': f'{kept.strip()} {said}'})}\n```")


async def test_a_background_summary_of_one_pod_is_in_the_prompt_of_another(
    tmp_path: Path, ask: Summarizers
) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    with Endpoint(echo) as endpoint:
        async with open_backend(url) as backend:
            memory = backend.memory(KEY, config(), summarizer=ask(endpoint))
            for query in ("I like tea.", "I live in Porto.", "Anything new?"):
                await memory.add_turn(ConversationTurn(query, "Noted."))
            await memory.flush()
        async with open_backend(url) as backend:
            memory = backend.memory(KEY, config(), summarizer=ask(endpoint))
            shown = (await memory.get_llm_context())["conversation_memory"]
    assert [turn["user"] for turn in shown["recent_turns"]] == ["Anything new?"]
    assert "pending_turns" not in shown
    assert shown["summary"].startswith("<session_summary>\n")
    assert "I like tea." in shown["summary"]
    assert "I live in Porto." in shown["summary"]


@pytest.mark.parametrize(
    "reply",
    [refusal(500), completion("no JSON"), completion("{", finish_reason="length"), Reply(hang=True)],
    ids=["an error", "no summary", "cut off", "no answer"],
)
async def test_a_failing_model_degrades_the_memory_until_it_answers_again(
    tmp_path: Path, ask: Summarizers, reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    healths: list[MemoryHealth] = []
    healed = asyncio.Event()

    async def heard(_: MemoryHealth, new: MemoryHealth) -> None:
        healths.append(new)
        if new is MemoryHealth.HEALTHY:
            healed.set()

    # Answers that do come are given all the time that a busy machine may take.
    patience = 1.0 if reply.hang else 30.0
    settings = config(retry_attempts=1, on_health_changed=heard)
    with Endpoint(reply, reply, ANSWER) as endpoint, caplog.at_level(logging.DEBUG, "stm_backends"):
        async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
            memory = backend.memory(KEY, settings, summarizer=ask(endpoint, timeout_s=patience))
            for query in ("The secret is teal.", "Anything new?"):
                await memory.add_turn(ConversationTurn(query, "Noted."))
            async with asyncio.timeout(60):
                await healed.wait()
            shown = (await memory.get_llm_context())["conversation_memory"]
    assert healths == [
        MemoryHealth.RETRY,
        MemoryHealth.DEGRADED,
        MemoryHealth.RECOVERING,
        MemoryHealth.HEALTHY,
    ]
    assert shown["summary"] == GOOD
    assert "teal" not in caplog.text
    assert "sk-secret" not in caplog.text


async def test_tiers_ask_the_summarizer_for_plain_text(ask: Summarizers) -> None:
    with Endpoint(completion(" precise ")) as endpoint:
        memory = MemoryManager(llm_provider=ask(endpoint))
        await memory.remember("k", "vague", tier=MemoryTier.LONG_TERM)
        assert await memory.gc.improve_memory(MemoryTier.LONG_TERM) == 1
        assert [one.content for one in await memory.recall("k")] == ["precise"]
        (request,) = endpoint.requests
        assert "response_format" not in request
        assert "vague" in request["messages"][0]["content"]


async def test_plain_text_and_json_each_have_the_dialect_that_was_accepted(ask: Summarizers) -> None:
    def answer(body: Any) -> Reply:
        return refusal(400) if "max_tokens" in body else ANSWER

    with Endpoint(answer) as endpoint:
        summarizer, messages = ask(endpoint), [{"role": "user", "content": "Say it."}]
        for _ in range(2):
            assert GOOD in (await summarizer.generate(messages=messages)).replace("\\n", "\n")
            assert await summarizer(REQUEST) == {"summary": GOOD}
    requests = [("response_format" in one, "max_tokens" in one) for one in endpoint.requests]
    assert requests == [
        (False, True),
        (False, False),
        (True, True),
        (True, False),
        (False, False),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (completion("cut", finish_reason="length"), BadSummary),
        (completion(None), BadSummary),
        (refusal(500), openai.OpenAIError),
    ],
)
async def test_an_answer_that_failed_changes_no_memory(ask: Summarizers, reply: Reply, error: Any) -> None:
    with Endpoint(reply) as endpoint:
        memory = MemoryManager(llm_provider=ask(endpoint))
        await memory.remember("k", "vague", tier=MemoryTier.LONG_TERM)
        with pytest.raises(Unavailable, match="the model failed") as raised:
            await memory.gc.improve_memory(MemoryTier.LONG_TERM)
        assert isinstance(raised.value.__cause__, error)
        assert [one.content for one in await memory.recall("k")] == ["vague"]
