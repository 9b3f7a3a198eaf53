"""Schemas a grammar holds to, and exactly what of the others is left out: checked with jsonschema on random walks.

A walk asks the matcher what may come next and takes some of it, so it tries what no model would: whatever comes out
must be valid against the schema that was given. The yardstick is the sample of JSONSchemaBench in ../shared/data;
without it a small set here stands in. `python -m tests.test_json_schemas` takes the whole sample and
prints the counts (some two minutes); so does pytest with SCHEMAS=all.
"""

import collections
import functools
import json
import os
import random
import threading
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from localServerCommon import Refused
from mlx_patches.json_schemas import CHILDREN, _reachable, prepare
from mlx_patches.schema_keywords import BOUNDS, KINDS, LIMITS, NO_EFFECT, UNHELD, error_of, is_plain, on_a_deep_stack

SAMPLE = Path(__file__).parent.parent.parent / "shared" / "data" / "jsonschemabench" / "sample.jsonl"
ENDS = (0, 1)
SLICE = 60
INT, STR, OBJ = {"type": "integer"}, {"type": "string"}, {"type": "object"}


@functools.cache
def bpe() -> Tokenizer:
    """A byte-level BPE of 1,000 tokens, trained here; the first two end a reply."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|end|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    page = json.dumps([case["schema"] for case in built_in()], indent=2) + Path(__file__).read_text()
    tokenizer.train_from_iterator([page], trainer)
    return tokenizer


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(bpe().to_str(), n_vocab=bpe().get_vocab_size(), eos_token=list(ENDS))


def compiled(prepared) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(prepared.text)
    matcher = on_a_deep_stack(len(source), lambda: LLMatcher(vocabulary(), source, log_level=0, limits=LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def held(schema) -> LLMatcher:
    matcher = compiled(prepare(schema, param="schema"))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether `text` is a whole reply: each token is in the mask before it, and the end after the last."""
    matcher = matcher.deep_copy()
    for token in (*vocabulary().tokenize_str(text), ENDS[0]):
        if not matcher.compute_bitmask()[token >> 3] >> (token & 7) & 1:
            return False
        if token != ENDS[0]:
            assert matcher.consume_token(token), matcher.get_error()
    return True


def dropped(schema) -> list[str]:
    return sorted(prepare(schema, param="schema").not_enforced)


def refusal(schema, **how) -> Refused:
    with pytest.raises(Refused) as caught:
        prepare(schema, param="schema", **how)
    assert caught.value.status == 400 and caught.value.param == "schema" and caught.value.code == "invalid_json_schema"
    return caught.value


# Random walks


@functools.cache
def token_bytes() -> list[bytes]:
    return [vocabulary().decode_bytes([token]) for token in range(vocabulary().vocab_size)]


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little", count=vocabulary().vocab_size).nonzero()[0].tolist()


def walk(matcher: LLMatcher, rng: random.Random, length: int = 60, limit: int = 600) -> bytes | None:
    """A reply that `matcher` allows, or None when it did not end: free up to `length`, then bent on closing."""
    matcher = matcher.deep_copy()
    reply: list[int] = []
    while len(reply) < limit:
        choices = allowed(matcher)
        assert choices and not matcher.is_error(), matcher.get_error()
        go_on = [token for token in choices if token not in ENDS]
        if not go_on or (len(go_on) < len(choices) and (len(reply) > length or rng.random() < 0.3)):
            return vocabulary().decode_bytes(reply)
        spelled = token_bytes()
        if len(reply) > length and rng.random() < 0.9:
            closing = [token for token in go_on if set(spelled[token]) <= set(b'"}]')]
            go_on = closing or sorted(go_on, key=lambda token: len(spelled[token]))[:12]
        elif rng.random() < 0.5:
            go_on = [token for token in go_on if len(spelled[token]) == 1 and spelled[token] < b"\x7f"] or go_on
        reply.append(rng.choice(go_on))
        assert matcher.consume_token(reply[-1]), matcher.get_error()
    return None


def complaint(schema, value) -> str | None:
    """What jsonschema says against `value`, format assertions off."""
    checker = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    fault = jsonschema.exceptions.best_match(checker.iter_errors(value))
    return fault and f"{fault.message[:200]} at {'.'.join(map(str, fault.absolute_schema_path))}"


def check_walks(schema, matcher: LLMatcher, seed: str, times: int, **how) -> collections.Counter:
    """Walk `times` times; what ends must parse and be valid."""
    rng = random.Random(seed)
    ends: collections.Counter = collections.Counter()
    for _ in range(times):
        reply = walk(matcher, rng, **how)
        if reply is not None:
            fault = complaint(schema, json.loads(reply.decode()))
            assert fault is None, f"{reply.decode()!r}: {fault}"
        ends["ended" if reply is not None else "cut"] += 1
    return ends


# The sample


def built_in() -> list[dict]:
    """Schemas with instances, in the sample's form."""
    node = {**OBJ, "properties": {"v": INT, "next": {"$ref": "#"}}, "required": ["v"], "additionalProperties": False}
    person = {**OBJ, "properties": {"name": STR, "age": {**INT, "minimum": 0}}, "required": ["name"]}
    union = {"anyOf": [{"type": ["string", "null"], "maxLength": 3}, {"type": "array", "items": INT, "maxItems": 2}]}
    kinds = {"oneOf": [{**OBJ, "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]}
    cases = [
        ("recursive", node, [{"v": 1, "next": {"v": 2}}], [{"next": {"v": 1}}, {"v": 1, "x": 2}]),
        (
            "open object",
            person,
            [{"name": "a", "age": 0, "x": [None]}],
            [{"age": 1}, {"name": 1}, {"name": "", "age": -1}],
        ),
        ("union", union, ["abc", None, [1, 2]], ["abcd", [1, 2, 3], 1]),
        ("one of", kinds, [{"k": "a"}, {"k": "b", "z": 1}], [{"k": "c"}, {}]),
        ("enumeration", {"enum": [1, "a", None, {"x": [True]}]}, [1, "a", None, {"x": [True]}], [2, "b", {"x": []}]),
        ("mapping", {**OBJ, "additionalProperties": {"type": "number"}}, [{"é": 1.5e3}, {}], [{"a": "b"}, []]),
        ("tuple", {"type": "array", "prefixItems": [STR, INT], "items": False}, [["a", 1], []], [[1], ["a", 1, 2]]),
    ]
    return [
        {
            "name": name,
            "schema": schema,
            "tests": [{"valid": v, "data": d} for v, ds in ((1, good), (0, bad)) for d in ds],
        }
        for name, schema, good, bad in cases
    ]


@functools.cache
def sample() -> list[dict]:
    cases = [json.loads(line) for line in SAMPLE.read_text().splitlines()] if SAMPLE.exists() else built_in()
    return cases if os.environ.get("SCHEMAS") == "all" else cases[:: max(1, len(cases) // SLICE)]


SPELLINGS: tuple[dict, ...] = ({"separators": (",", ":")}, {}, {"indent": 2})


def accepted_spellings(matcher: LLMatcher, data) -> int:
    return sum(accepts(matcher, json.dumps(data, ensure_ascii=False, **how)) for how in SPELLINGS)


def in_order(data, text: str):
    """`data` with its names as `text`, a schema, first has them: properties come in the schema's order only."""
    if isinstance(data, list):
        return [in_order(part, text) for part in data]
    if not isinstance(data, dict):
        return data
    place = {name: text.find(json.dumps(name) + ":") for name in data}
    names = sorted(data, key=lambda name: place[name] if place[name] >= 0 else len(text))
    return {name: in_order(data[name], text) for name in names}


def judge(case: dict, walks: int = 2) -> collections.Counter:
    """Counts of what became of a schema and its instances. AssertionError: what must not be."""
    counts: collections.Counter = collections.Counter()
    try:
        prepared = prepare(case["schema"], param="schema")
    except Refused as refused:
        counts[f"schemas refused: {refused.message}"] += 1
        return counts
    matcher = compiled(prepared)
    assert not matcher.is_error(), matcher.get_error()
    whole = not prepared.not_enforced
    counts["schemas enforced whole" if whole else "schemas enforced in part"] += 1
    counts.update(f"  left out: {keyword}" for keyword in {drop.keyword for drop in prepared.dropped})
    for test in case["tests"]:
        taken = accepted_spellings(matcher, test["data"])
        if test["valid"] and taken != len(SPELLINGS):
            again = accepted_spellings(
                matcher, in_order(test["data"], json.dumps(case["schema"], separators=(",", ":")))
            )
            key = "accepted in the schema's order" if again == len(SPELLINGS) else f"refused: {case['name']}"
            assert not whole or again, f"a valid instance is refused: {json.dumps(test['data'])[:300]}"
            counts[f"valid instances {key}"] += 1
        elif test["valid"]:
            counts["valid instances accepted"] += 1
        else:
            assert not taken or not whole, f"an invalid instance is accepted: {json.dumps(test['data'])[:300]}"
            counts[f"invalid instances {'accepted, of schemas in part' if taken else 'refused'}"] += 1
    if whole:
        for end, number in check_walks(case["schema"], matcher, case["name"], walks).items():
            counts[f"walks {end}"] += number
    return counts


@pytest.mark.parametrize("case", sample(), ids=lambda case: case["name"])
def test_the_sample_is_enforced_or_refused_with_a_reason(case):
    counts = judge(case)
    assert any(key.startswith("schemas") for key in counts)


# Keyword by keyword

BAD = r"^(?!a)b$"
D7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ({**OBJ, "properties": {"email": {**STR, "pattern": BAD}, "n": INT}}, ["properties.email.pattern"]),
        (
            {**OBJ, "properties": {"pattern": STR, "not": INT, "const": {"const": {"not": STR, "uniqueItems": True}}}},
            [],
        ),
        ({"enum": [{"pattern": BAD}], "default": {"not": {}}, "examples": [{"format": "x"}]}, []),
        ({**STR, "format": "idn-email"}, ["format"]),
        ({**INT, "format": "int64", "pattern": BAD}, []),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, ["items.uniqueItems"]),
        (
            {"type": "array", "prefixItems": [STR, {**OBJ, "propertyNames": {"maxLength": 2}}]},
            ["prefixItems.1.propertyNames"],
        ),
        ({"anyOf": [STR, {"not": INT}]}, ["anyOf.1.not"]),
        ({"if": STR, "then": {"maxLength": 2}, "else": INT}, ["else", "if", "then"]),
        (
            {**OBJ, "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
            ["dependentRequired", "unevaluatedProperties"],
        ),
        ({"type": "array", "contains": STR, "minContains": 2}, ["contains", "minContains"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": STR}, "unreached": {"not": STR}}}, ["$defs.a.not"]),
        (
            {**OBJ, "properties": {"a": {"$ref": "#x"}}, "definitions": {"y": {"$anchor": "x", "not": STR}}},
            ["definitions.y.not"],
        ),
        ({**OBJ, "properties": {"a": {"$ref": "#"}}, "minProperties": 3}, ["minProperties"]),
        ({"$dynamicAnchor": "n", **OBJ, "properties": {"c": {"$dynamicRef": "#n"}}}, ["properties.c.$dynamicRef"]),
        ({"oneOf": [STR, {"type": ["string", "null"]}]}, ["oneOf"]),
        ({**OBJ, "properties": {"a": {"oneOf": [STR, INT]}, "b": {"oneOf": [INT, INT]}}}, ["properties.b.oneOf"]),
        ({"anyOf": [STR, INT], "oneOf": [{"minLength": 1}, {"minimum": 1}]}, ["oneOf"]),
        ({**OBJ, "patternProperties": {"^x": STR, "y$": INT}}, ["patternProperties.y$"]),
        ({**OBJ, "patternProperties": {"^(?!x)": STR, "^z": INT}}, ["patternProperties.^(?!x)"]),
        (
            {**OBJ, "patternProperties": {"^(?!x)": STR}, "additionalProperties": False},
            ["additionalProperties", "patternProperties.^(?!x)"],
        ),
        ({**OBJ, "properties": {"a": STR, "b": STR}, "minProperties": 1}, ["minProperties"]),
        ({**INT, "multipleOf": 1_000_003}, ["multipleOf"]),
        ({"type": "number", "allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, ["allOf.1.multipleOf"]),
        ({**INT, "minimum": 2**64}, ["minimum"]),
        ({"type": "number", "minimum": 5e-324}, ["minimum"]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["exclusiveMinimum"]),
        ({"enum": [1, 2**53 + 1]}, ["enum"]),
        ({"const": {"id": [1e300]}}, ["const"]),
        ({**STR, "pattern": r"^\p{Cc}$"}, ["pattern"]),
        ({**OBJ, "properties": {"a": {**STR, "required": True}}}, ["properties.a.required"]),
        ({"extends": {"type": "string"}}, ["extends"]),
        ({**OBJ, "x-guidance": {"whitespace_flexible": True}}, ["x-guidance"]),
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_just_what_no_grammar_holds_is_left_out(schema, paths):
    given = json.dumps(schema)
    assert dropped(schema) == paths
    assert json.dumps(schema) == given
    if paths:
        fault = refusal(schema, strict=True)
        assert any(path in fault.message for path in paths)
    held(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {**STR, "uniqueItems": True},
        {**OBJ, "propertyNames": STR},
        {**OBJ, "propertyNames": True, "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
        {"then": STR, "else": INT},
        {"if": STR},
        {"not": False},
        {"type": "array", "minContains": 2, "maxContains": 3, "unevaluatedItems": {}},
        {**OBJ, "unevaluatedProperties": False, "additionalProperties": False},
        {"$dynamicAnchor": "x", "$recursiveAnchor": True, **OBJ},
        {**OBJ, "required": ["a", "b"], "minProperties": 2, "properties": {"a": STR}},
        {"$schema": "https://json-schema.org/draft-07/schema#", **OBJ},
        {"$schema": "http://example.com/mine", **OBJ, "properties": {"a": {"$schema": "x", **STR}}},
        {"type": "string", "contentEncoding": "base64", "nullable": True, "deprecated": True},
    ],
    ids=json.dumps,
)
def test_what_has_no_effect_is_no_matter(schema):
    assert not prepare(schema, param="schema", strict=True).dropped
    held(schema)


@pytest.mark.parametrize("keyword", [key for key in UNHELD if key not in ("extends", "disallow", "divisibleBy")])
def test_llguidance_still_does_not_hold(keyword):
    """When one of these fails, llguidance has learnt the keyword: its row goes."""
    source = LLMatcher.grammar_from_json_schema({keyword: {}})
    assert f'"{keyword}"' in LLMatcher(vocabulary(), source, log_level=0).get_error()
    assert set(NO_EFFECT) <= set(UNHELD)


@pytest.mark.parametrize(
    ("schema", "wrong", "right"),
    [
        ({**OBJ, "properties": {"a": INT}}, r'{"\u0061":"x"}', r'{"a":1,"b\n":"\""}'),
        ({**STR, "pattern": '^[^"]$'}, r'"\""', '"a"'),
        ({**STR, "pattern": r"^[^\\/]$"}, r'"\\"', '"a"'),
        ({**STR, "pattern": r"^[\x00-\x1f]$"}, r'"\""', r'"\n"'),
        ({**STR, "pattern": "^[a-z&&b]$"}, None, '"c"'),
        ({**STR, "pattern": "^[[a]+$"}, '"b"', '"[a"'),
        ({**OBJ, "minProperties": 3, "required": ["a"]}, None, '{"a":1,"b":2,"c":3}'),
        ({**INT, "maximum": 999_999_999_999_999_999}, "1000000000000000000", "999999999999999872"),
        ({**INT, "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**63), str(2**53 + 1)),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, None, "1234567.5"),
        ({"type": "number", "exclusiveMinimum": 1, "minimum": 1, "maximum": 9}, "1", "1.5"),
        ({"enum": ["a", 2**53]}, '"b"', str(2**53)),
    ],
    ids=lambda part: str(part)[:60],
)
def test_what_llguidance_holds_wrongly_is_put_right(schema, wrong, right):
    matcher = held(schema)
    assert accepts(matcher, right)
    assert wrong is None or not accepts(matcher, wrong)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({**OBJ, "properties": {"a": INT}}, r'{"\u0061":"x"}'),
        ({**STR, "pattern": '^[^"]$'}, r'"\""'),
        ({**OBJ, "minProperties": 2}, '{"a":1,"a":2}'),
        ({**INT, "maximum": 999_999_999_999_999_999}, "1000000000000000000"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "1"),
        ({"enum": [2**53 + 1]}, str(2**53)),
    ],
    ids=lambda part: str(part)[:60],
)
def test_llguidance_alone_holds_it_wrongly(schema, wrong):
    """The other leg. When one of these fails, the fault is cured there: what stands against it here goes."""
    assert accepts(LLMatcher(vocabulary(), LLMatcher.grammar_from_json_schema(schema), log_level=0), wrong)


WALKED = [
    {**OBJ, "minProperties": 1, "maxProperties": 2, "additionalProperties": INT},
    {
        **OBJ,
        "properties": {"ab": {"type": ["integer", "string"]}},
        "patternProperties": {"^a": INT},
        "additionalProperties": STR,
    },
    {**OBJ, "patternProperties": {"a": INT}, "additionalProperties": STR},
    {
        **OBJ,
        "properties": {"a": INT, "é": STR, 'q"': INT},
        "required": ["z", "a"],
        "additionalProperties": {"type": "boolean"},
    },
    {**OBJ, "properties": {"a": INT, "b": INT, "c": INT}, "additionalProperties": False, "minProperties": 1},
    {"enum": ["a", "bb", 1, 2.5, None, {"a": [1]}], "anyOf": [{"maxLength": 1}, INT, OBJ]},
    {**STR, "pattern": '^[^\\\\/:*?"<>|]+$', "maxLength": 4},
    {**STR, "minLength": 2, "maxLength": 3, "pattern": "^.*a"},
    {**STR, "format": "date", "pattern": "^2"},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
    {**INT, "multipleOf": 3, "minimum": 4, "maximum": 20},
    {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": STR}, "required": ["a"]}], **OBJ},
    {**OBJ, "properties": {"a": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [STR, INT, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {"$schema": D7, "type": "array", "items": [STR, INT], "additionalItems": False, "minItems": 1},
    {"$defs": {"a/b~c%": STR}, "$ref": "#/$defs/a~1b~0c%25", "maxLength": 2},
    {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"properties": {"a": False}, "patternProperties": {"^b": True}, "additionalProperties": STR},
    True,
]


@pytest.mark.parametrize("schema", WALKED, ids=json.dumps)
def test_whatever_the_grammar_allows_is_valid(schema):
    prepared = prepare(schema, param="schema", strict=True)
    ends = check_walks(schema, compiled(prepared), json.dumps(schema), 12, length=20, limit=200)
    assert ends["ended"]


def test_white_space_is_capped_between_parts_and_free_in_strings():
    matcher = held(
        {**OBJ, "properties": {"a": {"type": "array", "items": INT}, "s": STR}, "additionalProperties": False}
    )
    nested = held({"type": "array", "items": {"$ref": "#"}})
    deep: list = []
    for _ in range(7):
        deep = [deep]
    for text in (
        '{"a":[1,2],"s":""}',
        '{"a": [1, 2], "s": ""}',
        '{ "a" : [ 1 ] , "s" : "" }',
        '{\n  "a": [\n    1\n  ]\n}',
    ):
        assert accepts(matcher, text)
    assert accepts(nested, json.dumps(deep, indent=4)) and accepts(nested, "[\n" + " " * 32 + "[]]")
    assert accepts(matcher, json.dumps({"s": "a" + " " * 99 + "\n\n\n\t"}))
    for text in ('{"a":[1]\n\n}', "{  }", "{\n" + " " * 33 + "}", "{\t}", "{\r\n}", " {}", "{} ", "{}\n", "\n{}"):
        assert not accepts(matcher, text)


def test_a_closed_object_may_hold_any_escape_and_an_open_one_the_short_ones():
    closed = {**OBJ, "properties": {"a": STR}, "additionalProperties": False}
    assert accepts(held(closed), r'{"a":"\u001b\u00e9\ud83d\ude00\n"}') and not accepts(held(closed), r'{"a":"\ud83d"}')
    assert accepts(held({**OBJ, "properties": {"a": STR}}), r'{"a":"\n\t\"\\é😀"}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "no value fits"),
        (None, "a schema is an object"),
        ([], "a schema is an object"),
        ({"type": "text"}, "Invalid type: text"),
        ({**OBJ, "properties": {"a": {"type": "text"}}}, "properties.a.type: Invalid type"),
        ({**OBJ, "properties": {"a": {"items": {**STR, "minLength": -1}}}}, "properties.a.items.minLength"),
        ({"properties": []}, "properties must be an object"),
        ({"anyOf": [{"enum": 1}, STR]}, "anyOf.0"),
        ({"enum": []}, "nsatisfiable"),
        ({**INT, "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"$ref": "http://example.com/s.json"}, "example.com"),
        ({**OBJ, "properties": {"a": {"$ref": "#/$defs/none"}}}, "properties.a.$ref: Pointer"),
        ({"const": "\ud800"}, "hex escape"),
        ({"type": "number", "minimum": float("inf")}, "not JSON"),
    ],
    ids=lambda part: str(part)[:60],
)
def test_what_is_wrong_is_said_with_its_place(schema, words):
    assert words in refusal(schema).message


def nested(levels: int):
    schema: dict = STR
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(levels: int):
    links = {
        str(n): {**OBJ, "properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}, "required": ["a"]} for n in range(levels)
    }
    return {"$ref": "#/$defs/0", "$defs": {**links, str(levels): STR}}


HOSTILE = {
    "10,000 properties": lambda: {**OBJ, "properties": {f"p{n}": STR for n in range(10_000)}},
    "100,000 choices": lambda: {"enum": [f"value {n}" for n in range(100_000)]},
    "1,000 levels": lambda: nested(1000),
    "300 levels": lambda: nested(300),
    "300 patterns": lambda: {**OBJ, "patternProperties": {f"^a{n}b": STR for n in range(300)}},
    "a product": lambda: {
        "allOf": [{"anyOf": [{**OBJ, "required": [f"{n}.{m}"]} for m in range(5)]} for n in range(10)]
    },
    "9,000 links": lambda: chain(9000),
}
GREAT = {
    "2 MB of text": lambda: {**OBJ, "properties": {f"p{n}": {**STR, "description": "x" * 20_000} for n in range(100)}},
    "100 levels": lambda: nested(100),
    "900 links": lambda: chain(900),
    "an unclosed class": lambda: {**STR, "pattern": "[" * 1_000_000},
    "a great multiple": lambda: {**INT, "multipleOf": 10_000_019},
    "500 unions": lambda: {**OBJ, "properties": {f"p{n}": {"oneOf": [INT, {"type": "number"}]} for n in range(500)}},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_soon(name):
    assert "too complex" in refusal(HOSTILE[name]()).message


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", GREAT)
def test_great_schemas_come_to_an_end(name):
    outcome = []
    threading.Thread(target=lambda: outcome.append(held(GREAT[name]()))).start()
    while not outcome:
        time.sleep(0.01)
    assert allowed(outcome[0])


def test_a_schema_seen_before_is_not_read_again():
    schema = {**OBJ, "properties": {"a": {**STR, "format": "odd"}}}
    assert prepare(schema, param="a") is prepare(json.loads(json.dumps(schema)), param="b")


KEYWORDS = st.sampled_from(
    sorted({*UNHELD, *BOUNDS, *CHILDREN, "type", "$ref", "$defs", "const", "enum", "pattern", "format"})
)
ODD = st.sampled_from(
    ["#", "#/$defs/a", "[", "^(?!a)", "string", "object", "integer", -1, 1, 2.5, 2**70, True, False, None]
)
SCHEMAS = st.recursive(
    ODD, lambda some: st.lists(some, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), some), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS)
def test_anything_at_all_ends_in_a_schema_or_a_refusal(schema):
    try:
        prepared = prepare(schema, param="schema")
    except Refused as refused:
        assert refused.param == "schema" and refused.message.startswith("schema: ")
    else:
        assert compiled(prepared).get_error().startswith(("", "NoExtension"))


NUMBER = st.sampled_from([-300, -1, 0, 1, 2, 5, 199, 201, 2**70, 1.5, True, "1"])
KIND = st.sampled_from([*sorted(KINDS), "odd", ["string"], ["null", "object"], ["a"], [{}], [], ["null"] * 2, None])
PLAIN = st.recursive(
    st.fixed_dictionaries(
        {"type": KIND},
        optional={key: NUMBER for key in ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")}
        | {"enum": st.lists(st.sampled_from(["a", "é", "", "\x01", 1]), max_size=3), "description": st.just("x")}
        | {"pattern": st.sampled_from(["^a", "b+"]), "format": st.sampled_from(["date", "uuid"])},
    ),
    lambda some: (
        st.fixed_dictionaries(
            {"type": st.sampled_from(["object", "array"])},
            optional={
                "properties": st.dictionaries(st.sampled_from(["a", "b", "", "\x7f"]), some, max_size=3),
                "required": st.lists(st.sampled_from(["a", "b", "c", 1]), max_size=3),
                "additionalProperties": some | st.booleans() | st.none(),
                "items": some | st.booleans(),
                "minItems": NUMBER,
            },
        )
        | st.fixed_dictionaries({"anyOf": st.lists(some, max_size=3)}, optional={"type": st.just("object")})
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(PLAIN)
def test_llguidance_takes_whatever_is_plain(schema):
    if all(is_plain(each) for _, each in _reachable(schema)):
        assert error_of(schema) == ""


def test_what_is_plain_in_the_sample_is_taken():
    plain = 0
    for case in sample():
        if isinstance(case["schema"], dict) and all(is_plain(each) for _, each in _reachable(case["schema"])):
            plain += 1
            assert error_of(case["schema"]) == ""
    assert plain > 2


def main() -> None:
    started = time.time()
    totals: collections.Counter = collections.Counter()
    for case in sample():
        try:
            totals += judge(case)
        except AssertionError as fault:
            totals[f"FAULT {case['name']}: {fault}"] += 1
    for word, count in sorted(totals.items()):
        print(f"{count:6} {word}")
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    os.environ["SCHEMAS"] = "all"
    main()
