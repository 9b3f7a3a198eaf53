"""What every grammar of tool calls is written with: rules of their own names, values as JSON, the parts of a schema.

A writer makes the rules of one format's calls; what a shape of calls adds stands in tag_grammars.py and
gemma_grammars.py. What always holds: what a rule does not hold to is listed, and a value is written only where the
format's reader takes it for what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from mlx_patches.argument_values import as_text, properties, referred
from mlx_patches.json_schemas import Prepared
from mlx_patches.schema_keywords import BOUNDS, fits_some, texts_of_format, whole_texts
from mlx_patches.tool_dialects import Broken, Open, Scope
from mlx_patches.tool_formats import Format as Reader
from mlx_patches.tool_formats import read_all

# A number out of a float's range would be read as text.
NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/"
PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
ANNOTATIONS = {"title", "description", "$schema", "$id", "default", "examples", "$comment", "deprecated", "readOnly"}
PLAIN_WORD = re.compile("[A-Za-z_][A-Za-z0-9_]*")
ANY_TEXT = "/(?s:.*)/"


class Tool(NamedTuple):
    """A function that may be called, and its arguments' schema as `prepare` made it."""

    name: str
    prepared: Prepared


class Format(NamedTuple):
    """How a model writes calls. `head` and `tail` stand around a call's arguments, `{}` for its name, `:0` its number.

    `shape`: a key of tool_grammars.SHAPES. `parameter`, `end`: before (`{}` for its name) and after a value.
    `value`: the tag after a name in tags of its own; then a line may end after each tag. `cdata`: a string may be a
    section of CDATA. `between`: what stands between two calls of one block, None where each has markers of its own.
    `quote`: on both sides of a string in "gemma".
    """

    head: str
    tail: str
    shape: str = "json"
    parameter: str = ""
    end: str = ""
    value: str = ""
    cdata: bool = False
    between: str | None = None
    quote: str = ""


class Specials(dict[str, int]):
    """The special tokens of a vocabulary: their ids by their texts."""

    @cached_property
    def any_of(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self, key=len, reverse=True)))})")

    def pieces(self, text: str) -> list[str]:
        """`text` cut at the special tokens that it names."""
        return [piece for piece in self.any_of.split(text) if piece] if self else [text] * bool(text)


def literal(text: str, specials: Specials) -> str:
    """`text` as a Lark sequence, its special tokens by their ids."""
    pieces = specials.pieces(text)
    # ASCII: llguidance's Lark knows no U+007F
    return " ".join(f"<[{specials[p]}]>" if p in specials else json.dumps(p) for p in pieces) or '""'


def escaped(text: str) -> str:
    """`text` inside a Lark regular expression."""
    return re.sub(r"([][.{}()*+?^$|\\/])", r"\\\1", text).replace("\n", "\\n")


class Rules:
    """Writes the rules of each tool's call; rule names are numbered, so that none can clash.

    `reader`: what reads such calls. `end`: the marker after a block. `several`: it may hold more than one call.
    """

    def __init__(self, form: Format, reader: Reader, specials: Specials, end: str, several: bool):
        self.form, self.specials, self.end, self.several = form, specials, end, several
        self._reader = reader
        self._break = ' "\\n"?' if form.value else ""
        self.rules: list[str] = []
        self.not_enforced: list[str] = []
        self._tools = 0
        self._count = 0
        self._named: dict[str, str] = {}
        self._shared: dict[str, str] = {}  # rules by what they hold, for all tools

    def literal(self, text: str) -> str:
        return literal(text, self.specials)

    def add(self, tool: Tool) -> None:
        self._root, self._name, self._named = json.loads(tool.prepared.text), tool.name, {}
        self._leave_out(*tool.prepared.not_enforced)
        self.rules.append(f"call_{self._tools}: {self._head(tool.name)} {self._after_head(self._root)}")
        self._tools += 1

    def block(self) -> list[str]:
        """The rules of a block of calls of the tools that were added, and of the marker after it."""
        between = self.literal(self.form.between) if self.form.between else ""
        more = f"({between} call)*" if self.several and self.form.between is not None else ""
        return [f"block: call {more} {self.literal(self.end)}", f"call: {self._one_of('call')}", *self.rules]

    def _one_of(self, kind: str) -> str:
        return " | ".join(f"{kind}_{n}" for n in range(self._tools))

    def _head(self, name: str) -> str:
        head, number, after = self.form.head.partition(":0")
        head = head.format(name) + number[:1]
        line, head = ('"\\n"? ', head[1:]) if head.startswith("\n") else ("", head)  # not all models write it
        written = ' " "? '.join(map(self.literal, head.split(" "))) if head.startswith("{") else self.literal(head)
        return f"{line}{written} " + (f"/[0-9]{{1,3}}/ {self.literal(after)}" if number else self._break)

    def _after_head(self, root: dict) -> str:
        tail = self.form.tail
        end, tail = (' "\\n"?', tail[:-1]) if tail.endswith("\n") else ("", tail)
        return f"{self._arguments(root)} {self.literal(tail)}{end}"

    def _arguments(self, root: dict) -> str:
        return self._json(root)

    def _rule(self, body: str, kind: str = "r", options: str = "") -> str:
        self._count += 1
        name = f"{kind}_{self._count}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _json(self, schema: dict) -> str:
        """A rule for a value as JSON. `schema`: a part of the tool's, whose definitions it may refer to."""
        kept = {name: self._root[name] for name in ("$defs", "definitions", "x-guidance") if name in self._root}
        return self._rule(f"%json {json.dumps({**schema, **kept}, separators=(',', ':'))}")

    def _plain(self, schema: dict, kinds: list[str]) -> str:
        """A value of these types as JSON."""
        bounded = any(name in schema for name in (*BOUNDS, "multipleOf"))
        rest = [kind for kind in kinds if bounded or kind != "number"]
        rules = [self._json({**schema, "type": rest})] if rest else []
        return f"({' | '.join(rules if rest == kinds else [*rules, self._rule(NUMBER, 'N')])})"

    def _until(self, text: str, stop: str, whole: bool = False) -> str:
        """`text` (a Lark terminal) and its first `stop`. `whole`: all of it fits `text`, and no stop stands inside."""
        if not self._all_letters(stop):
            # A special token may be spelled as text as well.
            return f"({self._rule(f'{text} & ~/(?s:.*){escaped(stop)}(?s:.*)/', 'R')} {self.literal(stop)})"
        longer = f" & ~/(?s:.*){escaped(stop)}(?s:.+)/" if whole else ""
        return self._lazy(f"({text}) /{escaped(stop)}/{longer}")

    def _lazy(self, text: str) -> str:
        """`text` up to where it first fits."""
        return self._rule(self._rule(text, "T"), "lazy", "[lazy]")

    def _all_letters(self, text: str) -> bool:
        return not any(piece in self.specials for piece in self.specials.pieces(text))

    def _regex(self, schema: dict, path: str) -> str:
        """A Lark terminal for the strings that fit `schema`."""
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        terms = [] if (low, high) == (0, "") else [f"(?s:.{{{low},{high}}})"]
        for keyword, spelled in (("pattern", whole_texts), ("format", texts_of_format)):
            if keyword in schema:
                if fits_some(*terms, more := spelled(schema[keyword])):
                    terms.append(more)
                else:
                    self._leave_out(f"{path}.{keyword}")
        return " & ".join(f"/{term}/" for term in terms) or ANY_TEXT

    # Schemas

    def _resolved(self, schema: dict) -> dict:
        """`schema` with a reference to a part of the tool's own schema followed."""
        seen: set[str] = set()
        while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            target = referred(reference, self._root)
            if not isinstance(target, dict | bool):
                self._leave_out(f"$ref {reference}")
            schema = {**schema_of(target), **{name: value for name, value in schema.items() if name != "$ref"}}
        return schema

    def _members(self, schema: dict, seen: tuple = ()) -> Iterator[dict]:
        """The schemas of which a value fits one: those of a union, or `schema` itself. `seen`: references followed."""
        union = schema.get("anyOf") or schema.get("oneOf")
        if not union:
            yield schema
            return
        beside = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
        for member in union:
            if member is not False and (reference := schema_of(member).get("$ref")) not in seen:
                followed = seen if reference is None else (*seen, reference)
                yield from self._members({**beside, **self._resolved(schema_of(member))}, followed)

    def _properties(self, schema: dict, path: str) -> list[tuple[str, dict, bool]]:
        """(name, schema, whether it is required) of the properties whose names can be written."""
        given, required = properties(schema), schema.get("required", [])
        names = [name for name in dict.fromkeys([*given, *required]) if given.get(name) is not False]
        unread = [name for name in names if not self._is_read(name, 0)]
        self._leave_out(*(f"{path}.{name}" for name in unread))
        return [(name, schema_of(given.get(name)), name in required) for name in names if name not in unread]

    def _writable(self, schema: dict, path: str) -> dict:
        """`schema` with its constants as an `enum` of those that can be written, as any string if there is none."""
        keyword = "const" if "const" in schema else "enum"
        if keyword not in schema:
            return schema
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if kept := [value for value in values if self._is_read("x", value)]:
            return {"enum": kept}
        self._leave_out(f"{path}.{keyword}")
        return {"type": "string"}

    def _is_read(self, name: str, value: Any) -> bool:
        """Whether the format's reader takes a call with this argument, as it is written here, for what it is."""
        if PLAIN_WORD.fullmatch(f"{name}{value}"):
            return True
        form = self.form
        argument = form.parameter.format(name) + form.value + as_text(value) + form.end
        if form.shape == "gemma":
            argument = f"{{{name}:{self._gemma_text(value)}}}"
        root = {**properties(self._root), name: {"const": value}}
        scope = Scope({"f": {"properties": root}}, ordered=True)
        try:
            calls, _ = read_all(form.head.format("f") + argument + form.tail, self._reader, scope)
        except (Broken, Open):
            return False
        plain = self.literal(name) == json.dumps(name)
        return plain and [json.loads(call.arguments) for call in calls] == [{name: value}]

    def _note(self, schema: dict, path: str, held: set[str]) -> None:
        """List the keywords of an object or array that its rule does not hold to."""
        self._leave_out(*(f"{path}.{name}" for name in schema if name not in held | ANNOTATIONS))

    def _leave_out(self, *paths: str) -> None:
        self.not_enforced += (f"{self._name}: {path.lstrip('.')}" for path in paths)


def is_held(schema: dict) -> bool:
    """Whether not every beginning of a string that fits `schema` fits it too."""
    return bool(schema.get("minLength") or schema.keys() & {"pattern", "format"})


def schema_of(schema: Any) -> dict:
    return schema if isinstance(schema, dict) else {}


ANY = ["string", "number", "boolean", "null", "object", "array"]


def types_of(schema: dict) -> list[str]:
    kinds = schema.get("type", ANY)
    return [kinds] if isinstance(kinds, str) else list(kinds)
