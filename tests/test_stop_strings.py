"""Stop strings: matched on the text of the answer, wherever tokens and stream pieces begin and end.

First the matching itself over any text cut anyhow, then real replies of a scripted model, whose tokens `<|cut|>` parts.
"""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_patches.stop_strings import StopStrings
from tests.client import both, both_complete, chat, chat_stream, together
from tests.tiny_models import train_tokenizer

CUT = "<|cut|>"


def without_cuts(text):
    return text.replace(CUT, "")


def tokens_of(text) -> int:
    return sum(len(train_tokenizer().encode(part).ids) for part in text.split(CUT))


# The matching


texts = st.text("ab\n é", max_size=30)
stop_lists = st.lists(st.text("ab\n é", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@st.composite
def pieces(draw):
    text = draw(texts)
    edges = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=len(text)))})
    return [text[a:b] for a, b in pairwise(edges)]


def first_match(text, stops):
    """Where the first match to end begins (of two that end together, the longer), or None."""
    ends = [(end, end - len(s)) for end in range(len(text) + 1) for s in stops if text[:end].endswith(s)]
    return min(ends)[1] if ends else None


@settings(max_examples=500, deadline=None)
@given(pieces(), stop_lists)
def test_what_is_cut_does_not_depend_on_how_the_text_is_split(parts, stops):
    text, matcher = "".join(parts), StopStrings(stops)
    start = first_match(text, stops)
    sent, held, tail, met, scanned = "", "", "", False, False
    for part in parts:
        piece, held, met = matcher.cut(held, part)
        tail, complete = matcher.scan(tail, part)
        scanned |= complete
        assert met == scanned  # the watcher and the event stream see it at the same token
        sent += piece
        if met:
            break
        assert first_match(sent + held, stops) is None
        assert not held or any(stop.startswith(held) for stop in stops)
    assert met == (start is not None)
    assert sent + held == (text if start is None else text[:start])


@pytest.mark.parametrize(
    "stops, text, sent",
    [
        (("bc", "abcd"), "xabcde", "xa"),  # the one that ends first
        (("c", "abc"), "xabcde", "x"),  # of two that end together, the longer
        (("ab", "abc"), "xabc", "x"),
        (("aab",), "aaab", "a"),
        (("\n\n",), "a\nb\n\nc", "a\nb"),
    ],
)
def test_which_of_several_wins(stops, text, sent):
    assert StopStrings(stops).cut("", text) == (sent, "", True)


# Replies


REPLIES = {
    "inside one token": ("hello world again", ["orl"], "hello w"),
    "across two tokens": ("hello world again", ["lo w"], "hel"),
    "across many tokens": (f"he{CUT}l{CUT}lo w{CUT}or{CUT}ld again", ["hello world"], ""),
    "a whole token": ("hello world again", [" world"], "hello"),
    "the first token": ("hello world again", ["hello"], ""),
    "several, the first to end": ("hello world again", ["world a", "orl"], "hello w"),
    "several, none of the others": ("hello world again", ["nothing", "Again", " again", "x"], "hello world"),
    "after a false start": (f"w{CUT}o w{CUT}o w{CUT}orld again", ["wor"], "wo wo "),
    "a string, not a list": ("hello world again", "lo w", "hel"),
    "beyond ASCII": ("blue 🦉 and grün hello", ["ün"], "blue 🦉 and gr"),
    "a blank line": ("one\n\ntwo", ["\n\n"], "one"),
}
EXTRA = " and then it goes on for a long time because there is more to say"


@pytest.fixture(params=["batched", "seed", "draft"])
def run(request, serve, tiny):
    """(server, body fields) for one of mlx_lm's ways of generating."""
    model = tiny("scripted", style="think", tools="json_tools")
    if request.param == "draft":
        draft = tiny("scripted", style="think", tools="json_tools", wrong_every=4)
        return serve(model, "--draft-model", draft, "--prompt-cache-size", 0), {}
    return serve(model), {"seed": 1} if request.param == "seed" else {}


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_ends_where_the_stop_string_begins(run, name):
    server, fields = run
    script, stop, content = REPLIES[name]
    reply = both(server, script + EXTRA, stop=stop, **fields)
    assert (reply.content, reply.finish_reason) == (content, "stop")
    # Up to the token that completes the stop string, and one more.
    text, stops = without_cuts(script), [stop] if isinstance(stop, str) else stop
    met = min(text.find(s) + len(s) for s in stops if s in text)
    whole = next(n for n in range(len(script) + 1) if len(without_cuts(script[:n])) == met)
    most = tokens_of(script[:whole]) + 1
    assert reply.usage["completion_tokens"] <= most
    assert chat_stream(server, script + EXTRA, stop=stop, **fields).usage["completion_tokens"] <= most


@pytest.mark.parametrize(
    "script, stop, said",
    [
        ("it ends in a sto", ["stop"], ("it ends in a sto", "", 0)),
        (f"it ends in a s{CUT}t{CUT}o", ["stop", "toast"], ("it ends in a sto", "", 0)),
        ("<think>a stop b</think>c stop d", ["stop"], ("c ", "a stop b", 0)),
        ("<think>a s</think>top", ["stop"], ("top", "a s", 0)),
        ('<tool_call>{"name": "f", "arguments": {"a": "stop"}}</tool_call>', ["stop"], ("", "", 1)),
        ('go <tool_call>{"name": "f", "arguments": {"a": "stop"}}</tool_call>stop x', ["stop"], ("go", "", 1)),
        ("no match at all", ["zebra"], ("no match at all", "", 0)),
    ],
)
def test_what_a_stop_string_leaves_alone(run, script, stop, said):
    server, fields = run
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if said[2] else None
    reply = both(server, script, stop=stop, tools=tools, **fields)
    assert (reply.content, reply.reasoning, len(reply.tool_calls)) == said
    assert reply.finish_reason == ("tool_calls" if said[2] else "stop")
    assert all(c["function"] == {"name": "f", "arguments": '{"a": "stop"}'} for c in reply.tool_calls)


def test_no_token_is_generated_after_the_stop_string(serve, tiny):
    """The generation thread's own count: a plain reply queued behind on the single path would wait for the rest."""
    server = serve(tiny("scripted", style="think", tools="json_tools"))
    long = "hello STOP" + " and more" * 4000
    first, second = together(
        server,
        [{"prompt": long, "seed": 1, "stop": "STOP", "max_tokens": 9000}, {"prompt": "short", "seed": 1}],
        stagger=0.05,
    )
    assert (first.content, second.content) == ("hello ", "short")
    whole = chat(server, long, seed=1, max_tokens=9000)
    assert second.seconds < whole.seconds / 2


def test_rows_of_a_batch_stop_on_their_own_strings(serve, tiny):
    server = serve(tiny("scripted", style="think", tools="json_tools"))
    calls = [
        {"prompt": f"row {n} says hello world, then number {n} and more", "stop": [f"mber {n}"], "stream": n % 2 == 0}
        for n in range(6)
    ] + [{"prompt": "row 6 says hello world, then number 6 and more"}]
    contents = [reply.content for reply in together(server, calls, stagger=0.01)]
    expected = [f"row {n} says hello world, then nu" for n in range(6)]
    assert contents == [*expected, "row 6 says hello world, then number 6 and more"]


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["batched", "seed"])
def test_text_completions(serve, tiny, fields):
    server = serve(tiny("scripted", style="think", tools="json_tools"))
    reply = both_complete(server, "to be ignored: <|script|>hello world again<|script_end|>", stop=["lo w"], **fields)
    assert (reply.content, reply.finish_reason) == ("hel", "stop")


def test_pieces_that_may_be_a_stop_string_wait(serve, tiny):
    server = serve(tiny("scripted", style="think", tools="json_tools"))
    reply = chat_stream(server, f"a s{CUT}t{CUT}one s{CUT}t{CUT}o", stop="stop", logprobs=True)
    texts = [c["choices"][0]["delta"].get("content") for c in reply.chunks if c["choices"]]
    assert "".join(filter(None, texts)) == "a stone sto"
    assert not {"s", "st", "t"} & set(texts)
    assert len(reply.logprobs["content"]) == tokens_of(f"a s{CUT}t{CUT}one s{CUT}t{CUT}o")


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["batched", "seed"])
def test_mlx_lm_server_runs_on(serve, tiny, fields):
    upstream = serve(tiny("scripted", style="think", tools="json_tools"), module="mlx_lm.server")
    inside = both(upstream, "hello world again" + EXTRA, stop=["lo w"], **fields)
    assert inside.content == "helorld again" + EXTRA  # cut out, and the reply goes on
    thinking = both(upstream, "<think>a stop b</think>c", stop=[" stop"], **fields)
    assert (thinking.reasoning, thinking.content) == ("a", "")
