"""What a server that a parent tool starts needs, whichever engine answers: error bodies, JSON over HTTP, HTTP's limits.

Nothing here knows mlx. A refusal is one exception from wherever it is found to the one place that writes it, so a
client sees OpenAI's error object and never a traceback.
"""

import errno
import io
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import NoReturn

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 1.5  # that replies have to be ended in, after a signal
IDLE_SECONDS = 300  # that a kept connection may wait for its next request
LINGER_SECONDS = 1  # that a refused client may be silent before its connection is closed


def size(text: str) -> int:
    """A flag's bytes, as mlx_lm writes them: 1024, 64MB, 1.5G (10**6, 10**9). Raises ValueError."""
    found = re.fullmatch(r"([0-9]+\.?[0-9]*) *([MG]?)B?", text.strip().upper())
    if not found:
        raise ValueError(text)
    return int(float(found[1]) * {"": 1, "M": 10**6, "G": 10**9}[found[2]])


def seconds(text: str) -> float:
    """A flag's time. Raises ValueError unless it is above 0."""
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


FLAGS = (
    (
        "--exit-with-parent",
        {
            "action": "store_true",
            "help": "Exit when standard input closes (also by AGENCY_EXIT_WITH_PARENT=1): for a parent tool's child",
        },
    ),
    (
        "--max-body-bytes",
        {"type": size, "default": 2**26, "metavar": "SIZE", "help": "The largest request body (default: 64 MiB)"},
    ),
    (
        "--request-timeout",
        {
            "type": seconds,
            "default": 30.0,
            "metavar": "N",
            "help": "Seconds in which a request's head must arrive, and then its body (default: 30)",
        },
    ),
)


class Refused(Exception):
    """A request that gets an error instead of a reply.

    `message` is a sentence for the client, `param` the body field at fault, `code` a word a program can test,
    `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


def error_body(refused: Refused) -> dict:
    """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
    other = "invalid_request_error" if refused.status < 500 else "server_error"
    kind = ERROR_TYPES.get(refused.status, other)
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def strict_json(value) -> str:
    """`value` as JSON on one line. Raises ValueError for a NaN or an infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finite(number: float, floor: float = -9999.0) -> float:
    """`number`, or `floor` where JSON could not write it or it is lower (vLLM's floor for log-probabilities)."""
    return max(number, floor) if math.isfinite(number) else floor


class Arrivals(io.RawIOBase):
    """What a client sends, read against the clock. Raises Refused (408). What is sent to it takes its time."""

    def __init__(self, connection: socket.socket):
        self._connection, self._deadline = connection, math.inf

    def allow(self, time_left: float) -> None:
        """What is read from now on must arrive within `time_left` seconds."""
        self._deadline = time.monotonic() + time_left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self._deadline - time.monotonic()
        try:
            if left > 0:
                self._connection.settimeout(min(max(left, 0.001), 10**6))
                return self._connection.recv_into(buffer)
        except TimeoutError:
            pass
        finally:
            self._connection.settimeout(None)
        raise Refused("the request did not arrive in time", status=408, code="request_timeout")


class JsonHandler:
    """Mixin for BaseHTTPRequestHandler: HTTP/1.1 with kept connections, JSON in and out, chunked event streams.

    The class it is mixed into has `flags` (the values of FLAGS) and says who may call: `check_caller(hosts)` raises
    Refused, `cors_headers()` go with every reply. A reply carries a length or is chunked, and an `x-request-id`: the
    client's own where it sent a plain one.
    """

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a line that is no request: HTTP/0.9 would get no status and no headers
    disable_nagle_algorithm = True
    chunked = False
    kept = False  # this is not the connection's first request

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.arrivals = Arrivals(self.connection)
        self.rfile = io.BufferedReader(self.arrivals)

    def handle_one_request(self) -> None:
        """One request. A connection that is kept and then idle is closed without a word."""
        self.command, self.requestline, self.path, self.headers = "", "", "", {}
        self.request_version = self.default_request_version
        self.status, self.begun, self.exchange_id = 0, time.monotonic(), uuid.uuid4().hex
        self.unread, self.expects = True, False
        idle, self.kept = self.kept, True
        try:
            self.arrivals.allow(max(IDLE_SECONDS, self.flags.request_timeout) if idle else self.flags.request_timeout)
            self.rfile.peek(1)
            idle = False
            self.server.answering.add(self)
            self.arrivals.allow(self.flags.request_timeout)
            super().handle_one_request()
        except Refused as late:
            self.close_connection = True
            if not idle:
                self.send_refused(late)
        finally:
            self.server.answering.discard(self)
        if self.unread:
            self.close_connection = True
            self.discard_rest()

    def discard_rest(self) -> None:
        """Say that no more is coming, and wait until the client has no more: else it might never read the reply."""
        until = time.monotonic() + self.flags.request_timeout
        with suppress(Refused, OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < until:
                self.arrivals.allow(LINGER_SECONDS)
                if not self.rfile.read1(2**16):
                    return

    def handle_expect_100(self) -> bool:
        self.expects = True  # answered when the body is read, if it is
        return True

    def parse_request(self) -> bool:
        """Whether there is a request to answer. What is wrong with it, or with who sends it, is answered here."""
        if not super().parse_request():
            return False
        own = self.headers.get("x-request-id", "")
        if own.isascii() and own.isprintable() and 0 < len(own) <= 200:
            self.exchange_id = own
        bodiless = self.headers.get("Content-Length", "0") == "0" and "Transfer-Encoding" not in self.headers
        self.unread = self.command == "POST" or not bodiless
        self.begun = time.monotonic()
        hosts = self.headers.get_all("Host", [])
        if found := re.match(r"https?://([^/?#]*)", self.path, re.IGNORECASE):  # a request as proxies write it
            hosts.append(found[1])
            self.path = "/" + self.path[found.end() :].lstrip("/")
        try:
            self.check_caller(hosts)
        except Refused as refused:
            self.send_refused(refused)
            self.log_line(f"refused: {refused.code}")
            return False
        return True

    def read_body(self) -> bytes:
        """Raises Refused: 411 without a length, 400 for a wrong one, 413 for one that is too large, 408."""
        lengths, most = self.headers.get_all("Content-Length", []), self.flags.max_body_bytes
        if not lengths or "Transfer-Encoding" in self.headers:
            raise Refused("Content-Length is required", status=411)
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0].strip()):
            raise Refused("Content-Length must be one whole number")
        length = int(lengths[0])
        if length > most:
            raise Refused(f"the body has {length} bytes, and this server reads at most {most}", status=413)
        if self.expects:
            self.send_response_only(100)
            self.end_headers()
        self.arrivals.allow(self.flags.request_timeout)
        data = self.rfile.read(length)
        if len(data) < length:
            raise Refused(f"the body ended after {len(data)} of {length} bytes")
        self.unread = False
        return data

    def read_json(self) -> dict:
        """The request's body. Raises Refused: for its length (`read_body`), 400 for what is no JSON object."""
        raw = self.read_body()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as fault:
            raise Refused(f"the body is not JSON: {fault}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object", code="invalid_json")
        return body

    def send_head(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.status = status
        self.close_connection |= self.unread  # what is unread must not be taken for the next request
        if self.request_version == "HTTP/0.9":
            self.request_version = self.default_request_version  # one that names it is answered as such a line is
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("x-request-id", self.exchange_id)
        for name, value in {**headers, **self.cors_headers()}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def do_OPTIONS(self) -> None:
        self.send_head(204, "application/json", {})

    def send_json(self, status: int, value, headers: dict[str, str] | None = None) -> None:
        data = strict_json(value).encode()
        self.send_head(status, "application/json", {"Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_refused(self, refused: Refused) -> None:
        later = {"Retry-After": "1"} if refused.status == 429 else {}
        self.send_json(refused.status, error_body(refused), later)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's own refusals (an unknown method, a broken request line) as the same error object."""
        self.close_connection = True
        self.send_json(code, error_body(Refused(message or HTTPStatus(code).phrase, status=code)))

    def start_stream(self, headers: dict[str, str]) -> None:
        self.chunked = self.request_version >= "HTTP/1.1"
        framing = {"Transfer-Encoding": "chunked"} if self.chunked else {}
        self.close_connection |= not self.chunked
        self.send_head(200, "text/event-stream", {"Cache-Control": "no-cache", **framing, **headers})

    def send_text(self, text: str) -> None:
        """A piece of an event stream."""
        data = text.encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def send_frames(self, frames) -> None:
        """JSON objects as server-sent events, in one write."""
        text = "".join(f"data: {strict_json(frame)}\n\n" for frame in frames)
        if text:
            self.send_text(text)

    def end_stream(self, last: str) -> None:
        self.send_text(last)
        if self.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def answer(self, act) -> None:
        """Run `act`; what it raises becomes an error object, or an error frame where a stream has begun."""
        try:
            act()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            self.log_line("the client left")
        except Exception as fault:
            refused = fault if isinstance(fault, Refused) else self.refusal(fault)
            what = "broken off" if self.status else "refused"
            if self.status:
                self.end_stream(f"data: {strict_json(error_body(refused))}\n\n")
            else:
                self.send_refused(refused)
            # The message may quote the request, and the log never does.
            self.log_line(f"{what}: {refused.code or refused.param or 'error'}")

    def log_line(self, what: str) -> None:
        """The one line a request leaves in the log as it ends: path, status, seconds, and `what` came of it."""
        path = self.path.partition("?")[0]
        logging.info("%s %d %.2fs %s", path, self.status, time.monotonic() - self.begun, what)

    def log_request(self, code="-", size="-") -> None:
        """One line a request is written as it ends; this one would be a second."""


def first_address(host: str, port: int) -> tuple:
    """(family, address) to bind. Raises OSError for a host or a port that is none."""
    if not 0 <= port < 2**16:  # getaddrinfo takes it modulo 2**16
        raise OSError(errno.EINVAL, "a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except UnicodeError:
        raise OSError(errno.EINVAL, "this is no host name") from None
    return found[0], found[4]


def start_process(arguments: list[str]) -> None:
    """What a server does before anything that takes time: a signal ends it, and so does its parent where it is asked.

    With AGENCY_EXIT_WITH_PARENT=1 or the flag, the parent holds the other end of standard input and never writes: when
    it closes, the process ends. Otherwise standard input is never read.
    """
    for each in SIGNALS:
        signal.signal(each, lambda *_: os._exit(0))
    flag = any(len(word) > 2 and "--exit-with-parent".startswith(word) for word in arguments)  # argparse abbreviates
    if flag or os.environ.get("AGENCY_EXIT_WITH_PARENT") == "1":
        threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    with suppress(OSError):  # not open at all
        while select.select([0], [], []) and os.read(0, 4096):
            pass
    os._exit(0)


class Listener(ThreadingHTTPServer):
    """A bound socket whose connections get a thread each. Raises OSError where it cannot bind."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler):
        self.answering = set()  # handlers that a request has begun to reach
        self.address_family, address = first_address(host, port)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without http.server's look-up of the host's full name, which may ask the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def serve_until_signal(self, end_replies) -> NoReturn:
        """Serve until SIGTERM or SIGINT; then `end`. A second signal ends the process at once. In the main thread."""

        def first(*_):
            for each in SIGNALS:
                signal.signal(each, lambda *_: os._exit(1))
            raise SystemExit  # out of serve_forever, wherever that is

        with suppress(SystemExit):
            for each in SIGNALS:
                signal.signal(each, first)
            self.serve_forever()
        self.server_close()
        self.end(0, end_replies)

    def end(self, status: int, end_replies) -> NoReturn:
        """End the process. `end_replies()` tells those that are being made, which get LAST_SECONDS to be written."""
        end_replies()
        until = time.monotonic() + LAST_SECONDS
        while self.answering and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(status)

    def handle_error(self, request, client_address) -> None:
        logging.info("a connection from %s broke: %s", client_address[0], sys.exc_info()[1])
