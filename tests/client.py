"""A strict client over http.client: a Reply from a whole body or from a stream, folded into the same fields.

    chat(server, "Hello", max_tokens=5).content  # a text or a list of messages; other keywords are the body
    chat_stream(server, "Hello").chunks  # raises on any fault of framing, JSON (NaN too) or [DONE]
    both(server, "Hello")  # streamed and not, agreeing; complete, complete_stream, both_complete for /v1/completions
    together(server, [{"prompt": "a"}, {"prompt": "b", "stream": True}], stagger=0.05)  # replies of concurrent chats
    with connect(server) as sock: sock.sendall(post_bytes("/v1/chat/completions", {...}))  # then close it, or read raw

An error reply is a Reply too: look at `status` and `error`. `headers=`, `timeout=` (seconds) are for every call.
"""

import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class BrokenReply(AssertionError):
    """The bytes on the wire break a rule: framing, JSON, a stream that stops short, pieces that disagree."""


@dataclass
class Reply:
    """What a server said. `content` and `reasoning` are "" where there is none; a streamed reply has `chunks` (parsed
    events), `comments` and `times` (seconds from the request to each chunk), an unstreamed one `body`."""

    status: int
    headers: http.client.HTTPMessage
    raw: bytes
    body: Any = None
    id: str | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict | None = None
    logprobs: Any = None
    error: Any = None
    chunks: list[dict] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0


def strict_loads(text: str | bytes) -> Any:
    """JSON as the standard has it: NaN, infinities and a name written twice in one object are refused."""

    def refuse(name):
        raise BrokenReply(f"{name} in JSON: {text!r}")

    def once(pairs):
        if len(dict(pairs)) != len(pairs):
            raise BrokenReply(f"a name twice in one object: {text!r}")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except ValueError as e:
        raise BrokenReply(f"{e}: {text!r}") from e


def check(holds: bool, what: str):
    if not holds:
        raise BrokenReply(what)


def request(server, method, path, body=None, *, headers=None, timeout=60) -> Reply:
    """Sends `body` (bytes as they are, anything else as JSON) and reads the reply, event by event if it is a stream."""
    url = urlsplit(server if isinstance(server, str) else server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
    headers = {"Content-Type": "application/json", **(headers or {})}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    start = time.monotonic()
    try:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        if response.headers.get_content_type() == "text/event-stream":
            reply = read_stream(response, start)
        else:
            reply = Reply(response.status, response.headers, response.read())
            if "json" in response.headers.get_content_type() and reply.raw[:1] in (b"{", b"["):
                read_body(reply)
    finally:
        connection.close()
    reply.seconds = time.monotonic() - start
    return reply


def read_body(reply: Reply):
    reply.body = strict_loads(reply.raw)
    if isinstance(reply.body, dict):
        reply.id, reply.usage, reply.error = (reply.body.get(k) for k in ("id", "usage", "error"))
        for choice in reply.body.get("choices", [])[:1]:
            fold(reply, choice, choice.get("message"))


def read_stream(response, start) -> Reply:
    """Reads server-sent events of one `data: ` line or comment each, parted by one empty line, ending in one [DONE],
    or, after an error event, without it."""
    reply, lines, done = Reply(response.status, response.headers, b""), [], False
    while line := response.readline():
        reply.raw += line
        check(line.endswith(b"\n") and not line.endswith(b"\r\n"), f"a line that is cut: {line!r}")
        if line != b"\n":
            lines.append(line[:-1].decode("utf-8"))
            continue
        check(len(lines) == 1, f"an event is one line, got {lines}")
        (text,) = lines
        lines = []
        check(not done, f"after [DONE]: {text!r}")
        if text.startswith(":"):
            reply.comments.append(text[1:].strip())
            continue
        check(text.startswith("data: "), f"neither data nor a comment: {text!r}")
        check(reply.error is None, f"after an error: {text!r}")
        if text == "data: [DONE]":
            done = True
            continue
        reply.times.append(time.monotonic() - start)
        read_chunk(reply, strict_loads(text[6:]))
    response.read()  # raises IncompleteRead if a chunked body lacks its last chunk
    check(not lines, f"the stream stops inside an event: {lines}")
    check(done or reply.error is not None, f"the stream stops without [DONE]: {reply.raw[-300:]!r}")
    return reply


def read_chunk(reply: Reply, chunk: dict):
    reply.chunks.append(chunk)
    reply.error = chunk.get("error")
    if reply.error is not None:
        return
    check(reply.id in (None, chunk["id"]), f"two ids in one stream: {reply.id}, {chunk['id']}")
    reply.id, reply.usage = chunk["id"], chunk.get("usage") or reply.usage
    for choice in chunk["choices"]:
        if choice["index"] == 0:
            check(reply.finish_reason is None, f"a choice after its finish reason: {chunk}")
            fold(reply, choice, choice.get("delta"))


def fold(reply: Reply, choice: dict, message: dict | None):
    """Adds a choice (the whole of it, or a chunk's part) to the reply."""
    message = {"content": choice.get("text")} if message is None else message
    names = {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}
    check(len(set(names.values())) <= 1, f"the two names of reasoning differ: {names}")
    reply.reasoning += next(iter(names.values()), None) or ""
    reply.content += message.get("content") or ""
    for n, call in enumerate(message.get("tool_calls") or []):
        fold_call(reply.tool_calls, call.get("index", n), call)
    reply.finish_reason = choice.get("finish_reason")
    if (logprobs := choice.get("logprobs")) is not None:
        old = reply.logprobs or {}
        reply.logprobs = {k: old.get(k, []) + v if isinstance(v, list) else v for k, v in logprobs.items()}


def fold_call(calls: list, index: int, delta: dict):
    check(index <= len(calls), f"call {index} comes before call {len(calls)}")
    if index == len(calls):
        calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": "", "arguments": ""}})
    for name, piece in (delta.get("function") or {}).items():
        calls[index]["function"][name] += piece or ""


def post(server, path, body, **options) -> Reply:
    return request(server, "POST", path, body, **options)


def get(server, path, **options) -> Reply:
    return request(server, "GET", path, **options)


def chat(server, prompt, *, headers=None, timeout=60, **body) -> Reply:
    """One chat completion. `prompt` is the user's text or a list of messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return post(server, CHAT, {"messages": messages, **body}, headers=headers, timeout=timeout)


def chat_stream(server, prompt, **options) -> Reply:
    return chat(server, prompt, **{"stream": True, "stream_options": {"include_usage": True}, **options})


def complete(server, prompt, *, headers=None, timeout=60, **body) -> Reply:
    return post(server, COMPLETIONS, {"prompt": prompt, **body}, headers=headers, timeout=timeout)


def complete_stream(server, prompt, **options) -> Reply:
    return complete(server, prompt, **{"stream": True, "stream_options": {"include_usage": True}, **options})


def both(server, prompt, *, whole=chat, streamed=chat_stream, **options) -> Reply:
    """The unstreamed reply, after checking that the streamed one says the same."""
    a, b = whole(server, prompt, **options), streamed(server, prompt, **options)

    def said(reply):
        calls = [(c["type"], c["function"]) for c in reply.tool_calls]
        return reply.status, reply.content, reply.reasoning, calls, reply.finish_reason

    check(said(a) == said(b), f"unstreamed {said(a)}\nstreamed   {said(b)}")
    return a


def both_complete(server, prompt, **options) -> Reply:
    return both(server, prompt, whole=complete, streamed=complete_stream, **options)


def together(server, calls: list[dict], stagger: float = 0.0) -> list[Reply]:
    """Sends the calls from one thread each, `stagger` seconds apart; their replies in order. A call is the keywords of
    `chat`, or of another function under "call"; the first exception of any is raised."""
    results: list = [None] * len(calls)

    def run(n, options):
        options = dict(options)
        streams = options.get("stream", False)
        call = options.pop("call", chat_stream if streams else chat)
        try:
            results[n] = call(server, **options)
        except Exception as e:
            results[n] = e

    threads = [threading.Thread(target=run, args=(n, options)) for n, options in enumerate(calls)]
    for n, thread in enumerate(threads):
        time.sleep(stagger if n else 0)
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def connect(server, timeout=60) -> socket.socket:
    url = urlsplit(server if isinstance(server, str) else server.url)
    return socket.create_connection((url.hostname, url.port), timeout)


def post_bytes(path, body, headers=None) -> bytes:
    """The bytes of a POST request: `body` as it is if bytes, else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(data), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def exchange(server, data: bytes, timeout=10) -> bytes:
    """Sends bytes and reads until the server closes, or until nothing came for `timeout` seconds."""
    received = b""
    with connect(server, timeout) as sock:
        sock.sendall(data)
        try:
            while piece := sock.recv(65536):
                received += piece
        except TimeoutError:
            pass
    return received
