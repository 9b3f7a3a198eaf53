"""What a server that a parent tool starts needs, whichever engine answers: error bodies and strict JSON.

Nothing here knows mlx. A refusal is one exception from wherever it is found to the one place that writes it, so a
client sees OpenAI's error object and never a traceback.
"""

import json
import logging
import math
import socket
import sys
import time
import uuid
from http.server import ThreadingHTTPServer

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


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
    kind = ERROR_TYPES.get(refused.status, "server_error")
    return {
        "error": {
            "message": refused.message,
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }


def strict_json(value) -> str:
    """`value` as JSON on one line. Raises ValueError for a NaN or an infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finite(number: float, floor: float = -9999.0) -> float:
    """`number`, or `floor` where JSON could not write it or it is lower (vLLM's floor for log-probabilities)."""
    return max(number, floor) if math.isfinite(number) else floor


class JsonHandler:
    """Mixin for BaseHTTPRequestHandler: HTTP/1.1 with kept connections, JSON in and out, chunked event streams.

    Every reply carries a length or is chunked, and an `x-request-id`: the client's own where it sent a plain one.
    """

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a line that is no request: HTTP/0.9 would get no status and no headers
    disable_nagle_algorithm = True
    status = 0
    chunked = False

    def parse_request(self) -> bool:
        self.exchange_id = uuid.uuid4().hex
        parsed = super().parse_request()
        if parsed:
            own = self.headers.get("x-request-id", "")
            if own.isascii() and own.isprintable() and 0 < len(own) <= 200:
                self.exchange_id = own
            self.status = 0
            self.begun = time.monotonic()
            bodiless = self.headers.get("Content-Length", "0") == "0" and "Transfer-Encoding" not in self.headers
            if self.command != "POST" and not bodiless:
                self.close_connection = True  # the body is not read, and must not be taken for the next request
        return parsed

    def read_json(self) -> dict:
        """The request's body. Raises Refused: 411 or 400 for its length, 400 for what is no JSON object."""
        length = self.headers.get("Content-Length")
        if length is None:
            self.close_connection = True
            raise Refused("Content-Length is required", status=411)
        if not length.isdecimal():
            self.close_connection = True
            raise Refused("Content-Length must be a whole number")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as fault:
            raise Refused(f"the body is not JSON: {fault}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object", code="invalid_json")
        return body

    def send_head(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        self.status = status
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("x-request-id", getattr(self, "exchange_id", None) or uuid.uuid4().hex)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self._set_cors_headers()
        self.end_headers()

    def do_OPTIONS(self) -> None:
        self.send_head(204, "application/json", {})

    def send_json(self, status: int, value, headers: dict[str, str] | None = None) -> None:
        data = strict_json(value).encode()
        self.send_head(status, "application/json", {"Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_refused(self, refused: Refused) -> None:
        self.send_json(refused.status, error_body(refused))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's own refusals (an unknown method, a broken request line) as the same error object."""
        self.close_connection = True
        self.requestline = getattr(self, "requestline", "")
        if not hasattr(self, "headers"):
            self.headers = {}
        self.send_json(code, error_body(Refused(message or f"HTTP {code}", status=code)))

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
            if self.status:
                self.end_stream(f"data: {strict_json(error_body(refused))}\n\n")
            else:
                self.send_refused(refused)
            # The message may quote the request, and the log never does.
            self.log_line(f"refused: {refused.code or refused.param or 'error'}", refused.status)

    def log_line(self, what: str, status: int = 0) -> None:
        """The one line a request leaves in the log as it ends: path, status, seconds, and `what` came of it."""
        path = self.path.partition("?")[0]
        logging.info("%s %d %.2fs %s", path, status or self.status, time.monotonic() - self.begun, what)

    def log_request(self, code="-", size="-") -> None:
        """One line a request is written as it ends; this one would be a second."""


class Listener(ThreadingHTTPServer):
    """A bound socket whose connections get a thread each. Raises OSError where it cannot bind."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__(address, handler)

    def handle_error(self, request, client_address) -> None:
        logging.info("a connection from %s broke: %s", client_address[0], sys.exc_info()[1])
