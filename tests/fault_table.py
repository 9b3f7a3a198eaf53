"""Bad inputs and what becomes of them: `python -m tests.fault_table` writes docs/faults.md; test_faults.py asserts.

Each row of FAULTS is sent to a server, and a plain request after it. While ours gets it, another plain request is
always running. The server is tests/site/faulty_server.py, so that a row can also have a part of it raise; mlx_lm's is
started anew whenever it is dead or no longer replies. The model is the scripted one, with a template that refuses what
many do: a system message that is not the first, text for arguments, a conversation that the assistant begins.
"""

import http.client
import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.client import CHAT, COMPLETIONS, chat, chat_stream, connect, post_bytes
from tests.conftest import ROOT, Server
from tests.tiny_models import CHATML, model_folder

HELLO = "Hello there"
SCRIPT = f"to be ignored: <|script|>{HELLO}<|script_end|>"
LONG = "one" + " two three" * 60
WINDOW = 2048
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('A user must begin.') }}{% endif %}"
) + CHATML.replace("(c.function | tojson)", "c.function.name + (c.function.arguments | items | list | string)")
SECONDS = 15  # that a reply may take
OURS = ("--max-queue", 4, "--request-timeout", 1.5)

BODY, PROMPT, CACHED = "a wrong body", "a prompt that is too long", "a prompt that is wholly cached"
REFUSED, ARRIVAL, RAISED = "the template refuses", "length and time", "something raises"
DEATH, QUEUE, LATE, CALLER = "the generation thread dies", "too many wait", "an error in a stream", "who calls"


@dataclass
class Got:
    """`status` 0: no answer. `plain`: the next plain request worked."""

    status: int
    text: str
    plain: bool = True
    beside: bool = True


@dataclass
class Fault:
    """`send(server, arm)` gives a Got. Here it must be `status`, with `said` in the body: a text, the refusal's `param`
    or its `code`, or the reply's content."""

    row: str
    what: str
    send: Callable
    status: int
    said: str
    deadly: bool = False  # to all that runs, as it should be
    armed: bool = False  # nothing else may start meanwhile


def exchange(server, *requests: bytes, shut=False) -> Got:
    """Sends the requests, each on its own connection; the last answer."""
    got = Got(0, "no answer")
    for data in requests:
        try:
            with connect(server, SECONDS) as sock:
                sock.sendall(data)
                if shut:
                    sock.shutdown(socket.SHUT_WR)
                response = http.client.HTTPResponse(sock)
                response.begin()
                got = Got(response.status, response.read().decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as fault:
            got = Got(0, f"no answer: {type(fault).__name__}")
    return got


def say(text=HELLO, **more) -> dict:
    return {"role": "user", "content": text, **more}


FAULTS: list[Fault] = []


def add(row, what, status, said, *requests, shut=False):
    FAULTS.append(Fault(row, what, lambda server, arm: exchange(server, *requests, shut=shut), status, said))


def c(what, status, said, *, row=BODY, **fields):
    """A chat. `fields` are the body's."""
    add(row, what, status, said, post_bytes(CHAT, {"messages": [say()], "max_tokens": 20, **fields}))


def p(what, status, said, prompt, *, row=BODY, **fields):
    """A completion."""
    add(row, what, status, said, post_bytes(COMPLETIONS, {"prompt": prompt, "max_tokens": 20, **fields}))


def raw(what, status, said, data, *, row=BODY):
    add(row, what, status, said, post_bytes(CHAT, data))


def turn(what, status, said, *messages, row=BODY):
    c(what, status, said, row=row, messages=[*messages, say()])


def call(what, status, said, arguments, **more):
    """A past call and its result."""
    past = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    turn(what, status, said, say("a"), {"role": "assistant", "content": None, "tool_calls": [past]})


for field, value in (
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("temperature", True),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("max_tokens", float("inf")),
    ("top_p", 2),
    ("top_k", -1),
    ("top_k", 1.5),
    ("min_p", [1]),
    ("stream", "yes"),
    ("stream_options", "x"),
    ("n", 2),
    ("seed", 1.5),
    ("seed", 2**70),
    ("logprobs", "yes"),
    ("top_logprobs", 50),
    ("num_draft_tokens", -1),
    ("repetition_penalty", -1),
    ("model", 5),
    ("stop", [5]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", {}),
    ("logit_bias", {"999999999": 5}),
    ("logit_bias", {"99999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", [5]),
    ("tools", {}),
    ("tools", [5]),
    ("tools", [{"type": "function", "function": 5}]),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {"tokenize": False}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", {"tools": []}),
    ("chat_template_kwargs", {"chat_template": "{% for i in range(1, 99999) %}x{% endfor %}"}),
    ("role_mapping", {"user": 5}),
    ("response_format", "json"),
    ("response_format", {"type": "json_schema"}),
    ("messages", None),
    ("messages", []),
    ("messages", HELLO),
    ("messages", [5]),
    ("messages", [None]),
    ("messages", [{"content": "no role"}]),
    ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [5]}]),
    ("messages", [{"role": "user", "content": [{"text": "no type"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:9/x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": "x"}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [5]}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{"function": 5}]}]),
):
    c(f"`{field}`: `{json.dumps(value)}`", 400, field, **{field: value})

for place, fields in (
    ("a message", {"messages": [say("\ud800")]}),
    ("`stop`", {"stop": "\udfff"}),
    ("a tool", {"tools": [{"type": "function", "function": {"name": "\ud800"}}]}),
    ("an unknown field", {"x\ud800": 1}),
):
    c(f"half a surrogate pair in {place}", 400, "surrogate", **fields)
p("half a surrogate pair in `prompt`", 400, "prompt", "\ud800")
for text, prompt in (("none", None), ("empty", ""), ("two", [SCRIPT, SCRIPT]), ("tokens", [1, 2]), ("a number", 5)):
    p(f"`prompt`: {text}", 400, "prompt", prompt)
p("`prompt`: a list of one", 200, HELLO, [SCRIPT])
raw("byte 0xFF", 400, "invalid_json", b'{"messages": [{"role": "user", "content": "\xff"}]}')
raw("1e999 for a number", 400, "top_p", json.dumps({"messages": [say()], "top_p": 7}).replace("7", "1e999").encode())
raw("an integer of 5,000 digits", 400, "invalid_json", b'{"max_tokens": ' + b"1" * 5000 + b"}")
raw("brackets 100,000 deep", 400, "invalid_json", b"[" * 100_000)
for data in (b"", b"{", b"[]", b"null"):
    raw(f"`{data.decode()}`", 400, "invalid_json", data)

c("`top_k` of 10**9", 200, HELLO, top_k=10**9, temperature=1)
c("`top_k` of the vocabulary's size", 200, HELLO, top_k=1400, temperature=1)
c("`xtc_threshold` above a half", 200, HELLO, temperature=1, xtc_probability=1.0, xtc_threshold=0.9)
c("`repetition_context_size` of 10**30", 200, "choices", repetition_penalty=1.1, repetition_context_size=10**30)
c("`presence_penalty` of 1e308", 200, "choices", presence_penalty=1e308)
c("`temperature` of 5e-324", 200, "choices", temperature=5e-324)
c("`stream_options` without `include_usage`", 200, "[DONE]", stream=True, stream_options={})
c("a field that is null", 200, HELLO, temperature=None, stop=None, tools=None)
c("another model", 404, "model_not_found", model="gpt-9")
turn("a `developer` message", 200, HELLO, {"role": "developer", "content": "Be brief."})
turn("two system messages", 200, HELLO, *[{"role": "system", "content": text} for text in "ab"])
turn(
    "a late system message of parts",
    200,
    HELLO,
    say("a"),
    {"role": "system", "content": [{"type": "text", "text": "b"}]},
)
turn("`content`: null", 200, HELLO, say("a"), {"role": "assistant", "content": None})
call("an old call with broken JSON", 200, HELLO, '{"a": 1')
call("an old call with half a surrogate pair in its JSON", 200, HELLO, r'{"a": "\ud800"}')
call("an old call with a list for arguments", 200, HELLO, "[1]")
call("an old call with an object for arguments", 200, HELLO, {"a": 1})
call("an old call without arguments", 200, HELLO, None)
call("an old call with a number for arguments", 400, "messages[1].tool_calls[0].function.arguments", 5)

c("a chat of 3,000 tokens", 400, "context_length_exceeded", row=PROMPT, messages=[say("one" * 3000)])
p("a prompt of 3,000 tokens, with a seed", 400, "context_length_exceeded", "one" * 3000, row=PROMPT, seed=1)
c("`max_tokens` beyond what is left", 200, HELLO, row=PROMPT, max_tokens=10**9)
FAULTS.append(
    Fault(
        CACHED,
        "a prompt, and then that prompt with its reply",
        lambda server, arm: exchange(
            server,
            post_bytes(COMPLETIONS, {"prompt": SCRIPT, "max_tokens": 1}),
            post_bytes(COMPLETIONS, {"prompt": SCRIPT + "Hello", "max_tokens": 20}),
        ),
        200,
        '"text":"there"',
    )
)
turn("the assistant begins", 400, "A user must begin.", {"role": "assistant", "content": "x"}, row=REFUSED)


def arrives(what, status, said, *lines, body=b"", shut=False, row=ARRIVAL):
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    add(row, what, status, said, head + body, shut=shut)


POST, LOCAL, JSON = f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"
arrives("no length", 411, "Content-Length", POST, LOCAL, JSON, shut=True)
arrives("chunks", 411, "Content-Length", POST, LOCAL, JSON, "Transfer-Encoding: chunked", body=b"0\r\n\r\n")
for length in ("-5", "+5", "x", "9" * 30):
    arrives(
        f"Content-Length: {length}", 400, "Content-Length", POST, LOCAL, JSON, f"Content-Length: {length}", shut=True
    )
arrives("two lengths", 400, "Content-Length", POST, LOCAL, JSON, "Content-Length: 2", "Content-Length: 2", body=b"{}")
arrives("100 MB", 413, "bytes", POST, LOCAL, JSON, "Content-Length: 100000000")
arrives("a body that ends early", 400, "ended", POST, LOCAL, JSON, "Content-Length: 50", body=b"{}", shut=True)
arrives("a body that does not come", 408, "request_timeout", POST, LOCAL, JSON, "Content-Length: 50")
add(ARRIVAL, "half a head", 408, "request_timeout", f"{POST}\r\nHost: lo".encode())
arrives("a header of 70,000 bytes", 431, "error", POST, LOCAL, "a: " + "b" * 70_000)
arrives("200 headers", 431, "error", POST, LOCAL, *["a: b"] * 200)
arrives("a line of 70,000 bytes", 414, "error", f"GET /{'a' * 70_000} HTTP/1.1", LOCAL)
arrives("no HTTP", 400, "error", "HELO server what")
arrives("an unknown method", 501, "error", "BREW /coffee HTTP/1.1", LOCAL)
arrives("an unknown path", 404, "not_found", "GET /../etc/passwd HTTP/1.1", LOCAL)


def raises(what, part, status, said, *, row=RAISED, calls=0, deadly=False, **fields):
    body = {
        "messages": [say(LONG * 4)],  # longer than what runs beside it
        "max_tokens": 700,
        "temperature": 1,
        "top_k": 1,
        "presence_penalty": 1e-9,
        **fields,
    }

    def send(server, arm):
        arm(part, calls)
        return exchange(server, post_bytes(CHAT, body))

    FAULTS.append(Fault(row, what, send, status, said, deadly, armed=True))


raises("rendering its prompt", "tokenizer", 500, "error")
raises("making its sampler", "make_sampler", 500, "error")
raises("making its processors", "make_processors", 500, "error")
raises("its processor", "processor", 500, "error")
raises("its processor, on the single path", "processor", 500, "error", seed=1)
raises("a step of the batch", "decode", 500, "error", row=DEATH, deadly=True, calls=370)
raises("its processor, after 20 tokens", "processor", 200, 'data: {"error"', row=LATE, calls=20, stream=True)


def crowd(server, arm):
    """The last of many at once: each on its own, so that they wait for each other."""
    with ThreadPoolExecutor(12) as pool:
        body = {"messages": [say(LONG)], "max_tokens": 700, "seed": 1}
        got = list(pool.map(lambda _: exchange(server, post_bytes(CHAT, body)), range(12)))
    return max(got, key=lambda each: each.status)


FAULTS.append(Fault(QUEUE, "12 at once, where 4 may wait", crowd, 429, "rate_limit_error", armed=True))

GOOD = json.dumps({"messages": [say()]}).encode()
for what, status, said, line in (
    ("a page of another origin", 403, "origin_not_allowed", "Origin: http://page.example"),
    ("a rebound name", 403, "host_not_allowed", "Host: page.example"),
    ("a form", 415, "unsupported_media_type", "Content-Type: text/plain"),
):
    lines = [POST, *([] if line.startswith("Host") else [LOCAL]), line, f"Content-Length: {len(GOOD)}"]
    arrives(what, status, said, *lines, body=GOOD, row=CALLER)


class Target:
    """A server under test, which is started again when it is of no use any more."""

    def __init__(self, upstream: bool):
        self.upstream, self.faults = upstream, tempfile.TemporaryDirectory()
        self.server: Server | None = None
        self.start()

    def start(self):
        self.stop()
        env = {"FAULTS": self.faults.name, **({"UPSTREAM": "1"} if self.upstream else {})}
        folder = model_folder("scripted", template=TEMPLATE, tools="json_tools", max_position_embeddings=WINDOW)
        flags = () if self.upstream else OURS
        self.server = Server(folder, *flags, module="faulty_server", env=env)

    def arm(self, part: str, calls: int = 0):
        Path(self.faults.name, part).write_text(str(calls))

    def try_out(self, fault: Fault) -> Got:
        """Sends it, and a plain request after it."""
        got = fault.send(self.server, self.arm)
        for left in Path(self.faults.name).iterdir():
            left.unlink()
        try:
            got.plain = self.server.alive and chat(self.server, HELLO, max_tokens=20, timeout=SECONDS).content == HELLO
        except (OSError, http.client.HTTPException):
            got.plain = False
        return got

    def stop(self):
        if self.server is not None:
            self.server.stop(seconds=1)


class Beside:
    """A plain request that is always running: `with Beside(server) as ran: ...; ran()` says whether all was well."""

    def __init__(self, server):
        self.server, self.ended, self.results = server, False, []
        self.starts, self.runs = threading.Lock(), False

    def __enter__(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self):
        number = 0
        while not self.ended:
            number += 1
            with self.starts:
                self.runs = True
            ask = chat_stream if number % 2 else chat
            try:
                reply = ask(self.server, LONG, max_tokens=700)
                self.results.append((reply.status, reply.content == LONG))
            except Exception as fault:
                self.results.append((0, repr(fault)))
            self.runs = False

    @contextmanager
    def only_one(self):
        """One that has begun to say something runs, and no other begins."""
        with self.starts:
            while self.runs:
                time.sleep(0.002)
            said, piece = b"", b"-"
            with connect(self.server) as sock:
                body = {"messages": [say(LONG * 3)], "max_tokens": 700, "stream": True}
                sock.sendall(post_bytes(CHAT, body, {"Connection": "close"}))
                while piece and said.count(b"data:") < 3:
                    said += (piece := sock.recv(65536))
                yield
                while piece:
                    said += (piece := sock.recv(65536))
            texts = re.findall(rb'"delta":\{"content":"([^"]*)"', said)
            self.results.append((200, b"".join(texts).decode() == LONG * 3))

    def took(self) -> list:
        """How those ended that have run since the last call, the one that runs now among them."""
        count = len(self.results)
        deadline = time.monotonic() + 60
        while len(self.results) == count and time.monotonic() < deadline:
            time.sleep(0.002)
        ended, self.results = self.results, []
        return ended

    def __exit__(self, *_):
        self.ended = True
        self.thread.join()


def shorten(text: str) -> str:
    """What an answer says, in a few words, fit for a table."""
    found = re.search(r'"error": ?(?:\{"message": ?)?"((?:[^"\\]|\\.)*)"', text)
    if found is None and '"choices"' in text:
        contents = re.findall(r'"content": ?"((?:[^"\\]|\\.)*)"|"text": ?"((?:[^"\\]|\\.)*)"', text)
        text = "a reply: " + "".join(a or b for a, b in contents)
    text = re.sub(r"\s+", " ", found[1] if found else text)
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return text if len(text) <= 72 else text[:70] + " …"


def cell(got: Got) -> str:
    return f"{got.status or '—'} {shorten(got.text)}".strip()


def main():
    theirs, ours = Target(upstream=True), Target(upstream=False)
    pid, lines, row, died = ours.server.pid, [], None, 0
    for fault in FAULTS:
        there = theirs.try_out(fault)
        state = "works"
        if not there.plain:
            state = "**fails**; it lives on" if theirs.server.alive else "**dead**"
            died += 1
            theirs.start()
        with Beside(ours.server) as beside:
            with beside.only_one() if fault.armed else nullcontext():
                here = ours.try_out(fault)
            ran = beside.took()
        well = fault.deadly or set(ran) == {(200, True)}
        same = here.plain and ours.server.alive and ours.server.pid == pid
        after = ("works, same process" if same else "**fails**") + ("" if well else "; **the one beside it suffers**")
        if fault.row != row:
            row = fault.row
            lines.append(f"| **{row}** | | | | |")
        lines.append(
            f"| {fault.what[:90].replace('|', chr(92) + '|')} | {cell(there)} | {state} | {cell(here)} | {after} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    theirs.stop()
    ours.stop()
    text = f"""# Bad inputs

What {len(FAULTS)} bad inputs do to mlx_lm.server 0.32.2 and to this server, made by `python -m tests.fault_table`
(`tests/test_faults.py` asserts the right half). After each, a plain request is sent: mlx_lm.server failed it {died}
times and had to be started again. Here another plain request ran all the while, and had to end with the text that it
has alone. What "raises" is raised inside the server by the test. Here the server waits 1.5 seconds for a request and
lets 4 wait; by default these are 30 seconds and 64.

| input | mlx_lm.server | next request | here | next request |
| --- | --- | --- | --- | --- |
"""
    (ROOT / "docs" / "faults.md").write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
