"""Short requests of all kinds from eight clients, and what the server holds after each thousand.

    python -m tests.soak                            # 5,000 requests: the table of docs/survival.md
    python -m tests.soak --kind hybrid --requests 20000

Kept connections and new ones, replies streamed and whole, batched and on the single path, schemas, tools, limits,
log-probabilities, bodies that are refused, clients that leave at a random moment. Every answer is looked at. The counts
are taken by tests/site/counting_server.py while no request runs, so what is left is what the server holds on to.
"""

import argparse
import http.client
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.client import CHAT, COMPLETIONS, BrokenReply, Reply, check, connect, post_bytes, read_body, read_stream
from tests.conftest import Server
from tests.tiny_models import model_folder

CLIENTS = 8
SETTLE_SECONDS = 60  # in which the server must have let go of everybody
FLAGS = ("--max-tokens", 30, "--prompt-cache-bytes", "1MB", "--prompt-cache-size", 20, "--temp", 1)
WORDS = ("hello", "world", "this", "is", "a", "test", "of", "the", "server", "that", "many", "people", "use")
LEAVES = "leaves"
"""What must become of a request whose client goes away: nothing."""


def weather(number: int) -> dict:
    place = {"type": "string", "maxLength": 5 + number % 7}
    schema = {"type": "object", "properties": {"location": place}, "required": ["location"]}
    return {"type": "function", "function": {"name": "get_weather", "parameters": schema}}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>" + "Wait, let me check this. " * 3 + "</think>\n"


def schema(number: int) -> dict:
    """One of 300: more than the server keeps compiled."""
    fields = {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": number % 300}}
    return {"type": "object", "properties": fields, "required": ["ok"], "additionalProperties": False}


KINDS = {
    "plain": lambda n: {},
    "system": lambda n: {"messages": [{"role": "developer", "content": "Be brief."}]},
    "thinking": lambda n: {"say": THOUGHT},
    "schema": lambda n: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(n)}}},
    "choice": lambda n: {"structured_outputs": {"choice": ["yes", f"no {n % 9}"]}},
    "tools": lambda n: {"say": CALL, "tools": [weather(n)]},
    "required call": lambda n: {"tools": [weather(n)], "tool_choice": "required", "max_tokens": 60},
    "limits": lambda n: {"say": THOUGHT * 2, "reasoning_budget": n % 9 + 1, "hedge_limit": 1, "limit_answers": True},
    "logprobs": lambda n: {"logprobs": True, "top_logprobs": n % 5},
    "sampled": lambda n: {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "xtc_probability": 0.3},
    "penalties": lambda n: {"presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"7": 2}},
    "stop": lambda n: {"stop": ["people", "\n"]},
    "completion": lambda n: {"prompt": "<|script|>hello world<|script_end|>"},
    "refused": lambda n: {"temperature": "hot", "status": 400},
    "not found": lambda n: {"model": "gpt-9", "status": 404},
    "no JSON": lambda n: {"raw": b'{"messages": [', "status": 400},
    "too long": lambda n: {"say": "hello world " * 5000, "status": 400},
    LEAVES: lambda n: {"say": "hello world " * 40, "max_tokens": 200},
}


def request(number: int) -> tuple[str, str, bytes, int]:
    """(kind, path, body, status that is due) of request `number`: the same every time."""
    draw = random.Random(number)
    kind = draw.choice(list(KINDS))
    body = KINDS[kind](number)
    status, raw, say = (body.pop(name, None) for name in ("status", "raw", "say"))
    path = COMPLETIONS if "prompt" in body else CHAT
    if path == CHAT:
        say = say or " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        body["messages"] = [*body.get("messages", []), {"role": "user", "content": say}]
    if draw.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if draw.random() < 0.2:
        body["seed"] = number
    return kind, path, raw or json.dumps(body).encode(), status or 200


class Soak:
    """A server and what its clients were told. `counts`: one for each `go`."""

    def __init__(self, kind: str = "scripted"):
        self.folder = tempfile.TemporaryDirectory(prefix="soak-")
        self.file = Path(self.folder.name) / "counts"
        model = model_folder(kind, style="think", tools="json_tools")
        if "max_position_embeddings" not in json.loads((model / "config.json").read_text()):
            model = model_folder(kind, style="think", tools="json_tools", max_position_embeddings=8192)
        self.server = Server(model, *FLAGS, module="counting_server", env={"COUNTS": str(self.file)})
        self.url = urlsplit(self.server.url)
        self.done, self.faults, self.counts = Counter(), [], []
        self.lock, self.number = threading.Lock(), 0

    def go(self, requests: int) -> dict:
        """Sends so many more, waits until nothing runs, and counts."""
        until = self.number + requests
        with ThreadPoolExecutor(CLIENTS) as pool:
            for client in [pool.submit(self.client, until) for _ in range(CLIENTS)]:
                client.result()
        self.counts.append(self.count())
        return self.counts[-1]

    def take(self, until: int) -> int | None:
        with self.lock:
            if self.number >= until:
                return None
            self.number += 1
            return self.number

    def client(self, until: int) -> None:
        connection, left = None, 0
        while (number := self.take(until)) is not None:
            kind, path, body, status = request(number)
            if left == 0:
                if connection is not None:
                    connection.close()
                connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=120)
                left = random.Random(number).choice((1, 3, 20))
            try:
                if kind == LEAVES:
                    self.leave(path, body, random.Random(number).uniform(0, 0.1))
                else:
                    left -= 1
                    self.ask(connection, path, body, status)
            except Exception as fault:
                self.faults.append(f"{number}, {kind}: {fault!r}")
                left = 0
            self.done[kind] += 1
        if connection is not None:
            connection.close()

    def ask(self, connection, path: str, body: bytes, status: int) -> None:
        began = time.monotonic()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.headers.get_content_type() == "text/event-stream":
            reply = read_stream(response, began)
        else:
            reply = Reply(response.status, response.headers, response.read())
            read_body(reply)
        check(reply.status == status, f"status {reply.status}, not {status}: {reply.raw[:300]!r}")
        check((reply.error is None) == (status == 200), f"an error in {reply.raw[-300:]!r}")

    def leave(self, path: str, body: bytes, seconds: float) -> None:
        with connect(self.server) as sock:
            sock.sendall(post_bytes(path, body))
            sock.settimeout(seconds)
            with suppress(TimeoutError):
                while sock.recv(4096):
                    pass

    def count(self) -> dict:
        """What it holds once its handlers are gone, or after SETTLE_SECONDS."""
        until = time.monotonic() + SETTLE_SECONDS
        found = self.ask_count()
        while time.monotonic() < until and found["threads"] > (self.counts or [found])[0]["threads"]:
            time.sleep(0.5)
            found = self.ask_count()
        return found

    def ask_count(self) -> dict:
        self.file.unlink(missing_ok=True)
        time.sleep(1)
        os.kill(self.server.pid, signal.SIGUSR1)
        until = time.monotonic() + SETTLE_SECONDS
        while not self.file.exists():
            if time.monotonic() > until or not self.server.alive:
                raise BrokenReply(f"it does not count any more\n{self.server.log()[-3000:]}")
            time.sleep(0.05)
        return json.loads(self.file.read_text())

    def stop(self):
        self.server.stop()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", default="scripted", help="a kind of tests/tiny_models.py")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--every", type=int, default=1000)
    flags = parser.parse_args()
    soak = Soak(flags.kind)
    soak.counts.append(soak.ask_count())
    print("| requests | seconds | RSS, MB | live buffers, MB | pooled, MB | arrays | objects | threads | descriptors |")
    print("| ---: " * 9 + "|")
    began, found = time.monotonic(), soak.counts[0]
    for done in range(0, flags.requests + 1, flags.every):
        found = soak.go(flags.every) if done else found
        sizes = found["rss"] / 1024, found["active"] / 1e6, found["pooled"] / 1e6
        numbers = (found[name] for name in ("arrays", "objects", "threads", "descriptors"))
        cells = (
            f"{done:,}",
            f"{time.monotonic() - began:.0f}",
            *(f"{n:.2f}" for n in sizes),
            *(f"{n:,}" for n in numbers),
        )
        print("|", " | ".join(cells), "|", flush=True)
    log = soak.server.log()
    print(f"\n{len(soak.faults)} answers that should have been others, {log.count('Traceback')} tracebacks in the log")
    print(*soak.faults[:20], *(f"Traceback{part[:3000]}" for part in log.split("Traceback")[1:4]), sep="\n")
    print(dict(soak.done))
    soak.stop()


if __name__ == "__main__":
    main()
