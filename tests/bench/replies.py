"""Rates of whole replies over HTTP: each row is the ratio of two kinds of streamed replies, in interleaved pairs.

Both servers run at once on the same model; of a pair, one is measured after the other, in turns first. A reply's rate
is its tokens from the first to the last by the time between; that of replies side by side is their tokens while all of
them run, by that time. `demo` is SmolLM2-135M, `wide` a tiny random model with the 201,088 tokens of o200k_harmony,
whose step is nearly all vocabulary. Arrays under a schema are long enough that max_tokens ends every reply.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from mlx_patches import demo_model
from tests.client import chat_stream, together
from tests.conftest import Server
from tests.harmony_vocabulary import folder as o200k
from tests.tiny_models import model_folder

STORY = "Write a long story about a lighthouse keeper, his dog and the sea."
LONG = "The keeper counts the ships and writes them down, and the dog sleeps near the warm stove. " * 110
PLAIN = {"reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
BUDGET = PLAIN | {"reasoning_budget": 100_000}
LOOPS = PLAIN | {"limit_answers": True, "hedge_limit": 100_000, "repeat_limit": 100_000}
LIMITS = BUDGET | LOOPS | {"reasoning_budget": 100_000}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}
TOOLS = {"tools": [TOOL]}
WORDS = {"type": "string", "maxLength": 200}
SMALL = {"type": "object", "properties": {"name": WORDS, "age": {"type": "integer"}}, "required": ["name", "age"]}
MEDIUM = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "kind": {"enum": ["order", "invoice", "offer", "reminder"]},
        "date": {"type": "string", "format": "date-time"},
        "customer": {"type": "object", "properties": {"name": WORDS, "mail": WORDS}, "required": ["name", "mail"]},
        "lines": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 5},
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["id", "kind", "date", "customer", "lines", "paid"],
    "additionalProperties": False,
}
HARD = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": f"kind_{n}"}, f"field_{n}": MEDIUM["properties"]["lines"], "note": WORDS},
            "required": ["kind", f"field_{n}", "note"],
            "additionalProperties": False,
        }
        for n in range(80)
    ]
}
ITEMS = {"small": SMALL, "medium": MEDIUM, "hard": HARD}


def schema(size: str) -> dict:
    """A request's fields for an array that does not end of itself."""
    items = {"type": "array", "items": ITEMS[size], "minItems": 1000}
    return PLAIN | {"response_format": {"type": "json_schema", "json_schema": {"name": size, "schema": items}}}


class Case(NamedTuple):
    """`one`, `other`: (server, the bodies of the replies that run side by side); the row is their ratio.

    `quick`: on the wide model alone, whose steps are.
    """

    what: str
    target: str
    one: tuple[str, list[dict]]
    other: tuple[str, list[dict]]
    prompt: str = STORY
    quick: bool = False


LONG_PROMPT = {"max_tokens": 32}
CASES = [
    Case("plain, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN]), ("mlx_lm", [{}])),
    Case(
        "plain, 4 side by side, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN] * 4), ("mlx_lm", [{}] * 4), quick=True
    ),
    Case("plain, 8 side by side, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN] * 8), ("mlx_lm", [{}] * 8)),
    Case("plain, prompt of 2,000 tokens, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN]), ("mlx_lm", [{}]), LONG),
    Case("thinking budget / off", "≥ 0.98", ("ours", [BUDGET]), ("ours", [PLAIN]), quick=True),
    Case("loop limits, answer judged / off", "≥ 0.98", ("ours", [LOOPS]), ("ours", [PLAIN]), quick=True),
    Case("all limits / mlx_lm.server", "≥ 0.98", ("ours", [LIMITS]), ("mlx_lm", [{}])),
    Case("small schema / plain", "≥ 0.97", ("ours", [schema("small")]), ("ours", [PLAIN])),
    Case("medium schema / plain", "≥ 0.97", ("ours", [schema("medium")]), ("ours", [PLAIN])),
    Case("hard schema / plain", "≥ 0.97", ("ours", [schema("hard")]), ("ours", [PLAIN])),
    Case(
        "schema, prompt of 2,000 tokens / plain", "≥ 0.97", ("ours", [schema("medium")]), ("ours", [PLAIN]), LONG, True
    ),
    Case(
        "4 schemas side by side / 4 plain",
        "≥ 0.96",
        ("ours", [schema("medium")] * 4),
        ("ours", [PLAIN] * 4),
        quick=True,
    ),
    Case("8 schemas side by side, alike / 8 plain", "≥ 0.96", ("ours", [schema("medium")] * 8), ("ours", [PLAIN] * 8)),
    Case(
        "8 side by side, mixed / 8 plain",
        "≥ 0.96",
        ("ours", [*map(schema, ITEMS), *map(schema, ITEMS), LIMITS, PLAIN]),
        ("ours", [PLAIN] * 8),
        quick=True,
    ),
    Case("tools in auto, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN | TOOLS]), ("mlx_lm", [TOOLS])),
    Case("the same twice (noise)", "1", ("ours", [PLAIN]), ("ours", [PLAIN])),
    Case("8 side by side, the same twice (noise)", "1", ("ours", [PLAIN] * 8), ("ours", [PLAIN] * 8), quick=True),
]
THINKING = [
    Case(
        "schema after 32 tokens of thinking / plain",
        "≥ 0.97",
        ("ours", [schema("medium") | {"reasoning_budget": 32}]),
        ("ours", [PLAIN]),
    ),
]
DRAFT = [
    Case("draft model, plain, ours / mlx_lm.server", "≥ 0.99", ("ours", [PLAIN]), ("mlx_lm", [{}])),
    Case("draft model, small schema / plain", "≥ 0.97", ("ours", [schema("small")]), ("ours", [PLAIN])),
]
FLAGS = ("--prompt-cache-size", 0)  # mlx_lm's draft loop answers wrongly with its prompt cache, and its memory is even


def wide(**options):
    return model_folder("llama", tokenizer=str(o200k()), **options)


def servers(folder, *flags) -> dict[str, Server]:
    module = {"ours": "mlx_patched_server", "mlx_lm": "mlx_lm.server"}
    return {name: Server(folder, *FLAGS, *flags, module=module[name]) for name in module}


numbers = count()


class Timed(NamedTuple):
    """`begun`: when the request was sent; `times`: when each piece of text came, in seconds of time.monotonic()."""

    begun: float
    times: list[float]
    tokens: int


def ask(server, prompt: str, **body) -> Timed:
    begun = time.monotonic()
    reply = chat_stream(server, prompt, timeout=900, **body)
    if reply.status != 200 or reply.error:
        raise RuntimeError(f"{server} answered {reply.raw[-300:]!r}")
    said = zip(reply.times, reply.chunks, strict=True)
    times = [begun + at for at, chunk in said if any(map(says, chunk["choices"]))]
    return Timed(begun, times, reply.usage["completion_tokens"])


def says(choice: dict) -> bool:
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning", "tool_calls"))


def measure(server, bodies: list[dict], prompt: str, tokens: int) -> float:
    """Tokens a second of replies side by side while all of them run."""
    asked = {"call": ask, "max_tokens": tokens}
    replies = together(server, [{**asked, "prompt": f"{next(numbers)}. {prompt}", **body} for body in bodies])
    begin, end = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    came = 0.0
    for reply in replies:  # a piece of text may be several tokens
        came += sum(begin < at <= end for at in reply.times) * reply.tokens / len(reply.times)
    return came / (end - begin)


def pairs(case: Case, found: dict[str, Server], rounds: int, tokens: int) -> list[float]:
    ratios = []
    for n in range(rounds):
        sides = [case.one, case.other][:: -1 if n % 2 else 1]
        rates = [measure(found[name], bodies, case.prompt, tokens) for name, bodies in sides][:: -1 if n % 2 else 1]
        ratios.append(rates[0] / rates[1])
    return ratios


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """The median, and the quartiles where there are some."""
    if len(values) == 1:
        return form.format(values[0])
    low, middle, high = map(form.format, statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({low} to {high})"


def table(short: bool) -> Iterator[str]:
    yield "| model | what | target | ratio: median (quartiles) | pairs × tokens |"
    yield "| --- | --- | --- | --- | --- |"
    demo, tiny = demo_model.folder(), wide()
    groups = [("wide", tiny, (), CASES, 15, 128), ("wide", wide(style="think"), (), THINKING, 15, 128)]
    slow = [case for case in CASES if not case.quick]
    groups += [("demo", demo, (), slow, 5, 64), ("demo", demo, ("--draft-model", demo), DRAFT, 5, 64)]
    if short:
        groups = [("wide", tiny, (), [CASES[0], *(case for case in CASES if "medium" in case.what)], 1, 8)]
    for model, folder, flags, cases, rounds, tokens in groups:
        found = servers(folder, *flags)
        try:
            for case in cases:
                for name, bodies in (case.one, case.other):  # grammars compiled, pages touched
                    measure(found[name], bodies, case.prompt, 8)
                ratios = pairs(case, found, rounds, tokens)
                yield f"| {model} | {case.what} | {case.target} | {spread(ratios)} | {rounds} × {tokens} |"
        finally:
            for server in found.values():
                server.stop()
