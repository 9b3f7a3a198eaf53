"""Calls with parameters between tags, held by a grammar: strings that hold the call's own markup, missing tags.

Each text is a whole call of the grammar, and is read back as what was meant; over HTTP in each path, streamed and not.
"""

import json

import pytest

from mlx_patches.grammar_rules import Specials, Tool
from mlx_patches.json_schemas import prepare
from mlx_patches.tool_grammars import FORMATS, call_rules
from tests.client import both
from tests.test_tool_grammars import allows, read
from tests.tiny_models import model_folder
from tests.tool_texts import markers, written

TAGS = [name for name, form in FORMATS.items() if form.shape == "tags"]
CLOSED = [name for name in TAGS if FORMATS[name].tail]  # a call has a closing tag of its own
STRING = {"type": "string"}
PATHS = {"batch": {}, "single": {"seed": 7}}


def tool(required=("s", "t"), **kinds) -> list[dict]:
    schema = {"type": "object", "properties": kinds or {"s": STRING, "t": STRING}, "required": list(required)}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def call(name: str, values: dict[str, str], unclosed: str = "", tail: bool = True) -> str:
    """A call of f without markers. `unclosed`: the parameters whose end tags are missing."""
    form = FORMATS[name]
    ends = {key: "\n" if key in unclosed else form.end for key in values}
    body = "".join(form.parameter.format(key) + form.value + value + ends[key] for key, value in values.items())
    return form.head.format("f") + body + (form.tail if tail else "")


def held_and_read(name: str, text: str, tools: list[dict]) -> list:
    assert allows(name, tools[0]["function"]["parameters"], text), text
    return read(name, text, tools)


def own_markup(name: str) -> dict[str, str]:
    form, (start, end) = FORMATS[name], markers(name)
    tag, close = form.parameter.format("q").strip(), form.end.strip()
    texts = {
        "end tag": f"say{form.end}now",
        "end tag in a line": f"say {close} now",
        "end tag at the ends": f"{close} x {close}",
        "end tags alone": close * 3,
        "block's marker": f"{start} {end} y",
        "call's closing tag": f"x {form.tail} y",
        "parameter's tag": f"use {tag} here" if name != "minicpm5" else "use <param here",
        "lines": f"\n\n  x\n{close}\n\n{close}y\n\n",
        "tags of others": "</b> <c> </ <p",
    }
    if form.tail:
        texts["example"] = "like:\n" + written(name, [("g", {"q": "inner", "z": "k"})]) + "\nand so on"
        texts["two examples"] = "\n".join([texts["example"], "and", texts["example"]])
    return texts


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("required", [("s", "t"), ()], ids=["required", "optional"])
def test_a_string_may_hold_its_own_markup(name, required):
    for what, value in own_markup(name).items():
        text = call(name, {"s": value, "t": value})
        assert held_and_read(name, text, tool(required)) == [("f", {"s": value, "t": value})], what


@pytest.mark.parametrize("name", TAGS)
def test_markup_behind_an_end_tag_is_markup(name):
    """What the reader would take for another parameter, or another call, no string can hold."""
    form, schema = FORMATS[name], tool()[0]["function"]["parameters"]
    for value in (f"x{form.end}{form.parameter.format('q')}{form.value}y", f"x{form.end}{form.head.format('g')}y"):
        if form.head != "{}":
            assert not allows(name, schema, call(name, {"s": value, "t": "z"})), value
    assert not allows(name, schema, call(name, {"s": "x"}))
    assert not allows(name, schema, call(name, {"t": "x", "s": "y"}))


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("unclosed", ["s", "t", "st"])
@pytest.mark.parametrize(
    "kind", [STRING, {}, {"type": "integer"}, {"enum": ["1", "ab"]}, {"type": ["null", "integer"]}]
)
@pytest.mark.parametrize("required", [("s", "t"), ("t",), ()])
def test_end_tags_may_be_missing(name, unclosed, kind, required):
    tools = tool(required, s=kind, t=STRING)
    ((_, arguments),) = held_and_read(name, call(name, {"s": "1", "t": "y"}, unclosed), tools)
    assert {key: str(value).strip() for key, value in arguments.items()} == {"s": "1", "t": "y"}
    tools = tool(required, s=STRING, t=kind)
    ((_, arguments),) = held_and_read(name, call(name, {"s": "x", "t": "1"}, unclosed), tools)
    assert {key: str(value).strip() for key, value in arguments.items()} == {"s": "x", "t": "1"}
    assert held_and_read(name, call(name, {"s": "x", "t": "1"}, tail=False), tools)


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("held", [{"maxLength": 3}, {"pattern": "^a+$"}, {"enum": ["a", "aa"]}])
def test_a_string_that_is_held_ends_at_its_end_tag(name, held):
    form, schema = FORMATS[name], tool((), s=STRING | held, t=STRING)[0]["function"]["parameters"]
    assert allows(name, schema, call(name, {"s": "aa", "t": f"x{form.end}y"}))
    assert not allows(name, schema, call(name, {"s": f"a{form.end}a", "t": "x"}))


def test_many_tools_share_the_rules_of_their_strings():
    tools = [Tool(f"f{n}", prepare(tool()[0]["function"]["parameters"], param="p")) for n in range(40)]
    for name in TAGS:
        rules = call_rules(FORMATS[name], tools, Specials(), several=False, end=markers(name)[1]).rules
        assert rules.count("[lazy]") < 10


# Over HTTP


@pytest.mark.parametrize("name", TAGS)
def test_over_http(serve, name):
    server = serve(model_folder("scripted", tools=name))
    start, end = markers(name)
    every = [{"tool_choice": choice, **path} for choice in ("auto", "required") for path in PATHS.values()]
    for what, value in own_markup(name).items():
        if name not in CLOSED and what == "block's marker":
            value = value.replace(start, "")  # of some, it is a special token
        text = start + call(name, {"s": value, "t": value}) + end
        for fields in every if what == "end tag" else every[:1]:
            reply = both(server, text, tools=tool(), max_tokens=600, **fields)
            got = [json.loads(each["function"]["arguments"]) for each in reply.tool_calls]
            assert (got, reply.content, reply.finish_reason) == ([{"s": value, "t": value}], "", "tool_calls"), what


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47"])
def test_with_a_draft(serve, tiny, name):
    draft = tiny("scripted", tools=name, wrong_every=3)
    server = serve(tiny("scripted", tools=name), "--draft-model", draft, "--prompt-cache-size", 0)
    start, end = markers(name)
    value = own_markup(name)["end tag"]
    reply = both(server, start + call(name, {"s": value, "t": value}) + end, tools=tool(), max_tokens=300)
    assert [json.loads(each["function"]["arguments"]) for each in reply.tool_calls] == [{"s": value, "t": value}]
