"""Messages as the chat template takes them, or a refusal in the template's own words.

Replaces   ResponseGenerator._tokenize (derived), the reading of messages in APIHandler.handle_chat_completions
Why        mlx_lm 0.32.2 hands the template whatever a body holds: an old call whose arguments are no JSON, a message
           that is no object or a part without a type end in errors that name nothing, and several system messages in
           whatever the template says of them
Upstream   server.py process_message_content, ResponseGenerator._tokenize
Delete when mlx_lm's server checks messages and folds what a template refuses
Test       tests/test_chat_messages.py

Shapes are checked before a model is asked. Then a template is shown the messages as they were sent; only where it
refuses them, the other readings that say the same: system messages folded into one at the front, and arguments that are
no JSON object as the one argument of an object instead of as text. When it refuses them all, the client is told what it
said of the first.
"""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Iterator
from typing import Any

from localServerCommon import Refused
from mlx_patches.image_urls import TYPES

ROLES = {"system", "user", "assistant", "tool", "function"}
MOST_DEEP = 200  # a message is copied, and written as JSON, with some of Python's stack for each level
BLAMED = {
    "apply_chat_template": ("messages", "the chat template refuses the messages"),
    "_decode_image": ("messages", "an image cannot be read"),
}
"""By the function that raised: the field at fault and what to say ahead of what was raised."""


def read_messages(body: dict) -> list[dict]:
    """`messages`: a list of objects, not empty, each with a role and, if any, a content of text or parts, and calls.

    `developer` is read as `system`. Raises Refused (400) naming what is not so.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty", param="messages")
    read = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(read):
        _need(_depth(message) <= MOST_DEEP, f"messages[{i}]", f"nested no more than {MOST_DEEP} deep")
    return read


def _depth(value: Any) -> int:
    """How many objects and lists `value` has within each other, counting those in a past call's arguments."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _need(holds: bool, at: str, what: str) -> None:
    if not holds:
        raise Refused(f"{at} must be {what}", param=at)


def _read_message(message: Any, at: str) -> dict:
    _need(isinstance(message, dict) and isinstance(message.get("role"), str), at, "an object with a role")
    content, calls = message.get("content"), message.get("tool_calls")
    _need(isinstance(content, str | list | None), f"{at}.content", "a string or a list of parts")
    for j, part in enumerate(content if isinstance(content, list) else []):
        where = f"{at}.content[{j}]"
        _need(isinstance(part, dict), where, "an object")
        text = part.get("type") == "text" and isinstance(part.get("text"), str)
        _need(text or part.get("type") in TYPES, where, "a text or an image")
    _need(isinstance(calls, list | None), f"{at}.tool_calls", "a list")
    read = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    thought = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    if read["role"] == "assistant" and isinstance(thought, str):
        read["reasoning_content"] = thought  # the name that templates read
    if calls:
        read["tool_calls"] = [_read_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return read


def _read_call(call: Any, at: str) -> dict:
    """A past call with its arguments as an object, or, where they are none, as a JSON string of their text."""
    _need(isinstance(call, dict), at, "an object")
    function = call.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _need(named, f"{at}.function", "an object with a name")
    arguments = function.get("arguments")
    _need(isinstance(arguments, str | dict | None), f"{at}.function.arguments", "a string or an object")
    return {**call, "function": {**function, "arguments": _read_arguments(arguments)}}


def _read_arguments(arguments: str | dict | None) -> str | dict:
    if isinstance(arguments, dict):
        return arguments
    if not arguments or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # half a character is a ValueError too
        value = None
    # mlx_lm reads a string as JSON: what the template gets is the text itself.
    return value if isinstance(value, dict) else json.dumps(arguments)


def readings(messages: list[dict]) -> Iterator[list[dict]]:
    """The messages as they were sent, and then as else they may be said, each with objects of its own."""
    seen: list[list[dict]] = []
    for folds in (False, True):
        for wraps in (False, True):
            reading = fold_system(messages) if folds else messages
            reading = [_wrap_arguments(message) for message in reading] if wraps else reading
            if reading not in seen:
                seen.append(reading)
                yield copy.deepcopy(reading)


def fold_system(messages: list[dict]) -> list[dict]:
    """All system messages as one at the front, texts joined by a blank line."""
    texts = [text_of(message.get("content")) for message in messages if message["role"] == "system"]
    if not texts:
        return messages
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *rest]


def text_of(content: str | list | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _wrap_arguments(message: dict) -> dict:
    if not any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls") or []):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call["function"]["arguments"] = {"arguments": json.loads(arguments)}
    return {**message, "tool_calls": calls}


def check_model_reads(messages: list[dict], *, template: str, more_roles: dict | None, images: bool) -> None:
    """Raises Refused (400) for a role that the template does not name, or an image for a model that sees none."""
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        known = role in ROLES or role in (more_roles or {})
        known = known or (role and any(f"{quote}{role}{quote}" in template for quote in "'\""))
        _need(known, f"messages[{i}].role", f"one of {', '.join(sorted(ROLES))}")
        for j, part in enumerate(content if isinstance(content, list) else []):
            at = f"messages[{i}].content[{j}]"
            if part["type"] != "text" and not images:
                raise Refused(f"{at}: this model reads no images", param=at)


def blame(fault: Exception) -> Refused | None:
    """The refusal for what a template or an image raised, or None for a fault of ours."""
    for frame, _ in traceback.walk_tb(fault.__traceback__):
        if frame.f_code.co_name in BLAMED:
            param, words = BLAMED[frame.f_code.co_name]
            return Refused(f"{words}: {fault}", param=param)
    return None


class ReadsMessages:
    """Mixin for ResponseGenerator."""

    def _tokenize(self, tokenizer, request, args):
        if request.request_type != "chat":
            return super()._tokenize(tokenizer, request, args)
        images = self.model_provider.processor is not None
        template = str(getattr(tokenizer, "chat_template", None) or "")
        check_model_reads(request.messages, template=template, more_roles=request.role_mapping, images=images)
        first = None
        for reading in readings(request.messages):
            request.messages = reading
            try:
                return super()._tokenize(tokenizer, request, args)
            except Refused:
                raise
            except Exception as fault:
                refused = blame(fault)
                if refused is None:
                    raise
                first = first or refused
        assert first is not None
        raise first
