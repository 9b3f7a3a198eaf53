"""A client that is gone costs nothing from the moment it closes its socket.

Replaces   server.BatchGenerator, server.stream_generate, ResponseGenerator._tokenize, _next_request
Why        mlx_lm 0.32.2 notices a closed socket only when it writes to it: a reply that is not streamed, a tool call, a
           long prompt and a request in the queue run to their end for nobody; a row leaves its batch half a second late
Upstream   server.py ResponseGenerator._generate, _serve_single; generate.py BatchGenerator.next, remove
Delete when mlx_lm's server watches its clients' sockets
Test       tests/test_cancellation.py

The handler's thread looks at its socket several times a second, and whichever way a reply ends it marks the request as
cancelled. The generation thread looks at that mark wherever it can stop: before a request is tokenised, before each
step of a batch, at each chunk of a prompt on the single path. What was read of the prompt goes to the prompt cache.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from mlx_lm.generate import BatchGenerator, PromptProcessingBatch

LOOK = 0.05  # seconds between two looks at a socket
GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL


class ClientLeft(ConnectionAbortedError):
    """The client closed its socket, or its sending side."""


def is_gone(connection: socket.socket) -> bool:
    """Whether the other side has closed. Bytes that wait to be read are a pipelined request, and no sign of it."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | GONE)
    found = poll.poll(0)
    if not found:
        return False
    if found[0][1] & GONE:
        return True
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return True


def while_connected(connection: socket.socket, events: Iterator[Any]) -> Iterator[Any]:
    """`events`, which come at least every LOOK seconds. Raises ClientLeft."""
    looked = time.monotonic()
    try:
        for event in events:
            if (now := time.monotonic()) - looked >= LOOK:
                looked = now
                if is_gone(connection):
                    raise ClientLeft
            yield event
    finally:
        events.close()


class LeavesEarly:
    """Mixin for ResponseGenerator: a request whose client left is never tokenised, nor makes others wait."""

    def _next_request(self, timeout=None):
        found = super()._next_request(timeout)
        while found is not None and found[2].cancelled:
            found = super()._next_request()
        return found

    def _tokenize(self, tokenizer, request, args):
        if args.cancelled:
            raise ClientLeft
        args.keep = lambda tokens, cache: self.prompt_cache.insert_cache(self.model_provider.model_key, tokens, cache)
        return super()._tokenize(tokenizer, request, args)


class RowBatch(BatchGenerator):
    """mlx_lm's batch, which knows the Arguments of each row and lets go of rows that are cancelled or have failed."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._args: dict[int, Any] = {}

    def insert_segments(self, *, logits_processors: list, **named: Any) -> list[int]:
        uids = super().insert_segments(logits_processors=logits_processors, **named)
        self._args |= {uid: row.args for uid, row in zip(uids, logits_processors, strict=True)}
        return uids

    def next(self):
        over = [uid for uid, args in self._args.items() if args.cancelled]
        self.remove(over)
        prompts, tokens = super().next()
        if (fault := getattr(self._prompt_batch, "fault", None)) is not None:
            self._prompt_batch.fault = None
            failed = list(self._prompt_batch.uids)
            for uid in failed:
                self._args[uid].fault = fault
            self.remove(failed)
            over += failed
        for response in tokens:
            if response.finish_reason is not None:
                self._args.pop(response.uid, None)
        # mlx_lm forgets a row where it gets a response of it: its context is stopped by then (reply_events.Replies).
        return [*prompts, *(PromptProcessingBatch.Response(uid, (0, 0), False, False) for uid in over)], tokens

    def remove(self, uids, **named: Any):
        """As mlx_lm's, whoever calls it; what a row has read is kept."""
        args = {uid: self._args.pop(uid) for uid in uids if uid in self._args}
        read = {*self._prompt_batch.uids, *self._generation_batch.uids}
        kept = [uid for uid in args if uid in read and args[uid].fault is None]
        for uid, (cache, tokens) in self.extract_cache(kept).items():
            if tokens:
                args[uid].keep(tokens[:], cache)
        return super().remove(uids, **named)


class _Interruptible:
    """A model whose calls end with the request: with a draft model, mlx_lm reports no chunks."""

    def __init__(self, model: Any, args: Any):
        self._model, self._args = model, args

    def __call__(self, *given: Any, **named: Any):
        if self._args.cancelled:
            raise ClientLeft
        return self._model(*given, **named)

    def __getattr__(self, name: str):
        return getattr(self._model, name)


def stop_between_chunks(upstream):
    """A prompt on the single path is read no further than the chunk in which its client left."""

    def stream_generate(*, model, draft_model, logits_processors, prompt_progress_callback, **named):
        args = logits_processors.args

        def progress(done, total):
            prompt_progress_callback(done, total)
            if args.cancelled:
                raise ClientLeft

        if draft_model is not None:
            model, draft_model = _Interruptible(model, args), _Interruptible(draft_model, args)
        try:
            yield from upstream(
                model=model,
                draft_model=draft_model,
                logits_processors=logits_processors,
                prompt_progress_callback=progress,
                **named,
            )
        except ClientLeft:
            if draft_model is not None and any(cache.empty() for cache in named["prompt_cache"]):
                raise  # only the draft has read; otherwise mlx_lm keeps what was read

    return stream_generate
