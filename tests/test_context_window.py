"""The model's context window: what a config says of it, what does not fit, and what is left for the reply."""

import pytest

from mlx_patches.context_window import window_of
from tests.client import COMPLETIONS, both, chat, chat_stream, complete, post

WINDOW = 120
LONG = "one" + " two three" * 100
SCRIPT = f"to be ignored: <|script|>{LONG}<|script_end|>"


@pytest.fixture
def server(serve, tiny):
    return serve(tiny("scripted", max_position_embeddings=WINDOW))


@pytest.fixture(params=[{}, {"seed": 1}], ids=["batched", "seed"])
def fields(request):
    return request.param


MOST = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "config, window",
    [
        ({}, None),
        ({"model_type": "mamba", MOST: None}, None),
        ({MOST: 4096}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, 512),
        ({MOST: 10, "text_config": {MOST: 4096}}, 4096),
        ({MOST: 4096, "text_config": {"hidden_size": 1}}, 4096),
        ({MOST: 4096, "rope_scaling": None}, 4096),
        ({MOST: 4096, "rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        ({MOST: 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({MOST: 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}}, 131072),
        ({MOST: 163840, "rope_scaling": {"type": "yarn", "factor": 40, ORIGINAL: 4096}}, 163840),
        ({MOST: 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({MOST: 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 8192}}, 131072),
        ({MOST: 131072, "rope_scaling": {"type": "longrope", "short_factor": [1]}, ORIGINAL: 4096}, 131072),
        ({MOST: 131072, "rope_scaling": {"type": "su", "factor": 32}}, 131072),
        ({MOST: 32768, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 32768),
        ({MOST: 131072, "model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8}}, 131072),
        ({MOST: 262144, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, 262144),
        (
            {MOST: 4096, "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2, ORIGINAL: 4096}}},
            8192,
        ),
    ],
    ids=str,
)
def test_the_window_of_a_config(config, window):
    assert window_of(config) == window


def test_a_prompt_that_is_too_long(server, fields):
    for reply in (
        chat(server, LONG, **fields),
        chat_stream(server, LONG, **fields),
        complete(server, SCRIPT, **fields),
    ):
        error = reply.error
        assert (reply.status, error["type"], error["code"]) == (
            400,
            "invalid_request_error",
            "context_length_exceeded",
        )
        assert error["param"] in ("messages", "prompt")
        numbers = [int(word) for word in error["message"].replace(",", " ").split() if word.isdigit()]
        assert numbers[0] == WINDOW < numbers[1] and "maximum context length" in error["message"]
    assert chat(server, "Hello there", **fields).content == "Hello there"


def test_the_reply_gets_what_is_left(server, fields):
    text = "one" + " two three" * 30
    reply = both(server, text, **fields, max_tokens=10_000)
    assert reply.finish_reason == "length" and text.startswith(reply.content)
    assert reply.usage["total_tokens"] == WINDOW
    assert chat(server, text, **fields, max_tokens=5).usage["completion_tokens"] == 5


def test_the_last_prompt_that_fits(server, fields):
    def ask(words):
        return post(server, COMPLETIONS, {"prompt": " two" * words, "max_tokens": 50, **fields})

    usage = ask(WINDOW - 1).usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (WINDOW - 1, 1)
    assert ask(WINDOW).error["code"] == "context_length_exceeded"


def test_a_budget_of_thinking_knows_what_is_left(server):
    """Half of what `max_tokens` was clamped to."""
    reply = chat(server, "<think>" + " two three" * 20 + "</think> four", max_tokens=10_000)
    assert reply.status == 200 and reply.usage["total_tokens"] <= WINDOW
    assert reply.usage["completion_tokens_details"]["reasoning_tokens"] <= WINDOW // 2


def test_a_model_without_a_window(serve, tiny):
    server = serve(tiny("scripted"))
    assert chat(server, LONG, max_tokens=500).content == LONG


def test_mlx_lm_server_reads_on(serve, tiny):
    upstream = serve(tiny("scripted", max_position_embeddings=WINDOW), module="mlx_lm.server")
    assert chat(upstream, LONG, max_tokens=500).usage["total_tokens"] > WINDOW
