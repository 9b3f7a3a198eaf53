"""Gemma's calls as a grammar: objects with bare keys, and quotes of their own around strings."""

from __future__ import annotations

import json
from typing import Any

from mlx_patches.grammar_rules import ANNOTATIONS, PLAIN, Rules, is_held, schema_of, types_of
from mlx_patches.schema_keywords import BOUNDS


class GemmaRules(Rules):
    def _arguments(self, root: dict) -> str:
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
            choices = [self._gemma(m if "$ref" in m else {**beside, **m}, path) for m in map(schema_of, union)]
        else:
            choices = [self._gemma_of_type(kind, schema, path) for kind in types_of(schema)]
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
            quote = self.form.quote
            return f"{self.literal(quote)} {self._until(self._regex(schema, path), quote, is_held(schema))}"
        if kind == "object":
            return self._gemma_object(schema, path)
        if kind == "array":
            return self._gemma_array(schema, path)
        return self._plain({name: schema[name] for name in (*BOUNDS, "multipleOf") if name in schema}, [kind])

    def _gemma_object(self, schema: dict, path: str) -> str:
        self._note(schema, path, PLAIN)
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            return _gemma_pairs(self._gemma(schema_of(schema.get("additionalProperties")), f"{path}.*"))
        after = {True: '""', False: '""'}
        for name, each, required in reversed([*self._properties(schema, path)]):
            # Each rule goes on with what follows it, with or without a comma.
            pair = f"{json.dumps(name + ':')} {self._gemma(each, f'{path}.{name}')} {after[True]}"
            skip = {begun: "" if required else f" | {after[begun]}" for begun in (True, False)}
            after = {True: self._rule(f'"," {pair}{skip[True]}'), False: self._rule(f"{pair}{skip[False]}")}
        return f'"{{" {after[False]} "}}"'

    def _gemma_array(self, schema: dict, path: str) -> str:
        self._note(schema, path, {"type", "items", "minItems", "maxItems"})
        item = self._gemma(schema_of(schema.get("items", {})), f"{path}[]")
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


def _gemma_pairs(value: str) -> str:
    """An object of any names."""
    return f'"{{" (/[A-Za-z_]+:/ {value} ("," /[A-Za-z_]+:/ {value})*)? "}}"'
