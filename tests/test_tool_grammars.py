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
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import load

from localServerCommon import Refused
from mlx_patches.json_schemas import prepare
from mlx_patches.structured_output import build_tokenizer
from mlx_patches.tool_arguments import Calls
from mlx_patches.tool_grammars import FORMATS, Tool, call_rules, literal
from tests.test_schema_sample import CLOSERS, cases
from tests.tiny_models import model_folder

ENDS = (*CLOSERS, "<", ">", "</", "|", "e", "n", "t", "1")
STEPS = 400


@lru_cache
def vocabulary():
    """(mlx_lm's tokenizer, llguidance's, the tokens that end things)."""
    tokenizer = load(model_folder("llama"))
    width = 1 + max(tokenizer.get_vocab().values())
    spelled = [tokenizer.decode([token]) for token in range(width)]
    ends = np.array([text in ENDS for text in spelled])
    return tokenizer, build_tokenizer(tokenizer, width, tokenizer.eos_token_ids), ends


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
    reader = Calls(name, parser.parse_tool_call, parser.tool_call_start, parser.tool_call_end, tools)
    calls, rest = reader.read(text, known=False)
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
        calls = call_rules(FORMATS[name], tools, {}, several=True)
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


def test_special_tokens_stand_by_their_ids():
    assert literal('<a>\n"x"<b>', {"<a>": 3, "<b>": 7}) == r'<[3]> "\n\"x\"" <[7]>'
    assert literal("plain", {}) == '"plain"'


if __name__ == "__main__":
    failed = False
    for each in sys.argv[1:] or NAMES:
        found, faults = run(each, tool_sets(100), 5)
        print(each, dict(found))
        print("\n".join(faults[:5]))
        failed |= bool(faults)
    sys.exit(failed)
