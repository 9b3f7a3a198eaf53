"""tool_choice over HTTP: what each value holds a reply to, with scripted replies and with random weights."""

import json

import jsonschema
import pytest

from tests.client import both, chat, chat_stream, together
from tests.test_schema_sample import closing_bias

WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["location"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "ping": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ANSWER = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": ANSWER}}}
PATHS = {"batch": {}, "single": {"seed": 7}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def call_text(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def names(reply) -> list[str]:
    return [call["function"]["name"] for call in reply.tool_calls]


def calls_fit(reply) -> bool:
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return True


@pytest.fixture
def script(serve, tiny):
    return serve(tiny("scripted", tools="json_tools"))


@pytest.mark.parametrize("path", PATHS)
def test_auto_is_free_text_and_calls_of_declared_tools(script, path):
    one = PATHS[path]
    assert both(script, "Just words.", tools=TOOLS, **one).content == "Just words."
    reply = both(script, "Look: " + call_text("get_weather", location="Paris"), tools=TOOLS, **one)
    assert (reply.content, names(reply), reply.finish_reason) == ("Look:", ["get_weather"], "tool_calls")
    # A tool that is not there, arguments that do not fit: the grammar has the model write what does.
    for text in (call_text("get_wind", location="Paris"), call_text("get_weather", place="Paris", days="three")):
        reply = both(script, text, tools=TOOLS, max_tokens=200, **one)
        assert reply.finish_reason == "tool_calls" and calls_fit(reply) and set(names(reply)) <= set(SCHEMAS)


@pytest.mark.parametrize("path", PATHS)
def test_a_closing_marker_inside_an_argument_is_text(script, path):
    tools = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]
    text = call_text("say", words="an end </tool_call> and more")
    reply = both(script, text + " after", tools=tools, **PATHS[path])
    assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == {"words": "an end </tool_call> and more"}


@pytest.mark.parametrize("path", PATHS)
def test_no_parallel_calls_ends_the_reply_after_the_first(script, path):
    text = call_text("get_weather", location="Paris") + "\n" + call_text("ping") + " and words"
    assert names(both(script, text, tools=TOOLS, **PATHS[path])) == ["get_weather", "ping"]
    reply = both(script, text, tools=TOOLS, parallel_tool_calls=False, **PATHS[path])
    assert (names(reply), reply.finish_reason) == (["get_weather"], "tool_calls")
    reply = both(script, text, tools=TOOLS, parallel_tool_calls=False, tool_choice="required", **PATHS[path])
    assert (names(reply), reply.finish_reason) == (["get_weather"], "tool_calls")


@pytest.mark.parametrize("path", PATHS)
def test_required_and_named(script, path):
    body = {"tools": TOOLS, "max_tokens": 300, **PATHS[path]}
    reply = both(script, "I would rather talk.", tool_choice="required", **body)
    assert reply.finish_reason == "tool_calls" and calls_fit(reply) and not reply.content
    reply = both(script, call_text("get_weather", location="Paris"), tool_choice=named("ping"), **body)
    assert (names(reply), reply.finish_reason) == (["ping"], "tool_calls")


def test_none_shows_no_tools_and_no_call_comes_out(script):
    text = call_text("get_weather", location="Paris")
    reply = both(script, text, tools=TOOLS, tool_choice="none")
    assert (reply.content, reply.tool_calls, reply.finish_reason) == (text, [], "stop")
    shown = chat(script, "Hello", tools=TOOLS).usage["prompt_tokens"]
    assert chat(script, "Hello", tools=TOOLS, tool_choice="none").usage["prompt_tokens"] < shown
    assert chat(script, "Hello").usage["prompt_tokens"] == chat(script, "Hello", tools=[]).usage["prompt_tokens"]


def test_allowed_tools_are_a_subset(script):
    for spelled in (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("ping")]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "ping"}]},
    ):
        reply = both(
            script, call_text("get_weather", location="Paris"), tools=TOOLS, tool_choice=spelled, max_tokens=300
        )
        assert set(names(reply)) == {"ping"}
    auto = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("ping")]}}
    assert both(script, "Words.", tools=TOOLS, tool_choice=auto).content == "Words."


@pytest.mark.parametrize(
    "choice",
    [named("pong"), "always", 1, [], {}, {"type": "function"}, {"type": "allowed_tools", "tools": []}, True],
    ids=str,
)
def test_a_choice_of_another_shape_or_name_is_refused(script, choice):
    reply = chat(script, "Hello", tools=TOOLS, tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


def test_what_else_is_refused(script):
    assert chat(script, "Hello", tool_choice="required").error["param"] == "tool_choice"
    assert chat(script, "Hello", tools=TOOLS, parallel_tool_calls="no").error["param"] == "parallel_tool_calls"
    for tool, param in (
        (1, "tools[0]"),
        ({"type": "function"}, "tools[0]"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "a", "strict": 1}}, "tools[0].function.strict"),
    ):
        assert chat(script, "Hello", tools=[tool]).error["param"] == param


def test_one_tool_that_no_grammar_holds_takes_no_other_down(script):
    bad = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=a)b"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "odd", "parameters": bad}}
    reply = both(script, call_text("get_wind", place="Paris"), tools=[*TOOLS, tool], max_tokens=300)
    assert set(names(reply)) <= {*SCHEMAS, "odd"}
    assert names(both(script, call_text("odd", x="b"), tools=[*TOOLS, tool])) == ["odd"]
    reply = both(
        script, call_text("get_weather", days="3"), tools=[*TOOLS, tool], tool_choice="required", max_tokens=300
    )
    assert reply.finish_reason == "tool_calls"
    tool["function"]["strict"] = True
    refused = chat(script, "Hello", tools=[*TOOLS, tool])
    assert (refused.status, refused.error["param"]) == (400, "tools[2].function.parameters")
    assert "pattern" in refused.error["message"]


WORD = {"type": "string", "enum": ["x", "y"]}
UNIONS = {
    "enum": {"anyOf": [WORD, {"type": "null"}]},
    "untyped": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]},
    "loop": {"$ref": "#/$defs/loop"},
    "beside": {"anyOf": [{"$ref": "#/$defs/long", "maxLength": 1}]},
}
DEFINITIONS = {"loop": {"anyOf": [WORD, {"$ref": "#/$defs/loop"}]}, "long": {"type": "string", "maxLength": 9}}


@pytest.mark.parametrize("union", UNIONS)
@pytest.mark.parametrize("tools", ["qwen3_coder", "gemma4"])
def test_members_of_unions_are_held(serve, tiny, tools, union):
    value = {"qwen3_coder": "<parameter=a>\nzebra\n</parameter>\n", "gemma4": '{a:<|"|>zebra<|"|>}'}[tools]
    head, tail = {
        "qwen3_coder": ("<tool_call>\n<function=f>\n", "</function>\n</tool_call>"),
        "gemma4": ("<|tool_call>call:f", "<tool_call|>"),
    }[tools]
    properties = {"a": UNIONS[union], "b": {"$ref": "#/$defs/long"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": {**schema, "$defs": DEFINITIONS}}}
    reply = both(serve(tiny("scripted", tools=tools)), head + value + tail, tools=[tool], max_tokens=60)
    for call in reply.tool_calls if reply.finish_reason == "tool_calls" else []:
        jsonschema.validate(json.loads(call["function"]["arguments"]), tool["function"]["parameters"])
    assert reply.status == 200 and "zebra" not in str(reply.tool_calls)


def test_arguments_are_an_object_whatever_the_schema_says(serve, tiny):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"]}}}
    reply = both(serve(tiny("scripted", tools="mistral")), "[TOOL_CALLS]f[ARGS]null", tools=[tool], max_tokens=60)
    assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in reply.tool_calls) or (
        reply.finish_reason == "length"
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_schema_and_tools_the_model_chooses_by_how_it_starts(script, path):
    body = {"tools": TOOLS, "max_tokens": 300, **FORM, **PATHS[path]}
    reply = both(script, '{"sky": "blue"}', **body)
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ('{"sky": "blue"}', [], "stop")
    reply = both(script, call_text("get_weather", location="Paris"), **body)
    assert (names(reply), reply.finish_reason) == (["get_weather"], "tool_calls")
    reply = both(script, '{"sky": "blue"}', tool_choice="required", **body)
    assert reply.finish_reason == "tool_calls" and calls_fit(reply)


def test_a_model_without_a_tool_format_cannot_be_forced(serve, tiny):
    server = serve(tiny("scripted"))
    for choice in ("required", named("ping")):
        reply = chat(server, "Hello", tools=TOOLS, tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
        assert "cannot be forced" in reply.error["message"]
    assert chat(server, "Hello", tools=TOOLS).content == "Hello"


WRITERS = {
    "json_tools": ("llama", {"tools": "json_tools"}),
    "thinking": ("qwen3", {"tools": "json_tools", "style": "think"}),
    "qwen3_coder": ("llama", {"tools": "qwen3_coder"}),
    "gemma4": ("llama", {"tools": "gemma4"}),
    "mistral": ("llama", {"tools": "mistral"}),
    "glm47": ("llama", {"tools": "glm47"}),
    "harmony": ("gpt_oss", {"style": "harmony"}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_random_weights_call_what_they_must(serve, tiny, writer):
    kind, options = WRITERS[writer]
    folder = tiny(kind, **options)
    server = serve(folder)
    body = {"temperature": 1, "max_tokens": 400, "reasoning_budget": 8, "logit_bias": closing_bias(folder)}
    choices = ["required", named("get_weather"), named("ping"), "auto"]
    asked = [
        {"call": (chat, chat_stream)[n % 2], "prompt": f"Go {n}", "tools": TOOLS, "tool_choice": choices[n % 4], **body}
        for n in range(24)
    ]
    asked += [{**each, **FORM, "tool_choice": "auto"} for each in asked]
    for n, reply in enumerate(together(server, asked)):
        assert reply.status == 200 and calls_fit(reply)
        if reply.finish_reason == "length":
            continue
        choice = asked[n]["tool_choice"]
        if choice != "auto":
            assert reply.finish_reason == "tool_calls" and reply.tool_calls
        if isinstance(choice, dict):
            assert names(reply) == [choice["function"]["name"]]
        if n >= 24 and not reply.tool_calls:
            jsonschema.validate(json.loads(reply.content), ANSWER)


@pytest.mark.parametrize("path", PATHS)
def test_many_tools_do_not_hold_up_the_first_token(serve, tiny, path):
    """139 tools compile in the handler's thread, once: the second reply pays for its prompt only."""
    server = serve(tiny("scripted", tools="json_tools"), "--prompt-cache-size", 0)
    many = [{"type": "function", "function": {"name": f"tool_{n}", "parameters": WEATHER}} for n in range(139)]
    first = chat(server, call_text("tool_7", location="Paris"), tools=many, tool_choice="required", **PATHS[path])
    assert names(first) == ["tool_7"]


def test_mlx_lm_server_does_not_read_tool_choice(serve, tiny):
    upstream = serve(tiny("scripted", tools="json_tools"), module="mlx_lm.server")
    assert chat(upstream, "Words.", tools=TOOLS, tool_choice="required").content == "Words."
    reply = chat(upstream, call_text("get_wind", place="Paris"), tools=TOOLS)
    assert reply.tool_calls[0]["function"]["name"] == "get_wind"


PROSE = {
    "json_tools": "I use the <tool_call> tag for calls, and more text follows here so that it ends.",
    "qwen3_coder": "Qwen writes <tool_call> before each call, and more text follows here.",
    "gemma4": "Gemma writes <|tool_call> before each, and more text follows here.",
    "mistral": "Mistral writes [TOOL_CALLS] before each, and more text follows here.",
}


@pytest.mark.parametrize("format_name", PROSE)
def test_prose_that_names_the_marker_is_not_made_a_call(serve, tiny, format_name):
    server = serve(tiny("scripted", tools=format_name))
    for text in (PROSE[format_name], PROSE[format_name].replace("writes ", "writes\n", 1).replace("_", "<|cut|>_", 1)):
        for path in PATHS.values():
            reply = both(server, text, tools=TOOLS, max_tokens=80, **path)
            assert (reply.content, reply.tool_calls, reply.finish_reason) == (text.replace("<|cut|>", ""), [], "stop")
