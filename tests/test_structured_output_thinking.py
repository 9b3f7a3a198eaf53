"""Thinking models under a schema: they think freely, then every token of the answer is held to it.

Scripts say what each rule is about, in four ways of writing: thinking that the template opened, a marker of one token,
markers of several. Where a script's token is not allowed the best that is comes in its place, and the script goes on.
"""

import json
import re

import pytest

from tests.client import both, both_complete, together
from tests.test_structured_output import NO_CACHE, OK, SINGLE, TEXT, ok, schema_format

ONE, OTHER = '{"ok": true}', '{"a": "one two"}'
STYLES = {"open": ("", "</think>"), "think": ("<think>", "</think>"), "channel": ("<|channel>thought", "<channel|>")}
STYLES |= {"xtml": ("<|open|>think<|sep|>", "<|close|>think<|sep|>")}
MARKERS = {"tokens": ("<tool_call>", "</tool_call>")}
NO_LIMITS = {"reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
STYLE = pytest.mark.parametrize("style", STYLES)


def script(text, closing="</think>"):
    """Messages whose script is `text`, where no marker that it opens is left open (mlx_lm looks through the prompt)."""
    return [{"role": "user", "content": text}, {"role": "system", "content": closing}]


@SINGLE
@STYLE
def test_thinking_is_free_and_the_answer_is_exactly_the_json(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    thought = 'Well, {"ok": 3} is not it.\n\nSo'
    reply = both(server, f"{opening}{thought}{closing}{ONE}", **single, **schema_format(OK))
    assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, thought, "stop")
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] > 5
    if style != "open":
        reply = both(server, ONE, **single, **schema_format(OK))
        assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, "", "stop")


@SINGLE
@STYLE
def test_thinking_that_is_never_closed_ends_with_length_and_no_content(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    for thought in ("Well" + " and so on" * 40, "Well, no."):  # it goes on, or wants to end
        messages = script(opening + thought, closing)
        reply = both(server, messages, max_tokens=30, **NO_LIMITS, **single, **schema_format(OK))
        assert (reply.content, reply.finish_reason) == ("", "length")
        assert reply.reasoning.startswith("Well")


@SINGLE
@pytest.mark.parametrize("style", ["open", "think"])
def test_thinking_that_is_off_leaves_only_the_json(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    body = {"chat_template_kwargs": {"enable_thinking": False}, **single, **schema_format(OK)}
    reply = both(server, ONE, **body)
    assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, "", "stop")
    reply = both(server, f"<think>No.</think>{ONE}", max_tokens=60, **body)
    assert reply.reasoning == "" and ok(reply.content)


@SINGLE
@STYLE
def test_completions_do_not_think(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    reply = both_complete(server, f"What comes first: <|script|>{ONE}<|script_end|>", **single, **schema_format(OK))
    assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, "", "stop")


@SINGLE
@pytest.mark.parametrize("style", ["think", "channel", "xtml"])
def test_a_user_who_names_the_marker_does_not_open_it(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    asked = {"role": "user", "content": f"What does {STYLES[style][0]} mean?"}
    reply = both(server, [asked, {"role": "user", "content": ONE}], max_tokens=40, **single, **schema_format(OK))
    assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, "", "stop")


@SINGLE
@STYLE
@pytest.mark.parametrize("stray", [".", "\n\n", " ", "<|im_end|>", "```json\n"])
def test_the_first_token_after_the_marker_is_held_to_the_grammar(serve, tiny, style, single, stray):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    reply = both(server, f"{opening}Hmm{closing}{stray}{ONE}", max_tokens=60, **single, **schema_format(OK))
    assert (reply.reasoning, reply.finish_reason) == ("Hmm", "stop")
    assert ok(reply.content) and reply.content[0] == "{"


@SINGLE
@pytest.mark.parametrize("cut", ["", "<|cut|>"], ids=["tokens", "spelled"])
def test_markers_inside_strings_are_text(serve, tiny, single, cut):
    server = serve(tiny("scripted", style="think", **MARKERS))
    text = json.dumps({"a": "<think>x</think> <tool_call>\\n{}</tool_call>"})
    said = re.sub("[<>]", rf"{cut}\g<0>{cut}", text)
    for thought in ("", "<think>Hmm</think>"):
        reply = both(server, script(thought + said), **single, **schema_format(TEXT))
        assert (reply.content, reply.finish_reason) == (text, "stop")


@SINGLE
@STYLE
def test_a_marker_that_is_only_spelled_is_reasoning(serve, tiny, style, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    spelled = f"Hmm {closing[:2]}<|cut|>{closing[2:-1]}<|cut|>{closing[-1]} more"
    reply = both(server, f"{opening}{spelled}{closing}{ONE}", **single, **schema_format(OK))
    assert (reply.content, reply.reasoning) == (ONE, f"Hmm {closing} more")


@SINGLE
@STYLE
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_end_tokens_end_the_answer_only(serve, tiny, style, single, end):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    body = {"max_tokens": 60, "logprobs": True, **single, **schema_format(OK)}
    reply = both(server, f"{opening}Hmm{end} more{closing}{ONE}{end}...", **body)
    assert (reply.content, reply.finish_reason) == (ONE, "stop")
    assert re.fullmatch("Hmm.* more", reply.reasoning, re.DOTALL)
    reply = both(server, f'{opening}Hmm{closing}{{"ok": {end}true}}', **body)
    assert reply.finish_reason == "stop" and ok(reply.content)


@SINGLE
@pytest.mark.parametrize("style, first", [("channel", "<|channel>"), ("xtml", "<|open|>")])
def test_a_marker_that_is_begun_is_gone_through_with(serve, tiny, style, first, single):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    rest = opening.removeprefix(first).replace("think", " wrong").replace("thought", " wrong")
    reply = both(server, f"{first}{rest}Hmm{closing}{ONE}", **single, **schema_format(OK))
    assert (reply.content, reply.reasoning, reply.finish_reason) == (ONE, "Hmm", "stop")


@STYLE
def test_thinking_replies_in_one_batch(serve, tiny, style):
    server = serve(tiny("scripted", style=style, **MARKERS))
    opening, closing = STYLES[style]
    texts, calls = [], []
    for n in range(9):
        thought, answer = "So." * n, (ONE, json.dumps({"a": "x" * n}), "Plain.")[n % 3]
        texts.append((thought, answer))
        grammar = (schema_format(OK), {"guided_json": TEXT}, {})[n % 3]
        said = f"{opening}{thought}{closing}{answer}"
        calls.append({"prompt": said, "stream": n % 2 == 0, "max_tokens": 80, **grammar})
    replies = together(server, calls, stagger=0.005)
    assert [(r.reasoning, r.content) for r in replies] == texts


# Drafts

DRAFTS = [
    ("think", {"wrong_every": 2}),
    ("xtml", {}),
    ("xtml", {"wrong_every": 3}),
    ("xtml", {"wrong_at": (3, 4, 5, 9)}),
]


@pytest.mark.parametrize("style, draft", DRAFTS, ids=str)
def test_a_draft_that_guesses_wrong_changes_nothing(serve, tiny, style, draft):
    flags = ("--draft-model", tiny("scripted", style=style, **MARKERS, **draft), *NO_CACHE)
    server = serve(tiny("scripted", style=style, **MARKERS), *flags)
    opening, closing = STYLES[style]
    answer = json.dumps({"a": 'one "two" three\n four' + " x" * 5})
    for guesses in (0, 1, 2, 5):
        body = {"num_draft_tokens": guesses, "temperature": 0, "max_tokens": 100}
        for thought in ("", "Hm, so", "Well, that is it."):
            said = f"{opening}{thought}{closing}{answer}"
            reply = both(server, said, **body, **schema_format(TEXT))
            assert (reply.content, reply.reasoning, reply.finish_reason) == (answer, thought, "stop")
        assert both(server, answer, **body, **schema_format(TEXT)).content == answer
