"""Calls whose parameters stand between tags, as a grammar: a string as raw text, anything else as JSON.

A string goes on to the end tag that the call's own markup follows, as the reader has it (tag_dialects.py): behind
any other end tag it goes on, with text that begins like no markup. In formats with an inner closing tag a whole example
may stand in a string, and a string's own end tag may be missing: then the next parameter's tag ends it, or the call's.
Such tags stand on lines of their own, for beside a line break llguidance's masks stay cheap (13 us against 1.1 ms).
What always holds: two lexemes that may begin at one place differ in the letter that ends the first, for llguidance's
lexer never steps back; so a line break before markup is a part of its lexeme.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from mlx_patches.argument_values import as_text, properties
from mlx_patches.grammar_rules import ANY_TEXT, PLAIN, Rules, escaped, is_held, schema_of, types_of
from mlx_patches.tag_dialects import Tags
from mlx_patches.tool_formats import WORD

BLANKS = r"[\s\x1c-\x1f]*"  # as Python has them
CDATA = BLANKS + r"<!\[CDATA\["
LINE, MAYBE_LINE = r"\n", r"\n?"  # a break before markup
LINE_ALONE = '"\\n" '


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
    def block(self) -> list[str]:
        # What follows the last value ends the block, or goes on to the next call.
        return ["block: call", f"call: {self._one_of('call')}", *self.rules]

    def _after_head(self, root: dict) -> str:
        root = self._resolved(root)
        self._note(root, "", PLAIN)
        tag, tail = self.form.parameter.strip(), self.form.tail.strip()
        self._tag, self._tail, self._end = tag, tail, self.form.end.strip()
        self._tags = [tag.split("{}")[0].split()[0], self._end, *([tail] if tail else [])]
        # Whether tags may stand inside a string that are not its own end tag.
        self._lettered = self._all_letters(tag + self._end + tail) and not self.form.cdata
        follows = Follows(self._rule(self._markup(self.end)))
        if tail:
            # Behind an end tag it may be missing.
            ending = self._rule(f"{self._markup(self.end)} | {self._ending(MAYBE_LINE)}")
            follows = Follows(ending, self._rule(self._ending(LINE)) if self._lettered else "")
        given = {name: (schema, required) for name, schema, required in self._properties(root, "")}
        if not root.get("properties") and root.get("additionalProperties") is not False:
            self._count += 1
            again = f"more_{self._count}"
            before, after = tag.split("{}")
            value = self._tagged(schema_of(root.get("additionalProperties")), "*", Follows(again))
            name = self._rule(r"/[\w.-]{1,64}/", "W")
            self.rules.append(f"{again}: {self._markup(before)} {name} {self.literal(after)} {value} | {follows.rule}")
            return again
        for name in reversed(dict.fromkeys([*properties(root), *root.get("required", [])])):
            if name in given:
                follows = self._behind(name, *given[name], follows)
            elif name in root.get("required", []):  # it cannot be written, and the reader looks no further for tags
                follows = follows._replace(bare="", missing="", names=())
        return follows.rule

    def _is_read(self, name: str, value: Any) -> bool:
        """Not where a tag, or a line break beside one, is the value's own."""
        text, trimmed = as_text(value), self.form.parameter.endswith("\n")
        marked = any(tag in text for tag in self._tags) or (trimmed and text != text.strip("\r\n"))
        return not marked and super()._is_read(name, value)

    def _behind(self, name: str, schema: dict, required: bool, follows: Follows) -> Follows:
        """What may come where this parameter may, and then what `follows` it."""
        value = self._rule(self._tagged(schema, name, follows))
        tag = self._tag.format(name)
        rule, bare, missing = f"{self._markup(tag)} {value}", "", ""
        if self._lettered and re.fullmatch(WORD, name):
            bare = f"{self._markup(tag, LINE)} {value}"
            missing = f"{self._lexeme(f'{ANY_TEXT} /{LINE}{escaped(tag)}/')} {value}"
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

    def _ending(self, line: str) -> str:
        """The closing tag of a call, and its block's, or the next call."""
        end, more = self.literal(self.end), self.several and self.form.between is not None
        return f'{self._markup(self._tail, line)} "\\n"? {f"({end} | call)" if more else end}'

    def _markup(self, text: str, line: str = MAYBE_LINE) -> str:
        first, *rest = self.specials.pieces(text) or [""]
        if first in self.specials:
            return f"/{line}/ {self.literal(text)}"
        return f"/{line}{escaped(first)}/ {self.literal(''.join(rest)) if rest else ''}"

    def _tagged(self, schema: dict, path: str, follows: Follows) -> str:
        """A value, its end tag, and what follows. Where any text may stand, the reader takes all but null for text."""
        trimmed = self.form.parameter.endswith("\n")
        schema, end = self._resolved(schema), f"{self._markup(self._end) if trimmed else self.literal(self._end)}"
        end = f"({end} {follows.rule} | {follows.bare})" if follows.bare else f"{end} {follows.rule}"
        lead = '"\\n"? ' if trimmed else ""
        choices: list[str] = []
        members = [self._writable(member, path) for member in self._members(schema)]
        is_text = any("type" in member and "string" in types_of(member) for member in members if "enum" not in member)
        for member in members:
            if "enum" in member:
                values = [value for value in member["enum"] if not is_text or isinstance(value, str | None)]
                choices += (f"{lead}{json.dumps(as_text(value))} {end}" for value in values)
                continue
            if "string" in (types := types_of(member)):
                choices.append(self._string(member, path, follows))
            if rest := [each for each in types if each != "string" and (not is_text or each == "null")]:
                choices.append(f"{lead}{self._plain(member, rest)} {end}")
        return f"{self._break} {self.literal(self.form.value)} ({' | '.join(choices)})"

    # Strings

    def _string(self, schema: dict, path: str, follows: Follows) -> str:
        """A string, its end tag, and what follows."""
        text = self._regex(schema, path)
        free, section = text == ANY_TEXT, ""
        if self.form.cdata:
            whole = self._lexeme(rf"/{CDATA}/ ({text}) /\]\]>{BLANKS}{escaped(self._end)}/")
            section = f" | {whole} {follows.rule}"
            text = f"({text}) & ~/{CDATA}(?s:.*)/"
        if not free:
            # A length or a form goes with the whole text, so it ends at its first end tag.
            trimmed, end = self.form.parameter.endswith("\n"), escaped(self._end)
            if not self._all_letters(self._end):
                value = self._until(text, self._end)
            elif is_held(schema):
                line = LINE if trimmed else ""
                value = self._lazy(f"({text}) /{line}{end}/ & ~/(?s:.*){end}(?s:.+)/")
            else:
                value = self._lazy(f"({text}) /{MAYBE_LINE if trimmed else ''}{end}/")
            return f"{LINE_ALONE if trimmed else ''}{value} {follows.rule}{section}"
        if self._lettered:
            return self._free(follows)
        if not self._all_letters(self._end):
            text = self._tagless(text)
        more = f"({text}) & {self._more}"
        return f"{self._stopped(self._end, text)} {self._stopped(self._end, more)}* {follows.rule}{section}"

    def _tagless(self, text: str) -> str:
        return f"({text}) & ~/(?s:.*)({'|'.join(map(escaped, self._tags))})(?s:.*)/"

    def _free(self, follows: Follows) -> str:
        """Any text. It may hold examples: a call's head on a line, parameters behind it, the call's closing tag."""
        self._count += 1
        fresh, beside = f"fresh_{self._count}", f"beside_{self._count}"
        end, more = self._stopped(self._end), self._stopped(self._end, f"{ANY_TEXT} & {self._more}")
        tail = self._stopped(f"\n{self._tail}") if self._tail else ""
        text = f"inside {beside} | {end} {more}* {follows.rule}"
        text += f" | {follows.missing}" if follows.missing else ""
        self.rules.append(f"{beside}: {self._example(follows.names)} {text}{f' | {tail} {fresh}' if tail else ''}")
        if tail:
            over = f"{self._markup(self.end)} | " if follows.over else ""
            text += f" | {tail} ({over}{more}+ {follows.rule})"
        written = next(each.head.pattern for each in self._reader.dialects if isinstance(each, Tags))
        head = rf"/\n{written}/ "
        self.rules.append(f"{fresh}: {self._example(follows.names, head)} {text}")
        if "inside" not in self._shared:
            self._shared["inside"] = "inside"  # an example behind its tag, to its end tag
            self.rules.append(f"inside: ({self._example()} inside)* {end}")
        return fresh

    def _example(self, others: tuple[str, ...] = (), head: str = "") -> str:
        """Text up to the tag of a parameter that is none of `others`, behind `head`."""
        before, after = map(escaped, self._tag.split("{}"))
        name = f"(/{WORD}/ & ~/{'|'.join(map(escaped, others))}/)" if others else f"/{WORD}/"
        value = rf"\n?{escaped(self.form.value)}" if self.form.value else ""
        return self._lexeme(rf"{ANY_TEXT} {head}/\n{before}/ {name} /{after}{value}/")

    @property
    def _more(self) -> str:
        """What text is not that begins as markup does."""
        named, after = (each.strip().strip('"') for each in self.form.head.split("{}"))
        tags = [*(tag for tag in self._tags if tag != self._end), self.end, named or after]
        if self.form.cdata:
            tags.append("<function")  # before a name, MiniCPM's opening marker
        word = "" if named.startswith("<") else r"[^\s<>]*" + BLANKS
        begins = "|".join(escaped(tag.split()[0]) for tag in tags if tag)
        return rf"~/{BLANKS}{word}({begins})(?s:.*)/"

    def _stopped(self, stop: str, text: str = ANY_TEXT) -> str:
        key = f"{stop} {text}"
        if key not in self._shared:
            self._shared[key] = self._until(text, stop)
        return self._shared[key]

    def _lexeme(self, text: str) -> str:
        if text not in self._shared:
            self._shared[text] = self._lazy(text)
        return self._shared[text]
