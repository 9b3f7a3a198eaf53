"""Harmony's calls in auto mode: a header names a declared tool or a built-in, its arguments fit, and nothing else is
held; then batches in which requests of every kind stand side by side.

Where a script's token is not allowed the best that is comes in its place, and the script goes on.
"""

import json
import random

import jsonschema
import pytest
from tokenizers import Tokenizer

from mlx_patches.harmony_headers import BUILT_IN
from tests.client import both, chat, chat_stream, together
from tests.harmony_transcripts import ANALYSIS, FINAL, TURN
from tests.harmony_vocabulary import folder
from tests.test_harmony_limits import PATHS, place  # noqa: F401, a fixture
from tests.test_schema_sample import closing_bias
from tests.test_tool_choice import ANSWER, FORM, SCHEMAS, TOOLS, named, names

PARIS = '{"location": "Paris"}'
MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")


def fits(reply, allowed=SCHEMAS) -> bool:
    """Whether each call is of an allowed tool, or a built-in, and its arguments fit if it is whole."""
    for call in reply.tool_calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in allowed and reply.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if name not in (*allowed, *BUILT_IN):
            return False
    return True


@PATHS
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.xyz <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weathers <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.<|message|>",
        "<|channel|>commentary to=functions.xyz<|message|>",
        "<|channel|>commentary functions.xyz code<|message|>",
        "<|channel|>analysis to=functions.xyz code<|message|>",
        f"{TURN} to=functions.xyz<|channel|>commentary json<|message|>",
        f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>commentary to=functions.xyz json<|message|>",
        # Damage after the name, by which arguments would begin before any grammar holds them.
        "<|channel|>commentary to=functions.get_weather ",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json to=functions.xyz ",
        "<|channel|>commentary to=functions.get_weather<|constrain|><|channel|>",
        " to=functions.get_weather<|channel|>odd ",
    ],
)
def test_only_declared_tools_are_named(place, path, header):  # noqa: F811
    server, body = place(path)
    reply = both(server, f"{header}{PARIS}<|call|>", tools=TOOLS, max_tokens=150, **body)
    assert reply.status == 200 and len(reply.tool_calls) == 1 and fits(reply) and set(names(reply)) <= set(SCHEMAS)


@PATHS
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.NAME<|message|>",
        "<|channel|>commentary to=functions.NAME code<|message|>",
        "<|channel|>analysis to=functions.NAME code<|message|>",
        f"{TURN} to=functions.NAME<|channel|>commentary json<|message|>",
        f"<|channel|>commentary<|message|>I look.<|end|>{TURN}<|channel|>commentary to=functions.NAME json<|message|>",
    ],
)
def test_calls_of_declared_tools_are_as_they_were_written(place, path, header):  # noqa: F811
    server, body = place(path)
    for name, arguments in (("get_weather", PARIS), ("ping", "{}")):
        reply = both(server, f"{header}{arguments}<|call|>".replace("NAME", name), tools=TOOLS, **body)
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in reply.tool_calls] == [(name, arguments)]
        assert reply.finish_reason == "tool_calls"


def test_the_real_vocabulary(serve, tiny):
    """o200k's tokens: `=function`, `.get` and `_weather` begin or go on with names."""
    server = serve(tiny("scripted", style="harmony", tokenizer=str(folder())))
    for recipient in ("functions.get_weather", "functions.get_weathers", "func<|cut|>tions.xyz", "<|cut|>parse"):
        for mark in ("=", "<|cut|>=<|cut|>"):
            script = f"<|channel|>commentary to{mark}{recipient} <|constrain|>json<|message|>{PARIS}<|call|>"
            reply = both(server, script, tools=TOOLS, max_tokens=150)
            assert len(reply.tool_calls) == 1 and fits(reply)
        assert reply.tool_calls[0]["function"]["arguments"] == PARIS or recipient != "functions.get_weather"


@PATHS
def test_built_ins_may_be_called(place, path):  # noqa: F811
    server, body = place(path)
    for name in ("python", "browser.search"):
        script = f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>commentary to={name} code<|message|>print(1)<|call|>"
        reply = both(server, script, tools=TOOLS, **body)
        assert (names(reply), reply.tool_calls[0]["function"]["arguments"]) == ([name], "print(1)")


@PATHS
@pytest.mark.parametrize(
    "script",
    [
        "Bare functions.xyz to=foo",
        f"{FINAL}functions.xyz and to=foo",
        f"<|channel|>commentary<|message|>to=functions.xyz<|end|>{TURN}{FINAL} to=x",
        "<|channel|>commentary to be or not",
    ],
)
def test_nothing_else_is_held(place, path, script):  # noqa: F811
    server, body = place(path)
    free, tools = both(server, script, **body), both(server, script, tools=TOOLS, **body)
    assert (tools.content, tools.reasoning, tools.tool_calls) == (free.content, free.reasoning, [])


@PATHS
def test_of_allowed_tools_only_those(place, path):  # noqa: F811
    server, body = place(path)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("ping")]}}
    script = f"<|channel|>commentary to=functions.get_weather<|message|>{PARIS}<|call|>"
    reply = both(server, script, tools=TOOLS, tool_choice=choice, **body)
    # No word follows the arguments.
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in reply.tool_calls] == [("ping", "{}")]


def test_none_lets_no_call_out(place):  # noqa: F811
    server, _ = place("batch")
    script = f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>commentary to=functions.ping json<|message|>{{}}<|call|>"
    for tools in (TOOLS, None):
        reply = both(server, script, tool_choice="none", **({"tools": tools} if tools else {}))
        assert (reply.content, reply.reasoning, reply.tool_calls) == ("{}", "Hm.", [])
        assert reply.finish_reason == "stop"
    assert names(both(server, script)) == ["ping"]


def test_stop_strings_are_not_looked_for_in_a_call_that_is_cut(place):  # noqa: F811
    server, _ = place("batch")
    script = "<|channel|>commentary to=python code<|message|>red green blue black white bread milk"
    for call in (chat, chat_stream):
        reply = call(server, script, stop=[" green"], max_tokens=14)
        assert reply.finish_reason == "length" and "green" in f"{reply.content}{reply.tool_calls}"


@pytest.mark.parametrize("body", [{}, {"seed": 1}], ids=["batch", "seed"])
def test_random_weights_name_what_they_may(serve, tiny, body):
    """A tiny gpt_oss model that leans to whatever begins a recipient."""
    folder = tiny("gpt_oss", seed=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bias = closing_bias(folder)
    for text, more in ((" to=to=", 9), ("<|channel|>commentary<|message|><|start|>", 7)):
        bias |= {str(token): float(more) for token in tokenizer.encode(text).ids}
    calls = [
        {
            "call": (chat, chat_stream)[n % 2],
            "prompt": f"Go {n}",
            "tools": TOOLS,
            "temperature": 1,
            "max_tokens": 120,
            "reasoning_budget": 8,
            "logit_bias": bias,
            **{name: n for name in body},
        }
        for n in range(24)
    ]
    server = serve(folder)
    replies = [reply for at in range(0, 24, 8) for reply in together(server, calls[at : at + 8])]
    assert all(reply.status == 200 and fits(reply) for reply in replies)
    assert sum(bool(reply.tool_calls) for reply in replies) >= 1


PIECES = [
    *MARKERS,
    *("analysis", "final", "commentary", " json", " code", " to", "to", "=", "functions", ".x", "?", "\n", " green"),
    *(f" to={name}" for name in ("functions.get_weather", "functions.ping", "functions.xyz", "python", "get_weather")),
    *(TURN, ANALYSIS, FINAL, "<|channel|>commentary<|message|>", "<|channel|>odd<|message|>"),
    *(PARIS, "{}", '{"sky": "blue"}', "Hello world", "red green blue black white"),
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>",
    f"<|end|>{TURN}{FINAL}",
    f"<|end|>{TURN}<|channel|>commentary to=functions.ping json<|message|>",
]


def some_request(rng) -> dict:
    tools = rng.choice([TOOLS, TOOLS, TOOLS[:1]])
    one = named(rng.choice(tools)["function"]["name"])
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": rng.choice(["auto", "required"]), "tools": [one]}}
    body = {"tools": tools, "tool_choice": rng.choice(["auto", "auto", "required", "none", one, subset])}
    body |= {"max_tokens": rng.choice([3, 8, 15, 40, 120]), "reasoning_budget": rng.choice([0, 1, 3])}
    for likely, more in ((0.3, {"parallel_tool_calls": False}), (0.25, FORM), (0.25, {"stop": [" green"]})):
        body |= more if rng.random() < likely else {}
    return {"prompt": "".join(rng.choices(PIECES, k=rng.randint(1, 9))) + "x", **body}


def what_is_wrong(asked, reply) -> str | None:
    choice, reason = asked["tool_choice"], reply.finish_reason
    allowed, forced = {tool["function"]["name"] for tool in asked["tools"]}, choice == "required"
    if isinstance(choice, dict):
        subset = choice.get("allowed_tools", {"mode": "required", "tools": [choice]})
        allowed, forced = {tool["function"]["name"] for tool in subset["tools"]}, subset["mode"] == "required"
    said = f"{reply.content}{reply.reasoning}{reply.tool_calls}"
    checks = {
        "status": reply.status == 200,
        "markup": not any(marker in said for marker in MARKERS),
        "calls": fits(reply, allowed) and (choice != "none" or not reply.tool_calls),
        "forced": not forced or reason == "length" or (len(reply.tool_calls), reply.content) == (1, ""),
        "reason": (reason == "tool_calls") <= bool(reply.tool_calls),
        "stop": "stop" not in asked or reason == "length" or " green" not in reply.content,
        "schema": "response_format" not in asked or reason != "stop" or "stop" in asked or an_answer(reply.content),
    }
    return next((name for name, holds in checks.items() if not holds), None)


def an_answer(text) -> bool:
    jsonschema.validate(json.loads(text), ANSWER)
    return True


@PATHS
def test_requests_of_every_kind_side_by_side(place, path):  # noqa: F811
    server, body = place(path)
    rng = random.Random(7)
    for _ in range(12):
        asked = [{**some_request(rng), **body} for _ in range(5)]
        replies = together(server, [{**each, "call": call} for each in asked for call in (chat, chat_stream)])
        for each, whole, streamed in zip(asked, replies[::2], replies[1::2], strict=True):
            assert [what_is_wrong(each, reply) for reply in (whole, streamed)] == [None, None], each
            assert (whole.finish_reason, whole.reasoning) == (streamed.finish_reason, streamed.reasoning), each
            if whole.finish_reason != "length":
                assert (whole.content, names(whole)) == (streamed.content, names(streamed)), each
