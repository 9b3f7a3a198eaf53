"""Reply limits: the judges on plain text, and every cut over HTTP with scripted models, on all three paths."""

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_patches.reply_limits import EVERY, JsonPlace, Limits, LoopJudge
from tests.client import both, chat, chat_stream
from tests.conftest import ROOT

HEDGES = "Wait, is it so? Hmm, let me see. Hold on there. "
SENTENCE = "I should look at this from another side. "
WORDS = ["red", "green", "blue", "black", "white", "bread", "milk", "water", "coffee", "apples"]


def judge(text: str, hedges=12, repeats=3) -> str | None:
    """What a judge says of `text`, a token for each word."""
    loops = LoopJudge(hedges, repeats)
    for word in text.split(" "):
        loops.take(word + " ")
        if loops.tokens % EVERY == 0 and (cut := loops.judge()):
            return cut
    return None


@pytest.mark.parametrize(
    "text, cut",
    [
        (HEDGES * 5, "hedges"),
        ("Let me double-check. Let me re-read it. Let me think again. Actually, wait " * 8, "hedges"),
        ("We wait until the lock is released and Wait is a word here " * 3, None),
        ((SENTENCE + "{} ") * 3 + "end " * 20, None),
        (SENTENCE * 5 + "a b c d e f g h i j k l m n o p", "repeats"),
        ("Yes. No. " * 60 + "x", "repeats"),
        ("the " * 200, "repeats"),
        ("all of this is one line of text without an end to it, and it comes again; " * 7, "repeats"),
    ],
)
def test_a_judge_knows_loops_from_text(text, cut):
    assert judge(text) == cut
    assert judge(text, 0, 0) is None


def test_a_window_not_a_total():
    rare = " ".join("Wait, " + " ".join(f"{WORDS[k % 10]}{n}-{k}" for k in range(200)) + "." for n in range(40))
    assert judge(rare) is None


@given(st.lists(st.sampled_from([*WORDS, "Wait, ", "Hmm.", SENTENCE, ".", "\n", "the "]), max_size=120), st.data())
def test_tokens_that_are_taken_back_leave_no_trace(words, data):
    plain, moved = LoopJudge(2, 1), LoopJudge(2, 1)
    for n, word in enumerate(words, 1):
        plain.take(word)
        moved.take(word)
        if data.draw(st.booleans()):
            extra = data.draw(st.integers(1, 3))
            for _ in range(extra):
                moved.take("Wait, but no. " + SENTENCE)
            if data.draw(st.booleans()):
                moved.judge()
            moved.go_back(n)
        if n % EVERY == 0:
            assert moved.judge() == plain.judge()


def test_judging_costs_the_same_at_the_end():
    loops, seconds = LoopJudge(12, 3), []
    for n in range(1, 32_001):
        begun = time.perf_counter()
        loops.take(f" {WORDS[n % 10]}{n}" + ("." if n % 15 == 0 else ""))
        if n % EVERY == 0:
            assert loops.judge() is None
        seconds.append(time.perf_counter() - begun)
    first, last = sorted(seconds[100:2100])[1000], sorted(seconds[-2000:])[1000]
    assert last < 3 * first


@pytest.mark.parametrize(
    "asked, max_tokens, budget",
    [(None, 2000, 1000), (None, 1, 1), (0, 100, 0), (100, 4000, 100), (4000, 4000, 3500), (900, 1000, 744), (9, 10, 5)],
)
def test_a_budget_leaves_the_answer_its_reserve(asked, max_tokens, budget):
    assert Limits(asked).budget(max_tokens) == budget


def test_where_in_json_one_stands():
    place = JsonPlace().after('{"a\\"b')
    assert (place.string, place.escape, place.ways_out) == (True, False, ("closes string",))
    assert JsonPlace().after('{"a\\').escape
    assert JsonPlace().after('{"a": 12').ways_out[:2] == ("closes value", "goes on")
    assert JsonPlace().after("[[1, 2]").ways_out == ("closes value", "is simple", "opens")


# Over HTTP

PATHS = pytest.mark.parametrize("path", ["batch", "single", "draft"])
LONG = " ".join(f"{WORDS[n % 10]}{n}" for n in range(150))


@pytest.fixture
def place(serve, tiny):
    """(server, body) for a path; with a draft that guesses wrongly every fourth time."""

    def choose(path, style="think"):
        if path != "draft":
            return serve(tiny("scripted", style=style)), ({"seed": 1} if path == "single" else {})
        draft = tiny("scripted", style=style, wrong_every=4)
        return serve(tiny("scripted", style=style), "--draft-model", draft, "--prompt-cache-size", 0), {}

    return choose


@PATHS
@pytest.mark.parametrize("style, opening, closing", [
    ("think", "<think>", "</think>"),
    ("channel", "<|channel>thought", "<channel|>"),
    ("xtml", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
])  # fmt: skip
@pytest.mark.parametrize("budget", [1, 15, 16, 17, 100])
def test_a_budget_is_met_to_the_token(place, path, style, opening, closing, budget):
    server, body = place(path, style)
    reply = both(server, f"{opening}{LONG}{closing}Done.", max_tokens=900, reasoning_budget=budget, **body)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == budget
    assert reply.body["choices"][0]["cut"] == "reasoning_budget"
    # The script goes on where it is: what comes after the marker is the answer.
    assert reply.finish_reason == "stop" and closing not in reply.reasoning and "Done." in reply.content


@PATHS
def test_characters_are_whole_when_the_thinking_closes(place, path):
    server, body = place(path)
    for budget in range(1, 9):
        reply = both(server, "<think>ööö🦉🦉🦉ööö</think>a", max_tokens=900, reasoning_budget=budget, **body)
        assert "\ufffd" not in reply.reasoning
        assert reply.usage["completion_tokens_details"]["reasoning_tokens"] <= budget


@PATHS
@pytest.mark.parametrize("loop, cut", [(HEDGES, "hedges"), (SENTENCE, "repeats"), ("the ", "repeats")])
def test_thinking_in_circles_is_closed(place, path, loop, cut):
    server, body = place(path)
    said = f"<think>{loop * 60}</think>Done."
    reply = both(server, said, max_tokens=3000, reasoning_budget=0, **body)
    assert reply.body["choices"][0]["cut"] == cut
    assert 16 <= reply.usage["completion_tokens_details"]["reasoning_tokens"] < 300
    off = both(server, said, max_tokens=3000, reasoning_budget=0, hedge_limit=0, repeat_limit=0, **body)
    assert "cut" not in off.body["choices"][0] and off.content == "Done."


@PATHS
def test_an_answer_is_only_watched_where_it_is_asked_for(place, path):
    server, body = place(path)
    reply = both(server, SENTENCE * 20 + "End.", max_tokens=3000, **body)
    assert (reply.finish_reason, "cut" in reply.body["choices"][0]) == ("stop", False)
    reply = both(server, SENTENCE * 20 + "End.", max_tokens=3000, limit_answers=True, **body)
    assert (reply.finish_reason, reply.body["choices"][0]["cut"]) == ("length", "repeats")
    assert reply.content.startswith(SENTENCE * 4) and "End." not in reply.content


@PATHS
@pytest.mark.parametrize(
    "schema, said",
    [
        ({"type": "string"}, '"' + SENTENCE * 40 + '"'),
        ({"type": "string"}, '"' + "\\n\\u00e9 " * 90 + '"'),
        ({"type": "array", "items": {"type": "integer"}}, "[" + "7, " * 300 + "1]"),
        ({"type": "number"}, "1" * 900),
        ({"type": "array", "items": {"type": "integer"}}, "[" + "7," * 700 + "1]"),
        ({"type": "array", "items": {"type": "string"}}, "[" + '"ab",' * 500 + '"1"]'),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
            "[" + "[]," * 900 + "[]]",
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{" + ",".join(['"same":12'] * 300) + "}"),
        ({"type": "string"}, '"' + "🦉ö " * 200 + '"'),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
            '{"a": "' + "the " * 300 + '", "b": 5}',
        ),
    ],
)
def test_json_that_is_cut_short_ends_valid(place, path, schema, said):
    server, body = place(path)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = both(server, said, max_tokens=2000, limit_answers=True, response_format=form, **body)
    json.loads(reply.content)
    assert (reply.finish_reason, reply.body["choices"][0]["cut"]) == ("length", "repeats")
    assert reply.usage["completion_tokens"] < 400


@PATHS
def test_a_reply_that_ends_near_its_budget_may_end(place, path):
    server, body = place(path)
    for budget in (5, 6, 9):
        reply = both(server, "<think>one two<|im_end|>three</think>x", max_tokens=600, reasoning_budget=budget, **body)
        assert (reply.reasoning, reply.content, reply.finish_reason) == ("one two", "", "stop")


@PATHS
def test_other_grammars_end_where_they_may(place, path):
    server, body = place(path)
    for form, said in (
        ({"guided_regex": "[a-z ]*"}, "the " * 300),
        ({"guided_grammar": 'start: (" "? A)*\nA: /[a-z]+/'}, "the " * 300),
    ):
        reply = both(server, said, max_tokens=2000, limit_answers=True, **form, **body)
        assert (reply.finish_reason, reply.body["choices"][0]["cut"]) == ("length", "repeats")
        assert reply.usage["completion_tokens"] < 200


@PATHS
@pytest.mark.parametrize("style, opening, closing", [
    ("think", "<think>", "</think>"),
    ("channel", "<|channel>thought", "<channel|>"),
    ("xtml", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
])  # fmt: skip
def test_thinking_that_was_cut_is_not_opened_again(place, path, style, opening, closing):
    server, body = place(path, style)
    again = f"{opening}{LONG}{closing}One.{opening}{LONG}{closing}Two."
    reply = both(server, again, max_tokens=3000, reasoning_budget=20, **body)
    assert reply.body["choices"][0]["cut"] == "reasoning_budget"
    assert opening not in reply.content + reply.reasoning and LONG.startswith(reply.reasoning)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 20
    # The marker's first token has other uses, and stays free.
    if style == "channel":
        assert "<|channel>" in reply.content


def test_flags_are_whole_numbers(tiny):
    for flag in ("--hedge-limit=-1", "--repeat-limit=x", "--reasoning-budget=1.5"):
        command = [sys.executable, "-m", "mlx_patched_server", "--model", str(tiny("llama")), flag]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and flag.partition("=")[0] in done.stderr


@pytest.mark.parametrize("name", ["reasoning_budget", "hedge_limit", "repeat_limit", "thinking_budget"])
def test_wrong_counts_are_refused_by_name(place, name):
    server, _ = place("batch")
    for value in (True, -1, "5", 1.5, [], {}):
        reply = chat(server, "Hi", **{name: value})
        assert (reply.status, reply.error["param"]) == (400, name)
    assert chat(server, "Hi", **{name: None}).content == "Hi"


def test_other_spellings_and_contradictions(place):
    server, _ = place("batch")
    for spelling in ({"thinking_token_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}}):
        reply = chat_stream(server, f"<think>{LONG}</think>x", max_tokens=900, **spelling)
        assert [c["cut"] for chunk in reply.chunks for c in chunk["choices"] if "cut" in c] == ["reasoning_budget"]
        assert chat(server, "Hi", reasoning_budget=5, **spelling).content == "Hi"
        assert chat(server, "Hi", reasoning_budget=6, **spelling).status == 400
    assert chat(server, "Hi", limit_answers="yes").error["param"] == "limit_answers"
    assert chat(server, "Hi", some_limit=3).content == "Hi"


def test_flags_are_the_defaults_and_the_body_wins(serve, tiny):
    server = serve(tiny("scripted"), "--reasoning-budget", 7, "--limit-answers", "--repeat-limit", 2)
    reply = both(server, f"<think>{LONG}</think>x", max_tokens=900)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 7
    reply = both(server, f"<think>{LONG}</think>x", max_tokens=900, reasoning_budget=9, repeat_limit=0)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 9
    assert both(server, SENTENCE * 20, max_tokens=900).finish_reason == "length"


THOUGHT = " ".join(f"{WORDS[n % 10]}{n}" for n in range(40))


@pytest.mark.parametrize("place_of", ["marker", "answer", "string", "judged", "budget"])
def test_a_wrong_guess_leaves_no_trace(serve, tiny, place_of):
    """The draft guesses wrongly in the closing marker, at the answer's first token, in a string, where it is judged."""
    folder = tiny("scripted", style="xtml")
    opening, closing = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def count(text):
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    said = f'{opening}{THOUGHT}{closing}{{"a": "one two three"}}'
    answer = count(opening + THOUGHT + closing)
    wrong = {
        "marker": [answer - 3, answer - 2, answer - 1],
        "answer": [answer, answer + 1],
        "string": [answer + 3, answer + 4, answer + 5],
        "judged": [count(opening) + 14, count(opening) + 15, count(opening) + 16],
        "budget": [count(opening) + 29, count(opening) + 30, count(opening) + 31],
    }[place_of]
    draft = tiny("scripted", style="xtml", wrong_at=wrong)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    body |= {"max_tokens": 900, "reasoning_budget": 30 if place_of == "budget" else 0}
    plain = both(serve(folder), said, **body)
    drafted = both(serve(folder, "--draft-model", draft, "--prompt-cache-size", 0), said, **body)
    for reply in (plain, drafted):
        assert json.loads(reply.content)["a"] and reply.finish_reason == "stop"
    assert (drafted.content, drafted.reasoning) == (plain.content, plain.reasoning)
    assert drafted.usage["completion_tokens_details"] == plain.usage["completion_tokens_details"]


@pytest.mark.parametrize("kind", ["qwen3", "demo"])
def test_a_real_loop_ends_with_limits_and_runs_on_without(serve, tiny, kind):
    """A model of random weights thinks in circles at temperature 0; the demo model is asked for a loop."""
    if kind == "demo":
        server, asked = serve("demo"), "Repeat the word 'ha' forever: ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha"
        on, off = {"limit_answers": True}, {}
    else:
        server, asked = serve(tiny("qwen3", style="open")), "Hello"
        on = {"reasoning_budget": 0, "limit_answers": True}
        off = {"reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
    most = 130 if kind == "demo" else 300
    body = {"max_tokens": most, "timeout": 200}
    limited, free = chat(server, asked, **body, **on), chat(server, asked, **body, **off)
    print(
        kind, limited.usage["completion_tokens"], limited.body["choices"][0].get("cut"), free.usage["completion_tokens"]
    )
    assert free.usage["completion_tokens"] == most and free.finish_reason == "length"
    assert limited.body["choices"][0]["cut"] in ("hedges", "repeats")
    assert limited.usage["completion_tokens"] < most


def test_upstream_thinks_in_circles(serve, tiny):
    reply = chat(serve(tiny("scripted"), module="mlx_lm.server"), f"<think>{SENTENCE * 90}", max_tokens=700)
    assert reply.finish_reason == "length" and reply.usage["completion_tokens"] == 700


def test_tokens_without_text_are_judged_too():
    judge = LoopJudge(12, 3)
    for text in (*[""] * 16, *["ab "] * 8):
        judge.take(text)
        assert judge.judge() is None
