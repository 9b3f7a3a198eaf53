"""Requests for tests/test_fuzz.py: valid ones, with every field that is read, and what is done to them at random."""

import json

from hypothesis import strategies as st

from tests.client import CHAT, COMPLETIONS

# Valid requests

CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"location": "Paris"}'}}
PARAMETERS = {
    "type": "object",
    "properties": {"location": {"type": "string", "maxLength": 9}, "days": {"type": ["integer", "null"]}},
    "required": ["location"],
}
FUNCTION = {"name": "get_weather", "description": "It rains.", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": [True, "a", 1.5]}, "items": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    "required": ["ok"],
    "additionalProperties": False,
    "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]}},
}
SAID = (
    "Hello there",
    "<think>Wait, let me check. Wait, let me check.</think>\nIt is twenty.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>',
    '<think>a</think>b<tool_call>\n{"name": "add", "arguments": {"a": [1, {',
    '{"ok": true, "items": [null, "abc"]} and more',
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
CONVERSATIONS = (
    *([{"role": "user", "content": text}] for text in SAID),
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "Paris?", "name": "Anna"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": SAID[2]},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]}],
)
PROMPTS = (*SAID, *(f"<|script|>{text}<|script_end|>" for text in SAID), ["a list of one"])
OPTIONS = {
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "model": ["default_model"],
    "adapters": ["a"],
    "draft_model": ["default_model"],
    "num_draft_tokens": [2],
    "max_completion_tokens": [9],
    "max_tokens": [1, 12, 23, 40],
    "n": [1],
    "temperature": [0, 0.7, 2],
    "top_p": [0.9],
    "top_k": [1, 40],
    "min_p": [0.1],
    "repetition_penalty": [1.2],
    "repetition_context_size": [4],
    "presence_penalty": [0.5],
    "presence_context_size": [4],
    "frequency_penalty": [-0.5],
    "frequency_context_size": [4],
    "xtc_probability": [0.5],
    "xtc_threshold": [0.1],
    "logit_bias": [{"5": 3, "300": -100.0}],
    "seed": [1, 2**64 - 1],
    "chat_template_kwargs": [{"enable_thinking": False}, {"documents": []}],
    "role_mapping": [{"user": "U", "assistant": "A"}],
    "tools": [[TOOL], [TOOL, {"type": "function", "function": {"name": "add"}}]],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "get_weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "add"}]}},
    ],
    "parallel_tool_calls": [True, False],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
    ],
    "structured_outputs": [{"regex": "[ab]{2,5}"}, {"choice": ["yes", "no"]}, {"json": SCHEMA}],
    "guided_grammar": ['start: "a" b\nb: /[x-z]+/'],
    "logprobs": [True, 3],
    "top_logprobs": [2],
    "stop": ["there", ["\n", "twenty"]],
    "thinking": [{"type": "enabled", "budget_tokens": 8}, {"type": "disabled"}],
    "reasoning_effort": ["low", "none"],
    "reasoning_budget": [3],
    "hedge_limit": [1],
    "repeat_limit": [1],
    "limit_answers": [True],
    "user": ["somebody"],
}
"""Values of every field that is read; several fields may contradict each other."""
SCENES = (
    {},
    {"tools": OPTIONS["tools"][1], "tool_choice": "required"},
    {"tools": OPTIONS["tools"][0], "response_format": OPTIONS["response_format"][2]},
    {"tools": OPTIONS["tools"][1]},
    {"response_format": OPTIONS["response_format"][2]},
    {"logprobs": True, "top_logprobs": 2, "stop": ["e"]},
)
"""Fields that mean something together only."""

# What is done to them

WORDS = (
    "",
    "auto",
    "object",
    "function",
    "assistant",
    "wizard",
    "type",
    "content",
    "$ref",
    "pattern",
    "data:,",
    "http://127.0.0.1:9/x",
    "<|im_end|>",
    "<|script|>",
    "<think>",
    "{{ 1 }}",
    "[a-z",
    "(a+)+$",
    "-1",
    "\x00",
    "\ud800",
    "é\u2028🦉",
    "one" * 2000,
)
NUMBERS = (0, -1, 1, 2, 1.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30)
DEEP = json.loads("[" * 600 + "]" * 600), json.loads('{"a":' * 700 + "1" + "}" * 700)
DEEP_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": DEEP[0]})}}


def clone(value):
    """A copy, of what is nested deeper than copy.deepcopy goes too."""
    return json.loads(json.dumps(value))


plain = st.sampled_from([None, True, False, float("nan"), float("inf"), [], {}, *NUMBERS, *WORDS])
junk = st.one_of(
    plain,
    st.text(max_size=8),
    st.integers(),
    st.floats(),
    st.recursive(
        plain, lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(WORDS), some), max_leaves=4
    ),
    st.sampled_from([*DEEP, DEEP_CALL, ["a"] * 500, SCHEMA, TOOL, CALL, PICTURE]).map(clone),
)


def places(value) -> list:
    """Every (container, key) in `value`, the outermost first."""
    found, containers = [], [value]
    for each in containers:
        keys = list(each) if isinstance(each, dict) else range(len(each))
        found += [(each, key) for key in keys]
        containers += [each[key] for key in keys if isinstance(each[key], dict | list)]
    return found


def damage(draw, body: dict) -> None:
    container, key = draw(st.sampled_from(places(body)))
    match draw(st.sampled_from(("replace", "drop", "wrap", "repeat", "move", "rename", "add"))):
        case "replace":
            container[key] = draw(junk)
        case "drop":
            del container[key]
        case "wrap":
            container[key] = draw(st.sampled_from(([container[key]], {"type": container[key]})))
        case "repeat":
            container[key] = [container[key], clone(container[key])]
        case "move":
            other, name = draw(st.sampled_from(places(body)))
            container[key] = clone(other[name])
        case "rename" if isinstance(container, dict):
            value = container.pop(key)
            container[draw(st.sampled_from(WORDS))] = value
        case _:
            if isinstance(container, dict):
                container[draw(st.sampled_from(WORDS) | st.sampled_from(sorted(OPTIONS)))] = draw(junk)
            else:
                container.append(draw(junk))


@st.composite
def requests(draw, most: int = 3):
    """(path, body): a valid one that is damaged up to `most` times."""
    is_chat = draw(st.booleans())
    body = {"messages": draw(st.sampled_from(CONVERSATIONS))} if is_chat else {"prompt": draw(st.sampled_from(PROMPTS))}
    body |= draw(st.sampled_from(SCENES))
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5, unique=True)):
        body[name] = draw(st.sampled_from(OPTIONS[name]))
    body = clone(body)
    for _ in range(draw(st.integers(0, most))):
        if body:
            damage(draw, body)
    return CHAT if is_chat else COMPLETIONS, body


HEADERS = {
    "Content-Type": ("text/plain", "application/json; charset=utf-16", "", "*/*", "application/vnd.api+json"),
    "Content-Length": ("0", "-1", "1", "007", "1e3", "99999", "9" * 40, "1, 1"),
    "Transfer-Encoding": ("chunked", "identity", "gzip, chunked"),
    "Content-Encoding": ("gzip",),
    "Expect": ("100-continue", "200-ok"),
    "Connection": ("close", "keep-alive", "upgrade"),
    "Upgrade": ("h2c", "websocket"),
    "Host": ("", "page.example", "[::1]:80", "127.0.0.1:x", "[", "localhost."),
    "Origin": ("null", "http://page.example", "http://localhost", "http://["),
    "Authorization": ("Bearer x", "Basic eDp5", "Bearer"),
    "x-request-id": ("a", "a" * 300, "ä", " "),
    "Cookie": ("a=b",),
    "Accept": ("text/event-stream", "image/png"),
    "Accept-Encoding": ("gzip",),
}
header_text = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=20)
header = st.one_of(
    st.sampled_from([(name, value) for name, values in HEADERS.items() for value in values]),
    st.tuples(st.sampled_from(sorted(HEADERS)), header_text),
    st.tuples(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=9), header_text),
    st.tuples(st.just("a"), st.sampled_from(("b" * 70_000, "b" * 3000))),
)
PATHS = (
    CHAT,
    COMPLETIONS,
    f"{CHAT}?a=b",
    "/v1/models",
    "/v1/models/%ff",
    "/health",
    "*",
    "http://localhost/health",
    "//",
)
METHODS = ("POST", "GET", "HEAD", "OPTIONS", "PUT", "BREW", "post")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1", "HTTP/1.1.1", "http/1.1", "")


@st.composite
def raw_requests(draw):
    """(the pieces in which the bytes are sent, "shut" or "close" or "wait" after them)."""
    path, body = draw(requests(most=1))
    data = encode(body, draw(st.booleans()))
    lines = [("Host", "localhost"), ("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    for name, value in draw(st.lists(header, max_size=3)):
        if draw(st.booleans()):
            lines = [line for line in lines if line[0] != name]
        lines.append((name, value))
    method, version = ("POST", "HTTP/1.1")
    if draw(st.integers(0, 3)) == 0:
        method, path, version = (draw(st.sampled_from(some)) for some in (METHODS, PATHS, VERSIONS))
    head = f"{method} {path} {version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines) + "\r\n"
    sent = head.encode("latin-1") + data
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(sent)))
        to = min(len(sent), at + draw(st.sampled_from((1, 2, 20, 10**6))))
        put = draw(st.sampled_from((b"", b"\r\n", b"\x00", b"\xff", b"0", sent[at:to] * 2)) | st.binary(max_size=9))
        sent = sent[:at] + put + sent[to:]
    if draw(st.integers(0, 7)) == 0:
        sent = draw(
            st.sampled_from(
                (
                    b"",
                    sent * 2,
                    b"\r\n" * 5 + sent,
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                )
            )
        )
    cut = draw(st.integers(0, len(sent)))
    return [sent[:cut], sent[cut:]], draw(st.sampled_from(("wait", "wait", "shut", "close")))


def encode(body, ascii_only: bool = True) -> bytes:
    return json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
