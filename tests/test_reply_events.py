"""ReplyReader by itself: hand-made tokens, read by a CallReader or a TokenSplitter, no model, no socket.

What always holds: what is sent depends on the text of a reply and never on how it was cut into tokens.
"""

import re
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.server import Response

from mlx_patches.reply_events import CallArguments, CallOpened, Content, Reasoning, ReplyReader
from mlx_patches.reply_format import TokenSplitter
from mlx_patches.stop_strings import StopStrings
from tests.tool_texts import splitter as calls_of

END = -1


@dataclass
class Sent:
    """A reply's events, folded. `listed`: the ids of the tokens with a log-probability, in order."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    reason: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0
    listed: list = field(default_factory=list)
    events: list = field(default_factory=list)

    @property
    def said(self):
        return self.content, self.reasoning, self.calls, self.reason


def read(
    tokens,
    *,
    stops=(),
    initial="normal",
    end="stop",
    last="",
    splitter=None,
    spell=None,
    logprobs=True,
    streamed=True,
):
    """Reads a reply whose tokens have these texts (or, with a TokenSplitter, these ids). `end` is how mlx_lm ends it;
    `last` is the text that its detokenizer still held when the end token came. A token's id is its place."""
    splitter = splitter or calls_of("json_tools", initial=initial)
    spell = spell or (lambda n: tokens[n].encode())
    stop_strings = StopStrings(tuple(stops)) if stops else None
    reader = ReplyReader(splitter, stop_strings, spell, logprobs=logprobs, streamed=streamed)
    responses = []
    for n, token in enumerate(tokens):
        text, number = (token, n) if isinstance(token, str) else ("", token)
        responses.append(Response(text, number, -0.5, None, ()))
    if end == "stop":
        responses.append(Response(last, END, -0.5, "stop", ()))
    else:
        responses[-1].finish_reason = end
    sent = Sent()
    for response in responses:
        for event in reader.read(response):
            sent.events.append(event)
            match event:
                case Reasoning(text):
                    sent.reasoning += text
                case Content(text, entries):
                    sent.content += text
                    sent.listed += [entry.id for entry in entries]
                case CallOpened(number, _, name):
                    assert number == len(sent.calls)
                    sent.calls.append([name, ""])
                case CallArguments(number, text):
                    sent.calls[number][1] += text
        if reader.finish_reason is not None:
            break
    sent.reason, sent.tokens, sent.reasoning_tokens = reader.finish_reason, reader.tokens, reader.reasoning_tokens
    return sent


def letters(text):
    return list(text)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


# Pieces


@pytest.mark.parametrize("cut", [letters, lambda text: [text], lambda text: re.findall("..?", text)])
@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize(
    "text, content, reasoning, calls",
    [
        ("Hello", "Hello", "", 0),
        ("<think>Hm.</think>Yes.", "Yes.", "Hm.", 0),
        ("a<think>b</think>c<think>d</think>e", "ace", "bd", 0),
        (f"Well:{CALL}", "Well:", "", 1),
        (f"<think>Hm.{CALL}", "", "Hm.", 1),
        (f"{CALL} and {CALL}!", " and!", "", 2),
        ("1 < 2 </think>", "1 < 2 </think>", "", 0),
        ("<think>never closed </thi", "", "never closed </thi", 0),
        ("no tool: <tool_cal", "no tool: <tool_cal", "", 0),  # mlx_lm drops this end when the reply stops
        ("x <tool_call>{broken", "x <tool_call>{broken", "", 0),
        ("", "", "", 0),
    ],
)
def test_a_reply_comes_apart_at_its_markers(cut, end, text, content, reasoning, calls):
    if not text and end == "length":
        end = "stop"  # a reply of no token cannot reach a limit
    sent = read(cut(text) if text else [], end=end)
    assert (sent.content, sent.reasoning) == (content, reasoning)
    assert sent.calls == [["f", '{"a": 1}']] * calls
    assert sent.reason == ("tool_calls" if calls and end == "stop" else end)


def test_a_reply_that_the_prompt_left_thinking():
    sent = read(["Hm", "</thi", "nk>", "Yes"], initial="reasoning")
    assert (sent.reasoning, sent.content, sent.reasoning_tokens, sent.listed) == ("Hm", "Yes", 1, [3])


def test_text_is_sent_as_soon_as_it_cannot_be_a_marker():
    sent = read(["a", "<", "th", "ree", " b"])
    assert [event.text for event in sent.events] == ["a", "<three", " b"]


def test_what_the_detokenizer_held_comes_with_the_end_token():
    assert read(["1 "], last="<").content == "1 <"
    assert read(["<think>a", "</th"], last="ink>b").said == ("b", "a", [], "stop")
    assert read(["ST"], last="OP", stops=["STOP"]).said == ("", "", [], "stop")


@pytest.mark.parametrize("streamed", [True, False])
def test_calls_are_numbered_and_each_has_an_id(streamed):
    sent = read([*letters(CALL), "\n", *letters(CALL)], streamed=streamed)
    opened = [event for event in sent.events if isinstance(event, CallOpened)]
    assert [(event.number, event.name) for event in opened] == [(0, "f"), (1, "f")]
    assert opened[0].id and opened[1].id and opened[0].id != opened[1].id
    assert sent.calls == [["f", '{"a": 1}']] * 2


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_that_is_cut_is_sent_in_part_or_as_text(streamed):
    text = CALL.partition(" 1")[0]
    sent = read(["Well:", *letters(text)], end="length", streamed=streamed)
    content, calls = ("Well:", [["f", '{"a":']]) if streamed else (f"Well:{text}", [])
    assert sent.said == (content, "", calls, "length")


# Stop strings


@pytest.mark.parametrize(
    "tokens, content, read_tokens",
    [
        (["hello ST", "OP more", " and more"], "hello ", 2),
        (["hello STOP more"], "hello ", 1),
        (["S", "T", "O", "P", "x"], "", 4),
        (["S", "T", "O", "S", "T", "O", "P", "x"], "STO", 7),
        (["<think>STOP</think>a", "STOP", "x"], "a", 2),
        ([CALL.replace("1", '"STOP"'), "a", "STOP", "x"], "a", 3),
        (["ends with STO"], "ends with STO", 2),
    ],
)
def test_a_stop_string_ends_the_content(tokens, content, read_tokens):
    sent = read(tokens, stops=["STOP"])
    assert (sent.content, sent.tokens) == (content, read_tokens)


def test_a_call_before_a_stop_string_is_still_a_call():
    # mlx_lm 0.32.2 says tool_calls too.
    sent = read([CALL, "then ", "STOP", "x"], stops=["STOP"])
    assert sent.said == ("then ", "", [["f", '{"a": 1}']], "tool_calls")


# Log-probabilities


@pytest.mark.parametrize(
    "tokens, listed, options",
    [
        (["a", "b", "c"], [0, 1, 2], {}),
        (["<think>", "a", "</think>", "b"], [3], {}),
        (["<th", "ink>", "a", "</think>", "b", "c"], [4, 5], {}),
        (["a", "<", "b", "<"], [0, 1, 2, 3], {}),
        (["a", *CALL.partition("{"), "b"], [0, 4], {}),
        (["a", "<", "<think>", "b", "</think>", "c"], [0, 1, 5], {}),
        (["a", "S", "T", "b"], [0, 1, 2, 3], {"stops": ["STOP"]}),
        (["a", "S", "TOP"], [0], {"stops": ["STOP"]}),
        (["na", "na", "na", "nO"], [0, 1], {"stops": ["anO"]}),  # the third holds the stop string's first letter
        (["aS", "bS", "TOP"], [0], {"stops": ["STOP"]}),
        (["aS", "bS"], [0, 1], {"stops": ["STOP"]}),
    ],
)
def test_each_token_of_content_is_listed_once(tokens, listed, options):
    for end in ("stop", "length"):
        assert read(tokens, end=end, **options).listed == listed


def test_an_entry_has_the_tokens_bytes_and_no_infinity():
    reader = ReplyReader(calls_of("json_tools"), None, {5: b"\xff", 6: b"b"}.get, logprobs=True)
    top = ({"id": 6, "token": "x", "logprob": -float("inf")}, {"id": 5, "token": "y", "logprob": -0.25})
    (event,) = reader.read(Response("\ufffd", 5, float("nan"), None, top))
    ((number, data, logprob, listed),) = event.logprobs
    assert (number, data, logprob) == (5, b"\xff", -9999.0)
    assert [(t.id, t.data, t.logprob) for t in listed] == [(5, b"\xff", -0.25), (6, b"b", -9999.0)]


def test_nothing_is_listed_where_nothing_is_asked_for():
    assert read(["a", "<", "b"], logprobs=False).listed == []


# Any text, any cutting


PARTS = ["<think>", "</think>", "<", "</", "<th", "ink>", "tool_call", "ST", "OP", "STOP", "a", "b", "é", "🦉", "{}"]
# Blanks around a call go with it.
texts = st.sampled_from([["b ", "\n"], [CALL]]).flatmap(
    lambda more: st.lists(st.sampled_from([*PARTS, *more]), max_size=12).map("".join)
)


@st.composite
def cuttings(draw):
    """(text, tokens): the tokens join to the text."""
    text = draw(texts)
    at = draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    edges = sorted({0, len(text), *at})
    return text, [text[a:b] for a, b in pairwise(edges)]


def parsed(text):
    """(content, reasoning, number of calls) by a plain reading of the whole text."""
    kinds = kinds_of_letters(text)
    said = {kind: "".join(letter for letter, its in zip(text, kinds, strict=True) if its == kind) for kind in "crt"}
    return said["c"], said["r"], said["t"].count(CALL)


@settings(max_examples=400, deadline=None)
@given(cuttings(), st.sampled_from(["stop", "length"]))
def test_what_is_sent_does_not_depend_on_the_tokens(cutting, end):
    text, tokens = cutting
    sent = read(tokens, end=end if tokens else "stop")
    content, reasoning, calls = parsed(text)
    assert (sent.content, sent.reasoning) == (content, reasoning)
    assert sent.calls == [["f", '{"a": 1}']] * calls


@settings(max_examples=400, deadline=None)
@given(cuttings(), st.lists(st.sampled_from(["STOP", "b ", "TOa", "a<", "é🦉", "OPS", "TO"]), min_size=1, max_size=3))
def test_a_stop_string_cuts_the_same_however_the_text_is_cut(cutting, stops):
    text, tokens = cutting
    sent, by_letters = read(tokens, stops=stops), read(letters(text), stops=stops)
    assert sent.content == by_letters.content
    content = parsed(text)[0]
    met = [stop for stop in stops if stop in content]
    assert sent.content == content if not met else content.startswith(sent.content)
    assert not any(stop in sent.content for stop in stops)
    assert bool(met) == (sent.content != content)


@settings(max_examples=400, deadline=None)
@given(cuttings(), st.sampled_from(["stop", "length"]))
@example(("a <think>", ["a", " ", "<think>"]), "stop")
def test_a_token_is_listed_if_it_is_content_and_counted_if_it_is_thinking(cutting, end):
    text, tokens = cutting
    sent = read(tokens, end=end if tokens else "stop")
    kinds = kinds_of_letters(text)
    assert len(kinds) == len(text)
    all_content, some_content, all_thinking, some_thinking = set(), set(), 0, 0
    place = 0
    for n, token in enumerate(tokens):
        seen = set(kinds[place : place + len(token)])
        place += len(token)
        if seen == {"c"}:
            all_content.add(n)
        if "c" in seen:
            some_content.add(n)
        all_thinking += seen == {"r"}
        some_thinking += "r" in seen
    assert sent.listed == sorted(set(sent.listed))
    assert all_content <= set(sent.listed) <= some_content
    assert all_thinking <= sent.reasoning_tokens <= some_thinking


def kinds_of_letters(text):
    """One letter for each of the text: c content, r reasoning, t a call, m a marker."""
    kinds, where = "", "c"
    for piece in re.findall(f"{re.escape(CALL)}|</?think>|.", text, re.DOTALL):
        if piece == CALL:
            kinds += "t" * len(piece)
        elif piece == {"c": "<think>", "r": "</think>"}[where]:
            kinds += "m" * len(piece)
            where = {"c": "r", "r": "c"}[where]
        else:
            kinds += where * len(piece)
    return kinds


# Replies under a grammar, read by tokens


WORDS = {
    1: b"<|",
    2: b"think|>",
    3: b"</",
    4: b"think>",
    5: b'{"a": "',
    6: "é".encode()[:1],
    7: "é".encode()[1:],
    8: "🦉".encode()[:3],
    9: "🦉".encode()[3:],
    10: b'"}',
    11: b"<think>",
}
OPENING, CLOSING = (1, 2), (3, 4)


def read_ids(ids, phase, **options):
    return read(ids, splitter=TokenSplitter(OPENING, CLOSING, WORDS.get, phase), spell=WORDS.get, **options)


@pytest.mark.parametrize(
    "phase, ids, content, reasoning, listed, counted",
    [
        ("start", [1, 2, 11, 3, 4, 5, 6, 7, 10], '{"a": "é"}', "<think>", [5, 6, 7, 10], 1),
        ("start", [5, 11, 3, 4, 10], '{"a": "<think></think>"}', "", [5, 11, 3, 4, 10], 0),
        ("start", [1, 5, 10], '<|{"a": ""}', "", [1, 5, 10], 0),  # the marker's first token began an answer
        ("reasoning", [3, 3, 4, 5, 10], '{"a": ""}', "</", [5, 10], 1),
        ("reasoning", [6, 7, 3, 6, 7, 3, 4, 5, 8, 9, 10], '{"a": "🦉"}', "é</é", [5, 8, 9, 10], 5),
        ("reasoning", [6, 7, 3], "", "é</", [], 3),
        ("normal", [1, 2, 3, 4], "<|think|></think>", "", [1, 2, 3, 4], 0),
    ],
)
def test_a_reply_under_a_grammar_comes_apart_at_marker_tokens(phase, ids, content, reasoning, listed, counted):
    for end in ("stop", "length"):
        sent = read_ids(ids, phase, end=end)
        assert (sent.content, sent.reasoning, sent.listed) == (content, reasoning, listed)
        assert (sent.reasoning_tokens, sent.tokens) == (counted, len(ids) + (end == "stop"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "é", "🦉", "<think>", "漢", '"', "\n"]), min_size=1).map("".join), st.data())
def test_characters_that_are_split_between_tokens_are_whole(text, data):
    raw = text.encode()
    at = data.draw(st.lists(st.integers(0, len(raw))))
    edges = sorted({0, len(raw), *at})
    words = dict(enumerate((raw[a:b] for a, b in pairwise(edges)), start=100))
    sent = read(list(words), splitter=TokenSplitter((1,), (2,), words.get, "normal"), spell=words.get)
    assert (sent.content, sent.listed) == (text, list(words))
    assert not any("\ufffd" in event.text for event in sent.events)
