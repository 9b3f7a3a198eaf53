"""Calls whose parameters stand between tags: where a value ends that may hold tags itself.

An end tag ends a value if the call's own markup follows, or nothing. On a line of its own the tag of a parameter that
may come next, or the call's closing tag at the end of the block, ends a value whose own end tag is missing; the tag of
another parameter behind a call's head begins an example, which goes on to its end tag and to the closing tag behind it.
What always holds: a call that tag_grammars.py lets a model write is read as the values of which the grammar took it to
be made.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_patches.argument_values import by_schema, followers, has_form, properties, property_schema, quoted, types
from mlx_patches.tool_dialects import Broken, Call, Open, Scope, json_value, skip

ANYTHING = re.compile("(?s:.*)")


@dataclass(frozen=True)
class Tags:
    """`call` and `parameter` have the group `name`; `parameter` may have `type`. `close`: after a call's parameters,
    None where only its markers end it. `end`: after a value. `trim`: a line break inside both tags is no part of it.
    `cdata`: a value may be one section of CDATA. `untyped`: as by_schema has it. `before`: what stands before tags
    inside a value that are an example's, or follow a missing end tag; None where all tags there are text. `head`,
    `tag`: how a call and a parameter begin that are spelled as the model's template has them; an example's parameters
    follow a line that is such a head.
    """

    call: re.Pattern
    close: re.Pattern | None
    parameter: re.Pattern
    end: re.Pattern
    trim: bool = False
    cdata: bool = False
    untyped: str = "[{"
    before: str | None = "\n"
    head: re.Pattern = ANYTHING
    tag: re.Pattern = ANYTHING

    @cached_property
    def _events(self) -> re.Pattern:
        """What may end a value, or begin or end an example in it."""
        choices = [f"(?P<end>{self.end.pattern})"]
        if self.before is not None:
            choices.append(f"(?P<open>{self.before}(?P<tag>{self.parameter.pattern}))")
            if self.close is not None:
                choices.append(f"(?P<close>{self.before}{self.close.pattern})")
        return re.compile("|".join(choices), re.DOTALL)

    def __call__(self, text: str, at: int, scope: Scope) -> tuple[list[Call], int]:
        call = self.call.match(text, at)
        if call is None:
            raise Broken
        name, at, root = call["name"], call.end(), scope.tools.get(call["name"])
        pairs: dict[str, str] = {}
        while True:
            at = skip(text, at)
            if parameter := self.parameter.match(text, at):
                key = parameter["name"].strip()
                schema = property_schema(root, key)
                others = followers(root, key) if scope.ordered else properties(root).keys() - pairs.keys() - {key}
                plain = scope.ordered and has_form(schema, root)
                value, at = self._value(text, parameter.end(), scope, types(schema, root), others, plain)
                written = self._json(value, parameter, schema, root)
                if pairs.setdefault(key, written) != written:
                    raise Broken
            elif self.close is not None and (close := self.close.match(text, at)):
                at = close.end()
                break
            elif not scope.ended:
                raise Open
            elif at == len(text) or self.call.match(text, at):
                if not pairs and self.close is None and name not in scope.tools:
                    raise Broken  # a word between markers
                break
            else:
                raise Broken
        arguments = ", ".join(f"{quoted(key)}: {value}" for key, value in pairs.items())
        return [Call(name, f"{{{arguments}}}")], at

    def _json(self, value: str, parameter: re.Match, schema: Any, root: Any) -> str:
        if self.cdata and (cdata := CDATA.fullmatch(value)):
            value = cdata[1]
        elif self.trim:
            value = value.removeprefix("\n").removesuffix("\n")
        kind = parameter.groupdict().get("type")
        if kind and kind in (types(schema, root) or [kind]):
            schema = {"type": kind}
        return by_schema(value, schema, root, untyped=self.untyped)

    def _value(
        self, text: str, at: int, scope: Scope, kinds: Collection[str], others: Collection[str], plain: bool
    ) -> tuple[str, int]:
        """(the value at `at`, where it ends). `others`: the parameters that may come after it.

        `plain`: only an end tag ends it.
        """
        if kinds and "string" not in kinds and (found := self._whole_json(text, at, scope)):
            return found
        cdata = self.cdata and text.startswith("<![CDATA[", skip(text, at))
        depth, beside, first = 0, False, None
        for event in self._events.finditer(text, at):
            if event["end"]:
                ends = self._goes_on(text, event.end(), scope)
                ends = ends and (not cdata or text[at : event.start()].rstrip().endswith("]]>"))
                if ends and not depth:
                    return text[at : event.start()], event.end()
                first = first or (event if ends else None)
                depth, beside, plain = max(depth - 1, 0), depth == 1, plain or not depth
            elif plain or cdata:
                continue  # behind an end tag that was text, only end tags count
            elif event["open"]:
                if scope.ordered and not self.tag.fullmatch(event["tag"]):
                    continue
                if not depth and event["name"].strip() in others:
                    return text[at : event.start()], event.start("tag")
                line = text.rfind("\n", at, event.start()) + 1
                depth += bool(depth or beside or (line > 0 and self.head.fullmatch(text, line, event.start())))
            elif not depth:
                if not beside and self._is_over(text, event.end(), scope):
                    return text[at : event.start()], event.start()
                beside, plain = False, not beside
        if not scope.loose:
            raise Open
        return (text[at : first.start()], first.end()) if first else (text[at:], len(text))

    def _is_over(self, text: str, at: int, scope: Scope) -> bool:
        """Whether the block ends at `at`, or another call begins."""
        at = skip(text, at)
        call = self.call.match(text, at)
        return (at == len(text) and scope.ended) or (call is not None and call["name"] in scope.tools)

    def _whole_json(self, text: str, at: int, scope: Scope) -> tuple[str, int] | None:
        """(a JSON value, whose strings may hold any tag, where it ends), or None where there is none."""
        try:
            _, stop = json_value(text, skip(text, at))
        except Open:
            if scope.loose:
                return None
            raise
        except Broken:
            return None
        if end := self.end.match(text, skip(text, stop)):
            return (text[at : end.start()], end.end()) if self._goes_on(text, end.end(), scope) else None
        return (text[at:stop], stop) if skip(text, stop) < len(text) and self._goes_on(text, stop, scope) else None

    def _goes_on(self, text: str, at: int, scope: Scope) -> bool:
        """Whether a call's own markup, or nothing, follows."""
        at = skip(text, at)
        if at == len(text):
            return scope.ended
        return any(tag is not None and tag.match(text, at) for tag in (self.parameter, self.close, self.call))


CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)
