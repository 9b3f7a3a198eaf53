"""Mistral's calls as a grammar: `NAME[ARGS]{…}`, an id before the arguments or not; older models' list of objects.

Which of them a model was taught its template says, and it writes what it was taught.
"""

from __future__ import annotations

import json

from mlx_patches.grammar_rules import Rules

ID = "[A-Za-z0-9_-]{1,64}"


class MistralRules(Rules):
    def block(self) -> list[str]:
        more = '("," " "? item)*' if self.several else ""
        return [
            f'block: call | " "? "[" item {more} "]"',
            f"call: {self._one_of('call')}",
            f"item: {self._one_of('item')}",
            *self.rules,
        ]

    def _head(self, name: str) -> str:
        given = f"({self.literal('[CALL_ID]')} /{ID}/)?" if "[CALL_ID]" in self.specials else ""
        return f"{self.literal(name)} {given} {self.literal('[ARGS]')}"

    def _after_head(self, root: dict) -> str:
        arguments, name = self._arguments(root), json.dumps(f'"{self._name}"')
        given = f'"\\"name\\":" " "? {name} "," " "? "\\"arguments\\":" " "? {arguments}'
        self.rules.append(f'item_{self._tools}: "{{" {given} ("," " "? "\\"id\\":" " "? /"{ID}"/)? "}}"')
        return arguments
