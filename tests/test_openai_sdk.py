"""OpenAI's Python SDK from PyPI, unmodified, against a running server: what applications really call."""

import json
import math
from enum import StrEnum

import pytest
from openai import BadRequestError, LengthFinishReasonError, NotFoundError, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Hello there"}]
SCRIPT = "to be ignored: <|script|>Hello there<|script_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'


class Color(StrEnum):
    red = "red"
    blue = "blue"


class Item(BaseModel):
    title: str
    price: float
    ok: bool


class Order(BaseModel):
    id: int
    color: Color
    note: str | None
    first: Item
    items: list[Item]


def client_of(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def says(text) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(serve, tiny):
    return client_of(serve(tiny("scripted", style="think", tools="json_tools")))


@pytest.fixture
def random_client(serve, tiny):
    """Random weights at temperature 1: they say whatever a grammar allows."""
    return client_of(serve(tiny("llama")))


@pytest.fixture(params=[{}, {"seed": 5}], ids=["batched", "seed"])
def fields(request):
    return {"model": "default_model", **request.param}


# Replies


def test_create(client, fields):
    reply = client.chat.completions.create(messages=MESSAGES, **fields)
    assert (reply.object, reply.model) == ("chat.completion", "default_model")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there")
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("stop", None, None)
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0 and usage.prompt_tokens_details.cached_tokens >= 0


def test_create_streamed(client, fields):
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **fields))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello there"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_usage_of_a_stream(client, fields):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **options, **fields)
    assert (last.choices, last.object) == ([], "chat.completion.chunk")
    assert last.usage.completion_tokens > 1
    assert all(c.choices and c.usage is None for c in chunks)


def test_the_stream_helper(client, fields):
    with client.chat.completions.stream(
        messages=says(f"<think>Hm.</think>Well: {CALL}"), tools=TOOLS, **fields
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (choice,) = final.choices
    assert (choice.message.content, choice.finish_reason) == ("Well:", "tool_calls")
    (call,) = choice.message.tool_calls
    assert call.id and call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": [2]}


def test_thinking_and_calls(client, fields):
    message = client.chat.completions.create(messages=says(f"<think>Hm.</think>{CALL}"), tools=TOOLS, **fields)
    (choice,) = message.choices
    assert choice.message.reasoning_content == choice.message.reasoning == "Hm."
    assert message.usage.completion_tokens_details.reasoning_tokens > 0
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    answer = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
    again = [*says("Add them."), choice.message.model_dump(exclude_none=True), answer, *says("Thank you")]
    reply = client.chat.completions.create(messages=again, tools=TOOLS, **fields)
    assert reply.choices[0].message.content == "Thank you"


def test_stop_and_limit(client, fields):
    reply = client.chat.completions.create(messages=says("hello world again"), stop=["lo w"], **fields)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hel", "stop")
    reply = client.chat.completions.create(messages=says("hello world again"), max_completion_tokens=2, **fields)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hello world", "length")


def test_headers(client):
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, model="default_model", extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse()._request_id == "mine-1"
    assert client.models.with_raw_response.list().headers["x-request-id"]


# Schemas


def parsed(client, fields, **options):
    """One reply as an Order, or None where it reached its limit."""
    try:
        reply = client.chat.completions.parse(
            messages=MESSAGES, response_format=Order, temperature=1, max_tokens=2000, **options, **fields
        )
    except LengthFinishReasonError:
        return None
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert Order.model_validate_json(choice.message.content) == choice.message.parsed
    return choice.message.parsed


def test_parse_with_a_pydantic_model(random_client, fields):
    orders = [parsed(random_client, {**fields, "seed": n} if "seed" in fields else fields) for n in range(3)]
    assert any(orders)
    assert all(order is None or isinstance(order, Order) for order in orders)


def test_the_stream_helper_with_a_pydantic_model(random_client, fields):
    options = {"response_format": Order, "temperature": 1, "max_tokens": 2000}
    with random_client.chat.completions.stream(messages=MESSAGES, **options, **fields) as events:
        try:
            done = [event for event in events if event.type == "content.done"]
        except LengthFinishReasonError:
            return
        final = events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Order)
    assert done[0].parsed == final.choices[0].message.parsed


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_where_two_tokens_are_legal(random_client, fields, stream):
    """All but a few tokens are masked, so most alternatives have no probability; strict JSON has no infinities."""
    schema = {"name": "letter", "strict": True, "schema": {"enum": ["a", "b"]}}
    reply = random_client.chat.completions.create(
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": schema},
        logprobs=True,
        top_logprobs=5,
        temperature=1,
        stream=stream,
        **fields,
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    text = "".join(entry.token for entry in entries)
    assert json.loads(text) in ("a", "b")
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert -9999 < entry.logprob <= 0 and len(entry.top_logprobs) == 5
        assert all(math.isfinite(top.logprob) and top.logprob >= -9999 for top in entry.top_logprobs)
        legal = [math.exp(top.logprob) for top in entry.top_logprobs if top.logprob > -9999]
        assert entry.token in [top.token for top in entry.top_logprobs if top.logprob > -9999]
        assert sum(legal) == pytest.approx(1, abs=1e-3) and len(legal) < 5
    assert any(-9999 in [top.logprob for top in entry.top_logprobs] for entry in entries)


# Completions


def test_completions(client, fields):
    reply = client.completions.create(prompt=SCRIPT, **fields)
    (choice,) = reply.choices
    assert (reply.object, choice.text, choice.finish_reason, choice.logprobs) == (
        "text_completion",
        "Hello there",
        "stop",
        None,
    )
    chunks = list(client.completions.create(prompt=SCRIPT, stream=True, **fields))
    assert "".join(c.choices[0].text for c in chunks) == "Hello there"


def test_logprobs_of_completions(client, fields):
    reply = client.completions.create(prompt=SCRIPT, logprobs=3, **fields)
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == "Hello there" and logprobs.text_offset == [0, len(logprobs.tokens[0])]
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 2
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 3
    chunks = list(client.completions.create(prompt=SCRIPT, logprobs=3, stream=True, **fields))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].text]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(logprobs, name)
    assert client.completions.create(prompt=SCRIPT, logprobs=0, **fields).choices[0].logprobs.tokens


# Models


def test_models(client):
    (model,) = client.models.list().data
    assert model.object == "model" and model.created and model.owned_by
    assert client.models.retrieve(model.id).id == model.id
    assert client.models.retrieve("default_model").id == "default_model"
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt-4o")


# Errors


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, fields, stream):
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(messages=MESSAGES, temperature=-1, stream=stream, **fields)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert "temperature" in error.message and error.request_id
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(messages=MESSAGES, stream=stream, **{**fields, "model": "gpt-4o"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(messages=MESSAGES, stream=stream, n=2, **fields)
    assert caught.value.param == "n"


def test_mlx_lm_server(serve, tiny):
    """What the SDK meets there: a usage chunk that calls itself a completion, no `bytes`, errors without a param."""
    upstream = client_of(serve(tiny("scripted", style="think", tools="json_tools"), module="mlx_lm.server"))
    options = {"model": "default_model", "messages": MESSAGES}
    chunks = list(upstream.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].object == "chat.completion"
    assert [c.choices[0].delta.role for c in chunks[:-1]] == ["assistant"] * (len(chunks) - 1)
    entry = upstream.chat.completions.create(logprobs=True, top_logprobs=2, **options).choices[0].logprobs.content[0]
    assert not hasattr(entry, "bytes") or entry.bytes is None
    with pytest.raises(BadRequestError) as caught:
        upstream.chat.completions.create(temperature=-1, **options)
    assert caught.value.param is None
