"""What stands between call markers, read into calls: mlx_lm's tool parsers, made total.

Replaces   ToolCallFormatter, and the tool parsers where they lose what was written
Why        mlx_lm 0.32.2 loses a call that its parser cannot read, with its text; other faults than ValueError end the
           reply; its parsers convert values before their blanks, digits and types are known, and end a value at the
           first tag that looks like its end
Upstream   server.py ToolCallFormatter, tool_parsers/*.py
Delete when mlx_lm's parsers give raw values, and its server loses no call
Test       tests/test_tool_arguments.py, tests/test_call_reader.py

A block is read by the model's own format; then, for the formats that mlx_lm reads more forms of, by mlx_lm's parser, if
no word of the block is missing from what it says; then once more in every other dialect, where only a declared tool
with an object of arguments counts. What always holds: nothing raises but Broken and Open, and no tool is guessed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import regex

from mlx_patches.argument_values import declared
from mlx_patches.tool_dialects import NAME, Broken, Call, Open, Scope, json_call
from mlx_patches.tool_formats import FORMATS, SECOND_CHANCE, Format, read_all
from mlx_patches.tool_rules import ToolRules

LEAD = r"(?:<\|python_tag\|>|```\w*\s|<tools>)?"
WRAPPED = re.compile(rf"\s*{LEAD}(.*?)(?:```|</tools>)?\s*", re.DOTALL)

ALL_FIT: Callable[[str, str, bool], bool] = lambda name, arguments, every: True  # noqa: E731


class Calls:
    """How one model's calls are read for one request."""

    def __init__(
        self,
        name: str | None,
        parser: Any,
        start: str,
        end: str,
        tools: Any,
        rules: ToolRules | None = None,
        fits: Callable[[str, str, bool], bool] = ALL_FIT,
        held: bool = False,
    ):
        """`name`: of mlx_lm's parser module; `parser`: its function, for what no row of FORMATS reads.

        `rules`, `fits` (of a name, arguments, and whether also where its tool is not strict): which calls may come, and
        with which arguments, where no grammar sees one. `held`: one sees those in blocks of the answer.
        """
        self._fits, self.held = fits, held
        self.tools = declared(tools)
        may_come = self.tools if rules is None else {tool.name for tool in rules.tools}
        self._may_come = {name: schema for name, schema in self.tools.items() if name in may_come}
        self.most = None if rules is None or rules.several else 1
        self.start, self.end = start, end
        self._sent_tools = tools
        self.form = FORMATS.get(name or "")
        self._parser = parser if name in ("kimi_k2", "glm47", "longcat") or self.form is None else None
        quotes = "\"'" if name == "minicpm5" else ""
        # A dot before a blank ends a sentence, if no tool's name.
        word = "|".join([rf"{NAME}(?<!\.)", *(re.escape(name) for name in self.tools if name.endswith("."))])
        begun = rf"(?:{NAME}|(?:{word})\s+)(?:$|[\[{{(>{quotes}]|<(?:$|[\w|]))"
        self._again = re.compile(rf"\s*(?:(?:{word})\s+)?{re.escape(start)}" if start else "(?!)")
        self._viable = re.compile(rf"\s*(?:$|[{{\[{quotes}]|`(?:$|`)|<(?:$|[\w|])|{begun})")
        # As a beginning of an answer that is nothing but calls: brackets, a first name, a tool's name.
        names = "|".join(re.escape(json.dumps(name, ensure_ascii=False)) for name in self._may_come)
        self._bare = self._bare_pattern(names)

    @staticmethod
    def _bare_pattern(names: str) -> Any:
        wrapped = r'"type"\s*:\s*"function"\s*,\s*'
        identified = r'"id"\s*:\s*"[^"\\]*"\s*,\s*'
        first = rf'(?:"function"\s*:\s*(?:\{{\s*"name"\s*:\s*)?|"name"\s*:\s*)(?:{names})|"(?:arguments|parameters)"'
        return regex.compile(rf"\s*{LEAD}\s*(?:\[\s*)?\{{\s*(?:{identified})?(?:{wrapped})?(?:{first}).*", regex.DOTALL)

    @property
    def sends(self) -> bool:
        """Whether arguments are sent while they are written."""
        return self.form is not None and self.form.head is not None

    def may_begin(self, body: str) -> bool:
        """Whether a call, in whatever dialect, may begin so."""
        viable = bool(self.tools) and self._viable.match(body) is not None
        return viable and self._again.match(body) is None  # where a second marker stands, the first was prose

    def may_be_bare(self, answer: str) -> bool:
        return not answer.strip() or self._bare.fullmatch(answer, partial=True) is not None

    def read(
        self, body: str, *, known: bool, unseen: bool = False, loose: bool = False, ended: bool = True
    ) -> tuple[list[Call], str]:
        """(the calls that `body` begins with, what follows). Raises Broken, or Open. The flags are Scope's.

        `unseen`: the grammar that holds all other blocks may not have seen this one.
        """
        calls, rest = self._read(body, known, loose, ended)
        if known or unseen or not self.held:
            calls = self._fitting(calls, every=unseen)
        return calls[: self.most], rest

    def _read(self, body: str, known: bool, loose: bool, ended: bool) -> tuple[list[Call], str]:
        tools, ordered = self._may_come if known else self.tools, self.held and not known
        if self.form is not None:
            try:
                return read_all(body, self.form, Scope(tools, loose, ended, known, ordered))
            except Broken:
                pass
        if not ended:
            raise Broken
        if self._parser is not None and (calls := self._read_upstream(body, known)):
            return calls, ""
        return self._second_chance(body, SECOND_CHANCE), ""

    def _fitting(self, calls: list[Call], every: bool = False) -> list[Call]:
        for name, arguments, _ in calls:
            if (name in self.tools and name not in self._may_come) or not self._fits(name, arguments, every):
                raise Broken
        return calls

    def read_bare(self, answer: str) -> list[Call]:
        """The calls that an answer is. Raises Broken."""
        return self._second_chance(answer, (Format((json_call,)),))

    def _second_chance(self, text: str, forms: tuple[Format, ...]) -> list[Call]:
        text = WRAPPED.fullmatch(text)[1]  # type: ignore[index]
        for form in forms:
            try:
                return self._fitting(read_all(text, form, Scope(self._may_come, known=True))[0])[: self.most]
            except (Broken, Open):
                continue
        raise Broken

    def _read_upstream(self, text: str, known: bool) -> list[Call]:
        """What mlx_lm's own parser says, if it is calls and, for a format of FORMATS, leaves no word out."""
        try:
            found = self._parser(text, self._sent_tools)
            found = found if isinstance(found, list) else [found]
            calls = [
                Call(str(one["name"]), _dumps(one["arguments"]), one.get("id"))
                for one in found
                if isinstance(one["name"], str) and isinstance(one["arguments"], dict)
            ]
        except Exception as fault:  # whatever a parser makes of a model's text
            logging.debug("mlx_lm's parser: %r", fault)
            return []
        if len(calls) != len(found) or (known and not all(call.name in self._may_come for call in calls)):
            return []
        if self.form is not None:
            said = {word for call in calls for word in WORD.findall(f"{call.name} {call.id} {call.arguments}")}
            if (
                any(call.name not in self.tools for call in calls)
                or not said - {"None"} <= (words := set(WORD.findall(text)))
                or words - said - set(WORD.findall(" ".join(MARKUP.findall(text))))
            ):
                return []
        return calls


WORD = re.compile(r"\w+")
MARKUP = re.compile(r"<[^<>]*>")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
