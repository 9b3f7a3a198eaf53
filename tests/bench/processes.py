"""Start-up and memory of whole processes, ours beside mlx_lm.server's: `python -m tests.bench.processes [--short]`.

Each start is a new process, the two servers in turns and never at once; a difference is that of one such pair. Seconds
run from the spawn to the event; a first reply is a completion of one token that is asked for every 10 ms until it
comes, so both servers are judged by the same thing, and our ready line is beside it. After that comes a second reply of
16 tokens: under a schema from ours, which then waits until llguidance has read the vocabulary, a plain one from
mlx_lm.server. Memory is the resident set (RSS) some seconds after both replies, when what goes on in the background is
over, and its highest point until then; PSS divides the pages that processes share among them. CPU time is that of the
process's whole life and means the same on a busy machine, where seconds do not.

Models: `demo` is SmolLM2-135M with 49,152 tokens, `wide` a tiny random one with the 201,088 of o200k_harmony. Its
weights load in no time, so `wide, 4 s of weights` has the reading of weights take four seconds longer, as a slow disk
would: without the GIL.
"""

import json
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_patches import demo_model
from tests.bench.replies import SMALL, spread, wide
from tests.client import complete
from tests.conftest import free_port, server_env

STARTS = 5
POLL_SECONDS = 0.01
LONGEST = 120  # seconds that a start may take
SETTLE_SECONDS = 5
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL}}}
MODULES = {"mlx_lm": ["mlx_lm", "server"], "ours": ["mlx_patched_server"]}
SLOW_DISK = """
import runpy, sys, time
from mlx_lm import utils
read = utils.load_model
def load_model(*given, **named):
    time.sleep({seconds})
    return read(*given, **named)
utils.load_model = load_model
sys.argv = {argv}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
MB = 1024  # kB


class Start(NamedTuple):
    """Seconds from the spawn, memory in MB and CPU seconds at the end. `ready` is None for mlx_lm.server."""

    ready: float | None
    first: float
    second: float
    rss: float
    pss: float
    peak: float
    cpu: float


def start(which: str, folder: Path, weights_seconds: float = 0) -> Start:
    """Start a server, wait for its first and second reply, end it. Raises RuntimeError with the end of its log."""
    flags = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port := free_port())]
    argv = [*MODULES[which], *flags]
    command = ["-c", SLOW_DISK.format(seconds=weights_seconds, argv=argv)] if weights_seconds else ["-m", *argv]
    ready: list[float] = []
    used = children_cpu()
    with tempfile.TemporaryFile("w+") as log:
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=server_env()
        )
        threading.Thread(target=note_ready, args=(process.stdout, ready), daemon=True).start()
        try:
            url = f"http://127.0.0.1:{port}"
            while not replies(url):
                if process.poll() is not None or time.monotonic() - begun > LONGEST:
                    log.seek(0)
                    raise RuntimeError(f"{which} does not reply: {log.read()[-2000:]}")
                time.sleep(POLL_SECONDS)
            first = time.monotonic()
            reply = complete(url, "Name and age:", max_tokens=16, temperature=0, **SCHEMA if which == "ours" else {})
            if reply.status != 200:
                raise RuntimeError(f"{which} answered {reply.raw!r}")
            second = time.monotonic()
            time.sleep(SETTLE_SECONDS)
            memory = memory_of(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    at = ready[0] - begun if ready else None
    return Start(at, first - begun, second - begun, **memory, cpu=children_cpu() - used)


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def note_ready(output, ready: list[float]) -> None:
    for line in output:
        if line.startswith(b"{") and json.loads(line).get("event") == "ready":
            ready.append(time.monotonic())


def replies(url: str) -> bool:
    try:
        return complete(url, "a", max_tokens=1, temperature=0, timeout=LONGEST).status == 200
    except ConnectionError:
        return False


def memory_of(pid: int) -> dict[str, float]:
    """RSS, PSS and the highest RSS in MB; where there is no /proc, `ps` knows the first alone and it is all three."""
    folder = Path(f"/proc/{pid}")
    if not folder.exists():
        rss = int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / MB
        return {"rss": rss, "pss": rss, "peak": rss}
    text = (folder / "smaps_rollup").read_text() + (folder / "status").read_text()
    fields = {"rss": "Rss", "pss": "Pss", "peak": "VmHWM"}
    return {name: int(re.search(rf"^{field}:\s+(\d+) kB", text, re.M)[1]) / MB for name, field in fields.items()}


class Row(NamedTuple):
    """`theirs` and `ours` name fields of Start whose difference the row has."""

    what: str
    theirs: str
    ours: str
    unit: str
    form: str


ROWS = [
    Row("our ready line, their first reply", "first", "ready", "s", "{:+.2f}"),
    Row("first reply", "first", "first", "s", "{:+.2f}"),
    Row("second reply: under a schema, plain", "second", "second", "s", "{:+.2f}"),
    Row("CPU time", "cpu", "cpu", "s", "{:+.2f}"),
    Row("RSS", "rss", "rss", "MB", "{:+.0f}"),
    Row("PSS", "pss", "pss", "MB", "{:+.0f}"),
    Row("highest RSS", "peak", "peak", "MB", "{:+.0f}"),
]
TARGETS = {
    ("demo", "first"): "≤ 0.3 s",
    ("wide, 4 s of weights", "first"): "0",
    ("wide, 4 s of weights", "second"): "0",
    ("wide", "rss"): "≤ 150 MB",
}


def table(short: bool) -> Iterator[str]:
    """The Markdown lines of the table: one row a model and event, as its starts are over."""
    yield "| model | from the spawn to, or memory | mlx_lm.server | ours | difference: median (quartiles) | target |"
    yield "| --- | --- | --- | --- | --- | --- |"
    models = [("demo", demo_model.folder(), 0.0)]
    if not short:
        models += [("wide", wide(), 0.0), ("wide, 4 s of weights", wide(), 4.0)]
    for name, folder, seconds in models:
        pairs = []
        for n in range(1 if short else STARTS):
            order = ["mlx_lm", "ours"][:: -1 if n % 2 else 1]
            pairs.append({which: start(which, folder, seconds) for which in order})
        for row in ROWS:
            theirs = [getattr(pair["mlx_lm"], row.theirs) for pair in pairs]
            ours = [getattr(pair["ours"], row.ours) for pair in pairs]
            beyond = [b - a for a, b in zip(theirs, ours, strict=True)]
            plain = row.form.replace("+", "")
            middles = [f"{plain.format(statistics.median(values))} {row.unit}" for values in (theirs, ours)]
            target = TARGETS.get((name, row.ours), "")
            yield f"| {name} | {row.what} | {' | '.join(middles)} | {spread(beyond, row.form)} {row.unit} | {target} |"


if __name__ == "__main__":
    for line in table("--short" in sys.argv[1:]):
        print(line, flush=True)
