"""The process as its parent sees it: how it starts, what it says, and how it ends.

A model whose generation_config.json is a FIFO loads for as long as nobody writes to that. Times are the spec's with
room for a busy machine (ROOM seconds).
"""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import localServerCommon
from mlx_patches import process
from tests.client import CHAT, chat, chat_stream, connect, get, post, post_bytes
from tests.conftest import free_port, server_env

ROOM = 1.5
START = 60
TEXT = "the model reads the prompt once and then writes one token at a time until it says that it is done " * 300
LONG = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9000, "stream": True}
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d .* - (INFO|WARNING) - ")
ASK = {"AGENCY_EXIT_WITH_PARENT": "1"}
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def until(holds, what, seconds=START):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


class Run:
    """A process whose end shows on its standard output, in a process group of its own."""

    def __init__(self, folder, command, *, env=None, stdin=subprocess.DEVNULL):
        self.err = folder / "stderr"
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=err,
                env=server_env(env),
                start_new_session=True,
            )
        self.pid, self.out = self.process.pid, b""

    def log(self) -> str:
        return self.err.read_text(errors="replace")

    def read(self, seconds, line=False) -> float:
        """Reads until the end of standard output (every process that has it is gone) or to a line's; seconds taken."""
        start = time.monotonic()
        while not (line and b"\n" in self.out):
            left = start + seconds - time.monotonic()
            assert left > 0 and select.select([self.process.stdout], [], [], left)[0], f"{self.out}\n{self.log()}"
            if not (data := os.read(self.process.stdout.fileno(), 4096)):
                assert not line, f"it ended\n{self.log()}"
                break
            self.out += data
        return time.monotonic() - start

    def line(self):
        self.read(START, line=True)
        text, _, self.out = self.out.partition(b"\n")
        return json.loads(text)

    def ended(self) -> int:
        """Its exit status, when nothing of its group is left."""
        self.read(START)
        status = self.process.wait(START)
        with pytest.raises(ProcessLookupError):
            os.killpg(self.pid, 0)
        return status

    def stop(self):
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        print(self.log()[-4000:])  # for a failed test's report


@pytest.fixture
def run(tmp_path):
    """run(*flags, module=, env=, stdin=, parent=False) -> Run. With `parent`, of a parent whose child is the server."""
    runs = []

    def start(*flags, module="mlx_patched_server", parent=False, verbose=False, **options):
        module = ["mlx_lm", "server"] if module == "mlx_lm.server" else [module]
        command = [sys.executable, *(["-v"] if verbose else []), "-m", *module, *flags]
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        one = Run(folder, [sys.executable, "-c", PARENT, *command] if parent else command, **options)
        runs.append(one)
        return one

    yield start
    for each in runs:
        each.stop()


@pytest.fixture
def copy(tiny, tmp_path):
    """copy(kind, name) -> a folder of this test's alone."""
    return lambda kind="llama", name="copy": shutil.copytree(tiny(kind), tmp_path / name)


class Slow:
    """A model that loads until `go`."""

    def __init__(self, folder):
        self.folder = folder
        self.fifo = folder / "generation_config.json"
        self.fifo.unlink()
        os.mkfifo(self.fifo)

    def go(self):
        until(self.is_read, "the FIFO is read")

    def is_read(self) -> bool:
        try:
            writing = os.open(self.fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            return False
        plain = self.fifo.with_suffix(".new")
        plain.write_text("{}")
        plain.replace(self.fifo)  # for who reads it again
        os.write(writing, b"{}")
        os.close(writing)
        return True


@pytest.fixture
def slow(copy):
    return Slow(copy("scripted"))


def loading(port) -> bool:
    try:
        reply = get(f"http://127.0.0.1:{port}", "/health")
    except ConnectionError:
        return False
    assert (reply.status, reply.body) == (503, {"status": "loading"})
    return True


def wait_for_import(server, name):
    until(lambda: re.search(rf"^import '{name}", server.log(), re.MULTILINE), f"{name} is imported")


def first_bytes(url, body):
    """A connection on which a reply to `body` has begun to come."""
    sock = connect(url)
    sock.sendall(post_bytes(CHAT, body))
    received = b""
    while b'"content"' not in received:
        piece = sock.recv(4096)
        assert piece
        received += piece
    return sock


# The parent's end


def end_of_parent(parent) -> float:
    """Seconds from the parent's SIGKILL until it and the server are gone."""
    os.kill(parent.pid, signal.SIGKILL)
    return parent.read(10)


@pytest.mark.parametrize("name", ["localServerCommon", "mlx.core", "mlx_lm.models.cache"])
def test_it_ends_with_its_parent_while_it_imports(run, tiny, name):
    parent = run("--model", tiny("llama"), "--port", 0, parent=True, verbose=True, env=ASK)
    parent.line()
    wait_for_import(parent, name)
    assert end_of_parent(parent) < 0.5 + ROOM


def test_it_ends_with_its_parent_at_once(run, tiny):
    parent = run("--model", tiny("llama"), "--port", 0, "--exit-with-parent", parent=True)
    parent.line()  # the interpreter has not yet read a line of ours
    assert end_of_parent(parent) < 0.5 + ROOM


def test_it_ends_with_its_parent_while_it_loads(run, slow):
    port = free_port()
    parent = run("--model", slow.folder, "--port", port, "--exit-with", parent=True)  # as argparse abbreviates
    until(lambda: loading(port), "it loads")
    assert end_of_parent(parent) < 0.5 + ROOM


@pytest.mark.parametrize(("env", "flags"), [(ASK, []), ({}, ["--exit-with-parent"])], ids=["environment", "flag"])
def test_it_ends_with_its_parent_while_it_is_idle_and_while_it_generates(run, tiny, env, flags):
    parent = run("--model", tiny("scripted"), "--port", 0, *flags, parent=True, env=env)
    parent.line()
    url = f"http://127.0.0.1:{parent.line()['port']}"
    assert chat(url, "Hello").content == "Hello"
    with ExitStack() as busy:
        if env:
            busy.enter_context(first_bytes(url, LONG))
        assert end_of_parent(parent) < 0.5 + ROOM


def test_standard_input_is_never_read_unasked(run, tiny):
    reading, writing = os.pipe()
    server = run("--model", tiny("scripted"), "--port", 0, stdin=reading, env={"AGENCY_EXIT_WITH_PARENT": "0"})
    os.write(writing, b"hello")
    os.close(writing)
    url = f"http://127.0.0.1:{server.line()['port']}"
    assert chat(url, "Hello").content == "Hello"
    assert os.read(reading, 100) == b"hello"  # and what is read now is its end
    time.sleep(0.5)
    assert chat(url, "Hello").content == "Hello"
    os.close(reading)


# Signals


def assert_shut_down(reply):
    assert reply.status == 503
    assert (reply.error["type"], reply.error["code"]) == ("server_error", "shutting_down")


@pytest.mark.parametrize(
    ("sign", "single"), [(signal.SIGTERM, {}), (signal.SIGINT, {"seed": 3})], ids=["SIGTERM, batch", "SIGINT, single"]
)
def test_a_signal_ends_replies_with_an_error(run, tiny, sign, single):
    server = run("--model", tiny("scripted"), "--port", 0)
    url = f"http://127.0.0.1:{server.line()['port']}"
    with ThreadPoolExecutor() as pool, first_bytes(url, LONG | single) as streaming:
        calls = [(chat, {}), (chat_stream, {"seed": 1}), (chat, {"seed": 1})]  # a seed waits for those before it
        others = [pool.submit(ask, url, TEXT, max_tokens=9000, **more) for ask, more in calls]
        time.sleep(1)
        assert not any(each.done() for each in others)
        os.kill(server.pid, sign)
        taken = server.read(10)
        rest = b""
        while piece := streaming.recv(65536):
            rest += piece
        assert server.ended() == 0
        replies = [each.result() for each in others]
    print(f"ended after {taken:.2f} s")
    assert taken < 2 + ROOM
    assert re.search(rb'data: {"error":{[^}]*"code":"shutting_down"}}\n\n\r\n0\r\n\r\n$', rest), rest[-300:]
    assert b"[DONE]" not in rest
    for reply in replies:
        assert_shut_down(reply)
    assert "Traceback" not in server.log()


def test_a_signal_ends_an_idle_server(run, tiny):
    server = run("--model", tiny("scripted"), "--port", 0)
    with connect(f"http://127.0.0.1:{server.line()['port']}"):  # open, and silent
        os.kill(server.pid, signal.SIGINT)
        assert server.read(10) < 2 + ROOM
    assert server.ended() == 0
    assert "Traceback" not in server.log()


def test_a_signal_ends_a_server_that_loads(run, slow):
    port = free_port()
    server, url = run("--model", slow.folder, "--port", port), f"http://127.0.0.1:{port}"
    until(lambda: loading(port), "it loads")
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, url, "Hello") for ask in (chat_stream, chat)]
        time.sleep(1)
        os.kill(server.pid, signal.SIGTERM)
        assert server.read(10) < 2 + ROOM
        for each in waiting:
            assert_shut_down(each.result())
    assert server.ended() == 0
    assert server.out == b"" and "Traceback" not in server.log()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=lambda sign: sign.name)
def test_a_signal_ends_a_server_that_imports(run, tiny, sign):
    server = run("--model", tiny("llama"), "--port", 0, verbose=True)
    wait_for_import(server, "mlx.core")
    os.kill(server.pid, sign)
    assert server.read(10) < 2 + ROOM
    assert server.ended() == 0
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("signals", [1, 2])
def test_it_stops_listening_at_the_first_signal_and_ends_at_once_at_the_second(run, tiny, signals):
    server = run("--model", tiny("scripted"), "--port", 0)
    url = f"http://127.0.0.1:{server.line()['port']}"
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(url) as half, connect(url) as kept:
        half.sendall(post_bytes(CHAT, LONG)[:-1])  # a body that it waits for until the last moment
        kept.sendall(ask)
        assert b"200 OK" in kept.recv(4096)
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(ConnectionError):
            connect(url)
        kept.sendall(ask)
        received = b""
        while b'{"status":"unavailable","reason":"the server is ending"}' not in received:
            received += (piece := kept.recv(4096))
            assert piece, received
        if signals == 2:
            os.kill(server.pid, signal.SIGTERM)
        taken = server.read(10)
    assert taken < (2 if signals == 1 else 0) + ROOM
    assert server.ended() == signals - 1  # 1: it did not wait


# What it cannot start with


def broken(folder, how):
    """Breaks a copy of a model."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "config is no JSON":
        config.write_text("{bad")
    elif how == "unknown type":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nosuch"}))
    elif how == "no weights":
        weights.unlink()
    elif how == "weights cut":
        weights.write_bytes(weights.read_bytes()[:3000])
    elif how == "weights missing":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 20}))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    else:
        shutil.rmtree(folder)
    return folder


REASONS = {
    "config is no JSON": "JSONDecodeError: ",
    "unknown type": "ValueError: Model type nosuch not supported.",
    "no weights": "FileNotFoundError: No safetensors found in ",
    "weights cut": "RuntimeError: [load_safetensors] ",
    "weights missing": "ValueError: Missing 162 parameters: model.layers.10.",
    "no tokenizer": "ValueError: Couldn't instantiate ",
    "no folder": "there is no such folder",
}


def only_line(server) -> str:
    """The one line on standard error that is not the log's."""
    assert server.out == b""
    lines = [line for line in server.log().splitlines() if not LOG_LINE.match(line)]
    assert len(lines) == 1, server.log()
    assert len(lines[0]) < 1000
    return lines[0]


def test_a_model_that_cannot_be_loaded_is_one_line(run, copy):
    def check(how):
        folder = broken(copy(name=how), how)
        server = run("--model", folder, "--port", 0)
        assert server.ended() == 1
        assert only_line(server).startswith(f"cannot load {folder}: {REASONS[how]}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, REASONS))


def test_who_waits_for_a_model_that_cannot_be_loaded_is_told(run, slow):
    (slow.folder / "tokenizer.json").unlink()
    port = free_port()
    server, url = run("--model", slow.folder, "--port", port), f"http://127.0.0.1:{port}"
    until(lambda: loading(port), "it loads")
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, url, "Hello") for ask in (chat_stream, chat)]
        time.sleep(0.3)
        slow.go()
        assert [each.result().status in (500, 503) for each in waiting] == [True, True]
    assert server.ended() == 1


def test_a_port_in_use_is_one_line_before_the_model_loads(run, slow):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = run("--model", slow.folder, "--port", port)  # it would load for ever
        assert server.ended() == 1
    assert only_line(server) == f"cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize("address", [("127.0.0.1", 99999), ("..", 0)], ids=str)
def test_an_address_that_is_none_is_one_line(run, slow, address):
    host, port = address
    server = run("--model", slow.folder, "--host", host, "--port", port, "--insecure")
    assert server.ended() == 1
    assert only_line(server).startswith(f"cannot listen on {host}:{port}: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--max", "1"], "ambiguous option: --max could match --max-tokens"),
        (["--chat-template-args", "{bad"], "argument --chat-template-args: invalid loads value"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_status_2(run, flags, said):
    server = run(*flags)
    assert server.ended() == 2
    assert only_line(server).startswith(said)


def test_mlx_lm_server_lives_on_where_it_cannot_start(run, tiny, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bound = run("--model", tiny("llama"), "--port", port, module="mlx_lm.server")
        lost = run("--model", tmp_path / "none", "--port", free_port(), module="mlx_lm.server")
        until(lambda: "OSError: [Errno 98]" in bound.log() or "Address already in use" in bound.log(), "it cannot bind")
        until(lambda: "generation thread died" in lost.log(), "it cannot load")
        time.sleep(2)
        assert bound.process.poll() is None and lost.process.poll() is None


# While it starts and runs


def test_a_request_waits_for_the_model(run, slow):
    port = free_port()
    server, url = run("--model", slow.folder, "--port", port), f"http://127.0.0.1:{port}"
    until(lambda: loading(port), "it loads")
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, url, "Hello") for ask in (chat_stream, chat)]
        waiting.append(pool.submit(chat, url, "Hello", seed=1))
        time.sleep(0.5)
        assert loading(port) and not any(each.done() for each in waiting)
        assert not select.select([server.process.stdout], [], [], 0)[0]
        slow.go()
        assert [each.result().content for each in waiting] == ["Hello"] * 3
    model = str(slow.folder)
    assert server.line() == {"event": "ready", "host": "127.0.0.1", "port": port, "model": model, "pid": server.pid}
    assert get(url, "/health").body == {"status": "ok"}
    os.kill(server.pid, signal.SIGTERM)
    assert server.ended() == 0
    assert server.out == b""


def test_standard_output_has_one_line_even_if_the_models_own_code_prints(run, copy):
    folder = copy()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text("print('hello from the model')\nfrom mlx_lm.models.llama import Model, ModelArgs\n")
    server = run("--model", folder, "--port", 0, "--trust-remote-code")
    assert server.line()["model"] == str(folder)
    os.kill(server.pid, signal.SIGTERM)
    assert server.ended() == 0
    assert server.out == b"" and "hello from the model" in server.log()


def test_health_answers_while_a_long_prompt_is_read(serve, tiny):
    server = serve(tiny("llama"), "--prefill-step-size", 8192, "--prompt-cache-size", 0)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(post, server, "/v1/completions", {"prompt": TEXT, "max_tokens": 1})
        seconds = []
        while not reply.done():
            health = get(server, "/health")
            assert (health.status, health.body) == (200, {"status": "ok"})
            seconds.append(health.seconds)
            time.sleep(0.01)
        assert reply.result().usage["prompt_tokens"] > 6000
    assert len(seconds) > 5 and max(seconds) < reply.result().seconds / 2
    assert sorted(seconds)[len(seconds) // 2] < 0.2


def test_what_health_says():
    def say(settled, stopping, healthy):
        event = threading.Event()
        if settled:
            event.set()
        provider = SimpleNamespace(settled=event)
        return process.health(SimpleNamespace(model_provider=provider, stopping=stopping, is_healthy=healthy))

    assert say(False, None, True) == (503, {"status": "loading"})
    assert say(True, None, True) == (200, {"status": "ok"})
    status, body = say(True, None, False)
    assert status == 503 and body["status"] == "unavailable" and body["reason"]
    status, body = say(True, Exception(), True)
    assert status == 503 and body["status"] == "unavailable" and body["reason"]


def test_binding_asks_no_name_server(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("http.server's look-up of the own name"))
    with localServerCommon.Listener("127.0.0.1", 0, None) as listener:
        assert listener.server_port > 0


def test_offline_nothing_tries_the_network(run, tiny):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        proxy = f"http://127.0.0.1:{trap.getsockname()[1]}"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        env = {n: proxy for name in names for n in (name, name.lower())} | {"NO_PROXY": "", "no_proxy": ""}
        tried = lambda seconds=0: bool(select.select([trap], [], [], seconds)[0])  # noqa: E731
        server = run("--model", tiny("scripted"), "--port", 0, env=env)
        url = f"http://127.0.0.1:{server.line()['port']}"
        assert chat(url, "Hello").content == "Hello"
        assert chat(url, "Hello", model="no/such").status == 404
        assert get(url, "/v1/models").status == 200
        lost = run("--model", "no/such", "--port", 0, env=env)
        assert lost.ended() == 1
        assert only_line(lost).startswith("cannot load no/such: LocalEntryNotFoundError: ")
        assert not tried()
        run("--model", "no/such", "--port", 0, env=env | {"HF_HUB_OFFLINE": "0"})
        assert tried(START)  # the trap is where it would be seen


def test_help_has_every_flag_of_mlx_lm_and_ours_apart(run):
    theirs, ours = run("--help", module="mlx_lm.server"), run("--help")
    assert (theirs.ended(), ours.ended()) == (0, 0)
    assert ours.log() == ""
    flags = lambda text: set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE))  # noqa: E731
    upstream, own = ours.out.decode().split("\nmlx-patched-server:\n")
    assert flags(upstream) == flags(theirs.out.decode()) and len(flags(upstream)) > 20
    assert "--exit-with-parent" in flags(own) and not flags(own) & flags(upstream)


def test_flags_may_be_abbreviated(serve_private, tiny):
    server = serve_private(tiny("scripted"), "--max-b", 500, "--max-t", 3)
    assert chat(server, "one two three four five six").usage["completion_tokens"] == 3
    assert chat(server, "one " * 200).status == 413
