"""Reply limits where things meet: guesses that are taken back at a judgement, markers that are begun at the budget,
characters and stop strings at a cut, JSON whose way out is not what the model prefers, many replies at once."""

import json
import random

import pytest

from mlx_patches.reply_limits import EVERY, LoopJudge
from tests.client import both, both_complete, chat, chat_stream, together

SENTENCE = "I should look at this from another side. "
HEDGES = "Wait, is it so? Hmm, let me see. Hold on there. "
LONG = " ".join(f"{word}{n}" for n in range(30) for word in ("red", "green", "blue", "bread", "milk"))
STYLES = {
    "think": ("<think>", "</think>"),
    "channel": ("<|channel>thought", "<channel|>"),
    "xtml": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}
PATHS = pytest.mark.parametrize("path", ["batch", "single", "draft"])


@pytest.fixture
def place(serve, tiny):
    """(server, body) for a path; `wrong`: where the draft guesses wrongly."""

    def choose(path, style="think", **wrong):
        if path != "draft":
            return serve(tiny("scripted", style=style)), ({"seed": 1} if path == "single" else {})
        draft = tiny("scripted", style=style, **(wrong or {"wrong_every": 4}))
        return serve(tiny("scripted", style=style), "--draft-model", draft, "--prompt-cache-size", 0), {}

    return choose


def schema(given) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


def told(reply) -> tuple:
    """What a reply says of itself, streamed or not."""
    choices = [c for chunk in reply.chunks or [reply.body] for c in chunk["choices"]]
    cut = [c["cut"] for c in choices if "cut" in c]
    thought = reply.usage["completion_tokens_details"]["reasoning_tokens"]
    return reply.content, reply.reasoning, reply.finish_reason, reply.usage["completion_tokens"], thought, cut


# The judges and guesses

PIECES = ["Wait", ",", " until", "Hmm", "m", ".", " ", "5", "Let me", " verify", "fy", "e", "é", "🦉", "\u0301", " the"]


@pytest.mark.parametrize("sentence", ["", SENTENCE])
def test_guesses_judged_and_taken_back_leave_no_trace(sentence):
    """A hedge or sentence is known by the letter after it, and what one judgement saw another still has to see."""
    cuts = set()
    for seed in range(600):
        chance = random.Random(seed)
        plain, moved = LoopJudge(2, 1), LoopJudge(2, 1)
        for n in range(1, 81):
            if chance.random() < 0.5:
                for guess in chance.choices(PIECES, k=3):
                    moved.take(guess)
                    if moved.tokens % EVERY == 0:
                        moved.judge()
                moved.go_back(n - 1)
            piece = sentence if chance.random() < 0.05 else chance.choice([*PIECES, *map(str, range(10))])
            plain.take(piece)
            moved.take(piece)
            if n % EVERY == 0:
                cut = plain.judge()
                assert moved.judge() == cut, (seed, n)
                cuts.add(cut)
                if cut:
                    break
    assert cuts >= {None, "hedges", *(["repeats"] if sentence else [])}


@pytest.mark.parametrize("said, guess, instead", [("Wait", ",", " until"), ("Hmm", ".", "el"), ("Hold on", " ", "e")])
def test_a_hedge_that_only_a_guess_completed_is_none(said, guess, instead):
    loops = LoopJudge(1, 0)
    for piece in [*["a "] * 13, "Wait, ", said, guess]:
        loops.take(piece)
    assert loops.judge() == "hedges"
    loops.go_back(15)
    loops.take(instead)
    assert loops.judge() is None


@pytest.mark.parametrize("wrong", [[15], [14, 15], [31], [30, 31], [13, 29, 45]])
def test_a_wrong_guess_where_it_is_judged_hides_no_repeat(place, wrong):
    said = f"{SENTENCE * 2}and so on, {LONG}"
    body = {"max_tokens": 900, "limit_answers": True, "repeat_limit": 1}
    plain = both(place("batch")[0], said, **body)
    drafted = both(place("draft", wrong_at=wrong)[0], said, **body)
    assert told(plain) == told(drafted)
    assert plain.body["choices"][0]["cut"] == "repeats"


# The budget


@PATHS
@pytest.mark.parametrize("budget", [4, 5, 6, 7, 8, 9])
def test_a_marker_that_is_begun_and_dropped_is_no_way_past_the_budget(place, path, budget):
    server, body = place(path, "xtml")
    thought = "one two three four<|close|> no<|close|>think no five"
    said = f"<|open|>think<|sep|>{thought}<|close|>think<|sep|>Done."
    reply = both(server, said, max_tokens=900, reasoning_budget=budget, **body)
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] <= budget
    assert thought.startswith(reply.reasoning)


@PATHS
def test_thinking_in_a_completion_is_thinking(place, path):
    server, body = place(path)
    said = f"<|script|>x <think>{LONG}</think>y<think>z</think><|script_end|>"
    reply = both_complete(server, said, max_tokens=900, reasoning_budget=7, **body)
    assert told(reply)[4:] == (7, ["reasoning_budget"])
    assert reply.finish_reason == "stop" and "<think>" not in reply.content and reply.content.endswith("z</think>")


# The end of a plain answer


@PATHS
def test_an_answer_that_is_cut_ends_with_a_whole_character(place, path):
    server, body = place(path)
    for before in ("a", "a b", "a b c"):
        reply = both(server, before + "🦉" * 200, max_tokens=1500, limit_answers=True, **body)
        assert told(reply)[2::3] == ("length", ["repeats"]) and set(reply.content[len(before) :]) == {"🦉"}


@PATHS
@pytest.mark.parametrize("pad", [3, 4, 5, 6])
def test_what_ends_with_the_token_that_would_be_cut_is_not_cut(place, path, pad):
    """The 16th token is judged, and what it completes is over: the reply by `max_tokens`, or by a stop string."""
    server, body = place(path)
    body |= {"limit_answers": True, "hedge_limit": 1, "logprobs": True, "top_logprobs": 2}
    said = "Wait, " * 4 + "a " * pad + "stop, and more of that"
    stopped = both(server, said, max_tokens=900, stop=["stop"], **body)
    if stopped.usage["completion_tokens"] <= 16:
        assert told(stopped)[2::3] == ("stop", [])
    else:
        assert told(stopped)[2::3] == ("length", ["hedges"])
    for most in (1, 2, 15, 16, 17):
        reply = both(server, said, max_tokens=most, **body)
        assert told(reply)[2::3] == ("length", ["hedges"] if most == 17 else [])
    assert "length, cut: hedges" in server.log()


# JSON whose end is not what comes next

LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
NESTED = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False}},
}


@PATHS
@pytest.mark.parametrize(
    "given, said",
    [
        (NESTED, '{"a":' * 300),
        (NESTED, '{"a": ' * 300),
        (LINKED, '{"v": 1, "next": ' * 200),
        ({"type": "object"}, '{"a":[' * 200),
        ({"type": "object"}, '{"' + "the " * 300 + '": 1}'),
        ({"type": "array", "items": {"enum": ["red green", None, 12.5]}}, "[" + 'null, 12.5, "red green", ' * 200),
        ({"type": "array", "items": {"type": "string"}, "minItems": 60}, "[" + '"a b c d", ' * 100),
        ({"type": "string", "minLength": 900}, '"' + "the " * 400 + '"'),
        ({"type": "string", "pattern": "^(ab)+$"}, '"' + "ab" * 800 + '"'),
        ({"type": "string"}, '"a' + "\\ud83d\\ude00\\u00e9" * 100 + '"'),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            '{"' + "\\u00e9\\ud83d\\ude00" * 90 + '": 5}',
        ),
    ],
)
def test_json_takes_the_way_out_that_is_not_the_model_s(place, path, given, said):
    server, body = place(path)
    for repeats in (2, 3):
        reply = chat(server, said, max_tokens=2000, limit_answers=True, repeat_limit=repeats, **schema(given), **body)
        json.dumps(json.loads(reply.content), ensure_ascii=False).encode()  # no half of a pair
        assert told(reply)[2::3] == ("length", ["repeats"])
        assert reply.usage["completion_tokens"] < 1000


# Many at once


@pytest.mark.parametrize("style", STYLES)
def test_replies_that_join_and_leave_are_judged_as_if_alone(place, style):
    (server, _), (opening, closing) = place("batch", style), STYLES[style]
    calls = [
        {"prompt": f"{opening}{LONG}{closing}Done.", "reasoning_budget": 16},
        {"prompt": f"{opening}{HEDGES * 20}{closing}Done.", "reasoning_budget": 0, "stream": True},
        {"prompt": SENTENCE * 30, "limit_answers": True},
        {"prompt": f'{opening}{LONG}{closing}"{"the " * 300}"', "limit_answers": True, "reasoning_budget": 9}
        | schema({"type": "string"}),
        {"prompt": LONG[:70]},
        {"prompt": "a" + "🦉" * 200, "limit_answers": True},
        {"prompt": "the " * 300, "limit_answers": True, "guided_regex": "[a-z ]*"},
        {"prompt": f"{opening}x{closing}a stop b", "stop": ["stop"], "stream": True},
    ]
    calls = [{**call, "max_tokens": 900} for call in calls]
    alone = [told((chat_stream if call.get("stream") else chat)(server, **call)) for call in calls]
    for stagger in (0, 0.03):
        assert [told(reply) for reply in together(server, calls, stagger)] == alone


def test_random_weights_held_to_schemas_always_end_valid(serve, tiny):
    server = serve(tiny("qwen3", style="think"))
    forms = [
        LINKED,
        {"type": "object"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "number"}}, "required": ["a", "n"]},
    ]
    body = {"max_tokens": 400, "temperature": 1, "limit_answers": True, "repeat_limit": 1, "hedge_limit": 1}
    calls = [{"prompt": f"Hello {n}", **body, **schema(forms[n % 4]), "timeout": 200} for n in range(24)]
    cuts = 0
    for begin in range(0, len(calls), 8):
        for reply in together(server, calls[begin : begin + 8], 0.02):
            _, _, reason, _, _, cut = told(reply)
            assert reply.status == 200 and reason in ("stop", "length")
            cuts += bool(cut)
            if reason == "stop" or cut in (["hedges"], ["repeats"]):
                json.loads(reply.content)
    assert cuts
