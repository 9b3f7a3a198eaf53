"""Counters of batched caches: they grow without the cure and not with it, and replies are the same to the last bit.

The whole table, every family at 3,000 steps, is `python -m tests.leak_table`.
"""

import logging
import random
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache

from mlx_patches import cache_leak
from mlx_patches.prompt_cache import leaves
from tests.cache_families import FAMILIES, HOLDS, build
from tests.client import complete, together
from tests.leak_table import Traffic, cost, evaluate_counters, growth, measure, steps


@pytest.mark.parametrize("family", ["Qwen3.5", "Falcon-H1", "Mamba 1", "Cohere 2", "Llama"])
def test_nothing_grows_and_replies_are_the_same(family):
    """A chain gains about 2 operations a step; windows of these few steps differ by some 10 for what rows bring."""
    plain, cured = measure(family, 400), measure(family, 400, cache_leak.cut_counters)
    grown = growth(plain.nodes, max, cache_leak.EVERY)
    assert (grown > 1) == (FAMILIES[family][1] != HOLDS), grown
    assert abs(growth(cured.nodes, max, cache_leak.EVERY)) < 0.3
    assert plain.digests == cured.digests


@pytest.mark.parametrize("family", ["LFM2", "SmolLM3"])
def test_memory_does_not_grow(family):
    """Against a run that evaluates every counter: what the keys of uneven rows take is the same in all of them."""
    exact, plain, cured = (measure(family, 500, m) for m in (evaluate_counters, None, cache_leak.cut_counters))
    assert growth([a - b for a, b in zip(plain.memory, exact.memory, strict=True)], min) > 3, "bytes a step"
    assert abs(growth([a - b for a, b in zip(cured.memory, exact.memory, strict=True)], min)) < 1
    assert exact.digests == plain.digests == cured.digests


@pytest.mark.parametrize("family", ["Qwen3.5", "Falcon-H1", "Mamba 1", "Gemma 3"])
def test_the_identities_hold_in_every_step(family):
    """Of mlx_lm alone: what the cure takes for granted is so, whatever comes and goes."""
    traffic, seen = Traffic(build(family)), set()
    for _ in range(200):
        traffic.step()
        for cache in leaves(traffic.caches):
            if isinstance(cache, BatchKVCache):
                assert cache.offset.tolist() == (cache._idx - cache.left_padding).tolist()
                seen.add("uneven" if max(cache.left_padding.tolist()) else "even")
            elif isinstance(cache, ArraysCache):
                assert cache.lengths is None
                assert cache.left_padding is None or max(cache.left_padding.tolist()) <= 0
                seen.add("no counter" if cache.left_padding is None else "a counter")
    kinds = {type(cache) for cache in leaves(traffic.caches)}
    assert seen >= ({"no counter", "a counter"} if ArraysCache in kinds else set())
    assert seen >= ({"uneven", "even"} if BatchKVCache in kinds else set())
    assert traffic.events >= {"finished", "removed", "hit", "cold", "pair", "alone"}


NEW = {
    "KVCache": KVCache,
    "ArraysCache": lambda: ArraysCache(2),
    "CacheList": lambda: CacheList(ArraysCache(2), KVCache()),
}


class Twin:
    """A batch of one cache, changed as GenerationBatch and PromptProcessingBatch change theirs, from a seed."""

    def __init__(self, new, seed: int, wanted: bool):
        self._new, self._random, self._wanted = new, random.Random(seed), wanted
        self._stored = []
        self._cache = self._prompt(2)
        self.rows = 2

    def _forward(self, cache, rows: int, length: int) -> None:
        values = mx.array([[self._random.random() for _ in range(length)] for _ in range(rows)])
        for leaf in leaves([cache]):
            if isinstance(leaf, ArraysCache):
                old = leaf[0] if leaf[0] is not None else mx.zeros((rows, 1))
                mask = leaf.make_mask(length)
                leaf[0] = old + (values if mask is None else mx.where(mask, values, 0)).sum(axis=1, keepdims=True)
                leaf[1] = values[:, -1:]
                leaf.advance(length)
            else:
                leaf.update_and_fetch(values[:, None, :, None], values[:, None, :, None])

    def _prompt(self, rows: int):
        """New rows, some of them from a stored cache, after a prompt of uneven or even lengths."""
        starts = [self._random.choice([None, *self._stored]) for _ in range(rows)]
        batch = self._new().merge([start if start is not None else self._new() for start in starts])
        lengths = [self._random.choice([1, 2, 5]) for _ in range(rows)]
        padding = [max(lengths) - length for length in lengths]
        if max(padding) > 0:
            batch.prepare(lengths=lengths, right_padding=padding)
        self._forward(batch, rows, max(lengths))
        if max(padding) > 0:
            batch.finalize()
        mx.eval(batch.state[:1])
        return batch

    def change(self) -> None:
        act = self._random.choice(["decode", "decode", "decode", "add", "remove", "finish"])
        if act == "add" and self.rows < 5:
            rows = self._random.choice([1, 2])
            self._cache.extend(self._prompt(rows))
            self.rows += rows
        elif act in ("remove", "finish") and self.rows > 1:
            row = self._random.randrange(self.rows)
            if act == "finish":
                self._stored.append(self._cache.extract(row))
            self._cache.filter([i for i in range(self.rows) if i != row])
            self.rows -= 1
        else:
            self._forward(self._cache, self.rows, 1)
        if self._wanted:
            cache_leak.cut([self._cache])

    def reads(self) -> list:
        """All that a model can read of it before its next token, and what a row that ends now would store."""
        read = []
        for leaf in leaves([self._cache]):
            if isinstance(leaf, ArraysCache):
                mask = leaf.make_mask(1)
                read += [mask if mask is None else mask.tolist(), leaf.lengths, [a.tolist() for a in leaf.cache]]
                read += [[a.tolist() for a in leaf.extract(0).cache], leaf.batch_size]
            else:
                read += [a.tolist() for a in (*leaf.keys_and_values(), leaf.offset, leaf.left_padding)]
                read += [leaf.make_mask(1).tolist(), leaf.extract(0).offset, leaf._idx]
        return read


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", NEW)
def test_a_cut_changes_nothing_that_is_read(kind, seed):
    plain, cured = (Twin(NEW[kind], seed, wanted) for wanted in (False, True))
    for _ in range(40):
        plain.change()
        cured.change()
        assert plain.rows == cured.rows and plain.reads() == cured.reads()


def test_lengths_that_ran_out_are_left_alone():
    """A mask from them is all false, one without them all true: clearing them would not be the same."""
    cache = ArraysCache(1)
    cache.lengths = mx.array([0, -3])
    cache_leak.cut([cache])
    assert cache.make_mask(1).tolist() == [[False], [False]]


def test_the_cost_is_small():
    """64 layers: some 30 µs a step; evaluating every counter instead takes ten times that. A loaded machine: 200."""
    shim, evaluated = cost()
    assert shim < 200 and shim < evaluated


class Loop:
    """Stands where mlx_lm's ResponseGenerator does."""

    entered = 0

    def _run_generate(self):
        self.entered += 1


class Checked(cache_leak.CutsCounters, Loop):
    pass


@pytest.fixture
def upstream_step():
    """mlx_lm's step, put back after the test."""
    with steps():
        yield GenerationBatch._step


def test_the_check_finds_the_leak_in_a_moment(upstream_step, caplog):
    caplog.set_level(logging.INFO)
    began = time.perf_counter()
    assert cache_leak.leaks()
    assert time.perf_counter() - began < 0.5, "seconds; 3 ms where nothing else runs"
    checked = Checked()
    checked._run_generate()
    assert checked.entered == 1 and GenerationBatch._step is not upstream_step
    assert caplog.messages == ["mlx-lm's cache counters grow with every step: they are cut every 32 steps"]


def test_the_cure_is_left_out_where_mlx_lm_has_its_own(upstream_step, caplog):
    caplog.set_level(logging.INFO)
    step = evaluate_counters(upstream_step)
    GenerationBatch._step = step
    checked = Checked()
    checked._run_generate()
    assert checked.entered == 1 and GenerationBatch._step is step
    assert caplog.messages == ["mlx-lm's cache counters do not grow: mlx_patches/cache_leak.py is not needed"]


def test_a_check_that_fails_ends_nothing(upstream_step, caplog, monkeypatch):
    monkeypatch.delattr(cache_leak.Unread, "make_cache")
    checked = Checked()
    checked._run_generate()
    assert checked.entered == 1 and GenerationBatch._step is not upstream_step
    assert caplog.messages == ["The check of cache counters failed; they are cut all the same"]


def test_the_server_says_so_and_replies_as_mlx_lm_does(serve, tiny):
    """More steps than one cut apart, in a batch of three."""
    asks = [{"prompt": "Hello" + " again" * n, "max_tokens": 70, "temperature": 0} for n in (0, 3, 9)]
    folder = tiny("hybrid")
    ours, theirs = serve(folder), serve(folder, module="mlx_lm.server")
    assert "they are cut every 32 steps" in ours.log()
    alone = [complete(theirs, ask["prompt"], max_tokens=70, temperature=0).content for ask in asks]
    assert [complete(ours, ask["prompt"], max_tokens=70, temperature=0).content for ask in asks] == alone
    assert all(reply.status == 200 for reply in together(ours, asks))


def test_the_page_has_every_family():
    """Its table is what `python -m tests.leak_table` printed, and says what FAMILIES says."""
    page = (Path(__file__).parent.parent / "docs" / "cache_leak.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    assert [row[0] for row in rows[2:]] == list(FAMILIES)
    for name, before, after, _, memory, replies in rows[2:]:
        assert (float(before) > 1) == (FAMILIES[name][1] != HOLDS)
        assert (float(after), float(memory), replies) == (0, 0, "the same")
