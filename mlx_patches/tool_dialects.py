"""The shapes of tool calls: a place in a text → the call that stands there, each value of it whole.

There are four: JSON objects, JSON arguments behind a header, Python calls, and parameters between tags
(tag_dialects.py); tool_formats.py has the table of who writes which. What always holds: a reader takes a call only if
it can say what each letter of it is, and raises Broken otherwise; it raises Open where the text ends inside a value, so
that a closing marker there may be a part of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_patches.argument_values import (
    JsonValue,
    by_schema,
    property_schema,
    python_value,
    quoted,
    types,
    types_of_word,
    whole_value,
)


class Broken(Exception):
    """What stands there is no call of this dialect."""


class Open(Exception):
    """The text ends inside a call's value."""


class Call(NamedTuple):
    """`arguments`: the text of a JSON object, or of what the model wrote in its place."""

    name: str
    arguments: str
    id: str | None = None


class Scope(NamedTuple):
    """`tools`: names → schemas. `loose`: no more text comes, so a tag that lacks its end has one at the text's end.

    `ended`: the text ends where its block does; else more of it may come. `known`: only a tool of `tools` is a call,
    and only with an object of arguments. `ordered`: parameters between tags come in the order of the schema.
    """

    tools: dict[str, Any]
    loose: bool = False
    ended: bool = True
    known: bool = False
    ordered: bool = False


Reader = Callable[[str, int, Scope], tuple[list[Call], int]]
NAME = r"[\w.:/@-]{1,128}"  # as tool_rules.NAME has it


def skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# JSON


GIVEN = {"arguments", "parameters", "function"}
CALL_MEMBERS = {"name", "id", "type", "index"} | GIVEN


def json_value(text: str, at: int) -> tuple[str, int]:
    """(the value at `at` as JSON, where it ends)."""
    value = JsonValue()
    out = value.feed(text[at:], final=True)
    if not value.done:
        raise Open if value.in_string else Broken
    return out, len(text) - len(value.rest)


def members(
    text: str, at: int, enough: Callable[[dict], bool] = lambda found: False
) -> tuple[dict[str, tuple[str, str]], int]:
    """(name → (JSON, as written) of the object at `at`, where it ends).

    Once they are `enough` for a call, what is no part of one, or cannot be read, ends the object.
    """
    found: dict[str, tuple[str, str]] = {}
    if text[at : at + 1] != "{":
        raise Broken
    at = skip(text, at + 1)
    while text[at : at + 1] not in ("}", ""):
        try:
            if text[at] != '"':
                raise Broken
            name, end = json_value(text, at)
            end = skip(text, end)
            if text[end : end + 1] != ":":
                raise Broken
            start = skip(text, end + 1)
            value, end = json_value(text, start)
        except (Broken, Open):
            if enough(found):
                return found, at
            raise
        key = json.loads(name)
        if enough(found) and (key in found or key not in CALL_MEMBERS):
            return found, at
        written = value, text[start:end].strip()
        if found.setdefault(key, written) != written:
            raise Broken  # one of the two would be lost
        at = skip(text, end)
        if text[at : at + 1] == ",":
            at = skip(text, at + 1)
        elif text[at : at + 1] not in ("}", ""):
            if enough(found):
                return found, at
            raise Broken
    if at == len(text) and not enough(found):
        raise Broken
    return found, min(at + 1, len(text))


def json_call(text: str, at: int, scope: Scope) -> tuple[list[Call], int]:
    """`{"name":…, "arguments":…}`, `{"type":"function","function":{…}}`, or a list of such."""
    if text[at : at + 1] == "[":
        calls: list[Call] = []
        at = skip(text, at + 1)
        while text[at : at + 1] == "{":
            more, at = json_call(text, at, scope)
            calls += more
            at = skip(text, at)
            if text[at : at + 1] == ",":
                at = skip(text, at + 1)
        if not calls or text[at : at + 1] not in ("]", ""):
            raise Broken
        return calls, at + 1 if at < len(text) else at
    found, end = members(text, at, lambda found: bool(found.keys() & GIVEN) and _call_of(found, scope) is not None)
    call = _call_of(found, scope)
    if call is None or (scope.known and not (found.keys() <= CALL_MEMBERS and whole_value(text[at:end]))):
        raise Broken
    return [call], end


def _call_of(found: dict[str, tuple[str, str]], scope: Scope) -> Call | None:
    written = {name: value for name, (value, _) in found.items()}
    inner = written.get("function", "")
    if inner[:1] == "{":
        try:
            inside = members(inner, 0)[0]
        except (Broken, Open):
            return None
        if scope.known and not inside.keys() <= CALL_MEMBERS:
            return None
        written |= {name: value for name, (value, _) in inside.items()}
    elif inner[:1] == '"':
        written.setdefault("name", inner)
    given = {name: written[name] for name in written if name in ("arguments", "parameters")}
    key = next(iter(given), None)
    if len(set(given.values())) > 1 or written.get("name", "")[:1] != '"':
        return None
    if key is None and (not scope.ended or not written.keys() <= CALL_MEMBERS):
        return None
    identity = json.loads(written["id"]) if written.get("id", "")[:1] == '"' else None
    return Call(json.loads(written["name"]), plain_arguments(written.get(key or "", "")), identity or None)


def plain_arguments(value: str) -> str:
    """A call's arguments from their JSON: an object in a string is that object, nothing is no arguments."""
    if value[:1] == '"':
        text = json.loads(value)
        return "{}" if not text.strip() else whole_value(text, "{") or value
    return "{}" if value in ("", "null") else value


@dataclass(frozen=True)
class Headed:
    """Arguments as JSON behind a header. `head` has the groups `name`, `open` (where the JSON begins) and maybe `id`.

    `typed`: words outside strings are JSON; else text where the schema allows that and not what they are as JSON.
    """

    head: re.Pattern
    tail: re.Pattern
    typed: bool = True

    def __call__(self, text: str, at: int, scope: Scope) -> tuple[list[Call], int]:
        head = self.head.match(text, at)
        if head is None:
            raise Broken
        arguments, end = "{}", head.end()
        if head["open"] and text[head.start("open")] in '{["':
            value, end = json_value(text, head.start("open"))
            arguments = plain_arguments(value if self.typed else self._by_schema(text, head, scope))
        elif not (self.tail.pattern and self.tail.match(text, end)):
            raise Broken
        tail = self.tail.match(text, end)
        return [Call(head["name"], arguments, head.groupdict().get("id"))], tail.end() if tail else end

    @staticmethod
    def _by_schema(text: str, head: re.Match, scope: Scope) -> str:
        root = scope.tools.get(head["name"])
        found, _ = members(text, head.start("open"))
        pairs = []
        for name, (value, written) in found.items():
            if written[:1] not in ("{", "[", '"'):
                schema = property_schema(root, name)
                kinds = types(schema, root)
                if kinds and not ("string" in kinds and types_of_word(value) & {*kinds}):
                    value = by_schema(written, schema, root)
            pairs.append(f"{quoted(name)}: {value}")
        return f"{{{', '.join(pairs)}}}"


# Python


PYTHON_CALL = re.compile(rf"({NAME})\s*\(")
PYTHON_KEY = re.compile(r"\s*(\w+)\s*=\s*")
PYTHON_TOKEN = re.compile(r"""\\.|'''|\"""|['"]|[()\[\]{},]""", re.DOTALL)


def python_call(text: str, at: int, scope: Scope) -> tuple[list[Call], int]:
    """`[name(key="value"), …]`."""
    if text[at : at + 1] != "[":
        raise Broken
    calls: list[Call] = []
    at = skip(text, at + 1)
    while text[at : at + 1] not in ("]", ""):
        call, at = _one_python_call(text, at, scope)
        calls.append(call)
        at = skip(text, at)
        if text[at : at + 1] == ",":
            at = skip(text, at + 1)
        elif text[at : at + 1] not in ("]", ""):
            raise Broken
    if not calls or (at == len(text) and not scope.ended):
        raise Broken
    return calls, min(at + 1, len(text))


def _one_python_call(text: str, at: int, scope: Scope) -> tuple[Call, int]:
    call = PYTHON_CALL.match(text, at)
    if call is None:
        raise Broken
    root, at, pairs = scope.tools.get(call[1]), skip(text, call.end()), []
    while text[at : at + 1] != ")":
        key = PYTHON_KEY.match(text, at)
        if key is None:
            raise Broken
        end = _python_end(text, key.end())
        written = text[key.end() : end].strip()
        pairs.append(f"{quoted(key[1])}: {_python_json(written, property_schema(root, key[1]), root)}")
        at = skip(text, end + 1) if text[end] == "," else end
    return Call(call[1], f"{{{', '.join(pairs)}}}"), at + 1


def _python_json(written: str, schema: Any, root: Any) -> str:
    value = python_value(written)
    if value is None and written[:1] in ("'", '"'):
        value = python_value(written.replace("\r", "\\r").replace("\n", "\\n"))
    if value is None or (value[:1] not in ('"', "[", "{") and types(schema, root)):
        return by_schema(written, schema, root)
    return value


def _python_end(text: str, at: int) -> int:
    """Where the value at `at` ends: at the comma or bracket after it."""
    quote, depth = "", 0
    for token in PYTHON_TOKEN.finditer(text, at):
        letter = token[0]
        if quote:
            quote = "" if letter == quote else quote
        elif letter[0] in "'\"":
            quote = letter
            if len(letter) == 3 and text[token.end() :].find(letter) < 0:
                raise Open
        elif letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif (letter == "," and not depth) or letter in ")]}":
            return token.start()
    raise Open if quote else Broken
