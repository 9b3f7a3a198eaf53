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
import re
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mlx_lm import server

from localServerCommon import Refused
from mlx_patches.chat_messages import read_messages
from mlx_patches.image_urls import inline_images
from mlx_patches.reply_limits import Limits, read_limits
from mlx_patches.structured_output import Grammar, read_grammar
from mlx_patches.tool_rules import ToolRules, read_tools


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
    "reasoning_effort": Field(str),
    "role_mapping": Field(dict),
    "tools": Field(list),
}
NAMES = {bool: "a boolean", int: "an integer", str: "a string", dict: "an object", list: "a list", "number": "a number"}
MOST_TOP_LOGPROBS = 20
EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}
EFFORTS |= {"high": "high", "xhigh": "high", "max": "high"}
TEMPLATE_ARGUMENTS = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens"),
    *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
}
"""What `apply_chat_template` takes beside the template's own variables (transformers 5.24); `documents` is one."""
SAMPLING = [field.name for field in fields(server.SamplingArguments)]
LOGITS = [field.name for field in fields(server.LogitsProcessorArguments)]


NO_LIMITS = Limits(0, 0, 0)


@dataclass
class Ask:
    """What a request asks for beyond mlx_lm's arguments. Picklable: it is shared between ranks with the request.

    `calls_in_grammar`: `grammar` has calls in it, as `tools` wants them; `free`: what else of `tools` is not enforced.
    `no_calls`: none may come out, whatever the model writes.
    """

    stream: bool = False
    grammar: Grammar | None = None
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    limits: Limits = NO_LIMITS
    tools: ToolRules | None = None
    calls_in_grammar: bool = False
    free: tuple[str, ...] = ()
    no_calls: bool = False


def check_values(body: dict) -> None:
    """Raises Refused (400) naming the place of what no text or number is: half a character, NaN, an infinity."""
    stack: list[tuple[str, Any]] = [("", body)]
    while stack:
        at, container = stack.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, dict | list):
                stack.append((_place(at, key), value))
            elif isinstance(value, float) and not math.isfinite(value):
                raise Refused(f"{_place(at, key)} must be a number, not {value}", param=_place(at, key))
            for text in (key, value):
                if isinstance(text, str) and not text.isascii() and not _is_text(text):
                    raise Refused(
                        f"{_place(at, key)} has a surrogate that is not half of a pair", param=_place(at, key)
                    )


def _place(at: str, key: str | int) -> str:
    """`messages[0].content`: the way to a value."""
    if isinstance(key, int):
        return f"{at}[{key}]"
    key = key.encode("utf-8", "backslashreplace").decode()
    return f"{at}.{key}" if at else key


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_fields(body: dict, flags: Any) -> dict[str, Any]:
    """The value of every field in FIELDS. Raises Refused (400) for a value of the wrong type or out of bounds."""
    values = {name: _read(name, field, body.get(name), flags) for name, field in FIELDS.items()}
    if values["max_completion_tokens"] is not None:
        values["max_tokens"] = values["max_completion_tokens"]
    values["logit_bias"] = _read_logit_bias(values["logit_bias"])
    if not all(isinstance(text, str) for text in (values["role_mapping"] or {}).values()):
        raise Refused("role_mapping must map roles to strings", param="role_mapping")
    for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
        values[name] = min(values[name], 2**31 - 1)  # no history is longer, and no index
    # No two tokens have more than half of the probability: a higher threshold excludes none, as this one does.
    values["xtc_threshold"] = min(values["xtc_threshold"], 0.5)
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
    if None in bias.values() or not all(re.fullmatch(r"[0-9]{1,9}", token) for token in bias):
        raise Refused("logit_bias must map token ids to numbers", param="logit_bias")
    return {int(token): _read("logit_bias", Field("number"), value, None) for token, value in bias.items()}


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
        stream=values["stream"],
        grammar=read_grammar(body),
        stops=read_stops(body),
        include_usage=bool(include_usage),
        limits=read_limits(body, flags),
    )


def read_prompt(body: dict) -> str:
    """`prompt`: a string that is not empty, or a list of one. Raises Refused (400)."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise Refused("prompt must be a string that is not empty", param="prompt")
    return prompt


def read_template_kwargs(body: dict, values: dict[str, Any], flags: Any) -> dict[str, Any] | None:
    """`chat_template_kwargs`, without what mlx_lm or transformers would take for its own. Raises Refused (400).

    `thinking: {"type": "disabled"}` is its `enable_thinking: false`, and so is the effort "none" where nothing else is
    said. `reasoning_effort` is a word of EFFORTS; thinking that is off means the lowest. What is given itself wins.
    """
    match body.get("thinking"):
        case {"type": "enabled" | "disabled" | "adaptive" | "auto" as kind}:
            pass
        case None:
            kind = None
        case _:
            raise Refused("thinking must be an object of type enabled, disabled, adaptive or auto", param="thinking")
    given, effort = values["chat_template_kwargs"] or {}, values["reasoning_effort"]
    if effort is not None and effort not in EFFORTS:
        raise Refused(f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
    for name in given:
        if name in TEMPLATE_ARGUMENTS:
            at = f"chat_template_kwargs.{name}"
            raise Refused(f"{at} is not the template's to read", param=at)
    read: dict[str, Any] = {} if effort is None else {"reasoning_effort": EFFORTS[effort]}
    if kind == "disabled" or (effort == "none" and kind != "enabled"):
        read["enable_thinking"] = False
    read |= given
    all_given = {**flags.chat_template_args, **read}
    if all_given.get("enable_thinking") is False and all_given.get("reasoning_effort") is None:
        read["reasoning_effort"] = EFFORTS["none"]
    return read or None


class Arguments(server.GenerationArguments):
    """mlx_lm's arguments of one request, its Ask, and what `_tokenize` hangs on it (never shared between ranks).

    `begun`: it no longer waits; `cancelled`: nobody reads its reply any more; `left`: and it had not ended; `fault`:
    what ended it; `keep(tokens, cache)` puts a row's cache into the prompt cache.
    """

    def __init__(self, ask: Ask, **arguments: Any):
        super().__init__(**arguments)
        self.ask = ask
        self.splitter = None
        self.watcher = None
        self.begun = self.cancelled = self.left = False
        self.fault = None
        self.keep = None


def read_request(body: dict, chat: bool, flags: Any) -> tuple[server.CompletionRequest, Arguments, dict[str, Any]]:
    """(mlx_lm's request, its arguments, every field's value). Raises Refused (400)."""
    check_values(body)
    values = read_fields(body, flags)
    ask = read_ask(body, values, flags)
    logprobs, top_logprobs = read_logprobs(body, chat)
    if chat:
        for field, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            if body.get(field) is not None:
                raise Refused(f"{field} is not supported: use {instead}", param=field)
        tools, ask.tools = read_tools(body)
        ask.no_calls = body.get("tool_choice") == "none"
        request = server.CompletionRequest("chat", "", read_messages(body), tools, values["role_mapping"])
        inline_images(request.messages, flags)
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
        chat_template_kwargs=read_template_kwargs(body, values, flags),
    )
    return request, arguments, values
