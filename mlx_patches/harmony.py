"""Harmony, the way gpt-oss writes a reply: a series of messages, each on a channel.

Replaces   nothing: a third splitter beside those of reply_format.py
Why        mlx_lm 0.32.2 knows nothing of Harmony: thinking, headers and calls all come back as the reply's text
Upstream   tokenizer_utils.py _infer_thinking, _infer_tool_parser; their openai-harmony is the format's definition
Delete when mlx_lm reads gpt-oss's channels itself
Test       tests/test_harmony.py, tests/test_harmony_limits.py, tests/test_harmony_prompts.py

A message is a header and a body. Its markers are special tokens, so it is read by tokens: `<|` written as ordinary
characters is text. What always holds: a header's words are held back until a marker or a word that no header has
decides what they were; what was a header shows nowhere, what cannot be one is text of its message. The body's kind
follows from its header: a recipient makes it a call, the analysis channel reasoning, anything else content. A call's
arguments are what the model wrote, to the letter, and "{}" where that is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_patches.call_reader import CALL
from mlx_patches.chat_messages import text_of
from mlx_patches.early_calls import Arguments, Closed, Dropped, Opened
from mlx_patches.harmony_headers import ANALYSIS, FINAL, TOOL, Names, Tokens, Words, body_kind, read_words
from mlx_patches.reply_format import ANSWER, HEADER, MARKER, REASONING, START, Part, Parts, decode, vocabulary_of

REQUIRED = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")

FINAL_HEADERS = (
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|constrain|>json<|message|>",
    "<|channel|>final json<|message|>",
)


class HarmonyState(NamedTuple):
    """Where a reading stands.

    `phase`: START (the reply's first token), HEADER, or what a body is: REASONING, ANSWER, TOOL. Of a header:
    `tokens`, all so far; `held`, its newest words, and `after`, the marker that they follow; what they named, and the
    recipient `carried` from a header that broke off. Of a body: `pending`, part of a character; of a call's, what was
    `said`, as (what was said before, newest text), and whether it is `blank`.
    """

    phase: str
    tokens: tuple[int, ...] = ()
    after: str = ""
    held: tuple[int, ...] = ()
    channel: str | None = None
    recipient: str | None = None
    carried: str | None = None
    pending: bytes = b""
    said: tuple | None = None
    blank: bool = True


def recipient_of(state: HarmonyState, words: Words) -> str | None:
    carried = state.carried if words.channel not in (FINAL, ANALYSIS) else None
    return carried if words.recipient is None else words.recipient


class HarmonyFormat:
    """One tokenizer's Harmony: its markers' ids, and the headers that are asked for as tokens."""

    def __init__(self, tokenizer: Any, token_bytes: Callable[[int], bytes]):
        vocabulary = vocabulary_of(tokenizer)
        self.token_bytes = token_bytes
        self.ids = {name: vocabulary[name] for name in (*REQUIRED, "<|constrain|>", "<|return|>") if name in vocabulary}
        self.names = {token: name for name, token in self.ids.items()}
        self.tokens = Tokens(vocabulary)

        self._tokenizer = tokenizer
        tokens = self._headers
        self.final = tokens(text for text in FINAL_HEADERS if "<|constrain|>" in self.ids or "constrain" not in text)
        self.thinking = tokens(["<|channel|>analysis<|message|>"])
        self.closing = tokens(FINAL_HEADERS[:1])
        self.closing_with_tools = self.closing + tokens(["<|channel|>commentary"])
        self.analysis = tokenizer.encode(ANALYSIS, add_special_tokens=False)[0]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _headers(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        """Each of `texts` as it may stand in a reply: with the turn marker, and without."""
        return [tuple(self._encode(turn + text)) for text in texts for turn in ("<|start|>assistant", "")]

    def calls(self, names: Iterable[str]) -> list[tuple[int, ...]]:
        """The headers of calls."""
        kind = " <|constrain|>json" if "<|constrain|>" in self.ids else ""
        return self._headers(f"<|channel|>commentary to=functions.{name}{kind}<|message|>" for name in names)

    @staticmethod
    def spoken_by(tokenizer: Any) -> bool:
        vocabulary = vocabulary_of(tokenizer)
        return all(name in vocabulary for name in REQUIRED)

    def splitter(
        self,
        prompt: list[int],
        *,
        exact: bool = False,
        tools: list | None = None,
        held: Iterable[str] = (),
        answers: bool = True,
        calls: bool = True,
    ) -> HarmonySplitter:
        """The reading of a reply to `prompt`. `exact`: it is held to a grammar; `tools`: the request's.

        `held`: the tools whose calls a grammar holds; `answers`: a reply that is exact may also be an answer;
        `calls`: a message to a tool is a call, else content.
        """
        names = frozenset(tool["function"]["name"] for tool in tools or ())
        leads = {name: tuple(self._encode(f"{name}\n")) for name in held}
        splitter = HarmonySplitter(self, HarmonyState(START), exact, names, leads, answers, calls)
        start = self.ids["<|start|>"]
        at = next((n for n in range(len(prompt) - 1, -1, -1) if prompt[n] == start), None)
        if at is None:
            if exact:
                splitter.first = HarmonyState(ANSWER)
            return splitter
        state = HarmonyState(HEADER)
        for token in prompt[at:]:
            state, _ = splitter.split(state, token)
        if state.phase == HEADER:
            words = splitter.words(state, whole=True)
            # What the prompt has of the header is no text of the reply; after an open channel its name comes.
            after = "" if state.held or state.after != "<|channel|>" else state.after
            state = state._replace(phase=START, after=after, held=(), channel=words.channel, recipient=words.recipient)
        splitter.first = state
        return splitter


class HarmonySplitter:
    """Tokens of a reply → parts of reasoning, answer and calls, as reply_format's splitters give them."""

    by_tokens = True

    def __init__(
        self,
        form: HarmonyFormat,
        first: HarmonyState,
        exact: bool,
        tools: frozenset[str],
        leads: dict[str, tuple[int, ...]],
        answers: bool,
        calls: bool,
    ):
        self._form, self.first, self.exact, self._tools = form, first, exact, tools
        self.opening, self.closing = (), (form.ids["<|end|>"],)
        self.leads = leads
        self._answers, self._called = answers, calls
        self._calls = form.calls(leads) if exact else []
        self._names = Names(form.tokens, leads, tools) if leads and not exact else None

    def units(self, text: str) -> int:
        return 1

    @staticmethod
    def kind(state: HarmonyState) -> str:
        return HEADER if state.phase == START else state.phase

    def split(self, state: HarmonyState, token: int, text: str = "") -> tuple[HarmonyState, Parts]:
        """(state after `token`, the parts it decided). `text` is not used."""
        name = self._form.names.get(token)
        if name is None:
            return self._take(state, token)
        state, parts = self._mark(state, "<|end|>" if name in ("<|call|>", "<|return|>") else name)
        if state.phase == HEADER and name != "<|end|>":
            state = state._replace(tokens=(*state.tokens, token))
        return state, [*parts, Part(MARKER, "", 1)]

    def last(self, state: HarmonyState, text: str) -> tuple[HarmonyState, Parts]:
        """The end token came: it ends the message, as `<|end|>` does."""
        return self._mark(state, "<|end|>")

    def flush(self, state: HarmonyState, cut: bool = False) -> Parts:
        """What is still held back when the reply ends at `state`; a header that was cut is none of it.

        `cut`: it was not the model that ended it. A call's text is content then, where its pieces were not sent.
        """
        if state.phase in (START, HEADER):
            return [Part(MARKER, "", len(state.held))]
        left = state.pending.decode("utf-8", "replace")
        if state.phase != TOOL:
            return [Part(state.phase, left, 0)]
        if not cut:
            left += "{}" if state.blank and not left else ""
            return [Part(CALL, "", 0, (*([Arguments(left)] if left else []), Closed()))]
        pieces, said = [left], state.said
        while said is not None:
            said, piece = said
            pieces.append(piece)
        return [Part(ANSWER, "".join(reversed(pieces)), 0, (Dropped(cut=True),))]

    def words(self, state: HarmonyState, *, whole: bool) -> Words:
        text, typed = self._text(state.held)[0], bool(state.carried)
        return read_words(text, state.after, state.channel, state.recipient, whole=whole, typed=typed)

    def _text(self, tokens: Iterable[int]) -> tuple[str, bytes]:
        return decode(b"".join(map(self._form.token_bytes, tokens)))

    def _take(self, state: HarmonyState, token: int) -> tuple[HarmonyState, Parts]:
        """An ordinary token."""
        if state.phase not in (START, HEADER):
            text, pending = decode(state.pending + self._form.token_bytes(token))
            return self._say(state._replace(pending=pending), text, 1)
        state = state._replace(held=(*state.held, token), tokens=(*state.tokens, token))
        if self.exact and state.phase == START:
            return self._release(state, Words(state.channel, state.recipient, 0, False))
        words = self.words(state, whole=False)
        return (state._replace(phase=HEADER), []) if words.fits else self._release(state, words)

    @staticmethod
    def _say(state: HarmonyState, text: str, units: int) -> tuple[HarmonyState, Parts]:
        """More text of a body."""
        if state.phase != TOOL:
            return state, [Part(state.phase, text, units)]
        state = state._replace(said=(state.said, text), blank=state.blank and not text.strip())
        return state, [Part(CALL, "", units, (Arguments(text),) if text else ())]

    def _release(self, state: HarmonyState, words: Words) -> tuple[HarmonyState, Parts]:
        """The held words are no header: beyond what is one for sure they are text of a message."""
        if state.after in ("", "<|end|>"):
            words = Words(state.channel, state.recipient, 0, False)  # no marker, no header
        text, pending = self._text(state.held)
        header, rest = text[: words.used], text[words.used :]
        taken, size = 0, len(header.encode())
        for token in state.held:
            size -= len(self._form.token_bytes(token))
            taken += size >= 0
        body, opened = self._open(state, words)
        text = rest.lstrip() if words.used else rest
        body, parts = self._say(body._replace(pending=pending), text, len(state.held) - taken)
        return body, [Part(MARKER, "", taken), *opened, *parts]

    def _open(self, state: HarmonyState, words: Words) -> tuple[HarmonyState, Parts]:
        recipient = recipient_of(state, words)
        kind = body_kind(words.channel, recipient)
        if kind != TOOL or not self._called:
            return HarmonyState(ANSWER if kind == TOOL else kind), []
        name = (recipient or "").removeprefix("functions.")
        return HarmonyState(kind, recipient=recipient), [Part(CALL, "", 0, (Opened(None, name, name in self._tools),))]

    def _mark(self, state: HarmonyState, name: str) -> tuple[HarmonyState, Parts]:
        """A marker: what it makes of the words before it. Its own unit is the caller's to say."""
        if state.phase not in (START, HEADER):
            if name in ("<|message|>", "<|constrain|>"):
                return state, []  # nothing to mark here
            return HarmonyState(HEADER, after=name), self.flush(state)
        words = self.words(state, whole=True)
        text = self._text(state.held)[0]
        marks_words = name in ("<|message|>", "<|constrain|>") and words.fits
        if state.after in ("", "<|end|>"):
            # No marker came before: what a marker follows, or has a recipient, may be a header, anything else is text.
            named = words.recipient is not None and not text[words.used :].strip()
            is_header = words.fits and (name == "<|channel|>" or marks_words or named)
            left, called = not is_header and bool(text if state.after == "" else text.strip()), False
        else:
            left = not marks_words and bool(text[words.used :].strip())
            called = name == "<|end|>" and body_kind(words.channel, recipient_of(state, words)) == TOOL
        if left or called:
            body, parts = self._release(state, words)
            after, more = self._mark(body, name)
            return after, parts + more
        parts = [Part(MARKER, "", len(state.held))]
        if name == "<|message|>":
            body, opened = self._open(state, words)
            return body, parts + opened
        if name == "<|constrain|>":
            header = state._replace(phase=HEADER, channel=words.channel, recipient=words.recipient)
        elif name == "<|channel|>" and words.channel:  # the header breaks off, and another begins
            header = HarmonyState(HEADER, state.tokens, carried=words.recipient or state.carried)
        elif name == "<|channel|>":
            header = HarmonyState(HEADER, state.tokens, recipient=words.recipient, carried=state.carried)
        else:
            header = HarmonyState(HEADER)
        return header._replace(after=name, held=()), parts

    # What the watcher asks

    def _following(self, headers: Iterable[tuple[int, ...]], begun: tuple[int, ...]) -> frozenset[int]:
        """The tokens by which one of `headers` that begins with `begun` goes on; the first is the turn marker."""
        if not begun:
            return frozenset([self._form.ids["<|start|>"]])
        length = len(begun)
        return frozenset(h[length] for h in headers if len(h) > length and h[:length] == begun)

    def header_tokens(self, state: HarmonyState) -> frozenset[int]:
        """The tokens by which a header may go on before a body that is held to a grammar."""
        found = self._following(self._bodies() + self._form.thinking, state.tokens)
        return found | {self._form.ids["<|start|>"]} if state.phase == START or not found else found

    def _bodies(self) -> list[tuple[int, ...]]:
        """The headers of what a reply that is held to a grammar may be."""
        return (self._form.final if self._answers else []) + self._calls

    def lead(self, state: HarmonyState) -> tuple[int, ...] | None:
        """What the grammar has before a body that begins: the call's name, on a line. None where it holds no body."""
        if state.phase == TOOL:
            return self.leads.get((state.recipient or "").removeprefix("functions."))
        return tuple(self._form._encode("\n")) if state.phase == ANSWER and self.leads else ()

    def begins(self, before: HarmonyState, state: HarmonyState) -> bool:
        """Whether the body of a call that is held begins with the token between them."""
        apart = state.said is None or not state.said[1].strip("\n")  # else its text came with a header without a marker
        return state.phase == TOOL != before.phase and apart and self.lead(state) is not None

    def name_row(self, state: HarmonyState, width: int) -> mx.array | None:
        """A mask, shape (width,), where a header names who is called; None elsewhere, and where no call is held."""
        if self._names is None or state.phase != HEADER:
            return None
        return self._names.row(self._text(state.held)[0], state.after, self.words(state, whole=True), width)

    def closing_tokens(self, state: HarmonyState) -> frozenset[int]:
        """The tokens by which thinking that is cut comes to its end and the answer begins; none where all is free."""
        if state.phase == REASONING:
            return frozenset(self.closing)
        if self.exact and self.leads:
            return self._following(self._bodies(), state.tokens)
        return self._following(self._form.closing_with_tools if self._tools else self._form.closing, state.tokens)

    def reopening_tokens(self, state: HarmonyState) -> frozenset[int]:
        """The tokens that commit the reply to thinking, for one that may not open it again."""
        found = set()
        if state.phase in (START, HEADER):
            if state.after == "<|channel|>" and not state.held:
                found.add(self._form.analysis)
            words = self.words(state, whole=True)
            if body_kind(words.channel, words.recipient) == REASONING:
                found.add(self._form.ids["<|message|>"])
        return frozenset(found)


def parse_call(text: str, tools: Any = None) -> dict:
    """A call's name and, on the lines after it, its arguments, as mlx_lm's parsers give it: no JSON is text."""
    name, _, arguments = text.partition("\n")
    try:
        return {"name": name, "arguments": json.loads(arguments or "{}")}
    except (ValueError, RecursionError):
        return {"name": name, "arguments": arguments}


class SpeaksHarmony:
    """Mixin for ModelProvider: a vocabulary with Harmony's markers is told to mlx_lm and to the reply format."""

    def reply_format_of(self, tokenizer: Any, width: int) -> Any:
        form = super().reply_format_of(tokenizer, width)
        if not HarmonyFormat.spoken_by(tokenizer):
            return form
        form.messages = HarmonyFormat(tokenizer, form.token_bytes)
        ends = {form.messages.ids[name] for name in ("<|call|>", "<|return|>") if name in form.messages.ids}
        tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *ends}
        form.end_tokens |= ends
        # What a tool call is read by, for mlx_lm and for who looks which format the model writes.
        tokenizer._tool_call_start, tokenizer._tool_call_end = "<|channel|>commentary to=", "<|call|>"
        tokenizer._tool_parser = parse_call
        return form


def past_turns(messages: list[dict]) -> list[dict]:
    """`messages` as gpt-oss's template takes them: reasoning is `thinking`, and a message has one call.

    A message of several calls becomes one for each, with its result after it. A preamble beside calls goes with the
    reasoning: the template takes only one of the two, and shows either as analysis.
    """
    turned: list[dict] = []
    rest = list(messages)
    while rest:
        message = {**rest.pop(0)}
        calls, thought = message.pop("tool_calls", None), message.pop("reasoning_content", None)
        if message["role"] != "assistant":
            turned.append(message)
        elif not calls:
            turned.append({**message, "thinking": thought} if thought else message)
        else:
            count = next((n for n, later in enumerate(rest) if later["role"] != "tool"), len(rest))
            results, rest = rest[:count], rest[count:]
            thought = "\n\n".join(filter(None, (thought, text_of(message.get("content")))))
            for call in calls:
                turned.append({**message, "content": "", "tool_calls": [call], "thinking": thought})
                named = [result for result in results if result.get("tool_call_id") == call.get("id")]
                for result in (named or results)[:1]:
                    results.remove(result)
                    turned.append(result)
                thought = ""
            turned += results
    return turned


class RendersHarmony:
    """Mixin for ResponseGenerator, below who reads messages: past turns as Harmony's template has them."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any):
        if request.request_type == "chat" and self.model_provider.reply_format.messages is not None:
            request.messages = past_turns(request.messages)
        return super()._tokenize(tokenizer, request, args)
