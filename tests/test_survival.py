"""Faults of one request and of the whole batch, raised inside a real server (tests/site/faulty_server.py)."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.client import chat, chat_stream, get

TEXT = "the model reads the prompt once and then writes one token at a time until it says that it is done " * 50
OWN = ["sampler", "processor", "make_sampler", "make_processors", "tokenizer"]
BODY = {"max_tokens": 1500, "temperature": 1, "top_k": 1, "presence_penalty": 1e-9}  # has a sampler and a processor


@pytest.fixture
def faults(serve_private, tiny, tmp_path):
    """(server, arm): `arm(name, calls)` makes that part raise once, after so many calls."""
    server = serve_private(tiny("scripted"), module="faulty_server", env={"FAULTS": str(tmp_path)})
    return server, lambda name, calls=0: (tmp_path / name).write_text(str(calls))


def start(pool, server, count, **body):
    """`count` running replies, of which each has begun."""
    running = [pool.submit((chat_stream, chat)[n % 2], server, TEXT, **BODY, **body) for n in range(count)]
    time.sleep(0.8)
    return running


@pytest.mark.parametrize("single", [{}, {"seed": 3}], ids=["batch", "single"])
def test_a_fault_of_one_request_is_its_own(faults, single):
    server, arm = faults
    with ThreadPoolExecutor() as pool:
        for name in OWN:
            running = start(pool, server, 3)
            arm(name, 5 if name in ("sampler", "processor") else 0)
            running.append(pool.submit(chat, server, TEXT, **BODY, **single))
            replies = [each.result() for each in running]
            failed = [reply for reply in replies if reply.error is not None]
            assert len(failed) == 1, name
            assert failed[0].error["type"] == "server_error"
            assert "armed fault" not in str(failed[0].error)
            assert failed[0].status in (200, 500)  # 200: its stream had begun
            assert all(reply.content == TEXT for reply in replies if reply.error is None), name
    assert chat(server, "Hello").content == "Hello"
    assert get(server, "/health").status == 200


@pytest.mark.parametrize("single", [{}, {"seed": 3}], ids=["batch", "single"])
def test_a_fault_while_a_prompt_is_read_is_that_prompts(faults, single):
    server, arm = faults
    with ThreadPoolExecutor() as pool:
        running = start(pool, server, 3)
        arm("prefill")
        assert chat(server, "Another prompt. " * 9, **BODY, **single).status == 500
        assert [each.result().content for each in running] == [TEXT] * 3
        assert chat(server, "Hello").content == "Hello"


def test_a_row_that_failed_leaves_nothing_behind_that_a_drain_would_wait_for(faults):
    server, arm = faults
    arm("prefill")
    assert chat(server, "One more prompt. " * 9, **BODY).status == 500
    assert chat(server, "Hello", seed=1, timeout=20).content == "Hello"


def test_the_generation_thread_comes_back(faults):
    server, arm = faults
    with ThreadPoolExecutor() as pool:
        running = start(pool, server, 4)
        arm("decode")
        armed = time.monotonic()
        replies = [each.result() for each in running]
        assert time.monotonic() - armed < 3  # a second, and room for a busy machine
        assert [reply.error["type"] for reply in replies] == ["server_error"] * 4
        assert {reply.status for reply in replies} == {200, 500}
        assert chat(server, "Hello").content == "Hello"
        assert time.monotonic() - armed < 5
        assert get(server, "/health").body == {"status": "ok"}
        assert server.alive
        arm("decode")
        assert chat(server, TEXT, seed=3).status == 500  # one request's alone
        assert chat(server, "Hello").content == "Hello"


def test_the_fourth_death_ends_the_process(faults):
    server, arm = faults
    with ThreadPoolExecutor() as pool:
        for death in range(4):
            running = start(pool, server, 2)
            arm("decode")
            assert [each.result().error is not None for each in running] == [True, True], death
    assert server.process.wait(10) == 70
    assert server.log().splitlines()[-1].startswith("the generation thread died 4 times: RuntimeError: armed fault")


def test_more_requests_than_may_wait_are_told_to_come_back(serve_private, tiny):
    server = serve_private(tiny("scripted"), "--max-queue", 2)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(chat, server, TEXT, max_tokens=1500, seed=1)
        time.sleep(0.3)
        waiting = [pool.submit(chat, server, "Hello", seed=n) for n in range(2)]
        time.sleep(0.2)
        for ask in (chat, chat_stream):
            refused = ask(server, "Hello")
            assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["Retry-After"]) > 0
        assert running.result().content == TEXT
        assert [each.result().content for each in waiting] == ["Hello"] * 2
    assert chat(server, "Hello").content == "Hello"


def test_mlx_lm_server_dies_of_one_fault(serve_private, tiny, tmp_path):
    env = {"FAULTS": str(tmp_path), "UPSTREAM": "1"}
    server = serve_private(tiny("scripted"), module="faulty_server", env=env)
    (tmp_path / "processor").write_text("5")
    with pytest.raises(ConnectionError):  # no status, no headers
        chat(server, TEXT, **BODY)
    assert chat(server, "Hello").status != 200  # and so for ever
    assert server.alive
