"""The prompt cache: what is stored is what its key says, a prompt leaves a token to compute, bytes are bytes held, and
an agent's conversation pays for its new tokens only. Replies are those of a server that caches nothing."""

import argparse
import gc
import itertools
import time

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, LRUPromptCache, RotatingKVCache, make_prompt_cache
from tokenizers import Tokenizer

from mlx_patches.prompt_cache import PromptCache, byte_limit, common_prefix, lengths, parting
from tests.cache_table import KINDS, STYLE, ask, cached, opening, shared, tool_round, turns
from tests.client import chat, chat_stream, complete, connect, get, post, post_bytes, together

COLD = ("--prompt-cache-size", 0)
PATHS = {"batched": {}, "single": {"seed": 1}}


def flags(size=10, limit=None) -> argparse.Namespace:
    return argparse.Namespace(prompt_cache_size=size, prompt_cache_bytes=limit)


@pytest.mark.parametrize("a, b, n", [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1)])
def test_common_prefix(a, b, n):
    assert common_prefix(a, b) == common_prefix(b, a) == n


@pytest.mark.parametrize(
    "asked, device, limit",
    [
        (1000, {"max_recommended_working_set_size": 80}, 1000),
        (0, {}, 0),
        (None, {"max_recommended_working_set_size": 80}, 20),
        (None, {}, 1 << 63),
    ],
)
def test_the_limit_is_the_flag_or_a_quarter_of_what_is_known(asked, device, limit):
    assert byte_limit(asked, device) == limit


def test_where_a_prompt_parts_from_a_stored_one():
    text = "".join
    assert parting([1, 2, 3], 3, [1, 2, 3], str) == "the prompt's first 3 of 3 tokens are a stored prompt"
    said = parting([1, 2, 3, 4], 2, [1, 2, -7, 9], lambda ids: text(map(str, ids)))
    assert said == "the prompt parts from the nearest stored one at token 2 of 4: after '12' comes '34', stored is '9'"


# Caches whose contents tell which tokens they have read.

HOLD = {
    "plain": lambda: [KVCache(), KVCache()],
    "lists": lambda: [CacheList(KVCache(), KVCache()), KVCache()],
    "window": lambda: [KVCache(), RotatingKVCache(6)],
    "hybrid": lambda: [ArraysCache(1), KVCache()],
    "nested": lambda: [CacheList(ArraysCache(1), KVCache()), ArraysCache(1)],
    "recurrent": lambda: [ArraysCache(1), ArraysCache(1)],
}


def leaves(caches):
    return [leaf for cache in caches for leaf in (leaves(cache.caches) if isinstance(cache, CacheList) else [cache])]


def digest(tokens, start=7):
    for token in tokens:
        start = (start * 31 + token + 1) % 1000003
    return start


def read(caches, tokens):
    for leaf in leaves(caches):
        if isinstance(leaf, ArraysCache):
            before = 7 if leaf[0] is None else int(leaf[0].item())
            leaf[0] = mx.array([digest(tokens, before)])
        else:
            for token in tokens:
                leaf.update_and_fetch(*(mx.full((1, 1, 1, 1), token, mx.float32),) * 2)


def holds(caches, tokens) -> bool:
    for leaf in leaves(caches):
        if isinstance(leaf, ArraysCache):
            if int(leaf[0].item()) != digest(tokens):
                return False
        else:
            kept = leaf.keys[..., : leaf.offset, :] if leaf.offset < leaf.keys.shape[2] else leaf.keys
            if isinstance(leaf, RotatingKVCache):
                kept = leaf._temporal_order(leaf.keys)
            found = kept[0, 0, :, 0].tolist()
            if leaf.offset != len(tokens) or found != tokens[-len(found) :]:
                return False
    return True


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", HOLD)
@settings(max_examples=40)
@given(stored=st.lists(st.tuples(prompts, st.integers(0, 2)), max_size=6), asked=st.lists(prompts, max_size=4))
def test_what_is_handed_out_is_what_the_prompt_begins_with(kind, stored, asked):
    """`stored`: prompts, and how many tokens of their keys the caches have not read (as with a draft, or a cancel)."""
    cache, true = PromptCache(flags(size=100)), []
    for key, unread in stored:
        cache.fetch_nearest_cache("m", key)  # the request that reads it
        caches, tokens = HOLD[kind](), key[: max(1, len(key) - unread)]
        read(caches, tokens)
        reply = [] if unread else [2]  # a request that ended early has no token of a reply
        if not unread:
            read(caches, reply)
        cache.insert_cache("m", key + reply, caches)
        if kind != "recurrent" or not unread:
            true.append(tokens + reply)
    for prompt in asked + [key for key, _ in stored]:
        found, rest = cache.fetch_nearest_cache("m", prompt)
        assert rest and prompt[len(prompt) - len(rest) :] == rest
        begun = prompt[: len(prompt) - len(rest)]
        if found is None:
            assert begun == []
        else:
            assert holds(found, begun)
        whole = [len(key) for key in true if key == prompt[: len(key)] and len(key) < len(prompt)]
        part = [min(common_prefix(key, prompt), len(prompt) - 1) for key in true] if kind in ("plain", "lists") else []
        assert len(begun) >= max([0, *whole, *part])
        assert cache.fetch_nearest_cache("other", prompt) == (None, prompt)


def test_a_draft_that_lags_shortens_the_entry():
    cache, (main, draft) = PromptCache(flags()), ([KVCache()], [KVCache()])
    read(main, [1, 2, 3, 4])
    read(draft, [1, 2, 3])
    cache.insert_cache("m", [1, 2, 3, 4, 5], main + draft)
    found, rest = cache.fetch_nearest_cache("m", [1, 2, 3, 4, 5])
    assert lengths(found) == {3} and rest == [4, 5]


def test_caches_that_disagree_and_cannot_be_cut_are_left_out():
    cache, caches = PromptCache(flags()), [ArraysCache(1), KVCache()]
    read(caches, [1, 2, 3, 4])
    cache.insert_cache("m", [1, 2, 3], caches)  # one token more than the key
    assert len(cache) == 0 and cache.nbytes == 0


def test_an_entry_larger_than_the_limit_evicts_nothing():
    cache = PromptCache(flags(limit=100))
    for n in (4, 5, 50):
        caches = [KVCache()]
        read(caches, [n] * n)
        cache.insert_cache("m", [n] * n, caches)
    assert (len(cache), cache.nbytes) == (2, 8 * 9)
    assert cache.fetch_nearest_cache("m", [50] * 51) == (None, [50] * 51)


def test_a_long_stored_prompt_is_searched_fast():
    """The new prompt parts from it early, as a conversation of another kind does."""
    seconds = []
    for cache in (PromptCache(flags()), LRUPromptCache(10)):
        caches = [KVCache()]
        caches[0].update_and_fetch(mx.zeros((1, 1, 10000, 1)), mx.zeros((1, 1, 10000, 1)))
        cache.insert_cache("m", list(range(10000)), caches)
        begun = time.perf_counter()
        found, rest = cache.fetch_nearest_cache("m", [0, 1, 2, -1, -2])
        seconds.append(time.perf_counter() - begun)
        assert lengths(found) == {3} and rest == [-1, -2]
    assert seconds[0] * 5 < seconds[1]


# Bytes


def finish_in_one_batch(model, tokenizer, store):
    generator = BatchGenerator(model, completion_batch_size=8, prefill_batch_size=8)
    generator.insert([[5 + n] * (40 + 10 * n) for n in range(8)], max_tokens=[8] * 8)
    left = 8
    while left:
        for response in generator.next()[1]:
            if response.finish_reason is not None:
                store(response.all_tokens[:], response.prompt_cache)
                left -= 1
    generator.close()


def finish_one_by_one(model, tokenizer, store):
    for n in range(8):
        caches, key = make_prompt_cache(model), [5 + n] * (40 + 10 * n)
        for response in stream_generate(model, tokenizer, list(key), max_tokens=8, prompt_cache=caches):
            key.append(response.token)
        store(key, caches)


@pytest.fixture
def exact_memory():
    """mlx takes memory as asked for: its pool may hand out a freed buffer that is larger."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finish", [finish_in_one_batch, finish_one_by_one])
def test_bytes_are_bytes_held(tiny, exact_memory, kind, finish):
    model, tokenizer = load(str(tiny(kind)))
    finish(model, tokenizer, lambda key, caches: None)  # what a first run makes once

    def measure(cache):
        gc.collect()
        before = mx.get_active_memory()
        finish(model, tokenizer, lambda key, caches: cache.insert_cache("m", key, caches))
        gc.collect()
        return cache.nbytes, mx.get_active_memory() - before

    counted, held = measure(PromptCache(flags()))
    assert held <= counted + 1024
    _, held = measure(PromptCache(flags(limit=100_000)))
    assert 20_000 < held <= 100_000 + 1024
    _, upstream = measure(LRUPromptCache(10))
    assert upstream > 1.8 * counted


@pytest.mark.parametrize("body", PATHS.values(), ids=PATHS)
def test_the_limit_holds_on_both_paths(serve, tiny, body):
    """Eight requests at once, then one whose log line counts what is left: a prompt takes some 512 bytes a token."""
    model, limit = tiny("llama"), ("--prompt-cache-bytes", 100_000)

    def sequences(server):
        said = "The model reads the prompt once and then writes one token at a time. " * 4
        together(server, [{"prompt": f"{n} {said}", "max_tokens": 8, **body} for n in range(8)])
        chat(server, "Hello", max_tokens=1, **body)
        counts = [line for line in server.log().splitlines() if "Prompt Cache: " in line]
        return int(counts[-1].split("Prompt Cache: ")[1].split()[0])

    assert 1 <= sequences(serve(model, *limit)) <= 2
    if body:
        assert sequences(serve(model, *limit, module="mlx_lm.server")) >= 7


# A prompt that is wholly in the cache


def continuation(server, folder, **body) -> str:
    """A prompt whose tokens are those of an earlier request and its reply."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for word in ("weather", "time", "list", "city", "answer", "hello", "prompt"):
        prompt = f"The model reads the prompt and then the {word}"
        reply = complete(server, prompt, max_tokens=3, temperature=0, logprobs=1, **body)
        said = reply.logprobs["tokens"]
        begun, whole = (tokenizer.encode(text).ids for text in (prompt, prompt + "".join(said)))
        if len(said) == 3 and [tokenizer.decode([token]) for token in whole[len(begun) :]] == said:
            return prompt + "".join(said)
    raise AssertionError("no reply reads as the tokens that made it")


@pytest.mark.parametrize("body", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_continuing_with_no_new_text(serve, tiny, kind, body):
    folder = tiny(kind)
    server, cold = serve(folder), serve(folder, *COLD)
    prompt = continuation(server, folder, **body)
    for _ in range(2):
        reply, expected = (complete(it, prompt, max_tokens=9, temperature=0, **body) for it in (server, cold))
        assert (reply.status, reply.content) == (200, expected.content)
        if kind != "hybrid":
            assert cached(reply) == reply.usage["prompt_tokens"] - 1
    assert complete(server, "Hello", max_tokens=2).status == 200


def test_upstream_dies_of_a_continuation(serve, serve_private, tiny):
    folder = tiny("llama")
    prompt = continuation(serve(folder), folder)
    server = serve_private(folder, module="mlx_lm.server")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.decode(tokenizer.encode(prompt).ids[:-3])
    assert complete(server, first, max_tokens=3, temperature=0).status == 200
    with pytest.raises(ConnectionError):
        complete(server, prompt, max_tokens=2, timeout=30)
    assert get(server, "/health").status == 503


# An agent's conversation


@pytest.mark.parametrize("body", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reuses_all_of_the_turn_before(serve, serve_private, tiny, kind, body):
    """Eight tool rounds; between them a request of the same conversation that its client leaves, and one that fails."""
    folder = tiny(kind, style=STYLE)
    server, cold = serve_private(folder), serve(folder, *COLD)
    for n, (messages, before) in enumerate(zip(turns(), shared(folder), strict=True)):
        reply, expected = ask(server, messages, **body), ask(cold, messages, **body)
        assert (reply.content, reply.reasoning) == (expected.content, expected.reasoning)
        assert cached(reply) == before
        if n == 3:
            with connect(server) as sock:
                sock.sendall(post_bytes("/v1/chat/completions", {"messages": messages, "max_tokens": 4000, **body}))
                time.sleep(0.1)
            broken = [*messages, {"role": "assistant", "content": "", "tool_calls": [{}]}]
            assert ask(server, broken, **body).status in (400, 500)


def test_upstream_reads_a_tool_conversation_again(serve, tiny):
    folder = tiny("hybrid", style=STYLE)
    found = [cached(ask(serve(folder, module="mlx_lm.server"), messages)) for messages in turns(5)]
    assert found[2:] == [shared(folder)[1]] * 3


def test_the_system_messages_are_shared_between_conversations(serve_private, tiny):
    server = serve_private(tiny("hybrid"))
    system = [{"role": "system", "content": f"Rule {n}: answer in plain words."} for n in range(3)]
    first, second = (
        chat(server, [*system, {"role": "user", "content": said}], max_tokens=2) for said in ("Hello", "Why?")
    )
    assert cached(first) == 0 and cached(second) >= 30
    asked = [*system[:1], {"role": "user", "content": "Hello"}, *system[1:]]
    assert chat(server, asked, max_tokens=2).status == 200
    again = chat(server, [*asked, {"role": "user", "content": "Why?"}], max_tokens=2)
    assert cached(again) >= 30


@pytest.mark.parametrize("kind", ["hybrid", "llama"])
def test_a_template_that_refuses_the_second_rendering(serve, tiny, kind):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ header }}{% elif messages[-1].role == 'tool' %}"
        "{{ raise_exception('a prompt without its end') }}{% endif %}"
    )
    server = serve(tiny(kind, template=template), "--log-level", "DEBUG")
    before = server.log().count("no end of the turn to store")
    replies = [ask(server, [*opening(), *tool_round(1)], **body) for body in PATHS.values()]
    assert [reply.status for reply in replies] == [200, 200]
    assert server.log().count("no end of the turn to store") - before == (2 if kind == "hybrid" else 0)


def test_the_log_says_where_a_prompt_parts(serve_private, tiny):
    server = serve_private(tiny("llama"), "--log-level", "DEBUG")
    complete(server, "The model reads the prompt once and then it stops.", max_tokens=1)
    complete(server, "The model reads the answer once and then it stops.", max_tokens=1)
    (line,) = [line for line in server.log().splitlines() if "the prompt parts" in line]
    assert "after 'The model reads the' comes ' answer once" in line and "stored is ' prompt once" in line


# What ends early


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_prompt_that_is_left_half_read_keeps_what_was_read(serve_private, serve, tiny, kind):
    """The single path: a client leaves while its prompt of some 1,000 tokens is read in steps of 8."""
    model, cold = tiny(kind), serve(tiny(kind), *COLD)
    server = serve_private(model, "--prefill-step-size", 8)
    for n, seconds in enumerate((0.3, 0.15, 0.6, 0.08, 1.2)):
        said = f"{n} " + " ".join(f"the model reads line {i} of the prompt" for i in range(100))
        with connect(server) as sock:
            sock.sendall(post_bytes("/v1/completions", {"prompt": said, "seed": 1, "max_tokens": 4}))
            time.sleep(seconds)
        reply = complete(server, said, seed=1, max_tokens=8, temperature=0)
        assert reply.content == complete(cold, said, seed=1, max_tokens=8, temperature=0).content
        if 0 < cached(reply) < reply.usage["prompt_tokens"] - 1:
            return
    raise AssertionError("no prompt was left half read")


@pytest.mark.parametrize("ending", [{"max_tokens": 9}, {"stop": ["time"]}], ids=["max_tokens", "stop"])
@pytest.mark.parametrize("draft", [{}, {"wrong_every": 3}, {"wrong_at": [0, 1, 5]}], ids=["right", "third", "some"])
def test_a_draft_with_the_prompt_cache_says_the_same_each_time(serve, tiny, draft, ending):
    said = "The model reads the prompt once and then writes one token at a time until it says that it is done."
    server = serve(tiny("scripted"), "--draft-model", tiny("scripted", **draft))
    expected = chat(serve(tiny("scripted"), *COLD), said, **ending).content
    replies = [call(server, said, **ending) for call in (chat, chat_stream) * 2]
    assert [reply.content for reply in replies] == [expected] * 4
    assert all(cached(reply) > 0 for reply in replies[1:])
    turn = [{"role": "user", "content": said}, {"role": "assistant", "content": expected}]
    longer = chat(server, [*turn, {"role": "user", "content": "Hello world, hello again"}])
    assert longer.content == "Hello world, hello again"


def test_upstream_forgets_tokens_with_a_draft(serve, tiny):
    server = serve(tiny("scripted"), "--draft-model", tiny("scripted", wrong_every=3), module="mlx_lm.server")
    said = "The model reads the prompt once and then writes one token at a time until it says that it is done."
    replies = {chat(server, said, max_tokens=9).content for _ in itertools.repeat(None, 4)}
    assert len(replies) > 1


def test_a_failed_request_leaves_the_cache_alone(serve, tiny):
    server = serve(tiny("llama"))
    assert post(server, "/v1/completions", {"prompt": [1, "a"]}).status == 400
    assert complete(server, "Hello", max_tokens=2).status == 200
