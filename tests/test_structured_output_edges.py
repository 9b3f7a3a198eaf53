"""Structured output where it once went wrong: special tokens' names as text, large objects, empty answers, headers."""

import http.client
import json
from urllib.parse import urlsplit

import pytest

from tests.client import both, both_complete, chat


@pytest.mark.parametrize("style", ["think", "harmony"])
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|im_start|>", "x<|start|>y", "<|return|>", "<think>", "</think> <|call|>"]
)
def test_the_name_of_a_special_token_is_text_where_the_grammar_says_so(serve, tiny, style, text):
    server = serve(tiny("llama", style=style))
    for form, said in (
        ({"guided_choice": [text]}, text),
        ({"guided_json": {"const": text}}, json.dumps(text)),
        ({"guided_json": {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}}, None),
    ):
        reply = both(server, "Hello", max_tokens=400, chat_template_kwargs={"enable_thinking": False}, **form)
        assert reply.status == 200
        if said is not None:
            assert (reply.content, reply.finish_reason) == (said, "stop")
    assert "compiled anew" not in server.log()


@pytest.mark.parametrize("properties", [600, 1400])
def test_many_optional_properties(serve, tiny, properties):
    server = serve(tiny("llama"))
    schema = {"properties": {f"p{n}": {"type": "integer", "maximum": 9} for n in range(properties)}}
    schema |= {"type": "object", "additionalProperties": False}
    reply = chat(server, "Hello", guided_json=schema, temperature=1, max_tokens=60)
    assert (reply.status, reply.error) == (200, None)


def test_an_empty_answer_is_an_empty_string(serve, tiny):
    server = serve(tiny("llama"))
    assert both(server, "Hello", guided_choice=[""]).body["choices"][0]["message"]["content"] == ""
    assert both_complete(server, "Hello", guided_regex="").body["choices"][0]["text"] == ""


def test_log_probabilities_of_a_character_in_several_tokens(serve, tiny):
    server = serve(tiny("llama"))
    asked = {"guided_choice": ["ab日本c"], "logprobs": True}
    reply = both(server, "Hello", **asked)
    assert b"".join(bytes(e["bytes"]) for e in reply.logprobs["content"]).decode() == reply.content == "ab日本c"
    reply = both(server, "Hello", stop=["日"], **asked)
    assert reply.content == "ab" == "".join(e["token"] for e in reply.logprobs["content"])
    reply = both_complete(server, "Hello", guided_choice=["ab日本c"], logprobs=1)
    assert reply.logprobs["text_offset"][-1] == 4


def test_the_warning_header_names_all_or_says_how_many_more(serve, tiny):
    server = serve(tiny("llama"))
    few = {"properties": {name: {"type": "array", "uniqueItems": True} for name in ("日", '本"')}}
    header = chat(server, "Hello", guided_json=few, max_tokens=1).headers["Warning"]
    assert header == '199 - "not enforced: properties.%E6%97%A5.uniqueItems, properties.%E6%9C%AC%22.uniqueItems"'
    many = {"properties": {f"{n}{'x' * 60}": {"type": "array", "uniqueItems": True} for n in range(90)}}
    header = chat(server, "Hello", guided_json=many, max_tokens=1).headers["Warning"]
    shown = header.count("uniqueItems")
    assert header.endswith(f', and {90 - shown} more"') and 40 < shown < 90


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_body_that_nobody_reads_is_not_the_next_request(serve, tiny, method):
    connection = http.client.HTTPConnection(urlsplit(serve(tiny("llama")).url).netloc)
    for _ in range(2):
        connection.request(method, "/v1/models", b"{}")
        reply = connection.getresponse()
        assert reply.status in (200, 204) and reply.headers["Connection"] == "close"
        reply.read()
