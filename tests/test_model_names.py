"""One process serves one model: its names, the 404 of any other, and the model list."""

import threading
import time
from urllib.parse import quote

import pytest

from tests.client import chat, chat_stream, complete, get, together

LONG = "one" + " two three" * 1000


@pytest.fixture
def folder(tiny):
    return tiny("scripted", tools="json_tools")


@pytest.fixture
def server(serve, folder):
    return serve(folder)


def test_the_names_of_the_model(server, folder):
    for name in (str(folder), folder.name, "default_model", f"{folder}/", f"{folder}/../{folder.name}"):
        for fields in ({}, {"seed": 1}):
            reply = chat(server, "Hello", model=name, **fields)
            assert (reply.content, reply.body["model"]) == ("Hello", name)
        reply = chat_stream(server, "Hello", model=name)
        assert {chunk["model"] for chunk in reply.chunks} == {name}
    assert chat(server, "Hello").body["model"] == "default_model"
    assert complete(server, "to be ignored: <|script|>Hello<|script_end|>", model=folder.name).content == "Hello"


def test_a_relative_folder(serve_private, folder):
    """The name it was started with, when that is no path of this process: the server runs in another folder."""
    server = serve_private(f"{folder.parent}/./{folder.name}")
    for name in (f"{folder.parent}/./{folder.name}", str(folder), folder.name):
        assert chat(server, "Hello", model=name).content == "Hello"
    assert get(server, "/v1/models").body["data"][0]["id"] == f"{folder.parent}/./{folder.name}"


@pytest.mark.parametrize(
    "name", ["gpt-4o", "mlx-community/Llama-3.2-1B-Instruct-4bit", "", "/", "../etc", "a b\n\u00fc"]
)
def test_any_other_name_is_a_404_that_says_what_is_served(server, folder, name):
    for call in (chat, chat_stream):
        reply = call(server, "Hello", model=name)
        assert reply.status == 404
        error = reply.error
        assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")
        assert folder.name in error["message"] and "default_model" in error["message"]
        assert reply.seconds < 0.5
    assert complete(server, "Hello", model=name).status == 404


def test_a_404_comes_at_once_and_leaves_a_running_reply_alone(server):
    alone = chat(server, LONG, max_tokens=4000)
    results = []
    for fields in ({}, {"seed": 1}):
        thread = threading.Thread(target=lambda f=fields: results.append(chat(server, LONG, max_tokens=4000, **f)))
        thread.start()
        time.sleep(0.1)
        others = [chat(server, "Hello", model=f"another {n}") for n in range(5)]
        assert not results, "the reply must still run"
        thread.join()
        assert [r.status for r in others] == [404] * 5 and max(r.seconds for r in others) < 0.5
        reply = results.pop()
        assert (reply.content, reply.finish_reason) == (alone.content, alone.finish_reason) == (LONG, "stop")


def test_another_draft_is_not_loaded_either(server, tiny):
    """mlx_lm throws the loaded model out for it, whether there is such a draft or not."""
    assert chat(server, "Hello", draft_model="default_model").content == "Hello"
    for name in ("no/such-draft", str(tiny("draft"))):
        reply = chat(server, "Hello", draft_model=name)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "draft_model", "model_not_found")


def test_adapters_of_a_request_are_ignored_as_mlx_lm_does_for_its_default_model(server):
    assert chat(server, "Hello", adapters="no/such-adapter").content == "Hello"


# /v1/models


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models?limit=5"])
def test_the_model_list(server, folder, path):
    reply = get(server, path)
    assert reply.status == 200 and set(reply.body) == {"object", "data"} and reply.body["object"] == "list"
    (model,) = reply.body["data"]
    assert (model["id"], model["object"]) == (str(folder), "model")
    assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)


def test_one_model(server, folder):
    for name in (str(folder), folder.name, "default_model"):
        for path in {name, quote(name, safe=""), quote(name)}:
            reply = get(server, f"/v1/models/{path}")
            assert reply.status == 200, path
            assert (reply.body["id"], reply.body["object"]) == (name, "model")
    for name in ("gpt-4o", "a/b", "a%2Fb"):
        reply = get(server, f"/v1/models/{name}")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_the_list_needs_no_hub_cache(serve_private, folder, tmp_path):
    server = serve_private(folder, env={"HF_HOME": str(tmp_path / "none"), "HF_HUB_CACHE": str(tmp_path / "none")})
    assert get(server, "/v1/models").body["data"][0]["id"] == str(folder)
    upstream = serve_private(folder, module="mlx_lm.server", env={"HF_HUB_CACHE": str(tmp_path / "none")})
    with pytest.raises(ConnectionError):  # its handler dies of the missing folder
        reply = get(upstream, "/v1/models")
        raise ConnectionError(reply.raw) if reply.status != 200 or not reply.body else AssertionError(reply.raw)


# Flags


def test_any_model_name(serve, folder):
    server = serve(folder, "--any-model-name")
    for name in ("gpt-4o", "claude-sonnet", "", "a/b"):
        reply = chat(server, "Hello", model=name)
        assert (reply.content, reply.body["model"]) == ("Hello", name)
        assert {chunk["model"] for chunk in chat_stream(server, "Hello", model=name).chunks} == {name}
    assert get(server, "/v1/models").body["data"][0]["id"] == str(folder)
    replies = together(server, [{"prompt": f"row {n}", "model": f"name {n}"} for n in range(4)])
    assert [(r.content, r.body["model"]) for r in replies] == [(f"row {n}", f"name {n}") for n in range(4)]


def test_load_on_request(serve, folder, tiny):
    server = serve(folder, "--load-on-request")
    assert chat(server, "Hello", model="default_model").content == "Hello"
    other = chat(server, "Hello", model=str(tiny("llama")), max_tokens=3)
    assert (other.status, other.body["model"]) == (200, str(tiny("llama")))
    assert chat(server, "Hello", model=folder.name).content == "Hello"


def test_mlx_lm_server_loads_what_a_request_names(serve, folder, tiny):
    upstream = serve(folder, module="mlx_lm.server")
    assert chat(upstream, "Hello", model=str(tiny("llama")), max_tokens=3).status == 200  # the loaded model is gone
    assert chat(upstream, "Hello", model="gpt-4o").status == 404  # after asking a hub
    assert chat(upstream, "Hello", model=folder.name).status == 404  # not known by its folder's name
    assert chat(upstream, "Hello", model="default_model").content == "Hello"
