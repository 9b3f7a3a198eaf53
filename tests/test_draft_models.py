"""A draft model is accepted only where it cannot change what the main model says; else the server does not start."""

import json
import subprocess
import sys
import time

import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_patches.draft_models import objection, refusal
from tests.client import chat, complete
from tests.conftest import server_env
from tests.tiny_models import DENSE

SHARED = {  # as Gemma 4 has it: the later layers read the caches of the earlier ones
    **DENSE,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention"] * 4,
    "vocab_size": 100,
}
SECONDS = 30  # most of it is Python's start on a busy machine


@pytest.fixture
def sharing(tmp_path):
    """A folder with a configuration and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHARED))
    return tmp_path


@pytest.mark.parametrize(
    "caches, layers, found",
    [
        ([KVCache(), KVCache()], 2, None),
        ([CacheList(KVCache(), KVCache()), KVCache()], 2, None),
        ([KVCache()], 2, "its 2 layers share 1 caches of class KVCache (each needs its own)"),
        (
            [ArraysCache(1), CacheList(KVCache(), RotatingKVCache(8)), ArraysCache(1)],
            3,
            "ArraysCache, RotatingKVCache cannot take rejected guesses back (only KVCache can)",
        ),
        ([ConcatenateKVCache()], 1, "ConcatenateKVCache cannot take rejected guesses back (only KVCache can)"),
    ],
)
def test_what_rules_a_draft_out(caches, layers, found):
    assert objection(caches, layers) == found


@pytest.mark.parametrize("main, draft", [(None, "llama"), ("llama", None), ("llama", "draft"), ("nowhere", "nothing")])
def test_nothing_is_said_of_what_fits_or_cannot_be_looked_at(tiny, main, draft):
    names = {"llama", "draft"}
    main, draft = (str(tiny(name)) if name in names else name for name in (main, draft))
    assert refusal(main, draft) is None


@pytest.mark.parametrize(
    "main, draft, said",
    [
        ("hybrid", "draft", "the main model's caches: ArraysCache cannot"),
        ("sliding", "draft", "the main model's caches: RotatingKVCache cannot"),
        ("llama", "sliding", "the draft model's caches: RotatingKVCache cannot"),
        ("sharing", "draft", "the main model's caches: its 4 layers share 2 caches of class KVCache"),
    ],
)
def test_the_server_does_not_start(tiny, sharing, main, draft, said):
    main, draft = (sharing if name == "sharing" else tiny(name) for name in (main, draft))
    command = [sys.executable, "-m", "mlx_patched_server", "--port", "0", "--model", main, "--draft-model", draft]
    begun = time.monotonic()
    done = subprocess.run(
        list(map(str, command)), env=server_env(), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert time.monotonic() - begun < SECONDS
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"draft model {draft} cannot be used with {main}: ") and said in line


def test_upstream_answers_wrongly_with_a_window(serve, tiny):
    """One token past the window of 32, rejected guesses stay in the cache."""
    folder = tiny("sliding")
    said = "The model reads the prompt once and then writes one token at a time until it says that it is done. " * 2
    drafted = complete(serve(folder, "--draft-model", tiny("draft"), module="mlx_lm.server"), said, max_tokens=30)
    assert drafted.content != complete(serve(folder), said, max_tokens=30).content


def test_a_request_cannot_name_one_either(serve_private, tiny):
    server = serve_private(tiny("llama"), "--load-on-request")
    reply = chat(server, "Hello", max_tokens=2, draft_model=str(tiny("hybrid")))
    assert (reply.status, reply.error["param"]) == (400, "draft_model")
    assert "ArraysCache" in reply.error["message"]
    assert chat(server, "Hello", max_tokens=2).status == 200
    assert chat(server, "Hello", max_tokens=2, draft_model=str(tiny("draft"))).status == 200
