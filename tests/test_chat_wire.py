"""The shapes of chunks and bodies, log-probabilities; and, beside mlx_lm.server, that a request without a new field
gets the same reply but for what docs/chat_wire.md lists.
"""

import json
import math

import pytest
from tokenizers import Tokenizer

from mlx_patches.chat_wire import ChatEncoder, CompletionEncoder, Head
from mlx_patches.reply_events import CallArguments, CallOpened, Content, Finished, Reasoning, TokenLogprob
from tests.client import (
    CHAT,
    COMPLETIONS,
    both,
    chat,
    chat_stream,
    complete,
    complete_stream,
    exchange,
    post,
    post_bytes,
)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
THINKS = f"<think>Let me think.</think>Well: {CALL} done"
SCRIPT = "to be ignored: <|script|>Hello there<|script_end|>"
PATHS = {"single": {"seed": 1}, "batched": {}}


@pytest.fixture
def folder(tiny):
    return tiny("scripted", style="think", tools="json_tools")


@pytest.fixture
def server(serve, folder):
    return serve(folder)


@pytest.fixture(params=PATHS)
def fields(request):
    return PATHS[request.param]


def body_of(text="Hello there", **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


# A stream's chunks


def test_the_chunks_of_a_chat_stream(server, fields):
    reply = chat_stream(server, THINKS, tools=TOOLS, **fields)
    *choices, usage = reply.chunks
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in reply.chunks}) == 1
    assert usage["object"] == "chat.completion.chunk" and usage["choices"] == []
    assert [c for c in choices if "usage" in c] == []
    assert [c["choices"][0]["index"] for c in choices] == [0] * len(choices)
    deltas = [c["choices"][0]["delta"] for c in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {} and all(deltas[:-1])
    assert not any("role" in delta for delta in deltas[1:])
    reasons = [c["choices"][0]["finish_reason"] for c in choices]
    assert reasons == [None] * (len(choices) - 1) + ["tool_calls"]
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
    assert reply.raw.endswith(b"data: [DONE]\n\n")
    assert (reply.reasoning, reply.content) == ("Let me think.", "Well: done")
    assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == {"a": 1, "b": [2, "é"]}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}, {"other": 1}])
@pytest.mark.parametrize("call", [chat_stream, complete_stream])
def test_a_usage_chunk_only_where_it_is_asked_for(server, call, options):
    reply = call(server, SCRIPT if call is complete_stream else "Hello there", stream_options=options)
    assert (reply.usage, reply.content) == (None, "Hello there")
    assert all(c["choices"] and "usage" not in c for c in reply.chunks)


def test_the_chunks_of_a_completions_stream(server, fields):
    reply = complete_stream(server, SCRIPT, **fields)
    *choices, usage = reply.chunks
    assert {c["object"] for c in choices} == {"text_completion"}
    assert choices[-1]["choices"][0] == {"index": 0, "text": "", "finish_reason": "stop"}
    assert "".join(c["choices"][0]["text"] for c in choices) == "Hello there"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions?api-version=1"])
def test_the_paths(server, path):
    assert post(server, path, body_of()).content == "Hello there"
    assert post(server, path, body_of(stream=True)).content == "Hello there"


# A whole body


def test_a_whole_body(server, fields):
    reply = both(server, THINKS, tools=TOOLS, **fields)
    body = reply.body
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    (choice,) = body["choices"]
    assert set(choice) == {"index", "message", "finish_reason"}
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Well: done")
    assert message["reasoning"] == message["reasoning_content"] == "Let me think."
    (call,) = message["tool_calls"]
    assert set(call) == {"id", "type", "function"} and set(call["function"]) == {"name", "arguments"}
    assert reply.headers["Content-Type"] == "application/json"


def test_usage(server, folder, fields):
    thought, answer = "Let me think.", "Well"
    count = {text: tokens_of(folder, text) for text in (thought, answer)}
    for reply in (f(server, f"<think>{thought}</think>{answer}", **fields) for f in (chat, chat_stream)):
        usage = reply.usage
        # Two markers and the end token are generated too, and are neither thinking nor content.
        assert usage["completion_tokens"] == count[thought] + count[answer] + 3
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count[thought]}
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.parametrize(
    "text, options, reason",
    [
        ("Hello there", {}, "stop"),
        ("Hello there", {"max_tokens": 1}, "length"),
        ("Hello there", {"stop": "there"}, "stop"),
        (CALL, {}, "stop"),  # a tag, where the request has no tools
        (CALL, {"tools": TOOLS}, "tool_calls"),
        ("<tool_call>{broken</tool_call>", {}, "stop"),
        (CALL, {"max_tokens": 5}, "length"),
        ("<think>never closed", {"max_tokens": 2}, "length"),
    ],
)
def test_finish_reasons(server, fields, text, options, reason):
    assert both(server, text, **options, **fields).finish_reason == reason


# Log-probabilities


NOT_FOUR = {str(n): -1e39 for n in range(1100) if n not in (60, 61, 62, 63)}  # minus infinity as a float32
MASKED = body_of(logprobs=True, max_tokens=3, logit_bias=NOT_FOUR)


def tokens_of(folder, text) -> int:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return sum(len(tokenizer.encode(part).ids) for part in text.split("<|cut|>"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("Hello there", "Hello there"),
        ("<think>Let me think.</think>Yes and no", "Yes and no"),
        ("<think>Hm</<|cut|>think>a <<|cut|> b </<|cut|>think> c", "a <<|cut|> b </<|cut|>think> c"),
        (f"Well: {CALL} done", "Well:<|cut|> done"),
        ("a\n\n<|cut|>ünï 🦉", "a\n\n<|cut|>ünï 🦉"),
    ],
)
def test_one_entry_for_each_token_of_content(server, folder, fields, text, said):
    content = said.replace("<|cut|>", "")
    whole = chat(server, text, tools=TOOLS, logprobs=True, top_logprobs=2, **fields)
    streamed = chat_stream(server, text, tools=TOOLS, logprobs=True, top_logprobs=2, **fields)
    assert whole.content == streamed.content == content
    assert streamed.logprobs == whole.logprobs
    entries = whole.logprobs["content"]
    assert len(entries) == tokens_of(folder, said)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == content
    for entry in entries:
        assert set(entry) >= {"token", "bytes", "logprob", "top_logprobs"}
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
        assert entry["token"] == entry["top_logprobs"][0]["token"]


def test_entries_come_with_their_content(server):
    reply = chat_stream(server, "Hello there again", logprobs=True)
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            text, listed = choice["delta"].get("content"), (choice.get("logprobs") or {}).get("content", [])
            assert "".join(entry["token"] for entry in listed) == (text or "")


def test_no_logprobs_where_none_are_asked_for(server):
    for options in ({}, {"logprobs": False}, {"logprobs": None}, {"top_logprobs": 0}):
        assert both(server, "Hello there", **options).logprobs is None
    reply = chat(server, "Hello there", logprobs=True)
    assert [entry["top_logprobs"] for entry in reply.logprobs["content"]] == [[], []]


def test_the_entry_is_the_sampled_tokens(serve, tiny, fields):
    """At temperature 1 the sampled token is often not the likeliest; twenty alternatives, sorted, all finite."""
    reply = chat(serve(tiny("llama")), "Hello", logprobs=True, top_logprobs=20, temperature=1, max_tokens=60, **fields)
    entries = reply.logprobs["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace") == reply.content
    unlikely = 0
    for entry in entries:
        top = [t["logprob"] for t in entry["top_logprobs"]]
        assert (
            len(top) == 20 and top == sorted(top, reverse=True) and len({t["id"] for t in entry["top_logprobs"]}) == 20
        )
        assert math.isfinite(entry["logprob"]) and entry["logprob"] <= top[0]
        unlikely += entry["logprob"] < top[0]
        assert all(t["logprob"] == entry["logprob"] for t in entry["top_logprobs"] if t["id"] == entry["id"])
    assert unlikely > len(entries) / 4


def test_a_masked_token_is_no_infinity(server, fields):
    body = MASKED | {"top_logprobs": 20, **fields}
    for stream in (False, True):
        reply = post(server, CHAT, body | {"stream": stream})  # parsed strictly
        numbers = [t["logprob"] for e in reply.logprobs["content"] for t in (e, *e["top_logprobs"])]
        assert min(numbers) == -9999.0 and max(numbers) <= 0


@pytest.mark.parametrize("prompt", ["Hello", "What is the time?"])
def test_the_older_shape_of_completions(serve, tiny, fields, prompt):
    server = serve(tiny("llama"))
    options = {"logprobs": 4, "max_tokens": 12, **fields}
    whole, streamed = complete(server, prompt, **options), complete_stream(server, prompt, **options)
    logprobs = whole.logprobs
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(logprobs["tokens"]) == whole.content
    offsets = [sum(map(len, logprobs["tokens"][:n])) for n in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == offsets
    for token, logprob, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert 1 <= len(top) <= 4 and top[token] == logprob  # greedy
    assert streamed.logprobs == logprobs


# The encoders by themselves: another protocol will be another one


HEAD = Head("id-1", "m", 5, "f")
EVENTS = [
    Reasoning("a"),
    Reasoning("b"),
    Content("c", (TokenLogprob(1, b"c", -0.5),)),
    CallOpened(0, "call-1", "f"),
    CallArguments(0, '{"a":'),
    CallArguments(0, "1}"),
    CallOpened(1, "call-2", "g"),
    CallArguments(1, "{}"),
    Content("d"),
    Finished("tool_calls", 10, 7, -1, 2),
]


def test_an_encoder_only_spells():
    body = ChatEncoder(HEAD, logprobs=True).body(EVENTS)
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("cd", "ab")
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a":1}', "{}"]
    assert "prompt_tokens_details" not in body["usage"]  # nothing is known of the cache
    frames = [frame for event in EVENTS for frame in ChatEncoder(HEAD, include_usage=True).frames(event)]
    assert [f["choices"][0]["delta"] for f in frames[5:6]] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}
    ]
    assert frames[-1]["usage"] == body["usage"] and len(frames) == len(EVENTS) + 1
    plain = CompletionEncoder(HEAD).body([Content("x"), EVENTS[-1]])
    assert plain["choices"] == [{"index": 0, "text": "x", "finish_reason": "tool_calls"}]


# Beside mlx_lm.server


REQUESTS = {
    "plain": (CHAT, body_of("Hello there, this is a test")),
    "again, from the prompt cache": (CHAT, body_of("Hello there, this is a test")),
    "a conversation": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello there, this is a test"},
                {"role": "assistant", "content": "Yes"},
                {"role": "user", "content": "And now?"},
            ]
        },
    ),
    "a call": (CHAT, body_of(f"Well:{CALL}", tools=TOOLS)),
    "two calls": (CHAT, body_of(f"{CALL}{CALL} and that", tools=TOOLS)),
    "thinking": (CHAT, body_of("<think>Let me think.</think>Yes, and no.")),
    "thinking switched off": (CHAT, body_of("Yes.", chat_template_kwargs={"enable_thinking": False})),
    "thinking, then a call": (CHAT, body_of(THINKS.replace("Well: ", "Well:"), tools=TOOLS)),
    "a limit": (CHAT, body_of("one two three four five", max_tokens=3)),
    "a limit in a marker": (CHAT, body_of("one <<|cut|>/<|cut|>think", max_tokens=3)),
    # The marker is cut, or mlx_lm would take the message's for one that the template opened (docs/reply_format.md).
    "a limit while thinking": (CHAT, body_of("<<|cut|>think>one two three", max_tokens=5)),
    "nothing": (CHAT, body_of("<|im_end|>")),
    "characters of several tokens": (CHAT, body_of("ünï 🦉 漢字 \u200d end")),
    "a seed": (CHAT, body_of("one two three", seed=7)),
    "a seed, sampled": (CHAT, body_of("one two three", seed=7, temperature=20.0, max_tokens=30)),
    "penalties": (CHAT, body_of("one one one one one", presence_penalty=1.5, repetition_penalty=1.3)),
    "a bias": (CHAT, body_of("one two", logit_bias={"100": 90.0}, max_tokens=6)),
    "a completion": (COMPLETIONS, {"prompt": SCRIPT}),
    "a completion, a limit": (COMPLETIONS, {"prompt": SCRIPT, "max_tokens": 1}),
    "a completion, sampled": (COMPLETIONS, {"prompt": SCRIPT, "seed": 3, "temperature": 20.0, "max_tokens": 20}),
    "another path": ("/chat/completions", body_of("Hello there")),
    "the name of the model": (CHAT, body_of("Hello there", model="default_model")),
}


def common(reply) -> dict:
    """A whole body without what docs/chat_wire.md says is added here, and without the ids and times of one reply."""
    body = json.loads(reply.raw)
    assert isinstance(body.pop("id"), str) and isinstance(body.pop("created"), int)
    body["usage"].pop("completion_tokens_details", None)
    for choice in body["choices"]:
        message = choice.get("message") or {}
        message.pop("reasoning_content", None)
        for call in message.get("tool_calls") or []:
            assert isinstance(call.pop("id"), str)
    return body


def test_with_no_new_field_a_reply_is_mlx_lms_own(serve_private, folder):
    """Both start cold and are asked the same, in the same order, so that what is cached is the same too."""
    # Without the limits of thinking, which are on by default.
    flags = ("--reasoning-budget", 0, "--hedge-limit", 0, "--repeat-limit", 0)
    ours, upstream = serve_private(folder, *flags), serve_private(folder, module="mlx_lm.server")
    complete(ours, "a", max_tokens=1)  # as the fixture asks mlx_lm.server
    for name, (path, body) in REQUESTS.items():
        here, there = (post(server, path, body) for server in (ours, upstream))
        assert (here.status, there.status) == (200, 200), name
        assert common(here) == common(there), name
        here, there = (
            post(server, path, body | {"stream": True, "stream_options": {"include_usage": True}})
            for server in (ours, upstream)
        )
        assert (here.content, here.reasoning, here.finish_reason) == (
            there.content,
            there.reasoning,
            there.finish_reason,
        ), name
        assert [c["function"] for c in here.tool_calls] == [c["function"] for c in there.tool_calls], name
        usage = {k: v for k, v in here.usage.items() if k != "completion_tokens_details"}
        assert usage == there.usage, name


def test_what_mlx_lm_server_writes_otherwise(serve, folder):
    """The rows of docs/chat_wire.md, shown on the other side."""
    upstream = serve(folder, module="mlx_lm.server")
    reply = chat_stream(upstream, "Hello there")
    assert reply.chunks[-1]["object"] == "chat.completion"
    assert all(c["choices"][0]["delta"]["role"] == "assistant" for c in reply.chunks[:-1])
    listed = chat(upstream, "<think>Hm</think>Yes", logprobs=True, top_logprobs=2).logprobs["content"]
    assert len(listed) == 6 and not any("bytes" in entry for entry in listed)  # markers, thinking, the end token
    assert b'"logprob": -Infinity' in exchange(upstream, post_bytes(CHAT, MASKED | {"top_logprobs": 11}))
    assert b"x-request-id" not in (raw := exchange(upstream, post_bytes(CHAT, body_of())))
    assert raw.startswith(b"HTTP/1.0 200")
