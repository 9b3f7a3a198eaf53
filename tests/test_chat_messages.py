"""Messages as a template takes them: shapes by name, other readings where it refuses, its own words where it must."""

import pytest

from localServerCommon import Refused
from mlx_patches.chat_messages import fold_system, read_messages, readings
from tests.client import CHAT, both, chat, chat_stream, post
from tests.tiny_models import CHATML

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'assistant' and loop.first %}{{ raise_exception('A user must begin.') }}{% endif %}{% endfor %}"
) + CHATML
OBJECTS = CHATML.replace("(c.function | tojson)", "c.function.name + (c.function.arguments | items | list | string)")
TEXTS = CHATML.replace("(c.function | tojson)", "c.function.name + '(' + c.function.arguments + ')'")
EITHER = CHATML.replace(
    "(c.function | tojson)",
    "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
)
# A model that replies with what its template made of the messages: the whole prompt is inside its script.
ECHO = "{{ 'to be ignored: <|script|>' }}%s{{ '<|script_end|>' }}"


def user(content="Hello there", **more):
    return {"role": "user", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def called(arguments):
    function = {"name": "f"} if arguments is ... else {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.fixture(params=[{}, {"seed": 1}], ids=["batched", "seed"])
def fields(request):
    return request.param


# Pure


@pytest.mark.parametrize(
    "message, param",
    [
        (5, ""),
        ({}, ""),
        ({"role": None}, ""),
        (user(5), ".content"),
        (user({}), ".content"),
        (user([5]), ".content[0]"),
        (user([{"type": "text", "text": "a"}, {"text": "b"}]), ".content[1]"),
        (user([{"type": "text"}]), ".content[0]"),
        (user([{"type": "refusal", "refusal": "no"}]), ".content[0]"),
        (user(tool_calls={}), ".tool_calls"),
        (user(tool_calls=[5]), ".tool_calls[0]"),
        (user(tool_calls=[{}]), ".tool_calls[0].function"),
        (user(tool_calls=[{"function": {"name": 5}}]), ".tool_calls[0].function"),
        (called(5), ".tool_calls[0].function.arguments"),
        (called([]), ".tool_calls[0].function.arguments"),
    ],
    ids=str,
)
def test_shapes(message, param):
    with pytest.raises(Refused) as refused:
        read_messages({"messages": [user(), message]})
    assert refused.value.param == f"messages[1]{param}" and refused.value.param in refused.value.message


def test_what_is_sent_is_not_changed():
    body = {"messages": [{"role": "developer", "content": "a"}, called('{"a": 1}')]}
    before = repr(body)
    read = read_messages(body)
    assert (read[0]["role"], read[1]["tool_calls"][0]["function"]["arguments"]) == ("system", {"a": 1})
    for reading in readings(read):
        reading[0]["content"] = "changed"
    assert repr(body) == before and read[0]["content"] == "a"


def test_folding():
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    folded = fold_system([user("x"), system("a"), called({}), system(parts), system(None), user("y")])
    assert folded == [system("a\n\ncd"), user("x"), called({}), user("y")]
    assert fold_system([user()]) == [user()]


@pytest.mark.parametrize(
    "messages, count",
    [
        ([user()], 1),
        ([system("a"), user()], 1),
        ([user(), system("a")], 2),
        ([called({"a": 1})], 1),
        ([called("{")], 2),
        ([called("{"), system("a")], 4),
    ],
    ids=["plain", "system first", "system late", "object", "broken", "both"],
)
def test_readings_that_differ(messages, count):
    assert len(list(readings(read_messages({"messages": messages})))) == count


# System messages


def echo(serve, tiny, template=""):
    text = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    return serve(tiny("scripted", template=template + ECHO % text))


LATE = [system("a"), user("b"), system([{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]), user("e")]


def test_a_template_that_takes_them_gets_them_as_they_are(serve, tiny, fields):
    assert both(echo(serve, tiny), LATE, **fields).content == "system:a;user:b;system:cd;user:e;"


def test_one_that_refuses_them_gets_one_at_the_front(serve, tiny, fields):
    strict = STRICT.partition("{% if m.role == 'assistant'")[0] + "{% endfor %}"
    server = echo(serve, tiny, strict)
    assert both(server, LATE, **fields).content == "system:a\n\ncd;user:b;user:e;"
    developer = [{**message, "role": message["role"].replace("system", "developer")} for message in LATE]
    assert both(server, developer, **fields).content == "system:a\n\ncd;user:b;user:e;"


def test_a_refusal_in_the_templates_words(serve, tiny, fields):
    server = serve(tiny("scripted", template=STRICT))
    for call in (chat, chat_stream):
        reply = call(server, [{"role": "assistant", "content": "a"}, user()], **fields)
        assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", "messages")
        assert reply.error["message"].endswith(": A user must begin.")
    assert chat(server, "Hello there", **fields).content == "Hello there"


def test_a_template_that_fails_on_its_own_says_so_too(serve, tiny, fields):
    server = serve(tiny("scripted", template="{{ messages[0].content + 5 }}" + CHATML))
    reply = chat(server, "Hello", **fields)
    assert (reply.status, reply.error["param"]) == (400, "messages") and "concatenate" in reply.error["message"]


def test_mlx_lm_server_refuses_late_system_messages(serve, tiny):
    upstream = serve(tiny("scripted", template=STRICT), module="mlx_lm.server")
    assert chat(upstream, LATE).status == 404


# Roles


def test_roles(serve, tiny, fields):
    server = serve(tiny("scripted"))
    for role in ("system", "developer", "assistant", "tool", "function"):
        assert chat(server, [{"role": role, "content": "a"}, user()], **fields).content == "Hello there"
    for role in ("wizard", "", "User", "m"):
        reply = chat(server, [user(), {"role": role, "content": "a"}], **fields)
        assert (reply.status, reply.error["param"]) == (400, "messages[1].role")


def test_a_role_that_the_template_names(serve, tiny):
    server = serve(tiny("scripted", template="{% set known = ('user', \"wizard\") %}" + CHATML))
    assert chat(server, [{"role": "wizard", "content": "a"}, user()]).content == "Hello there"


# Past calls


@pytest.mark.parametrize(
    "template, arguments, said",
    [
        (EITHER, '{"a": 1', '{"a": 1'),
        (EITHER, '{"a": 1}', '{"a": 1}'),
        (EITHER, {"a": 1}, '{"a": 1}'),
        (EITHER, "[1]", "[1]"),
        (EITHER, "5", "5"),
        (EITHER, "call me", "call me"),
        (EITHER, "", "{}"),
        (EITHER, " \n", "{}"),
        (EITHER, None, "{}"),
        (EITHER, ..., "{}"),
        (EITHER, r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
        (EITHER, '{"a": NaN}', '{"a": NaN}'),
        (EITHER, '{"a": 1e999}', '{"a": 1e999}'),
        (OBJECTS, '{"a": 1', "f[('arguments', '{\"a\": 1')]"),
        (OBJECTS, '{"a": 1}', "f[('a', 1)]"),
        (OBJECTS, "", "f[]"),
        (TEXTS, '{"a": 1', 'f({"a": 1)'),
    ],
)
def test_past_calls_are_readable(serve, tiny, template, arguments, said):
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ CALL }}{% endfor %}{% endfor %}"
    inner = template.partition("{{ '\n<tool_call>\n' + ")[2].partition(" + '\n</tool_call>'")[0]
    assert inner
    server = serve(tiny("scripted", template=ECHO % text.replace("CALL", inner)))
    for fields in ({}, {"seed": 1}):
        assert chat(server, [user(), called(arguments), user()], **fields).content == said


def test_mlx_lm_server_refuses_a_broken_call(serve, tiny):
    upstream = serve(tiny("scripted"), module="mlx_lm.server")
    assert chat(upstream, [user(), called('{"a": 1'), user()]).status == 404


# The template's arguments


@pytest.mark.parametrize(
    "name", ["tokenize", "tools", "add_generation_prompt", "chat_template", "messages", "return_dict"]
)
def test_what_is_not_the_templates(serve, tiny, name):
    reply = post(serve(tiny("scripted")), CHAT, {"messages": [user()], "chat_template_kwargs": {name: True}})
    assert (reply.status, reply.error["param"]) == (400, f"chat_template_kwargs.{name}")


def test_every_argument_of_transformers_is_known():
    import inspect

    from transformers import PreTrainedTokenizerBase

    from mlx_patches.request_bodies import TEMPLATE_ARGUMENTS

    theirs = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert theirs - {"self", "kwargs", "documents"} <= TEMPLATE_ARGUMENTS
