"""Calls over a real socket, for every tool format: the real loop, the format's own template, scripted replies.

FREE servers stand for formats whose grammar is not known: what a call says is the script's alone, as it must be to show
the rows of the table. mlx_lm's own server shows what it does to the same replies.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.client import both, chat, chat_stream, complete
from tests.conftest import ROOT, server_env
from tests.tiny_models import model_folder
from tests.tool_texts import FORMATS, JSON_FORMATS, TOOLS, Raw, markers, written

ALL = pytest.mark.parametrize("form", FORMATS)


class Fleet:
    """Servers by format, of which one runs at a time."""

    def __init__(self):
        self.log = []
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "site" / "many_servers.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=server_env({"FREE": "1"}),
        )
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self.form, self.pid, self.url = None, None, None

    def __call__(self, form):
        if form != self.form:
            self.end_one()
            print(model_folder("scripted", tools=form), file=self.process.stdin, flush=True)
            ready = json.loads(self.process.stdout.readline())
            self.form, self.pid, self.url = form, ready["pid"], f"http://127.0.0.1:{ready['port']}"
        return self.url

    def end_one(self):
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)

    def end(self):
        self.end_one()
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def fleet():
    servers = Fleet()
    yield servers
    servers.end()


def values(reply):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reply.tool_calls]


def replied(fleet, form, text, **fields):
    """What a reply of `text` gives: content, reasoning, calls, finish_reason; streamed and not."""
    reply = both(fleet(form), text, **{"tools": TOOLS, "max_tokens": 400, **fields})
    assert reply.status == 200
    if "tool_calls" in reply.body["choices"][0]["message"]:
        assert all(call["type"] == "function" and call["id"] for call in reply.tool_calls) and reply.tool_calls
    return reply.content, reply.reasoning, values(reply), reply.finish_reason


@ALL
@pytest.mark.parametrize("path", [{}, {"seed": 1}], ids=["batched", "single"])
def test_calls(fleet, form, path):
    end = markers(form)[1]
    arguments = {"a": 2**63 + 1, "n": Raw("1e400"), "s": f"text {end} inside", "u": None, "o": {"k": [1]}}
    calls = [("f", arguments), ("nope", {"q": "z"})]
    want = [("f", {**arguments, "n": "1e400"}), ("nope", {"q": "z"})]
    text = written(form, calls)
    assert replied(fleet, form, f"<think>Hm.</think>\n\n{text}", **path) == ("", "Hm.", want, "tool_calls")
    cut = f"<think>Hm.</think>\n\n{text[:4]}<|cut|>{text[4:40]}<|cut|>{text[40:-3]}<|cut|>{text[-3:]}"
    assert replied(fleet, form, cut, **path) == ("", "Hm.", want, "tool_calls")
    assert "nope" in "".join(fleet.log)


@ALL
def test_texts_that_are_no_calls(fleet, form):
    start, end = markers(form)
    broken = f"{start}not a call{end} more"
    assert replied(fleet, form, broken) == (broken, "", [], "stop")
    assert "cannot be read" in "".join(fleet.log)
    call = written(form, [("f", {"a": 1})])
    assert replied(fleet, form, f"A call is {call}.", tools=None) == (f"A call is {call}.", "", [], "stop")
    assert replied(fleet, form, f"<think>The {start} tag</think>Yes.") == ("Yes.", f"The {start} tag", [], "stop")
    assert complete(fleet(form), f"<|script|>A {call}.<|script_end|>", max_tokens=200).content == f"A {call}."


@ALL
def test_a_call_that_is_cut(fleet, form):
    text = written(form, [("f", {"s": "one two three four five six", "a": 1})])
    begun = "So: " + text[: text.index(" five")]
    tokens = chat(fleet(form), begun, max_tokens=500).usage["completion_tokens"] - 1
    fields = {"tools": TOOLS, "max_tokens": tokens}
    cut, streamed = (ask(fleet(form), f"So: {text}", **fields) for ask in (chat, chat_stream))
    assert (cut.finish_reason, streamed.finish_reason) == ("length", "length")
    assert (cut.content, cut.tool_calls) == (begun, [])
    if form in JSON_FORMATS:
        assert streamed.tool_calls[0]["function"]["name"] == "f"
        assert streamed.tool_calls[0]["function"]["arguments"] == '{"s": "one two three four'
    else:
        assert streamed.content == cut.content


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_arguments_come_in_pieces(fleet, form):
    reply = chat_stream(
        fleet(form), written(form, [("f", {"s": "one two three", "a": 1})]), tools=TOOLS, max_tokens=200
    )
    deltas = [call for c in reply.chunks for x in c["choices"] for call in x["delta"].get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "f", "arguments": ""} and deltas[0]["id"] and deltas[0]["index"] == 0
    assert len(deltas) > 4 and all(set(d) == {"index", "function"} for d in deltas[1:])


def test_ids_and_a_round(fleet):
    """A call's id goes back to the template as it came."""
    reply = chat(fleet("kimi_k2"), written("kimi_k2", [("f", {"a": 1})]), tools=TOOLS, max_tokens=200)
    assert reply.tool_calls[0]["id"] == "functions.f:0"
    message = reply.body["choices"][0]["message"]
    broken = {**reply.tool_calls[0], "function": {"name": "f", "arguments": '{"a": 1'}}
    for calls in ([reply.tool_calls[0]], [broken]):
        for result in ("12", "", [], [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]):
            turns = [
                {**message, "tool_calls": calls},
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": result},
            ]
            messages = [{"role": "user", "content": "x"}, *turns, {"role": "user", "content": "It is 12."}]
            said = both(fleet("kimi_k2"), messages, tools=TOOLS, max_tokens=20)
            assert (said.status, said.content, said.finish_reason) == (200, "It is 12.", "stop")


def test_an_answer_that_is_nothing_but_a_call(fleet):
    bare = '{"name": "f", "parameters": {"a": 1}}'
    assert replied(fleet, "qwen3_coder", bare) == ("", "", [("f", {"a": 1})], "tool_calls")
    prose = f"Write {bare} to call it."
    assert replied(fleet, "qwen3_coder", prose) == (prose, "", [], "stop")


# What mlx_lm's own server does


def upstream(serve, tiny, form, text, stream=False, **fields):
    """One process serves all formats: mlx_lm loads the model that a request names."""
    server = serve(tiny("scripted", tools="json_tools"), module="mlx_lm.server")
    ask = chat_stream if stream else chat
    return ask(server, text, tools=TOOLS, max_tokens=300, model=str(tiny("scripted", tools=form)), **fields)


def test_upstream_loses_a_call_that_it_cannot_read(serve, tiny):
    reply = upstream(serve, tiny, "json_tools", "<tool_call>{broken</tool_call>")
    assert (reply.status, reply.content, reply.tool_calls, reply.finish_reason) == (200, "", [], "tool_calls")


def test_upstream_fails_a_reply_on_other_faults(serve, tiny):
    text = written("qwen3_coder", [("f", {"n": Raw("1e400")})])
    with pytest.raises(Exception):  # noqa: B017  the connection ends without a reply
        upstream(serve, tiny, "qwen3_coder", text)


def test_upstream_loses_types_and_digits(serve, tiny):
    arguments = {"s": "null", "a": Raw("9223372036854775809"), "v": Raw("5"), "b": Raw("1")}
    (call,) = values(upstream(serve, tiny, "qwen3_coder", written("qwen3_coder", [("f", arguments)])))
    assert call[1] == {"s": None, "a": 9223372036854775808, "v": "5", "b": False}


def test_upstream_ends_a_call_at_a_tag_in_a_string(serve, tiny):
    text = written("json_tools", [("f", {"s": "text </tool_call> inside"})])
    reply = upstream(serve, tiny, "json_tools", text)
    assert reply.tool_calls == [] and "inside" in reply.content
