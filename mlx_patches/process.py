"""The process: it binds, loads, says that it is ready, and ends when it is told to or cannot go on.

Replaces   server.run, server._run_http_server
Why        mlx_lm 0.32.2 loads the model before it binds and lives on, without being able to reply, where either fails;
           it never says that it is ready, and SIGTERM cuts its replies off without a word
Upstream   server.py run, _run_http_server
Delete when mlx_lm's server ends where it cannot start, says when it is ready, and ends its replies
Test       tests/test_process.py

Three threads: the main one accepts connections and gets the signals, mlx_lm's generation thread loads the model and
then runs it, and a third waits for the load to be over and says how it went. Standard output has the ready line alone.
What a start fails of is one line on standard error: status 2 where the flags are wrong, 1 for everything else.
"""

import argparse
import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from localServerCommon import Listener


class LineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, without the usage."""

    def error(self, message: str):
        self.exit(2, f"{message} (--help lists the flags)\n")


def serve(host: str, port: int, provider: Any, make_generator: Callable[[], Any], make_handler: Callable) -> None:
    """Bind, load, and serve until a signal. `make_handler(generator, *BaseRequestHandler's arguments)`."""
    try:
        listener = Listener(host, port, lambda *given: make_handler(generator, *given))
    except OSError as fault:
        sys.exit(f"cannot listen on {host}:{port}: {fault.strerror}")
    sys.stdout = sys.stderr  # what a model's own code prints is for the log
    generator = make_generator()
    if mx.distributed.init().rank() > 0:
        generator.join()
        return
    threading.Thread(target=announce, args=(listener, provider, generator.end_replies), daemon=True).start()
    listener.serve_until_signal(generator.end_replies)


def announce(listener: Listener, provider: Any, end_replies: Callable[[], None]) -> None:
    """Say on standard output that the server is ready, or on standard error why it never will be, and end it."""
    provider.settled.wait()
    model = provider.cli_args.model
    if provider.load_error is not None:
        print(f"cannot load {model}: {load_reason(model, provider.load_error)}", file=sys.stderr, flush=True)
        listener.end(1, end_replies)
    host, port = listener.server_address[:2]
    ready = {"event": "ready", "host": host, "port": port, "model": model, "pid": os.getpid()}
    with suppress(OSError):  # a parent that does not listen
        print(json.dumps(ready), file=sys.__stdout__, flush=True)


def health(generator: Any) -> tuple[int, dict]:
    """Status and body of /health: 200 only while replies can be made."""
    if not generator.model_provider.settled.is_set():
        return 503, {"status": "loading"}
    if generator.stopping is not None:
        return 503, {"status": "unavailable", "reason": "the server is ending"}
    if not generator.is_healthy:
        return 503, {"status": "unavailable", "reason": "the generation thread has ended"}
    return 200, {"status": "ok"}


def load_reason(model: str, fault: BaseException) -> str:
    """Why `model` cannot be loaded, on one line of a few hundred characters at most."""
    if os.path.isabs(model) and not os.path.exists(model):
        return "there is no such folder"  # mlx_lm takes it for a name on the hub
    return textwrap.shorten(f"{type(fault).__name__}: {fault}", 400, placeholder=" …")
