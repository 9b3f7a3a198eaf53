"""A request's body read into what mlx_lm understands, or refused with the field at fault.

Replaces   APIHandler's reading of the body in do_POST and validate_model_parameters
Why        mlx_lm 0.32.2 takes null for a wrong type, refuses an integer where it means a float, limits `top_logprobs`
           to 11, reads nothing of structured output, and answers with `{"error": "text"}`
Upstream   server.py APIHandler.do_POST, validate_model_parameters
Delete when mlx_lm's server reads OpenAI's bodies and refuses with OpenAI's error object
Test       tests/test_request_bodies.py

Every field is a row of `FIELDS`: its type, its bounds, and where its default comes from. Null means the default, and
unknown fields are ignored. What goes beyond mlx_lm's own arguments is an `Ask`, which travels with the request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mlx_lm import server

from localServerCommon import Refused
from mlx_patches.reply_limits import Limits, read_limits
from mlx_patches.structured_output import Grammar, read_grammar


class Field(NamedTuple):
    """`kind`: a type or "number". `default`: a value, or the name of the flag that gives it after `--`."""

    kind: Any
    default: Any = None
    low: float | None = None
    high: float | None = None


class Flag(str):
    """A default that is a flag of the server."""


FIELDS = {
    "stream": Field(bool, False),
    "stream_options": Field(dict),
    "model": Field(str, "default_model"),
    "adapters": Field(str),
    "draft_model": Field(str, "default_model"),
    "num_draft_tokens": Field(int, Flag("num_draft_tokens"), 0),
    "max_completion_tokens": Field(int, None, 1),
    "max_tokens": Field(int, Flag("max_tokens"), 1),
    "n": Field(int, 1, 1, 1),
    "temperature": Field("number", Flag("temp"), 0),
    "top_p": Field("number", Flag("top_p"), 0, 1),
    "top_k": Field(int, Flag("top_k"), 0),
    "min_p": Field("number", Flag("min_p"), 0, 1),
    "repetition_penalty": Field("number", 0.0, 0),
    "repetition_context_size": Field(int, 20, 0),
    "presence_penalty": Field("number", 0.0),
    "presence_context_size": Field(int, 20, 0),
    "frequency_penalty": Field("number", 0.0),
    "frequency_context_size": Field(int, 20, 0),
    "xtc_probability": Field("number", 0.0, 0, 1),
    "xtc_threshold": Field("number", 0.1, 0, 1),
    "logit_bias": Field(dict),
    "seed": Field(int, None, -(2**63), 2**64 - 1),
    "chat_template_kwargs": Field(dict),
    "role_mapping": Field(dict),
    "tools": Field(list),
}
NAMES = {bool: "a boolean", int: "an integer", str: "a string", dict: "an object", list: "a list", "number": "a number"}
MOST_TOP_LOGPROBS = 20
SAMPLING = [field.name for field in fields(server.SamplingArguments)]
LOGITS = [field.name for field in fields(server.LogitsProcessorArguments)]


NO_LIMITS = Limits(0, 0, 0)


@dataclass
class Ask:
    """What a request asks for beyond mlx_lm's arguments. Picklable: it is shared between ranks with the request."""

    grammar: Grammar | None = None
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    limits: Limits = NO_LIMITS


def read_fields(body: dict, flags: Any) -> dict[str, Any]:
    """The value of every field in FIELDS. Raises Refused (400) for a value of the wrong type or out of bounds."""
    values = {name: _read(name, field, body.get(name), flags) for name, field in FIELDS.items()}
    if values["max_completion_tokens"] is not None:
        values["max_tokens"] = values["max_completion_tokens"]
    values["logit_bias"] = _read_logit_bias(values["logit_bias"])
    return values


def _read(name: str, field: Field, value: Any, flags: Any) -> Any:
    if value is None:
        return getattr(flags, field.default) if isinstance(field.default, Flag) else field.default
    if field.kind == "number":
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    else:
        fits = isinstance(value, field.kind) and (field.kind is bool or not isinstance(value, bool))
    if not fits:
        raise Refused(f"{name} must be {NAMES[field.kind]}", param=name)
    if field.low is not None and value < field.low:
        raise Refused(f"{name} must be at least {field.low}", param=name)
    if field.high is not None and value > field.high:
        raise Refused(f"{name} must be at most {field.high}", param=name)
    return float(value) if field.kind == "number" else value


def _read_logit_bias(bias: dict | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token): float(_read("logit_bias", Field("number"), value, None)) for token, value in bias.items()}
    except (TypeError, ValueError):
        raise Refused("logit_bias must map token ids to numbers", param="logit_bias") from None


def read_stops(body: dict) -> tuple[str, ...]:
    """`stop`: a string or a list of strings, none of them empty. Raises Refused (400)."""
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise Refused("stop must be a string or a list of strings that are not empty", param="stop")
    return tuple(dict.fromkeys(stops))


def read_logprobs(body: dict, chat: bool) -> tuple[bool, int]:
    """(whether log-probabilities are asked for, how many alternatives). Raises Refused (400).

    Chat: `logprobs` a boolean and `top_logprobs` 0 to 20. Completions: `logprobs` that number itself.
    """
    asked = body.get("logprobs")
    if not chat and isinstance(asked, int) and not isinstance(asked, bool):
        if not 0 <= asked <= MOST_TOP_LOGPROBS:
            raise Refused(f"logprobs must be from 0 to {MOST_TOP_LOGPROBS}", param="logprobs")
        return True, asked
    if asked is not None and not isinstance(asked, bool):
        raise Refused("logprobs must be a boolean" + ("" if chat else " or an integer"), param="logprobs")
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not -1 <= top <= MOST_TOP_LOGPROBS):
        raise Refused(f"top_logprobs must be an integer from 0 to {MOST_TOP_LOGPROBS}", param="top_logprobs")
    top = max(top or 0, 0)
    return bool(asked) or top > 0, top


def read_ask(body: dict, values: dict[str, Any], flags: Any) -> Ask:
    """The request's Ask. Raises Refused (400)."""
    include_usage = (values["stream_options"] or {}).get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise Refused("stream_options.include_usage must be a boolean", param="stream_options.include_usage")
    return Ask(
        grammar=read_grammar(body),
        stops=read_stops(body),
        include_usage=bool(include_usage),
        limits=read_limits(body, flags),
    )


def read_messages(body: dict) -> list[dict]:
    """`messages`: a list of objects, not empty, each with a role and, if any, a content of text or parts.

    Raises Refused (400).
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty", param="messages")
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(f"{at} must be an object with a role", param=at)
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(isinstance(part, dict) for part in parts):
            raise Refused(f"{at}.content must be a string or a list of parts", param=f"{at}.content")
    return messages


def read_prompt(body: dict) -> str:
    """`prompt`: a string that is not empty. Raises Refused (400)."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise Refused("prompt must be a string that is not empty", param="prompt")
    return prompt


def read_template_kwargs(body: dict, values: dict[str, Any]) -> dict[str, Any] | None:
    """`chat_template_kwargs`; `thinking: {"type": "disabled"}` is its `enable_thinking: false`."""
    thinking = body.get("thinking")
    off = isinstance(thinking, dict) and thinking.get("type") == "disabled"
    given = values["chat_template_kwargs"]
    return {"enable_thinking": False, **(given or {})} if off else given


class Arguments(server.GenerationArguments):
    """mlx_lm's arguments of one request, its Ask, and what `_tokenize` hangs on it (never shared between ranks)."""

    def __init__(self, ask: Ask, **arguments: Any):
        super().__init__(**arguments)
        self.ask = ask
        self.splitter = None
        self.watcher = None


def read_request(body: dict, chat: bool, flags: Any) -> tuple[server.CompletionRequest, Arguments, dict[str, Any]]:
    """(mlx_lm's request, its arguments, every field's value). Raises Refused (400)."""
    values = read_fields(body, flags)
    ask = read_ask(body, values, flags)
    logprobs, top_logprobs = read_logprobs(body, chat)
    if chat:
        request = server.CompletionRequest(
            "chat", "", read_messages(body), values["tools"] or None, values["role_mapping"]
        )
        server._inline_image_urls(request.messages)
    else:
        request = server.CompletionRequest("text", read_prompt(body), [], None, None)
    arguments = Arguments(
        ask,
        model=server.ModelDescription(values["model"], values["draft_model"], values["adapters"]),
        sampling=server.SamplingArguments(**{name: values[name] for name in SAMPLING}),
        logits=server.LogitsProcessorArguments(**{name: values[name] for name in LOGITS}),
        stop_words=[],
        max_tokens=values["max_tokens"],
        num_draft_tokens=values["num_draft_tokens"],
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        seed=values["seed"] and values["seed"] % 2**64,  # OpenAI's are signed, mlx's are not
        chat_template_kwargs=read_template_kwargs(body, values),
    )
    return request, arguments, values
