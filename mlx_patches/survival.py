"""One request's fault is that request's alone, and the generation thread comes back from its death.

Replaces   ResponseGenerator._run_generate, _next_request; server._make_sampler, _make_logits_processors;
           generate.PromptProcessingBatch.prompt
Why        in mlx_lm 0.32.2 whatever raises while a batch is set up, sampled or computed ends the generation thread for
           good: every client gets an error or waits for ever, and the process lives on without being able to reply
Upstream   server.py ResponseGenerator._generate, _run_generate
Delete when mlx_lm's server keeps a fault to its request and restarts its loop
Test       tests/test_survival.py

A fault in a request's own sampler, processors or prompt is noted on its Arguments; its row is let go, its client gets a
500, the batch goes on. A fault of the batch itself ends `_generate`: all requests that it had taken get a 500, and
`_generate` is entered again with the model still loaded and the prompt cache empty. More than MOST_DEATHS of those
within WINDOW seconds end the process, so that its parent can start a new one.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from localServerCommon import Refused
from mlx_patches.watcher import Watcher

MOST_DEATHS, WINDOW = 3, 600.0
DEAD = 70  # the exit status after too many deaths (EX_SOFTWARE of sysexits.h)
FLAGS = (
    (
        "--max-queue",
        {
            "type": int,
            "default": 64,
            "metavar": "N",
            "help": "Requests that may wait for the model; more get a 429 (default: 64; 0: no limit)",
        },
    ),
)


class Guarded:
    """`act`, whose first fault is noted on the request's Arguments; from then on `instead` is done."""

    def __init__(self, act: Callable, args: Any, instead: Callable):
        self._act, self._args, self._instead = act, args, instead

    def __call__(self, *given: Any):
        if self._args.fault is None:
            try:
                return self._act(*given)
            except Exception as fault:
                note(self._args, fault)
        return self._instead(*given)


def note(args: Any, fault: Exception) -> None:
    logging.error("a request failed", exc_info=fault)
    args.fault = fault


def guard_sampler(upstream):
    def make_sampler(args, tokenizer):
        try:
            sampler = upstream(args, tokenizer)
        except Exception as fault:
            note(args, fault)
            return greedy_sampler
        # Rows that share a sampler are sampled in one call, so that one is not wrapped.
        return sampler if args.sampling.temperature == 0 else Guarded(sampler, args, greedy_sampler)

    return make_sampler


class Processors(list):
    """A row's logits processors, and the Arguments that they are of."""

    def __init__(self, args: Any, processors: list):
        super().__init__(processors)
        self.args = args


def guard_processors(upstream):
    def make_logits_processors(args):
        try:
            processors = upstream(args)
        except Exception as fault:
            note(args, fault)
            processors = []
        unchanged = lambda tokens, logits: logits  # noqa: E731
        # A watcher never raises.
        return Processors(args, [p if isinstance(p, Watcher) else Guarded(p, args, unchanged) for p in processors])

    return make_logits_processors


def guard_prompts(upstream):
    """A fault while prompts are read is left on their batch, for RowBatch to find."""

    def prompt(batch, tokens):
        try:
            upstream(batch, tokens)
        except Exception as fault:
            logging.error("reading %d prompts failed", len(tokens), exc_info=fault)
            batch.fault = fault

    return prompt


class SurvivesFaults:
    """Mixin for ResponseGenerator: its thread is entered again, and its queue is bounded."""

    def __init__(self, *given: Any, **named: Any):
        self._taken: set[Any] = set()  # queues of the requests that the loop has
        self._lock = threading.Lock()
        self._waiting = 0
        self.stopping: Refused | None = None
        super().__init__(*given, **named)

    def _next_request(self, timeout=None):
        found = super()._next_request(timeout)
        if found is not None:
            self._taken.add(found[0])
        return found

    def _run_generate(self):
        deaths: deque[float] = deque(maxlen=MOST_DEATHS + 1)
        while True:
            try:
                self._generate()
                return
            except Exception as fault:
                deaths.append(time.monotonic())
                reason = f"{type(fault).__name__}: {fault}"
                logging.error("the generation thread died", exc_info=fault)
            self._fail_all()
            if self._is_distributed:
                self._generation_failed = True  # its ranks would no longer agree
                return
            if len(deaths) > MOST_DEATHS and deaths[-1] - deaths[0] < WINDOW:
                self._wait_for_handlers()
                print(f"the generation thread died {len(deaths)} times: {reason}", file=sys.stderr, flush=True)
                os._exit(DEAD)
            self.prompt_cache.trim_to(n_sequences=0)
            gc.collect()
            mx.clear_cache()

    def _fail_all(self) -> None:
        for queue in list(self._taken):
            queue.put(Refused("the generation thread died; it is starting again", status=500))

    def _wait_for_handlers(self) -> None:
        deadline = time.monotonic() + 1
        while self._taken and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the last one is still writing

    def events(self, request: Any, args: Any) -> Iterator[Any]:
        """As StreamsReplies has it. Raises Refused (429) where too many requests wait, (503) where the server ends."""
        with self._lock:
            if 0 < self.cli_args.max_queue <= self._waiting:
                raise Refused("too many requests are waiting", status=429, code="queue_full")
            self._waiting += 1
        waits = True
        try:
            for event in super().events(request, args):
                if waits and args.begun:
                    waits = False
                    with self._lock:
                        self._waiting -= 1
                if self.stopping is not None:
                    raise self.stopping
                yield event
        finally:
            if waits:
                with self._lock:
                    self._waiting -= 1

    def end_replies(self) -> None:
        self.stopping = Refused("the server is ending", status=503, code="shutting_down")

    def forget(self, queue: Any) -> None:
        self._taken.discard(queue)
