"""Calls with parameters between tags, held by a grammar: strings that hold the call's own markup, missing tags.

Each text is a whole call of the grammar, and is read back as what was meant; over HTTP in each path, streamed and not.
"""

import json
import random
from functools import lru_cache

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import load

from mlx_patches.grammar_rules import Specials, Tool
from mlx_patches.json_schemas import prepare
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.structured_output import build_tokenizer
from mlx_patches.tool_grammars import FORMATS, call_rules
from tests.client import both
from tests.test_tool_grammars import allows, read
from tests.tiny_models import model_folder
from tests.tool_texts import markers, written
from tests.tool_texts import read as read_reply

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
@pytest.mark.parametrize("required", [("s",), ()], ids=["required", "optional"])
def test_a_tag_that_no_call_begins_before_is_text(name, required):
    """As where the end tag before a parameter is missing that the tool has not: nothing in the reply waits for more."""
    form = FORMATS[name]
    value = f"x\n{form.parameter.format('q').strip()}{form.value}y"
    assert held_and_read(name, call(name, {"s": value}), tool(required, s=STRING)) == [("f", {"s": value})]


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


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("held", [{"maxLength": 2000}, {"minLength": 1, "maxLength": 255}, {"maxLength": 32767}])
def test_a_long_string_with_a_length_keeps_within_llguidances_limits(name, held):
    schema = tool((), s=STRING | held, t=STRING | {"maxLength": 255})[0]["function"]["parameters"]
    tokenizer, words, _ = vocabulary_with(())
    tools = [Tool("f", prepare(schema, param="f"))]
    rules = call_rules(FORMATS[name], tools, Specials(), several=False, end=markers(name)[1]).rules
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: block\n{rules}"}]})
    matcher = LLMatcher(words, grammar, log_level=0)
    text = call(name, {"s": 'if a < b and </b>: ["<p", 1]}>|' * 8, "t": "x<y"}) + markers(name)[1]
    for token in tokenizer.encode(text, add_special_tokens=False):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


def test_many_tools_share_the_rules_of_their_strings():
    tools = [Tool(f"f{n}", prepare(tool()[0]["function"]["parameters"], param="p")) for n in range(40)]
    for name in TAGS:
        rules = call_rules(FORMATS[name], tools, Specials(), several=False, end=markers(name)[1]).rules
        assert rules.count("[lazy]") < 10


# Random texts of the format's own pieces

SCHEMAS = [
    {"type": "object", "properties": {"s": STRING, "t": STRING}, "required": ["s", "t"]},
    {"type": "object", "properties": {"s": STRING, "n": {"type": "integer"}, "t": STRING}, "required": ["s"]},
    {"type": "object", "properties": {"n": {"type": "integer"}, "s": STRING, "t": STRING}, "required": ["t"]},
    {
        "type": "object",
        "properties": {"s": {"type": ["string", "null"]}, "t": {"anyOf": [STRING, {"type": "integer"}]}},
    },
    {"type": "object", "properties": {"s": STRING, "l": {"type": "array", "items": STRING}, "b": {"type": "boolean"}}},
    {"type": "object", "properties": {"s": STRING | {"maxLength": 6}, "e": {"enum": ["a", "b c", None, 3]}, "t": {}}},
    {"type": "object", "properties": {"o": {"type": "object"}, "s": STRING | {"pattern": "^a*$"}}, "required": ["o"]},
]


@lru_cache
def vocabulary_with(marks: tuple[str, ...]):
    """(tokenizer, llguidance's, its special tokens) of a vocabulary in which `marks` are tokens."""
    tokenizer = load(model_folder("llama", tokens=marks) if marks else model_folder("llama"))
    width = 1 + max(tokenizer.get_vocab().values())
    added = tokenizer._tokenizer.added_tokens_decoder.items() if marks else ()
    specials = Specials((token.content, number) for number, token in added)
    return tokenizer, build_tokenizer(ReplyFormat(tokenizer, width)), specials


def marks_of(name: str) -> tuple[str, ...]:
    """The markers of a format, and the tags that its real vocabularies have as tokens."""
    form = FORMATS[name]
    tags = [*form.parameter.split("{}"), form.value, form.end] if form.value else []
    return tuple(dict.fromkeys(filter(None, [*markers(name), *tags])))


def pieces_of(name: str, keys: list[str]) -> list[str]:
    form, (start, end) = FORMATS[name], markers(name)
    tags = [form.parameter.format(key) + value for key in [*keys, "q"] for value in ("", form.value)]
    ends = [form.end, form.tail, end] * 4
    heads = [form.head.format("f"), form.head.format("g"), start]
    heads += [f"\n{form.head.format('g').strip()}\n{form.parameter.format(key)}{form.value}" for key in (*keys, "q")]
    plain = [" ", "\n", "\t", "\x1c", "\u2028", "x", "1", '"', "null", "é", "<", "</", ">", "<![CDATA[", "]]>", "{}"]
    marks = filter(None, [*tags, *ends, *heads])
    return [*plain, *(each for mark in marks for each in (mark, mark.strip(), f"\n{mark.strip()}"))]


def wander(matcher: LLMatcher, tokenizer, pieces: list[str], rng: random.Random, width: int) -> str | None:
    """A text that the grammar allows, mostly of `pieces`; None where it did not end."""
    tokens: list[int] = []
    most = rng.choice([5, 20, 80])
    while not matcher.is_stopped():
        if len(tokens) > 600:
            return None
        if rng.random() < 0.8:
            wanted = rng.choice(pieces if len(tokens) < most else pieces[-30:])
            ids = tokenizer.encode(wanted, add_special_tokens=False)
            taken = matcher.try_consume_tokens(ids)
            tokens += ids[:taken]
            if taken:
                continue
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:width]
        allowed = [int(each) for each in np.flatnonzero(bits) if each not in tokenizer.eos_token_ids]
        if not allowed:
            break
        token = rng.choice(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("marks", ["as letters", "as tokens"])
def test_whatever_the_grammar_allows_is_read_as_one_call_that_validates(name, marks):
    tokenizer, words, specials = vocabulary_with(marks_of(name) if marks == "as tokens" else ())
    width, rng, whole = 1 + max(tokenizer.get_vocab().values()), random.Random(marks), 0
    for schema in SCHEMAS:
        tools = [Tool("f", prepare(schema, param="f")), Tool("g", prepare({"type": "object"}, param="g"))]
        rules = call_rules(FORMATS[name], tools, specials, several=False, end=markers(name)[1]).rules
        grammar = json.dumps({"grammars": [{"lark_grammar": f"start: block\n{rules}"}]})
        pristine = LLMatcher(words, grammar, log_level=0)
        head = tokenizer.encode(FORMATS[name].head.format("f"), add_special_tokens=False)
        assert pristine.try_consume_tokens(head) == len(head)
        shown = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        pieces = pieces_of(name, [*schema["properties"]])
        for _ in range(12):
            text = wander(pristine.deep_copy(), tokenizer, pieces, rng, width)
            if text is None or "\ufffd" in text:
                continue
            text = markers(name)[0] + FORMATS[name].head.format("f") + text
            sent = read_reply(name, [text], shown, held=True)
            assert [each for each, _ in sent.values] == ["f"] and not sent.content, text
            jsonschema.Draft202012Validator(schema).validate(sent.values[0][1])
            whole += 1
    assert whole > 30


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


@pytest.mark.parametrize("name", ["minimax_m2", "muse_spark"])
def test_several_calls_in_a_block(serve, name):
    server = serve(model_folder("scripted", tools=name))
    text = written(name, [("f", {"s": "x", "t": "y"}), ("f", {"s": "z", "t": "w"})])
    for choice in ("auto", "required"):
        for path in PATHS.values():
            reply = both(server, text, tools=tool(), tool_choice=choice, max_tokens=600, **path)
            got = [json.loads(each["function"]["arguments"]) for each in reply.tool_calls]
            assert (got, reply.content) == ([{"s": "x", "t": "y"}, {"s": "z", "t": "w"}], "")
        reply = both(server, text, tools=tool(), tool_choice=choice, max_tokens=600, parallel_tool_calls=False)
        assert len(reply.tool_calls) == 1
