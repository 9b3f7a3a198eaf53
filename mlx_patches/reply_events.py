"""Generated tokens → one stream of events, whatever protocol writes them.

Replaces   the token loop of APIHandler.handle_completion
Why        mlx_lm 0.32.2 drops text it held back when a reply stops, cannot tell which tokens are content, and mixes
           reading a reply with writing it
Upstream   server.py APIHandler.handle_completion
Delete when mlx_lm's server separates its reply from its encoding
Test       tests/test_reply_events.py

All that is true of a reply is decided here: what is reasoning, content or a call, where a stop string cuts it, which
log-probabilities belong to it, why it ended. An encoder only spells the events. A token's log-probability goes with
the content it made; while the newest tokens may yet be a marker they wait.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import Empty, Queue
from threading import Thread
from typing import Any, NamedTuple

from localServerCommon import Refused, finite
from mlx_patches.early_calls import Arguments, Closed, Dropped, Opened, Unread
from mlx_patches.reply_format import ANSWER, MARKER, REASONING, Part
from mlx_patches.stop_strings import StopStrings


class TokenLogprob(NamedTuple):
    """One token as `logprobs` lists it: its id, its bytes, its natural log-probability (never below -9999)."""

    id: int
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Started(NamedTuple):
    """The prompt is read as tokens; errors from here on are the reply's."""

    prompt_tokens: int


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallOpened(NamedTuple):
    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON text of call `number`'s arguments."""

    number: int
    text: str


class Finished(NamedTuple):
    """`reason`: "stop", "length" or "tool_calls"; `cut`: the limit that cut the reply.

    Counts are tokens; `cached_tokens` of the prompt's were reused.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cut: str | None = None


class _Token:
    """A token while it is being told what it is. `left`: undecided units; `end`: content up to its last character."""

    __slots__ = ("end", "entry", "kinds", "left", "real")

    def __init__(self, entry: TokenLogprob | None, left: int, real: bool = True):
        self.entry, self.left, self.real = entry, left, real
        self.kinds: Counter[str] = Counter()
        self.end = 0


class ReplyReader:
    """Reads one reply's `mlx_lm.server.Response`s, one `read` each, until `finish_reason` is set."""

    def __init__(
        self,
        splitter: Any,
        stops: StopStrings | None,
        token_bytes: Callable[[int], bytes],
        *,
        logprobs: bool = False,
        streamed: bool = True,
    ):
        """`streamed`: a call is sent while it is written; else only when it is whole."""
        self._splitter, self._stops, self._token_bytes = splitter, stops, token_bytes
        self._logprobs, self._streamed = logprobs, streamed
        self._state = splitter.first
        self._open: deque[_Token] = deque()  # tokens of which not all is decided
        self._listed: deque[_Token] = deque()  # tokens of content whose text is not all sent
        self._said = 0  # characters of content, sent or held back
        self._sent = 0  # characters of content that are sent
        self._held = ""
        self._calls = 0  # that are whole
        self._opened = 0
        self._ids: set[str] = set()
        self._waiting: list[CallOpened | CallArguments] = []  # of a call that is not whole
        self._cut = False
        self._stopped = False
        self.tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None

    def read(self, response: Any) -> Iterator[Any]:
        """The events of one more token. A stop string ends the reply before mlx_lm does."""
        self.tokens += 1
        yield from self._read(response)
        if response.finish_reason is not None and not self._stopped:
            self._cut = response.finish_reason != "stop"
            yield from self._finish()
        reason = "stop" if self._stopped else response.finish_reason
        self.finish_reason = "tool_calls" if reason == "stop" and self._calls else reason

    def _read(self, response: Any) -> Iterator[Any]:
        if response.finish_reason == "stop":
            # The end token is no text, but its response carries what mlx_lm's detokenizer still held.
            self._open.append(_Token(None, len(response.text), real=False))
            self._state, parts = self._splitter.last(self._state, response.text)
        else:
            entry = self._entry(response) if self._logprobs else None
            self._open.append(_Token(entry, self._splitter.units(response.text)))
            self._state, parts = self._splitter.split(self._state, response.token, response.text)
        yield from self._emit(parts)

    def _entry(self, response: Any) -> TokenLogprob:
        top = sorted(response.top_tokens, key=lambda entry: -entry["logprob"])
        return TokenLogprob(
            response.token,
            self._token_bytes(response.token),
            finite(response.logprob),
            tuple(TokenLogprob(e["id"], self._token_bytes(e["id"]), finite(e["logprob"])) for e in top),
        )

    def _attribute(self, part: Part) -> None:
        """Say of which tokens `part` is: a token is what most of it is."""
        taken = 0
        while taken < part.units:
            token = self._open[0]
            share = min(token.left, part.units - taken)
            taken += share
            token.left -= share
            token.kinds[part.kind] += share
            if part.kind == ANSWER:
                # A token without a whole character is part of the next.
                token.end = self._said + max(len(part.text) * taken // part.units, 0 if share and part.text else 1)
            if token.left:
                break
            self._settle(self._open.popleft(), part.kind)
        if part.kind == ANSWER:
            self._said += len(part.text)

    def _settle(self, token: _Token, kind: str) -> None:
        # Content comes first in a draw. A token without text of its own goes with what follows it.
        most = max(token.kinds.values(), default=0)
        kinds = {name for name, units in token.kinds.items() if units == most} if most else {kind}
        if ANSWER in kinds:
            self._listed.append(token)
        elif REASONING in kinds and token.real:
            self.reasoning_tokens += 1

    def _emit(self, parts: list[Part]) -> Iterator[Any]:
        for part in parts:
            if part.steps:
                yield from self._steps(part.steps)
                if self._streamed and Dropped(cut=True) in part.steps:
                    part = part._replace(kind=MARKER, text="")  # its arguments stay as they were sent
            self._attribute(part)
            if part.kind == REASONING and part.text:
                yield Reasoning(part.text)
            elif part.kind == ANSWER:
                yield from self._content(part.text, scan=Dropped(cut=True) not in part.steps)
                if self._stopped:
                    return

    def _content(self, text: str, scan: bool) -> Iterator[Content]:
        """`scan`: for stop strings, which a call that was cut is not looked through for."""
        if self._stops is not None and scan:
            text, self._held, self._stopped = self._stops.cut(self._held, text)
        else:
            text, self._held = self._held + text, ""
        # A token that holds any of a stop string is never listed.
        sent = self._said - len(self._held)
        if self._stopped:
            sent = self._sent + len(text)
        self._sent = sent
        yield from self._content_event(text)

    def _content_event(self, text: str) -> Iterator[Content]:
        entries = []
        while self._listed and self._listed[0].end <= self._sent:
            if (entry := self._listed.popleft().entry) is not None:
                entries.append(entry)
        if text or entries:
            yield Content(text, tuple(entries))

    def _finish(self) -> Iterator[Any]:
        yield from self._emit(self._splitter.flush(self._state, self._cut))
        if self._stopped:
            return
        while self._open:
            self._settle(self._open.popleft(), self._splitter.kind(self._state))
        text, self._held, self._sent = self._held, "", self._said + 1
        yield from self._content_event(text)
        if self._splitter.exact and not self._said and not self._calls:
            yield Content("")  # an empty answer, which the grammar allowed, is an answer

    def _steps(self, steps: tuple) -> Iterator[Any]:
        """What a call reader says of calls."""
        for step in steps:
            match step:
                case Opened(call_id, name, known):
                    if not known:
                        logging.warning("A call of %r, which is no tool of the request", name)
                    if not call_id or call_id in self._ids:
                        call_id = str(uuid.uuid4())
                    self._ids.add(call_id)
                    self._waiting.append(CallOpened(self._opened, call_id, name))
                    self._opened += 1
                case Arguments(text):
                    self._waiting.append(CallArguments(self._opened - 1, text))
                case Closed():
                    self._calls += 1
                    yield from self._waiting
                    self._waiting = []
                case Dropped():
                    self._opened -= not self._streamed
                    self._waiting = []
                case Unread(text):
                    logging.warning("A tool call that cannot be read is given as text: %.500r", text)
            if self._streamed:
                yield from self._waiting
                self._waiting = []


class Replies(Queue):
    """What mlx_lm's loop has for one request. After each put the loop looks whether the context of its row is stopped.

    It must find it stopped where the row was let go, also when the client left before it read the context.
    """

    def __init__(self, args: Any):
        super().__init__()
        self._args, self._context = args, None

    def put(self, item: Any, *given: Any, **named: Any) -> None:
        if self._context is None and hasattr(item, "stop"):
            self._context = item
        if self._context is not None and (self._args.cancelled or self._args.fault is not None):
            self._context.stop()
        super().put(item, *given, **named)


class StreamsReplies:
    """Mixin for ResponseGenerator: `events`, one reply as the stream above."""

    TICK = 0.05  # seconds between two looks at the clock while nothing comes

    def events(self, request: Any, args: Any) -> Iterator[Any]:
        """Started, what ReplyReader gives, Finished; None in between, at least once each TICK, for who keeps time.

        Raises Refused, or what the generation thread raised for this request. Closing the iterator ends the reply.
        """
        context = None
        try:
            for item in self._items(request, args):
                if args.fault is not None or (args.watcher is not None and args.watcher.fault is not None):
                    raise Refused("the reply had to be stopped: an internal error", status=500)
                args.begun |= context is not None and item is not None
                if item is None or isinstance(item, tuple):
                    yield None
                elif context is None:
                    context = item
                    reader = self._reader(request, args, context)
                    yield Started(len(context.prompt))
                else:
                    yield from reader.read(item)
                    if reader.finish_reason is not None:
                        counts = reader.tokens, context.prompt_cache_count, reader.reasoning_tokens
                        watcher = args.watcher
                        cut, of_answer = watcher.cut_of(reader.tokens) if watcher is not None else (None, False)
                        reason = "length" if of_answer else reader.finish_reason
                        yield Finished(reason, len(context.prompt), *counts, cut)
                        return
                    yield None  # a long call's tokens are no event until it is whole
            raise Refused("the reply ended early", status=500)
        except GeneratorExit:
            args.left = not self._is_distributed
            raise
        finally:
            args.cancelled = not self._is_distributed  # ranks agree on `context.stop` only
            if context is not None:
                context.stop()

    def prepare(self, request: Any, args: Any) -> None:
        """What a request with a grammar or tools needs that takes time and no generation thread.

        Its thread is its own; the generation thread's look-up finds it in a cache.
        """
        if args.ask.grammar is not None and self.model_provider.model is not None:
            self.model_provider.grammars.matcher(args.ask.grammar)

    def _prepare_for(self, prepared: Future, request: Any, args: Any) -> None:
        try:
            self.prepare(request, args)
            prepared.set_result(None)
        except BaseException as fault:
            prepared.set_exception(fault)

    def forget(self, queue: Queue) -> None:
        """The request whose queue this was is over; for a room that keeps count."""

    def _items(self, request: Any, args: Any) -> Iterator[Any]:
        """What mlx_lm's loop puts on the request's queue, and None for each TICK without it."""
        while not self.model_provider.settled.wait(self.TICK):
            yield None
        if args.ask.grammar is not None or args.ask.tools is not None:
            prepared: Future = Future()
            Thread(target=self._prepare_for, args=(prepared, request, args), daemon=True).start()
            while not wait([prepared], self.TICK).done:
                yield None  # a client that leaves meanwhile is seen
            prepared.result()
        queue = Replies(args)
        if not self.generation_available():
            raise Refused("the model cannot reply", status=503, code="unavailable")
        self.requests.put((queue, request, args))
        try:
            while True:
                try:
                    item = queue.get(timeout=self.TICK)
                except Empty:
                    if not self.generation_available():
                        raise Refused("the generation thread died", status=500) from None
                    item = ()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item or None
        finally:
            self.forget(queue)

    def _reader(self, request: Any, args: Any, context: Any) -> ReplyReader:
        form = self.model_provider.reply_format
        return ReplyReader(
            args.splitter,
            StopStrings(args.ask.stops) if args.ask.stops else None,
            form.token_bytes,
            logprobs=args.logprobs,
            streamed=args.ask.stream,
        )
