"""Clients that leave a real server: how soon it costs nothing, and that nobody else notices (tests/site/timed_server).

The specified times are 100 ms to notice and 250 ms and a step for the row to go; the worst of a few clients may take
a second more here, because the machine may be busy. `python -m tests.cancel_table` prints what they are.
"""

import random
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from mlx_lm.server import GenerationContext

from mlx_patches.cancellation import LeavesEarly
from mlx_patches.reply_events import Replies
from tests.cancel_table import (
    CASES,
    LEFT,
    SEED,
    STREAM,
    TOOLS,
    WORDS,
    Case,
    Times,
    body,
    cancel,
    cancel_while_loading,
    leave,
    sent,
    start,
)
from tests.client import CHAT, chat, chat_stream, connect, post_bytes

STEP, CHUNK = 0.01, 0.03
MORE = 1.0  # seconds that a busy machine may take longer
PATHS = [pytest.param({}, id="batch"), pytest.param(SEED, id="single")]
STREAMED = [pytest.param({}, id="whole"), pytest.param(STREAM, id="streamed")]


@pytest.fixture(scope="module")
def timed(serve):
    """timed(draft) -> (server, its Times)."""
    times = {draft: Times() for draft in (False, True)}
    return lambda draft=False: (start(draft, times[draft], serve, step=STEP, chunk=CHUNK), times[draft])


def left_lines(times, begun):
    return sum(note["text"] == LEFT for note in times.notes("line", begun))


def check_times(seen):
    noticed, gone = [each.noticed for each in seen], [each.gone for each in seen if each.gone is not None]
    assert min(noticed) < 0.1 and max(noticed) < 0.1 + MORE, noticed
    if gone:
        assert statistics.median(gone) < 0.25 + max(STEP, CHUNK) + MORE / 4 and max(gone) < 0.25 + MORE, gone


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_goes_with_its_client(timed, case):
    server, times = timed(case.draft)
    begun = time.monotonic()
    seen = cancel(server, times, case, 3)
    check_times(seen)
    lines = [note["text"] for note in times.notes("line", begun)]
    assert lines == [LEFT] * (len(seen) + len(case.ahead))
    assert "Traceback" not in server.log()
    asked = time.monotonic()
    assert chat(server, "Hello", **case.body | {"stream": False}).content == "Hello"
    times.wait("line", asked)  # not in the next test


def test_a_request_that_left_while_the_model_loads_is_never_read():
    check_times(cancel_while_loading(3, 3))


@pytest.mark.parametrize(
    ("path", "draft", "words", "chunks", "least"),
    [({}, False, 30, 12, 128), (SEED, False, 30, 12, 128), ({}, True, 20, 36, 48)],
    ids=["batch", "single", "draft"],
)
def test_what_was_read_of_a_prompt_is_kept(timed, path, draft, words, chunks, least):
    server, times = timed(draft)
    case = Case("", path, "chunk", chunks, words)
    begun = time.monotonic()
    asked = body(case, f"kept {begun}")
    with sent(server, asked) as sock:
        times.wait("chunk", begun, chunks)
        closed = leave(sock)
        times.wait("left over", closed)
    text = asked["messages"][0]["content"]
    again = chat(server, text, max_tokens=40, tools=TOOLS, **path)
    cached = again.usage["prompt_tokens_details"]["cached_tokens"]
    assert least <= cached < again.usage["prompt_tokens"] - 100  # it left before the end
    assert text.startswith(again.content) and len(again.content) > 100


@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_half_closes_is_gone(timed, path, streamed):
    server, times = timed()
    begun = time.monotonic()
    with sent(server, body(Case("", path | streamed), "half")) as sock:
        times.wait("step", begun, 4)
        closed = time.monotonic()
        sock.shutdown(socket.SHUT_WR)
        gone = times.wait("left over", closed)[0]["at"] - closed
        while data := sock.recv(65536):
            assert b"[DONE]" not in data
    assert gone < 0.25 + STEP + MORE
    times.wait("line", closed)
    assert left_lines(times, begun) == 1


@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("path", PATHS)
def test_bytes_after_a_request_are_the_next_one(timed, path, streamed):
    server, times = timed()
    first, second = (
        {"messages": [{"role": "user", "content": text}], **path, **streamed} for text in (WORDS * 3, "Hello")
    )
    begun = time.monotonic()
    with connect(server) as sock:
        sock.sendall(post_bytes(CHAT, first))
        times.wait("step", begun, 4)
        sock.sendall(post_bytes(CHAT, second, {"Connection": "close"}))
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.count(b"HTTP/1.1 200") == 2
    _, one, two = data.split(b"HTTP/1.1 200")
    assert b"until" in one and b"Hello" in two
    assert left_lines(times, begun) == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_sends_more_and_leaves_is_gone(timed, path):
    server, times = timed()
    begun = time.monotonic()
    asked = body(Case("", path), "more")
    with sent(server, asked) as sock:
        times.wait("step", begun, 4)
        sock.sendall(post_bytes(CHAT, asked))
        closed = leave(sock)
        gone = times.wait("left over", closed)[0]["at"] - closed
    assert gone < 0.25 + STEP + MORE
    assert len(times.notes("tokenized", begun)) == 1


def test_many_come_and_go_while_four_stay(serve, serve_private, tiny):
    times = Times()
    server = start(False, times, serve_private, step=STEP, chunk=0)
    quick = serve(tiny("scripted", tools="json_tools"))
    stay = [{"prompt": f"{n} {WORDS * (27 + n)}".strip(), "max_tokens": 2000} for n in range(4)]
    alone = [chat(quick, **each) for each in stay]
    assert [reply.content for reply in alone] == [each["prompt"] for each in stay]

    def come_and_go(n):
        dice = random.Random(n)
        # A seed that is taken up lets no more requests into the batch: only the last ones have one.
        case = Case("", (SEED if n > 170 and n % 5 == 0 else {}) | (STREAM if dice.random() < 0.5 else {}))
        asked = body(case._replace(words=dice.choice((1, 2, 30)), call=dice.random() < 0.3), f"guest {n}")
        with suppress(OSError), sent(server, asked) as sock:
            time.sleep(dice.choice((0, dice.uniform(0, 0.4))))
            if dice.random() < 0.3:
                sock.shutdown(socket.SHUT_WR)
        return time.monotonic()

    def reply_to(n):
        return (chat_stream if n % 2 else chat)(server, **stay[n], timeout=120), time.monotonic()

    with ThreadPoolExecutor(4) as hosts, ThreadPoolExecutor(16) as guests:
        begun = time.monotonic()
        replies = [hosts.submit(reply_to, n) for n in range(4)]
        times.wait("step", begun, 3)
        left = list(guests.map(come_and_go, range(200)))
        replies, ends = zip(*(each.result() for each in replies), strict=True)
    assert min(ends) > max(left), "the four were not there until the last guest left"
    for one, reply in zip(alone, replies, strict=True):
        assert (reply.content, reply.finish_reason) == (one.content, one.finish_reason)
        assert reply.usage["completion_tokens"] == one.usage["completion_tokens"]
    assert left_lines(times, begun) > 50
    assert "Traceback" not in server.log()
    assert chat(server, "Hello", **SEED).content == "Hello"  # it would wait for ever for a row that is not forgotten
    done = time.monotonic()
    time.sleep(0.3)
    assert times.notes("step chunk", done) == []


def test_the_row_of_a_client_that_never_read_its_context_is_forgotten():
    for cancelled, fault in ((True, None), (False, ValueError())):
        args = SimpleNamespace(cancelled=False, fault=None)
        queue, context = Replies(args), GenerationContext(False, False, None, None, None, [])
        queue.put(context)
        queue.put((1, 2))
        assert not context._should_stop
        args.cancelled, args.fault = cancelled, fault
        queue.put((2, 2))
        assert context._should_stop
        assert [queue.get() for _ in range(3)] == [context, (1, 2), (2, 2)]


def test_a_request_that_left_the_queue_ends_no_batch():
    class Queued:
        def _next_request(self, timeout=None):
            return waiting.pop(0) if waiting else None

    class Generator(LeavesEarly, Queued):
        pass

    gone, here = ((None, None, SimpleNamespace(cancelled=cancelled)) for cancelled in (True, False))
    waiting = [gone, gone, here, gone]
    assert Generator()._next_request(0.1) is here
    assert Generator()._next_request(0.1) is None


def test_mlx_lm_server_replies_to_nobody(serve_private):
    times = Times()
    server = start(False, times, serve_private, step=0.002, chunk=0, upstream=True)
    for path in ({}, SEED):
        begun = time.monotonic()
        with sent(server, body(Case("", path, words=30), "nobody") | {"max_tokens": 400}) as sock:
            times.wait("step", begun, 4)
            closed = leave(sock)
        steps = times.wait("step", begun, 400)
        assert closed < steps[200]["at"]
