"""Counters of batched caches that nothing reads: their chain of operations is cut every 32 steps.

Replaces   generate.GenerationBatch._step, unless the self-check finds that it does not leak (CutsCounters, before the
           model is loaded)
Why        a step evaluates tokens and log-probabilities, not the caches' counters; one that no mask and no position
           reads grows by two operations and a live buffer a step for as long as the batch has a row, and Metal ends
           the process's generation at 499,000 buffers (ml-explore/mlx-lm #1332, #1641, #1672, #1845)
Upstream   models/cache.py ArraysCache.advance, BatchKVCache.update_and_fetch; generate.py GenerationBatch._step
Delete when the log says that this mlx-lm does not leak
Test       tests/test_cache_leak.py

Every counter is put anew from what is known without evaluating anything; two identities make that exact.
ArraysCache.left_padding of a batch that decodes is None or <= 0: it starts as 0 (merge), only sinks (advance), takes
zeros or such a counter in (extend), and is read as `position >= left_padding` alone, so zeros say the same. It becomes
zeros and not None, because several models choose another kernel where there is no mask. `lengths` is left alone: it
is None once a prompt is read (finalize), and a mask from it would not be the same. BatchKVCache keeps
`offset == _idx - left_padding`: whatever changes one of the three changes another by as much. Rotating caches tie
their counters to the keys (mx.depends) and need nothing.
"""

import contextlib
import io
import logging

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from mlx_patches import seams
from mlx_patches.prompt_cache import leaves

EVERY = 32
"""Steps between two cuts: what has grown by then is small, and a cut costs one operation a cache."""


def cut(caches) -> None:
    """Put the counters of a decoding batch anew, with the values they have and without their history."""
    for cache in leaves(caches):
        if isinstance(cache, BatchKVCache):
            cache.offset = cache._idx - cache.left_padding
        elif isinstance(cache, ArraysCache) and cache.left_padding is not None:
            cache.left_padding = mx.zeros_like(cache.left_padding)


def cut_counters(upstream):
    """The step of a batch, with a cut ahead of every 32nd."""

    def step(batch):
        # Counted by the batch: rows that join make their first step in one of their own.
        batch.steps_since_cut = getattr(batch, "steps_since_cut", 0) + 1
        if batch.steps_since_cut == EVERY:
            batch.steps_since_cut = 0
            cut(batch.prompt_cache)
        return upstream(batch)

    return step


class Unread:
    """A model whose forward pass advances one counter of either kind and reads neither."""

    def make_cache(self) -> list:
        return [ArraysCache(1), KVCache()]

    def __call__(self, tokens: mx.array, cache: list) -> mx.array:
        rows, length = tokens.shape
        cache[0][0] = mx.zeros((rows, 1))
        cache[0].advance(length)
        cache[1].update_and_fetch(*[mx.zeros((rows, 1, length, 1))] * 2)
        return mx.zeros((rows, length, 2))


def counter_nodes(caches) -> int:
    """Operations that are not evaluated and that the counters of these caches keep alive."""
    names = "left_padding", "lengths", "offset"
    counters = [getattr(cache, name, None) for cache in leaves(caches) for name in names]
    graph = io.StringIO()
    mx.export_to_dot(graph, *(counter for counter in counters if isinstance(counter, mx.array)))
    return graph.getvalue().count("shape=rectangle")


def leaks() -> bool:
    """Whether unread counters grow with each step of the BatchGenerator that is installed: some milliseconds."""
    counts = []
    stream = mx.default_stream(mx.Device(mx.cpu))
    with contextlib.closing(BatchGenerator(Unread(), stream=stream)) as batches:
        batches.insert([[0]])
        for _ in range(6):
            batches.next()
            counts.append(counter_nodes(batches._generation_batch.prompt_cache))
    return counts[-1] > counts[-2] > counts[-3]


class CutsCounters:
    """Mixin for ResponseGenerator: before anything is loaded, find out whether the cure is needed."""

    def _run_generate(self):
        try:
            needed = leaks()
        except Exception:
            logging.warning("The check of cache counters failed; they are cut all the same", exc_info=True)
            needed = True
        if needed:
            seams.replace("generate.GenerationBatch._step", cut_counters)
            logging.info("mlx-lm's cache counters grow with every step: they are cut every %d steps", EVERY)
        else:
            logging.info("mlx-lm's cache counters do not grow: mlx_patches/cache_leak.py is not needed")
        super()._run_generate()
