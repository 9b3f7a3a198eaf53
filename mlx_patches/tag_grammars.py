"""Calls whose parameters stand between tags, as a grammar: a string as raw text, anything else as JSON.

A string goes on to the end tag that the call's own markup follows, as the reader has it (tool_dialects.Tags): behind
any other end tag it goes on, with text that begins like no markup. In formats with an inner closing tag a whole example
may stand in a string, and a string's own end tag may be missing: then the next parameter's tag ends it, or the call's.
Such tags stand on lines of their own, for beside a line break llguidance's masks stay cheap (13 us against 1.1 ms).
What always holds: two lexemes that may begin at one place differ in the letter that ends the first, for llguidance's
lexer never steps back; so a line break before markup is a part of its lexeme.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from mlx_patches.argument_values import as_text
from mlx_patches.grammar_rules import ANY_TEXT, PLAIN, Rules, escaped, is_held, schema_of, types_of

CDATA = r"\s*<!\[CDATA\["
LINE, MAYBE_LINE = r"\n", r"\n?"  # a break before markup
NAME = r"[^\s<>\"']+"


class Follows(NamedTuple):
    """What may come behind a value. `rule`: behind its end tag. `bare`: where that is missing. `missing`: a text of
    which it is, and what follows. `names`: the parameters that may follow. `over`: whether the call's end may.
    """

    rule: str
    bare: str = ""
    missing: str = ""
    names: tuple[str, ...] = ()
    over: bool = True


class TagRules(Rules):
    def _after_head(self, root: dict) -> str:
        root = self._resolved(root)
        self._note(root, "", PLAIN)
        follows = Follows(self._rule(self._markup(self.end)))
        if self.form.tail:
            # Behind an end tag it may be missing.
            ending = self._rule(f"{self._markup(self.end)} | {self._ending(MAYBE_LINE)}")
            follows = Follows(ending, self._rule(self._ending(LINE)) if self._has_tail else "")
        given = [*self._properties(root, "")]
        if not root.get("properties") and root.get("additionalProperties") is not False:
            self._count += 1
            again = f"more_{self._count}"
            before, after = self.form.parameter.split("{}")
            value = self._tagged(schema_of(root.get("additionalProperties")), "*", Follows(again))
            name = self._rule(r"/[\w.-]+/", "W")
            self.rules.append(f"{again}: {self._markup(before)} {name} {self.literal(after)} {value} | {follows.rule}")
            return again
        for name, schema, required in reversed(given):
            follows = self._behind(name, schema, required, follows)
        return follows.rule

    def _behind(self, name: str, schema: dict, required: bool, follows: Follows) -> Follows:
        """What may come where this parameter may, and then what `follows` it."""
        value = self._rule(self._tagged(schema, name, follows))
        tag = self.form.parameter.format(name)
        rule, bare, missing = f"{self._markup(tag)} {value}", "", ""
        if self._has_tail:
            bare = f"{self._markup(tag, LINE)} {value}"
            missing = f'{self._lexeme(f"{ANY_TEXT} /{LINE}{escaped(tag.strip())}/")} "\\n"? {value}'
        if required:
            return Follows(self._way(rule), self._way(bare), self._way(missing), (name,), over=False)
        return Follows(
            self._way(rule, follows.rule),
            self._way(bare, follows.bare),
            self._way(missing, follows.missing),
            (name, *follows.names),
            follows.over,
        )

    def _way(self, *choices: str) -> str:
        given = " | ".join(filter(None, choices))
        return self._rule(given) if given else ""

    @property
    def _has_tail(self) -> bool:
        """Whether a call has a closing tag of its own, and all its tags are letters."""
        tags = self.form.parameter + self.form.end + self.form.tail
        return bool(self.form.tail) and len(self.specials.pieces(tags)) == 1

    def _ending(self, line: str) -> str:
        """The closing tag of a call, and its block's."""
        return f'{self._markup(self.form.tail.strip(), line)} "\\n"? {self.literal(self.end)}'

    def _markup(self, text: str, line: str = MAYBE_LINE) -> str:
        first, *rest = self.specials.pieces(text) or [""]
        if first in self.specials:
            return f"/{line}/ {self.literal(text)}"
        return f"/{line}{escaped(first)}/ {self.literal(''.join(rest)) if rest else ''}"

    def _tagged(self, schema: dict, path: str, follows: Follows) -> str:
        """A value, its end tag, and what follows. Where any text may stand, the reader takes all but null for text."""
        schema, end = self._resolved(schema), f"{self.literal(self._end)} {follows.rule}"
        end = f"({end} | {follows.bare})" if follows.bare else end
        choices: list[str] = []
        members = [self._writable(member, path) for member in self._members(schema)]
        is_text = any("type" in member and "string" in types_of(member) for member in members if "enum" not in member)
        for member in members:
            if "enum" in member:
                values = [value for value in member["enum"] if not is_text or isinstance(value, str | None)]
                choices += (f"{json.dumps(as_text(value))} {end}" for value in values)
                continue
            if "string" in (types := types_of(member)):
                choices.append(self._string(member, path, follows))
            if rest := [each for each in types if each != "string" and (not is_text or each == "null")]:
                choices.append(f"{self._plain(member, rest)} {end}")
        return f"{self._break} {self.literal(self.form.value)} ({' | '.join(choices)})"

    @property
    def _end(self) -> str:
        return self.form.end.removesuffix("\n")

    # Strings

    def _string(self, schema: dict, path: str, follows: Follows) -> str:
        """A string, its end tag, and what follows. One whose length or form is held ends at its first end tag."""
        text, held = self._regex(schema, path), is_held(schema)
        free, section = text == ANY_TEXT, ""
        if self.form.cdata:
            whole = self._lexeme(rf"/{CDATA}/ ({text}) /\]\]>\s*{escaped(self._end)}/")
            section = f" | {whole} {follows.rule}"
            text = f"({text}) & ~/{CDATA}(?s:.*)/"
        if free and self._has_tail:
            return self._free(follows)
        if free:
            return f"{self._stopped(self._end, text)} {self._stopped(self._end, self._more)}* {follows.rule}{section}"
        return f"{self._until(text, self._end, held)} {follows.rule}{section}"

    def _free(self, follows: Follows) -> str:
        """Any text. It may hold examples, from a parameter's tag to its end tag and on to the call's closing tag."""
        self._count += 1
        fresh = beside = f"fresh_{self._count}"
        end, more = self._stopped(self._end), self._stopped(self._end, self._more)
        missing = f" | {follows.missing}" if follows.missing else ""
        if follows.over:
            beside = f"beside_{self._count}"
        text = f"{self._example(follows.names)} inside {beside} | {end} {more}* {follows.rule}{missing}"
        if follows.over:
            tail, over = self._stopped(f"\n{self.form.tail.strip()}"), self._markup(self.end)
            # The closing tag behind an example is the example's, unless the block ends there.
            self.rules.append(f"{beside}: {text} | {tail} ({fresh} | {over})")
            text += f" | {tail} ({over} | {more}+ {follows.rule})"
        self.rules.append(f"{fresh}: {text}")
        if "inside" not in self._shared:
            self._shared["inside"] = "inside"  # an example behind its tag, to its end tag
            self.rules.append(f"inside: ({self._example()} inside)* {end}")
        return fresh

    def _example(self, others: tuple[str, ...] = ()) -> str:
        """Text up to the tag of a parameter that is none of `others`."""
        before, after = map(escaped, self.form.parameter.strip().split("{}"))
        name = f"(/{NAME}/ & ~/{'|'.join(map(escaped, others))}/)" if others else f"/{NAME}/"
        return self._lexeme(rf"{ANY_TEXT} /\n{before}/ {name} /{after}/")

    @property
    def _more(self) -> str:
        """Text that the reader takes for no markup."""
        named, after = self.form.head.strip().split("{}")
        tags = [self.form.parameter.split("{}")[0], self.form.tail, self.end, named.strip('"') or after.strip('"')]
        word = "" if named.startswith("<") else r"[^\s<>]*\s*"
        begins = "|".join(escaped(tag.split()[0]) for tag in tags if tag)
        return rf"{ANY_TEXT} & ~/\s*{word}({begins})(?s:.*)/"

    def _stopped(self, stop: str, text: str = ANY_TEXT) -> str:
        key = f"{stop} {text}"
        if key not in self._shared:
            self._shared[key] = self._until(text, stop)
        return self._shared[key]

    def _lexeme(self, text: str) -> str:
        if text not in self._shared:
            self._shared[text] = self._lazy(text)
        return self._shared[text]
