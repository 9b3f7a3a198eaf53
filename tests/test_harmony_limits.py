"""Harmony with a schema and with limits: only the final body is held, thinking is closed and stays closed.

Scripts in a small vocabulary say what each rule is about, on all three paths; where a script's token is not allowed the
best that is comes in its place, and the script goes on. Then random weights of a gpt_oss model, which try whatever
is allowed.
"""

import json
import os
import random

import jsonschema
import pytest
from tokenizers import Tokenizer

from tests.client import both, chat, chat_stream, together
from tests.harmony_transcripts import ANALYSIS, FINAL, TURN
from tests.test_harmony import NO_LIMITS
from tests.test_schema_sample import cases, closing_bias, fits

ONE = '{"ok": true}'
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "ok", "schema": OK}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]}
PATHS = pytest.mark.parametrize("path", ["batch", "single", "draft"])
LONG = "green blue black white bread milk water coffee five " * 6  # words of one token each
WORDS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "final", "commentary", "assistant", "json")


@pytest.fixture
def place(serve, tiny):
    """(server, body) for a path; with a draft that guesses wrongly every fourth time."""

    def choose(path):
        model = tiny("scripted", style="harmony")
        if path != "draft":
            return serve(model), ({"seed": 1} if path == "single" else {})
        draft = tiny("scripted", style="harmony", wrong_every=4)
        return serve(model, "--draft-model", draft, "--prompt-cache-size", 0), {}

    return choose


def ok(text) -> bool:
    value = json.loads(text)
    jsonschema.validate(value, OK)
    return True


# A schema


@PATHS
@pytest.mark.parametrize(
    "header",
    [
        FINAL,
        f"{TURN}{FINAL}",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>final<|constrain|>json<|message|>",
        "<|channel|>final json<|message|>",
        f"{ANALYSIS}Well, {{}} is free.<|end|>{TURN}{FINAL}",
        f"{ANALYSIS}One.<|end|>{TURN}{ANALYSIS}Two.<|end|>{TURN}<|channel|>final <|constrain|>json<|message|>",
        "",
    ],
)
def test_the_headers_before_json(place, path, header):
    server, body = place(path)
    reply = both(server, f"{header}{ONE}", **FORMAT, **body)
    assert (reply.content, reply.finish_reason) == (ONE, "stop")
    assert bool(reply.reasoning) == ("analysis" in header)


@PATHS
@pytest.mark.parametrize(
    "script",
    [
        f"{ANALYSIS}No header follows.<|end|>{ONE}",
        f"<|channel|>commentary<|message|>I say more.<|end|>{TURN}{FINAL}{ONE}",
        f"{FINAL}No JSON at all.",
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ONE}<|call|>",
        f"{ONE}<|end|>{TURN}{ANALYSIS}More.",
        f"<|message|>{ONE}",
        f"{TURN} to=functions.f{FINAL}{ONE}",
        f"{ANALYSIS}ends at once",
    ],
)
def test_whatever_it_wants_what_stops_is_json(place, path, script):
    server, body = place(path)
    reply = both(server, script, max_tokens=120, **FORMAT, **body)
    assert reply.finish_reason in ("stop", "length") and reply.tool_calls == []
    assert reply.finish_reason == "length" or ok(reply.content)
    assert not any(word in reply.content for word in WORDS)


@PATHS
def test_thinking_that_never_closes_has_no_content(place, path):
    server, body = place(path)
    reply = both(server, f"{ANALYSIS}{LONG}", max_tokens=20, **NO_LIMITS, **FORMAT, **body)
    assert (reply.content, reply.finish_reason) == ("", "length")
    assert LONG.startswith(reply.reasoning) and len(reply.reasoning) > 20


def test_completions_without_a_turn_are_held_from_the_first_token(serve, tiny):
    from tests.client import both_complete

    server = serve(tiny("scripted", style="harmony"))
    for text in (ONE, f"{ANALYSIS}Well.<|end|>{TURN}{FINAL}{ONE}"):
        reply = both_complete(server, f"<|script|>{text.replace('<|start|>', '')}<|script_end|>", **FORMAT)
        assert ok(reply.content) and reply.finish_reason == "stop"


MOST = int(os.environ.get("SCHEMAS", 40))  # a seed; 100 are two hundred in all


@pytest.mark.parametrize("seed", range(2))
def test_random_weights_end_in_json(serve, tiny, seed):
    """A tiny gpt_oss model at temperature 1, leaning to markers and to what closes JSON."""
    folder = tiny("gpt_oss", seed=seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bias = closing_bias(folder)
    bias |= {str(tokenizer.token_to_id(word)): 5.0 for word in WORDS if tokenizer.token_to_id(word) is not None}
    server, sample = serve(folder), cases()
    random.Random(seed).shuffle(sample)
    sample = sample[:MOST]
    calls = [
        {
            "call": call,
            "prompt": f"Reply as {case['name']}.",
            "response_format": {"type": "json_schema", "json_schema": {"name": "case", "schema": case["schema"]}},
            "temperature": 1,
            "max_tokens": 200,
            "reasoning_budget": 20,
            "logit_bias": bias,
        }
        for case, call in zip(sample, [chat, chat_stream] * (MOST // 2), strict=True)
    ]
    replies = [reply for at in range(0, len(calls), 10) for reply in together(server, calls[at : at + 10])]
    stopped = [(case, reply) for case, reply in zip(sample, replies, strict=True) if reply.finish_reason == "stop"]
    assert all(reply.status == 400 or reply.finish_reason in ("stop", "length") for reply in replies)
    assert [(case["name"], reply.content) for case, reply in stopped if not fits(reply, case["schema"])] == []
    assert len(stopped) >= MOST * 0.4 and sum(bool(reply.reasoning) for _, reply in stopped) >= MOST // 10
    assert not any(marker in reply.raw.decode() for reply in replies for marker in WORDS[:4])


# Limits


@PATHS
def test_a_budget_is_met_to_the_token(place, path):
    server, body = place(path)
    script = f"{ANALYSIS}{LONG}<|end|>{TURN}{FINAL}Done."
    for budget in (1, 2, 7):
        reply = both(server, script, reasoning_budget=budget, max_tokens=100, **body)
        assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == budget
        # Six tokens close the thinking and open the answer in the script's place.
        words = LONG.split()
        assert (reply.reasoning.split(), reply.content.split()) == (words[:budget], [*words[budget + 6 :], "Done."])
    free = both(server, script, reasoning_budget=0, max_tokens=200, **body)
    assert (free.reasoning, free.content) == (LONG, "Done.")


@PATHS
def test_loops_in_thinking_close_it(place, path):
    server, body = place(path)
    looping = "I should look at this from another side. " * 20
    reply = both(server, f"{ANALYSIS}{looping}<|end|>{TURN}{FINAL}Done.", max_tokens=600, **body)
    assert 20 < len(reply.reasoning) < len(looping) and reply.content.endswith("Done.")
    assert reply.finish_reason == "stop"
    assert both(server, f"{FINAL}{looping}", max_tokens=600, **body).content == looping


@PATHS
def test_thinking_that_was_cut_stays_closed(place, path):
    """Analysis opens again after the answer began; once it was cut it may not."""
    server, body = place(path)
    again = (
        f"{ANALYSIS}green blue<|end|>{TURN}{FINAL}One.<|end|>{TURN}{ANALYSIS}black white bread<|end|>{TURN}{FINAL}Two."
    )
    reply = both(server, again, reasoning_budget=20, max_tokens=100, **body)
    assert (reply.reasoning, reply.content) == ("green blueblack white bread", "One.Two.")
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 5
    # Two were thought before the answer: they count.
    reply = both(server, again, reasoning_budget=4, max_tokens=100, **body)
    assert reply.reasoning == "green blueblack white"
    cut = f"{ANALYSIS}{LONG}<|end|>{TURN}{FINAL}One.<|end|>{TURN}{ANALYSIS}black white bread<|end|>{TURN}{FINAL}Two."
    reply = both(server, cut, reasoning_budget=4, max_tokens=200, **body)
    assert reply.reasoning.split() == LONG.split()[:4]
    assert "One." in reply.content and reply.content.endswith("Two.")
    assert "black white bread" in reply.content.partition("One.")[2]  # on a channel of its own, if not that one


@PATHS
def test_a_cut_leads_into_the_schema(place, path):
    server, body = place(path)
    reply = both(server, f"{ANALYSIS}{LONG}", reasoning_budget=5, max_tokens=100, **FORMAT, **body)
    assert reply.finish_reason == "stop" and ok(reply.content)
    assert reply.reasoning.split() == LONG.split()[:5]


def test_with_tools_a_cut_may_lead_to_a_call(serve, tiny):
    """The channel is the model's to choose then: final or commentary."""
    server = serve(tiny("scripted", style="harmony"))
    call = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"
    reply = both(server, f"{ANALYSIS}green blue<|end|>{call}", reasoning_budget=2, max_tokens=60, **TOOLS)
    assert [c["function"]["name"] for c in reply.tool_calls] == ["get_weather"]
    assert reply.finish_reason == "tool_calls"
    plain = both(server, f"{ANALYSIS}green blue<|end|>{call}", reasoning_budget=2, max_tokens=60)
    assert plain.tool_calls == []


@PATHS
def test_answers_are_watched_where_that_is_asked(place, path):
    server, body = place(path)
    looping = "I should look at this from another side. " * 20
    reply = both(server, f"{ANALYSIS}Well.<|end|>{TURN}{FINAL}{looping}", limit_answers=True, max_tokens=600, **body)
    assert reply.finish_reason == "length" and 20 < len(reply.content) < len(looping)


@PATHS
def test_stop_strings_are_of_the_content(place, path):
    server, body = place(path)
    script = f"{ANALYSIS}red green blue<|end|>{TURN}{FINAL}One green two."
    reply = both(server, script, stop=[" green"], max_tokens=60, **body)
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("red green blue", "One", "stop")
