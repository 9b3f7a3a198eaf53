"""The workshop works on mlx_lm.server as it is: what the other tests build on, and the shortest examples of its use.

Every server here is upstream's, so a failure is a fault of tests/ (or a moved pin), never of the product.
"""

import json
import socket
import subprocess
import sys
import threading

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

import tests.site.sitecustomize  # noqa: F401  (mlx_lm.load of a scripted folder in this process)
from tests.client import (
    CHAT,
    BrokenReply,
    both,
    both_complete,
    chat,
    chat_stream,
    complete,
    exchange,
    get,
    post_bytes,
    strict_loads,
    together,
)
from tests.conftest import ROOT
from tests.tiny_models import KINDS, train_tokenizer

TEXT = 'Two lines,\n"quotes" \\ and ünïcödé 🦉: {"name": [1, 2.5, null]}'


@pytest.fixture
def upstream(serve, tiny):
    return serve(tiny("scripted", tools="json_tools"), module="mlx_lm.server")


def token_ids(reply):
    return [entry["id"] for entry in reply.logprobs["content"]]


def pieces(folder, text):
    """The tokens that `text` is split into, as text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text).ids]


# The tokenizer


def test_tokenizer_is_the_same_in_every_process_and_takes_every_byte():
    program = "from tests.tiny_models import train_tokenizer; print(train_tokenizer().to_str())"
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    tokenizer = train_tokenizer()
    assert other.stdout == tokenizer.to_str() + "\n"
    assert 1000 < tokenizer.get_vocab_size() < 2500
    for text in (TEXT, "\x00\x7f\u00ff\u0800\U0010ffff \t\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = ["hello", " world", ' {"', "name", '":', ' "', "Paris", '"}']
    assert [tokenizer.decode([i]) for i in tokenizer.encode("".join(words)).ids] == words


# The script


def test_reply_is_the_last_user_message_streamed_or_not(upstream):
    reply = both(upstream, [{"role": "user", "content": "not this"}, {"role": "user", "content": TEXT}])
    assert (reply.content, reply.finish_reason, reply.status) == (TEXT, "stop", 200)
    assert reply.usage["completion_tokens"] == chat_stream(upstream, TEXT).usage["completion_tokens"]


def test_reply_in_the_single_path(upstream):
    assert both(upstream, TEXT, seed=1).content == TEXT


def test_replies_of_a_batch_stay_apart(upstream):
    texts = [f"{n}:" + " after that" * 30 * n for n in range(6)]
    calls = [{"prompt": text, "stream": n % 2 == 0} for n, text in enumerate(texts)]
    assert [r.content for r in together(upstream, calls)] == texts
    assert [r.content for r in together(upstream, calls[::-1], stagger=0.01)] == texts[::-1]


def test_a_script_in_a_text_completion(upstream):
    reply = both_complete(upstream, "ignored <|script|>Hello there<|script_end|>")
    assert (reply.content, reply.finish_reason) == ("Hello there", "stop")
    assert both_complete(upstream, "no script").content == ""


def test_a_script_before_a_tool_result(upstream):
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": 'Well: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    reply = both(upstream, messages, tools=tools)
    assert (reply.content, reply.finish_reason) == ("Well: ", "tool_calls")
    assert [c["function"] for c in reply.tool_calls] == [{"name": "add", "arguments": '{"a": 1}'}]


def test_cut_forces_a_token_boundary(upstream, tiny):
    folder = tiny("scripted", tools="json_tools")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole, cut = chat(upstream, "name </think> x", logprobs=True), "na<|cut|>me <|cut|><<|cut|>/<|cut|>think> x"
    split = chat(upstream, cut, logprobs=True)
    stop = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.token_to_id("</think>") in token_ids(whole)
    assert token_ids(split) == [i for t in cut.split("<|cut|>") for i in tokenizer.encode(t).ids] + [stop]
    assert split.content == "name </think> x"
    assert len(pieces(folder, "</think>")) == 1


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_both_end_tokens_end_a_reply(upstream, end):
    reply = chat(upstream, f"Yes{end} no", logprobs=True)
    assert (reply.content, reply.finish_reason, len(token_ids(reply))) == ("Yes", "stop", 2)


def test_second_choices_are_fixed_and_prefer_raises_one(serve, tiny):
    server = serve(tiny("scripted", strength=5.0, prefer={"\n": 25.0}), module="mlx_lm.server")
    reply = both(server, "Hello", max_tokens=7)
    assert (reply.content, reply.finish_reason) == ("\n" * 7, "length")
    (newline,) = train_tokenizer().encode("\n").ids
    second = [chat(server, "Hello", max_tokens=3, logit_bias={newline: -100}).content for _ in range(2)]
    assert second[0] == second[1] != ""


def test_a_conversation_keeps_its_prompt_cache(upstream):
    first = chat(upstream, "Tell me a plan")
    messages = [
        {"role": "user", "content": "Tell me a plan"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And now?"},
    ]
    second = chat(upstream, messages)
    assert second.content == "And now?"
    assert second.usage["prompt_tokens_details"]["cached_tokens"] >= first.usage["prompt_tokens"]


# Drafts


@pytest.mark.parametrize(
    "draft, guessed",  # one guess at a time: after a right one the model itself says the next token
    [
        ({}, [True, False, True, False, True, False, True]),
        ({"wrong_at": (0, 3)}, [False, True, False, False, True, False, True]),
        ({"wrong_every": 3}, [True, False, False, True, False, False, True]),
    ],
    ids=["right", "wrong_at", "wrong_every"],
)
def test_a_scripted_draft_guesses_and_the_reply_is_the_same(tiny, draft, guessed):
    model, tokenizer = mlx_lm.load(str(tiny("scripted")))
    draft_model, _ = mlx_lm.load(str(tiny("scripted", **draft)))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one two three four five times"}], add_generation_prompt=True
    )
    steps = list(mlx_lm.stream_generate(model, tokenizer, prompt, draft_model=draft_model, num_draft_tokens=1))
    assert "".join(s.text for s in steps) == "one two three four five times"
    assert [s.from_draft for s in steps] == guessed


@pytest.mark.parametrize("draft", [{}, {"wrong_every": 3}], ids=["right", "wrong_every"])
def test_a_draft_in_the_server(serve, tiny, draft):
    # Without a prompt cache: on the draft path mlx_lm stores caches that are shorter than their keys.
    flags = ("--draft-model", tiny("scripted", **draft), "--prompt-cache-size", 0)
    server = serve(tiny("scripted"), *flags, module="mlx_lm.server")
    assert both(server, TEXT).content == TEXT
    assert [r.content for r in together(server, [{"prompt": t} for t in ("a b c", TEXT)])] == ["a b c", TEXT]


# Styles of reply


@pytest.mark.parametrize(
    "style, text",
    [
        ("think", "<think>Hmm.</think>Yes."),
        ("open", "Hmm.</think>Yes."),
        ("channel", "<|channel>thoughtHmm.<channel|>Yes."),
        ("xtml", "<|open|>think<|sep|>Hmm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"),
    ],
)
def test_thinking_styles_are_what_mlx_lm_looks_for(upstream, tiny, style, text):
    model = str(tiny("scripted", style=style))
    reply = both(upstream, text, model=model)
    assert (reply.reasoning, reply.content) == ("Hmm.", "Yes.")
    off = both(upstream, "No thought.", model=model, chat_template_kwargs={"enable_thinking": False})
    assert (off.reasoning, off.content) == ("", "No thought.")


def test_markers_are_single_or_several_tokens(tiny):
    assert len(pieces(tiny("qwen3"), "<think></think>")) == 2
    assert pieces(tiny("llama", style="channel"), "<|channel>thought<channel|>") == [
        "<|channel>",
        "thought",
        "<channel|>",
    ]
    prompts = {}
    for style in ("think", "open"):
        _, tokenizer = mlx_lm.load(str(tiny("llama", style=style)))
        for on in (True, False):
            message = [{"role": "user", "content": "x"}]
            options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": on}
            prompts[style, on] = tokenizer.apply_chat_template(message, **options).rpartition("assistant\n")[2]
    closed = "<think>\n\n</think>\n\n"
    assert prompts == {
        ("think", True): "",
        ("think", False): closed,
        ("open", True): "<think>\n",
        ("open", False): closed,
    }


# Random weights


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_replies_in_the_server(upstream, tiny, kind):
    calls = [{"prompt": t, "model": str(tiny(kind)), "max_tokens": 8} for t in ("Hello", "What is the time? " * 10)]
    for reply in together(upstream, calls):
        assert reply.status == 200 and reply.usage["completion_tokens"] > 0


@pytest.mark.parametrize(
    "kind, caches",
    [
        ("llama", {"KVCache"}),
        ("draft", {"KVCache"}),
        ("hybrid", {"ArraysCache", "KVCache"}),
        ("sliding", {"RotatingKVCache", "KVCache"}),
        ("gpt_oss", {"RotatingKVCache", "KVCache"}),
    ],
)
def test_caches_and_end_tokens_of_a_kind(tiny, kind, caches):
    model, tokenizer = mlx_lm.load(str(tiny(kind)))
    assert {type(c).__name__ for c in make_prompt_cache(model)} == caches
    assert len(tokenizer.eos_token_ids) >= 2


def test_seed_changes_the_weights_and_nothing_else(tiny):
    a, b = (tiny("llama", seed=n) for n in (0, 1))
    assert (a / "tokenizer.json").read_bytes() == (b / "tokenizer.json").read_bytes()
    assert (a / "model.safetensors").read_bytes() != (b / "model.safetensors").read_bytes()


def test_an_existing_tokenizer_and_another_template(tiny):
    again = tiny("llama", tokenizer=str(tiny("qwen3")), special=("<|new|>",), template="{{ messages[0].content }}!")
    assert pieces(again, "<think><|new|>") == ["<think>", "<|new|>"]
    _, tokenizer = mlx_lm.load(str(again))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scripted"])
def test_padded_logits_and_a_model_that_prefers_them(tiny, kind):
    model, tokenizer = mlx_lm.load(str(tiny(kind, padded=40, prefer_padded=True)))
    logits = model(mx.array([tokenizer.encode("What is the time in Paris?")]))
    assert logits.shape[-1] == len(tokenizer) + 40
    assert mx.argmax(logits[0], axis=-1).min().item() >= len(tokenizer)


def test_a_padded_script_can_prefer_a_padded_id(tiny):
    padded_id = len(mlx_lm.load(str(tiny("scripted")))[1]) + 3
    model, tokenizer = mlx_lm.load(str(tiny("scripted", padded=5, prefer={padded_id: 50.0})))
    logits = model(mx.array([tokenizer.encode("<|script|>Hello<|script_end|>")]))
    assert logits.shape[-1] == padded_id + 2
    assert mx.argmax(logits[0, -1]).item() == padded_id


# Servers


def test_servers_are_shared_by_their_arguments(serve, tiny, upstream):
    assert serve(tiny("scripted", tools="json_tools"), module="mlx_lm.server") is upstream
    assert get(upstream, "/health").body == {"status": "ok"}
    assert "Starting httpd" in upstream.log()


def test_a_private_server_ends_when_it_is_told(serve_private, tiny):
    server = serve_private(tiny("llama"), "--log-level", "DEBUG", module="mlx_lm.server", env={"NO_COLOR": "1"})
    assert server.alive and complete(server, "a", max_tokens=1).status == 200
    assert server.stop() < 0 and not server.alive
    assert "Starting httpd" in server.log()


def test_a_server_that_cannot_start_tells_why(serve_private, tiny):
    with pytest.raises(RuntimeError, match="unrecognized arguments: --no-such-flag"):
        serve_private(tiny("llama"), "--no-such-flag", module="mlx_lm.server")


# The client


def canned(payload: bytes):
    """The url of a server that answers one request with these bytes and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener, listener.accept()[0] as sock:
            sock.recv(65536)
            sock.sendall(payload)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):  # closing on unread bytes would reset the connection
                pass

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def stream_of(*events: str) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + "".join(events).encode()


def chunk(finish=None, **delta) -> str:
    return f"data: {json.dumps({'id': '1', 'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"


DONE = "data: [DONE]\n\n"


def test_a_stream_is_folded():
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    events = [
        ": keepalive\n\n",
        chunk(role="assistant", content=""),
        chunk(reasoning="Hm", reasoning_content="Hm"),
        chunk(content="Ye"),
        chunk(content="s"),
        chunk(tool_calls=[call]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
        chunk("tool_calls"),
        DONE,
    ]
    reply = chat_stream(canned(stream_of(*events)), "x")
    assert (reply.content, reply.reasoning, reply.finish_reason, reply.id) == ("Yes", "Hm", "tool_calls", "1")
    assert reply.tool_calls == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert reply.comments == ["keepalive"] and len(reply.times) == len(reply.chunks) == 7


def test_an_error_in_a_stream_ends_it_without_done():
    error = 'data: {"error": {"message": "no"}}\n\n'
    assert chat_stream(canned(stream_of(chunk(content="a"), error)), "x").error == {"message": "no"}
    with pytest.raises(BrokenReply, match="after an error"):
        chat_stream(canned(stream_of(error, DONE)), "x")


@pytest.mark.parametrize(
    "events, fault",
    [
        ([chunk()], "without"),
        ([chunk(), DONE, DONE], "after .DONE"),
        ([chunk(), DONE, chunk()], "after .DONE"),
        ([chunk(content="a")[:-1], DONE], "one line"),
        (["data:x\n\n", DONE], "neither"),
        ([chunk("stop"), chunk(content="more"), DONE], "after its finish reason"),
        ([chunk(reasoning="a", reasoning_content="b"), DONE], "differ"),
        (['data: {"id": NaN}\n\n', DONE], "NaN"),
        (["data: {\n\n", DONE], "Expecting"),
        ([chunk(), DONE[:-2]], "cut"),
        ([chunk().replace('"1"', '"2"'), chunk(), DONE], "two ids"),
    ],
)
def test_faults_of_a_stream_are_seen(events, fault):
    with pytest.raises(BrokenReply, match=fault):
        chat_stream(canned(stream_of(*events)), "x")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', '{"a": 1, "a": 1}', "{", ""])
def test_strict_json(text):
    with pytest.raises(BrokenReply):
        strict_loads(text)


def test_raw_bytes_and_error_replies(upstream):
    raw = exchange(upstream, post_bytes(CHAT, b"{not json"))
    assert raw.split(b"\r\n")[0].split()[1] == b"400"
    reply = chat(upstream, "x", temperature=-1)
    assert (reply.status, reply.error) == (400, "temperature must be at least 0")
