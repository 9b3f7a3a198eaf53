"""HTTP under the wire: kept connections, chunked streams, older clients, request ids, one log line a request."""

import http.client
import json
import re
import time
import uuid
from urllib.parse import urlsplit

import pytest

from tests.client import (
    CHAT,
    COMPLETIONS,
    chat,
    chat_stream,
    complete,
    connect,
    exchange,
    get,
    post_bytes,
    request,
    strict_loads,
    together,
)

SCRIPT = "to be ignored: <|script|>Hello there<|script_end|>"


@pytest.fixture
def folder(tiny):
    return tiny("scripted", style="think", tools="json_tools")


@pytest.fixture
def server(serve, folder):
    return serve(folder)


@pytest.fixture(params=[{}, {"seed": 1}], ids=["batched", "seed"])
def fields(request):
    return request.param


def body_of(text="Hello there", **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


def raw_connection(server) -> http.client.HTTPConnection:
    url = urlsplit(server.url)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=20)


def test_one_connection_many_requests(server):
    """After a whole reply, a streamed one, refusals of all kinds, and what has no body."""
    connection = raw_connection(server)
    connection.connect()
    sock = connection.sock
    steps = [
        ("POST", CHAT, body_of(), 200),
        ("POST", CHAT, body_of(stream=True), 200),
        ("POST", CHAT, body_of(temperature=-1), 400),
        ("POST", CHAT, body_of(model="gpt-4o"), 404),
        ("POST", CHAT, b"{not json", 400),
        ("POST", "/nowhere", body_of(), 404),
        ("GET", "/nowhere", None, 404),
        ("GET", "/health", None, 200),
        ("HEAD", "/health", None, 200),
        ("HEAD", "/nowhere", None, 404),
        ("OPTIONS", CHAT, None, 204),
        ("POST", COMPLETIONS, {"prompt": SCRIPT, "stream": True}, 200),
        ("POST", CHAT, body_of(), 200),
    ]
    for method, path, body, status in steps:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        assert connection.sock is sock, f"closed before {method} {path}"
        response = connection.getresponse()
        text = response.read()
        assert (response.status, response.version) == (status, 11), (path, text)
        assert response.headers["x-request-id"]
        if method in ("HEAD", "OPTIONS"):
            assert text == b""
        elif b"stream" not in (data or b""):
            assert int(response.headers["Content-Length"]) == len(text) and strict_loads(text)
    connection.close()


def test_requests_sent_ahead_are_answered_in_order(server):
    ahead = [body_of("one"), body_of("two", stream=True), body_of("three")]
    with connect(server) as sock:
        sock.sendall(b"".join(post_bytes(CHAT, body) for body in ahead))
        received = b""
        while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}"):
            piece = sock.recv(65536)
            assert piece, received
            received += piece
    places = [received.index(b'"content":"%b"' % text) for text in (b"one", b"two", b"three")]
    assert places == sorted(places)


def test_a_stream_is_chunked(server):
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, body_of(stream=True)))
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            piece = sock.recv(65536)
            assert piece, received
            received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding: chunked" in head.lower()
    assert b"content-length" not in head.lower() and b"text/event-stream" in head
    stream = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        size = int(size, 16)
        assert rest[size : size + 2] == b"\r\n"
        stream, rest = stream + rest[:size], rest[size + 2 :]
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")


def test_an_older_client(server):
    for body in (body_of(), body_of(stream=True), body_of(temperature=-1)):
        raw = exchange(server, post_bytes(CHAT, body).replace(b" HTTP/1.1", b" HTTP/1.0", 1))  # until it is closed
        head, _, data = raw.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        if body.get("stream"):
            assert data.startswith(b"data: {") and data.endswith(b"data: [DONE]\n\n")
        else:
            assert strict_loads(data)


def test_a_client_that_asks_to_close(server):
    for stream in (False, True):
        raw = exchange(server, post_bytes(CHAT, body_of(stream=stream), {"Connection": "close"}))
        assert raw.startswith(b"HTTP/1.1 200") and b"Hello" in raw


@pytest.mark.parametrize("stream", [False, True])
def test_request_ids(server, stream):
    def request_id(headers=None, **more):
        return chat(server, "Hello there", headers=headers, stream=stream, **more).headers["x-request-id"]

    assert request_id({"X-Request-ID": "mine: 1/é".encode().decode("latin-1")[:7]}) == "mine: 1"
    made = [request_id() for _ in range(3)]
    assert len(set(made)) == 3 and all(made)
    assert request_id({"x-request-id": "of a refusal"}, temperature=-1) == "of a refusal"
    assert request_id({"x-request-id": ""}) and len(request_id({"x-request-id": "x" * 10_000})) <= 200
    replies = together(server, [{"prompt": "Hi", "headers": {"x-request-id": f"r{n}"}} for n in range(4)])
    assert [reply.headers["x-request-id"] for reply in replies] == ["r0", "r1", "r2", "r3"]
    assert get(server, "/health", headers={"x-request-id": "h"}).headers["x-request-id"] == "h"


@pytest.mark.parametrize("raw", [b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /a b HTTP/1.1\r\n\r\n"])
def test_bytes_that_are_no_request_get_a_reply_with_a_status(server, raw):
    received = exchange(server, raw, timeout=3)
    head, _, data = received.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] [45]\d\d ", head), received
    assert re.search(rb"(?i)x-request-id: \S", head) and set(strict_loads(data)) == {"error"}


def test_an_unknown_method(server):
    reply = request(server, "PUT", CHAT, body_of())
    assert reply.status in (405, 501) and set(reply.error) == {"message", "type", "param", "code"}


# The log


def log_lines(server, before) -> list[str]:
    """What was logged of requests since then; the line is written when the reply has been."""
    deadline = time.monotonic() + 5
    while "/completions" not in server.log()[before:] and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # for a second one
    return [line for line in server.log()[before:].splitlines() if "/completions" in line]


def test_one_log_line_a_request(server, fields):
    secret = f"word{uuid.uuid4().hex}"
    requests = [
        lambda: chat(server, f"Hello {secret}", **fields),
        lambda: chat_stream(server, f"Hello {secret}", **fields),
        lambda: complete(server, f"to be ignored: <|script|>{secret}<|script_end|>", **fields),
        lambda: chat(server, secret, stop=secret[4:], max_tokens=50, **fields),
    ]
    for ask in requests:
        before = len(server.log())
        reply = ask()
        assert reply.status == 200
        (line,) = log_lines(server, before)
        usage = reply.usage or {}
        path = COMPLETIONS if reply.id.startswith("cmpl") else CHAT
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        pattern = (
            rf"INFO - {path} 200 \d+\.\d+s {usage['prompt_tokens']} -> {usage['completion_tokens']} tokens, "
            rf"{cached} cached, \d+\.\d tokens/s, {reply.finish_reason}$"
        )
        assert re.search(pattern, line), line
        assert secret not in server.log()[before:]


def test_a_refused_request_is_one_line_too(server):
    secret = f"word{uuid.uuid4().hex}"
    for options, status in (({"temperature": -1}, 400), ({"model": "gpt-4o"}, 404), ({"stop": [5]}, 400)):
        before = len(server.log())
        assert chat(server, secret, **options).status == status
        (line,) = log_lines(server, before)
        assert f"{CHAT} {status}" in line
        assert re.search(r"\d\.\d+s", line), f"no seconds: {line}"
        assert secret not in server.log()[before:]


def test_text_in_the_log_only_where_it_is_asked_for(serve_private, folder):
    loud = serve_private(folder, "--log-level", "WARNING")
    chat(loud, "Hello there")
    assert "/completions" not in loud.log()
