"""Events as /v1/chat/completions and /v1/completions write them, streamed and whole.

Replaces   APIHandler.generate_response, completion_usage_response
Why        mlx_lm 0.32.2 repeats the role in every chunk, calls the usage chunk a "chat.completion", lists
           log-probabilities without bytes and may write -Infinity, and names thinking `reasoning` only
Upstream   server.py APIHandler.generate_response, completion_usage_response
Delete when mlx_lm's server writes what OpenAI's clients read
Test       tests/test_chat_wire.py

An encoder spells events and decides nothing. It gives the frames of a stream (each a JSON object) or folds all events
into one body.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_patches.reply_events import CallArguments, CallOpened, Content, Finished, Reasoning, TokenLogprob


@dataclass
class Head:
    """What every frame of a reply repeats."""

    id: str
    model: str
    created: int
    system_fingerprint: str


def usage(end: Finished) -> dict:
    """OpenAI's usage object."""
    counts = {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
    }
    if end.cached_tokens >= 0:
        counts["prompt_tokens_details"] = {"cached_tokens": end.cached_tokens}
    return counts


def cut(end: Finished) -> dict[str, str]:
    """The field of a choice that says which limit cut it; absent where none did."""
    return {} if end.cut is None else {"cut": end.cut}


NO_END = Finished("length", 0, 0, 0, 0)


@dataclass
class Whole:
    """All events of a reply, put together."""

    text: str | None = None
    reasoning: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    end: Finished = NO_END

    @classmethod
    def of(cls, events: Iterable[Any]) -> Whole:
        whole, texts, thoughts = cls(), [], []
        for event in events:
            match event:
                case Reasoning(text):
                    thoughts.append(text)
                case Content(text, entries):
                    texts.append(text)
                    whole.logprobs += entries
                case CallOpened(_, call_id, name):
                    function = {"name": name, "arguments": ""}
                    whole.calls.append({"id": call_id, "type": "function", "function": function})
                case CallArguments(number, text):
                    whole.calls[number]["function"]["arguments"] += text
                case Finished():
                    whole.end = event
        whole.text = "".join(texts) if texts else None
        whole.reasoning = "".join(thoughts)
        return whole

    def reasoning_fields(self) -> dict[str, str]:
        return {"reasoning_content": self.reasoning, "reasoning": self.reasoning} if self.reasoning else {}


class _Encoder:
    """`kind`: the body's `object`; `chunk`: a stream frame's."""

    kind = chunk = ""

    def __init__(self, head: Head, *, include_usage: bool = False, logprobs: bool = False):
        self._head, self._include_usage, self._logprobs = head, include_usage, logprobs

    def _frame(self, kind: str, choices: list[dict], **more: Any) -> dict:
        head = self._head
        return {
            "id": head.id,
            "system_fingerprint": head.system_fingerprint,
            "object": kind,
            "model": head.model,
            "created": head.created,
            "choices": choices,
            **more,
        }

    def _usage_frame(self, end: Finished) -> Iterator[dict]:
        if self._include_usage:
            yield self._frame(self.chunk, [], usage=usage(end))


class ChatEncoder(_Encoder):
    kind, chunk = "chat.completion", "chat.completion.chunk"

    def _delta(self, delta: dict, reason: str | None = None, more: dict | None = None) -> dict:
        return self._frame(self.chunk, [{"index": 0, "delta": delta, "finish_reason": reason, **(more or {})}])

    def opening(self) -> Iterator[dict]:
        """The frames before any token."""
        yield self._delta({"role": "assistant", "content": ""})

    def frames(self, event: Any) -> Iterator[dict]:
        """The frames of one event."""
        match event:
            case Reasoning(text):
                yield self._delta({"reasoning_content": text, "reasoning": text})
            case Content(text, entries):
                more = {"logprobs": {"content": [_entry(e) for e in entries]}} if self._logprobs else {}
                yield self._delta({"content": text}, None, more)
            case CallOpened(number, call_id, name):
                call = {"index": number, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                yield self._delta({"tool_calls": [call]})
            case CallArguments(number, text):
                yield self._delta({"tool_calls": [{"index": number, "function": {"arguments": text}}]})
            case Finished(reason):
                yield self._delta({}, reason, cut(event))
                yield from self._usage_frame(event)

    def body(self, events: Iterable[Any]) -> dict:
        """The whole reply."""
        whole = Whole.of(events)
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, **whole.reasoning_fields()}
        if whole.calls:
            message |= {"content": whole.text or None, "tool_calls": whole.calls}
        choice = {"index": 0, "message": message, "finish_reason": whole.end.reason, **cut(whole.end)}
        if self._logprobs:
            choice["logprobs"] = {"content": [_entry(e) for e in whole.logprobs]}
        return self._frame(self.kind, [choice], usage=usage(whole.end))


class CompletionEncoder(_Encoder):
    kind = chunk = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _choice(
        self, text: str, reason: str | None, entries: Iterable[TokenLogprob] = (), more: dict | None = None
    ) -> dict:
        choice = {"index": 0, "text": text, "finish_reason": reason, **(more or {})}
        if self._logprobs:
            choice["logprobs"] = self._old_logprobs(entries)
        return choice

    def opening(self) -> Iterator[dict]:
        return iter(())

    def frames(self, event: Any) -> Iterator[dict]:
        match event:
            case Reasoning(text):
                yield self._frame(
                    self.chunk, [self._choice("", None, (), {"reasoning_content": text, "reasoning": text})]
                )
            case Content(text, entries):
                yield self._frame(self.chunk, [self._choice(text, None, entries)])
            case Finished(reason):
                yield self._frame(self.chunk, [self._choice("", reason, (), cut(event))])
                yield from self._usage_frame(event)

    def body(self, events: Iterable[Any]) -> dict:
        whole = Whole.of(events)
        more = {**whole.reasoning_fields(), **cut(whole.end)}
        choice = self._choice(whole.text or "", whole.end.reason, whole.logprobs, more)
        return self._frame(self.kind, [choice], usage=usage(whole.end))

    def _old_logprobs(self, entries: Iterable[TokenLogprob]) -> dict:
        """The completions endpoint's own shape: parallel lists, `text_offset` in characters."""
        shape: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token = _readable(entry.data)
            shape["tokens"].append(token)
            shape["token_logprobs"].append(entry.logprob)
            shape["top_logprobs"].append({_readable(e.data): e.logprob for e in entry.top})
            shape["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(entry.data))
        return shape


def _readable(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _entry(entry: TokenLogprob) -> dict:
    return {**_plain(entry), "top_logprobs": [_plain(e) for e in entry.top]}


def _plain(entry: TokenLogprob) -> dict:
    return {"id": entry.id, "token": _readable(entry.data), "bytes": list(entry.data), "logprob": entry.logprob}
