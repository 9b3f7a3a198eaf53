"""Output rows wider than the tokenizer, by models that prefer ids without a name: none is ever said or listed.

Two models: a random llama whose padded ids always win, and a script whose reply must come out as if the padding were
not there. The off leg is mlx_lm.server, which says "!" for such an id.
"""

import json

import pytest
from tokenizers import Tokenizer

from tests.client import both, both_complete, chat, chat_stream, together

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
PADDED = {"padded": 64, "prefer_padded": True}
NO_CACHE = ("--prompt-cache-size", 0)  # with a draft mlx_lm stores caches that are shorter than their keys


@pytest.fixture(scope="module")
def named(tiny):
    return Tokenizer.from_file(str(tiny("llama", **PADDED) / "tokenizer.json")).get_vocab_size()


@pytest.fixture(scope="module")
def script(tiny):
    """A script's folder whose favourite token, before the script's own, has no name."""
    padded_id = Tokenizer.from_file(str(tiny("scripted") / "tokenizer.json")).get_vocab_size() + 3
    return tiny("scripted", padded=5, prefer={padded_id: 50.0})


SERVERS = {  # name: options of the model and of its draft
    "alone": (PADDED, None),
    "with a draft": (PADDED, PADDED),
    "with a wider draft": ({"padded": 8, "prefer_padded": True}, {"padded": 100, "prefer_padded": True}),
    "with a narrower draft": (PADDED, {}),
    "narrower than a padded draft": ({}, PADDED),
}


def server_of(name, serve, tiny):
    main, draft = SERVERS[name]
    return serve(
        tiny("llama", **main), *(() if draft is None else ("--draft-model", tiny("draft", **draft), *NO_CACHE))
    )


def ids(entries):
    return [e["id"] for e in entries] + [e["id"] for entry in entries for e in entry["top_logprobs"]]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "seed": 3}], ids=str)
@pytest.mark.parametrize("name", SERVERS)
def test_no_id_without_a_name_is_sampled_or_listed(serve, tiny, named, name, sampling):
    server = server_of(name, serve, tiny)
    for grammar in ({}, {"response_format": FORMAT}):
        for call in (chat, chat_stream):
            reply = call(server, "Hello", max_tokens=20, logprobs=True, top_logprobs=20, **sampling, **grammar)
            assert reply.status == 200
            entries = reply.logprobs["content"]
            assert len(entries) in (reply.usage["completion_tokens"], reply.usage["completion_tokens"] - 1)
            assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
            assert max(ids(entries)) < named
            if grammar:
                assert b"".join(bytes(e["bytes"]) for e in entries).decode() == reply.content
            if grammar and reply.finish_reason == "stop":
                assert json.loads(reply.content)["ok"] in (True, False)


def test_no_id_without_a_name_is_sampled_in_a_batch(serve, tiny, named):
    server = server_of("alone", serve, tiny)
    kinds = [{}, {"response_format": FORMAT}, {"logit_bias": {"40": 1}}, {"stop": ["zz"]}]
    calls = [
        {"prompt": f"Hello {n}", "temperature": n % 2, "max_tokens": 25, "logprobs": True, "top_logprobs": 3, **kind}
        for n in range(3)
        for kind in kinds
    ]
    for reply in together(server, calls, stagger=0.01):
        assert max(ids(reply.logprobs["content"])) < named


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"xtc_probability": 0.5}], ids=str)
@pytest.mark.parametrize("grammar", [{}, {"response_format": FORMAT}], ids=["free", "schema"])
def test_samplers_choose_among_tokens_with_a_name(serve, tiny, named, sampling, grammar):
    server = server_of("alone", serve, tiny)
    reply = chat(server, "Hello", max_tokens=30, temperature=1, logprobs=True, **sampling, **grammar)
    tokens = ids(reply.logprobs["content"])
    assert max(tokens) < named
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("single", [{}, {"seed": 1}], ids=["batch", "single"])
def test_the_reply_is_what_it_is_without_the_padding(serve, script, single):
    server = serve(script)
    for text, grammar in (("Hello there, one two.", {}), ('{"ok": true}', {"response_format": FORMAT})):
        reply = both(server, text, **single, **grammar)
        assert (reply.content, reply.finish_reason) == (text, "stop")
    assert both_complete(server, "These come first: <|script|>Hello<|script_end|>", **single).content == "Hello"


@pytest.mark.parametrize("name", ["with a draft", "with a wider draft", "with a narrower draft"])
@pytest.mark.parametrize("grammar", [{}, {"response_format": FORMAT}], ids=["free", "schema"])
def test_a_draft_of_another_width_changes_nothing(serve, tiny, name, grammar):
    main, _ = SERVERS[name]
    drafted, alone = server_of(name, serve, tiny), serve(tiny("llama", **main))
    for n in range(3):
        body = {"temperature": 0, "max_tokens": 40, "logit_bias": {str(100 + n): 1}, **grammar}
        a, b = chat(alone, f"Say {n}", seed=1, **body), chat(drafted, f"Say {n}", num_draft_tokens=1 + n, **body)
        assert (a.content, a.finish_reason) == (b.content, b.finish_reason)


def test_mlx_lm_itself_says_ids_without_a_name(serve, tiny, named, script):
    upstream = serve(script, module="mlx_lm.server")
    assert both(upstream, "Hello there", max_tokens=6).content == "!" * 6
    upstream = serve(tiny("llama", **PADDED), module="mlx_lm.server")
    assert chat(upstream, "Hello", max_tokens=6).content == "!" * 6
    listed = chat(upstream, "Hello", max_tokens=1, logprobs=True, top_logprobs=5).logprobs["content"]
    assert max(ids(listed)) >= named
