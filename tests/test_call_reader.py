"""The table of calls for every tool format of mlx_lm 0.32.2, read without a model: streamed at every split and not.

What always holds: the events depend on the text and not on how it was cut; streamed and unstreamed calls are the same;
nothing raises, no reply ends with "tool_calls" and none in it, and no word of a text is lost, whatever is damaged.
"""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.server import Response

from mlx_patches.reply_events import CallArguments, CallOpened, Content
from tests.tool_texts import FORMATS, JSON_FORMATS, TOOLS, Raw, block, markers, read, reader, written

ALL = pytest.mark.parametrize("form", FORMATS)
HAS_END = [form for form in FORMATS if markers(form)[1]]


def agreed(form, text, tools=TOOLS, **options):
    """A reply's Sent, the same unstreamed and streamed: in one token, in letters, and in two pieces cut anywhere."""
    whole = read(form, [text], tools, streamed=False, **options)
    step = max(1, len(text) // 60)
    cuts = [[text], list(text), *([text[:n], text[n:]] for n in range(1, len(text), step))]
    for tokens in cuts:
        assert read(form, tokens, tools, **options).said == whole.said, tokens
    return whole


def called(form, calls, text=None):
    """The values of a reply that is these calls."""
    sent = agreed(form, written(form, calls) if text is None else text)
    assert (sent.content, sent.reasoning, sent.reason) == ("", "", "tool_calls")
    return sent.values


VALUES = {
    "a": 12345678901234567890123,
    "n": -1.5,
    "s": "null",
    "t": "  indented\n\n  \ttwo <b>&amp; 'three' {x}",
    "b": True,
    "o": {"k": [1, {"z": None}], "e": {}},
    "l": ["q", 2, []],
}


@ALL
def test_a_call_that_parses(form):
    assert called(form, [("f", VALUES)]) == [("f", VALUES)]


@ALL
def test_digits_and_text_are_as_written(form):
    (_, text), *_ = agreed(form, written(form, [("f", {"a": 2**63 + 1, "s": "02134", "t": "true"})])).calls
    assert "9223372036854775809" in text and '"02134"' in text and '"true"' in text


@ALL
def test_a_call_without_arguments(form):
    assert agreed(form, written(form, [("get_time", {})])).calls == [("get_time", "{}")]


@ALL
def test_an_argument_that_does_not_read_as_its_type_is_the_text(form):
    arguments = {"n": Raw("1e400"), "o": Raw("word"), "a": 3}
    assert called(form, [("f", arguments)]) == [("f", {"n": "1e400", "o": "word", "a": 3})]


@pytest.mark.parametrize("form", [form for form in HAS_END if form not in JSON_FORMATS])
def test_what_a_grammar_had_not_ended_is_no_call(form):
    """A value that holds the call's own markup, cut before its end: what it may be read as is not what was written."""
    text = written(form, [("f", {"s": "x"})])
    for stop in range(len(markers(form)[0]) + 3, len(text) - len(markers(form)[1])):
        sent = read(form, [text[:stop]], held=True, end="length")
        assert sent.calls in ([], [("f", '{"s": "x"}')]) and (sent.calls or sent.content == text[:stop])
    assert read(form, [text], held=True, end="length").calls


@pytest.mark.parametrize("form", ["json_tools", "qwen3_coder", "minimax_m2", "muse_spark", "kimi_k2", "mistral"])
def test_a_call_whose_closing_marker_is_missing_takes_no_other_with_it(form):
    first, second = (written(form, [("f", {"s": text})]) for text in ("x", "y"))
    open_call = first.removesuffix(markers(form)[1]) if markers(form)[1] else first
    sent = agreed(form, f"{open_call} {second}")
    assert sent.values == [("f", {"s": "x"}), ("f", {"s": "y"})] and not sent.content.strip()


@pytest.mark.parametrize("form", ["json_tools", "qwen3_coder"])
def test_reading_takes_time_by_the_length_of_the_text(form):
    start, end = markers(form)
    for text in (
        f"x {start}{{ " * 1500,
        f"x {start}{{ " * 1500 + end,
        f'x {start}{{"' * 1500,
        f"x {start}" + "A" * 25_000,
    ):
        began = time.process_time()
        read(form, [text[at : at + 4] for at in range(0, len(text), 4)])
        assert time.process_time() - began < 2


@ALL
def test_two_calls(form):
    calls = [("f", {"a": 1, "s": "x"}), ("g", {"s": "y"})]
    assert called(form, calls) == calls
    if form not in ("glm47", "laguna", "longcat", "minicpm5", "json_tools", "qwen3_coder"):
        return
    start, end = markers(form)
    text = start + block(form, calls) + end
    if form == "minicpm5":
        text = text.replace('\n"g"', '\n<function name="g"')
    assert called(form, calls, text) == calls


@pytest.mark.parametrize("form", HAS_END)
def test_the_closing_tag_in_a_string(form):
    for value in (
        f"text {markers(form)[1]} inside",
        f"{markers(form)[1]}",
        f"a {markers(form)[1]}\n{markers(form)[1]}",
    ):
        calls = [("f", {"s": value, "a": 1})]
        assert called(form, calls) == calls


@ALL
def test_inner_tags_in_a_string(form):
    tags = (
        "say </parameter> and </param> </arg_value> </longcat_arg_value> </atem:parameter> <|close|>argument<|sep|> now"
    )
    calls = [("f", {"s": f"{tags} </think> <think> <|im_end|> }} ]", "a": 1})]
    assert called(form, calls) == calls


@ALL
def test_a_whole_call_in_a_string(form):
    example = written(form, [("g", {"s": "inner"})])
    if form in ("gemma4", "function_gemma"):  # its strings have no way to hold their own quotes
        example = example.replace('<|"|>', '"').replace("<escape>", '"')
    if form == "minicpm5":
        example = example.replace("<![CDATA[", "").replace("]]>", "")
    calls = [("f", {"s": f"like this:\n{example}\nand so on", "a": 1})]
    assert called(form, calls) == calls


@ALL
def test_a_block_that_is_no_call_is_text(form, caplog):
    start, end = markers(form)
    for body in ("not a call", "", " ", '{"x": 1}', "42", '{"name": 5}', "<x>1</x>"):
        sent = agreed(form, f"{start}{body}{end} more")
        assert (sent.content, sent.calls, sent.reason) == (f"{start}{body}{end} more", [], "stop")
    assert "cannot be read" in caplog.text


@ALL
def test_a_broken_call_is_text(form, caplog):
    end = markers(form)[1]
    whole = written(form, [("f", {"s": "some words", "o": {"k": 1}})])
    half = whole[: whole.index("some words") + 4]
    text = f"Well: {half}{end}"
    sent = read(form, [text], streamed=False)
    if sent.calls:  # tags whose ends are missing are read as if they were there
        assert form not in JSON_FORMATS and "some" in sent.values[0][1]["s"]
        return
    assert (sent.content, sent.reason) == (text, "stop")
    assert "cannot be read" in caplog.text
    for tokens in ([text], list(text)):
        streamed = read(form, tokens)
        assert (streamed.content, streamed.reason) == (text, "stop")
        assert all("some words" not in arguments for _, arguments in streamed.calls)


@ALL
def test_a_call_cut_by_the_limit(form):
    text = "So: " + written(form, [("f", {"s": "one two three", "a": 1})])
    for stop in range(len("So: ") + len(markers(form)[0]), text.index("three") + 3):
        cut = text[:stop]
        sent = read(form, [cut], streamed=False, end="length")
        assert (sent.content, sent.calls, sent.reason) == (cut, [], "length")
        for tokens in ([cut], list(cut)):
            streamed = read(form, tokens, end="length")
            assert streamed.reason == "length"
            if streamed.calls:
                assert streamed.content.strip() == "So:" and streamed.calls[0][1] in cut
            else:
                assert streamed.content == cut


@ALL
def test_a_tag_in_prose(form):
    start, end = markers(form)
    call = written(form, [("f", {"a": 1})])
    for text in (f"Use the {start} tag, then {end}.", f"{start}", f"a {call} b", f"{call}"):
        sent = agreed(form, text, tools=None)
        assert (sent.content, sent.calls, sent.reason) == (text, [], "stop")
    for text in (f"Use the {start} tag, then {end}.", f"`{start}` and `{end}`", f"It ends with {start}"):
        sent = agreed(form, text)
        assert (sent.content, sent.calls, sent.reason) == (text, [], "stop")


@ALL
def test_a_tag_in_thinking(form):
    start, end = markers(form)
    for thought in (f"I could use {start} here", f"the {start} and {end} tags", f"{start}not a call{end} so", start):
        sent = agreed(form, f"<think>{thought}</think>Hello")
        assert sent.said == ("Hello", thought, [], "stop")
    undeclared = written(form, [("nope", {"q": "z"})])
    sent = agreed(form, f"<think>a {undeclared} b</think>Hello")
    if end:
        assert sent.said == ("Hello", f"a {undeclared} b", [], "stop")
        declared = written(form, [("f", {"a": 1})])
        sent = agreed(form, f"<think>a {declared}b</think>Hello")
        assert sent.said == ("Hello", "a b", [("f", '{"a": 1}')], "tool_calls")


@ALL
def test_an_undeclared_name_is_a_call(form, caplog):
    assert called(form, [("nope", {"q": "z"})]) == [("nope", {"q": "z"})]
    assert "nope" in caplog.text


@ALL
@pytest.mark.parametrize("name", ["a@b", "@", "a.b", "f.", "..", "-", "a/b:0", "functions.f", "call:f", "9"])
def test_any_name_that_a_tool_may_have(form, name):
    tools = [{"type": "function", "function": {"name": name}}]
    for arguments in ({"s": "x y"}, {}):
        sent = agreed(form, written(form, [(name, arguments)]), tools)
        assert (sent.content, sent.values, sent.reason) == ("", [(name, arguments)], "tool_calls")


@ALL
def test_blank_space_before_a_call_is_no_content(form):
    call = written(form, [("f", {"a": 1})])
    assert agreed(form, f"\n\n {call}").content == ""
    assert agreed(form, f"<think>x</think>\n\n{call}").said[:2] == ("", "x")
    if markers(form)[1]:
        assert agreed(form, f"Well:\n\n{call}\n{call}\n").content == "Well:"
        assert agreed(form, f"{call}\nThen  more\n").content == "\nThen  more\n"
    assert agreed(form, "Only  text \n\n").content == "Only  text \n\n"


def test_ids_are_kept():
    sent = agreed("kimi_k2", written("kimi_k2", [("f", {"a": 1})]))
    assert sent.ids == ["functions.f:0"]
    assert read("mistral", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc123def"}]']).ids == [
        "abc123def"
    ]


def test_no_two_calls_of_a_reply_have_one_id():
    calls = [("f", {"a": 1}), ("f", {"a": 2}), ("f", {"a": 3})]
    for streamed in (True, False):
        ids = read("kimi_k2", list(written("kimi_k2", calls)), streamed=streamed).ids
        assert ids[0] == "functions.f:0" and len(set(ids)) == 3


ODD_TEXTS = ["<![CDATA[x]]>", " <![CDATA[x]]>\n", "<![CDATA[", "]]>", "<![CDATA[</parameter>]]>"]


@ALL
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_cdata_is_text_but_in_minicpm(form, text):
    if form == "minicpm5" and "<" not in text:
        text += "\n"
    assert called(form, [("f", {"s": text, "a": 1})]) == [("f", {"s": text, "a": 1})]


@pytest.mark.parametrize(
    "form, end",
    [
        ("qwen3_coder", "</parameter>"),
        ("minimax_m2", "</parameter>"),
        ("minicpm5", "</param>"),
        ("muse_spark", "</atem:parameter>"),
        ("glm47", "</arg_value>"),
        ("laguna", "</arg_value>"),
        ("longcat", "</longcat_arg_value>"),
    ],
)
def test_a_values_own_end_tag_in_it_is_text(form, end):
    for text in (end, f"a{end}b", f"a\n{end}\nb", f"{end}{end}", f"x {end} {end}", f"a\n{end}"):
        for arguments in ({"s": text}, {"s": text, "a": 1}, {"a": 1, "s": text}):
            assert called(form, [("f", arguments)]) == [("f", arguments)]


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_arguments_in_json_are_streamed(form):
    text = written(form, [("f", {"s": "one two three", "a": 12}), ("g", {"s": "x"})])
    sent = read(form, list(text))
    first = [e for e in sent.events if isinstance(e, CallOpened | CallArguments)]
    assert first[0] == CallOpened(0, first[0].id, "f")
    assert sum(isinstance(e, CallArguments) and e.number == 0 for e in first) > 10
    replies, events = reader(form), []
    at = text.index("two")
    for n, letter in enumerate(text[:at]):
        events += replies.read(Response(letter, n, -0.5, None, ()))
    pieces = "".join(e.text for e in events if isinstance(e, CallArguments))
    assert pieces == '{"s": "one '


@pytest.mark.parametrize("form", [form for form in JSON_FORMATS if markers(form)[1]])
def test_a_closing_tag_in_a_string_does_not_stop_the_stream(form):
    end = markers(form)[1]
    value = f"one {end} two {end[:4]} three {end}{end} four \\{end} five {end[0]}"
    text = written(form, [("f", {"s": value, "a": 12}), ("g", {"s": f"{end}x"})])
    assert agreed(form, text).values == [("f", {"s": value, "a": 12}), ("g", {"s": f"{end}x"})]
    for upto in ("two", "three", "four", "five"):
        replies, events = reader(form), []
        for n, letter in enumerate(text[: text.index(upto) + len(upto)]):
            events += replies.read(Response(letter, n, -0.5, None, ()))
        assert "".join(e.text for e in events if isinstance(e, CallArguments)).endswith(upto)


@ALL
def test_other_formats_send_a_call_at_its_end(form):
    sent = read(form, list(written(form, [("f", {"s": "one two three", "a": 12})])))
    pieces = [e for e in sent.events if isinstance(e, CallArguments)]
    assert len(pieces) == 1 or form in JSON_FORMATS


# Unions: the first member type that the text fits


TAGGED = ("qwen3_coder", "glm47", "minimax_m2", "minicpm5", "muse_spark", "longcat", "pythonic", "gemma4")


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    "name, written_as, value",
    [
        ("u", "null", None),
        ("u", "2.5", 2.5),
        ("v", "7", 7),
        ("v", "null", None),
        ("w", "12", 12),
        ("w", "false", False),
        ("x", "5", "5"),
        ("b", "1", True),
        ("b", "yes", True),
        ("b", "no", False),
        ("s", "null", "null"),
        ("s", "02134", "02134"),
        ("a", "9007199254740993", 9007199254740993),
        ("v", "word", "word"),
    ],
)
def test_a_value_is_read_by_its_schema(form, name, written_as, value):
    if (form, name) == ("gemma4", "x"):
        value = int(value)  # its strings have quotes
    assert called(form, [("f", {name: Raw(written_as)})]) == [("f", {name: value})]


# Inner tags that are missing


QWEN = ("<parameter=s>\nx\n</parameter>\n", "<parameter=a>\n1\n</parameter>\n")
MISSING = {
    "a parameter's end": ("qwen3_coder", f"<function=f>\n<parameter=s>\nx\n{QWEN[1]}</function>\n"),
    "the last parameter's end": ("qwen3_coder", f"<function=f>\n{QWEN[0]}<parameter=a>\n1\n</function>\n"),
    "the function's end": ("qwen3_coder", f"<function=f>\n{QWEN[0]}{QWEN[1]}"),
    "both ends": ("qwen3_coder", f"<function=f>\n{QWEN[0]}<parameter=a>\n1\n"),
    "MiniMax's parameter's end": (
        "minimax_m2",
        '<invoke name="f"><parameter name="s">x</parameter>\n<parameter name="a">1</invoke>',
    ),
    "GLM's value's end": ("glm47", "f<arg_key>s</arg_key><arg_value>x</arg_value><arg_key>a</arg_key><arg_value>1"),
    "a bracket": ("json_tools", '{"name": "f", "arguments": {"s": "x", "a": 1}'),
    "none, but one too many": ("json_tools", '{"name": "f", "arguments": {"s": "x", "a": 1}}}'),
}


@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_inner_tag(missing):
    form, body = MISSING[missing]
    start, end = markers(form)
    assert called(form, None, f"{start}{body}{end}") == [("f", {"s": "x", "a": 1})]


# The second chance


CHANCES = {
    "Llama's": '{"name": "f", "parameters": {"a": 1}}',
    "a list": '[{"name": "f", "arguments": {"a": 1}}]',
    "OpenAI's": '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
    "OpenAI's, encoded twice": '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
    "Qwen's XML": "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
    "MiniMax's": '<invoke name="f"><parameter name="a">1</parameter></invoke>',
    "Gemma's": "call:f{a:1}",
    "Gemma's without call:": "f{a: 1 }",
    "Python": "[f(a=1)]",
    "fenced": '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
}


@pytest.mark.parametrize("form", HAS_END)
@pytest.mark.parametrize("chance", CHANCES)
def test_another_dialect_between_the_markers(form, chance):
    start, end = markers(form)
    text = CHANCES[chance].removesuffix(end)
    assert called(form, None, f"{start}{text}{end}") == [("f", {"a": 1})]


def test_gemma_with_dashes_and_blanks():
    text = '<|tool_call>call:f{s: <|"|>x<|"|>, my-key:2, o:{in-ner: true , l:[1, 2]}}<tool_call|>'
    assert called("gemma4", None, text) == [("f", {"s": "x", "my-key": 2, "o": {"in-ner": True, "l": [1, 2]}})]


@pytest.mark.parametrize("form", [None, "json_tools", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '  {"name": "f", "arguments": {"a": 1}}\n',
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
        '<tools>{"name": "f", "arguments": {"a": 1}}</tools>',
        '<tools>\n{"name": "f", "arguments": {"a": 1}}\n</tools>',
        '[{"name": "f", "arguments": {"a": 1}}]',
        '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '<think>Hm.</think>\n\n{"name": "f", "parameters": {"a": 1}}',
    ],
)
def test_an_answer_that_is_nothing_but_a_call(form, text):
    sent = agreed(form, text)
    assert (sent.content, sent.values, sent.reason) == ("", [("f", {"a": 1})], "tool_calls")
    without = agreed(form, text, tools=None)
    assert (without.content, without.calls) == (text.removeprefix("<think>Hm.</think>"), [])


def test_several_objects_in_a_row():
    one = '{"name": "f", "parameters": {"a": 1}}'
    for text in (f"{one}\n{one}", f"{one}; {one}", f"[{one}, {one}]", f"{one}, {one}"):
        assert agreed(None, text).values == [("f", {"a": 1})] * 2


@pytest.mark.parametrize("form", [None, "json_tools", "qwen3_coder", "gemma4"])
@pytest.mark.parametrize(
    "text",
    [
        'Call it like this: {"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}} is how a call looks.',
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```\nThat is an example.',
        'Example:\n```json\n{"name": "f", "arguments": {"a": 1}}\n```',
        '{"name": "nope", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "words"}',
        '{"name": "f", "description": "d", "parameters": {"type": "object"}}',
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}',
        '{"a": 1}',
        '{"city": "Paris", "name": "f"}',
        '{"name": "f", "age": 3}',
        '[1, 2, {"name": "f", "arguments": {}}]',
        "f(a=1)",
        "call:f{a:1}",
        "<function=f><parameter=a>1</parameter></function>",
        '{"name": "f", "arguments": {"a": 1}',
    ],
)
def test_no_call_is_invented(form, text):
    sent = agreed(form, text)
    assert (sent.content, sent.calls, sent.reason) == (text, [], "stop")


def test_an_answer_in_json_is_sent_as_soon_as_it_is_no_call():
    sent = read(None, ['{"', 'name": "', "An", "na", '", "age": 3', "}"])
    assert [e.text for e in sent.events if isinstance(e, Content)][:2] == ['{"name": "An', "na"]


@ALL
@pytest.mark.parametrize(
    "tools", [None, [], [None], [{}], ["f"], [{"function": None}], [{"function": {"name": 3}}], {}]
)
def test_odd_tools(form, tools):
    agreed(form, written(form, [("f", {"a": 1, "s": "x"})]), tools=tools)


@ALL
@pytest.mark.parametrize("schema", [None, [], "x", {"properties": []}, {"properties": {"a": None, "s": {"type": 3}}}])
def test_odd_schemas(form, schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (call,) = agreed(form, written(form, [("f", {"a": 1, "s": "x y"})]), tools=tools).values
    assert call[0] == "f" and str(call[1]["a"]) == "1" and call[1]["s"] == "x y"


TWICE = {
    "function_gemma": "call:f{s:<escape>kappa<escape>,s:<escape>omega<escape>}",
    "gemma4": 'call:f{s:<|"|>kappa<|"|>,s:<|"|>omega<|"|>}',
    "qwen3_coder": "<function=f><parameter=s>kappa</parameter><parameter=s>omega</parameter></function>",
    "glm47": "f<arg_key>s</arg_key><arg_value>kappa</arg_value><arg_key>s</arg_key><arg_value>omega</arg_value>",
    "json_tools": '{"arguments": {"s": "kappa"}, "arguments": {"s": "omega"}, "name": "f"}',
    "longcat": '{"arguments": {"s": "kappa"}, "parameters": {"s": "omega"}, "name": "f"}',
}


@pytest.mark.parametrize("form", TWICE)
def test_what_is_written_twice_is_text(form):
    start, end = markers(form)
    text = f"{start}{TWICE[form]}{end}"
    assert agreed(form, text).said == (text, "", [], "stop")
    assert called(form, None, text.replace("omega", "kappa").replace("parameters", "arguments")) == [
        ("f", {"s": "kappa"})
    ]


@pytest.mark.parametrize(
    "form, head", [("mistral", "f[ARGS]"), ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>")]
)
@pytest.mark.parametrize("after", ["null", "5", "null{}", " ,", "word"])
def test_a_header_without_arguments_opens_no_call(form, head, after):
    start, end = markers(form)
    text = f"{start}{head}{after}{end}"
    assert agreed(form, text).said == (text, "", [], "stop")


# Nesting


@ALL
@pytest.mark.parametrize("closed", [True, False])
def test_nesting_10000_deep(form, closed):
    deep = Raw("[" * 10000 + "]" * 10000 * closed)
    text = written(form, [("f", {"l": deep, "a": 1})])
    whole = read(form, [text], streamed=False)
    streamed = read(form, [text[n : n + 500] for n in range(0, len(text), 500)])
    assert whole.reason == streamed.reason == ("tool_calls" if whole.calls else "stop")
    if whole.calls:
        assert whole.calls == streamed.calls and "[" * 10000 in whole.calls[0][1]
    else:
        assert whole.content == streamed.content == text


# Any damage


WORDS = ["kappa", "omega", "sigma", "theta", "delta", "gamma", "lambda", "rho", "upsilon", "zeta"]
TRICKY = [
    "\n",
    " ",
    "  ",
    "<",
    "</",
    ">",
    "{",
    "}",
    '"',
    "'",
    "[",
    "]",
    "\\",
    ",",
    ":",
    "é",
    "🦉",
    "</parameter>",
    "null",
    "=",
]


def strings():
    return st.lists(st.sampled_from(WORDS + TRICKY), max_size=6).map("".join)


def argument_sets():
    return st.fixed_dictionaries(
        {},
        optional={
            "a": st.integers(-(10**30), 10**30),
            "n": st.floats(allow_nan=False, allow_infinity=False),
            "s": strings(),
            "t": strings(),
            "b": st.booleans(),
            "o": st.dictionaries(st.sampled_from(WORDS), st.integers(0, 9) | st.sampled_from(WORDS), max_size=2),
            "l": st.lists(st.sampled_from(WORDS), max_size=3),
        },
    )


def holds_its_strings(form, arguments):
    """Whether the format has a way to write these strings: between tags, none has for its own tags."""
    text = "".join(str(value) for value in arguments.values())
    return (
        not re.search(r"""</parameter>|</|<\|"|\]\]>|\\|'|"|\r""", text)
        if form == "minicpm5"
        else "</parameter>" not in text
    )


@ALL
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_call_is_read_as_it_was_written(form, data):
    arguments = data.draw(argument_sets().filter(lambda a: holds_its_strings(form, a)))
    text = written(form, [("f", arguments)])
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    tokens = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole, streamed = read(form, [text], streamed=False), read(form, tokens)
    assert whole.said == streamed.said
    assert whole.values == [("f", arguments)] and whole.content == ""


def words(sent):
    """All words that a client gets."""
    found = [sent.content, sent.reasoning]
    for name, arguments in sent.calls:
        found += [name, arguments]
    return " ".join(found)


@ALL
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_damage(form, data):
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "g", "nope"]), argument_sets()), min_size=1, max_size=2))
    text = data.draw(st.sampled_from(["", "rho ", "<think>zeta</think>", "<think>zeta "])) + written(form, calls)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(len(text) - 1, 0)))
        how = data.draw(st.sampled_from(["drop", "double", "cut", "double much"]))
        length = data.draw(st.integers(1, 30)) if how == "double much" else 1
        text = {
            "drop": text[:at] + text[at + 1 :],
            "double": text[:at] + text[at : at + 1] + text[at:],
            "double much": text[:at] + text[at : at + length] + text[at:],
            "cut": text[:at],
        }[how]
    end = data.draw(st.sampled_from(["stop", "length"])) if text else "stop"
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    tokens = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole, streamed, letters = (
        read(form, [text], streamed=False, end=end),
        read(form, tokens, end=end),
        read(form, list(text) or [""], end=end),
    )
    assert whole.reason == streamed.reason == letters.reason
    assert (whole.reason == "tool_calls") == (bool(whole.calls) and end == "stop")
    if whole.reason == "tool_calls":
        assert len(whole.calls) <= len(streamed.calls)
    if end == "stop":
        assert whole.content == streamed.content == letters.content
    assert streamed.said == letters.said
    for _, arguments in whole.calls:
        json.loads(arguments)
    for sent in (whole, streamed):
        for word in WORDS:
            assert words(sent).count(word) >= min(text.count(word), 1), (word, text, sent.said)
    if not whole.calls:
        out = whole.reasoning + whole.content
        assert sorted(out) == sorted(re.sub("</?think>", "", text)) or "think>" in out


PIECE = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s+|.", re.DOTALL)
DAMAGES = {
    "drop": lambda pieces, at, size, other: [*pieces[:at], *pieces[at + size :]],
    "double": lambda pieces, at, size, other: [*pieces[: at + size], *pieces[at:]],
    "cut": lambda pieces, at, size, other: pieces[:at],
    "insert": lambda pieces, at, size, other: [*pieces[:at], other, *pieces[at:]],
    "replace": lambda pieces, at, size, other: [*pieces[:at], other, *pieces[at + 1 :]],
}


@ALL
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_damaged_markup_reads_the_same_streamed(form, data):
    """Whole tags and words are dropped, doubled and put elsewhere; what stands is the same however it is cut."""
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "g", "nope"]), argument_sets()), min_size=1, max_size=2))
    pieces = PIECE.findall(data.draw(st.sampled_from(["", "rho ", "<think>zeta</think>"])) + written(form, calls))
    others = sorted({*pieces, *markers(form), *TRICKY} - {""})
    for _ in range(data.draw(st.integers(0, 4))):
        at, size = data.draw(st.integers(0, len(pieces))), data.draw(st.integers(1, 8))
        how, other = data.draw(st.sampled_from(sorted(DAMAGES))), data.draw(st.sampled_from(others))
        pieces = DAMAGES[how](pieces, at, size, other)
    text = "".join(pieces) or "rho"
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    tokens = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole, streamed = read(form, [text], streamed=False), read(form, tokens)
    assert whole.said == read(form, list(text), streamed=False).said
    assert streamed.said == read(form, list(text)).said
    assert (whole.content, whole.reasoning, whole.reason) == (streamed.content, streamed.reasoning, streamed.reason)
    # What was sent of a call that broke off later stays with the client; each whole one is there as it was written.
    sent = iter(streamed.calls)
    assert all(call in sent for call in whole.calls)
    assert whole.calls == streamed.calls or form in (*JSON_FORMATS, "kimi_k3")
