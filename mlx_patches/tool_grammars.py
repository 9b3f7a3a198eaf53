"""A model's own way of writing a tool call → a Lark grammar in which only calls of given tools can be written.

A format is data: what stands around a call, around its arguments, and how a value is written. Three shapes cover them:
arguments as one JSON object; each parameter between tags, a string as raw text and anything else as JSON; Gemma's
objects with bare keys. What always holds: a call that the grammar allows is read by the format's parser as a call of
that tool, and its arguments fit the tool's schema but for the paths listed as not enforced.

Markers that are special tokens in a vocabulary are written as `<[id]>`, for no text may spell a special token.
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
from mlx_patches.tool_formats import FORMATS as READERS
from mlx_patches.tool_formats import read_all


class Tool(NamedTuple):
    """A function that may be called, and its arguments' schema as `prepare` made it."""

    name: str
    prepared: Prepared


class Format(NamedTuple):
    """How a model writes calls. `head` and `tail` stand around a call's arguments, `{}` for its name, `:0` its number.

    `shape`: "json", "tags" or "gemma". `parameter`, `end`: before (`{}` for its name) and after a parameter's value.
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


FORMATS = {
    "json_tools": Format('\n{{"name": "{}", "arguments": ', "}\n"),
    "kimi_k2": Format("<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>", "<|tool_call_end|>", between=""),
    "mistral": Format("{}[ARGS]", "", between="[TOOL_CALLS]"),
    "qwen3_coder": Format("\n<function={}>\n", "</function>\n", "tags", "<parameter={}>\n", "\n</parameter>\n"),
    "minimax_m2": Format('\n<invoke name="{}">\n', "</invoke>\n", "tags", '<parameter name="{}">', "</parameter>\n"),
    "glm47": Format("{}", "", "tags", "<arg_key>{}</arg_key>", "</arg_value>", value="<arg_value>"),
    "minicpm5": Format('"{}">', "", "tags", '<param name="{}">', "</param>", cdata=True),
    "muse_spark": Format(
        '\n<atem:invoke name="{}">\n', "</atem:invoke>\n", "tags", '<atem:parameter name="{}">', "</atem:parameter>\n"
    ),
    "gemma4": Format("call:{}", "", shape="gemma", quote='<|"|>'),
    "function_gemma": Format("call:{}", "", shape="gemma", quote="<escape>"),
}
FORMATS["harmony"] = Format("{}\n", "")  # a call's header is not fed to the grammar: only its name, on a line
FORMATS["laguna"] = FORMATS["glm47"]
KEY, VALUE = "<longcat_arg_key>{}</longcat_arg_key>", "longcat_arg_value>"
FORMATS["longcat"] = Format("{}", "", "tags", KEY, f"</{VALUE}", value=f"<{VALUE}")
"""By the name of mlx_lm's parser. A format that is not here is left free, and cannot be forced."""

# A number out of a float's range would be read as text.
NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/"
CDATA = r"\s*<!\[CDATA\["
PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
ANNOTATIONS = {"title", "description", "$schema", "$id", "default", "examples", "$comment", "deprecated", "readOnly"}
PLAIN_WORD = re.compile("[A-Za-z_][A-Za-z0-9_]*")


class Calls(NamedTuple):
    """`rules`: Lark in which `block` is one call, or one block of them, without the markers around it.

    `not_enforced`: paths below the tool's parameters, each with the tool's name in front.
    """

    rules: str
    not_enforced: tuple[str, ...]


def call_rules(form: Format, tools: list[Tool], specials: Specials, several: bool) -> Calls:
    """The grammar of a block of calls. `several`: a block may hold more than one, where its format allows that."""
    writer = _Writer(form, specials)
    for tool in tools:
        writer.add(tool)
    names = " | ".join(f"call_{n}" for n in range(len(tools)))
    more = ""
    if several and form.between is not None:
        more = f" ({writer.literal(form.between)} call)*" if form.between else " call*"
    rules = [f"block: call{more}", f"call: {names}", *writer.rules]
    return Calls("\n".join(rules), tuple(writer.not_enforced))


class Specials(dict[str, int]):
    """The special tokens of a vocabulary: their ids by their texts."""

    @cached_property
    def any_of(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self, key=len, reverse=True)))})")


def literal(text: str, specials: Specials) -> str:
    """`text` as a Lark sequence, its special tokens by their ids."""
    if not specials:
        return json.dumps(text)  # ASCII: llguidance's Lark knows no U+007F
    pieces = [piece for piece in specials.any_of.split(text) if piece]
    return " ".join(f"<[{specials[p]}]>" if p in specials else json.dumps(p) for p in pieces) or '""'


class _Writer:
    """Writes the rules of each tool's call; rule names are numbered, so that none can clash."""

    def __init__(self, form: Format, specials: Specials):
        self.form, self.specials = form, specials
        self._break = ' "\\n"?' if form.value else ""
        self.rules: list[str] = []
        self.not_enforced: list[str] = []
        self._tools = 0
        self._count = 0
        self._named: dict[str, str] = {}

    def literal(self, text: str) -> str:
        return literal(text, self.specials)

    def add(self, tool: Tool) -> None:
        self._root, self._name, self._named = json.loads(tool.prepared.text), tool.name, {}
        self._leave_out(*tool.prepared.not_enforced)
        arguments = {"json": self._json, "tags": self._tags, "gemma": self._gemma_root}[self.form.shape]
        head, number, after = self.form.head.partition(":0")
        head, tail = head.format(tool.name) + number[:1], self.form.tail
        line, head = ('"\\n"? ', head[1:]) if head.startswith("\n") else ("", head)  # not all models write it
        end, tail = (' "\\n"?', tail[:-1]) if tail.endswith("\n") else ("", tail)
        written = ' " "? '.join(map(self.literal, head.split(" "))) if head.startswith("{") else self.literal(head)
        written += f" /[0-9]{{1,3}}/ {self.literal(after)}" if number else self._break
        self.rules.append(f"call_{self._tools}: {line}{written} {arguments(self._root)} {self.literal(tail)}{end}")
        self._tools += 1

    def _rule(self, body: str, kind: str = "r", options: str = "") -> str:
        self._count += 1
        name = f"{kind}_{self._count}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _json(self, schema: dict) -> str:
        """A rule for a value as JSON. `schema`: a part of the tool's, whose definitions it may refer to."""
        kept = {name: self._root[name] for name in ("$defs", "definitions", "x-guidance") if name in self._root}
        return self._rule(f"%json {json.dumps({**schema, **kept}, separators=(',', ':'))}")

    # Parameters between tags

    def _tags(self, root: dict) -> str:
        root = self._resolved(root)
        self._note(root, "", PLAIN)
        parts = []
        for name, schema, required in self._properties(root, ""):
            part = f"{self.literal(self.form.parameter.format(name))} {self._tagged(schema, name)}{self._break}"
            parts.append(part if required else f"({part})?")
        if not root.get("properties") and root.get("additionalProperties") is not False:
            before, after = map(self.literal, self.form.parameter.split("{}"))
            name = self._rule(r"/[\w.-]+/", "W")
            value = self._tagged(_schema_of(root.get("additionalProperties")), "*")
            parts.append(f"({before} {name} {after} {value}{self._break})*")
        return " ".join(parts)

    def _tagged(self, schema: dict, path: str) -> str:
        """A value and the tag after it. Where any text may stand, the reader takes all but null for text."""
        schema, end = self._resolved(schema), self.literal(self.form.end)
        choices: list[str] = []
        members = [self._writable(member, path) for member in self._members(schema)]
        is_text = any("type" in member and "string" in _types(member) for member in members if "enum" not in member)
        for member in members:
            if "enum" in member:
                values = [value for value in member["enum"] if not is_text or isinstance(value, str | None)]
                choices += (f"{json.dumps(as_text(value))} {end}" for value in values)
                continue
            if "string" in (types := _types(member)):
                choices.append(self._raw(member, path, self.form.end))
            if rest := [each for each in types if each != "string" and (not is_text or each == "null")]:
                choices.append(f"{self._plain(member, rest)} {end}")
        return f"{self._break} {self.literal(self.form.value)} ({' | '.join(choices)})"

    def _plain(self, schema: dict, kinds: list[str]) -> str:
        """A value of these types as JSON."""
        bounded = any(name in schema for name in (*BOUNDS, "multipleOf"))
        rest = [kind for kind in kinds if bounded or kind != "number"]
        rules = [self._json({**schema, "type": rest})] if rest else []
        return f"({' | '.join(rules if rest == kinds else [*rules, self._rule(NUMBER, 'N')])})"

    def _raw(self, schema: dict, path: str, end: str) -> str:
        """A string as raw text and `end`, the tag or quote after it."""
        text = self._regex(schema, path)
        if end.strip() in self.specials:
            # Its token may be text as well.
            return f"{self._rule(f'{text} & ~/(?s:.*){_escaped(end.strip())}(?s:.*)/', 'R')} {self.literal(end)}"
        if not self.form.cdata:
            return self._lazy(schema, f"({text})", _escaped(end))
        section = self._lazy(schema, f"/{CDATA}/ ({text})", rf"\]\]>\s*{_escaped(end)}")
        return f"{section} | {self._lazy(schema, f'(({text}) & ~/{CDATA}(?s:.*)/)', _escaped(end))}"

    def _lazy(self, schema: dict, text: str, stop: str) -> str:
        """It ends at the first end tag, which is a part of it; a text that may not end there has none inside."""
        held = schema.get("minLength") or schema.keys() & {"pattern", "format"}
        longer = f" & ~/(?s:.*){stop}(?s:.+)/" if held else ""
        return self._rule(self._rule(f"{text} /{stop}/{longer}", "T"), "lazy", "[lazy]")

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
        return " & ".join(f"/{term}/" for term in terms) or "/(?s:.*)/"

    # Gemma's objects

    def _gemma_root(self, root: dict) -> str:
        return self._gemma({**self._resolved(root), "type": "object"}, "")

    def _gemma(self, schema: dict, path: str) -> str:
        """A rule for a value as Gemma writes it: bare keys, strings between quotes of its own."""
        if isinstance(schema.get("$ref"), str):
            written = json.dumps(schema, sort_keys=True)  # what stands beside a reference holds too
            if written not in self._named:
                self._count += 1
                name = self._named[written] = f"ref_{self._count}"
                self.rules.append(f"{name}: {self._gemma(self._resolved(schema), path)}")
            return self._named[written]
        schema = self._writable(schema, path)
        if "enum" in schema:
            quote, values = f" {self.literal(self.form.quote)} ", map(self._gemma_text, schema["enum"])
            return self._rule(" | ".join(quote.join(map(json.dumps, v.split(self.form.quote))) for v in values))
        if "allOf" in schema:
            self._leave_out(f"{path}.allOf")
            schema = {name: value for name, value in schema.items() if name != "allOf"}
        if not schema.keys() - ANNOTATIONS:
            return self._gemma_anything()
        if union := schema.get("anyOf") or schema.get("oneOf"):
            beside = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
            # A reference stays one: it may lead back to here.
            choices = [self._gemma(m if "$ref" in m else {**beside, **m}, path) for m in map(_schema_of, union)]
        else:
            choices = [self._gemma_of_type(kind, schema, path) for kind in _types(schema)]
        return self._rule(" | ".join(choices))

    def _gemma_anything(self) -> str:
        if "anything" not in self._named:
            self._named["anything"] = name = f"anything_{self._tools}"
            text = self._gemma_of_type("string", {}, "")
            simple = self._plain({}, ["number", "boolean", "null"])
            items = f'"[" ({name} ("," {name})*)? "]"'
            self.rules.append(f"{name}: {simple} | {text} | {_gemma_pairs(name)} | {items}")
        return self._named["anything"]

    def _gemma_of_type(self, kind: str, schema: dict, path: str) -> str:
        if kind == "string":
            return f"{self.literal(self.form.quote)} {self._raw(schema, path, self.form.quote)}"
        if kind == "object":
            return self._gemma_object(schema, path)
        if kind == "array":
            return self._gemma_array(schema, path)
        return self._plain({name: schema[name] for name in (*BOUNDS, "multipleOf") if name in schema}, [kind])

    def _gemma_object(self, schema: dict, path: str) -> str:
        self._note(schema, path, PLAIN)
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            return _gemma_pairs(self._gemma(_schema_of(schema.get("additionalProperties")), f"{path}.*"))
        after = {True: '""', False: '""'}
        for name, each, required in reversed([*self._properties(schema, path)]):
            # Each rule goes on with what follows it, with or without a comma.
            pair = f"{json.dumps(name + ':')} {self._gemma(each, f'{path}.{name}')} {after[True]}"
            skip = {begun: "" if required else f" | {after[begun]}" for begun in (True, False)}
            after = {True: self._rule(f'"," {pair}{skip[True]}'), False: self._rule(f"{pair}{skip[False]}")}
        return f'"{{" {after[False]} "}}"'

    def _gemma_array(self, schema: dict, path: str) -> str:
        self._note(schema, path, {"type", "items", "minItems", "maxItems"})
        item = self._gemma(_schema_of(schema.get("items", {})), f"{path}[]")
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        items = f"{item} {more}"
        return f'"[" {items if low else f"({items})?"} "]"'

    def _gemma_text(self, value: Any) -> str:
        match value:
            case str():
                return f"{self.form.quote}{value}{self.form.quote}"
            case dict():
                return f"{{{','.join(f'{name}:{self._gemma_text(each)}' for name, each in value.items())}}}"
            case list():
                return f"[{','.join(map(self._gemma_text, value))}]"
        return json.dumps(value)

    # Schemas

    def _resolved(self, schema: dict) -> dict:
        """`schema` with a reference to a part of the tool's own schema followed."""
        seen: set[str] = set()
        while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            target = referred(reference, self._root)
            if not isinstance(target, dict | bool):
                self._leave_out(f"$ref {reference}")
            schema = {**_schema_of(target), **{name: value for name, value in schema.items() if name != "$ref"}}
        return schema

    def _members(self, schema: dict, seen: tuple = ()) -> Iterator[dict]:
        """The schemas of which a value fits one: those of a union, or `schema` itself. `seen`: references followed."""
        union = schema.get("anyOf") or schema.get("oneOf")
        if not union:
            yield schema
            return
        beside = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
        for member in union:
            if member is not False and (reference := _schema_of(member).get("$ref")) not in seen:
                followed = seen if reference is None else (*seen, reference)
                yield from self._members({**beside, **self._resolved(_schema_of(member))}, followed)

    def _properties(self, schema: dict, path: str) -> list[tuple[str, dict, bool]]:
        """(name, schema, whether it is required) of the properties whose names can be written."""
        given, required = properties(schema), schema.get("required", [])
        names = [name for name in dict.fromkeys([*given, *required]) if given.get(name) is not False]
        unread = [name for name in names if not self._is_read(name, 0)]
        self._leave_out(*(f"{path}.{name}" for name in unread))
        return [(name, _schema_of(given.get(name)), name in required) for name in names if name not in unread]

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
        reader = READERS[next(known for known, each in FORMATS.items() if each == form)]
        scope = Scope({"f": {"properties": {name: {"const": value}}}})
        try:
            calls, _ = read_all(form.head.format("f") + argument + form.tail, reader, scope)
        except (Broken, Open):
            return False
        plain = self.literal(name) == json.dumps(name)
        return plain and [json.loads(call.arguments) for call in calls] == [{name: value}]

    def _note(self, schema: dict, path: str, held: set[str]) -> None:
        """List the keywords of an object or array that its rule does not hold to."""
        self._leave_out(*(f"{path}.{name}" for name in schema if name not in held | ANNOTATIONS))

    def _leave_out(self, *paths: str) -> None:
        self.not_enforced += (f"{self._name}: {path.lstrip('.')}" for path in paths)


def _escaped(text: str) -> str:
    """`text` inside a Lark regular expression."""
    return re.sub(r"([][.{}()*+?^$|\\/])", r"\\\1", text).replace("\n", "\\n")


def _gemma_pairs(value: str) -> str:
    """An object of any names."""
    return f'"{{" (/[A-Za-z_]+:/ {value} ("," /[A-Za-z_]+:/ {value})*)? "}}"'


def _schema_of(schema: Any) -> dict:
    return schema if isinstance(schema, dict) else {}


ANY = ["string", "number", "boolean", "null", "object", "array"]


def _types(schema: dict) -> list[str]:
    kinds = schema.get("type", ANY)
    return [kinds] if isinstance(kinds, str) else list(kinds)
