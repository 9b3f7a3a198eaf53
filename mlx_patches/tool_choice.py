"""Which tool calls may come: a grammar of them, for the whole reply or for a block of it.

Replaces   nothing: mlx_lm 0.32.2 does not read `tool_choice`, and holds no call to its tool's schema
Why        an agent that requires a call gets prose, a call of a tool that is not there, or arguments that do not fit
Upstream   —
Delete when mlx_lm's server enforces `tool_choice` and tools' schemas
Test       tests/test_tool_choice.py, tests/test_tool_grammars.py

What a request says of its tools (tool_rules.py) becomes grammars, in the loaded model's format: one
for the whole reply, where calls are required or a schema stands beside the tools, or one for a single block of calls,
which the watcher enters at the opening marker and leaves at its end. A format without a row in tool_grammars.FORMATS
is left free, and a request that would force it is refused.

What always holds: a tool that no grammar holds takes no other down. And calls in free text never keep its first token
waiting: their grammar is made in a thread beside, which gives way to the others, and is waited for where a call begins.
It is given up once all who asked for it have left.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any

from localServerCommon import Refused
from mlx_patches.grammar_rules import Specials, Tool, literal
from mlx_patches.structured_output import Grammar, Kept
from mlx_patches.tool_grammars import FORMATS, Calls, call_rules
from mlx_patches.tool_rules import ANY_OBJECT, ToolRules

PAUSE = 0.0001  # seconds between two tools, in which another thread gets the interpreter
WAIT = 1.0  # seconds that a call waits for its grammar; its batch waits with it
LARGE = 30_000  # characters of a set's schemas, beyond which no small set waits behind it
LINE = r'"\n"'
BREAK = r"(/\n{1,2}/)?"  # between thinking, calls, and calls

Left = Callable[[], bool]
"""Whether the client that asked is gone. One whose reply has ended is not: its next turn has the same tools."""
STAYS: Left = lambda: False  # noqa: E731
_beside = [ThreadPoolExecutor(2, f"{size} tool grammars") for size in ("small", "large")]


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
        self._askers: dict[Hashable, list[Left]] = {}  # of what is in the making
        self._asking = Lock()

    def reply(self, rules: ToolRules, answer: Grammar | None, provider: Any, left: Left = STAYS) -> Grammar:
        """What holds the whole reply: calls, or else `answer`. Raises Refused (400)."""
        write = lambda calls: self._reply(calls, rules, answer)  # noqa: E731
        return self._ask((rules, answer), lambda pause: self._make(rules, write, provider, pause), left).result()

    def block(self, rules: ToolRules, provider: Any, left: Left = STAYS) -> Future[Grammar]:
        """What holds a block of calls, from after its opening marker to its closing one. Raises Refused (400).

        In the making, unless it has been made or a strict tool must be judged before the reply begins.
        """
        now = any(tool.strict for tool in rules.tools)
        beside = _beside[sum(len(tool.text) for tool in rules.tools) > LARGE]
        make = lambda pause: self._make(rules, self._block, provider, pause)  # noqa: E731
        made = self._ask(rules, make, left, None if now else beside)
        if now:
            made.result()
        return made

    def _ask(self, key: Hashable, make: Callable, left: Left, beside: ThreadPoolExecutor | None = None) -> Future:
        """What `make(pause)` gives, made by this thread or `beside`, and given up once all who asked have left."""
        works: list[Callable[[], None]] = []
        with self._asking:
            askers = self._askers.get(key, [])
            if all(gone() for gone in askers):
                if (given_up := self._made.get(key)) is not None and not given_up.done():
                    self._made.forget(key, given_up)
                askers = self._askers[key] = []
            askers.append(left)
            pause = lambda: self._pause(askers, PAUSE if beside else 0)  # noqa: E731
            made = self._made.of(key, lambda: make(pause), works.append)
        made.add_done_callback(lambda _: self._askers.get(key) is askers and self._askers.pop(key))
        for work in works:
            beside.submit(work) if beside else work()
        return made

    def _pause(self, askers: list[Left], seconds: float) -> None:
        """Let other threads go first. Raises CancelledError where nobody waits any more."""
        time.sleep(seconds)
        with self._asking:
            if all(gone() for gone in askers):
                askers.clear()
                logging.info("a grammar of tools is given up, for its clients have left")
                raise CancelledError

    def matcher_later(self, rules: ToolRules, provider: Any, left: Left = STAYS) -> Callable[[], Any]:
        """A function that gives the matcher of a block, or None where there is none. It waits, and never raises."""
        made = self.block(rules, provider, left)

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

    def is_call(self, rules: ToolRules) -> Callable[[str], bool]:
        """Whether what follows a marker is no prose: all that stands before a name, or where that is little, more."""
        head, _, behind = self.form.head.replace("{{", "{").partition("{}")
        head = "".join(head.split())
        if len(head) > 1:
            return lambda text: len("".join(text.split())) >= len(head)
        names = "|".join(re.escape(tool.name) for tool in rules.tools)
        after = re.escape(behind[:1]) or r"[<\n]"
        named = re.compile(rf"\s*(?:{head}(?:{names}){after}|\[\s*\{{)")  # Mistral's may be in a list
        return lambda text: named.match(text) is not None

    def _make(self, rules: ToolRules, write: Callable, provider: Any, pause: Callable[[], Any] = bool) -> Grammar:
        """A grammar that is compiled. Tools of which it does not compile may have any object, and the longest where
        all together are too much. Raises Refused (400) where one of those is strict, or nothing compiles.

        `pause` is called between two tools, and what it raises ends the making.
        """
        tools, compiler = [], provider.grammars
        for tool in rules.tools:
            pause()
            tools.append(tool.prepared())
        alone = True
        while True:
            pause()
            calls = self._calls(rules, tools)
            for tool in (each for each in rules.tools if each.strict):
                lost = [line for line in calls.not_enforced if line.startswith(f"{tool.name}: ")]
                if lost:
                    message = f"{tool.param}: {lost[0]} cannot be enforced (tool {tool.name}, strict)"
                    raise Refused(message, param=tool.param, code="invalid_json_schema")
            try:
                compiler.matcher(grammar := write(calls))
                break
            except Refused as refused:
                held = [at for at, tool in enumerate(tools) if tool.prepared is not ANY_OBJECT]
                if not held:
                    raise
                loose = [at for at in held if alone and (pause() or not self._compiles(rules, tools[at], compiler))]
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
        unit = "block" if self.headed else f"{BREAK} {self._literal(self.start)} block"
        together = rules.several and not self.headed
        other = "" if answer is None else f" | {LINE if self.headed else ''} @answer"
        lines = [f"start: calls{other}", f"calls: ({unit}){'+' if together else ''}"]
        grammars: list[dict] = [{"lark_grammar": "\n".join([*lines, calls.rules])}]
        if answer is not None:
            grammars.append({**_only_grammar(answer), "name": "answer"})
        left_out = (*calls.not_enforced, *(answer.not_enforced if answer else ()))
        kind = answer.kind if answer is not None else "tools"
        return Grammar(json.dumps({"grammars": grammars}), answer.param if answer else "tools", kind, left_out)

    def free_reply(self, rules: ToolRules, answer: Grammar) -> Grammar:
        """What holds a reply to `answer`, where it is no call of a format that has no grammar."""
        return self._reply(Calls("block: <[*]>*", ()), replace(rules, several=False), answer)

    def _block(self, calls: Calls) -> Grammar:
        grammars = [{"lark_grammar": f"start: block\n{calls.rules}"}]
        return Grammar(json.dumps({"grammars": grammars}), "tools", "tools", calls.not_enforced)

    def _calls(self, rules: ToolRules, tools: list[Tool]) -> Calls:
        return call_rules(self.form, tools, self.specials, rules.several, self.end)

    def _literal(self, text: str) -> str:
        return literal(text, self.specials) if text else ""


def _only_grammar(answer: Grammar) -> dict:
    if answer.source.startswith("{"):
        return json.loads(answer.source)["grammars"][0]
    return {"lark_grammar": answer.source}


tool_format = lru_cache(2)(ToolFormat)  # one a loaded model


class ChoosesTools:
    """Mixin for ResponseGenerator: what a request says of its tools becomes grammars, in the handler's thread."""

    def prepare(self, request: Any, args: Any) -> None:
        ask, provider = args.ask, self.model_provider
        if ask.tools is not None and provider.model is not None:
            form = tool_format(provider.tokenizer)
            if form.form is not None:
                self._hold(form, ask, lambda: args.left)
            elif ask.tools.required:
                what = "has no tool format" if form.name is None else f"writes {form.name} calls"
                message = f"this model's tool format cannot be forced: it {what}"
                raise Refused(message, param=ask.tools.forced, code="unsupported_tool_choice")
            else:
                what = "this model has none" if form.name is None else f"no grammar for {form.name}"
                ask.free = (f"tools (tool format: {what})",)
                if ask.grammar is not None and form.name is not None:
                    provider.grammars.matcher(ask.grammar)
                    ask.grammar, ask.calls_in_grammar = form.free_reply(ask.tools, ask.grammar), True
                logging.warning("not enforced: %s", *ask.free)
        super().prepare(request, args)

    def _hold(self, form: ToolFormat, ask: Any, left: Left) -> None:
        provider, rules = self.model_provider, ask.tools
        if rules.required or ask.grammar is not None:
            answer = None if rules.required else ask.grammar
            if answer is not None:
                provider.grammars.matcher(answer)  # what is wrong with it alone is no tool's fault
            ask.grammar, ask.calls_in_grammar = form.reply(rules, answer, provider, left), True
        else:
            form.block(rules, provider, left).add_done_callback(lambda made: _note_free(ask, made))


def _note_free(ask: Any, made: Future[Grammar]) -> None:
    if made.exception() is None:
        ask.free = made.result().not_enforced
