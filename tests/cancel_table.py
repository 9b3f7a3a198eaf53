"""Clients that leave in every state a request can be in, and how soon that is free: `python -m tests.cancel_table`.

Each case brings a request into its state, closes its socket at a random moment and reads from tests/site/timed_server
when the server noticed (its log line) and when the row had left the batch, or the reply on the single path had ended.
Prints the Markdown table of docs/cancellation.md.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from tests.client import CHAT, connect, post_bytes
from tests.conftest import Server, free_port
from tests.tiny_models import model_folder

STEP, CHUNK = 0.02, 0.05  # seconds that a step and a chunk of a prompt take
PREFILL = 16  # tokens of a chunk
WORDS = "the model reads the prompt once and then writes one token at a time until it says that it is done "
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
LEFT = "the client left"


class Case(NamedTuple):
    """`body` with `words` of WORDS is brought to `count` times `until`; `ahead` are requests that it waits behind."""

    name: str
    body: dict
    until: str = "step"
    count: int = 4
    words: int = 8
    draft: bool = False
    call: bool = False
    ahead: tuple = ()


SEED = {"seed": 1}
STREAM = {"stream": True}
CASES = (
    Case("queued behind a reply on the single path", SEED, ahead=(SEED,)),
    Case("queued behind a batch that must end first", {}, ahead=({}, SEED)),
    Case("prompt, batched", {}, until="chunk", words=40),
    Case("prompt, single path", SEED, until="chunk", words=40),
    Case("prompt of the draft model", {}, until="chunk", words=40, draft=True),
    Case("prompt, after the draft model's", {}, until="chunk", words=20, count=32, draft=True),
    Case("tokens, batched, streamed", STREAM),
    Case("tokens, batched, not streamed", {}),
    Case("tokens, single path, streamed", SEED | STREAM),
    Case("tokens, single path, not streamed", SEED),
    Case("tokens, draft model, streamed", STREAM, draft=True, count=12),
    Case("tokens, draft model, not streamed", {}, draft=True, count=12),
    Case("inside a tool call, batched, streamed", STREAM, call=True, count=20),
    Case("inside a tool call, single path, streamed", SEED | STREAM, call=True, count=20),
)


class Times:
    """What a timed server has written down so far."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="times-")
        self.path = Path(self.folder.name) / "times"
        self.path.touch()
        self.file, self.rest, self.read = self.path.open(), "", []

    def env(self, step=STEP, chunk=CHUNK, load=0.0) -> dict:
        return {"TIMES": str(self.path), "STEP": str(step), "CHUNK": str(chunk), "LOAD": str(load)}

    def notes(self, what: str, after: float = 0.0) -> list[dict]:
        *whole, self.rest = (self.rest + self.file.read()).split("\n")
        self.read += map(json.loads, whole)
        newest = takewhile(lambda note: note["at"] > after, reversed(self.read))
        return [note for note in newest if note["what"] in what.split()][::-1]

    def wait(self, what: str, after: float, count: int = 1, timeout: float = 30) -> list[dict]:
        """The notes of these kinds after that moment, once there are `count`. Raises TimeoutError."""
        until = time.monotonic() + timeout
        while len(found := self.notes(what, after)) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"{count} of {what!r}, but there are {found}")
            time.sleep(0.002)
        return found


def start(draft: bool, times: Times, make=Server, upstream: bool = False, **slow) -> Server:
    """A timed server; `make` is `serve`, `serve_private` or Server."""
    folder = model_folder("scripted", tools="json_tools")
    flags = ["--prefill-step-size", PREFILL, *(["--draft-model", folder] if draft else [])]
    flags += [] if upstream else ["--max-queue", 0]
    return make(folder, *flags, module="timed_server", env=times.env(**slow) | ({"UPSTREAM": "1"} if upstream else {}))


def body(case: Case, name: str) -> dict:
    """A request whose prompt begins with `name`, and whose reply takes longer than anyone here stays."""
    text = f"{name} {WORDS * case.words}"
    if case.call:
        text = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "' + text + '"}}\n</tool_call>'
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4000, "tools": TOOLS, **case.body}


@contextmanager
def sent(server, request: dict):
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, request))
        yield sock


def leave(sock) -> float:
    """Close the socket, whatever it still holds; the moment at which it was closed."""
    time.sleep(random.uniform(0, 0.1))
    now = time.monotonic()
    sock.close()
    return now


class Seen(NamedTuple):
    """Seconds from the close: to the log line, and to the row having left (None: it never was in a batch)."""

    noticed: float
    gone: float | None


def cancel_one(server, times: Times, case: Case, name: str) -> Seen:
    begun = time.monotonic()
    with sent(server, body(case, name)) as sock:
        if case.ahead:
            time.sleep(0.1)
        else:
            times.wait(case.until, begun, case.count)
        if case.body.get("stream") and case.until == "step" and not case.call:
            sock.recv(100)
        closed = leave(sock)
        noticed = next(note["at"] for note in times.wait("line", closed) if note["text"] == LEFT) - closed
        if case.ahead:
            return Seen(noticed, None)
        gone = times.wait("left over", closed)[0]["at"] - closed
        return Seen(noticed, gone)


def cancel(server, times: Times, case: Case, count: int) -> list[Seen]:
    """`count` clients in turn. Those in the queue must never have been tokenised, also when their turn has come."""
    begun, tag = time.monotonic(), f"{random.randrange(10**9)}"
    if not case.ahead:
        return [cancel_one(server, times, case, f"{tag} {n}") for n in range(count)]
    with suppress(OSError), ThreadPoolExecutor():
        socks = []
        for n, ahead in enumerate(case.ahead):
            sock = connect(server)
            socks.append(sock)
            sock.sendall(post_bytes(CHAT, body(Case("", ahead, words=30), f"ahead {tag} {n}")))
            times.wait("step", begun, 4) if n == 0 else time.sleep(0.7)
        seen = [cancel_one(server, times, case, f"queued {tag} {n}") for n in range(count)]
        for sock in socks:
            sock.close()
    times.wait("left over", time.monotonic() - 0.2)
    time.sleep(0.3)
    read = [note["prompt"] for note in times.notes("tokenized", begun)]
    assert [prompt for prompt in read if prompt.startswith("queued")] == [], "a request of a client that left was read"
    return seen


def cancel_while_loading(count: int, seconds: float) -> list[Seen]:
    times, port = Times(), free_port()
    url = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor() as pool:
        server = pool.submit(
            Server,
            model_folder("scripted"),
            "--port",
            port,
            module="timed_server",
            env=times.env(load=seconds),
        )
        until = time.monotonic() + 30
        while time.monotonic() < until and not server.done():
            with suppress(OSError):
                connect(url).close()
                break
            time.sleep(0.02)
        seen = []
        for n in range(count):
            with sent(url, body(CASES[-1], f"early {n}")) as sock:
                time.sleep(0.05)
                closed = leave(sock)
                seen.append(Seen(times.wait("line", closed)[0]["at"] - closed, None))
        assert not server.done(), "the model was loaded before the last client left"
        ready = server.result()
    try:
        time.sleep(0.3)
        assert times.notes("tokenized") == []
    finally:
        ready.stop()
    return seen


def row(name: str, seen: list[Seen]) -> str:
    def figures(values: list[Any]) -> str:
        milliseconds = [1000 * value for value in values]
        return f"{statistics.median(milliseconds):.0f} | {max(milliseconds):.0f}"

    gone = "never in | " if seen[0].gone is None else figures([each.gone for each in seen])
    return f"| {name} | {figures([each.noticed for each in seen])} | {gone} |"


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    taken = f"a step takes {1000 * STEP:.0f}, a chunk of a prompt {1000 * CHUNK:.0f}"
    print(f"Milliseconds from the client's close, {count} clients each; {taken} (load {os.getloadavg()[0]:.1f}).\n")
    print("| state | noticed: median | worst | row gone: median | worst |\n| --- | --- | --- | --- | --- |")
    print(row("while the model loads", cancel_while_loading(count, 0.25 * count + 2)), flush=True)
    for draft in (False, True):
        times = Times()
        server = start(draft, times)
        try:
            for case in CASES:
                if case.draft == draft:
                    print(row(case.name, cancel(server, times, case, count)), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
