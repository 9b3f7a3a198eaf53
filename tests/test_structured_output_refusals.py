"""What a request may not ask for, and what of a schema cannot be held: a 400 that names the field, or a warning header.

After each refusal the same server goes on to serve; nothing is dropped without being named.
"""

import functools
import json
import re

import pytest

from tests.client import chat, chat_stream
from tests.test_structured_output import OK, fits, schema_format

NOT = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
DEEP = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(400), {"type": "string"})
REFUSED = {  # name: (body, the field its param begins with, its code, a part of its message)
    "two at once": ({**schema_format(OK), "guided_json": OK}, None, None, "guided_json"),
    "two in one": (
        {"structured_outputs": {"json": OK, "regex": "a"}},
        "structured_outputs",
        None,
        "structured_outputs",
    ),
    "two old names": ({"guided_regex": "a", "guided_choice": ["a"]}, None, None, "guided_"),
    "no object": ({"response_format": "json_object"}, "response_format", None, "response_format"),
    "no type": ({"response_format": {}}, "response_format", None, "response_format"),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format", None, "type"),
    "no envelope": ({"response_format": {"type": "json_schema"}}, "response_format", None, "json_schema"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        None,
        "schema",
    ),
    "schema is a list": (schema_format([]), "response_format", "invalid_json_schema", "schema"),
    "schema allows nothing": (schema_format(False), "response_format", "invalid_json_schema", "no value"),
    "unknown reference": (
        schema_format({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}, "required": ["a"]}),
        "response_format",
        "invalid_json_schema",
        "$defs/no",
    ),
    "a keyword that is no keyword's type": (
        {"guided_json": {"type": "object", "properties": {"n": {"type": "integer", "minimum": "x"}}}},
        "guided_json",
        "invalid_json_schema",
        "properties.n",
    ),
    "strict and not enforceable": (
        schema_format(NOT, strict=True),
        "response_format",
        "invalid_json_schema",
        "properties.a.not",
    ),
    "strict must be a boolean": (schema_format(OK, strict="yes"), "response_format", None, "strict"),
    "a regex that is none": ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar", "guided_regex"),
    "a regex that is a number": ({"structured_outputs": {"regex": 3}}, "structured_outputs", None, "regex"),
    "no choice": ({"guided_choice": []}, "guided_choice", None, "guided_choice"),
    "a choice of numbers": ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", None, "choice"),
    "a grammar that is none": ({"guided_grammar": "start: ("}, "guided_grammar", "invalid_grammar", "guided_grammar"),
    "a GBNF grammar that is none": (
        {"structured_outputs": {"grammar": "root ::= foo"}},
        "structured_outputs",
        "invalid_grammar",
        "grammar",
    ),
    "unknown kind": ({"structured_outputs": {"xml": "a"}}, "structured_outputs", None, "structured_outputs"),
    "text for structured outputs": ({"structured_outputs": "json"}, "structured_outputs", None, "structured_outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_with_its_reason(serve, tiny, name):
    server = serve(tiny("llama"))
    body, param, code, part = REFUSED[name]
    for stream in (False, True):
        reply = chat(server, "x", stream=stream, max_tokens=3, **body)
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error", reply.raw
        assert param is None or (reply.error["param"] or "").startswith(param), reply.error
        assert code is None or reply.error["code"] == code, reply.error
        assert part in reply.error["message"], reply.error
        assert "\n" not in reply.error["message"] and len(reply.error["message"]) < 1000
    assert chat(server, "x", max_tokens=3).status == 200


@pytest.mark.parametrize("schema", [DEEP, {"anyOf": [DEEP, OK]}, {"enum": ["x" * n for n in range(1500)]}], ids=len)
def test_a_huge_schema_is_held_or_refused(serve, tiny, schema):
    server = serve(tiny("llama"))
    reply = chat(server, "x", max_tokens=3, **schema_format(schema))
    assert reply.status == 200 or reply.error["code"] == "invalid_json_schema"
    assert chat(server, "x", max_tokens=3).status == 200


UNHELD = {
    "type": "object",
    "properties": {
        "email": {"type": "string", "pattern": "^(?!a)b{1,3}$", "maxLength": 3},
        "set": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3},
        "größe, 高": {"type": "string", "format": "x-none", "maxLength": 4},
    },
    "required": ["email", "set", "größe, 高"],
    "additionalProperties": False,
    "not": {"required": ["no"]},
}
HELD = json.loads(json.dumps(UNHELD).replace('"uniqueItems": true, ', "").replace('"pattern": "^(?!a)b{1,3}$", ', ""))


@pytest.mark.parametrize("call", [chat, chat_stream])
@pytest.mark.parametrize(
    "body", [schema_format(UNHELD), {"guided_json": UNHELD}], ids=["response_format", "guided_json"]
)
def test_keywords_that_cannot_be_held_are_named(serve, tiny, call, body):
    server = serve(tiny("llama"))
    reply = call(server, "x", temperature=1, max_tokens=300, **body)
    assert reply.finish_reason == "stop" and fits(HELD, reply.content)
    warning = reply.headers["Warning"]
    assert warning.isascii() and re.fullmatch(r'199 - "not enforced: [^"\\]*"', warning)
    for path in ("properties.email.pattern", "properties.set.uniqueItems", "format", "not"):
        assert path in warning
    assert "properties.email.maxLength" not in warning
    assert "properties.email.pattern" in server.log()


def test_what_is_held_has_no_warning_and_strict_refuses_the_rest(serve, tiny):
    server = serve(tiny("llama"))
    assert "Warning" not in chat(server, "x", **schema_format(OK)).headers
    reply = chat_stream(server, "x", **schema_format(UNHELD, strict=True))
    assert (reply.status, reply.error["code"]) == (400, "invalid_json_schema")
    assert "Warning" not in chat(server, "x", max_tokens=2).headers
