"""Honest long texts under the default reply limits: none is cut, but where a rule of the limits names what it holds.

A case with `cut` is honest too: it shows what a rule costs, and `why` says which rule. Its text has no fault else.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from mlx_patches.reply_limits import EVERY, LoopJudge
from tests.client import together
from tests.tiny_models import train_tokenizer

NAMES = ["Anna", "Peter", "Maria", "John", "Olga", "Paul", "Rosa", "Emil", "Vera", "Hugo", "Ines"]
THINGS = [
    "apples",
    "bread",
    "milk",
    "water",
    "coffee",
    "letters",
    "trains",
    "books",
    "stones",
    "lamps",
    "boats",
    "nets",
]
COLORS = ["red", "green", "blue", "black", "white", "grey", "brown"]
PLACES = ["Paris", "London", "Berlin", "Tokyo", "the harbour", "the mill", "the old bridge", "the market", "the hill"]
DEEDS = ["carried", "counted", "sold", "hid", "painted", "lost", "found", "mended"]


def one(words, n):
    return words[n % len(words)]


def scene(n) -> str:
    """The n-th of hundreds of different sentences."""
    return (
        f"{one(NAMES, n)} {one(DEEDS, n * 3 + n // 8)} the {one(COLORS, n)} {one(THINGS, n * 5)} near {one(PLACES, n)}"
    )


class Case(NamedTuple):
    write: Callable[[], str]
    cut: str | None = None
    why: str = ""


CASES: dict[str, Case] = {}


def honest(function=None, cut=None, why=""):
    def keep(function):
        CASES[function.__name__] = Case(cache(function), cut, why)
        return function

    return keep(function) if function else keep


@honest
def proof():
    lines = ["Claim: the sum of the first n odd numbers is the square of n, for every n up to 120."]
    for n in range(1, 121):
        lines.append(
            f"Step {n}. By step {n - 1} the sum so far is {(n - 1) ** 2}, and the next odd number is {2 * n - 1}. "
            f"Hence the sum is {(n - 1) ** 2} + {2 * n - 1} = {n * n}, which is the square of {n}, as claimed."
        )
    return "\n".join([*lines, "This ends the proof."])


@honest(cut="repeats", why="a step's number ends in a full stop, so its justification is a sentence that comes again")
def proof_of_one_justification():
    step = "Step {}. The case n = {} gives {}. This follows from the induction hypothesis and from Lemma 2."
    return "\n".join(step.format(n, n, n * n) for n in range(1, 121))


@honest(cut="hedges", why="`Let me verify` counts however honest, here more than 12 times within the window")
def proof_that_verifies_each_case():
    return " ".join(f"Let me verify the case n = {n}: {n} squared is {n * n}, as it must be." for n in range(1, 140))


@honest
def table():
    head = "| number | name | thing | colour | price |\n| --- | --- | --- | --- | ---: |\n"
    return head + "".join(
        f"| {n} | {one(NAMES, n)} | {one(THINGS, n)} | {one(COLORS, n)} | {n * 37 % 991}.50 |\n" for n in range(300)
    )


@honest
def tables():
    head = "| name | thing | price |\n| --- | --- | --- |\n"
    return "\n".join(
        f"## Day {day}\n\n{head}"
        + "".join(f"| {one(NAMES, day + n)} | {one(THINGS, day * n)} | {day * 31 + n} |\n" for n in range(5))
        for day in range(60)
    )


@honest(cut="repeats", why="a separator of 40 columns is a block of 24 characters that comes back to back six times")
def table_of_many_columns():
    rows = ["| " + " | ".join(str(row * 97 + n * 7) for n in range(40)) + " |" for row in range(40)]
    return "\n".join([*rows[:20], "", rows[20], "|" + "---|" * 40, *rows[21:]])


@honest
def python():
    parts = ['"""Records."""\n\nfrom dataclasses import dataclass\n']
    for n in range(60):
        name = f"{one(NAMES, n)}{one(THINGS, n).title()}"
        parts.append(
            f"\n\nclass {name}:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n"
            f"        self.items = []\n\n    def find(self, key):\n        if key not in self.items:\n"
            f"            return None\n        return self.items[key]\n\n    def area(self):\n"
            f"        return self.x * self.y + {n}\n\n    def __repr__(self):\n        return f'{name}({{self.x}})'\n"
        )
    return "".join(parts)


@honest(cut="repeats", why="one and the same line of six words or more, a signature and an error, in every class")
def python_of_long_lines():
    return "\n\n".join(
        f"class {one(NAMES, n)}{n}:\n    def scale(self, x, y, z, by, upto=None):\n        if by <= 0:\n"
        f'            raise ValueError("the factor must be greater than zero")\n        return x * by + {n}\n'
        for n in range(90)
    )


@honest
def c_code():
    parts = ["#include <stdio.h>\n#include <stdlib.h>\n"]
    for n in range(60):
        thing, color = one(THINGS, n), one(COLORS, n)
        parts.append(
            f"\nstatic int {color}_{thing}_{n}(const int *values, size_t n)\n{{\n    int sum = 0;\n"
            f"    if (!values)\n        return -1;\n"
            f"    while (n-- > 0) {{\n        sum += values[n] * {n + 2};\n    }}\n"
            f'    printf("%d\\n", sum);\n    return sum;\n}}\n'
        )
    return "".join(parts)


@honest(cut="repeats", why="the head of a for loop, one and the same line of nine words, is in every function")
def c_code_of_for_loops():
    return "\n".join(
        f"int {one(COLORS, n)}_{n}(const int *a, int n)\n{{\n    int sum = {n};\n"
        f"    for (int i = 0; i < n; i++) {{\n        sum += a[i];\n    }}\n    return sum;\n}}\n"
        for n in range(90)
    )


@honest(cut="repeats", why="48 zeros in a row are a block of 24 characters that comes back to back six times")
def c_table_of_zeros():
    rows = [", ".join(str((row * 31 + n * 17) % 250) for n in range(16)) + "," for row in range(120)]
    return "static const int table[] = {\n" + "\n".join([*rows[:60], "0, " * 120, *rows[60:]]) + "\n};\n"


def poem_of(refrain, lines, stanzas):
    return "\n\n".join(
        "\n".join([*(scene(stanza * lines + n) + "," for n in range(lines)), refrain]) for stanza in range(stanzas)
    )


@honest
def poem():
    return poem_of("And the river runs on to the sea.", 90, 6)


@honest
def poem_of_a_short_refrain():
    return poem_of("And the river runs on.", 4, 60)


@honest(cut="repeats", why="a refrain of six words or more that comes more than 3 times within 2,048 tokens")
def poem_of_short_stanzas():
    return poem_of("And the river runs on to the sea.", 4, 60)


@honest
def similar_sentences():
    return "\n".join(
        f"{n}. {one(NAMES, n)} has {n * 3} {one(THINGS, n)} and gives {n} of them to {one(NAMES, n * 7 + 3)}."
        for n in range(1, 201)
    )


@honest
def check_list():
    return "\n".join(
        f"{n}. Check that the valve is closed.\n{n}a. {scene(n)}." if n % 4 == 0 else f"{n}. {scene(n)}."
        for n in range(1, 160)
    )


@honest
def json_records():
    records = [
        {"id": n, "name": one(NAMES, n), "status": "done", "error": None, "tags": ["x", "y"], "count": n * 7}
        for n in range(120)
    ]
    return json.dumps(records, indent=2)


@honest
def json_lines():
    record = '{{"id": {}, "name": "{}", "status": "done", "error": null, "tags": ["x", "y"], "ok": true}}\n'
    return "".join(record.format(n, one(NAMES, n)) for n in range(160))


@honest(cut="repeats", why="one and the same line of six words or more in every record")
def json_of_long_lines():
    address = '"address": {"city": "Paris", "code": 75001, "country": "France"}'
    return "[\n" + ",\n".join(f'  {{"id": {n},\n   {address}}}' for n in range(130)) + "\n]"


def dialogue_of(lines, every):
    said = []
    for n in range(lines):
        opening = "Wait, " if n % every == every // 2 else ""
        said.append(f'{one(NAMES, n)}: "{opening}I heard in year {1900 + n} that {scene(n)}."')
    return "\n".join(said)


@honest
def dialogue():
    return dialogue_of(84, 7)  # a dozen of them


@honest
def dialogue_of_a_long_day():
    return dialogue_of(440, 11)  # 40 of them, never more than 12 within the window


@honest(cut="hedges", why="`Wait,` counts in anyone's mouth, here more than 12 times within the window")
def dialogue_of_hasty_people():
    return dialogue_of(132, 2)


@honest
def log_file():
    return "\n".join(
        f"2024-05-{1 + n // 60:02d} 10:{n % 60:02d}:{n * 7 % 60:02d} INFO server: "
        f"GET /v1/{one(THINGS, n)} 200 {n * 13} ms"
        for n in range(160)
    )


@honest(cut="repeats", why="one and the same line without a time, six times back to back, is a loop of blocks")
def log_file_without_times():
    lines = [f"INFO server: {scene(n)}" for n in range(160)]
    return "\n".join([*lines[:80], *["WARN server: no reply, again"] * 14, *lines[80:]])


def multiplication_of(step, factors):
    parts = []
    for a, b in factors:
        parts.append(f"{a} x {b}:")
        for place, digit in enumerate(reversed(str(b))):
            carry = 0
            for column, other in enumerate(reversed(str(a))):
                value = int(digit) * int(other) + carry
                parts.append(step.format(a, b, place, column, digit, other, carry, value, value % 10, value // 10))
                carry = value // 10
            parts.append(f"Row {place} is {a * int(digit) * 10**place}.")
        parts.append(f"The sum of the rows is {a * b}.")
    return "\n".join(parts)


FACTORS = [(48391, 7264), (90217, 5836), (36485, 9172), (71529, 4683)]


@honest
def multiplication():
    step = "{0} x {1}, row {2}, column {3}: {4} times {5} plus {6} is {7}, write {8} and carry {9}."
    return multiplication_of(step, FACTORS)


@honest(cut="repeats", why="there are few digits: what is written and carried is soon the same sentence again")
def multiplication_in_words():
    return multiplication_of("{4} times {5} plus {6} is {7}. Write down {8} and carry the {9}.", FACTORS * 2)


def recipes_of(first):
    return "\n\n".join(
        f"## {one(COLORS, n).title()} {one(THINGS, n)} of {one(NAMES, n)}\n\n- {100 + n * 5} g flour\n- {n + 1} eggs\n"
        f"- 1 pinch of salt\n\n{first.format(150 + n)} Stir the eggs and {100 + n * 5} g of flour for {n + 2} minutes. "
        f"Bake it all for {20 + n} minutes. Serve warm."
        for n in range(60)
    )


@honest
def recipes():
    return recipes_of("Heat the oven to {} degrees.")


@honest(cut="repeats", why="the same first sentence of six words in every recipe")
def recipes_of_one_oven():
    return recipes_of("Preheat the oven to 180 degrees.")


@honest
def csv():
    return "id,name,thing,colour,place,price\n" + "".join(
        f"{n},{one(NAMES, n)},{one(THINGS, n)},{one(COLORS, n)},,{n * 37 % 991}.50\n" for n in range(240)
    )


@cache
def tokenizer():
    return train_tokenizer()


def tiny_tokens(text) -> list[str]:
    return [text[begin:end] for begin, end in tokenizer().encode(text).offsets]


def words(text) -> list[str]:
    """Tokens of a large vocabulary, or larger than any: the window holds twice the text of tiny ones."""
    return re.findall(r" ?\w+|\s+| ?[^\w\s]+", text)


def judge(tokens, every=EVERY) -> str | None:
    loops = LoopJudge(12, 3)
    for token in tokens:
        loops.take(token)
        if loops.tokens % every == 0 and (cut := loops.judge()):
            return cut
    return None


@pytest.mark.parametrize("name", CASES)
def test_what_is_cut_of_honest_texts(name):
    text, tokens = CASES[name].write(), tiny_tokens(CASES[name].write())
    assert text.isascii() and "".join(tokens) == text
    assert len(tokens) >= 3000
    assert judge(tokens) == CASES[name].cut
    assert bool(CASES[name].cut) == bool(CASES[name].why)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.cut])
def test_that_is_no_luck_of_the_sixteenth_token_nor_of_small_ones(name):
    text = CASES[name].write()
    assert judge(tiny_tokens(text), every=1) is None
    assert "".join(words(text)) == text
    assert judge(words(text), every=1) is None


def test_honest_texts_over_http(serve, tiny):
    texts = [CASES[name].write() for name in ("dialogue", "multiplication")]
    body = {"max_tokens": 20_000, "reasoning_budget": 0, "limit_answers": True, "stream": True}
    prompts = [prompt for text in texts for prompt in (f"<think>{text}</think>Done.", text)]
    replies = together(serve(tiny("scripted")), [{"prompt": prompt, **body} for prompt in prompts])
    for text, thought, said in zip(texts, replies[::2], replies[1::2], strict=True):
        assert (thought.reasoning.strip(), thought.content) == (text.strip(), "Done.")
        assert said.content.strip() == text.strip()
        for reply in (thought, said):
            assert reply.finish_reason == "stop"
            assert not any("cut" in choice for chunk in reply.chunks for choice in chunk["choices"])
