"""Bodies, headers and bytes that are damaged at random, while a plain request always runs beside them.

    python -m pytest tests/test_fuzz.py        # some 80 seconds
    python -m tests.test_fuzz --minutes 20     # each test in turn, other examples each time; findings in smallest form

What must hold of every exchange: it is answered or closed within BOUND seconds, what is answered is well-formed, and no
5xx is among it (but 501 and 505, where the bytes ask for another method or another HTTP). Of the server: the same
process, healthy, no traceback in its log. Of the plain request: the text that it has alone.
"""

import argparse
import http.client
import json
import random
import re
import shutil
import socket
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mlx_patches.request_bodies import FIELDS
from tests.client import (
    CHAT,
    BrokenReply,
    Reply,
    chat,
    chat_stream,
    check,
    connect,
    get,
    post_bytes,
    read_body,
    read_stream,
)
from tests.conftest import Server
from tests.fuzz_requests import DEEP, DEEP_CALL, OPTIONS, encode, raw_requests, requests
from tests.tiny_models import model_folder

SECONDS = 10  # of trying examples, a test
LEAST = 10  # examples of a test that have to be tried, however slow the machine is
BOUND = 60  # seconds from the last byte that is sent to the end of an answer: a machine under load needs its time
WINDOW = 640
FLAGS = ("--max-tokens", 24, "--request-timeout", 2, "--prompt-cache-bytes", "4MB", "--temp", 1)
LONG = "one" + " two three" * 25


def ask(server, path: str, body: dict) -> Reply:
    """The reply, read strictly. Raises AssertionError where it is not as it must be."""
    began = time.monotonic()
    with connect(server, BOUND) as sock:
        sock.sendall(post_bytes(path, encode(body)))
        response = http.client.HTTPResponse(sock, method="POST")
        response.begin()
        if response.headers.get_content_type() == "text/event-stream":
            reply = read_stream(response, began)
        else:
            reply = Reply(response.status, response.headers, response.read())
            read_body(reply)
    check(time.monotonic() - began < BOUND, f"it took {time.monotonic() - began:.0f} s")
    check(reply.status < 500, f"status {reply.status}: {reply.raw[:500]!r}")
    check((reply.status == 200) == (reply.error is None) or reply.chunks != [], f"{reply.status} with {reply.error}")
    if reply.error is not None:
        check(set(reply.error) == {"message", "type", "param", "code"}, f"no error object: {reply.error}")
        check(reply.error["type"] != "server_error", f"an error of ours: {reply.error}")
    return reply


def throw(server, pieces: list[bytes], then: str) -> bytes:
    """Sends bytes as they are; what came back until the first whole answer, or until the server closed."""
    received, until = b"", time.monotonic() + BOUND
    with connect(server, BOUND) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
            if then == "close":
                return b""
            if then == "shut":
                sock.shutdown(socket.SHUT_WR)
            while not answered(received):
                sock.settimeout(max(until - time.monotonic(), 0.01))
                piece = sock.recv(65536)
                if not piece:
                    break
                received += piece
        except TimeoutError:
            raise BrokenReply(f"neither answered nor closed within {BOUND} s: {received[-300:]!r}") from None
        except ConnectionError:
            pass  # closed, where it had not read all
    for status in re.findall(rb"^HTTP/1\.1 ([0-9]{3}) [^\r]*\r\n", received, re.MULTILINE):
        check(status < b"500" or status in (b"501", b"505"), f"status {status!r}: {received[:500]!r}")
    check(not received or re.match(rb"HTTP/1\.1 [1-5][0-9]{2} ", received) is not None, f"no HTTP: {received[:300]!r}")
    check(b'"server_error"' not in received or re.match(rb"HTTP/1\.1 50[15] ", received), f"{received[-500:]!r}")
    return received


def answered(received: bytes) -> bool:
    """Whether there is a whole answer in `received` that is no 100. To a HEAD, or a 204, it has no body."""
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    head, end, body = received.partition(b"\r\n\r\n")
    if b"event-stream" in head:
        return body.endswith(b"0\r\n\r\n")  # to HTTP/1.0, the end is the close
    length = re.search(rb"(?i)\r\nContent-Length: ([0-9]+)", head)
    return bool(end) and (not length or head.startswith(b"HTTP/1.1 200") or len(body) >= int(length[1]))


class Target:
    """A server, and a plain request that always runs on it: streamed, and then not, and so on."""

    def __init__(self, kind: str):
        self.folder, self.ended = tempfile.TemporaryDirectory(prefix="fuzz-"), False
        self.model = Path(self.folder.name) / kind
        options = {} if kind == "gpt_oss" else {"style": "think", "tools": "json_tools"}
        shutil.copytree(model_folder(kind, **options), self.model)
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": WINDOW}))
        self.start()
        self.alone = self.plain(chat).content
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def start(self):
        self.server, self.read, self.wrong, self.ran = Server(self.model, *FLAGS), 0, [], 0

    def plain(self, ask) -> Reply:
        return ask(self.server, LONG, max_tokens=60, temperature=0, timeout=BOUND)

    def run(self):
        while not self.ended:
            server = self.server
            try:
                reply = self.plain(chat if self.ran % 2 else chat_stream)
                fault = None if (reply.status, reply.content) == (200, self.alone) else f"{reply.status} {reply.raw!r}"
            except Exception as raised:
                fault = repr(raised)
                time.sleep(0.2)
            if server is self.server and not self.ended:
                self.ran += 1
                self.wrong += [fault] * (fault is not None)

    def check(self):
        """Raises AssertionError for whatever went wrong since the last call; a server that ended is started anew."""
        with self.server.err.open("rb") as log:
            log.seek(self.read)
            new = log.read()
        self.read, new = self.read + len(new), new.decode(errors="replace")
        if not self.server.alive:
            self.start()
            raise AssertionError(f"the process ended: {new[-3000:]}")
        wrong, self.wrong = self.wrong, []
        assert "Traceback" not in new, new[max(0, new.index("Traceback") - 300) :][:4000]
        assert not wrong, f"the request beside it: {wrong}, not {self.alone!r}"
        health = get(self.server, "/health", timeout=BOUND)
        assert (health.status, health.body) == (200, {"status": "ok"}), health

    def stop(self):
        self.ended = True
        self.thread.join(BOUND)
        self.server.stop(seconds=5)
        self.folder.cleanup()


def send_all(target: Target, send, given: list) -> None:
    """All at once, so that they meet in a batch."""
    with ThreadPoolExecutor(len(given)) as pool:
        for done in [pool.submit(send, target.server, *each) for each in given]:
            done.result()


RUNS = {
    "bodies, scripted": ("scripted", st.lists(requests(), min_size=1, max_size=3), ask),
    "bodies, sampled": ("llama", st.lists(requests(), min_size=1, max_size=3), ask),
    "bodies, harmony": ("gpt_oss", st.lists(requests(), min_size=1, max_size=3), ask),
    "bytes and headers": ("scripted", st.lists(raw_requests(), min_size=1, max_size=8), throw),
}
"""By name: the kind of model, what is sent at once, and how."""


class TimeIsUp(BaseException):
    """Hypothesis knows no time limit; this passes through it."""


def fuzz(target: Target, name: str, seconds: float, number: int, phases) -> int:
    """Tries examples for so long, or until one fails; how many were tried. `number` says which."""
    _, strategy, send = RUNS[name]
    until, tried, failed = time.monotonic() + seconds, 0, False

    @seed(number)
    @settings(max_examples=10**6, database=None, suppress_health_check=list(HealthCheck), phases=phases)
    @given(strategy)
    def each(some):
        nonlocal tried, failed
        if time.monotonic() > until and tried >= LEAST and not failed:
            raise TimeIsUp
        tried += 1
        try:
            try:
                send_all(target, send, some)
            finally:
                target.check()  # a traceback says more than a 500
        except Exception:
            failed = True  # what it is made smaller to is not bound by time
            raise

    with suppress(TimeIsUp):
        each()
    return tried


def test_what_was_found_stays_mended(serve, tiny):
    """A forced call that is cut anywhere, also in a closing marker of several tokens, or in a character; what is nested
    deeper than it can be copied, in a message or in the arguments of a past call; a request that says HTTP/0.9."""
    server = serve(tiny("scripted", tools="json_tools"))
    end = "<|cut|>".join(("\n", "<", "/", "tool", "_", "call", ">"))
    for value, most in (("{}", 23), ('{"a": "🦉', 40)):
        said = {"role": "user", "content": f'<tool_call>\n{{"name": "add", "arguments": {value}}}{end}'}
        body = {"messages": [said], "tools": OPTIONS["tools"][1], "tool_choice": "required"}
        for tokens in range(10, most):
            reply = ask(server, CHAT, {**body, "max_tokens": tokens, "stream": tokens % 2 == 0})
            assert (reply.status, reply.finish_reason) == (200, "length"), tokens
    for message in (said | {"x": DEEP[0]}, {"role": "assistant", "tool_calls": [DEEP_CALL]}):
        reply = ask(server, CHAT, {"messages": [message, said]})
        assert (reply.status, reply.error["param"]) == (400, "messages[0]")
    old = post_bytes(CHAT, b"{}").replace(b"HTTP/1.1", b"HTTP/0.9", 1)
    assert throw(server, [old], "wait").startswith(b"HTTP/1.1 400 ")


def test_every_field_is_tried():
    assert set(FIELDS) <= set(OPTIONS)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_that_a_client_sends_hurts(name):
    target = Target(RUNS[name][0])
    try:
        pid = target.server.pid
        assert fuzz(target, name, SECONDS, 0, (Phase.generate,)) >= LEAST
        assert target.ran > 0 and target.server.pid == pid
    finally:
        target.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS))
    flags = parser.parse_args()
    for name in flags.only:
        target = Target(RUNS[name][0])
        until, tried, findings = time.monotonic() + flags.minutes * 60 / len(flags.only), 0, 0
        while (left := until - time.monotonic()) > 0:
            try:
                tried += fuzz(target, name, left, random.getrandbits(64), (Phase.generate, Phase.shrink))
            except Exception:
                findings += 1
                print(f"--- {name}", traceback.format_exc(limit=0), flush=True)
        print(
            f"{name}: {tried} examples in runs without a finding, {findings} findings, {target.ran} beside", flush=True
        )
        target.stop()


if __name__ == "__main__":
    main()
