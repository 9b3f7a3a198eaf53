"""Images of a message: data URLs, or, where that is allowed, fetched from public addresses only.

Replaces   server._inline_image_urls
Why        mlx_lm 0.32.2 opens whatever http URL a message names, those of this machine and its network too, follows
           redirects to such, and reads without a limit
Upstream   server.py _inline_image_urls
Delete when mlx_lm's server fetches nothing, or from public addresses only
Test       tests/test_image_urls.py

A name is resolved once; every address that it has must be public, and the one that was looked at is the one that is
connected to. A redirect is a new URL under the same rules. All images of a request together may be as large as a body.
"""

from __future__ import annotations

import base64
import http.client
import socket
import time
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urljoin, urlsplit

from localServerCommon import Refused

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--allow-image-urls",
        {
            "action": "store_true",
            "help": "Fetch images that messages name by http or https, from public addresses (default: data URLs only)",
        },
    ),
)
TYPES = ("image_url", "input_image", "image")
MOST_REDIRECTS = 3
NAT64 = ip_network("64:ff9b::/96")
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class CannotFetch(Exception):
    """Why an image cannot be had; a few words for the client."""


def is_public(address: str) -> bool:
    """Whether `address` is of the open internet: not of this machine, its network, or a multicast group.

    An IPv4 address in an IPv6 one counts as itself.
    """
    ip: Any = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        ip = inner or ip
    return ip.is_global and not ip.is_multicast


def public_address(host: str, port: int) -> tuple:
    """The address to connect to. Raises CannotFetch unless all of the host's addresses are public."""
    try:
        found = [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise CannotFetch("its host is not known") from None
    if not all(is_public(str(address[0])) for address in found):
        raise CannotFetch("its address is not public")
    if not found:
        raise CannotFetch("its host is not known")
    return found[0]


def fetch(url: str, most: int, seconds: float) -> tuple[str, bytes]:
    """(media type, at most `most` bytes) of what `url` names, within about `seconds`. Raises CannotFetch."""
    until = time.monotonic() + seconds
    for _ in range(MOST_REDIRECTS + 1):
        try:
            parts = urlsplit(url)
            kind, host = CONNECTIONS[parts.scheme], parts.hostname or ""
            port = parts.port or kind.default_port
        except (ValueError, KeyError):
            raise CannotFetch("it is no http or https URL") from None
        address = public_address(host, port)
        connection = kind(host, port, timeout=max(until - time.monotonic(), 0.1))
        # The name is for the Host header and the certificate; the connection goes to what was looked at.
        connection._create_connection = partial(connect, address)
        try:
            path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            connection.request("GET", path, headers={"Accept": "image/*"})
            reply = connection.getresponse()
            if reply.status == 200:
                return reply.headers.get_content_type(), read(reply, most, until)
            if reply.status not in (301, 302, 303, 307, 308):
                raise CannotFetch(f"its server answered {reply.status}")
            url = urljoin(url, reply.headers.get("Location", ""))
        except (OSError, ValueError, http.client.HTTPException) as fault:
            raise CannotFetch(f"the connection failed ({type(fault).__name__})") from None
        finally:
            connection.close()
    raise CannotFetch("it is redirected too often")


def connect(address: tuple, _asked: tuple, timeout: float, _source: Any) -> socket.socket:
    return socket.create_connection(address[:2], timeout)


def read(reply: http.client.HTTPResponse, most: int, until: float) -> bytes:
    data = b""
    while piece := reply.read1(1 << 16):
        data += piece
        if len(data) > most:
            raise CannotFetch("it is too large")
        if time.monotonic() > until:
            raise CannotFetch("it takes too long")
    return data


def inline_images(messages: list[dict], flags: Any) -> None:
    """Make every image of `messages` a data URL. Raises Refused (400) naming the part."""
    left = flags.max_body_bytes
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else []):
            if part.get("type") not in TYPES:
                continue
            at = f"messages[{i}].content[{j}]"
            image = part.get("image_url", part.get("image"))
            url = image.get("url") if isinstance(image, dict) else image
            if not isinstance(url, str):
                raise Refused(f"{at} must name an image by a URL", param=at)
            if url.startswith("data:"):
                continue
            if not flags.allow_image_urls:
                raise Refused(f"{at}: images must be data URLs here (--allow-image-urls allows others)", param=at)
            try:
                kind, data = fetch(url, left, flags.request_timeout)
            except CannotFetch as why:
                raise Refused(f"{at}: the image cannot be fetched: {why}", param=at) from None
            left -= len(data)
            part.clear()
            text = base64.b64encode(data).decode()
            part.update(type="image_url", image_url={"url": f"data:{kind};base64,{text}"})
