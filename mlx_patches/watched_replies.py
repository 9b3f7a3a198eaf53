"""Which replies are watched: the splitter and the watcher of each request, and the tokens of each step.

Replaces   server._make_logits_processors (adds the watcher at the end), generate.GenerationBatch._step (notes the
           step's tokens), ResponseGenerator._tokenize (hangs the splitter and the watcher on the request, and tells
           where a free reply begins)
Why        mlx_lm 0.32.2's processors cannot learn the newest token without waiting for the forward pass that was just
           launched; a reply whose prompt names `<think>` anywhere is thinking from its start
Upstream   server.py _make_logits_processors, generate.py GenerationBatch._step
Delete when mlx_lm constrains replies itself
Test       tests/test_watcher.py, tests/test_structured_output.py, tests/test_reply_format.py

A reply that nothing is asked of has no watcher, and mlx_lm's own path. The watcher is made where the tokenizer, the
request and its arguments meet, inside mlx_lm's `try`, and comes last of the processors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from mlx_patches.call_reader import CallReader
from mlx_patches.reply_format import ANSWER, REASONING, Part, Parts, TextSplitter, TokenSplitter, TokenState
from mlx_patches.stop_strings import StopStrings
from mlx_patches.tool_arguments import Calls
from mlx_patches.tool_choice import tool_format
from mlx_patches.tool_rules import fits
from mlx_patches.watcher import Watcher


class CallState(NamedTuple):
    """A TokenState, and where the answer stands: `said` and `held` (tokens) while it may yet be a call; `inner`, the
    state of mlx_lm's machine once it is one; `plain` once it is none."""

    phase: str
    matched: int = 0
    pending: bytes = b""
    said: str = ""
    held: int = 0
    inner: tuple | None = None
    plain: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of calls that have ended."""
        return self.inner.blocks if self.inner is not None else 0  # type: ignore[attr-defined]


def in_tokens(pieces: Parts, held: int) -> Parts:
    """`pieces`, whose units are characters, with the `held` tokens given to the one that has most of them."""
    most = max((piece.units for piece in pieces), default=0)
    first = next((at for at, piece in enumerate(pieces) if most and piece.units == most), None)
    return [piece._replace(units=held * (at == first)) for at, piece in enumerate(pieces)]


class CallSplitter(TokenSplitter):
    """A TokenSplitter whose answer, where it begins with a call's marker, is read by `inner`, which reads calls."""

    def __init__(self, outer: TokenSplitter, inner: Any, marker: str):
        super().__init__(outer.opening, outer.closing, outer._bytes, outer.first.phase)
        self._inner, self._marker = inner, marker
        self.first = CallState(*self.first)

    def split(self, state: CallState, token: int, text: str = "") -> tuple[CallState, Parts]:
        outer, parts = super().split(TokenState(*state[:3]), token)
        state, read = CallState(*outer, *state[3:]), []
        for part in parts:
            if part.kind == ANSWER:
                state, more = self._answer(state, part)
                read += more
            else:
                read.append(part)
        return state, read

    def _answer(self, state: CallState, part: Part) -> tuple[CallState, Parts]:
        if state.plain:
            return state, [part]
        said, held = state.said + part.text, state.held + part.units
        inner = state.inner
        if inner is None:
            begun = said.lstrip()
            if begun.startswith(self._marker):
                inner = self._inner.first
            elif self._marker.startswith(begun):
                return state._replace(said=said, held=held), []
            else:
                return state._replace(said="", held=0, plain=True), [Part(ANSWER, said, held)]
        inner, pieces = self._inner.split(inner, 0, said)
        decided = any(piece.units for piece in pieces)
        return state._replace(said="", held=0 if decided else held, inner=inner), in_tokens(pieces, held)

    def flush(self, state: CallState, cut: bool = False) -> Parts:
        last = super().flush(state)
        if state.inner is None:
            return [Part(ANSWER, state.said, state.held), *last] if state.said else last
        # A character that is not whole is the call's too. Units are characters there, and tokens here.
        inner, pieces = self._inner.split(state.inner, 0, last[0].text)
        pieces += self._inner.flush(inner, cut)
        return in_tokens(pieces, state.held)

    def kind(self, state: CallState) -> str:
        if state.phase != REASONING and state.inner is not None:
            return self._inner.kind(state.inner)
        return TokenSplitter.kind(state)


class StepTokens:
    """The tokens that enter one step of a batch, read once for all rows.

    They were launched a step ago, so reading them waits for that step only; the forward pass that was just built must
    be launched first, or the device would idle while masks are made.
    """

    def __init__(self, tokens: mx.array):
        self._tokens = tokens
        self._read: list[int] | None = None

    def read(self, logits: mx.array) -> list[int]:
        if self._read is None:
            mx.async_eval(logits)
            self._read = self._tokens.tolist()
        return self._read


class WatchesReplies:
    """Mixin for ResponseGenerator: gives each request its splitter, and a watcher where there is something to watch."""

    def _tokenize(self, tokenizer, request, args):
        found = super()._tokenize(tokenizer, request, args)
        prompt, _, _, initial, _ = found
        ask, provider = args.ask, self.model_provider
        form = provider.reply_format
        if request.request_type == "chat" and tokenizer.has_thinking and tokenizer.response_initial_state is None:
            # mlx_lm takes the last marker in the prompt for the template's, also one that a user names.
            initial = REASONING if form.opened_by_template(prompt) else ANSWER
        # With no guesses at all, mlx_lm's speculative loop hands processors a history that never grows.
        args.num_draft_tokens = max(1, args.num_draft_tokens)
        calls = tool_format(tokenizer) if ask.tools is not None else None
        held = calls is not None and calls.form is not None
        matcher = provider.grammars.matcher(ask.grammar) if ask.grammar is not None else None
        blocks = calls.matcher_later(ask.tools, provider, lambda: args.left) if held and matcher is None else None
        fit = lambda name, text, every: fits(ask.tools, name, text, provider, every)  # noqa: E731
        may: dict = {} if ask.tools is None else {"rules": ask.tools, "fits": fit, "held": held}
        _, machine = self._make_state_machine(provider.model_key, tokenizer, args.stop_words)
        if form.messages is not None:
            args.splitter = form.messages.splitter(
                prompt,
                exact=ask.grammar is not None,
                tools=request.tools,
                held=[tool.name for tool in ask.tools.tools] if held else (),
                answers=ask.tools is None or not ask.tools.required,
                calls=not ask.no_calls,
            )
        elif ask.grammar is not None:
            kwargs = {**provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
            thinking = request.request_type == "chat" and kwargs.get("enable_thinking") is not False
            args.splitter = form.splitter_under_grammar(prompt, thinking)
            if ask.calls_in_grammar:
                reader = reading_calls(TextSplitter(machine, ANSWER), tokenizer, request.tools, False, **may)
                args.splitter = CallSplitter(args.splitter, reader, tokenizer.tool_call_start)
        else:
            inner = TextSplitter(machine, initial)
            args.splitter = reading_calls(inner, tokenizer, request.tools, blocks is not None, **may)
        stops = StopStrings(ask.stops) if ask.stops else None
        limits = ask.limits.machine(args.max_tokens, tokenizer.has_thinking or form.messages is not None)
        one_call = ask.tools is not None and not ask.tools.several
        if matcher is not None or blocks is not None or stops is not None or limits is not None or one_call:
            is_json = ask.grammar is not None and ask.grammar.kind.startswith("json")
            guesses = args.num_draft_tokens if provider.draft_model is not None else 0
            args.watcher = Watcher(
                form,
                args.splitter,
                matcher=matcher,
                is_json=is_json,
                blocks=blocks,
                is_call=calls.is_call(ask.tools) if blocks is not None else bool,
                one_call=one_call,
                stops=stops,
                limits=limits,
                guesses=guesses,
            )
        return found


def reading_calls(splitter: TextSplitter, tokenizer: Any, tools: Any, entered: bool, **may: Any) -> Any:
    """`splitter`, or a CallReader around it. `tokenizer`: mlx_lm's TokenizerWrapper; `may`: for Calls.

    `entered`: a grammar is, behind an opening marker.
    """
    name = tokenizer.tool_parser.__module__.rpartition(".")[2] if tokenizer.has_tool_calling else None
    if name is None and not tools:
        return splitter
    start, end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
    calls = Calls(name, tokenizer.tool_parser, start, end, tools, **may)
    return CallReader(splitter, calls, tokenizer.tool_call_start_tokens if entered else None)


def add_watcher(upstream):
    """The request's watcher comes last, so that no penalty or bias undoes it."""

    def make_logits_processors(args):
        processors = upstream(args)
        return processors if args.watcher is None else [*processors, args.watcher]

    return make_logits_processors


def note_step_tokens(upstream):
    """Tell each watcher of a batch its row, before the step that asks it."""

    def step(batch):
        tokens = None
        for row, processors in enumerate(batch.logits_processors or ()):
            if processors and isinstance(processors[-1], Watcher):
                if tokens is None:
                    # After rows came or went this is a new operation: launch it ahead of the forward pass.
                    mx.async_eval(batch._next_tokens)
                    tokens = StepTokens(batch._next_tokens)
                processors[-1].enter(tokens, row)
        return upstream(batch)

    return step
