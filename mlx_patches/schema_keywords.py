"""One schema's keywords, each by itself: what llguidance 1.9.1 holds, holds wrongly, or cannot hold.

`weed(schema)` takes out of one schema (an object; its children are not looked at) the keywords that cannot be held and
respells those that would be held wrongly. What always holds: what stays allows no value that it did not allow before,
and whatever goes and had an effect is yielded. Each row of the tables and each reason was seen to happen, and a test
shows it. `error_of` is llguidance's own verdict on a whole schema.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

Path = tuple[str, ...]
Faults = Iterator[tuple[Path, str]]
"""((keyword, the rest of its path), reason) of what was taken out."""

# A row has some four items for each optional property.
LIMITS = LLParserLimits(
    max_grammar_size=12_000, initial_lexer_fuel=100_000, max_items_in_row=12_000, verbose_errors=False
)
# Of a set of tools, each of which is within the limits: 139 of six parameters have 14,000 symbols and take 80 ms.
TOOL_LIMITS = LLParserLimits(
    max_grammar_size=60_000, initial_lexer_fuel=500_000, max_items_in_row=12_000, verbose_errors=False
)
MAX_MULTIPLE = 5_000  # 3,600: 4 ms; 100,003: 0.3 s; 10,000,019: four minutes
MAX_PATTERN = 20_000
EXACT = 2**53  # beyond it a double, which is what llguidance reckons with, skips integers
LARGEST_BOUND = 2**63 - 1024  # the largest double below 2^63; llguidance has no regex for a bound beyond

NAMED = ("properties", "patternProperties")
DIALECTS = re.compile(
    r"http://json-schema.org/draft-0[467]/schema#?|https://json-schema.org/draft/20(19-09|20-12)/schema#?"
)

# Keywords that no grammar holds → the type of value they speak of. Draft 3's last three it ignores without a word.
UNHELD = {
    **dict.fromkeys(
        ("not", "if", "then", "else", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
    ),
    **dict.fromkeys(("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"), "object"),
    "unevaluatedProperties": "object",
    **dict.fromkeys(("extends", "disallow", "divisibleBy")),
}
ANYTHING: tuple[Any, ...] = (True, {})
NO_EFFECT: dict[str, Callable[[Any, dict], bool]] = {
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: not schema.keys() & {"then", "else"},
    "then": lambda value, schema: "if" not in schema or value in ANYTHING,
    "else": lambda value, schema: "if" not in schema or value in ANYTHING,
    "$dynamicAnchor": lambda value, schema: True,
    "$recursiveAnchor": lambda value, schema: True,
    "minContains": lambda value, schema: "contains" not in schema,
    "maxContains": lambda value, schema: "contains" not in schema,
    "uniqueItems": lambda value, schema: value is False,
    "unevaluatedItems": lambda value, schema: value in ANYTHING,
    "propertyNames": lambda value, schema: value in (*ANYTHING, {"type": "string"}),
    "dependencies": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "unevaluatedProperties": lambda value, schema: value in ANYTHING or "additionalProperties" in schema,
}

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TOO_COMPLEX = re.compile(r"too (big|large|many|complex|deeply)|TooComplex|recursion limit|fuel", re.IGNORECASE)


def weed(schema: dict) -> Faults:
    """Leave in `schema`, in place, what llguidance holds to the letter; yield what went."""
    for part in (_unheld, _strings, _bounds, _values):
        yield from part(schema)


def _unheld(schema: dict) -> Faults:
    before = dict(schema)
    dialect = schema.get("$schema")
    if not (isinstance(dialect, str) and DIALECTS.fullmatch(dialect)):
        schema.pop("$schema", None)  # it constrains nothing, and llguidance would want to fetch one it does not know
    for keyword in [key for key in before if key in UNHELD]:
        value, kind = schema.pop(keyword), UNHELD[keyword]
        effect = keyword not in NO_EFFECT or not NO_EFFECT[keyword](value, before)
        if effect and (kind is None or _may_be(before, kind)):
            yield (keyword,), "no grammar holds it"
    if isinstance(schema.get("required"), bool) and schema.pop("required"):
        yield ("required",), "draft 3 wrote it so"


def _strings(schema: dict) -> Faults:
    yield from _named_patterns(schema)
    if isinstance(schema.get("pattern"), str) and _may_be(schema, "string"):
        held, why = _held_pattern(schema.pop("pattern"))
        if held is None:
            yield ("pattern",), why
        else:
            schema["pattern"] = held
    if isinstance(schema.get("format"), str) and _may_be(schema, "string"):
        error = _error_alone("format", schema["format"])
        if error:
            del schema["format"]
            yield ("format",), short(error)


def _named_patterns(schema: dict) -> Faults:
    """Where a pattern goes, `additionalProperties` takes its names in: a `false` there would leave none of them."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    schema["patternProperties"] = spelled = {}
    homeless = []
    for pattern, child in patterns.items():
        held, why = _held_pattern(pattern)
        if held is None or held in spelled:
            homeless.append(child)
            yield ("patternProperties", pattern), why or "another pattern is the same"
        else:
            spelled[held] = child
    others = schema.get("additionalProperties", True)
    if homeless and others is not True:
        homeless += [others] if others is not False else []
        schema["additionalProperties"] = homeless[0] if len(homeless) == 1 else {"anyOf": homeless}
        yield ("additionalProperties",), "the names of patternProperties are not known"


def _bounds(schema: dict) -> Faults:
    """Bounds as llguidance takes them: they may draw in where a double is too coarse, they never widen unlisted.

    It lets `1` through `exclusiveMinimum: 1` where the other bound is less than 1 away.
    """
    given = {keyword: schema[keyword] for keyword in BOUNDS if _is_number(schema.get(keyword))}
    if not given:
        return
    for low, strict, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        if low in given and strict in given:
            del given[low if sign * given[strict] >= sign * given[low] else strict]
    for keyword, value in list(given.items()):
        sign = 1 if keyword.endswith("inimum") else -1
        if sign * value > LARGEST_BOUND:
            del given[keyword]
            yield (keyword,), "the bound is too large"
        elif abs(value) > EXACT:
            near = float(max(sign * value, -LARGEST_BOUND))
            given[keyword] = sign * int(math.nextafter(near, math.inf) if near < sign * value else near)
    for strict, low in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        near_by = any(0 < abs(other - given[strict]) < 1 for other in given.values()) if strict in given else False
        if near_by and given[strict] == int(given[strict]) and _may_be(schema, "number"):
            given[low] = given.pop(strict)
            yield (strict,), "the other bound is less than 1 away"
    for keyword in BOUNDS:
        if keyword in given:
            schema[keyword] = given[keyword]
        elif _is_number(schema.get(keyword)):
            del schema[keyword]


def _values(schema: dict) -> Faults:
    """llguidance writes a number beyond 2^53 as the nearest double, and counts a name that comes twice as two."""
    for keyword in ("const", "enum"):
        if any(_is_number(part) and abs(part) > EXACT for part in _parts(schema.get(keyword))):
            del schema[keyword]
            yield (keyword,), "it holds a number beyond 2^53"
    least: Any = schema.get("minProperties")
    if _is_number(least) and _may_be(schema, "object"):
        required = schema.get("required")
        sure = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        may_repeat = schema.get("additionalProperties") is not False or schema.get("patternProperties")
        if 0 <= least <= sure:
            del schema["minProperties"]
        elif least > sure + 1 and may_repeat:
            del schema["minProperties"]
            yield ("minProperties",), "a name may come twice"


ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
KINDS = {"string", "integer", "number", "boolean", "null", "object", "array"}
PAIRS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
MANY = 200


def is_plain(schema: dict) -> bool:
    """Whether llguidance takes `schema`, weeded, for certain if it takes its children: no keywords are in conflict."""
    keywords = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    if not keywords:
        return True
    if isinstance(union := keywords.pop("anyOf", None), list):
        return not keywords and 0 < len(union) < MANY and all(isinstance(each, dict) for each in union)
    kind = keywords.pop("type", None)
    if "enum" in keywords:
        values = keywords.pop("enum")
        words = isinstance(values, list) and 0 < len(values) < MANY and all(isinstance(each, str) for each in values)
        return words and kind in (None, "string") and not keywords
    if kind == "string" and len(keywords) == 1 and isinstance(keywords.get("pattern", keywords.get("format")), str):
        return True  # it was judged alone
    for pair in PAIRS:
        low, high = keywords.pop(pair[0], 0), keywords.pop(pair[1], MANY)
        least = -MANY if pair[0] == "minimum" else 0
        if type(low) is not int or type(high) is not int or not least <= low <= high <= MANY:
            return False
    kinds = kind if isinstance(kind, list) else [kind]
    known, others = keywords.pop("properties", {}), keywords.pop("additionalProperties", True)
    required, items = keywords.pop("required", []), keywords.pop("items", {})
    return (
        0 < len(kinds) == len({each for each in kinds if isinstance(each, str) and each in KINDS})
        and not keywords
        and isinstance(known, dict)
        and len(known) < MANY
        and all(isinstance(each, dict) for each in (*known.values(), items))
        and isinstance(others, dict | bool)
        and isinstance(required, list)
        and all(isinstance(name, str) and (name in known or others is not False) for name in required)
    )


def common_multiple(schema: dict, so_far: int) -> int:
    """The least common multiple of `so_far` and `multipleOf`'s digits: `allOf` may put any two of them together."""
    value: Any = schema.get("multipleOf")
    if not _is_number(value) or value <= 0 or not _may_be(schema, "number", "integer"):
        return so_far
    _, digits, power = Decimal(repr(value)).as_tuple()
    whole = int("".join(map(str, digits))) * 10 ** max(0, min(int(power), 20))
    return so_far if whole in TENS else math.lcm(so_far, whole)


TENS = {10**power for power in range(1, 19)}  # cheap at any size


def has_open_names(schema: dict) -> bool:
    declared = any(size_of(schema.get(key)) for key in (*NAMED, "required"))
    return declared and schema.get("additionalProperties") is not False and _may_be(schema, "object")


def _parts(value: Any) -> Iterator[Any]:
    todo = [value]
    while todo:
        part = todo.pop()
        yield part
        todo.extend(part if isinstance(part, list) else part.values() if isinstance(part, dict) else ())


# Patterns: ECMA 262 writes them, Rust's regex crate reads them

# A class that is not closed runs to the end of the text, so that a search takes linear time.
CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)(\]?)", re.DOTALL)
IN_CLASS = re.compile(r"\\.|\[|&&|~~", re.DOTALL)
PLAIN = {"[": r"\[", "&&": r"\&\&", "~~": r"\~\~"}
NUL_FIRST = re.compile(r"(?:\\(?:x00|u0000|0)|\x00)-")
CONTROL_CATEGORY = re.compile(r"\\[pP]\{?(\w+=)?C")


@lru_cache(maxsize=1024)
def _held_pattern(pattern: str) -> tuple[str | None, str]:
    """(`pattern` as llguidance takes it, "") or (None, why it cannot).

    In a class, `[`, `&&` and `~~` are themselves for ECMA 262. And a class that has every control character makes
    llguidance let an escaped quote and backslash through (`[^"]` accepts `\\"`), so NUL is taken out of it.
    """

    def spell(match: re.Match) -> str:
        negated, inner, closed = match[1], match[2], match[3]
        if inner is None:
            return match[0]
        inner = IN_CLASS.sub(lambda part: PLAIN.get(part[0], part[0]), inner)
        return (rf"[^\x00{inner}" if negated else "[" + NUL_FIRST.sub(r"\\x01-", inner)) + closed

    if len(pattern) > MAX_PATTERN:
        return None, "too complex"
    if CONTROL_CATEGORY.search(pattern) or any("--" in (match[2] or "") for match in CLASS.finditer(pattern)):
        return None, "llguidance reads its character class differently"
    held = CLASS.sub(spell, pattern)
    error = _error_alone("pattern", held)
    return (None, short(error)) if error else (held, "")


# Patterns where a string stands without quotes: a terminal of Lark is a whole text, and has no anchors

PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}  # as in JSON
FORMAT = re.compile(r"\(And \(Regex /(.*)/\) \(Regex /\(\?s:\.\{0,0\}\)/\)\)")


def whole_texts(pattern: str) -> str:
    """A regular expression for the whole texts in which `pattern` is found; an anchor inside a group stays."""
    ways: list[list[str]] = [[]]
    depth = 0
    for piece in PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(piece)
    for way in ways:
        way[:1] = ["("] if way[:1] == ["^"] else ["(?s:.*)(", *way[:1]]
        way[-1:] = [")"] if way[-1] == "$" else [*way[-1:], ")(?s:.*)"]
    spelled = lambda part: ASCII.get(part[0]) or (part[0] if part[0][0] == "\\" else rf"\x{{{ord(part[0]):x}}}")  # noqa: E731
    return re.sub(r"(?s)\\.|/|[^ -~]", spelled, "|".join(map("".join, ways)))


@lru_cache(maxsize=64)
def texts_of_format(name: str) -> str:
    """llguidance's regular expression for a `format`, which it says where none of its texts fits; "" if it does not."""
    found = FORMAT.search(error_of({"type": "string", "format": name, "maxLength": 0}))
    return whole_texts(f"^({found[1]})$") if found else ""


@lru_cache(maxsize=1024)
def fits_some(*terms: str) -> bool:
    """Whether a text fits all these regular expressions, and Lark takes them: it does not say that none fits."""
    lark = LLMatcher.grammar_from_lark(f"start: T\nT: {' & '.join(f'/{term}/' for term in terms)}")
    texts = {"type": "string", "allOf": [{"pattern": f"^({term})$"} for term in terms]}
    return "" not in terms and not LLMatcher.validate_grammar(lark, limits=LIMITS) and not error_of(texts)


# llguidance's verdict


def on_a_deep_stack(size: int, work: Callable[[], Any]) -> Any:
    """`work()`, which has llguidance read a text of `size` characters.

    It recurses, some 9 kB of stack a level, and ends the whole process when there is none left: 1,000 `$ref`s in a
    chain are more than 8 MB hold.
    """
    if size <= 4_000:
        return work()
    outcome: list = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as fault:
            outcome.append((None, fault))

    with _stack_size_is_global:
        usual = threading.stack_size(256 << 20)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        threading.stack_size(usual)
    thread.join()
    value, fault = outcome[0]
    if fault is not None:
        raise fault
    return value


_stack_size_is_global = threading.Lock()


def error_of(schema: dict) -> str:
    """Why llguidance cannot compile `schema`, empty where it can; no vocabulary is needed."""
    text = json.dumps(schema, separators=(",", ":"))
    try:
        grammar = LLMatcher.grammar_from_json_schema(text)
    except ValueError as fault:
        return str(fault)
    return on_a_deep_stack(len(text), lambda: LLMatcher.validate_grammar(grammar, limits=LIMITS))


@lru_cache(maxsize=1024)
def _error_alone(keyword: str, value: str) -> str:
    return error_of({"type": "string", keyword: value})


def short(error: str) -> str:
    """llguidance's reason on one line: of a regex error the line that names the fault; no source, no parser's state."""
    if error.startswith("NoExtension"):
        return "nothing fits it"
    reason = re.split(r"\n<|\n\s*\d+ \| ", error.rpartition("\nerror: ")[2])[0]
    return ("too complex: " if TOO_COMPLEX.search(error) else "") + " ".join(reason.split())[:300]


def _may_be(schema: dict, *types: str) -> bool:
    declared = schema.get("type")
    return declared is None or any(
        kind in declared if isinstance(declared, list) else kind == declared for kind in types
    )


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
