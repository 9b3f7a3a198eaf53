"""Who may call, and how a request must arrive, over raw sockets: origins, host names, the key, lengths, the clock."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from mlx_patches.access import has_key, host_name, is_loopback, may_be_json, may_use_origin
from tests.client import CHAT, chat, chat_stream, connect, exchange, get, post, post_bytes, request, strict_loads
from tests.conftest import server_env

HELLO = {"messages": [{"role": "user", "content": "Hello there"}]}
PAGE = "http://page.example"
KEY = "s3cret-käy"
BEARER = {"Authorization": f"Bearer {KEY}".encode()}


@pytest.fixture
def folder(tiny):
    return tiny("scripted", style="think", tools="json_tools")


@pytest.fixture
def server(serve, folder):
    return serve(folder)


@pytest.fixture
def keyed(serve, folder):
    return serve(folder, env={"MLX_SERVER_API_KEY": KEY})


@pytest.fixture
def hasty(serve, folder):
    return serve(folder, "--request-timeout", 0.5, "--max-body-bytes", "0.1MB")


def refused(reply, status, code=None):
    assert reply.status == status, (reply.status, reply.raw)
    assert set(reply.body) == {"error"} and set(reply.error) == {"message", "type", "param", "code"}
    assert code is None or reply.error["code"] == code
    assert int(reply.headers["Content-Length"]) == len(reply.raw)
    assert "Access-Control-Allow-Origin" not in reply.headers
    return True


def raw_refused(raw: bytes, status: int):
    """One refusal, and then the end of the connection."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), raw
    assert b"Connection: close" in head
    return strict_loads(body)["error"]


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


# Pure


@pytest.mark.parametrize(
    "authority, host",
    [
        ("LocalHost:80", "localhost"),
        ("localhost.", "localhost"),
        ("[::1]:8080", "::1"),
        ("::1", "::1"),
        ("a@localhost:1", "a@localhost"),
        ("", ""),
    ],
)
def test_the_host_of_an_authority(authority, host):
    assert host_name(authority) == host


def test_loopback():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]))
    others = ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.nip.io", "2130706433", "::ffff:10.0.0.1"]
    assert not any(map(is_loopback, others))


def test_origins():
    assert may_use_origin("http://localhost:80", "localhost:80", [])
    assert may_use_origin("HTTP://PAGE.example", "localhost", ["http://page.example/"])
    assert may_use_origin("null", "localhost", ["*"])
    for origin in ("null", "", "http://localhost:81", "http://page.example", "localhost:80", "file://localhost:80"):
        assert not may_use_origin(origin, "localhost:80", ["http://page.example.org", "https://page.example"])


def test_keys():
    latin = KEY.encode().decode("latin-1")  # as http.client reads a header
    for headers in ({"Authorization": f"Bearer {latin}"}, {"Authorization": f"bearer  {latin} "}, {"x-api-key": latin}):
        assert has_key(headers, KEY)
    for given in ("", "s3cret", latin + "x", KEY.replace("ä", "a")):
        assert not has_key({"Authorization": f"Bearer {given}", "x-api-key": given}, KEY)
    assert not has_key({"Authorization": latin}, KEY) and not has_key({"Authorization": f"Basic {latin}"}, KEY)
    assert has_key({"Authorization": "Bearer wrong", "x-api-key": latin}, KEY)


def test_content_types():
    assert all(map(may_be_json, ["", " ", "application/json", "Application/JSON; charset=utf-8", "application/a+json"]))
    simple = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
    assert not any(map(may_be_json, [*simple, "text/plain; application/json", "x"]))


# Origins


@pytest.mark.parametrize("origin", [PAGE, "https://page.example", "null", "http://localhost:1", "http://127.0.0.1"])
@pytest.mark.parametrize("method, path", [("POST", CHAT), ("OPTIONS", CHAT), ("GET", "/v1/models"), ("GET", "/health")])
def test_another_origin_is_refused(server, origin, method, path):
    body = HELLO if method == "POST" else None
    refused(request(server, method, path, body, headers={"Origin": origin}), 403, "origin_not_allowed")


def test_the_same_origin_is_none_other(server):
    own = {"Origin": server.url}
    assert post(server, CHAT, HELLO, headers=own).content == "Hello there"
    assert chat_stream(server, "Hello there", headers=own).content == "Hello there"
    assert request(server, "OPTIONS", CHAT, headers=own).status == 204


def test_an_allowed_origin(serve, folder):
    server = serve(folder, "--allowed-origins", f"http://other.example,{PAGE}")
    page = {"Origin": PAGE}
    ask = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    question = request(server, "OPTIONS", CHAT, headers=ask)
    assert question.status == 204 and question.headers["Access-Control-Allow-Headers"] == "*, Authorization"
    replies = [chat(server, "Hello there", headers=page), chat_stream(server, "Hello there", headers=page)]
    assert [reply.content for reply in replies] == ["Hello there"] * 2
    wrong = post(server, CHAT, b"{", headers=page)
    assert wrong.status == 400
    for reply in (question, *replies, wrong, get(server, "/v1/models", headers=page)):
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE and reply.headers["Vary"] == "Origin"
    refused(chat(server, "Hello", headers={"Origin": "http://third.example"}), 403)
    assert "Access-Control-Allow-Origin" not in chat(server, "Hello").headers


def test_every_origin(serve, folder):
    server = serve(folder, "--allowed-origins", "*")
    for headers in ({}, {"Origin": PAGE}, {"Origin": "null"}):
        reply = chat(server, "Hello there", headers=headers)
        assert (reply.content, reply.headers["Access-Control-Allow-Origin"]) == ("Hello there", "*")


def test_mlx_lm_server_answers_every_page(serve, folder):
    upstream = serve(folder, module="mlx_lm.server")
    reply = post(upstream, CHAT, HELLO, headers={"Origin": PAGE, "Host": "page.example", "Content-Type": "text/plain"})
    assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")


# Host names


def test_host_names(server, serve, folder):
    port = server.url.rpartition(":")[2]
    for name in ("localhost", "LOCALHOST.", "127.0.0.1", "127.0.0.2", "[::1]"):
        for host in (name, f"{name}:{port}"):
            assert get(server, "/health", headers={"Host": host}).status == 200
    for name in ("page.example", f"page.example:{port}", "localhost.page.example", "10.0.0.1", "", "[", "a@localhost"):
        for method, path, body in (("POST", CHAT, HELLO), ("GET", "/v1/models", None), ("GET", "/health", None)):
            reply = request(server, method, path, body, headers={"Host": name, "Origin": f"http://{name}"})
            refused(reply, 403, "host_not_allowed")
    named = serve(folder, "--allowed-hosts", "box.local,llm:8080")
    for name in ("box.local", "BOX.local:99", "llm"):
        assert chat(named, "Hello there", headers={"Host": name}).content == "Hello there"
    refused(chat(named, "Hello", headers={"Host": "page.example"}), 403)


def test_a_key_stands_for_the_host_name(keyed):
    assert chat(keyed, "Hello there", headers={"Host": "page.example", **BEARER}).content == "Hello there"
    refused(chat(keyed, "Hello", headers={"Host": "page.example"}), 401)


def test_a_client_without_a_host_header(server):
    assert exchange(server, head("GET /health HTTP/1.0")).startswith(b"HTTP/1.1 200 ")


def test_the_address_that_is_bound(serve_private, folder):
    server = serve_private(folder, "--host", "0.0.0.0", "--insecure")
    port = server.url.rpartition(":")[2]
    own = socket.gethostbyname(socket.gethostname())
    server.url = f"http://{own}:{port}"
    assert get(server, "/health").status == 200
    refused(get(server, "/health", headers={"Host": "page.example"}), 403)


def test_targets_as_proxies_write_them(server):
    def status(target, host="localhost"):
        sent = head(f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close")
        return int(exchange(server, sent).split()[1])

    assert status(f"{server.url}/health") == status("HTTP://localhost/v1/models?x=1") == 200
    assert status(f"{server.url}/nothing") == status("http://localhost") == 404
    assert status("http://page.example/health") == status(f"{server.url}/health", "page.example") == 403


# The key


def test_the_key(keyed):
    for headers in (BEARER, {"x-api-key": KEY.encode()}):
        assert chat(keyed, "Hello there", headers=headers).content == "Hello there"
        assert chat_stream(keyed, "Hello there", headers=headers).content == "Hello there"
        assert get(keyed, "/v1/models", headers=headers).status == 200
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {KEY}".encode()}, {"x-api-key": ""}):
        for method, path, body in (("POST", CHAT, HELLO), ("GET", "/v1/models", None), ("GET", "/nothing", None)):
            reply = request(keyed, method, path, body, headers=headers)
            refused(reply, 401, "invalid_api_key")
            assert reply.error["type"] == "authentication_error"
    assert get(keyed, "/health").body == {"status": "ok"}
    assert KEY not in keyed.log()


def test_a_page_of_another_origin_is_refused_with_the_key_too(keyed):
    refused(chat(keyed, "Hello", headers={"Origin": PAGE, **BEARER}), 403, "origin_not_allowed")


def test_the_flag_wins_over_the_environment(serve, folder):
    server = serve(folder, "--api-key", "other", env={"MLX_SERVER_API_KEY": KEY})
    assert chat(server, "Hello there", headers={"x-api-key": "other"}).content == "Hello there"
    refused(chat(server, "Hello", headers=BEARER), 401)


# The start


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_address_without_a_key_is_refused(host, folder):
    command = [sys.executable, "-m", "mlx_patched_server", "--model", str(folder), "--port", "0", "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=server_env())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "--api-key" in done.stderr and "--insecure" in done.stderr


def test_an_open_address_with_a_key(serve_private, folder):
    server = serve_private(folder, "--host", "0.0.0.0", "--api-key", "k")
    refused(get(server, "/v1/models"), 401)
    assert get(server, "/v1/models", headers={"x-api-key": "k"}).status == 200


@pytest.mark.parametrize("flag, value", [("--max-body-bytes", "lots"), ("--request-timeout", "0")])
def test_a_flag_that_does_not_fit(flag, value, folder):
    command = [sys.executable, "-m", "mlx_patched_server", "--model", str(folder), flag, value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=server_env())
    assert done.returncode == 2 and flag in done.stderr


# How a request arrives


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_form_can_send_is_not_read(server, kind):
    refused(post(server, CHAT, HELLO, headers={"Content-Type": kind}), 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["", "application/json;charset=utf-8", "application/vnd.api+json"])
def test_json_or_no_type_is(server, kind):
    assert post(server, CHAT, HELLO, headers={"Content-Type": kind}).content == "Hello there"


@pytest.mark.parametrize(
    "lines, status",
    [
        ([], 411),
        (["Transfer-Encoding: chunked"], 411),
        (["Transfer-Encoding: chunked", "Content-Length: 5"], 411),
        (["Content-Length: 5", "Content-Length: 5"], 400),
        (["Content-Length: 5, 5"], 400),
        (["Content-Length: -5"], 400),
        (["Content-Length: +5"], 400),
        (["Content-Length: 5.0"], 400),
        (["Content-Length: \xb2"], 400),
        (["Content-Length: "], 400),
        (["Content-Length: " + "9" * 19], 400),
        (["Content-Length: " + "9" * 5000], 400),
        (["Content-Length: 67108865"], 413),
        (["Content-Length: " + "9" * 18, "Expect: 100-continue"], 413),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else x,
)
def test_lengths(server, lines, status):
    begun = time.monotonic()
    raw = exchange(server, head(f"POST {CHAT} HTTP/1.1", "Host: localhost", *lines))
    assert raw_refused(raw, status)["type"] == "invalid_request_error"
    assert time.monotonic() - begun < 10  # nobody waits for the body


def test_a_body_that_is_too_large_by_a_byte(hasty):
    assert post(hasty, CHAT, b" " * 100_000).status == 400
    for length in (100_001, 50_000_000):  # the client can finish sending, and read why
        assert refused(post(hasty, CHAT, b" " * length), 413)


def test_a_body_that_ends_early(server):
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, HELLO, {"Content-Length": 10_000}))
        sock.shutdown(socket.SHUT_WR)
        assert "ended after" in raw_refused(sock.makefile("rb").read(), 400)["message"]


def test_a_client_that_asks_before_it_sends(server):
    data = post_bytes(CHAT, HELLO, {"Expect": "100-continue", "Connection": "close"})
    first, _, body = data.partition(b"\r\n\r\n")
    with connect(server) as sock:
        sock.sendall(first + b"\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.makefile("rb").read().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST", head(f"POST {CHAT} HTTP/1.1", "Host: localhost")[:-2], post_bytes(CHAT, HELLO)[:-1]],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
@pytest.mark.parametrize("dripping", [False, True], ids=["silent", "dripping"])
def test_what_does_not_arrive_in_time(hasty, sent, dripping):
    if dripping and not sent:
        sent = b"\r\n"[:1]
    with connect(hasty, 20) as sock:
        sock.sendall(sent)
        begun, ended = time.monotonic(), threading.Event()

        def drip():
            while not ended.wait(0.1):
                sock.sendall(b"x: y\r\n" if sent.startswith(b"POST /") and sent.endswith(b"\n") else b"")

        if dripping:
            threading.Thread(target=drip, daemon=True).start()
        raw = sock.makefile("rb").read()
        ended.set()
    assert raw_refused(raw, 408)["code"] == "request_timeout"
    assert 0.4 < time.monotonic() - begun < 15


def threads(server) -> int:
    with open(f"/proc/{server.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_threads_are_freed(serve_private, folder):
    server = serve_private(folder, "--request-timeout", 0.5)
    chat(server, "Hello")
    time.sleep(1)  # until its own thread is gone
    before = threads(server)
    socks = [connect(server) for _ in range(20)]
    for sock in socks:
        sock.sendall(b"POST /v1/chat")
    deadline = time.monotonic() + 30
    while threads(server) < before + 20:
        assert time.monotonic() < deadline
    while threads(server) > before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for sock in socks:
        assert b" 408 " in sock.makefile("rb").readline()
        sock.close()
    assert chat(server, "Hello there").content == "Hello there"


def test_a_kept_connection_may_idle_longer(hasty):
    url = urlsplit(hasty.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
    connection.connect()
    sock = connection.sock
    for _ in range(2):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        time.sleep(1)
    assert connection.sock is sock
    connection.close()


def test_a_slow_reply_is_no_slow_request(hasty):
    """Nothing is timed once the request is there."""
    text = "one" + " two three" * 600
    reply = chat_stream(hasty, text, max_tokens=4000)
    assert reply.content == text and reply.seconds > 0.5


def test_head_is_get_without_a_body(server):
    for path in ("/health", "/v1/models", "/v1/models/default_model", "/nothing"):
        whole, bare = request(server, "GET", path), request(server, "HEAD", path)
        assert (bare.status, bare.raw) == (whole.status, b"")
        assert bare.headers["Content-Length"] == whole.headers["Content-Length"] == str(len(whole.raw))
