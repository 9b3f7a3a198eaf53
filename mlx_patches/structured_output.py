"""Structured output: the field of a body that asks for a form → a grammar → a matcher, compiled once and kept.

Replaces   nothing; ModelProvider gains `grammars`
Why        mlx_lm 0.32.2 takes `response_format` and does nothing with it
Upstream   server.py ModelProvider._load
Delete when mlx_lm compiles grammars itself
Test       tests/test_structured_output_grammars.py, tests/test_json_schemas.py

A Grammar is text: it travels with its request and knows no vocabulary. A GrammarCompiler belongs to one loaded model
and keeps pristine matchers; a request gets a copy, which shares the pristine one's warm lexer. What always holds:
whatever a body says ends in None, a Grammar or a Refused, and a matcher that is handed out has a first token.

llguidance never raises: `is_error()` tells, and only the first mask shows that nothing at all fits a grammar.
"""

from __future__ import annotations

import ctypes
import json
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock, Thread
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from localServerCommon import Refused
from mlx_patches.json_schemas import prepare
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.schema_keywords import LIMITS, TOOL_LIMITS, on_a_deep_stack, short

MAX_TEXT = 200_000
MAX_WARNING = 4000  # characters of a header
MAX_RULES = 1_000  # a chain of 2,600 Lark terminals takes llguidance 45 s


@dataclass(frozen=True)
class Grammar:
    """What a reply is held to. It travels with the request: small, and picklable.

    `source`: what LLMatcher takes. `param`: the field of the body that it came from. `kind`: json_schema, json_object,
    regex, choice or grammar. `not_enforced`: paths of what was left out, such as `properties.email.pattern`.
    """

    source: str
    param: str
    kind: str
    not_enforced: tuple[str, ...] = ()


def read_grammar(body: dict) -> Grammar | None:
    """What `body`, a decoded request, asks for; None for free text. A null field is an absent one.

    Raises Refused (400) naming the field, with `invalid_json_schema` or `invalid_grammar` where the schema or grammar
    itself is at fault. Whether a regex or a Lark grammar compiles shows in `GrammarCompiler.matcher`.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        names = " and ".join(field for field, _, _ in asked)
        raise Refused(f"{names} ask for two forms of one reply", param=asked[1][0])
    for field, reader, value in asked:
        grammar = reader(value, field)
        if grammar.not_enforced:
            logging.warning("%s: not enforced: %s", grammar.param, ", ".join(grammar.not_enforced))
        return grammar
    return None


def _asked(body: dict) -> Iterator[tuple[str, Callable[[Any, str], Grammar], Any]]:
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        yield "response_format", _response_format, form
    outputs = body.get("structured_outputs")
    if outputs is not None and not isinstance(outputs, dict):
        raise Refused("structured_outputs must be an object", param="structured_outputs")
    for key, value in (outputs or {}).items():
        if key not in READERS and value not in (None, False):
            raise Refused(f"structured_outputs.{key} is not supported", param=f"structured_outputs.{key}")
    for key, reader in READERS.items():
        for field, value in (
            (f"structured_outputs.{key}", (outputs or {}).get(key)),
            (f"guided_{key}", body.get(f"guided_{key}")),
        ):
            if value is not None:
                yield field, reader, value


def _response_format(value: Any, field: str) -> Grammar:
    if not isinstance(value, dict):
        raise Refused(f"{field} must be an object", param=field)
    kind = value.get("type")
    if kind == "json_object":
        # llama.cpp's spelling puts a schema beside it.
        given = value.get("schema")
        if given is None:
            return _schema({"type": "object"}, field, kind)
        return _schema(given, f"{field}.schema", "json_schema")
    if kind != "json_schema":
        raise Refused(f"{field}.type must be text, json_object or json_schema", param=f"{field}.type")
    field = f"{field}.json_schema"
    envelope = value.get("json_schema")
    if not isinstance(envelope, dict):
        raise Refused(f"{field} must be an object", param=field)
    for key, wanted, noun in (("name", str, "a string"), ("strict", bool, "a boolean")):
        if not isinstance(envelope.get(key), wanted | None):
            raise Refused(f"{field}.{key} must be {noun}", param=f"{field}.{key}")
    if envelope.get("schema") is None:
        raise Refused(f"{field}.schema is missing", param=f"{field}.schema")
    return _schema(envelope["schema"], f"{field}.schema", kind, strict=bool(envelope.get("strict")))


def _json(value: Any, field: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as fault:
            raise Refused(f"{field} is not JSON: {fault}", param=field, code="invalid_json_schema") from None
    return _schema(value, field, "json_schema")


def _schema(schema: Any, field: str, kind: str, strict: bool = False) -> Grammar:
    prepared = prepare(schema, param=field, strict=strict)
    return Grammar(LLMatcher.grammar_from_json_schema(prepared.text), field, kind, prepared.not_enforced)


def _regex(value: Any, field: str) -> Grammar:
    return Grammar(LLMatcher.grammar_from_regex(_text(value, field)), field, "regex")


def _choice(value: Any, field: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise Refused(f"{field} must be a list of strings, with at least one", param=field)
    _text("".join(value), field)
    # One terminal: its lexer holds a choice that begins another apart, and ends with either.
    choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(value))
    return Grammar(f"start: CHOICE\nCHOICE: {choices}", field, "choice")


def _grammar(value: Any, field: str) -> Grammar:
    lines = _text(value, field).split("\n")
    try:
        # Empty lines go, for the converter's search takes quadratic time over a run of them.
        lark = any_to_lark("\n".join(line for line in lines if line.strip()))
    except Exception as fault:
        raise Refused(f"{field} is not a grammar: {short(str(fault))}", param=field, code="invalid_grammar") from None
    if sum(":" in line for line in lark.splitlines()) > MAX_RULES:
        raise Refused(f"{field}: too complex: more than {MAX_RULES} rules", param=field, code="invalid_grammar")
    return Grammar(json.dumps({"grammars": [{"lark_grammar": lark}]}), field, "grammar")


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{field} must be a string", param=field)
    if len(value) > MAX_TEXT:
        raise Refused(f"{field}: too complex: over {MAX_TEXT:,} characters", param=field, code="invalid_grammar")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Refused(f"{field} holds half a character", param=field, code="invalid_grammar")
    return value


READERS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


class Kept(OrderedDict[Hashable, Future]):
    """The outcomes last asked for, by what they were made of. Each is made once; others wait, and a fault goes."""

    def __init__(self, capacity: int):
        super().__init__()
        self._capacity = capacity
        self._lock = Lock()

    def of(self, key: Hashable, make: Callable[[], Any], run: Callable = lambda work: work()) -> Future:
        """The outcome of `make()` for `key`: the first who asks has `run` do the work."""
        with self._lock:
            kept = self.get(key)
            self[key] = outcome = kept or Future()
            self.move_to_end(key)
            if len(self) > self._capacity:
                self.popitem(last=False)
        if kept is None:
            run(lambda: self._fulfil(key, outcome, make))
        return outcome

    def _fulfil(self, key: Hashable, outcome: Future, make: Callable[[], Any]) -> None:
        try:
            outcome.set_result(make())
        except BaseException as fault:
            self.forget(key, outcome)
            outcome.set_exception(fault)

    def forget(self, key: Hashable, outcome: Future) -> None:
        with self._lock:
            if self.get(key) is outcome:
                del self[key]


class GrammarCompiler:
    """Matchers over one model's vocabulary, from any thread. The `capacity` grammars last used stay compiled.

    Copies share their lexer, and one that ran into llguidance's limits fails in all of them from then on, at their
    first token: it is tried at each hand-out (some 10 µs), and the grammar compiled anew where it does.
    """

    def __init__(self, tokenizer: LLTokenizer, capacity: int = 128):
        self._tokenizer = tokenizer
        self._kept = Kept(capacity)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its start, the caller's own. Raises Refused (400) when nothing can be held to `grammar`.

        The first caller compiles, in its own thread and without the GIL; others with the same grammar wait for it.
        """
        compiled = self._kept.of(grammar, lambda: self.check(grammar))
        pristine, first = compiled.result()
        if not pristine.deep_copy().consume_tokens(first):
            logging.warning("%s: its lexer had run into a limit; compiled anew", grammar.param)
            self._kept.forget(grammar, compiled)
            pristine, _ = self._kept.of(grammar, lambda: self.check(grammar)).result()
        return pristine.deep_copy()

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether all of `text` fits `grammar`. Raises Refused (400) as `matcher` does."""
        matcher = self.matcher(grammar)
        return matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting()

    def check(self, grammar: Grammar) -> tuple[LLMatcher, list[int]]:
        """Compile `grammar`, and keep nothing. Raises Refused (400) as `matcher` does."""
        return on_a_deep_stack(len(grammar.source), lambda: self._compile(grammar))

    def _compile(self, grammar: Grammar) -> tuple[LLMatcher, list[int]]:
        """(a pristine matcher, [a token that may come first] or [] where the reply can only end)."""
        limits = LIMITS if grammar.kind in READERS else TOOL_LIMITS  # a schema has been held to LIMITS by `prepare`
        matcher = LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=limits)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        for warning in matcher.get_grammar_warnings():
            logging.warning("%s: %s", grammar.param, warning)
        if matcher.is_error():
            code = "invalid_json_schema" if grammar.kind.startswith("json") else "invalid_grammar"
            raise Refused(f"{grammar.param}: {short(matcher.get_error())}", param=grammar.param, code=code)
        bits = int.from_bytes(mask, "little")
        for end in self._tokenizer.eos_tokens:
            bits &= ~(1 << end)
        return matcher, [(bits & -bits).bit_length() - 1] if bits else []


def build_tokenizer(form: ReplyFormat) -> LLTokenizer:
    """The vocabulary of `form` as llguidance reads it, for masks of `form.width` tokens.

    Ids without a name are never allowed. Takes 0.2 s for 49,000 tokens, 1 s for 200,000. Raises Refused where there
    is no end token or the bytes of the tokens are not known.
    """
    if not form.end_tokens:
        raise Refused("structured output needs an end token, and this model has none")
    try:
        words = TokenizerWrapper(_Vocabulary(form))
        return LLTokenizer(words, n_vocab=form.width, eos_token=sorted(form.end_tokens))
    except Exception as fault:
        raise Refused(f"structured output cannot read this model's tokenizer: {short(str(fault))}") from fault


class _Vocabulary:
    """What llguidance's TokenizerWrapper takes: the bytes of each token, and the tokens of a text.

    llguidance tokenises the text that a grammar forces and then allows just those tokens, so they must spell exactly
    that text, without a special token: these have names that no text has.
    """

    bos_token_id = None

    def __init__(self, form: ReplyFormat):
        plain = form.tokenizer._tokenizer
        if not form.exact_bytes:
            raise ValueError(f"{type(plain).__name__} does not tell the bytes of its tokens")
        added = (token for token, name in plain.added_tokens_decoder.items() if name.special)
        special = {*plain.all_special_ids, *added, *form.end_tokens}
        self.eos_token_id = min(form.end_tokens)
        self.special_token_ids = sorted(token for token in special if token < form.named)
        self.tokens = [form.token_bytes(token) for token in range(form.width)]  # they say how wide a mask is
        for token in self.special_token_ids:
            self.tokens[token] = f"\uf8ff{token}\uf8ff".encode()
        self._single = {data: token for token, data in enumerate(self.tokens) if len(data) == 1}
        plain.encode("")  # takes any padding and truncation from the backend, which is five times as fast
        self._encode = getattr(plain, "backend_tokenizer", plain).encode
        self._apart: dict[int, list[int]] = {}  # what spells a special token's name
        # SentencePiece puts a blank before a text, and a text that a grammar forces stands after another.
        self._lead, self._skip = "", 0
        if self._spelled("a") is None:
            self._lead, self._skip = "\x02", len(self._ids("\x02"))
        names = {token: form.token_bytes(token).decode("utf-8", "replace") for token in self.special_token_ids}
        self._apart = {token: self(name) for token, name in names.items()}

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")
        tokens = self._spelled(text)
        if tokens is None and len(text) > 1:  # such as a special token's name
            half = len(text) // 2
            return self(text[:half]) + self(text[half:])
        return [self._single[bytes([byte])] for byte in text.encode()] if tokens is None else tokens

    def _spelled(self, text: str) -> list[int] | None:
        """The tokens that the tokenizer gives for `text`, if they spell it."""
        found = self._ids(self._lead + text)[self._skip :]
        tokens = [token for each in found for token in self._apart.get(each, (each,))]
        spelled = b"".join(self.tokens[token] for token in tokens if token < len(self.tokens))
        return tokens if spelled == text.encode() else None

    def _ids(self, text: str) -> list[int]:
        tokens = self._encode(text, add_special_tokens=False)
        return tokens if isinstance(tokens, list) else tokens.ids


def warning_header(ask: Any) -> dict[str, str]:
    """The HTTP header that names what a reply to `ask` is not held to; nothing where all that is asked is enforced."""
    not_enforced = (*(ask.grammar.not_enforced if ask.grammar is not None else ()), *ask.free)
    if not not_enforced:
        return {}
    # Percent-encoded where a quoted string cannot hold it, as a URL would be.
    names = [quote(name, safe=" !#$&'()*+,/:;<=>?@[]^`{|}~") for name in not_enforced]
    shown = names[: max(1, bisect_right(list(accumulate(len(name) + 2 for name in names)), MAX_WARNING))]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return {"Warning": f'199 - "not enforced: {", ".join(shown)[:MAX_WARNING]}{more}"'}


class CompilesGrammars:
    """Mixin for ModelProvider: `grammars`, the loaded model's GrammarCompiler.

    The vocabulary is read in a thread of its own once the load is `settled` (0.2 s for 49,000 tokens, 1 s for 200,000),
    so only a request with a grammar ever waits for it, and the ready line does not.
    """

    _grammars: Future | None = None

    @property
    def grammars(self) -> GrammarCompiler:
        """Waits until the vocabulary is read. Raises Refused where this model's tokenizer cannot be constrained."""
        if self._grammars is None:
            raise Refused("no model is loaded", status=503, code="unavailable")
        return self._grammars.result()

    def reset(self) -> None:
        super().reset()
        self._grammars = None

    def _load(self, *model_key) -> None:
        super()._load(*model_key)
        self._grammars = Future()
        Thread(target=self._read_vocabulary, args=(self._grammars, self.reply_format), daemon=True).start()

    def words_of(self, form: ReplyFormat) -> LLTokenizer:
        return build_tokenizer(form)

    def _read_vocabulary(self, grammars: Future, form: ReplyFormat) -> None:
        self.settled.wait()
        try:
            grammars.set_result(GrammarCompiler(self.words_of(form)))
        except BaseException as fault:
            grammars.set_exception(fault)
        form.scan_vocabulary()
        give_back_memory()


def give_back_memory() -> None:
    """glibc keeps what was freed for the process: at 200,000 tokens some 180 MB from the load of the tokenizer."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
