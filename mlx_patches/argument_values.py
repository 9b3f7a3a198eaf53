"""Values that a model wrote → JSON text: by the schema where the call format has no types, mended where it is JSON.

What always holds: nothing raises, whatever the text and whatever the schema; a value that does not read as its type is
the text that the model wrote, as a JSON string; what is valid JSON stays as it is, each digit and blank of it. Values
are never held as Python numbers, so none loses a digit, and nesting costs a character of `JsonValue.stack` a level.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")  # a model's text as Python

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
WORD = re.compile(r'[^\s,:\[\]{}"<]+')
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python has them
YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """A value where the format has no types: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else quoted(value)


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


def plain_word(word: str) -> str:
    """A JSON value for a word outside strings: itself, or the text of what is no JSON (1e400, NaN, 01)."""
    if word in ("true", "false", "null") or is_number(word):
        return word
    return WORDS.get(word) or quoted(word)


def types_of_word(word: str) -> set[str]:
    """The types that a JSON value has as a word: `5` is a number and an integer, a string is none."""
    if is_number(word):
        return {"number", "integer"} if word.lstrip("-").isdigit() else {"number"}
    return {"null"} if word == "null" else {"boolean"} if word in ("true", "false") else set()


class JsonValue:
    """One JSON value, read as it comes. `feed` gives what is decided of it as valid JSON.

    Mended: raw line breaks and other control characters in strings, escapes that JSON lacks, commas before a closing
    bracket, words that are no JSON. `done`: it is whole, and `rest` is what followed; `broken`: it cannot be read on;
    `in_string`: what was fed ends inside a string.
    """

    __slots__ = ("_gap", "_want", "broken", "done", "in_string", "rest", "stack")

    def __init__(self) -> None:
        self.rest = self.stack = self._gap = ""
        self._want = "value"
        self.done = self.broken = self.in_string = False

    def copy(self) -> JsonValue:
        other = JsonValue()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def feed(self, text: str, *, final: bool = False) -> str:
        """The JSON decided by `text`. `final`: nothing follows, so a word at its end is whole."""
        buffer, at, out = self.rest + text, 0, []
        while at < len(buffer) and not (self.done or self.broken):
            if self.in_string:
                piece, after = self._string(buffer, at)
            else:
                piece, after = self._outside(buffer, at, final)
            if after == at:
                break
            out.append(piece)
            at = after
        self.rest = buffer[at:]
        return "".join(out)

    def _string(self, buffer: str, at: int) -> tuple[str, int]:
        plain = PLAIN.match(buffer, at)[0]  # type: ignore[index]
        if plain:
            return plain, at + len(plain)
        letter = buffer[at]
        if letter == '"':
            self.in_string = False
            self._ended()
            return letter, at + 1
        if letter != "\\":
            return quoted(letter)[1:-1], at + 1
        if escape := ESCAPE.match(buffer, at):
            return escape[0], escape.end()
        if ESCAPE_BEGUN.match(buffer, at):
            return "", at
        return "\\\\", at + 1

    def _outside(self, buffer: str, at: int, final: bool) -> tuple[str, int]:
        letter, want = buffer[at], self._want
        if letter.isspace():
            self._gap += letter if letter in " \t\r\n" else " "
            return "", at + 1
        if letter in "]}" and want in ("after", "first", "next") and self.stack[-1:] == "[{"["]}".index(letter)]:
            gap, self._gap, self.stack = self._gap.replace(",", ""), "", self.stack[:-1]
            self._ended()
            return gap + letter, at + 1
        if want == "after" and letter == "," and self.stack:
            self._gap += letter
            self._want = "next"
            return "", at + 1
        if want == "colon" and letter == ":":
            self._want = "value"
            return self._take_gap() + letter, at + 1
        is_key = self.stack.endswith("{") and want in ("first", "next")
        if want in ("after", "colon") or (is_key and letter != '"'):
            self.broken = True
            return "", at
        if letter == '"':
            self.in_string = True
            self._want = "key" if is_key else "value"
            return self._take_gap() + letter, at + 1
        if letter in "{[":
            self.stack += letter
            self._want = "first"
            return self._take_gap() + letter, at + 1
        word = WORD.match(buffer, at)
        if word is None:
            self.broken = True
            return "", at
        if word.end() == len(buffer) and not final:
            return "", at
        self._ended()
        return self._take_gap() + plain_word(word[0]), word.end()

    def _take_gap(self) -> str:
        gap, self._gap = self._gap, ""
        return gap

    def _ended(self) -> None:
        self._want = "colon" if self._want == "key" else "after"
        self.done = not self.stack and self._want == "after"


def whole_value(text: str, start: str = "") -> str | None:
    """`text` as one JSON value that begins with one of the letters `start`, or None where it is not just that."""
    value = JsonValue()
    out = value.feed(text.strip(), final=True)
    return out if value.done and not value.rest and (not start or out[0] in start) else None


def python_value(text: str) -> str | None:
    """A Python literal as JSON, or None where it is none or JSON has no such value (a set, an infinity)."""
    try:
        tree = _JsonNames().visit(ast.parse(text.strip(), mode="eval"))
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class _JsonNames(ast.NodeTransformer):
    """true, false and null inside a Python literal, as templates write them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(names[node.id]), node) if node.id in names else node


def _integer(text: str) -> str | None:
    whole = re.fullmatch(r"([+-]?)0*(\d+)(?:\.0*)?", text, re.ASCII)
    return f"{whole[1].replace('+', '')}{whole[2]}" if whole else None


def _number(text: str) -> str | None:
    if is_number(text):
        return text
    if integer := _integer(text):
        return integer
    try:
        value = float(text.replace("_", "x"))  # Python's underscores are no part of a number that a model means
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


def _container(bracket: str, text: str) -> str | None:
    found = whole_value(text, bracket) or python_value(text)
    return found if found and found[0] == bracket else None


READERS = {
    "null": lambda text: "null" if text.lower() in ("null", "none") else None,
    "boolean": lambda text: "true" if text.lower() in YES else "false" if text.lower() in NO else None,
    "integer": _integer,
    "number": _number,
    "object": lambda text: _container("{", text),
    "array": lambda text: _container("[", text),
}
ALIASES = {"int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array", "str": "string"}


def types(schema: Any, root: Any) -> list[str]:
    """The type names that a value may have; none where the schema does not say."""
    found, constants = _allowed(schema, root)
    return list(dict.fromkeys([*found, *map(_type_of, constants.values())]))


def _allowed(schema: Any, root: Any) -> tuple[list[str], dict[str, Any]]:
    """(the type names in the schema's order, but for those of constants; the constants by their text)."""
    found: list[str] = []
    constants: dict[str, Any] = {}
    for part in parts(schema, root):
        if values := [part["const"]] if "const" in part else _as_list(part.get("enum")):
            constants = {as_text(value): value for value in values} | constants
        else:
            named = part.get("type")
            found += [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
        if part.get("nullable") is True:
            found.append("null")
    return [ALIASES.get(name.lower(), name.lower()) for name in dict.fromkeys(found)], constants


def has_form(schema: Any, root: Any) -> bool:
    """Whether strings of this schema have a length, a pattern or a format to fit."""
    held = {"minLength", "maxLength", "pattern", "format"}
    return any(part.keys() & held for part in parts(schema, root, ("anyOf", "oneOf")))


def parts(schema: Any, root: Any, joins: tuple[str, ...] = ("anyOf", "oneOf", "allOf")) -> Iterator[dict]:
    """`schema` and those that it is joined of or refers to, each before its own."""
    todo, budget = [schema], 200  # schemas may refer to themselves
    while todo and budget:
        part, budget = todo.pop(0), budget - 1
        if isinstance(part, dict):
            yield part
            members = [member for name in joins for member in _as_list(part.get(name))]
            todo = [*members, referred(part.get("$ref"), root), *todo]


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else []


def referred(reference: Any, root: Any) -> Any:
    """The part of `root` that a `$ref` points at, None where there is none."""
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        return None
    for step in reference.split("/")[1:]:
        inside = {str(at): each for at, each in enumerate(root)} if isinstance(root, list) else root
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        root = inside.get(step) if isinstance(inside, dict) else None
    return root


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def by_schema(text: str, schema: Any, root: Any, *, untyped: str = "[{") -> str:
    """`text` as the JSON value that `schema`, a part of the tool's own schema `root`, makes of it.

    `untyped`: the letters that a value may begin with to be read as JSON where the schema says nothing.
    """
    allowed, constants = _allowed(schema, root)
    bare = text.strip()
    for written in (text, bare):
        if written in constants:
            return quoted(constants[written])
    others = [*map(_type_of, constants.values())]
    allowed = allowed or others
    if not allowed:
        found = whole_value(text) if bare[:1] and bare[0] in untyped else None
        return found if found is not None and (found[0] != '"' or bare[0] == '"') else quoted(text)
    if "null" in allowed and bare == "null":
        return "null"
    if "string" in allowed:
        return quoted(text)
    for name in (*allowed, *others):
        if name in READERS and (found := READERS[name](bare)) is not None:
            return found
    return quoted(text)


def declared(tools: Any) -> dict[str, Any]:
    """The tools' names and the schemas of their arguments; what is no tool is left out."""
    found = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            parameters = parameters if isinstance(parameters, dict) else {}
            target = referred(parameters.get("$ref"), parameters)
            found[function["name"]] = {**target, **parameters} if isinstance(target, dict) else parameters
    return found


def properties(schema: Any) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def property_schema(schema: Any, name: str) -> Any:
    others = schema.get("additionalProperties") if isinstance(schema, dict) else {}
    return properties(schema).get(name, others)


def followers(schema: Any, name: str) -> list[str]:
    """The properties that may come after `name` where they stand in their order: up to the first that must."""
    required = schema.get("required", []) if isinstance(schema, dict) else []
    known = properties(schema)
    names = [each for each in dict.fromkeys([*known, *required]) if known.get(each) is not False]
    rest = names[names.index(name) + 1 :] if name in names else []
    return rest[: next((at + 1 for at, each in enumerate(rest) if each in required), len(rest))]
