"""Harmony replies as o200k_harmony tokens: the splitter by itself, and through the server with a scripted model.

The judge is openai-harmony's parser where it accepts a reply; tests/harmony_transcripts.py says the rest.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.server import Response

from mlx_patches.harmony import HarmonyFormat
from mlx_patches.reply_events import CallArguments, CallOpened, Content, Reasoning, ReplyReader
from tests.client import both, both_complete, chat, chat_stream, together
from tests.harmony_transcripts import ANALYSIS, CALL, FINAL, PARIS, TRANSCRIPTS, TURN, judge, said, tokens_of
from tests.harmony_vocabulary import SPECIAL, encoding, folder

CHANNEL, START, END, RETURN, CALLED = 200005, 200006, 200007, 200002, 200012
ENDS = (RETURN, CALLED)


class Vocabulary:
    """What HarmonyFormat asks of a tokenizer, from openai-harmony's own encoding."""

    @staticmethod
    def get_vocab():
        return {name: token for token, name in SPECIAL.items()}

    @staticmethod
    def encode(text, add_special_tokens=False):
        return encoding().encode(text, allowed_special="all")


@pytest.fixture(scope="module")
def form():
    inner = encoding()._inner
    return HarmonyFormat(Vocabulary, lambda token: bytes(inner.decode_bytes([token])))


def read(form, tokens, end=None, prompt=TURN, streamed=True):
    """Each event of a reply of these tokens: `end` None is a reply that goes on, "length" one that is cut."""
    splitter = form.splitter(tokens_of(prompt))
    reader = ReplyReader(splitter, None, form.token_bytes, streamed=streamed)
    events = []
    for n, token in enumerate(tokens):
        last = n == len(tokens) - 1
        reason = "stop" if token in ENDS else "length" if last and end == "length" else None
        events += reader.read(Response("", token, 0.0, reason, ()))
    if not tokens or (tokens[-1] not in ENDS and end == "stop"):
        events += reader.read(Response("", 0, 0.0, "stop", ()))
    return events, reader


def fold(events):
    content, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text, _):
                content += text
            case CallOpened(_, _, name):
                calls.append((name, ""))
            case CallArguments(number, text):
                calls[number] = (calls[number][0], calls[number][1] + text)
    return content, reasoning, calls


def expected(reply):
    return TRANSCRIPTS[reply] or judge(tokens_of(reply))


# The splitter


def test_there_are_transcripts_of_both_judges():
    judged = [reply for reply, says in TRANSCRIPTS.items() if says is None]
    assert len(judged) >= 40 and len(TRANSCRIPTS) - len(judged) >= 20
    assert [reply for reply in judged if judge(tokens_of(reply)) is None] == []


@pytest.mark.parametrize("reply", TRANSCRIPTS)
def test_a_reply_says_what_the_judge_says(form, reply):
    tokens = tokens_of(reply)
    events, reader = read(form, tokens, "stop")
    assert fold(events) == expected(reply)
    assert reader.finish_reason == ("tool_calls" if expected(reply)[2] else "stop")


@pytest.mark.parametrize("reply", TRANSCRIPTS)
def test_a_reply_cut_at_every_token_says_the_beginning(form, reply):
    """Cut by max_tokens or seen midway: no more than the whole, and as much as openai-harmony's parser has by then."""
    tokens = tokens_of(reply)
    whole = expected(reply)
    for n in range(1, len(tokens)):
        cut, reader = read(form, tokens[:n], "length")
        midway, _ = read(form, tokens[:n])
        assert reader.finish_reason == "length"
        for content, reasoning, calls in (fold(cut), fold(midway)):
            assert whole[0].startswith(content.rstrip("\ufffd")) and whole[1].startswith(reasoning.rstrip("\ufffd"))
            assert len(calls) <= len(whole[2])
            for (name, arguments), (whole_name, text) in zip(calls, whole[2], strict=False):
                assert name == whole_name and (text.startswith(arguments.rstrip("\ufffd")))
        content, reasoning, calls = fold(read(form, tokens[:n], "length", streamed=False)[0])
        assert reasoning == fold(cut)[1] and calls == whole[2][: len(calls)]
        # Not streamed, a call that is cut is its text.
        texts = [text for _, text in fold(cut)[2][len(calls) :]]
        assert content.rstrip("\ufffd") == "".join([fold(cut)[0], *texts]).rstrip("\ufffd")
        if TRANSCRIPTS[reply] is None:
            assert trimmed(fold(cut)) == trimmed(parsed_so_far(tokens[:n]))


def parsed_so_far(tokens):
    from openai_harmony import Role, StreamableParser

    parser = StreamableParser(encoding(), None if tokens[0] == START else Role.ASSISTANT)
    for token in tokens:
        parser.process(token)
    messages = [(m.channel, m.recipient, m.content[0].text) for m in parser.messages]
    if parser.state.value == "Content":
        messages.append((parser.current_channel, parser.current_recipient, parser.current_content))
    return said(messages)


def trimmed(says):
    """Without a character of which a part has come."""
    content, reasoning, calls = says
    calls = [(name, text.rstrip("\ufffd")) for name, text in calls]
    return content.rstrip("\ufffd"), reasoning.rstrip("\ufffd"), calls


HEADERS = [
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary",
    "<|channel|>commentary to=functions.f <|constrain|>json",
    "<|channel|>commentary to=functions.f json",
    "<|channel|>analysis to=functions.f code",
    " to=functions.f<|channel|>commentary json",
    "<|channel|>commentary to=functions.f<|channel|>json",
    "<|channel|>commentary?",
    "",
]
BODIES = ["Hello", "", " \n", '{"a": [1, 2]}', "😀👩‍👩‍👧", "<~|end|>", "two words", "\n\nso: x=1?"]
SECRETS = ["commentary", "final", "analysis", "json", "code", "assistant", "to=", "functions"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["<|start|>assistant", "<|start|>assistant", "\n<|start|>assistant", ""]),
            st.sampled_from(HEADERS),
            st.sampled_from(BODIES),
            st.sampled_from(["<|end|>", "<|end|>", ""]),
        ),
        max_size=6,
    ),
    st.sampled_from(["stop", "length", None]),
    st.booleans(),
    st.data(),
)
def test_nothing_of_a_header_shows(form, messages, end, streamed, data):
    """Messages in any order, some without their turn or their end, cut anywhere. And no text of theirs is lost."""
    text, closed = "", True
    for turn, header, body, close in messages:
        # A recipient ahead of its channel needs a turn: after text it would be text.
        turn = turn if closed or header[:1] != " " else TURN
        text, closed = f"{text}{turn}{header}<|message|>{body}{close}", bool(close)
    tokens = tokens_of(text)
    kept = data.draw(st.one_of(st.just(len(tokens)), st.integers(0, len(tokens))))
    content, reasoning, calls = fold(read(form, tokens[:kept] or [END], end, streamed=streamed)[0])
    shown = "".join([content, reasoning, *(text for _, text in calls)]).replace("<|end|>", "")
    assert not any(secret in shown for secret in [*SPECIAL.values(), *SECRETS])
    assert all(name == "f" or (end == "stop" and "functions.f".startswith(name)) for name, _ in calls)
    if kept == len(tokens) and end:
        bodies = "".join("".join(body for _, _, body, _ in messages).replace("~", "").split())
        assert not Counter(bodies) - Counter("".join([content, reasoning, *(text for _, text in calls)]))


@pytest.mark.parametrize("before, reasoning", [("", ""), (f"{ANALYSIS}Hm.<|end|>", "Hm.")])
@pytest.mark.parametrize("header", [" to=", " to=functions", " to=functions.f", "to=functions.f json"])
def test_a_header_that_the_reply_ends_in_does_not_show(form, before, reasoning, header):
    assert fold(read(form, tokens_of(before + header), "stop")[0]) == ("", reasoning, [])
    words = fold(read(form, tokens_of(f"{before}{header} and so on"), "stop")[0])
    assert words == (f"{header} and so on", reasoning, [])


def test_the_tokens_that_go_on_with_a_header(form):
    """What the watcher lets through before JSON, and what it forces when thinking is cut."""
    splitter, tools = form.splitter(tokens_of(TURN), exact=True), [{"function": {"name": "f"}}]
    free = form.splitter(tokens_of(TURN), tools=tools)

    def after(text, of=splitter):
        state = of.first
        for token in tokens_of(text):
            state, _ = of.split(state, token)
        return state

    channel, start, message = tokens_of("<|channel|><|start|><|message|>")
    analysis, final, commentary = (tokens_of(name)[0] for name in ("analysis", "final", "commentary"))
    assert splitter.header_tokens(splitter.first) == {channel, start}
    assert splitter.header_tokens(after("<|channel|>")) == {analysis, final}
    assert splitter.header_tokens(after(f"{ANALYSIS}Hm.<|end|>")) == {start}
    assert splitter.header_tokens(after(f"{ANALYSIS}Hm.<|channel|>")) == {analysis, final}
    assert message in splitter.header_tokens(after("<|channel|>final"))
    assert splitter.closing_tokens(after(f"{ANALYSIS}Hm.")) == {END}
    assert splitter.closing_tokens(after(f"{ANALYSIS}Hm.<|end|>")) == {start}
    assert splitter.closing_tokens(after(f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>")) == {final}
    assert free.closing_tokens(after(f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>", free)) == {final, commentary}
    assert not free.closing_tokens(after(f"{ANALYSIS}Hm.<|end|>{TURN}<|channel|>commentary", free))
    assert free.reopening_tokens(after(f"{FINAL}Hm.<|end|>{TURN}<|channel|>", free)) == {analysis}
    assert free.reopening_tokens(after(f"{FINAL}Hm.<|end|>analysis", free)) == {message}
    assert not free.reopening_tokens(after(f"{FINAL}Hm.<|end|>", free))


@given(st.lists(st.sampled_from([*SPECIAL, *range(0, 3000, 7), *tokens_of("to=functions.f final")]), max_size=30))
def test_any_tokens_end_in_a_reply(form, tokens):
    """Total, and what was sent stays."""
    tokens = [token for token in tokens if token not in ENDS]
    events, reader = read(form, [*tokens, RETURN])
    assert reader.finish_reason in ("stop", "tool_calls")
    assert fold(events)[0].startswith(fold(read(form, tokens or [END])[0])[0])


# Through the server

NO_LIMITS = {"reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
WEATHER = f"{ANALYSIS}It is 😀.<|end|>{TURN}<|channel|>commentary<|message|>I look.<|end|>{TURN}{CALL}{PARIS}<|call|>"


@pytest.fixture
def server(serve, tiny):
    return serve(tiny("scripted", style="harmony", tokenizer=str(folder())))


def as_script(reply):
    return reply.replace("~", "<|cut|>")


def heard(reply):
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in reply.tool_calls]
    return reply.content, reply.reasoning, calls


def all_of(server, calls):
    """Replies to `calls`, streamed and not, eight at a time."""
    calls = [{"call": call, **body} for body in calls for call in (chat, chat_stream)]
    return [reply for at in range(0, len(calls), 8) for reply in together(server, calls[at : at + 8])]


@pytest.mark.parametrize("body", [{}, {"seed": 1}], ids=["batched", "seed"])
def test_every_transcript_over_http(server, body):
    texts = list(TRANSCRIPTS)[:: 4 if body else 1]
    got = all_of(server, [{"prompt": as_script(text), **body} for text in texts])
    for text, reply in zip((text for text in texts for _ in "12"), got, strict=True):
        assert (reply.status, heard(reply)) == (200, expected(text)), (text, reply.error)
        assert reply.finish_reason == ("tool_calls" if expected(text)[2] else "stop")
        assert not any(marker in reply.raw.decode() for marker in SPECIAL.values()) or "~" in text


def test_a_reply_that_is_cut_over_http(server, form):
    tokens = tokens_of(WEATHER)
    counts = range(1, len(tokens), 4)
    got = all_of(server, [{"prompt": WEATHER, "max_tokens": n, **NO_LIMITS} for n in counts])
    for at, reply in enumerate(got):
        n, streamed = counts[at // 2], at % 2 == 1
        says = fold(read(form, tokens[:n], "length", streamed=streamed)[0])
        assert (reply.status, heard(reply)) == (200, says), (n, reply.error)
        assert reply.finish_reason == "length"


def test_upstream_shows_it_all(serve, tiny):
    upstream = serve(tiny("scripted", style="harmony"), module="mlx_lm.server")
    reply = chat(upstream, f"{ANALYSIS}Hm.<|end|>{TURN}{FINAL}Hello")
    assert "analysis" in reply.content and "<|message|>" in reply.content


def test_log_probabilities_are_of_the_content_only(serve, tiny):
    server = serve(tiny("scripted", style="harmony"))
    reply = both(server, f"{ANALYSIS}The plan.<|end|>{TURN}{FINAL}Hello world", logprobs=True)
    assert [entry["token"] for entry in reply.logprobs["content"]] == ["Hello", " world"]
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] == 3


def test_completions_read_harmony_where_the_prompt_opens_it(serve, tiny):
    server = serve(tiny("scripted", style="harmony"))
    script = f"{ANALYSIS}Well.<|end|>{TURN}{FINAL}Hello"
    for prompt in (f"<|script|>{script}<|script_end|>", f"<|script|>{script}<|script_end|><|reply+2|>{TURN}"):
        (choice,) = both_complete(server, prompt).body["choices"]
        assert (choice["text"], choice["reasoning_content"]) == ("Hello", "Well.")
