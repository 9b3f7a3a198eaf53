"""A stream is never silent for longer than `--keepalive-seconds`, and its headers wait for what may yet be an error.

The interval is 0.3 s here. What keeps a client waiting: a reply on the single path before it, a long prompt read in
small steps, a long tool call, and a model folder with a file that is a pipe, so that the load ends when a test says so.
"""

import json
import os
import threading
import time
from contextlib import contextmanager

import pytest

from tests.client import CHAT, chat, chat_stream, complete_stream, connect, get, post_bytes
from tests.conftest import Server, free_port
from tests.tiny_models import CHATML

INTERVAL = 0.3
FLAGS = ("--keepalive-seconds", INTERVAL, "--prefill-step-size", 16)
REFUSING = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}" + CHATML
LONG = "one" + " two three" * 1500  # some 1.5 s of reply


@pytest.fixture
def scripted(tiny):
    return tiny("scripted", tools="json_tools", template=REFUSING)


@contextmanager
def behind_another(server):
    """Inside the block a reply runs on the single path, which no request can join; its end is awaited after it. Gives
    the list in which it will be."""
    done = []
    body = {"messages": [{"role": "user", "content": LONG}], "seed": 1, "max_tokens": 9000, "stream": True}

    def drain(sock, received):
        while b"[DONE]" not in received[-100:]:
            received += sock.recv(65536)
        done.append(received)

    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, body))
        received = b""
        while b" two" not in received:
            received += sock.recv(65536)
        thread = threading.Thread(target=drain, args=(sock, received))
        thread.start()
        yield done
        thread.join()
    assert done[0].count(b" three") == LONG.count(" three")


def arrivals(server, body) -> list[tuple[float, bytes]]:
    """(seconds since the request, bytes) of each piece that came, until the stream's last chunk."""
    pieces, start = [], time.monotonic()
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, body))
        while not pieces or not pieces[-1][1].endswith(b"0\r\n\r\n"):
            data = sock.recv(65536)
            assert data, pieces
            pieces.append((time.monotonic() - start, data))
    return pieces


def test_a_queued_stream_gets_comments_by_the_clock(serve, scripted):
    server = serve(scripted, *FLAGS)
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with behind_another(server):
        pieces = arrivals(server, body)
    comments = [at for at, data in pieces if b": keepalive\n\n" in data]
    assert len(comments) >= 2
    waits = [b - a for a, b in zip([0.0, *comments], comments, strict=False)]
    assert min(waits) > INTERVAL * 0.9 and max(waits) < INTERVAL + 0.7, waits
    raw = b"".join(data for _, data in pieces)
    head, _, stream = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
    # The headers and the opening chunk came with the first comment.
    assert stream.index(b'"role":"assistant"') < stream.index(b": keepalive") < stream.index(b'"content":"Hello"')


@pytest.mark.parametrize("fields", [{}, {"seed": 2}], ids=["batched", "seed"])
def test_a_stream_whose_prompt_is_long(serve, tiny, fields):
    server = serve(tiny("llama"), *FLAGS)
    text = f"{fields} " + " one two" * 3000
    reply = chat_stream(server, text, max_tokens=1, **fields)
    assert reply.times[-1] > 3 * INTERVAL, "the prompt must take a while"
    assert len(reply.comments) >= 2 and set(reply.comments) == {"keepalive"}
    assert reply.finish_reason == "length"
    # By the clock: not one for each of the prompt's 375 steps.
    assert len(reply.comments) <= reply.seconds / INTERVAL


def test_completions_too(serve, tiny):
    reply = complete_stream(serve(tiny("llama"), *FLAGS), "plain" + " one two" * 3000, max_tokens=1)
    assert len(reply.comments) >= 2 and reply.finish_reason == "length"


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["batched", "seed"])
def test_a_long_call_is_no_event_until_it_is_whole(serve, tiny, fields):
    """In a format whose arguments are no JSON, which are sent at the call's end."""
    server = serve(tiny("scripted", tools="glm47"), *FLAGS)
    call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{LONG}</arg_value></tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reply = chat_stream(server, call, tools=tools, max_tokens=9000, **fields)
    assert json.loads(reply.tool_calls[0]["function"]["arguments"]) == {"a": LONG}
    assert reply.seconds > 3 * INTERVAL
    assert len(reply.comments) >= 2


def test_no_comment_while_events_come(serve, scripted):
    reply = chat_stream(serve(scripted, *FLAGS), LONG, max_tokens=9000)
    assert reply.content == LONG and reply.seconds > 2 * INTERVAL
    assert reply.comments == []


def test_a_reply_that_is_not_streamed_gets_none(serve, scripted):
    server = serve(scripted, *FLAGS)
    with behind_another(server):
        reply = chat(server, "Hi")
    assert b"keepalive" not in reply.raw and reply.content == "Hi"


# The status of an error


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["batched", "seed"])
def test_an_error_before_the_first_interval_has_its_own_status(serve, scripted, fields):
    server = serve(scripted, *FLAGS)
    for reply in (chat_stream(server, "bad", **fields), chat(server, "bad", **fields)):
        assert (reply.status, reply.headers.get_content_type()) == (400, "application/json")
        assert "no bad words" in reply.error["message"] and reply.error["type"] == "invalid_request_error"
    assert chat_stream(server, "Hi", temperature=-1, **fields).status == 400
    assert chat_stream(server, "Hi", **fields).content == "Hi"


def test_an_error_after_the_first_interval_is_a_frame(serve, scripted):
    server = serve(scripted, *FLAGS)
    with behind_another(server) as done:
        # Refused without the queue.
        assert chat_stream(server, "Hi", temperature=-1).status == 400
        assert chat_stream(server, "Hi", model="another").status == 404
        assert not done
    with behind_another(server):
        reply = chat_stream(server, "bad")
    assert reply.status == 200 and reply.comments
    assert "no bad words" in reply.error["message"] and not reply.raw.endswith(b"[DONE]\n\n")
    assert set(reply.error) == {"message", "type", "param", "code"}


def test_the_headers_wait(serve, scripted):
    """With the usual 10 seconds and with 0, a queued stream has no status until it begins."""
    for seconds in (10, 0):
        server = serve(scripted, "--keepalive-seconds", seconds)
        with connect(server) as sock:
            with behind_another(server) as done:
                body = {"messages": [{"role": "user", "content": "bad"}], "stream": True}
                sock.sendall(post_bytes(CHAT, body))
                sock.settimeout(3 * INTERVAL)
                with pytest.raises(TimeoutError):
                    sock.recv(1)
                assert not done
            sock.settimeout(30)
            assert sock.recv(65536).startswith(b"HTTP/1.1 400")


def test_zero_turns_it_off(serve, scripted):
    server = serve(scripted, "--keepalive-seconds", 0)
    with behind_another(server):
        reply = chat_stream(server, "Hi")
    assert reply.times[0] > 2 * INTERVAL
    assert (reply.comments, reply.content) == ([], "Hi")


# While the model loads


@contextmanager
def loading(folder, target, *flags):
    """A server that is bound and whose load waits; calling what is yielded lets it end and gives the ready Server."""
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    pipe = target / "generation_config.json"
    content = pipe.read_bytes()
    pipe.unlink()
    os.mkfifo(pipe)
    started, port = [], free_port()
    thread = threading.Thread(target=lambda: started.append(Server(target, "--port", port, *flags)))
    thread.start()

    def finish():
        if not started:
            with pipe.open("wb") as reader:  # opens when the load has come to this file
                real = target / "real"
                real.write_bytes(content)
                real.rename(pipe)  # for whoever reads it again
                reader.write(content)
            thread.join()
        return started[0]

    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1000):
            try:
                get(url, "/health")
                break
            except ConnectionError:
                time.sleep(0.02)
        yield url, finish
    finally:
        finish().stop()


def test_while_the_model_loads(tiny, tmp_path):
    with loading(tiny("scripted", template=REFUSING), tmp_path, *FLAGS) as (url, finish):
        assert get(url, "/health").body == {"status": "loading"}
        replies = {}

        def ask(name, call, *args, **fields):
            replies[name] = call(url, *args, **fields)

        calls = [("stream", chat_stream, "Hi"), ("whole", chat, "Hi"), ("late error", chat_stream, "bad")]
        threads = [threading.Thread(target=ask, args=call) for call in calls]
        for thread in threads:
            thread.start()
        # A body that is refused need not wait.
        assert chat_stream(url, "Hi", top_p=2).status == 400
        time.sleep(4 * INTERVAL)
        assert not replies
        finish()
        for thread in threads:
            thread.join()
        assert get(url, "/health").body == {"status": "ok"}
        assert replies["stream"].content == replies["whole"].content == "Hi"
        assert len(replies["stream"].comments) >= 2
        assert (replies["late error"].status, replies["late error"].error["param"]) == (200, "messages")


# mlx_lm.server


def test_mlx_lm_server_is_silent_while_a_stream_waits(serve, scripted):
    upstream = serve(scripted, "--prefill-step-size", 16, module="mlx_lm.server")
    with behind_another(upstream):
        reply = chat_stream(upstream, "Hi")
    assert reply.times[0] > 2 * INTERVAL and reply.content == "Hi"
    assert all(" " in comment for comment in reply.comments), "one for each chunk of the prompt, none of the wait"
    assert chat_stream(upstream, "bad").status == 404
