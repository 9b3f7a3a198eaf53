"""Who may call: the names, the origins and the key that a request must have.

Replaces   APIHandler._set_cors_headers, and the default of --allowed-origins
Why        mlx_lm 0.32.2 answers every web page that its user opens, under any name, and knows no key
Upstream   server.py APIHandler._set_cors_headers, main
Delete when mlx_lm's server refuses what a browser sends for a page that nobody allowed
Test       tests/test_access.py, tests/test_access_browser.py

Decided on a request's head, before its body is read, by three rules. A browser names the page's origin in what a page
sends across origins: refused unless `--allowed-origins` has it. A page whose own name was made to point here (DNS
rebinding) is same-origin, but the Host header has that name: only names of this machine are answered, or any where a
key is asked for. A form can post without the browser asking first, but it cannot post JSON.
"""

from __future__ import annotations

import hmac
import os
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from localServerCommon import Refused, first_address


def listed(text: str) -> list[str]:
    """A flag's names, parted by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--api-key",
        {
            "default": os.environ.get("MLX_SERVER_API_KEY"),
            "metavar": "KEY",
            "help": "Ask for this key, as a bearer token or x-api-key (default: the environment's MLX_SERVER_API_KEY)",
        },
    ),
    (
        "--allowed-hosts",
        {
            "type": listed,
            "default": [],
            "metavar": "NAMES",
            "help": "Names in a Host header that are answered besides this machine's own; * for any",
        },
    ),
    ("--insecure", {"action": "store_true", "help": "Serve on an address that is not loopback without a key"}),
)

CHANGED_FLAGS: dict[str, dict[str, Any]] = {
    "--allowed-origins": {
        "type": listed,
        "default": [],
        "help": "Origins of web pages that may use the server; * for any (default: none)",
    },
}
"""What is changed of mlx_lm's own."""


def host_name(authority: str) -> str:
    """The host of `host:port`, in lower case, without brackets or a last dot."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return (authority if authority.count(":") > 1 else authority.partition(":")[0]).rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or address that can only be this machine."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def may_use_host(host: str, own: set[str], allowed: list[str]) -> bool:
    """Whether a Host header is answered. `own`: the addresses and names that this server is bound to."""
    name = host_name(host)
    return is_loopback(name) or name in own or "*" in allowed or name in map(host_name, allowed)


def may_use_origin(origin: str, host: str, allowed: list[str]) -> bool:
    """Whether a page of `origin` is answered by the server that it called by `host`."""
    origin, host = origin.strip().lower(), host.strip().lower()
    return origin in (f"http://{host}", f"https://{host}") or is_named(origin, allowed)


def is_named(origin: str, allowed: list[str]) -> bool:
    return "*" in allowed or origin.strip().lower() in (name.strip().lower().rstrip("/") for name in allowed)


def has_key(headers: Any, key: str) -> bool:
    """Whether `headers` bring the key, as `Authorization: Bearer` or `x-api-key`; a wrong one takes no longer."""
    scheme, _, bearer = headers.get("Authorization", "").strip().partition(" ")
    given = headers.get("x-api-key", "").strip(), bearer.strip() if scheme.lower() == "bearer" else ""
    wanted = key.encode("utf-8", "surrogateescape")
    return any([hmac.compare_digest(text.encode("latin-1", "replace"), wanted) for text in given])


def may_be_json(content_type: str) -> bool:
    """Whether a body of this type is read: JSON, or a type that is not said."""
    kind = content_type.partition(";")[0].strip().lower()
    return not kind or kind.endswith(("/json", "+json"))


def unsafe_address(flags: Any) -> str | None:
    """One sentence on why a server with these flags should not start, or None."""
    if not flags.api_key and not flags.insecure:
        with suppress(OSError):  # binding it says so better
            address = first_address(flags.host, flags.port)[1][0]
            if not is_loopback(address):
                return f"{address} can be reached from other machines: give an --api-key, or --insecure to serve anyone"
    return None


class ChecksCallers:
    """Mixin for the handler."""

    def check_caller(self, hosts: list[str]) -> None:
        """`hosts`: every name by which the request calls this server.

        Raises Refused: 403 for a host or an origin, 401 for want of the key, 415 for what may be a form.
        """
        flags, path = self.flags, self.path.partition("?")[0].rstrip("/")
        own = {host_name(flags.host), self.connection.getsockname()[0].removeprefix("::ffff:")}
        for host in hosts:
            if not flags.api_key and not may_use_host(host, own, flags.allowed_hosts):
                message = f"this server is not called {host_name(host)!r}; --allowed-hosts can name it"
                raise Refused(message, code="host_not_allowed", status=403)
        for origin in self.headers.get_all("Origin", []):
            if not may_use_origin(origin, "".join(hosts[:1]), flags.allowed_origins):
                message = f"pages of {origin!r} may not use this server; --allowed-origins can name them"
                raise Refused(message, code="origin_not_allowed", status=403)
        if self.command == "OPTIONS":
            return  # a browser's question ahead of a request; it brings no key
        if flags.api_key and path != "/health" and not has_key(self.headers, flags.api_key):
            raise Refused("the API key is missing or wrong", code="invalid_api_key", status=401)
        for kind in self.headers.get_all("Content-Type", []) if self.command == "POST" else ():
            if not may_be_json(kind):
                message = f"the Content-Type must be application/json, not {kind!r}"
                raise Refused(message, code="unsupported_media_type", status=415)

    def cors_headers(self) -> dict[str, str]:
        """What lets a page of an allowed origin read the reply."""
        origin, allowed = self.headers.get("Origin"), self.flags.allowed_origins
        if not is_named(origin or "", allowed):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
            "Access-Control-Allow-Methods": "*",
            "Access-Control-Allow-Headers": "*, Authorization",  # which the star does not cover
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }
