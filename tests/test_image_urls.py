"""Images named by a URL: data only, or fetched from public addresses, the one that was looked at."""

import socket
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from localServerCommon import Refused
from mlx_patches import image_urls
from mlx_patches.image_urls import CannotFetch, fetch, inline_images, is_public
from tests.client import chat

PIXEL = b"\x89PNG and so on"


def image(url, **more) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}], **more}]


def test_public_addresses():
    assert all(map(is_public, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]))
    for address in (
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::1", "::ffff:10.0.0.1", "198.18.0.1"),
    ):
        assert not is_public(address), address


@pytest.fixture
def site():
    """(port, paths asked for, Host headers): /image, /large, /slow and redirects at /to?URL."""
    asked, hosts = [], []

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            hosts.append(self.headers["Host"])
            path, _, target = self.path.partition("?")
            self.send_response({"/to": 302, "/none": 404}.get(path, 200))
            if path == "/to":
                self.send_header("Location", target)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            self.wfile.write(PIXEL * (1000 if path == "/large" else 1))

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], asked, hosts
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_world(monkeypatch):
    """Names that resolve as told, and 127.0.0.1 for a public address."""
    names = {
        "public.example": ["127.0.0.1"],
        "inside.example": ["127.0.0.2"],
        "both.example": ["127.0.0.1", "10.0.0.1"],
    }
    looked_up = []

    def getaddrinfo(host, port, *args, upstream=socket.getaddrinfo, **options):
        if host in names:
            looked_up.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in names[host]]
        if host.endswith(".example"):
            raise socket.gaierror("unknown")
        return upstream(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
    return looked_up


def test_what_is_fetched(site, open_world):
    port, asked, hosts = site
    url = f"http://public.example:{port}"
    assert fetch(f"{url}/image?a=b", 100, 10) == ("image/png", PIXEL)
    assert (asked, hosts) == (["/image?a=b"], [f"public.example:{port}"])
    assert open_world == ["public.example"]  # looked up once: what was checked is what was connected to
    assert fetch(f"{url}/to?/image", 100, 10) == ("image/png", PIXEL)


@pytest.mark.parametrize(
    "url, why",
    [
        ("http://inside.example:PORT/image", "not public"),
        ("http://both.example:PORT/image", "not public"),
        ("http://public.example:PORT/to?http://inside.example:PORT/image", "not public"),
        ("http://public.example:PORT/to?file:///etc/passwd", "no http"),
        ("http://public.example:PORT/to?/to?/to?/to?/to?/image", "too often"),
        ("http://public.example:PORT/large", "too large"),
        ("http://public.example:PORT/none", "404"),
        ("http://nowhere.example/", "not known"),
        ("http://" + "a" * 70 + ".example/", "not known"),
        ("http://public.example:99999/", "no http"),
        ("http:///image", "not known"),
        ("ftp://public.example/", "no http"),
        ("http://public.example:PORT/a\r\nb: c", "failed"),
    ],
)
def test_what_is_not(site, open_world, url, why):
    port, asked, _ = site
    with pytest.raises(CannotFetch, match=why):
        fetch(url.replace("PORT", str(port)), 1000, 10)
    assert "/image" not in asked


def test_all_images_together_have_one_limit(site, open_world):
    port, _, _ = site
    flags = Namespace(allow_image_urls=True, max_body_bytes=len(PIXEL) * 2, request_timeout=10)
    messages = [image(f"http://public.example:{port}/image")[0] for _ in range(2)]
    inline_images(messages, flags)
    assert all(message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,") for message in messages)
    messages = [image(f"http://public.example:{port}/image")[0] for _ in range(3)]
    with pytest.raises(Refused) as refused:
        inline_images(messages, flags)
    assert refused.value.param == "messages[2].content[0]" and "too large" in refused.value.message


@pytest.mark.parametrize("flags", [(), ("--allow-image-urls",)], ids=["default", "allowed"])
def test_the_server_never_asks_its_own_machine(serve, tiny, site, flags):
    port, asked, _ = site
    server = serve(tiny("scripted"), *flags)
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "127.1"):
        reply = chat(server, image(f"http://{host}:{port}/image"))
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0]")
    assert asked == []


def test_a_text_model_reads_none(serve, tiny):
    server = serve(tiny("scripted"))
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
        {"type": "image", "image": "data:,x"},
    ):
        for fields in ({}, {"seed": 1}, {"stream": True}):
            text = {"type": "text", "text": "a"}
            reply = chat(server, [{"role": "user", "content": [text, part]}], **fields)
            assert (reply.status, reply.error["param"]) == (400, "messages[0].content[1]")


def test_mlx_lm_server_asks_whatever_it_is_told(serve, tiny, site):
    port, asked, _ = site
    upstream = serve(tiny("scripted"), module="mlx_lm.server")
    assert chat(upstream, image(f"http://127.0.0.1:{port}/image")).status != 200  # a text model
    assert asked == ["/image"]
