"""tool_choice at its edges: grammars that come late or not at all, strict tools, sets that differ in a batch."""

import json
import threading
import time
from concurrent.futures import CancelledError
from itertools import cycle
from types import SimpleNamespace

import jsonschema
import pytest
from mlx_lm.tokenizer_utils import load

from localServerCommon import Refused
from mlx_patches.json_schemas import prepare
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.structured_output import GrammarCompiler, build_tokenizer
from mlx_patches.tool_choice import ToolFormat
from mlx_patches.tool_grammars import FORMATS
from mlx_patches.tool_rules import read_tools
from tests.client import CHAT, both, chat, chat_stream, connect, post_bytes, together
from tests.test_tool_choice import FORM, PATHS, SCHEMAS, TOOLS, call_text, calls_fit, named, names
from tests.tiny_models import model_folder
from tests.tool_texts import markers, written

LONG = {"type": "object", "properties": {"x": {"type": "string", "minLength": 100_000}}, "required": ["x"]}
"""Its schema compiles, and its grammar between tags does not."""
HEADS = {
    "json_tools": ('<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>"),
    "qwen3_coder": ("<tool_call>\n<function={}>\n", "</function>\n</tool_call>"),
    "gemma4": ("<|tool_call>call:{}", "<tool_call|>"),
    "mistral": ("[TOOL_CALLS]{}[ARGS]", ""),
}


def tool(name: str, schema: dict | None = None, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema or {"type": "object"}, **more}}


class Provider:
    """As much of a ModelProvider as makes tool grammars; its vocabulary is read where `ready` is set."""

    def __init__(self, folder):
        self.tokenizer = load(folder)
        self.width = 1 + max(self.tokenizer.get_vocab().values())
        self.ready = threading.Event()
        self.compiler = GrammarCompiler(build_tokenizer(ReplyFormat(self.tokenizer, self.width)))

    @property
    def grammars(self):
        self.ready.wait()
        return self.compiler


@pytest.fixture
def provider(tiny):
    made = Provider(tiny("llama", tools="json_tools"))
    yield made
    made.ready.set()


@pytest.fixture
def script(serve, tiny):
    return serve(tiny("scripted", tools="json_tools"))


def rules(*tools: dict):
    return read_tools({"tools": list(tools)})[1]


def holds(matcher, tokenizer, text: str) -> bool:
    return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))


CALL = '\n{"name": "f", "arguments": {"x": '


def test_a_grammar_in_the_making_is_waited_for_where_a_call_begins(provider):
    form = ToolFormat(provider.tokenizer)
    asked = rules(tool("f", {"properties": {"x": {"const": "in time"}}, "required": ["x"]}))
    later = form.matcher_later(asked, provider)
    assert not form.block(asked, provider).done()
    threading.Timer(0.2, provider.ready.set).start()
    matcher = later()
    assert holds(matcher, provider.tokenizer, CALL) and not holds(matcher, provider.tokenizer, "7")
    assert form.block(asked, provider).done()  # and the next request has it at once


def test_a_grammar_that_never_comes_leaves_the_names(provider, monkeypatch, caplog):
    monkeypatch.setattr("mlx_patches.tool_choice.WAIT", 0.1)
    form, asked = ToolFormat(provider.tokenizer), rules(tool("f", {"properties": {"x": {"const": "late"}}}))
    late = Provider.__new__(Provider)
    late.__dict__ |= provider.__dict__ | {"ready": threading.Event()}
    form.block(asked, late)
    try:
        matcher = form.matcher_later(asked, SimpleNamespace(grammars=provider.compiler))()
    finally:
        late.ready.set()
    assert "held to their names only" in caplog.text
    assert holds(matcher.deep_copy(), provider.tokenizer, CALL + "7")
    assert not holds(matcher, provider.tokenizer, CALL.replace("f", "g"))


def test_a_grammar_that_all_have_left_is_given_up_and_made_anew(provider, caplog):
    caplog.set_level("INFO")
    form, here, gone = ToolFormat(provider.tokenizer), [], []
    asked, other = (rules(tool("f", {"properties": {"x": {"const": word}}})) for word in ("left", "stays"))
    made = form.block(asked, provider, lambda: bool(gone))
    shared = [form.block(other, provider, lambda: bool(gone)), form.block(other, provider, lambda: bool(here))]
    gone.append(1)
    again = form.block(asked, provider, lambda: bool(here))  # while the first is still to be given up
    assert again is not made and form.block(asked, provider) is again and shared[0] is shared[1]
    provider.ready.set()
    with pytest.raises(CancelledError):
        made.result(10)
    for one in (again, *shared):
        assert one.result(10).not_enforced == ()
    assert form.block(asked, provider) is again and form.block(other, provider) is shared[0]
    assert caplog.text.count("given up") == 1 and not form._askers


def test_large_sets_keep_no_small_one_waiting(provider):
    late = Provider.__new__(Provider)
    late.__dict__ |= provider.__dict__ | {"ready": threading.Event()}
    provider.ready.set()
    form = ToolFormat(provider.tokenizer)
    wide = {f"p{n}": {"enum": [f"{n} {m}" for m in range(20)]} for n in range(300)}
    large = [form.block(rules(tool(f"large_{n}", {"properties": wide})), late) for n in range(4)]
    try:
        assert form.block(rules(tool("small")), provider).result(10).not_enforced == ()
        assert not any(each.done() for each in large)
    finally:
        late.ready.set()
    for each in large:
        each.result(30)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_tools_of_a_client_that_left_keep_nobody_waiting(serve_private, tiny, choice):
    server = serve_private(tiny("scripted", tools="json_tools"))
    wide = {f"p{n}": {"enum": [f"{choice} {n} {m}" for m in range(4)]} for n in range(64)}
    large = [tool(f"t{n}", {"type": "object", "properties": {**wide, "n": {"const": n}}}) for n in range(139)]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": large, "tool_choice": choice, "stream": True}
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, body))
        time.sleep(0.2)
    small = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    reply = chat(server, call_text("f", a=5), tools=[tool("f", small)], max_tokens=60)
    assert [json.loads(call["function"]["arguments"]) for call in reply.tool_calls] in ([], [{"a": 7}])
    until = time.monotonic() + 20
    while "given up" not in server.log() and time.monotonic() < until:
        time.sleep(0.05)
    assert "given up" in server.log() and "too complex" not in server.log() and "names only" not in server.log()


BARE = '{{"name": "{}", "arguments": {}}}'


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("style", [None, "think"])
def test_calls_that_no_grammar_sees_are_of_tools_that_may_be_called(serve, tiny, style, path):
    server = serve(tiny("scripted", tools="json_tools", style=style))
    tools = [tool("f"), tool("g")]
    for choice, one in ((allowed("auto", "g"), False), (None, False), (None, True)):
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": not one, "max_tokens": 200, **PATHS[path]}
        f, g = BARE.format("f", "{}"), BARE.format("g", "{}")
        for text in (f, f"```json\n{f}\n```", f"<tools>{f}</tools>", f"[{f}, {g}]"):
            reply = both(server, text, **body)
            if choice:
                assert (reply.content, names(reply), reply.finish_reason) == (text, [], "stop")
            else:
                wanted = ["f"] if one or text[0] != "[" else ["f", "g"]
                assert (reply.content, names(reply), reply.finish_reason) == ("", wanted, "tool_calls")
        assert names(both(server, g, **body)) == ["g"]
        if style == "think":
            marked = f"<tool_call>{f}</tool_call>"
            reply = both(server, f"<think>So {marked}{marked}</think>Words.", **body)
            assert names(reply) == ([] if choice else ["f"] if one else ["f", "f"])
            assert reply.reasoning == (f"So {marked}{marked}" if choice else "So ")
            assert both(server, f"<think>So <tool_call>[{f}, {g}]</tool_call></think>Words.", **body).status == 200


def test_a_bare_call_of_a_strict_tool_fits_its_schema(serve, tiny):
    server = serve(tiny("scripted", tools="json_tools"))
    inner = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"type": "integer"}}, "required": ["y"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "l": {"type": "array", "items": inner}, "o": inner},
        "required": ["a"],
        "additionalProperties": False,
    }
    fitting = ['{"a": 5}', '{"o": {"z": "</s>é\\n", "y": 1, "x": "<|im_end|"}, "l": [{"y": 2, "x": ""}], "a":\n-3}']
    wrong = [
        '{"a": "x"}',
        "{}",
        '{"a": 1, "b": 2}',
        '{"a": 1, "o": {"x": "no y"}}',
        f'{{"a": 1, "o": {"[" * 200}{"]" * 200}}}',
    ]
    for strict in (True, False):
        tools = [tool("f", schema, strict=strict), tool("g")]
        for arguments in (*fitting, *wrong):
            text = BARE.format("f", arguments)
            reply = both(server, text, tools=tools, max_tokens=600)
            if strict and arguments in wrong:
                assert (reply.content, names(reply), reply.finish_reason) == (text, [], "stop")
            else:
                assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == json.loads(arguments)
        assert names(both(server, BARE.format("g", '{"any": 1}'), tools=tools, max_tokens=100)) == ["g"]


def test_a_model_whose_tokenizer_cannot_be_constrained_calls_freely(provider, caplog):
    class Unread:
        @property
        def grammars(self):
            raise Refused("structured output cannot read this model's tokenizer")

    assert ToolFormat(provider.tokenizer).matcher_later(rules(tool("f")), Unread())() is None
    assert "calls are left free" in caplog.text


@pytest.mark.parametrize("path", PATHS)
def test_the_first_call_of_new_tools_is_held(serve, tiny, path):
    server = serve(tiny("scripted", tools="json_tools"))
    text = call_text("tool_138", location="Paris", days="three")
    for size in (1, 139):
        new = [tool(f"tool_{n}", SCHEMAS["get_weather"], description=f"{path} {size}") for n in range(139 - size, 139)]
        for _ in ("new", "seen"):
            reply = both(server, text, tools=new, max_tokens=300, **PATHS[path])
            (call,) = reply.tool_calls
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS["get_weather"])


def test_guesses_that_are_taken_back_across_the_first_call(serve, tiny):
    draft = tiny("scripted", tools="json_tools", wrong_every=3)
    server = serve(tiny("scripted", tools="json_tools"), "--draft-model", draft, "--prompt-cache-size", 0)
    for text in (call_text("get_weather", location="Paris"), call_text("get_weather", place="Paris", days="three")):
        for lead in ("", "So: "):
            reply = both(server, lead + text, tools=TOOLS, max_tokens=200, num_draft_tokens=4)
            assert names(reply)[:1] == ["get_weather"] and calls_fit(reply) and reply.content.startswith(lead.strip())


def test_reading_new_tools_takes_no_time_of_their_first_token(provider):
    """139 of them: what must be done before the reply may begin, beside all that there is to do."""
    schema = {"properties": {f"p{n}": {"type": "integer", "maximum": n} for n in range(12)}, "required": ["p0"]}
    body = {"tools": [tool(f"tool_{n}", schema) for n in range(139)]}
    provider.ready.set()
    form = ToolFormat(provider.tokenizer)
    before = time.thread_time()
    made = form.block(read_tools(body)[1], provider)
    begun = time.thread_time() - before
    before = time.thread_time()
    for each in body["tools"]:
        prepare({**each["function"]["parameters"], "title": each["function"]["name"]}, param="x")
    assert made.result().not_enforced == ()
    assert begun < (time.thread_time() - before) / 4


PARTS = {
    "qwen3_coder": ("anyOf", {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {}]}),
    "gemma4": ("a.prefixItems", {"properties": {"a": {"type": "array", "prefixItems": [{"type": "integer"}]}}}),
}
"""A keyword that JSON's grammar holds, and the format's own does not."""


@pytest.mark.parametrize("format_name", PARTS)
def test_strict_refuses_what_the_models_own_format_cannot_hold(serve, tiny, format_name):
    server, (keyword, schema) = serve(tiny("scripted", tools=format_name)), PARTS[format_name]
    assert prepare(schema, param="x").not_enforced == ()
    tools = [tool("good"), tool("picky", schema)]
    head, tail = HEADS[format_name]
    assert chat(server, head.format("good") + ("{}" if format_name == "gemma4" else "") + tail, tools=tools).tool_calls
    again = chat(server, "Words.", tools=tools)
    assert (again.content, again.headers["Warning"]) == ("Words.", f'199 - "not enforced: picky: {keyword}"')
    for more in ({}, {"tool_choice": "required"}, {"stream": True}, {"guided_json": {"type": "object"}}):
        refused = chat(server, "x", tools=[tool("good"), tool("picky", schema, strict=True)], **more)
        assert (refused.status, refused.error["param"]) == (400, "tools[1].function.parameters")
        assert "picky" in refused.error["message"] and keyword in refused.error["message"]


@pytest.mark.parametrize("format_name", ["qwen3_coder", "gemma4"])
def test_a_grammar_that_does_not_compile_is_one_tools_alone(serve, tiny, format_name):
    server = serve(tiny("scripted", tools=format_name))
    head, tail = HEADS[format_name]
    value = {"qwen3_coder": "<parameter={}>\n{}\n</parameter>\n", "gemma4": '{{{}:<|"|>{}<|"|>}}'}[format_name]
    tools = [tool("long", LONG), *TOOLS]
    reply = both(server, head.format("long") + value.format("x", "short") + tail, tools=tools)
    assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == {"x": "short"}
    assert "the arguments of long may be any object" in server.log()
    assert chat(server, "x", tools=tools).headers["Warning"] == '199 - "not enforced: long: parameters"'
    wrong = head.format("get_weather") + value.format("place", "Paris") + tail
    for choice in ("auto", "required"):
        assert calls_fit(both(server, wrong, tools=tools, tool_choice=choice, max_tokens=200))
    refused = chat(server, "x", tools=[*TOOLS, tool("long", LONG, strict=True)])
    assert (refused.status, refused.error["param"]) == (400, "tools[2].function.parameters")


def test_of_tools_that_are_too_much_together_the_longest_go(provider, caplog):
    provider.ready.set()
    huge = {"properties": {f"p{n}": {"type": "integer"} for n in range(900)}, "additionalProperties": False}
    asked = rules(tool("f", {"properties": {"x": {"const": "held"}}}), *(tool(f"huge_{n}", huge) for n in range(12)))
    matcher = provider.grammars.matcher(ToolFormat(provider.tokenizer).block(asked, provider).result())
    assert holds(matcher, provider.tokenizer, CALL) and not holds(matcher, provider.tokenizer, "7")
    assert "too complex" in caplog.text and "huge_11" in caplog.text and "of f" not in caplog.text


ENDLESS = {
    "itself": {"$ref": "#/$defs/T"},
    "a ring": {"anyOf": [{"$ref": "#/$defs/U"}]},
    "a property": {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}, "required": ["t"]},
    "an item": {"type": "array", "items": {"$ref": "#/$defs/T"}, "minItems": 1},
    "all of": {"allOf": [{"$ref": "#/$defs/U"}, {"type": "integer"}]},
}
ENDING = {
    "or null": {"type": "object", "properties": {"t": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}}},
    "or a number": {"type": ["object", "number"], "properties": {"t": {"$ref": "#/$defs/T"}}, "required": ["t"]},
    "no item": {"type": "object", "properties": {"t": {"type": "array", "items": {"$ref": "#/$defs/T"}}}},
    "not required": {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}},
    "two steps": {"anyOf": [{"$ref": "#/$defs/U"}, {"type": "boolean"}]},
}


def around(definition: dict) -> dict:
    """A schema that leads to `definition` by a reference."""
    properties = {"a": {"$ref": "#/$defs/T"}, "b": {"type": "integer"}}
    return {"type": "object", "properties": properties, "$defs": {"T": definition, "U": {"$ref": "#/$defs/T"}}}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_no_finite_value_fits_is_refused(serve, tiny, name):
    schema = around(ENDLESS[name])
    for each in (schema, {**schema, "required": ["a"]}, {"$ref": "#/$defs/T", "$defs": schema["$defs"]}):
        with pytest.raises(Refused, match=r"\$defs\.[TU].*no finite value") as refused:
            prepare(each, param="guided_json")
        assert refused.value.code == "invalid_json_schema"
    server = serve(tiny("scripted", tools="json_tools"))
    assert chat(server, "x", guided_json=schema).error["param"] == "guided_json"
    assert names(both(server, call_text("odd", a=1), tools=[tool("odd", schema), *TOOLS])) == ["odd"]
    refused = chat(server, "x", tools=[tool("odd", schema, strict=True)])
    assert (refused.status, refused.error["param"]) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("name", ENDING)
def test_a_recursion_that_may_end_is_held(name):
    assert prepare(around(ENDING[name]), param="x").not_enforced == ()


def test_a_long_chain_of_references_is_judged_in_no_time():
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(400)} | {"d400": {"type": "integer"}}
    for definitions in (chain, dict(reversed(chain.items()))):
        before = time.thread_time()
        assert prepare({"$ref": "#/$defs/d0", "$defs": definitions}, param="x").not_enforced == ()
        assert time.thread_time() - before < 5


@pytest.mark.parametrize("call", [chat, chat_stream])
def test_a_model_whose_calls_are_not_held_says_so(serve, tiny, call):
    reply = call(serve(tiny("scripted")), "Hello", tools=TOOLS)
    warning = '199 - "not enforced: tools (tool format: this model has none)"'
    assert (reply.content, reply.headers["Warning"]) == ("Hello", warning)
    assert "Warning" not in call(serve(tiny("scripted")), "Hello").headers
    assert "Warning" not in call(serve(tiny("scripted")), "Hello", tools=TOOLS, tool_choice="none").headers
    reply = call(serve(tiny("scripted", tools="pythonic")), "Hello", tools=TOOLS)
    assert reply.headers["Warning"] == '199 - "not enforced: tools (tool format: no grammar for pythonic)"'
    for _ in ("new", "seen"):
        assert "Warning" not in call(serve(tiny("scripted", tools="json_tools")), "Hello", tools=TOOLS).headers


def allowed(mode: str, *chosen: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in chosen]}}


@pytest.mark.parametrize("path", PATHS)
def test_allowed_tools_in_auto_hold_the_calls_that_come(serve, tiny, path):
    body = {"tools": TOOLS, "max_tokens": 300, **PATHS[path]}
    server, text = serve(tiny("scripted", tools="json_tools")), call_text("get_weather", location="Paris")
    assert names(both(server, text, tool_choice=allowed("auto", "ping"), **body)) == ["ping"]
    assert names(both(server, text, tool_choice=allowed("auto", "ping", "get_weather"), **body)) == ["get_weather"]
    reply = both(server, "Words.", tool_choice=allowed("required", "ping", "get_weather"), **body)
    assert names(reply) and set(names(reply)) <= set(SCHEMAS) and not reply.content
    shown = chat(server, "x", tools=TOOLS).usage["prompt_tokens"]
    assert chat(server, "x", tools=TOOLS, tool_choice=allowed("auto", "ping")).usage["prompt_tokens"] == shown


def test_a_name_that_is_declared_twice_is_refused(serve, tiny):
    server = serve(tiny("scripted", tools="json_tools"))
    for choice in ("auto", "required", named("ping")):
        reply = chat(server, "x", tools=[*TOOLS, tool("ping")], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tools[2].function.name")


@pytest.mark.parametrize("choice", ["auto", "none", None, "required", named("ping"), allowed("auto", "ping")], ids=str)
def test_no_tools_at_all(serve, tiny, choice):
    server = serve(tiny("scripted", tools="json_tools"))
    for tools in ({"tools": []}, {"tools": None}, {}):
        reply = chat(server, "Words.", tool_choice=choice, **tools)
        if choice in ("auto", "none", None):
            assert (reply.content, reply.finish_reason) == ("Words.", "stop")
        else:
            assert (reply.status, reply.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("path", PATHS)
def test_one_call_only_whatever_may_come(serve, tiny, path):
    server = serve(tiny("scripted", tools="json_tools"))
    text = call_text("ping") + "\n" + call_text("get_weather", location="Paris") + " and words"
    body = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 300, **PATHS[path]}
    for choice in ("auto", "required", allowed("auto", "ping"), allowed("required", "ping"), named("ping")):
        reply = both(server, text, tool_choice=choice, **body)
        assert (names(reply), reply.finish_reason, reply.content) == (["ping"], "tool_calls", "")
    reply = both(server, "So: " + text, **body)
    assert (names(reply), reply.content) == (["ping"], "So:")
    assert both(server, "Words.", **body).content == "Words."


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("format_name", ["json_tools", "mistral"])
def test_a_required_call_that_is_cut(serve, tiny, format_name, path):
    server = serve(tiny("scripted", tools=format_name))
    text = HEADS[format_name][0].format("get_weather") + '{"location": "Par' + "is" * 9
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 14, **PATHS[path]}
    whole, streamed = chat(server, text, **body), chat_stream(server, text, **body)
    assert (whole.status, whole.finish_reason, whole.tool_calls) == (200, "length", [])
    assert streamed.finish_reason == "length"
    said = "".join(call["function"]["arguments"] for call in streamed.tool_calls) + streamed.content
    assert whole.content and said in whole.content and whole.usage["completion_tokens"] == 14


def test_a_batch_of_different_tools(serve, tiny):
    """Each reply is held to its own tools, whatever stands beside it."""
    server = serve(tiny("scripted", tools="json_tools"))
    asked, wanted = [], []
    for n in range(12):
        schema = {"type": "object", "properties": {"n": {"const": n}}, "required": ["n"], "additionalProperties": False}
        choice = ("auto", "required", named(f"t{n}"))[n % 3]
        text = call_text(f"t{n}", n=(n, 99)[n % 2])  # a value that is its own, or nobody's
        body = {"tools": [tool(f"t{n}", schema)], "tool_choice": choice, "parallel_tool_calls": False}
        asked.append({"prompt": text, "max_tokens": 100, **body})
        wanted.append([(f"t{n}", {"n": n})])
    asked += [{"prompt": "Words.", "stream": True}, {"prompt": "Words.", "tools": TOOLS}]
    replies = together(server, asked, stagger=0.01)
    found = [
        [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reply.tool_calls]
        for reply in replies
    ]
    assert found == [*wanted, [], []]
    assert [reply.content for reply in replies[-2:]] == ["Words.", "Words."]


# Calls that begin where prose might


LATE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
KINDS = [name for name in FORMATS if name not in ("harmony", "laguna", "function_gemma")]  # twins of others
NAMED_FIRST = ("mistral", "glm47", "laguna", "longcat", "minicpm5")  # at most a quote stands before a name


@pytest.mark.parametrize("form", KINDS)
def test_a_call_after_a_word_is_held_too(serve, form):
    server = serve(model_folder("scripted", tools=form, tokens=("=get", "get_wi")))
    tools = [tool("get_weather", LATE), tool("ping", {"type": "object", "properties": {}})]
    for path in PATHS.values():
        for name, days in (("get_weather", 3), ("get_weather", "many"), ("get_wind", 3)):
            text = "Sure, calling it now " + written(form, [(name, {"city": "Paris", "days": days})])
            reply = both(server, text, tools=tools, max_tokens=120, **path)
            if name == "get_wind" and form in NAMED_FIRST:
                assert (reply.content, reply.tool_calls) == (text, [])
                continue
            assert reply.content.startswith("Sure, calling it now")
            if (name, days) != ("get_weather", 3) and reply.finish_reason == "length":
                continue  # what is forced to be another call than the script's need not come to an end
            called, arguments = reply.tool_calls[0]["function"].values()
            jsonschema.validate(json.loads(arguments), LATE)
            assert called == "get_weather" and (days != 3 or name != called or json.loads(arguments)["city"] == "Paris")
    start, end = markers(form)
    prose = f"Use the {start} tag, and {start} as above {end} then words"
    assert both(server, prose, tools=tools).content == prose


OWN = {
    "json_tools": ('{"name"', '{ "id": "one", "name"'),
    "gemma4": ("call:", ""),
    "function_gemma": ("call:", ""),
    "kimi_k2": ("functions.", ""),
    "minimax_m2": ("invoke name=", "invoke  name="),
    "muse_spark": ("invoke name=", 'invoke id="one" name='),
    "mistral": ("[ARGS]", " [ARGS]"),
}
"""What a call of each format has, and what its reader takes for that and its grammar does not."""


@pytest.mark.parametrize("form", KINDS)
def test_after_a_word_a_call_fits_or_is_text(serve, form):
    """However it is spelled, and whatever stands before it."""
    server = serve(model_folder("scripted", tools=form, tokens=("=get", "get_wi")))
    paths = cycle(PATHS.values())
    tools = [tool("get_weather", LATE), tool("ping", {"type": "object", "properties": {}})]
    start, _ = markers(form)
    rewrite = {
        "a blank": lambda text: text.replace(start, f"{start} "),
        "lines": lambda text: text.replace(start, f"{start}\n\n\n"),
        "spelled": lambda text: text.replace(start, f"{start[:3]}<|cut|>{start[3:]}"),
        "twice": lambda text: f"{start} or " + text,
        "two tokens": lambda text: text,
        **({"its own": lambda text: text.replace(*OWN[form])} if form in OWN else {}),
    }
    for how in rewrite.values():
        next(paths)
        for name, days in (("get_weather", 3), ("get_weather", 30), ("get_wind", 3)):
            text = how(written(form, [(name, {"city": "Paris", "days": days})]))
            script, text = f"now {text}", f"now {text.replace('<|cut|>', '')}"
            reply = both(server, script, tools=tools, max_tokens=120, **next(paths))
            assert reply.status == 200 and (name != "get_weather" or days != 3 or reply.tool_calls)
            assert reply.tool_calls or reply.content == text or reply.finish_reason == "length"
            for call in reply.tool_calls:
                assert call["function"]["name"] == "get_weather" and reply.content.startswith("now")
                jsonschema.validate(json.loads(call["function"]["arguments"]), LATE)


@pytest.mark.parametrize("form", KINDS)
def test_prose_that_names_a_marker_is_prose(serve, form):
    server = serve(model_folder("scripted", tools=form, tokens=("=get", "get_wi")))
    start, end = markers(form)
    call = written(form, [("get_weather", {"city": "Paris", "days": 3})])
    tools, paths = [tool("get_weather", LATE), tool("ping")], cycle(PATHS.values())
    for text in (
        f"Use `{start}` to call.",
        f"The tag ({start}) opens.",
        f"Note: {start} opens a call, {end} ends it.",
        f'A list.\n- **{start}** opens, as "{start}" does.',
        f"For example `{call}` is one.",
        f"Tell {start}ping me{end} or {start} ping.",
        f"\u8bf7\u7528{start}\u6807\u7b7e, use{start}tags.",
    ):
        reply = both(server, text, tools=tools, max_tokens=120, **next(paths))
        assert (reply.content, reply.tool_calls, reply.finish_reason) == (text, [], "stop")
    reply = both(server, "`x` " + call + call, tools=tools, max_tokens=400, **next(paths))
    assert names(reply) == ["get_weather", "get_weather"] and reply.content == "`x`"
    for lead in ("Sure: ", "Sure.", "Sure. ", "Sure!\n", "```\n", "(", "- "):
        reply = both(server, lead + call, tools=tools, max_tokens=120, **next(paths))
        assert names(reply) == ["get_weather"] and reply.content == lead.rstrip()


@pytest.mark.parametrize("path", PATHS)
def test_the_first_call_is_the_only_one_wherever_it_stands(script, path):
    body = {"tools": [tool("ping")], "parallel_tool_calls": False, "max_tokens": 200, **PATHS[path]}
    ping = '{"name": "ping", "arguments": {}}'
    for text in (
        f"now <tool_call> {ping} x</tool_call> <tool_call>\n{ping}\n</tool_call>",
        f"now <tool_call> {ping} <tool_call>\n{ping}\n</tool_call>",
        f"now <tool_call> {ping} and <tool_call> {ping}",
    ):
        assert names(both(script, text, **body)) == ["ping"]


MISTRAL = {
    "list": '[TOOL_CALLS] [{{"name": "ping", "arguments": {{}}, "id": "one"}}, '
    '{{"name": "get_weather", "arguments": {}}}]',
    "id": "[TOOL_CALLS]ping[CALL_ID]one[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("how", MISTRAL)
def test_mistral_writes_its_older_forms_too(serve, tiny, how, choice, path):
    server = serve(tiny("scripted", tools="mistral", special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")))
    body = {"tools": [tool("get_weather", LATE), tool("ping")], "tool_choice": choice, "max_tokens": 200, **PATHS[path]}
    fits = '{"city": "Pa]ris", "days": 3}'
    reply = both(server, MISTRAL[how].format(fits), **body)
    called, weather = reply.tool_calls
    assert (called["id"], called["function"]) == ("one", {"name": "ping", "arguments": "{}"})
    assert json.loads(weather["function"]["arguments"]) == json.loads(fits) and reply.content == ""
    reply = both(server, MISTRAL[how].format('{"city": "Paris", "days": 30}'), **body)
    for call in reply.tool_calls[1:]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), LATE)
    reply = both(server, MISTRAL[how].format(fits), **body | {"parallel_tool_calls": False})
    assert names(reply) == ["ping"]
    if choice == "auto":
        text = MISTRAL[how].format(fits) + "\n\nWords, and " + MISTRAL[how].format(fits)
        reply = both(server, text, **body)
        assert names(reply) == ["ping", "get_weather"] * 2 and reply.content == "\n\nWords, and"
        reply = both(server, f"<think>Hm. {MISTRAL[how].format(fits)}</think>Done.", **body)
        assert names(reply) == ["ping", "get_weather"] and (reply.content, reply.reasoning) == ("Done.", "Hm. ")


@pytest.mark.parametrize("form", ["qwen3_coder", "minimax_m2", "muse_spark"])
def test_a_constant_that_reads_as_markup_is_listed(serve, form):
    server = serve(model_folder("scripted", tools=form))
    for value in ("</parameter>", "</atem:parameter>", "a\n", "\n", "x\n<parameter=c>\n1", "</function>"):
        kinds = {"n": {"const": value}, "c": {"type": "boolean"}}
        schema = {"type": "object", "properties": kinds, "required": ["n", "c"]}
        text = written(form, [("f", {"n": value, "c": True})])
        body = {"tool_choice": "required", "max_tokens": 200}
        reply = both(server, text, tools=[tool("f", schema)], **body)
        strict = chat(server, text, tools=[tool("f", schema, strict=True)], **body)
        if strict.status == 400:
            assert "n.const" in strict.error["message"] and "not enforced: f: n.const" in reply.headers["Warning"]
        else:
            jsonschema.validate(json.loads(reply.tool_calls[0]["function"]["arguments"]), schema)


@pytest.mark.parametrize("form", ["kimi_k3", "pythonic"])
def test_one_call_beside_a_schema_without_a_grammar(serve, form):
    text = written(form, [("ping", {})]) + "\n" + written(form, [("ping", {})])
    body = {"tools": [tool("ping")], "parallel_tool_calls": False, **FORM}
    for path in PATHS.values():
        reply = both(serve(model_folder("scripted", tools=form)), text, **body, **path)
        assert (names(reply), reply.content) == (["ping"], "")


def test_logprobs_of_a_forced_call_that_is_cut(script):
    text = call_text("get_weather", location="Par" + "is" * 9)
    for choice in ("auto", "required"):
        reply = chat(script, text, tools=TOOLS, tool_choice=choice, logprobs=True, max_tokens=14)
        listed = reply.logprobs["content"]
        assert reply.content and "".join(bytes(each["bytes"]).decode() for each in listed).strip() == reply.content
        assert len(listed) == 14


def test_arguments_fit_whatever_their_order_and_spelling(script):
    size = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {"o": {"$ref": "#/$defs/size"}, "l": {"type": "array", "items": {"anyOf": [size]}}, "s": {}},
        "$defs": {"size": size},
    }
    tools = [tool("f", schema, strict=True)]
    for given in (
        '{"s": "a\x7f\\u007f", "o": {"y": 2, "x": 1}}',
        '{"l": [{"y": 1, "x": 3.0}], "o": {"x": 1e2}}',
    ):
        text = f'now <tool_call> {{"arguments": {given}, "name": "f"}}</tool_call>'
        reply = both(script, text, tools=tools, max_tokens=200)
        assert [call["function"]["arguments"] for call in reply.tool_calls] == [given]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["json_tools", "mistral"])
def test_behind_a_call_all_is_free(serve, tiny, form, path):
    """Also in Mistral's format, whose calls have no marker after them."""
    server = serve(tiny("scripted", tools=form))
    tools = [tool("get_weather", LATE), tool("ping", {"type": "object", "properties": {}})]
    first, second = (written(form, [("get_weather", {"city": "Paris", "days": days})]) for days in (3, 30))
    ping, start = written(form, [("ping", {})]), markers(form)[0]
    reply = both(server, first + "\n\nSome words.", tools=tools, max_tokens=200, **PATHS[path])
    assert (names(reply), reply.content) == (["get_weather"], "\n\nSome words.")
    reply = both(server, first + "\n" + ping + " ", tools=tools, max_tokens=200, **PATHS[path])
    assert (names(reply), reply.content) == (["get_weather", "ping"], "")
    reply = both(server, first + "\n\nSome words.\n" + second, tools=tools, max_tokens=200, **PATHS[path])
    assert names(reply) == ["get_weather", "get_weather"] and reply.content.startswith("\n\nSome words.")
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), LATE)
    most = both(server, first + ping, tools=tools, **PATHS[path]).usage["completion_tokens"] - 6
    reply = chat(server, first + ping, tools=tools, max_tokens=most, **PATHS[path])
    assert (names(reply), reply.finish_reason) == (["get_weather"], "length")
    assert reply.content.startswith(start) and ping.startswith(reply.content)
    if form == "mistral":
        first, second = (text.replace(start, f"{start} ") for text in (first, second))
        reply = both(server, "now " + first + second, tools=tools, max_tokens=200, **PATHS[path])
        assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == {"city": "Paris", "days": 3}
        for call in reply.tool_calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), LATE)


def test_guesses_in_a_call_after_a_word(serve, tiny):
    draft = tiny("scripted", tools="qwen3_coder", wrong_every=3)
    server = serve(tiny("scripted", tools="qwen3_coder"), "--draft-model", draft, "--prompt-cache-size", 0)
    text = "Calling it now " + written("qwen3_coder", [("get_weather", {"city": "Paris", "days": 30})])
    reply = both(server, text, tools=[tool("get_weather", LATE)], max_tokens=120, num_draft_tokens=4)
    jsonschema.validate(json.loads(reply.tool_calls[0]["function"]["arguments"]), LATE)


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tools_call_in_thinking_fits_or_is_thinking(script, strict):
    tools = [tool("get_weather", LATE, strict=strict)]
    for days, fits in ((3, True), (30, False)):
        text = f"<think>Hm. {call_text('get_weather', city='Paris', days=days)} So.</think>Done."
        reply = both(script, text, tools=tools, max_tokens=200)
        assert bool(reply.tool_calls) == (fits or not strict) and reply.content == "Done."
        assert ("tool_call" in reply.reasoning) == (strict and not fits)


@pytest.mark.parametrize("form", ["kimi_k3", "pythonic"])
def test_a_strict_tools_call_without_a_grammar_fits_or_is_text(serve, form):
    server = serve(model_folder("scripted", tools=form))
    for days, fits in ((3, True), (30, False)):
        text = written(form, [("get_weather", {"city": "Paris", "days": days})])
        for strict in (True, False):
            reply = both(server, text, tools=[tool("get_weather", LATE, strict=strict)], max_tokens=200)
            assert bool(reply.tool_calls) == (fits or not strict)
            assert (reply.content or "") == ("" if fits or not strict else text)


@pytest.mark.parametrize("form", ["kimi_k3", "pythonic"])
def test_a_schema_beside_tools_without_a_grammar(serve, form):
    server = serve(model_folder("scripted", tools=form))
    tools, call = [tool("get_weather", LATE), tool("ping")], written(form, [("get_weather", {"city": "Paris"})])
    for path in PATHS.values():
        assert names(both(server, call, tools=tools, **FORM, **path)) == ["get_weather"]
        reply = both(server, '{"sky": "blue"}', tools=tools, **FORM, **path)
        assert (json.loads(reply.content), reply.tool_calls) == ({"sky": "blue"}, [])
        assert "not enforced: tools" in reply.headers["Warning"]
        assert both(server, "Words.", tools=tools, max_tokens=40, **FORM, **path).content != "Words."
        reply = both(server, call, tools=tools, tool_choice=allowed("auto", "ping"), **path)
        assert (reply.content, reply.tool_calls) == (call, [])


@pytest.mark.parametrize("kind", ["array", "objct", 5, ["string"], "", None, []])
def test_parameters_of_another_type_are_refused(script, kind):
    reply = chat(script, "x", tools=[tool("f", {"type": kind})])
    assert reply.status == 400 and reply.body["error"]["param"] == "tools[0].function.parameters"


def test_a_strict_tools_refusal_names_it(script):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)"}}}
    reply = chat(script, "x", tools=[tool("ping", {"type": "object"}), tool("look", schema, strict=True)])
    assert (
        reply.status == 400 and "look" in reply.body["error"]["message"] and "pattern" in reply.body["error"]["message"]
    )
