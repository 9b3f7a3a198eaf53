"""The counter leak of each family of caches, with the cure and without: `python -m tests.leak_table` prints the table.

    python -m tests.leak_table                    # every family, 3,000 steps: some 20 minutes
    python -m tests.leak_table --steps 600 Jamba  # fewer

Each family's tiny random model decodes the same traffic twice through the real BatchGenerator. Growth is what the
counters' graph (operations not yet evaluated) and the active memory beyond the caches' own keys, values and states gain
a step from the second quarter of the run to its last one; the tokens and log-probabilities of both runs are compared
bit by bit.
"""

import argparse
import contextlib
import copy
import hashlib
import time
from itertools import cycle
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from mlx_patches import cache_leak, seams
from tests.cache_families import FAMILIES, VOCAB, build


def evaluate_counters(upstream):
    """The step of a batch that evaluates all there is in its caches: no chain, at a price."""

    def step(batch):
        found = upstream(batch)
        mx.eval([cache.state for cache in batch.prompt_cache])
        return found

    return step


@contextlib.contextmanager
def steps(make=None):
    """mlx_lm with `make(its step)` in the place of its step, for as long as the block runs."""
    upstream = GenerationBatch._step
    if make is not None:
        seams.replace("generate.GenerationBatch._step", make)
    try:
        yield
    finally:
        GenerationBatch._step = upstream


@contextlib.contextmanager
def exact_memory():
    """Buffers that are free are not kept, so none is taken again for less than it holds."""
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)


class Traffic:
    """A busy server's batch: 2 to 4 rows of uneven lengths that come and go in every way, and never all are gone.

    Rows join alone, or in pairs whose prompts are padded; every third goes on from the stored cache of the first one
    that finished; every fifth is taken away after 6 tokens, as a client that is gone; the others reach their length.
    """

    def __init__(self, model, rows: int = 4):
        self._generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=2)
        self._rows = rows
        self._prompts, self._replies, self._groups = cycle([3, 9, 1, 14, 6]), cycle([23, 40, 17, 31]), cycle([2, 1, 2])
        self._group = next(self._groups)
        self._joined, self._running, self._leaving = 0, set(), {}
        self._kept = None
        self.events = set()

    @property
    def caches(self) -> list:
        return self._generator._generation_batch.prompt_cache

    def step(self) -> list:
        """The responses of one step. Raises AssertionError if the batch ran empty after it had rows."""
        while self._rows - len(self._running) >= self._group:
            self._join(self._group)
            self._group = next(self._groups)
        had_rows = len(self._generator._generation_batch) > 0
        _, responses = self._generator.next()
        for response in responses:
            self._leaving[response.uid] = self._leaving.get(response.uid, 0) - 1
            if response.finish_reason:
                self.events.add("finished")
                self._running.discard(response.uid)
                if self._kept is None:
                    self._kept = copy.deepcopy(response.prompt_cache), list(response.all_tokens)
            elif self._leaving[response.uid] == 0:
                self.events.add("removed")
                self._generator.remove([response.uid])
                self._running.discard(response.uid)
        assert len(self._generator._generation_batch) > 0 or not had_rows
        return responses

    def _join(self, count: int) -> None:
        prompts, lengths, caches, read = [], [], [], []
        for _ in range(count):
            number, length = self._joined, next(self._prompts)
            self._joined += 1
            prompts.append([(7 * number + 3 * i) % VOCAB for i in range(length)])
            lengths.append(next(self._replies))
            hit = self._kept if number % 3 == 2 else None
            caches.append(copy.deepcopy(hit[0]) if hit else None)
            read.append(list(hit[1]) if hit else [])
            self.events.add("hit" if hit else "cold")
        self.events.add("pair" if count > 1 else "alone")
        for uid in self._generator.insert(prompts, lengths, caches, read):
            self._running.add(uid)
            self._leaving[uid] = 6 if uid % 5 == 4 else 0


class Run(NamedTuple):
    """`nodes`: operations that the counters keep, every 32 steps. `memory`: bytes that are active beyond the caches'
    own, at each step. `digests`: one a step, of all it answered."""

    nodes: list[int]
    memory: list[int]
    digests: list[bytes]


def measure(name: str, count: int, make=None) -> Run:
    """`count` steps of a family. Raises AssertionError where a log-probability is not a number."""
    run = Run([], [], [])
    with steps(make), exact_memory():
        traffic = Traffic(build(name))
        for step in range(1, count + 1):
            digest = hashlib.sha256()
            for response in traffic.step():
                row = np.array(response.logprobs)
                assert np.isfinite(row).all(), f"{name}: step {step}"
                digest.update(np.array([response.uid, response.token]).tobytes() + row.tobytes())
            run.digests.append(digest.digest())
            mx.synchronize(mx.default_stream(mx.default_device()))
            run.memory.append(mx.get_active_memory() - sum(cache.nbytes for cache in traffic.caches))
            if step % cache_leak.EVERY == 0:
                run.nodes.append(cache_leak.counter_nodes(traffic.caches))
    return run


def growth(samples: list[int], edge, every: int = 1) -> float:
    """Growth a step between the second quarter's largest or smallest (`edge`) and the last quarter's."""
    quarter = len(samples) // 4
    return (edge(samples[3 * quarter : 4 * quarter]) - edge(samples[quarter : 2 * quarter])) / (2 * quarter * every)


def cost(layers: int = 64, rows: int = 8) -> tuple[float, float]:
    """Microseconds a step that the shim takes for that many layers, a quarter of them attention; and what evaluating
    the counters at every step would take instead. Both include freeing what has grown, which mlx_lm leaves undone."""

    def advance(batch):
        for cache in batch.prompt_cache:
            if isinstance(cache, BatchKVCache):
                cache.offset = cache.offset + 1
                cache._idx += 1
            else:
                cache.advance(1)

    def timed(step) -> float:
        batch = GenerationBatch.empty(None, None)
        batch.prompt_cache = [
            KVCache().merge([KVCache()] * rows) if layer % 4 == 3 else ArraysCache.merge([ArraysCache(2)] * rows)
            for layer in range(layers)
        ]
        began = time.perf_counter()
        for _ in range(96):
            step(batch)
        return (time.perf_counter() - began) / 96 * 1e6

    ways = advance, cache_leak.cut_counters(advance), evaluate_counters(advance)
    plain, cured, evaluated = (
        min(times) for times in zip(*([timed(way) for way in ways] for _ in range(12)), strict=True)
    )
    return cured - plain, evaluated - plain


def self_check() -> tuple[float, float]:
    """Milliseconds of the first self-check in a thread of this process, and of later ones."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        assert cache_leak.leaks()
        times.append((time.perf_counter() - began) * 1e3)
    return times[0], min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="names as in the table (default: all)")
    parser.add_argument("--steps", type=int, default=3000)
    flags = parser.parse_args()
    first, later = self_check()
    print(f"{flags.steps:,} steps each; mlx {mx.__version__}, {mx.default_device()}.\n")
    print("| family | operations a step | with the cure | bytes a step | with the cure | replies |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name in flags.families or FAMILIES:
        plain, cured = (measure(name, flags.steps, make) for make in (None, cache_leak.cut_counters))
        replies = "the same" if plain.digests == cured.digests else "DIFFERENT"
        nodes = [growth(run.nodes, max, cache_leak.EVERY) for run in (plain, cured)]
        memory = [growth(run.memory, min) for run in (plain, cured)]
        cells = [f"{round(n, 1) + 0.0:.1f}" for n in nodes] + [f"{round(m) + 0}" for m in memory]
        print(f"| {name} | {' | '.join(cells)} | {replies} |", flush=True)
    shim, evaluated = cost()
    print(f"\nFor 64 layers the cut takes {shim:.0f} µs a step (evaluating the counters: {evaluated:.0f} µs).")
    print(f"The self-check takes {first:.1f} ms the first time in a process and {later:.1f} ms after that.")


if __name__ == "__main__":
    main()
