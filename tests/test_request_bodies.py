"""Bodies over a real socket: what is refused, by which name, and what is read though OpenAI would not write it so."""

import json

import pytest

from mlx_patches.request_bodies import FIELDS
from tests.client import CHAT, COMPLETIONS, chat, chat_stream, complete, exchange, post, post_bytes

HELLO = [{"role": "user", "content": "Hello there"}]
SCRIPT = "to be ignored: <|script|>Hello there<|script_end|>"
COUNT = [-1, 1.5, "1", True, [], {}]
LIMIT = [0, *COUNT]
NUMBER = ["1", True, False, [], {}, float("nan"), float("inf"), -float("inf")]
SHARE = [-0.01, 1.01, *NUMBER]

# Of both endpoints. Whatever is no row here is optional and has a default.
REFUSED = {
    "stream": ["yes", 1, 0, []],
    "stream_options": ["x", [], True, {"include_usage": 1}, {"include_usage": "yes"}],
    "model": [5, [], {}, True],
    "adapters": [5, [], True],
    "draft_model": [5, [], True],
    "reasoning_effort": [5, [], True, "much"],
    "num_draft_tokens": COUNT,
    "max_completion_tokens": LIMIT,
    "max_tokens": LIMIT,
    "n": [2, 128, *LIMIT],
    "temperature": [-0.01, *NUMBER],
    "top_p": SHARE,
    "top_k": COUNT,
    "min_p": SHARE,
    "repetition_penalty": [-0.01, *NUMBER],
    "repetition_context_size": COUNT,
    "presence_penalty": NUMBER,
    "presence_context_size": COUNT,
    "frequency_penalty": NUMBER,
    "frequency_context_size": COUNT,
    "xtc_probability": SHARE,
    "xtc_threshold": SHARE,
    "logit_bias": [
        [],
        "x",
        5,
        {"a": 1},
        {"1": None},
        {"1": []},
        {"1": "5"},
        {"1": True},
        {"1": float("nan")},
        {"-1": 1},
        {"+1": 1},
        {"1_0": 1},
        {"9" * 5000: 1},
    ],
    "seed": [1.5, "1", True, [], 2**70],
    "chat_template_kwargs": [[], "x", 5, True],
    "role_mapping": [[], "x", 5, {"user": 5}, {"user": None}],
    "tools": [{}, "x", 5, True],
    "stop": [5, 0, True, False, {}, "", [""], ["a", ""], [5], [None], [["a"]]],
}
CHAT_REFUSED = {
    "logprobs": ["yes", 1, 0, []],
    "top_logprobs": [21, -2, 1.5, "5", True, []],
    "messages": [
        None,
        [],
        "Hello",
        {},
        5,
        [5],
        [None],
        [{}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [5]}],
        [*HELLO, {"content": "no role"}],
    ],
}
COMPLETIONS_REFUSED = {
    "logprobs": ["yes", 21, -1, 1.5, []],
    "prompt": [None, "", [], [""], ["Hello", "Hello"], [1, 2], [1], [[1]], 5, {}],
}
ROWS = [
    *((CHAT, field, values) for field, values in (REFUSED | CHAT_REFUSED).items()),
    *((COMPLETIONS, field, values) for field, values in (REFUSED | COMPLETIONS_REFUSED).items()),
]


def good(path) -> dict:
    return {"messages": HELLO} if path == CHAT else {"prompt": SCRIPT}


@pytest.fixture
def server(serve, tiny):
    return serve(tiny("scripted", style="think", tools="json_tools"))


def is_refused(reply, field, status=400):
    assert reply.status == status, reply.raw
    assert set(reply.body) == {"error"} and set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["Content-Type"] == "application/json"
    assert int(reply.headers["Content-Length"]) == len(reply.raw)
    if field is not None:
        base = (reply.error["param"] or "").split("[")[0].split(".")[0]
        assert base == field and field in reply.error["message"]


def test_every_field_is_in_the_table():
    assert set(FIELDS) <= set(REFUSED)


@pytest.mark.parametrize("path, field, values", ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_value_that_does_not_fit_is_refused_by_name(server, path, field, values):
    for value in values:
        reply = post(server, path, good(path) | {field: value})
        assert reply.status == 400, f"{field}: {value!r} -> {reply.raw}"
        is_refused(reply, field)
    if field != "stream":
        is_refused(post(server, path, good(path) | {field: values[0], "stream": True}), field)


@pytest.mark.parametrize("path, field", [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_what_must_be_there(server, path, field):
    is_refused(post(server, path, {}), field)
    is_refused(post(server, path, {"max_tokens": 5}), field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_is_the_default(server, path):
    fields = {*REFUSED, *(CHAT_REFUSED if path == CHAT else COMPLETIONS_REFUSED)} - {"messages", "prompt"}
    plain = post(server, path, good(path))
    nulls = post(server, path, good(path) | dict.fromkeys((*fields, "response_format", "tool_choice", "user")))
    assert nulls.content == plain.content == "Hello there"
    assert nulls.body.keys() == plain.body.keys()
    assert nulls.body["choices"] == plain.body["choices"]


@pytest.mark.parametrize("fields", [{}, {"seed": 3}], ids=["batched", "seed"])
def test_integers_are_numbers_too(server, fields):
    numbers = [name for name, field in FIELDS.items() if field.kind == "number"]
    assert "temperature" in numbers and "xtc_threshold" in numbers
    for value in (0, 1):
        body = {name: value for name in numbers if name != "temperature"} | {"temperature": 0}
        reply = chat(server, "Hello there", **body, **fields)
        assert reply.status == 200, reply.raw
    for name in numbers:
        reply = chat(server, "Hello there", **{name: 0}, **fields)
        assert (reply.status, reply.content) == (200, "Hello there"), (name, reply.raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"top_logprobs": 20, "logprobs": True},
        {"top_logprobs": -1},  # mlx_lm's own default
        {"n": 1},
        {"stop": []},
        {"stop": ["x", "x"]},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"logit_bias": {}},
        {"logit_bias": {"5": 0, "6": -0.5}},
        {"tools": []},
        {"chat_template_kwargs": {}},
        {"seed": 0},
        {"seed": -1},  # OpenAI's seeds are signed
        {"seed": 2**63},
        {"max_tokens": 10**12},
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"num_draft_tokens": 0},
        {"repetition_context_size": 0},
        {"presence_penalty": -2, "frequency_penalty": -2},
    ],
    ids=json.dumps,
)
def test_the_edge_of_what_fits(server, fields):
    reply = chat(server, "Hello there", **fields)
    assert (reply.status, reply.content) == (200, "Hello there"), reply.raw


def test_half_characters_and_no_numbers_are_named_wherever_they_are(server):
    for value, at in (
        ({"messages": [*HELLO, {"role": "user", "content": "a\ud800"}]}, "messages[1].content"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"default": float("nan")}}}]},
            "tools[0].function.parameters",
        ),
        ({"stop": ["a", "\udfff"]}, "stop[1]"),
        ({"no_such_field": {"a": [1, float("-inf")]}}, "no_such_field.a[1]"),
        ({"a\ud800": 1}, "a\\ud800"),
        ({"metadata": {"\ude00\ud83d": 1}}, "metadata.\\ude00\\ud83d"),
    ):
        reply = post(server, CHAT, {"messages": HELLO, **value})
        assert reply.status == 400 and reply.error["param"].startswith(at) and at in reply.error["message"], reply.raw
    assert chat(server, "a \U0001f600 b", user="\U0001f600").content == "a \U0001f600 b"
    raw = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert post(server, CHAT, raw).content == "\U0001f600"


@pytest.mark.parametrize("fields", [{}, {"seed": 3}], ids=["batched", "seed"])
def test_the_sane_reading(server, fields):
    assert post(server, COMPLETIONS, {"prompt": [SCRIPT], **fields}).content == "Hello there"
    drawn = {"temperature": 1, **fields}
    for more in (
        {"top_k": 10**9},
        {"xtc_probability": 1, "xtc_threshold": 1},
        {"repetition_penalty": 1, "repetition_context_size": 10**30},
    ):
        reply = chat(server, "Hello there", **drawn, **more)
        assert (reply.status, reply.content) == (200, "Hello there"), (more, reply.raw)


@pytest.mark.parametrize("fields", [{}, {"seed": 3}], ids=["batched", "seed"])
def test_ids_and_counts_beyond_the_vocabulary(serve, tiny, fields):
    """Padded rows are no tokens either."""
    server = serve(tiny("scripted", padded=64))
    size = next(n for n in range(500, 10_000) if chat(server, "a", logit_bias={str(n): 0}, **fields).status == 400)
    reply = chat(server, "a", logit_bias={"1": 5, str(size): 1}, **fields)
    assert (reply.status, reply.error["param"]) == (400, "logit_bias") and str(size) in reply.error["message"]
    assert chat(server, "Hello", logit_bias={str(size - 1): -1}, **fields).content == "Hello"
    for top_k in (size - 1, size, size + 1, size + 64):
        assert chat(server, "Hello", top_k=top_k, temperature=0.01, **fields).content == "Hello"


@pytest.mark.parametrize("tools", [[5], [{"function": 5}], [{"function": {}}], [{"function": {"name": 5}}]])
def test_tools_are_named_by_their_number(server, tools):
    reply = chat(server, "Hello", tools=[{"type": "function", "function": {"name": "f"}}, *tools])
    assert (reply.status, reply.error["param"].partition(".")[0]) == (400, "tools[1]")


@pytest.mark.parametrize("field, instead", [("functions", "tools"), ("function_call", "tool_choice")])
def test_the_fields_that_tools_replaced_are_refused(server, field, instead):
    for value in ([{"name": "f"}], "none", [], {"name": "f"}):
        reply = chat(server, "Hello", **{field: value})
        assert (reply.status, reply.error["param"]) == (400, field) and instead in reply.error["message"]
    assert chat(server, "Hello there", **{field: None}).content == "Hello there"
    assert complete(server, SCRIPT, **{field: "none"}).content == "Hello there"


def test_unknown_fields_are_ignored(server):
    known_to_openai = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "echo": 5}
    reply = chat(server, "Hello there", **known_to_openai, no_such_field=[{}], **{"": 1})
    assert reply.content == "Hello there"


def test_max_completion_tokens_wins(server):
    def count(**fields):
        reply = chat(server, "one two three four five", **fields)
        assert reply.finish_reason == "length"
        return reply.usage["completion_tokens"]

    assert count(max_tokens=2) == count(max_completion_tokens=2) == 2
    assert count(max_tokens=4, max_completion_tokens=2) == 2
    assert count(max_tokens=2, max_completion_tokens=4) == 4
    assert count(max_tokens=2, max_completion_tokens=None) == 2
    reply = chat(server, "one two three", max_tokens=0, max_completion_tokens=2)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


def test_the_flags_give_the_defaults(serve, tiny):
    server = serve(tiny("scripted", style="think", tools="json_tools"), "--max-tokens", 3)
    assert chat(server, "one two three four five").usage["completion_tokens"] == 3
    assert chat(server, "one two three four five", max_tokens=None).usage["completion_tokens"] == 3
    assert chat(server, "one two three four five", max_tokens=4).usage["completion_tokens"] == 4


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b'{"messages": ', b"{}}", b"[" * 100_000], ids=repr
)
def test_a_body_that_is_no_json_object(server, raw):
    for path in (CHAT, COMPLETIONS):
        reply = post(server, path, raw)
        is_refused(reply, None)
        assert reply.error["code"] == "invalid_json"


def test_lengths(server):
    for headers, status in (({"Content-Length": "x"}, 400), ({"Content-Length": "-5"}, 400)):
        raw = exchange(server, post_bytes(CHAT, b"{}", headers))
        assert raw.startswith(b"HTTP/1.1 %d " % status) and b'"invalid_request_error"' in raw
    raw = exchange(server, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 411 ") and b'"invalid_request_error"' in raw


def test_a_refused_body_leaves_the_server_as_it_was(server):
    for _ in range(3):
        assert chat_stream(server, "Hello", temperature="hot").status == 400
    assert complete(server, SCRIPT).content == "Hello there"
    assert not [line for line in server.log().splitlines() if "Traceback" in line]


def test_mlx_lm_server_refuses_what_clients_send(serve, tiny):
    upstream = serve(tiny("scripted", style="think", tools="json_tools"), module="mlx_lm.server")
    for fields in ({"temperature": None}, {"xtc_probability": 0}, {"top_logprobs": 20}, {"max_tokens": None}):
        assert chat(upstream, "Hello there", **fields).status == 400
    assert chat(upstream, "Hello there", top_p=2).error == "top_p must be at most 1"
    assert chat(upstream, "Hello there", n=2).status == 200  # and one choice


@pytest.mark.parametrize("thinking", [True, 5, "disabled", [], {}, {"type": "foo"}, {"type": 5}])
def test_thinking_of_another_shape_is_refused(server, thinking):
    is_refused(chat(server, "x", thinking=thinking), "thinking")


def test_what_allowed_tools_lack_is_said(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for allowed in ({"mode": "maybe", "tools": tools}, {"mode": "auto", "tools": []}, {"mode": "auto"}, "f"):
        reply = chat(server, "x", tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        is_refused(reply, "tool_choice")
        assert "mode" in reply.error["message"] and "tools" in reply.error["message"]


def test_thinking_can_be_disabled_as_other_servers_spell_it(serve, tiny):
    server = serve(tiny("scripted", style="think"))

    def prompt_tokens(**body):
        return chat(server, "Hello", **body).usage["prompt_tokens"]

    disabled = {"thinking": {"type": "disabled"}}
    assert prompt_tokens(**disabled) == prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    # The more particular of the two wins.
    assert prompt_tokens(**disabled, chat_template_kwargs={"enable_thinking": True}) == prompt_tokens()
    assert prompt_tokens(**disabled) != prompt_tokens()
