"""The watcher alone: real tokenizers and matchers, histories made by hand, as mlx_lm's loops would show them.

The yardstick of every test is a fresh watcher that is fed the same tokens one by one: whatever was guessed, taken back
or fed in other steps before, what may come next is the same. A mask is read off the scores that come back.
"""

from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.generate import make_text_state_machine

from mlx_patches.reply_format import ANSWER, REASONING, START, ReplyFormat, TextSplitter, TokenSplitter, output_width
from mlx_patches.stop_strings import StopStrings
from mlx_patches.structured_output import GrammarCompiler, build_tokenizer
from mlx_patches.tool_choice import ToolFormat
from mlx_patches.tool_rules import read_tools
from mlx_patches.watched_replies import StepTokens
from mlx_patches.watcher import Watcher

PROMPT = [5, 6, 7]
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": r"\n {0,32}| "}),
    "words": LLMatcher.grammar_from_regex("[a-z ]{0,12}"),  # may end at once
    # An answer that may begin like the marker of the xtml style.
    "markers": LLMatcher.grammar_from_lark("start: <|open|> /[a-z]{1,20}/ (<|sep|> /[a-z]{1,5}/)?"),
    "short": LLMatcher.grammar_from_regex("yes|no"),  # nothing may follow
}


class Model:
    """A tiny model's reply format, and what makes watchers for it."""

    def __init__(self, folder):
        self.model, self.tokenizer = mlx_lm.load(str(folder))
        self.form = ReplyFormat(self.tokenizer, output_width(self.model, self.tokenizer))
        self.ends = sorted(self.form.end_tokens)
        self.grammar_side = from_tokenizer(self.tokenizer._tokenizer, n_vocab=self.form.width, eos_token=self.ends)

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def watcher(self, grammar="schema", phase=ANSWER, *, stops=(), guesses=0, splitter=None):
        tokenizer = self.tokenizer
        opening, closing = tokenizer.think_start_tokens or (), tokenizer.think_end_tokens or ()
        if splitter is None:
            splitter = TokenSplitter(opening, closing, self.form.token_bytes, phase)
        matcher = LLMatcher(self.grammar_side, GRAMMARS[grammar], log_level=0) if isinstance(grammar, str) else grammar
        return Watcher(
            self.form, splitter, matcher=matcher, stops=StopStrings(stops) if stops else None, guesses=guesses
        )


STYLES = ["plain", "think", "channel", "xtml"]


@pytest.fixture(scope="module")
def models(tiny):
    return {style: Model(tiny("llama", style=style, padded=40)) for style in STYLES}


def allowed(watcher, reply, width, prompt=PROMPT):
    """The ids that may come after `reply`."""
    scores = watcher(mx.array([*prompt, *reply], mx.uint32), mx.zeros((1, width)))
    assert scores.shape == (1, width)
    return frozenset(token for token, score in enumerate(scores[0].tolist()) if score == 0)


def walk(watcher, reply, width):
    """What may come before each token of `reply`, and after the last: one call for each."""
    return [allowed(watcher, reply[:n], width) for n in range(len(reply) + 1)]


# Phases


@pytest.mark.parametrize(
    "style, opening, closing",
    [
        ("think", "<think>", "</think>"),
        ("channel", "<|channel>thought", "<channel|>"),
        ("xtml", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ],
)
def test_phases_of_a_reply(models, style, opening, closing):
    model = models[style]
    width, ends = model.form.width, frozenset(model.ends)
    named = frozenset(range(model.form.named))
    answer = walk(model.watcher(), model.ids('{"a": "b"}'), width)
    assert answer[-1] == ends and not any(ends & may for may in answer[:-1])

    reply = [*model.ids(opening), *model.ids("Hmm. "), *model.ids(closing), *model.ids('{"a": "b"}')]
    may = walk(model.watcher(phase=START), reply, width)
    begin, end = len(model.ids(opening)), len(reply) - len(answer) + 1
    assert may[0] == answer[0] | {model.ids(opening)[0]}
    assert may[1:begin] == [{token} for token in model.ids(opening)[1:]]
    assert set(may[begin:end]) == {named - ends}
    assert may[end:] == answer

    assert walk(model.watcher(phase=REASONING), reply[begin:], width) == may[begin:]
    assert walk(model.watcher(phase=START), model.ids('{"a": "b"}'), width)[1:] == answer[1:]
    assert not any(named & may and max(may) >= model.form.named for may in may)


def test_an_answer_that_begins_like_the_marker_goes_on_as_either(models):
    model = models["xtml"]
    width = model.form.width
    open_, think, sep = model.ids("<|open|>think<|sep|>")
    (other,) = model.ids("xyz")[:1]

    def may(phase, *reply):
        return walk(model.watcher("markers", phase), reply, width)[-1]

    assert may(START) == {open_} == may(ANSWER)
    assert may(START, open_) == may(ANSWER, open_) >= {think, other}
    assert may(START, open_, think) == may(ANSWER, open_, think) >= {sep, other}
    assert may(START, open_, other) == may(ANSWER, open_, other)
    assert may(START, open_, think, other) == may(ANSWER, open_, think, other)
    thought = [open_, think, sep, other, *model.ids("<|close|>think<|sep|>")]
    for answer in ([], [open_], [open_, think], [open_, think, sep]):
        assert may(START, *thought, *answer) == may(ANSWER, *answer)


def test_both_end_tokens_where_the_grammar_may_end_and_nowhere_else(models):
    model = models["plain"]
    ends, width = frozenset(model.ends), model.form.width
    assert len(ends) == 2
    assert [may & ends for may in walk(model.watcher("short"), model.ids("yes"), width)] == [frozenset(), ends]
    assert all(ends <= may for may in walk(model.watcher("words"), model.ids("one two"), width))


# The draft's pattern: grow, shrink, grow

PLACES = {  # what is said before the guesses, the wrong guesses, what is said in their place
    "inside the closing marker": ("<|open|>think<|sep|>Hmm<|close|>", "think no", "think<|sep|>{"),
    "a wrong end of the closing marker": ("<|open|>think<|sep|>Hmm<|close|>think", ".", '<|sep|>{"'),
    "the marker was the guess": ("<|open|>think<|sep|>Hmm<|close|>think", '<|sep|>{"', " again<|close|>think<|sep|>{"),
    "the first token of the answer": ("<|open|>think<|sep|><|close|>think<|sep|>", '{"', "{"),
    "the opening marker was the guess": ("", "<|open|>think<|sep|>", '{"a": "'),
    "the answer was the guess": ("", '{"a": "', "<|open|>think<|sep|>Hmm"),
    "inside a string": ('{"a": "one', " two three", ' four"'),
    "the end of the answer was the guess": ('{"a": "one', '"}', " two"),
    "the end token was the guess": ('{"a": "one"}', "<|endoftext|>", "<|im_end|>"),
    "after an end token": ('{"a": "one"}', "<|im_end|>Hmm", "<|endoftext|>"),
    "a stop string was the guess": ('{"a": "one', " stop", ' st"'),
    "a stop string is said instead": ('{"a": "one st', "ay", "op"),
}


THOUGHT = "<|open|>think<|sep|>Hmm<|close|>think<|sep|>"


@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["at once", "after thinking"])
@pytest.mark.parametrize("place", PLACES)
def test_rejected_guesses_leave_no_trace(models, place, thought):
    model = models["xtml"]
    width = model.form.width
    said, wrong, instead = PLACES[place]
    said, wrong, instead = map(model.ids, (thought + said if said.startswith("{") else said, wrong, instead))
    fresh = walk(model.watcher(phase=START, stops=("stop",)), said + instead, width)
    guesses = max(len(wrong), len(instead)) + 1
    watcher = model.watcher(phase=START, stops=("stop",), guesses=guesses)
    assert walk(watcher, said, width) == fresh[: len(said) + 1]
    for n in range(1, len(wrong) + 1):  # the draft guesses, then the main model looks at each place
        allowed(watcher, said + wrong[:n], width)
    for n in range(len(instead) + 1):
        assert allowed(watcher, said + instead[:n], width) == fresh[len(said) + n]
    assert watcher.fault is None
    for n in range(1, len(wrong) + 1):  # and once more, from where that ended
        allowed(watcher, said + wrong[:n], width)
    assert allowed(watcher, said + instead, width) == fresh[-1]


class Broken:
    """Stands where a matcher or splitter is expected; the named call raises, or gives `result`."""

    def __init__(self, inner, name, result=None):
        self._inner, self._name, self._result = inner, name, result

    def __getattr__(self, name):
        if name == self._name and self._result is None:
            raise MemoryError(f"{name} broke")
        return (lambda *_: self._result) if name == self._name else getattr(self._inner, name)

    def deep_copy(self):
        return Broken(self._inner.deep_copy(), self._name, self._result)


@pytest.mark.parametrize("back", [1, 2, 3])
def test_guesses_behind_a_call_are_taken_back(tiny, back):
    # After a mask behind the closing marker, llguidance's own rollback leaves a matcher that allows something else.
    model = Model(tiny("llama", tools="json_tools"))
    width, reply = model.form.width, model.ids('<tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>')
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    function = {"name": "f", "parameters": schema}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    provider = SimpleNamespace(grammars=GrammarCompiler(build_tokenizer(model.form)))
    grammar = ToolFormat(model.tokenizer).reply(read_tools(body)[1], None, provider)
    fresh = walk(model.watcher(provider.grammars.matcher(grammar)), reply, width)
    watcher = model.watcher(provider.grammars.matcher(grammar), guesses=3)
    assert walk(watcher, reply, width) == fresh
    assert allowed(watcher, reply[:-back], width) == fresh[-1 - back]


def test_all_guesses_accepted_then_two_tokens_at_once(models):
    model = models["plain"]
    width, reply = model.form.width, model.ids('{"a": "one two three"}')
    fresh = walk(model.watcher(), reply, width)
    watcher = model.watcher(guesses=2)
    assert allowed(watcher, [], width) == fresh[0]
    assert allowed(watcher, reply[:2], width) == fresh[2]
    for n in (3, 2, 3, 4, 6, 5, 6, len(reply)):  # draft, main, then the draft with two new tokens, main ...
        assert allowed(watcher, reply[:n], width) == fresh[n], n


def test_narrow_rows_of_a_draft(models):
    model = models["plain"]
    width, reply = model.form.width, model.ids('{"a": "one"}')
    fresh = walk(model.watcher(), reply, width)
    for narrow in (1, 40, 300, model.form.named - 1):
        watcher = model.watcher(guesses=2)
        for n, may in enumerate(fresh):
            within = frozenset(token for token in may if token < narrow)
            # Where nothing that is allowed is in the row, any guess will do: the main model rejects it.
            assert allowed(watcher, reply[:n], narrow) == (within or frozenset(range(narrow)))
            if not within:
                allowed(watcher, [*reply[:n], 0], narrow)
                allowed(watcher, [*reply[:n], 0, 0], narrow)
            assert allowed(watcher, reply[:n], width) == may
        assert watcher.fault is None


def test_rows_wider_than_the_model_allow_no_more(models):
    model = models["think"]
    reply = [*model.ids("<think>Hmm</think>"), *model.ids('{"a": ""}')]
    for n, may in enumerate(walk(model.watcher(phase=START), reply, model.form.width)):
        assert allowed(model.watcher(phase=START, guesses=2), [], model.form.width + 99) <= frozenset(range(1200))
        watcher = model.watcher(phase=START)
        walk(watcher, reply[:n], model.form.width)
        assert allowed(watcher, reply[:n], model.form.width + 99) == may


# Any legal reply, any guesses


@st.composite
def pulls(draw):
    """How one call's history differs from the last: so many tokens taken back, so many new ones, chosen by number."""
    return draw(st.integers(0, 4)), draw(st.lists(st.integers(0, 10**6), min_size=0, max_size=3))


FAVOURITES = ["<|open|>", "<|close|>", "<|sep|>", "<think>", "</think>", "<|channel>", "<channel|>", "think", "thought"]


def choose(model, may, number):
    """One of `may`; half of the time one that matters to the phases, if there is one."""
    token_of = model.tokenizer.get_vocab()
    special = sorted(may & {token_of[name] for name in FAVOURITES if name in token_of} | may & frozenset(model.ends))
    pool = special if special and number % 2 else sorted(may)
    return pool[number // 2 % len(pool)]


@settings(max_examples=100, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    grammar=st.sampled_from(sorted(GRAMMARS)),
    phase=st.sampled_from([START, REASONING, ANSWER]),
    thought=st.booleans(),
    stops=st.sampled_from([(), ("e",), ("on", "st")]),
    calls=st.lists(pulls(), max_size=12),
)
def test_any_rewind_gives_what_a_fresh_watcher_gives(models, style, grammar, phase, thought, stops, calls):
    model = models[style]
    phase = ANSWER if style == "plain" else phase
    grammar = "words" if grammar == "markers" and style != "xtml" else grammar
    width = model.form.width

    def fresh(reply):
        return walk(model.watcher(grammar, phase, stops=stops), reply, width)[-1]

    guesses = 6
    watcher = model.watcher(grammar, phase, stops=stops, guesses=guesses)
    reply = []
    if thought and phase != ANSWER:
        opening, closing = model.tokenizer.think_start_tokens, model.tokenizer.think_end_tokens
        reply = [*(opening if phase == START else ()), *model.ids("Hmm"), *closing]
    assert walk(watcher, reply, width)[-1] == fresh(reply)
    for back, numbers in calls:
        reply = reply[: max(0, len(reply) - back)]
        for number in numbers:
            reply = [*reply, choose(model, fresh(reply), number)]
        assert allowed(watcher, reply, width) == fresh(reply)
    assert watcher.fault is None


@settings(max_examples=50, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    grammar=st.sampled_from(sorted(GRAMMARS)),
    numbers=st.lists(st.integers(0, 10**6), max_size=15),
)
def test_the_batch_s_step_and_the_history_say_the_same(models, style, grammar, numbers):
    model = models[style]
    grammar = "words" if grammar == "markers" and style != "xtml" else grammar
    phase, width, reply = (ANSWER if style == "plain" else START), model.form.width, []
    one, other = (model.watcher(grammar, phase) for _ in range(2))
    may = allowed(other, [], width)
    assert allowed(one, [], width) == may
    for number in numbers:
        reply.append(choose(model, may, number))
        one.enter(StepTokens(mx.array([3, reply[-1], 4])), 1)
        stale = [*reply[:-1], 0]  # with a step, the history's newest token is not looked at
        may = allowed(other, reply, width)
        assert allowed(one, stale, width) == may


# Ends and faults


def test_a_call_after_the_end_token_is_harmless(models):
    model = models["think"]
    for end in model.ends:
        for grammar, text in (("schema", '{"a": "b"}'), ("words", "one"), ("short", "yes")):
            reply, width = model.ids(text), model.form.width
            watcher = model.watcher(grammar, START, guesses=2)
            may = walk(watcher, reply, width)[-1]
            assert end in may
            allowed(watcher, [*reply, end], width)
            allowed(watcher, [*reply, end, end], width)
            assert watcher.fault is None
            assert allowed(watcher, reply, width) == may


def test_a_token_that_the_grammar_refuses_ends_the_reply(models, caplog):
    model = models["plain"]
    watcher = model.watcher()
    width = model.form.width
    walk(watcher, model.ids('{"a'), width)
    (x,) = model.ids("z")
    reply = [*model.ids('{"a'), *model.ids("]")]
    assert allowed(watcher, reply, width) == frozenset(model.ends)
    assert f"refused token {reply[-1]}" in str(watcher.fault)
    assert "refused token" in caplog.text
    assert allowed(watcher, [*reply, x], width) == frozenset(model.ends)


@pytest.mark.parametrize("method", ["unsafe_compute_mask_ptr", "is_error", "consume_token"])
def test_a_broken_matcher_ends_the_reply(models, method):
    model = models["think"]
    matcher = Broken(LLMatcher(model.grammar_side, GRAMMARS["schema"], log_level=0), method)
    watcher = model.watcher(matcher, START)
    may = walk(watcher, model.ids('{"a": "b"}'), model.form.width)
    assert may[-1] == frozenset(model.ends)
    assert isinstance(watcher.fault, MemoryError)


def test_a_matcher_in_its_error_state_ends_the_reply(models):
    model = models["plain"]
    matcher = LLMatcher(model.grammar_side, "%regex { not a grammar", log_level=0)
    assert matcher.is_error()
    watcher = model.watcher(matcher)
    assert allowed(watcher, [], model.form.width) == frozenset(model.ends)
    assert "grammar failed" in str(watcher.fault)


@pytest.mark.parametrize("grammar", ["schema", None])
def test_a_broken_splitter_ends_the_reply(models, grammar):
    model = models["think"]
    machine = TextSplitter(make_text_state_machine(model.tokenizer, []), "normal")
    inner = machine if grammar is None else TokenSplitter((1,), (2,), model.form.token_bytes, START)
    watcher = model.watcher(grammar, splitter=Broken(inner, "split"), stops=("stop",))
    assert not frozenset(model.ends) & allowed(watcher, [], model.form.width) or grammar is None
    assert allowed(watcher, model.ids("{"), model.form.width) == frozenset(model.ends)
    assert isinstance(watcher.fault, MemoryError)


def test_a_history_that_jumps_ends_the_reply(models):
    model = models["plain"]
    watcher = model.watcher()
    allowed(watcher, [], model.form.width)
    assert allowed(watcher, model.ids('{"a": '), model.form.width) == frozenset(model.ends)
    assert "jumped" in str(watcher.fault)


# Stop strings without a grammar


def test_only_a_stop_string_in_the_answer_ends_a_free_reply(models):
    model = models["think"]
    width, ends = model.form.width, frozenset(model.ends)
    splitter = TextSplitter(make_text_state_machine(model.tokenizer, []), "normal")
    watcher = model.watcher(None, splitter=splitter, stops=("o t",), guesses=8)
    thought = model.ids("<think>one two</think>")
    reply = [*thought, *model.ids("one two three")]
    may = walk(watcher, reply, width)
    first = next(n for n, may in enumerate(may) if may == ends)
    assert model.tokenizer.decode(reply[len(thought) : first]).endswith("one two three")
    assert set(map(len, may[:first])) == {width}
