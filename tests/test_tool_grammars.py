"""Tool grammars by themselves: random walks through each format's grammar, read back as the server does.

Tool sets are made of JSONSchemaBench's sample, three schemas a set. Every walk that ends must be a call of a tool of
the set, with arguments that validate where nothing of its schema was left out. `python -m tests.test_tool_grammars`
takes 100 sets and prints the counts; pytest takes a slice.
"""

import collections
import importlib
import json
import math
import re
import sys
from functools import lru_cache

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import load

from localServerCommon import Refused
from mlx_patches.grammar_rules import Specials, Tool, literal
from mlx_patches.json_schemas import prepare
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.structured_output import build_tokenizer
from mlx_patches.tool_arguments import Calls
from mlx_patches.tool_grammars import FORMATS, call_rules
from mlx_patches.tool_rules import NAME
from tests.test_schema_sample import CLOSERS, cases
from tests.tiny_models import model_folder
from tests.tool_texts import markers, written

ENDS = (*CLOSERS, "<", ">", "</", "|", "e", "n", "t", "1")
STEPS = 400


@lru_cache
def vocabulary():
    """(mlx_lm's tokenizer, llguidance's, the tokens that end things)."""
    tokenizer = load(model_folder("llama"))
    width = 1 + max(tokenizer.get_vocab().values())
    spelled = [tokenizer.decode([token]) for token in range(width)]
    ends = np.array([text in ENDS for text in spelled])
    return tokenizer, build_tokenizer(ReplyFormat(tokenizer, width)), ends


def walk(matcher: LLMatcher, rng) -> str | None:
    """A random text that the grammar allows, or None where it did not end."""
    tokenizer, _, ends = vocabulary()
    tokens = []
    while not matcher.is_stopped():
        if len(tokens) == STEPS:
            return None
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(ends)]
        allowed = np.flatnonzero(bits)
        closing = allowed[ends[allowed]]
        token = int(rng.choice(closing if len(closing) and rng.random() < 0.7 else allowed))
        if token in tokenizer.eos_token_ids:
            break
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return tokenizer.decode(tokens)


def read(name: str, text: str, tools: list[dict]) -> list[tuple[str, dict]]:
    """(name, arguments) of each call in a block."""
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    name = parser.parse_tool_call.__module__.rpartition(".")[2]
    reader = Calls(name, parser.parse_tool_call, parser.tool_call_start, parser.tool_call_end, tools, held=True)
    calls, rest = reader.read(text.removesuffix(parser.tool_call_end), known=False)
    assert not rest.strip()
    return [(call.name, json.loads(call.arguments)) for call in calls]


def numbers(value):
    """`value` with the numbers that no float holds, which the server leaves as text, as the numbers they are."""
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    huge = isinstance(value, str) and re.fullmatch(r"-?\d[\d.]*[eE]\+?\d{3,}", value) and math.isinf(float(value))
    return float(value) if huge else value


def tool_sets(count: int) -> list[dict[str, dict]]:
    """Sets of three tools, name → schema of its arguments."""
    objects = [case["schema"] for case in cases() if isinstance(case["schema"], dict)]
    objects = [schema for schema in objects if schema.get("type") == "object" and schema.get("properties")]
    return [{f"tool_{at}": schema for at, schema in enumerate(objects[n * 3 : n * 3 + 3])} for n in range(count)]


def prepared_tools(schemas: dict[str, dict]) -> list[Tool]:
    tools = []
    for name, schema in schemas.items():
        try:
            tools.append(Tool(name, prepare(schema, param=name)))
        except Refused:
            tools.append(Tool(name, prepare({"type": "object"}, param=name)))
    return tools


def run(name: str, sets: list[dict[str, dict]], walks: int) -> tuple[collections.Counter, list[str]]:
    counts, wrong = collections.Counter(), []
    for number, schemas in enumerate(sets):
        tools = prepared_tools(schemas)
        calls = call_rules(FORMATS[name], tools, Specials(), several=True, end=markers(name)[1])
        lark = f"start: block\n{calls.rules}"
        matcher = LLMatcher(vocabulary()[1], json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
        if matcher.is_error():
            counts["does not compile"] += 1
            wrong.append(f"{name} {number}: {matcher.get_error()[:300]}")
            continue
        counts["compiled"] += 1
        partly = {line.partition(": ")[0] for line in calls.not_enforced}
        shown = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
        rng = np.random.default_rng(number)
        for _ in range(walks):
            text = walk(matcher.deep_copy(), rng)
            counts["cut" if text is None else "whole"] += 1
            if text is None:
                continue
            try:
                for tool, arguments in read(name, text, shown):
                    schema = schemas[tool]
                    if tool not in partly:
                        validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(numbers(arguments))
            except Exception as fault:
                counts["wrong"] += 1
                wrong.append(f"{name} {number}: {type(fault).__name__} {str(fault)[:200]} in {text[:300]!r}")
    return counts, wrong


NAMES = [name for name in FORMATS if name != "harmony"]  # its calls are told by their headers: test_tool_choice.py


@pytest.mark.parametrize("name", NAMES)
def test_walks_are_calls_that_validate(name):
    counts, wrong = run(name, tool_sets(8), 4)
    assert not wrong
    assert counts["compiled"] == 8
    assert counts["whole"] >= 4


def grammar(name: str, schema: dict, tool: str = "f") -> tuple[LLMatcher, tuple[str, ...]]:
    """(the matcher of a call of `tool`, what it does not hold)."""
    calls = call_rules(
        FORMATS[name], [Tool(tool, prepare(schema, param="f"))], Specials(), several=False, end=markers(name)[1]
    )
    lark = f"start: block\n{calls.rules}"
    matcher = LLMatcher(vocabulary()[1], json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher, calls.not_enforced


def walks(name: str, schema: dict, count: int = 4) -> tuple[list[dict], tuple[str, ...]]:
    """(arguments of `f` as the server reads them, each of which validates; what is not held)."""
    matcher, left_out = grammar(name, schema)
    shown = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    texts = [walk(matcher.deep_copy(), np.random.default_rng(seed)) for seed in range(count)]
    found = []
    for text in filter(None, texts):
        ((tool, arguments),) = read(name, text, shown)
        assert tool == "f"
        if not left_out:
            jsonschema.Draft202012Validator(schema).validate(numbers(arguments))
        found.append(arguments)
    return found, left_out


def allows(name: str, schema: dict, text: str, tool: str = "f") -> bool:
    """Whether `text` is a whole block, but for the marker after it."""
    tokens = vocabulary()[0].encode(text + markers(name)[1], add_special_tokens=False)
    matcher, _ = grammar(name, schema, tool)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(name: str, key: str, value: str, tool: str = "f") -> str:
    """A call with one argument."""
    form = FORMATS[name]
    argument = {
        "json": f'{{"{key}": {value}}}',
        "tags": form.parameter.format(key) + form.value + value + form.end,
        "gemma": f"{{{key}:{value}}}",
    }["json" if form.shape == "mistral" else form.shape]
    return form.head.format(tool) + argument + form.tail


def parameter(schema: dict, **more) -> dict:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"pattern": r"^\d{3}/[a-z]$"}, "123/b", ("\u0663\u0663\u0663/b", "x123/b", "123/bb")),
        ({"pattern": "b"}, "abc", ("ac",)),
        ({"pattern": "^a|b$"}, "zb", ("bz",)),
        ({"pattern": "^$|^x", "maxLength": 3}, "xyz", ("wxyz", "xyzz", "yx")),
        ({"pattern": r"^[^/\]]+\$$", "minLength": 3}, "é:$", ("a$", "a/$", "aa]$", "abc")),
        ({"format": "date"}, "2024-02-29", ("2024-13-01", "today", "2024-1-1")),
        ({"format": "uuid", "pattern": "^0"}, "01234567-89ab-cdef-0123-456789abcdef", ("0", "1" * 36)),
        ({"format": "date-time"}, "2024-02-29T10:00:00Z", ("2024-02-29",)),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "gemma4"])
def test_patterns_and_formats_of_strings(name, schema, fits, fails):
    schema = parameter({"type": "string", **schema})
    quote = FORMATS[name].quote
    assert allows(name, schema, call(name, "x", quote + fits + quote))
    assert not [text for text in fails if allows(name, schema, call(name, "x", quote + text + quote))]
    assert not grammar(name, schema)[1]


@pytest.mark.parametrize("held", [{"pattern": "(^a|b)"}, {"pattern": "^a$", "minLength": 2}, {"format": "uri"}])
def test_what_no_terminal_holds_is_listed(held):
    keyword = next(iter(held))
    assert grammar("qwen3_coder", {"type": "object", "properties": {"x": {"type": "string", **held}}})[1] == (
        f"f: x.{keyword}",
    )


NAMES_OF_PROPERTIES = st.one_of(
    st.text(max_size=6),
    st.text('ab \n"<>=:{},\\/$.-', max_size=8),
    st.sampled_from(["", "</parameter>", "a b", "a>", '<|"|>', "</arg_key>", "\x7f", "\u2028", "x\n"]),
)
TYPES_OF_PROPERTIES = st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1, None]}])
QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(properties=st.dictionaries(NAMES_OF_PROPERTIES, TYPES_OF_PROPERTIES, min_size=1, max_size=4), data=st.data())
def test_any_names_of_properties(name, properties, data):
    required = data.draw(st.lists(st.sampled_from([*properties]), unique=True))
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    found, left_out = walks(name, schema, 2)
    left = {line.removeprefix("f: ").lstrip(".") for line in left_out}
    assert left <= {each.lstrip(".") for each in properties}
    reduced = {
        **schema,
        "properties": {key: each for key, each in properties.items() if key.lstrip(".") not in left},
        "required": [key for key in required if key.lstrip(".") not in left],
    }
    for arguments in found:
        jsonschema.Draft202012Validator(reduced).validate(arguments)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minicpm5", "gemma4", "function_gemma"])
@pytest.mark.parametrize("letter", [*map(chr, range(32)), *'"\\/', "\x7f", "\u2028", "\ufeff", "\U0001f600"])
def test_odd_letters_in_names_and_constants(name, letter):
    text = f"a{letter}b"
    schema = {"type": "object", "properties": {text: {"type": "integer"}, "x": {"enum": [text, letter, [text]]}}}
    found, left_out = walks(name, {**schema, "required": ["x"]}, 2)
    assert found and set(left_out) <= {f"f: {text}"}
    for arguments in found:
        jsonschema.Draft202012Validator({**schema, "required": ["x"]}).validate(arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"const": "on"}, {"type": "integer"}]},
        {"anyOf": [{"const": "on", "type": "string"}, {"type": "integer"}]},
        {"enum": [1, "a", None, True, 2.5, ["b"]]},
        {"anyOf": [{"const": False}, {"type": "integer"}]},
        {"$ref": "#/$defs/a%20b"},
        {"$ref": "#/$defs/list/anyOf/0"},
    ],
)
def test_grammar_and_reader_agree(name, schema):
    defs = {"a b": {"type": "integer"}, "list": {"anyOf": [{"type": "boolean"}]}}
    found, left_out = walks(name, parameter(schema, **{"$defs": defs}), 8)
    assert len(found) > 4 and not left_out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "integer"}},
        {"$ref": "#/$defs/a", "$defs": {"a": parameter({"type": "integer"})}},
    ],
)
def test_roots_without_properties(name, schema):
    schema = {"type": "object", **schema}
    assert walks(name, schema)[0] and allows(name, schema, text := call(name, "x", "3"))
    assert read(name, text, [{"function": {"name": "f", "parameters": schema}}]) == [("f", {"x": 3})]
    assert not allows(name, schema, call(name, "x", "true"))


@pytest.mark.parametrize("name", ["gemma4", "function_gemma"])
def test_a_constant_with_gemmas_quote(name):
    """It cannot be written: the others can, or any string where there is no other."""
    quote = FORMATS[name].quote
    found, left_out = walks(name, parameter({"enum": [f"a{quote}b", "c", [quote]]}))
    assert found and all(each == {"x": "c"} for each in found) and not left_out
    found, left_out = walks(name, parameter({"const": quote}), 8)
    assert left_out == ("f: x.const",) and allows(
        name, parameter({"const": quote}), call(name, "x", f"{quote}ab{quote}")
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "tool", ["a@b", "@", "a.b", "f.", "..", "-", "a/b:0", "functions.f", "call:f", "__", "9", "x" * 128]
)
def test_any_name_of_a_tool(name, tool):
    schema = parameter({"type": "integer"})
    assert NAME.fullmatch(tool) and allows(name, schema, text := call(name, "x", "3", tool), tool)
    shown = [{"type": "function", "function": {"name": tool, "parameters": schema}}]
    assert read(name, text, shown) == [(tool, {"x": 3})]


@pytest.mark.parametrize("name", ["glm47", "laguna", "longcat"])
@pytest.mark.parametrize("value", [{"type": "string"}, {"type": "integer"}, {"const": "3"}])
@pytest.mark.parametrize("declared", [True, False])
def test_line_breaks_between_keys_and_values(name, value, declared):
    """As the models' own templates write them (GLM-4.5), and as those without do (GLM-4.7)."""
    schema = parameter(value) if declared else {"type": "object", "additionalProperties": value}
    for texts in (written(name, [("f", {"x": 3})]), call(name, "x", "3")):
        start, end = markers(name)
        text = texts.removeprefix(start).removesuffix(end)
        assert allows(name, schema, text), text
        ((_, arguments),) = read(name, text, [{"type": "function", "function": {"name": "f", "parameters": schema}}])
        assert arguments == {"x": 3 if value == {"type": "integer"} else "3"}
    assert allows(name, {"type": "object", "properties": {}}, "f\n")


@pytest.mark.parametrize("number", [0, 1, 12])
def test_kimis_calls_are_numbered(number):
    text = call("kimi_k2", "x", "3").replace(":0", f":{number}")
    assert allows("kimi_k2", parameter({"type": "integer"}), text)
    assert not allows("kimi_k2", parameter({"type": "integer"}), text.replace(f":{number}<", ":<"))


@pytest.mark.parametrize("kinds", ["number", ["number", "null"], ["integer", "number", "boolean"], ["number", "array"]])
@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].shape not in ("json", "mistral")])
def test_numbers_beyond_a_floats_range_are_not_written(name, kinds):
    schema = parameter({"type": kinds})
    assert not [x for x in ("1e999", "-1e400", "1.5E+310") if allows(name, schema, call(name, "x", x))]
    assert all(allows(name, schema, call(name, "x", x)) for x in ("1e99", "-2.5", "0", "12345678"))
    assert not allows(name, parameter({"type": kinds, "multipleOf": 0.5}), call(name, "x", "1.25"))


@pytest.mark.parametrize("name", ["gemma4", "function_gemma"])
def test_numbers_of_any_value_in_gemma(name):
    assert not allows(name, {"type": "object"}, call(name, "x", "1e999"))
    assert allows(name, {"type": "object"}, call(name, "x", "[1e9,{k:true}]"))


@pytest.mark.parametrize("name", ["gemma4", "function_gemma"])
@pytest.mark.parametrize(
    "schema, value",
    [
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, "555"),
        ({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "number"}]}, "5.5"),
        ({"type": ["boolean", "string"], "minLength": 7}, "true"),
        ({"type": ["null", "string"], "minLength": 7}, "null"),
        ({"enum": ["a", 5]}, "5"),
    ],
)
def test_gemmas_bare_words_beside_strings(name, schema, value):
    schema = parameter(schema)
    assert allows(name, schema, text := call(name, "x", value))
    shown = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert read(name, text, shown) == [("f", {"x": json.loads(value)})]


@pytest.mark.parametrize("text", ["a</param>b", "</param>", "]]>", "a]]>\n</param", "<![CDATA[x", "\n\n", "&<b>"])
def test_sections_of_cdata(text):
    for schema in ({}, {"maxLength": 20}, {"minLength": 1}, {"format": "uuid"}):
        value = call("minicpm5", "x", f"<![CDATA[{text}]]>")
        assert allows("minicpm5", parameter({"type": "string", **schema}), value) == ("format" not in schema)
    assert read("minicpm5", value, [{"function": {"name": "f", "parameters": parameter({"type": "string"})}}]) == [
        ("f", {"x": text})
    ]


@pytest.mark.parametrize("held", [{"maxLength": 3}, {"minLength": 12}, {"pattern": "^<.*>$"}, {"pattern": "^[^!]*$"}])
def test_a_section_holds_what_its_text_holds(held):
    schema = parameter({"type": "string", **held})
    for text in ("ab", "<b>", "abcdefghijkl", "<bcdefghijk>", "<!>", "<!bcdefghijk>"):
        fits = jsonschema.Draft202012Validator(schema).is_valid({"x": text})
        for value in (text, f"<![CDATA[{text}]]>", f"\n<![CDATA[{text}]]>\n"):
            assert allows("minicpm5", schema, call("minicpm5", "x", value)) == fits, value


@pytest.mark.parametrize("end", ["\n</parameter>\n</function>", "\n</parameter>\n<parameter=y>\n1"])
def test_a_constant_that_would_end_its_parameter(end):
    found, left_out = walks("qwen3_coder", parameter({"enum": [f"a{end}", "c"]}))
    assert found and all(each == {"x": "c"} for each in found) and not left_out


def test_special_tokens_stand_by_their_ids():
    assert literal('<a>\n"x"<b>', Specials({"<a>": 3, "<b>": 7})) == r'<[3]> "\n\"x\"" <[7]>'
    assert literal("plain", Specials()) == '"plain"'


if __name__ == "__main__":
    failed = False
    for each in sys.argv[1:] or NAMES:
        found, faults = run(each, tool_sets(100), 5)
        print(each, dict(found))
        print("\n".join(faults[:5]))
        failed |= bool(faults)
    sys.exit(failed)
