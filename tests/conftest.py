"""Fixtures: real servers on tiny models, shared between tests.

    server = serve(tiny("scripted"), "--max-tokens", 50)  # ours; started once a session for the same arguments
    upstream = serve(tiny("scripted"), module="mlx_lm.server")  # mlx_lm's own: the leg that shows the fault
    own = serve_private(tiny("llama"), env={"X": "1"})  # this test's alone: kill it, count what it holds
    server.url, server.pid, server.log(), server.stop()

Call `serve` in each test rather than keeping a Server: only the MOST_ALIVE last used run on, and those that a failed
test used are ended, with the end of their log in its report.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis
import pytest

from tests.client import complete, get
from tests.tiny_models import model_folder

# A busy machine is no fault; and CI tries the same examples each time.
hypothesis.settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("here")

ROOT = Path(__file__).parent.parent
OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so")
MOST_ALIVE = 10  # a server of a tiny model takes some 100 MB
START_SECONDS = 120


def server_env(extra=None) -> dict:
    """The environment of a server: no hub, this tree and tests/site importable, a usable BLAS where there is one."""
    paths = [ROOT / "tests" / "site", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    if OPENBLAS.exists():
        env["LD_PRELOAD"] = str(OPENBLAS)
    return env | (extra or {})


class Server:
    """A server process that is ready: its model is loaded. Raises RuntimeError with the log's end if it dies before.

    `ready` is the line that mlx_patched_server prints, {} for mlx_lm.server. That one says nothing when it is ready, so
    it is sent a completion of one token, whose cache stays in its prompt cache.
    """

    def __init__(self, model, *flags, module="mlx_patched_server", env=None):
        self.folder = tempfile.TemporaryDirectory(prefix="server-")
        self.out, self.err = (Path(self.folder.name) / name for name in ("stdout", "stderr"))
        upstream = module == "mlx_lm.server" or "UPSTREAM" in (env or {})
        port = free_port() if upstream else 0
        start = ["mlx_lm", "server"] if module == "mlx_lm.server" else [module]
        flags = ["--model", model, "--port", port, *flags]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *start, *map(str, flags)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=server_env(env),
                cwd=self.folder.name,
            )
        self.pid, self.ready, self.url = self.process.pid, {}, f"http://127.0.0.1:{port}"
        try:
            self.wait_until(self.answers if upstream else self.said_ready)
            if upstream:
                reply = complete(self, "a", max_tokens=1)
                if reply.status != 200:
                    raise RuntimeError(f"{self} does not reply: {reply.raw}\n{self.log()[-4000:]}")
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def __repr__(self):
        return f"Server({' '.join(self.process.args[1:])})"

    def wait_until(self, holds):
        deadline = time.monotonic() + START_SECONDS
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                state = "runs but is not ready" if self.alive else f"ended with {self.process.returncode}"
                raise RuntimeError(f"{self} {state}\n{self.log()[-4000:]}")
            time.sleep(0.02)

    def answers(self) -> bool:
        try:
            reply = get(self, "/health", timeout=10)
        except ConnectionError:
            return False
        if reply.status != 200:  # its generation thread died of the model
            raise RuntimeError(f"{self} is not healthy\n{self.log()[-4000:]}")
        return True

    def said_ready(self) -> bool:
        for line in self.out.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n") and json.loads(line).get("event") == "ready":
                self.ready = json.loads(line)
                self.url = f"http://{self.ready['host']}:{self.ready['port']}"
        return bool(self.ready)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        """What it wrote to stderr so far, or until it was stopped."""
        if self.err.exists():
            self.last_log = self.err.read_text(errors="replace")
        return self.last_log

    def stop(self, sign=signal.SIGTERM, seconds=10) -> int:
        """Signals the process, kills it if it is still there after `seconds`; its exit status."""
        if self.alive:
            self.process.send_signal(sign)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log()
        self.folder.cleanup()
        return self.process.returncode


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Pool:
    """The session's shared servers by their arguments, the last used last."""

    def __init__(self):
        self.servers: dict[str, Server] = {}
        self.used: list[Server] = []  # by the test that runs

    def __call__(self, model, *flags, module="mlx_patched_server", env=None) -> Server:
        key = repr((str(model), list(map(str, flags)), module, sorted((env or {}).items())))
        server = self.servers.pop(key, None)
        if server is not None and not server.alive:
            server.stop()
            server = None
        if server is None:
            for oldest in list(self.servers)[: max(0, len(self.servers) - MOST_ALIVE + 1)]:
                self.servers.pop(oldest).stop()
            server = Server(model, *flags, module=module, env=env)
        self.servers[key] = server
        if server not in self.used:
            self.used.append(server)
        return server

    def stop(self):
        for server in self.servers.values():
            server.stop()


POOL = Pool()


@pytest.fixture(scope="session")
def serve():
    """serve(model_dir, *flags, module="mlx_patched_server", env=None) -> Server, shared by the session."""
    yield POOL
    POOL.stop()


@pytest.fixture
def serve_private():
    """As `serve`, but a new process, ended with the test."""
    servers = []

    def start(*args, **options):
        servers.append(Server(*args, **options))
        POOL.used.append(servers[-1])
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def tiny():
    """tiny(kind, **options) -> the model's folder; see tests/tiny_models.py."""
    return model_folder


def pytest_runtest_setup(item):
    POOL.used.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for server in POOL.used:
            report.sections.append((f"log of {server}", server.log()[-4000:]))
            server.stop(signal.SIGKILL)
    return report
