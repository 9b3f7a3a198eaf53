"""What a real browser lets a page do to the server: nothing, unless its origin is allowed.

One run of Chromium for all of it. A page on another port of localhost tries to read from the server and to post to it.
A second page is a rebound name: its own server hands whatever the page asks of /v1 on to the server under test, bytes
and headers as they are, so that for the browser both are one origin. The pages post what they saw to their own server.
"""

import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
BROWSERS = [found for found in map(shutil.which, NAMES) if found][:1]
REBOUND = "rebound.example"
REPORTS = {"other port", "rebound name"}
SECONDS = 80  # for a browser to start and two pages to report

# `seen` is what a page gets to see: a text, or the error of the browser. An opaque reply is the empty text.
PAGE = """<!doctype html><body><script>
const seen = {};
async function attempt(name, url, options) {
  try { seen[name] = await (await fetch(url, options)).text(); } catch (error) { seen[name] = String(error); }
}
const say = text => JSON.stringify({messages: [{role: "user", content: text}]});
const json = {"Content-Type": "application/json", "Authorization": "Bearer some"};
function form(action, text) {  // {"messages": [...], "a": "=b"} is what such a form sends
  const target = document.createElement("iframe");
  target.name = "sink";
  document.body.appendChild(target);
  const form = document.body.appendChild(document.createElement("form"));
  Object.assign(form, {method: "post", enctype: "text/plain", action, target: "sink"});
  const field = form.appendChild(document.createElement("input"));
  [field.name, field.value] = [say(text).slice(0, -1) + ',"a":"', 'b"}'];
  form.submit();
  return new Promise(done => { target.onload = done; setTimeout(done, 3000); });
}
(async () => {
  for (const [name, base] of Object.entries(BASES)) {
    await attempt(name + " reads", base + "/v1/models");
    await attempt(name + " posts", base + "/v1/chat/completions", {method: "POST", headers: json, body: say("json")});
    const plain = {method: "POST", mode: "no-cors", body: say("plain")};
    await attempt(name + " posts plainly", base + "/v1/chat/completions", plain);
    const bare = {method: "POST", mode: "no-cors", body: new Blob([say("bare")])};
    await attempt(name + " posts without a type", base + "/v1/chat/completions", bare);
  }
  await form(Object.values(BASES)[0] + "/v1/chat/completions", "form");
  await fetch("/report", {method: "POST", body: JSON.stringify([WHO, seen])});
})();
</script>FRAME"""


class PageServer(ThreadingHTTPServer):
    """Serves the pages, keeps what they report, and hands /v1 on to `target` as a rebound name would."""

    daemon_threads = True

    def __init__(self, target: str, bases: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Pages)
        self.target, self.bases, self.reports = urlsplit(target), bases, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, host: str) -> str:
        return f"http://{host}:{self.server_address[1]}"


class Pages(BaseHTTPRequestHandler):
    def log_message(self, *args):
        """Nothing: the test's own output is enough."""

    def page(self, who, bases, frame=""):
        text = PAGE.replace("BASES", json.dumps(bases)).replace("WHO", json.dumps(who)).replace("FRAME", frame)
        self.send(200, {"Content-Type": "text/html"}, text.encode())

    def send(self, status, headers, data):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/":
            frame = f'<iframe src="{self.server.url(REBOUND)}/rebound"></iframe>'
            self.page("other port", self.server.bases, frame)
        elif self.path == "/rebound":
            self.page("rebound name", {"rebound": ""})
        else:
            self.hand_on(None)

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/report":
            who, seen = json.loads(data)
            self.server.reports[who] = seen
            self.send(200, {}, b"")
        else:
            self.hand_on(data)

    def hand_on(self, data):
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=30)
        connection.request(self.command, self.path, data, dict(self.headers))
        reply = connection.getresponse()
        self.send(reply.status, {"Content-Type": reply.headers.get("Content-Type", "")}, reply.read())
        connection.close()


def browse(browser, pages, folder):
    """Runs the browser until both pages have reported."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"]
    flags += ["--disable-features=LocalNetworkAccessChecks"]  # what newer browsers do against it is not tested here
    flags += [f"--user-data-dir={folder}", f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
    with open(folder.parent / f"{folder.name}.log", "wb") as log:
        process = subprocess.Popen([browser, *flags, pages.url("localhost")], stdout=log, stderr=log)
    deadline = time.monotonic() + SECONDS
    while set(pages.reports) != REPORTS and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_ci_has_a_browser():
    assert BROWSERS or "CI" not in os.environ, "install Debian's chromium"


@pytest.mark.parametrize("browser", BROWSERS, ids=["chromium"][: len(BROWSERS)])
def test_a_page_can_use_the_server_only_when_allowed(browser, serve, serve_private, tiny, tmp_path):
    folder = tiny("scripted", style="think", tools="json_tools")
    closed = serve_private(folder)
    pages = PageServer(closed.url, {})
    try:
        allowed = serve_private(folder, "--allowed-origins", pages.url("localhost"))
        wide = serve(folder, module="mlx_lm.server")
        pages.bases = {"closed": closed.url, "allowed": allowed.url, "upstream": wide.url}
        for attempt in range(2):  # a browser that did not come up says nothing about the server
            if set(pages.reports) != REPORTS:
                browse(browser, pages, tmp_path / f"profile {attempt}")
    finally:
        pages.shutdown()
    assert set(pages.reports) == REPORTS, [path.read_text()[-2000:] for path in tmp_path.glob("*.log")]

    seen = pages.reports["other port"]
    for what in ("reads", "posts", "posts plainly", "posts without a type"):
        assert seen[f"closed {what}"] in ("TypeError: Failed to fetch", ""), seen
    assert "default_model" not in str(pages.reports["rebound name"])
    for what, text in pages.reports["rebound name"].items():
        assert json.loads(text)["error"]["code"] == "host_not_allowed", (what, text)
    # Not one of them reached the model.
    assert "tokens" not in closed.log()
    assert closed.log().count("refused: origin_not_allowed") >= 5
    assert closed.log().count("refused: host_not_allowed") >= 5

    assert folder.name in seen["allowed reads"]
    assert json.loads(seen["allowed posts"])["choices"][0]["message"]["content"] == "json"
    assert "refused: unsupported_media_type" in allowed.log()  # the plain one, from an allowed page too

    # mlx_lm's own server does what any page asks of it.
    assert json.loads(seen["upstream posts"])["choices"][0]["message"]["content"] == "json"
