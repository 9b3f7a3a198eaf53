"""How much later a reply's first token comes: differences in milliseconds, medians of interleaved pairs.

On the scripted model with o200k_harmony's tokens, whose prompts cost nearly nothing and whose first token is text. What
is new has a name that no request had before. Tools stand in the prompt, so mlx_lm.server is asked with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.bench.replies import HARD, MEDIUM, PLAIN, STORY, ask, numbers, servers, spread
from tests.harmony_vocabulary import folder as o200k
from tests.tiny_models import model_folder


class Case(NamedTuple):
    """`one`, `other`: (server, the body of a request, by a name that is new or not); the row is their difference."""

    what: str
    target: str
    one: tuple[str, Any]
    other: tuple[str, Any]


def schema(kind: dict):
    def body(name: str) -> dict:
        known = {"type": "object", "properties": {name: kind}, "required": [name]}
        return PLAIN | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": known}}}

    return body


def tools(count: int, **more):
    def body(name: str) -> dict:
        parameters = {"type": "object", "properties": {name: MEDIUM}, "required": [name]}
        names = (f"tool_{n}" for n in range(count))
        functions = [{"name": name, "description": "It does it.", "parameters": parameters} for name in names]
        return {"tools": [{"type": "function", "function": function} for function in functions], **more}

    return body


def plain(name: str) -> dict:
    return PLAIN


STRING = {"type": "string"}
NEW = [
    Case("small schema, new", "+3", ("ours", schema(STRING)), ("ours", plain)),
    Case("medium schema, new", "+3", ("ours", schema(MEDIUM)), ("ours", plain)),
    Case("anyOf of 80 objects, new", "", ("ours", schema(HARD)), ("ours", plain)),
    Case("58 tools, new, ours − mlx_lm.server", "+30", ("ours", tools(58, **PLAIN)), ("mlx_lm", tools(58))),
    Case("139 tools, new, ours − mlx_lm.server", "", ("ours", tools(139, **PLAIN)), ("mlx_lm", tools(139))),
    Case("3 tools, new, ours − mlx_lm.server", "", ("ours", tools(3, **PLAIN)), ("mlx_lm", tools(3))),
    Case(
        "58 tools, new, required − auto",
        "+30",
        ("ours", tools(58, tool_choice="required", **PLAIN)),
        ("ours", tools(58, **PLAIN)),
    ),
]
SEEN = [
    Case("plain, ours − mlx_lm.server", "0", ("ours", plain), ("mlx_lm", lambda name: {})),
    Case("small schema, seen before", "+1", ("ours", schema(STRING)), ("ours", plain)),
    Case("medium schema, seen before", "+1", ("ours", schema(MEDIUM)), ("ours", plain)),
    Case("58 tools, seen before, ours − mlx_lm.server", "", ("ours", tools(58, **PLAIN)), ("mlx_lm", tools(58))),
    Case("the same twice (noise)", "0", ("ours", plain), ("ours", plain)),
]


def table(short: bool) -> Iterator[str]:
    yield "| what | target, ms | later by, ms: median (quartiles) | pairs |"
    yield "| --- | --- | --- | --- |"
    rounds = 1 if short else 25
    found = servers(model_folder("scripted", tokenizer=str(o200k()), tools="json_tools"))
    try:
        for case in SEEN[1:2] if short else [*SEEN, *NEW]:
            later = []
            for n in range(-2, rounds):
                name = "same" if case in SEEN else f"name_{next(numbers)}"
                sides = [case.one, case.other][:: -1 if n % 2 else 1]
                firsts = [first(found[server], body(name)) for server, body in sides][:: -1 if n % 2 else 1]
                later.append(1000 * (firsts[0] - firsts[1]))
            yield f"| {case.what} | {case.target} | {spread(later[2:], '{:.1f}')} | {rounds} |"
    finally:
        for server in found.values():
            server.stop()


def first(server, body: dict) -> float:
    """Seconds from the request to its first piece of text."""
    reply = ask(server, f"{next(numbers)}. {STORY}", max_tokens=3, **body)
    return reply.times[0] - reply.begun
