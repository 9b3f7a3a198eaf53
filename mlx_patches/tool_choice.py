"""Which tool calls may come: `tool_choice`, `parallel_tool_calls`, `strict`.

Replaces   nothing: mlx_lm 0.32.2 does not read `tool_choice`, and holds no call to its tool's schema
Why        an agent that requires a call gets prose, a call of a tool that is not there, or arguments that do not fit
Upstream   —
Delete when mlx_lm's server enforces `tool_choice` and tools' schemas
Test       tests/test_tool_choice.py, tests/test_tool_grammars.py

What a request says becomes ToolRules, which travel with it. With the loaded model's format they become grammars: one
for the whole reply, where calls are required or a schema stands beside the tools, or one for a single block of calls,
which the watcher enters at the opening marker and leaves at its end. A format without a row in tool_grammars.FORMATS
is left free, and a request that would force it is refused.

What always holds: a tool that no grammar holds takes no other down. And calls in free text never keep its first token
waiting: their grammar is made in a thread beside, which gives way to the others, and is waited for where a call begins.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from localServerCommon import Refused
from mlx_patches.json_schemas import Dropped, Prepared, prepare
from mlx_patches.reply_format import ANSWER, REASONING, Part, Parts, TokenSplitter, TokenState
from mlx_patches.structured_output import Grammar, Kept
from mlx_patches.tool_grammars import FORMATS, Calls, Specials, Tool, call_rules, literal

ANY_OBJECT = Prepared('{"type":"object"}', (Dropped("parameters", "parameters", "no grammar holds them"),))
PAUSE = 0.0001  # seconds between two tools, in which another thread gets the interpreter
WAIT = 5.0  # seconds that a call waits for its grammar; its batch waits with it
NAME = re.compile(r"[\w.:/@-]{1,128}", re.ASCII)
LINE = r'"\n"'
BREAK = r"(/\n{1,2}/)?"  # between thinking, calls, and calls


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
                raise
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
        if not isinstance(schema, dict | None):
            raise Refused(
                f"tools[{at}].function.parameters must be an object", param=f"tools[{at}].function.parameters"
            )
        if not isinstance(function.get("strict"), bool | None):
            raise Refused(f"tools[{at}].function.strict must be a boolean", param=f"tools[{at}].function.strict")
    return tools


def _read_choice(choice: Any) -> tuple[str, list[str] | None]:
    """("none", "auto" or "required"; the names that may be called, or None for all)."""
    wrong = Refused("tool_choice must be auto, none, required or name tools", param="tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}} | {
            "type": "allowed_tools",
            "mode": mode,
            "tools": list(tools),
        } if mode in ("auto", "required") and tools:
            names = []
            for tool in tools:
                match tool:
                    case {"type": "function", "function": {"name": str(name)}} | {
                        "type": "function",
                        "name": str(name),
                    }:
                        names.append(name)
                    case _:
                        raise wrong
            return mode, names
    raise wrong


def _declared(function: dict, at: int) -> Declared:
    schema = {**(function.get("parameters") or {}), "type": "object"}
    try:
        declared = Declared(function["name"], _as_json(schema), at, bool(function.get("strict")))
    except RecursionError:
        param = f"tools[{at}].function.parameters"
        raise Refused(f"{param}: nested too deeply", param=param, code="invalid_json_schema") from None
    if declared.strict:
        declared.prepared()
    return declared


_as_json = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_beside = ThreadPoolExecutor(2, "tool grammars")


class ToolFormat:
    """The loaded model's way of writing calls, as grammars."""

    def __init__(self, tokenizer: Any):
        """`tokenizer`: mlx_lm's TokenizerWrapper."""
        self.name = tokenizer.tool_parser.__module__.rpartition(".")[2] if tokenizer.has_tool_calling else None
        self.form = FORMATS.get(self.name or "")
        self.start, self.end = tokenizer.tool_call_start or "", tokenizer.tool_call_end or ""
        self.headed = self.name == "harmony"  # a header opens a call, and no grammar sees it
        if self.headed:
            self.start = self.end = ""
        added = tokenizer._tokenizer.added_tokens_decoder
        self.specials = Specials((token.content, number) for number, token in added.items())
        self._made = Kept(64)  # an agent sends the same tools each turn

    def reply(self, rules: ToolRules, answer: Grammar | None, provider: Any) -> Grammar:
        """What holds the whole reply: calls, or else `answer`. Raises Refused (400)."""
        write = lambda calls: self._reply(calls, rules, answer)  # noqa: E731
        return self._made.of((rules, answer), lambda: self._make(rules, write, provider)).result()

    def block(self, rules: ToolRules, provider: Any) -> Future[Grammar]:
        """What holds a block of calls, from after its opening marker to its closing one. Raises Refused (400).

        In the making, unless it has been made or a strict tool must be judged before the reply begins.
        """
        now = any(tool.strict for tool in rules.tools)
        make = lambda: self._make(rules, self._block, provider, patient=not now)  # noqa: E731
        made = self._made.of(rules, make, (lambda work: work()) if now else _beside.submit)
        if now:
            made.result()
        return made

    def matcher_later(self, rules: ToolRules, provider: Any) -> Callable[[], Any]:
        """A function that gives the matcher of a block, or None where there is none. It waits, and never raises."""
        made = self.block(rules, provider)

        def matcher():
            try:
                return provider.grammars.matcher(made.result(WAIT))
            except Exception as fault:
                logging.warning("calls are held to their names only: %r", fault)
            try:
                names_only = [Tool(tool.name, ANY_OBJECT) for tool in rules.tools]
                return provider.grammars.matcher(self._block(self._calls(rules, names_only)))
            except Exception:
                logging.exception("calls are left free")

        return matcher

    def _make(self, rules: ToolRules, write: Callable, provider: Any, patient: bool = False) -> Grammar:
        """A grammar that is compiled. Tools of which it does not compile may have any object, and the longest where
        all together are too much. Raises Refused (400) where one of those is strict, or nothing compiles.

        `patient`: other threads go first.
        """
        tools, compiler = [], provider.grammars
        for tool in rules.tools:
            tools.append(tool.prepared())
            if patient:
                time.sleep(PAUSE)
        alone = True
        while True:
            calls = self._calls(rules, tools)
            for tool in (each for each in rules.tools if each.strict):
                lost = [line for line in calls.not_enforced if line.startswith(f"{tool.name}: ")]
                if lost:
                    message = f"{tool.param}: {lost[0]} cannot be enforced, and strict is true"
                    raise Refused(message, param=tool.param, code="invalid_json_schema")
            try:
                compiler.matcher(grammar := write(calls))
                break
            except Refused as refused:
                held = [at for at, tool in enumerate(tools) if tool.prepared is not ANY_OBJECT]
                if not held:
                    raise
                loose = [at for at in held if not self._compiles(rules, tools[at], compiler)] if alone else []
                loose = loose or sorted(held, key=lambda at: len(tools[at].prepared.text))[len(held) // 2 :]
                for at in loose:
                    tools[at] = Tool(tools[at].name, ANY_OBJECT)
                names = ", ".join(tools[at].name for at in loose)
                logging.warning("%s; the arguments of %s may be any object", refused.message, names)
                alone = False
        if calls.not_enforced:
            logging.warning("tools: not enforced: %s", ", ".join(calls.not_enforced))
        return grammar

    def _compiles(self, rules: ToolRules, tool: Tool, compiler: Any) -> bool:
        try:
            compiler.check(self._block(self._calls(rules, [tool])))
        except Refused:
            return False
        return True

    def _reply(self, calls: Calls, rules: ToolRules, answer: Grammar | None) -> Grammar:
        unit = "block" if self.headed else f"{BREAK} {self._literal(self.start)} block {self._literal(self.end)}"
        together = rules.several and self.end
        other = "" if answer is None else f" | {LINE if self.headed else ''} @answer"
        lines = [f"start: calls{other}", f"calls: ({unit}){'+' if together else ''}"]
        grammars: list[dict] = [{"lark_grammar": "\n".join([*lines, calls.rules])}]
        if answer is not None:
            grammars.append({**_only_grammar(answer), "name": "answer"})
        left_out = (*calls.not_enforced, *(answer.not_enforced if answer else ()))
        kind = answer.kind if answer is not None else "tools"
        return Grammar(json.dumps({"grammars": grammars}), answer.param if answer else "tools", kind, left_out)

    def _block(self, calls: Calls) -> Grammar:
        lines = [f"start: block {self._literal(self.end)}", calls.rules]
        grammars = [{"lark_grammar": "\n".join(lines)}]
        return Grammar(json.dumps({"grammars": grammars}), "tools", "tools", calls.not_enforced)

    def _calls(self, rules: ToolRules, tools: list[Tool]) -> Calls:
        return call_rules(self.form, tools, self.specials, rules.several)

    def _literal(self, text: str) -> str:
        return literal(text, self.specials) if text else ""


def _only_grammar(answer: Grammar) -> dict:
    if answer.source.startswith("{"):
        return json.loads(answer.source)["grammars"][0]
    return {"lark_grammar": answer.source}


tool_format = lru_cache(2)(ToolFormat)  # one a loaded model


class CallState(NamedTuple):
    """A TokenState, and where the answer stands: `said` and `held` (tokens) while it may yet be a call; `inner`, the
    state of mlx_lm's machine once it is one; `plain` once it is none."""

    phase: str
    matched: int = 0
    pending: bytes = b""
    said: str = ""
    held: int = 0
    inner: tuple | None = None
    plain: bool = False


class CallSplitter(TokenSplitter):
    """A TokenSplitter whose answer, where it begins with a call's marker, is read by `inner`, which reads calls."""

    def __init__(self, outer: TokenSplitter, inner: Any, marker: str):
        super().__init__(outer.opening, outer.closing, outer._bytes, outer.first.phase)
        self._inner, self._marker = inner, marker
        self.first = CallState(*self.first)

    def split(self, state: CallState, token: int, text: str = "") -> tuple[CallState, Parts]:
        outer, parts = super().split(TokenState(*state[:3]), token)
        state, read = CallState(*outer, *state[3:]), []
        for part in parts:
            if part.kind == ANSWER:
                state, more = self._answer(state, part)
                read += more
            else:
                read.append(part)
        return state, read

    def _answer(self, state: CallState, part: Part) -> tuple[CallState, Parts]:
        if state.plain:
            return state, [part]
        said, held = state.said + part.text, state.held + part.units
        inner = state.inner
        if inner is None:
            begun = said.lstrip()
            if begun.startswith(self._marker):
                inner = self._inner.first
            elif self._marker.startswith(begun):
                return state._replace(said=said, held=held), []
            else:
                return state._replace(said="", held=0, plain=True), [Part(ANSWER, said, held)]
        inner, pieces = self._inner.split(inner, 0, said)
        pieces = [piece._replace(units=held * (not at)) for at, piece in enumerate(pieces)]
        return state._replace(said="", held=0 if pieces else held, inner=inner), pieces

    def flush(self, state: CallState, cut: bool = False) -> Parts:
        last = super().flush(state)
        if state.inner is None:
            return [Part(ANSWER, state.said, state.held), *last] if state.said else last
        # A character that is not whole is the call's too. Units are characters there, and tokens here.
        inner, pieces = self._inner.split(state.inner, 0, last[0].text)
        pieces += self._inner.flush(inner, cut)
        return [piece._replace(units=state.held * (not at)) for at, piece in enumerate(pieces)]

    def kind(self, state: CallState) -> str:
        if state.phase != REASONING and state.inner is not None:
            return self._inner.kind(state.inner)
        return TokenSplitter.kind(state)


class ChoosesTools:
    """Mixin for ResponseGenerator: what a request says of its tools becomes grammars, in the handler's thread."""

    def prepare(self, request: Any, args: Any) -> None:
        ask, provider = args.ask, self.model_provider
        if ask.tools is not None and provider.model is not None:
            form = tool_format(provider.tokenizer)
            if form.form is not None:
                self._hold(form, ask)
            elif ask.tools.required:
                what = "has no tool format" if form.name is None else f"writes {form.name} calls"
                message = f"this model's tool format cannot be forced: it {what}"
                raise Refused(message, param=ask.tools.forced, code="unsupported_tool_choice")
            else:
                what = "this model has none" if form.name is None else f"no grammar for {form.name}"
                ask.free = (f"tools (tool format: {what})",)
                logging.warning("not enforced: %s", *ask.free)
        super().prepare(request, args)

    def _hold(self, form: ToolFormat, ask: Any) -> None:
        provider, rules = self.model_provider, ask.tools
        if rules.required or ask.grammar is not None:
            answer = None if rules.required else ask.grammar
            if answer is not None:
                provider.grammars.matcher(answer)  # what is wrong with it alone is no tool's fault
            ask.grammar, ask.calls_in_grammar = form.reply(rules, answer, provider), True
        else:
            form.block(rules, provider).add_done_callback(lambda made: _note_free(ask, made))


def _note_free(ask: Any, made: Future[Grammar]) -> None:
    if made.exception() is None:
        ask.free = made.result().not_enforced
