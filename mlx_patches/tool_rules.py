"""What a request says of its tools: which are declared, which may be called, and which arguments fit them.

`tools`, `tool_choice`, `parallel_tool_calls` and `strict` become ToolRules, which travel with the request. What always
holds: a field of another shape is refused by its name.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from llguidance import LLMatcher

from localServerCommon import Refused
from mlx_patches.argument_values import parts, properties, property_schema
from mlx_patches.grammar_rules import Tool
from mlx_patches.json_schemas import Dropped, Prepared, prepare
from mlx_patches.structured_output import Grammar

ANY_OBJECT = Prepared('{"type":"object"}', (Dropped("parameters", "parameters", "no grammar holds them"),))
NAME = re.compile(r"[\w.:/@-]{1,128}", re.ASCII)
_as_json = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


class Declared(NamedTuple):
    """A tool that may be called, `at` in the request's `tools`. `text`: its parameters' schema, as JSON."""

    name: str
    text: str
    at: int
    strict: bool = False

    @property
    def param(self) -> str:
        return f"tools[{self.at}].function.parameters"

    def prepared(self) -> Tool:
        """Ready for a grammar. Raises Refused (400) where it is strict and its schema cannot be held."""
        try:
            return Tool(self.name, prepare(json.loads(self.text), param=self.param, strict=self.strict))
        except Refused as refused:
            if self.strict:
                message = f"{refused.message} (tool {self.name}, strict)"
                raise Refused(message, param=refused.param, code=refused.code) from None
            logging.warning("%s; the arguments of %s may be any object", refused.message, self.name)
            return Tool(self.name, ANY_OBJECT)


@dataclass(frozen=True)
class ToolRules:
    """`required`: nothing but calls may come; `several`: more than one. `forced`: the field that says so."""

    tools: tuple[Declared, ...]
    required: bool = False
    several: bool = True
    forced: str = "tool_choice"


def read_tools(body: dict) -> tuple[list[dict] | None, ToolRules | None]:
    """(the tools that the template is shown, what their calls are held to). Raises Refused (400) naming the field."""
    shown = _read_functions(body.get("tools") or [])
    parallel, choice = body.get("parallel_tool_calls"), body.get("tool_choice")
    if not isinstance(parallel, bool | None):
        raise Refused("parallel_tool_calls must be a boolean", param="parallel_tool_calls")
    mode, names = _read_choice(choice)
    if mode == "none":
        return None, None
    declared = {tool["function"]["name"]: tool["function"] for tool in shown}
    for name in names or ():
        if name not in declared:
            raise Refused(f"tool_choice names {name!r}, which is no tool of this request", param="tool_choice")
    if not shown:
        if mode == "required":
            raise Refused("tool_choice asks for a call and there are no tools", param="tool_choice")
        return None, None
    chosen = [name for name in declared if names is None or name in names]
    positions = {tool["function"]["name"]: at for at, tool in enumerate(shown)}
    tools = tuple(_declared(declared[name], positions[name]) for name in chosen)
    one = parallel is False or (mode == "required" and isinstance(choice, dict) and choice.get("type") == "function")
    return shown, ToolRules(tools, mode == "required", not one)


def _read_functions(tools: list) -> list[dict]:
    names = set()
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise Refused(f"tools[{at}] must be an object of type function, with a function", param=f"tools[{at}]")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            what = "a name of letters, digits, and . _ : / @ -"
            raise Refused(f"tools[{at}].function.name must be {what}", param=f"tools[{at}].function.name")
        if name in names:
            raise Refused(f"tools[{at}].function.name: {name} is declared twice", param=f"tools[{at}].function.name")
        names.add(name)
        kinds = schema.get("type", "object") if isinstance(schema, dict) else "object"
        if not isinstance(schema, dict | None) or "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            what = "must be an object, a schema of type object"
            raise Refused(f"tools[{at}].function.parameters {what}", param=f"tools[{at}].function.parameters")
        if not isinstance(function.get("strict"), bool | None):
            raise Refused(f"tools[{at}].function.strict must be a boolean", param=f"tools[{at}].function.strict")
    return tools


def _read_choice(choice: Any) -> tuple[str, list[str] | None]:
    """("none", "auto" or "required"; the names that may be called, or None for all)."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice or "auto", None
        case {"type": "function"}:
            return "required", [_name_in(choice)]
        case {"type": "allowed_tools"}:
            match choice.get("allowed_tools", choice):
                case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
                    return mode, [_name_in(tool) for tool in tools]
            what = "mode, which is auto or required, and tools, a list of functions"
            raise Refused(f"tool_choice of type allowed_tools must have {what}", param="tool_choice")
    raise Refused("tool_choice must be auto, none, required or name tools", param="tool_choice")


def _name_in(named: Any) -> str:
    match named:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise Refused("tool_choice must name a tool as an object of type function, with its name", param="tool_choice")


def _declared(function: dict, at: int) -> Declared:
    parameters = function.get("parameters")
    # Left out, they are an empty list, as in OpenAI's API.
    schema = {**(parameters if parameters is not None else {"additionalProperties": False}), "type": "object"}
    try:
        declared = Declared(function["name"], _as_json(schema), at, bool(function.get("strict")))
    except RecursionError:
        param = f"tools[{at}].function.parameters"
        raise Refused(f"{param}: nested too deeply", param=param, code="invalid_json_schema") from None
    if declared.strict:
        declared.prepared()
    return declared


def fits(rules: ToolRules, name: str, arguments: str, provider: Any, every: bool) -> bool:
    """Whether a call that no grammar saw may come: of a strict tool, only with arguments (JSON) that fit its schema.

    Of another tool, or one that is not in `rules`, with any, but where `every` call of this kind is to be held: there
    it must be a permitted one's, and fit.
    """
    tool = next((tool for tool in rules.tools if tool.name == name), None)
    if tool is None or not (tool.strict or every):
        return not every
    try:
        schema = json.loads(tool.text)
        value = _in_order(json.loads(arguments, parse_float=_number), schema, schema)
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "?")  # llguidance's JSON has no U+007F
        grammar = Grammar(LLMatcher.grammar_from_json_schema(tool.prepared().prepared.text), tool.param, "tools")
        return provider.grammars.allows(grammar, text)
    except Refused:
        return not tool.strict  # its schema does not compile
    except (ValueError, RecursionError):  # nested too deeply, or a number of too many digits
        return False


def _number(text: str) -> float:
    """A whole number is an integer, however it is written."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _in_order(value: Any, schema: Any, root: Any) -> Any:
    """`value`, the members of each object in the order in which its schema names them."""
    if not isinstance(value, list | dict):
        return value
    joined = [*parts(schema, root)]
    if isinstance(value, list):
        items = {"anyOf": [part.get("items") for part in joined]}
        return [_in_order(each, items, root) for each in value]
    order = [name for part in joined for name in properties(part) if name in value]
    below = {name: {"anyOf": [property_schema(part, name) for part in joined]} for name in value}
    return {name: _in_order(value[name], below[name], root) for name in dict.fromkeys([*order, *value])}
