"""Which replies are watched: the splitter and the watcher of each request, and the tokens of each step.

Replaces   server._make_logits_processors (adds the watcher at the end), generate.GenerationBatch._step (notes the
           step's tokens), ResponseGenerator._tokenize (hangs the splitter and the watcher on the request)
Why        mlx_lm 0.32.2's processors cannot learn the newest token without waiting for the forward pass that was just
           launched
Upstream   server.py _make_logits_processors, generate.py GenerationBatch._step
Delete when mlx_lm constrains replies itself
Test       tests/test_watcher.py, tests/test_structured_output.py

A reply that nothing is asked of has no watcher, and mlx_lm's own path. The watcher is made where the tokenizer, the
request and its arguments meet, inside mlx_lm's `try`, and comes last of the processors.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_patches.call_reader import reading_calls
from mlx_patches.reply_format import ANSWER, TextSplitter
from mlx_patches.stop_strings import StopStrings
from mlx_patches.tool_choice import CallSplitter, tool_format
from mlx_patches.watcher import StepTokens, Watcher


class WatchesReplies:
    """Mixin for ResponseGenerator: gives each request its splitter, and a watcher where there is something to watch."""

    def _tokenize(self, tokenizer, request, args):
        found = super()._tokenize(tokenizer, request, args)
        prompt, _, _, initial_state, _ = found
        ask, provider = args.ask, self.model_provider
        form = provider.reply_format
        # With no guesses at all, mlx_lm's speculative loop hands processors a history that never grows.
        args.num_draft_tokens = max(1, args.num_draft_tokens)
        calls = tool_format(tokenizer) if ask.tools is not None else None
        held = calls is not None and (ask.calls_in_grammar or calls.form is not None)
        matcher = provider.grammars.matcher(ask.grammar) if ask.grammar is not None else None
        blocks = calls.matcher_later(ask.tools, provider) if held and matcher is None else None
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
                reader = reading_calls(TextSplitter(machine, ANSWER), tokenizer, request.tools)
                args.splitter = CallSplitter(args.splitter, reader, tokenizer.tool_call_start)
        else:
            args.splitter = reading_calls(TextSplitter(machine, initial_state), tokenizer, request.tools)
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
                one_call=one_call,
                stops=stops,
                limits=limits,
                guesses=guesses,
            )
        return found


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
