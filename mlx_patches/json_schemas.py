"""What of a JSON schema a grammar can hold to: a schema → one that llguidance enforces, and what it leaves out.

Some keywords no grammar of llguidance holds (`not`, `uniqueItems`, look-ahead in a `pattern`), some it refuses only
beside others, and a few it takes and holds wrongly. All end alike: exactly that keyword goes, its path is listed, the
rest stays. What always holds: a value that the prepared schema allows is valid against the given one but for the
listed paths, and a keyword leaves unlisted only where it has no effect (`uniqueItems: false`).

The walk visits schemas, never the values of `const`, `enum` or `default`, and only those that the root reaches. It and
every loop here are iterative and bounded: a schema of any size or depth ends in a Prepared or a Refused.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from localServerCommon import Refused
from mlx_patches.schema_keywords import (
    BOUNDS,
    MANY,
    MAX_MULTIPLE,
    NAMED,
    TOO_COMPLEX,
    Path,
    common_multiple,
    error_of,
    has_open_names,
    is_plain,
    short,
    size_of,
    weed,
)

WHITE_SPACE = r"(\n {0,32}| )"
MAX_SCHEMAS = 5_000  # llguidance recurses once a schema
MAX_PATTERN_PROPERTIES = 100  # compared pairwise: 300 take 2.2 s
MAX_CACHED_TEXT = 100_000
MAX_TRIALS = 40  # compilations to find what may stay
MAX_PASSES = 50  # over all schemas, to see which have a value that ends
MAX_LOCATED = 300  # schemas that are searched for a fault

CHILDREN = (*NAMED, "additionalProperties", "items", "prefixItems", "additionalItems", "anyOf", "oneOf", "allOf")
# What llguidance says of keywords that it cannot hold beside others → those of which one must go.
CONFLICTS = (
    ("oneOf constraints are not supported", ("oneOf",)),
    ("patternProperty regexes", ("patternProperties",)),
    ("min/maxProperties only supported", ("minProperties", "maxProperties")),
    ("Failed to generate regex", (*BOUNDS, "multipleOf")),
    ("too many digits", ("multipleOf",)),
    ("regex parse error", (*BOUNDS, "minLength", "maxLength")),
)
REASONS = {"oneOf": "its members may overlap", "patternProperties": "a name may match two of its patterns"}


@dataclass(frozen=True)
class Dropped:
    """A keyword that is not enforced: where it stands (`properties.email.pattern`), which it is, and why."""

    path: str
    keyword: str
    reason: str


@dataclass(frozen=True)
class Prepared:
    """`text`: the schema as llguidance takes it, options included, by itself or after `%json` in a Lark grammar."""

    text: str
    dropped: tuple[Dropped, ...] = ()

    @property
    def not_enforced(self) -> tuple[str, ...]:
        return tuple(drop.path for drop in self.dropped)


class _Fault(Exception):
    """What is wrong with a schema, as the end of a sentence."""


def prepare(schema: Any, *, param: str, strict: bool = False) -> Prepared:
    """`schema`, an object or a boolean as JSON has them, made ready for llguidance. `param`: its field of the body.

    Raises Refused (`invalid_json_schema`) when it is no schema, no value can fit it, it is too complex, or it is
    `strict` and holds a keyword that cannot be enforced. A schema seen before costs its serialisation and a look-up.
    """
    try:
        if not isinstance(schema, dict | bool):
            raise _Fault("a schema is an object")
        if schema is False:
            raise _Fault("no value fits it")
        try:
            text = json.dumps({} if schema is True else schema, allow_nan=False, separators=(",", ":"))
            prepared = (_prepare_seen if len(text) <= MAX_CACHED_TEXT else _prepare)(text)
        except RecursionError:
            raise _Fault("too complex: nested too deeply") from None
        except ValueError as fault:
            raise _Fault(f"it is not JSON: {fault}") from None
        if strict and prepared.dropped:
            first = prepared.dropped[0]
            raise _Fault(f"{first.keyword!r} at {first.path} cannot be enforced ({first.reason}), and strict is true")
    except _Fault as fault:
        raise Refused(f"{param}: {fault}", param=param, code="invalid_json_schema") from None
    return prepared


def _prepare(text: str) -> Prepared:
    root = json.loads(text)
    dropped = []
    if root.pop("x-guidance", None) is not None:
        dropped.append(Dropped("x-guidance", "x-guidance", "the server sets llguidance's options"))
    patterns, multiple, open_names, plain = 0, 1, False, True
    for count, (path, schema) in enumerate(_reachable(root)):
        patterns += size_of(schema.get("patternProperties"))
        if count > MAX_SCHEMAS or patterns > MAX_PATTERN_PROPERTIES:
            raise _Fault("too complex")
        dropped += [Dropped(_dots(path, *at), at[0], why) for at, why in weed(schema)]
        common = common_multiple(schema, multiple)
        if common > MAX_MULTIPLE:
            del schema["multipleOf"]
            dropped.append(Dropped(_dots(path, "multipleOf"), "multipleOf", "too complex"))
        else:
            multiple = common
        open_names = open_names or has_open_names(schema)
        plain = plain and count < MANY and is_plain(schema)
    if '"$ref"' in text and (endless := _endless(root)) is not None:
        raise _Fault(f"{_dots(*endless) or 'the schema'}: no finite value fits it, for its references lead back to it")
    # "Any other name" includes the declared ones spelled with \u in llguidance: {"\u0061": …} beside a declared "a".
    escapes = {"json_allowed_escapes": '"\\bfnrt'} if open_names else {"json_allow_general_unicode_escapes": True}
    root["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, **escapes}
    # What is plain is judged when it is compiled, which finds no fault: half a millisecond for ten properties.
    error = "" if plain else error_of(root)
    if error:
        root, conflicts = _settle(root, error)
        dropped += conflicts
    return Prepared(json.dumps(root, separators=(",", ":")), tuple(dropped))


_prepare_seen = lru_cache(maxsize=256)(_prepare)

# The walk


def _reachable(root: dict) -> Iterator[tuple[Path, dict]]:
    """Each schema that a value can be held to, once, the outermost first; its children as the caller leaves them."""
    todo: deque[tuple[Path, dict]] = deque([((), root)])
    seen = set()
    while todo:
        path, schema = todo.popleft()
        if id(schema) not in seen:
            seen.add(id(schema))
            yield path, schema
            for key in CHILDREN:
                if key in schema:
                    todo.extend(((*path, *name), child) for name, child in _children(key, schema[key]))
            if "$ref" in schema:
                todo.extend(_targets(root, schema["$ref"]))


def _children(key: str, value: Any) -> Iterator[tuple[Path, dict]]:
    named: Any = [(None, value)]
    if isinstance(value, list):
        named = enumerate(value)
    elif isinstance(value, dict) and key in (*NAMED, "$defs", "definitions"):
        named = value.items()
    for name, child in named:
        if isinstance(child, dict):
            yield (key,) if name is None else (key, str(name)), child


def _targets(root: dict, ref: Any) -> Iterator[tuple[Path, dict]]:
    """The schema that `ref` points at; where it is an anchor or an `$id`, all that it can name."""
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        path = tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in ref.split("/")[1:])
        target = _at(root, path)
        if isinstance(target, dict):
            yield path, target
            return
    if isinstance(ref, str):
        for key in ("$defs", "definitions"):
            yield from _children(key, root.get(key))


def _at(root: Any, path: Path) -> Any:
    for part in path:
        if isinstance(root, list):
            root = root[int(part)] if part.isdecimal() and int(part) < len(root) else None
        else:
            root = root.get(part) if isinstance(root, dict) else None
    return root


def _endless(root: dict) -> Path | None:
    """The path of a schema that no finite value fits, the innermost; None where there is none, or too many passes.

    The least fixed point of `_may_end`. llguidance compiles such schemas and finds no token where it comes to one.
    """
    schemas = list(_reachable(root))
    ending: set[int] = set()

    def ends(schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in ending

    for _ in range(MAX_PASSES):
        before = len(ending)
        for _, schema in reversed(schemas):
            if not ends(schema) and _may_end(root, schema, ends):
                ending.add(id(schema))
        if len(ending) == before:
            return next((path for path, schema in reversed(schemas) if not ends(schema)), None)
    return None


def _may_end(root: dict, schema: dict, ends: Callable[[Any], bool]) -> bool:
    """Whether a finite value may fit `schema`, as far as is known of the schemas in it (`ends`)."""
    any_of, one_of, all_of, required, first, types = (
        value if isinstance(value := schema.get(key), list) else []
        for key in ("anyOf", "oneOf", "allOf", "required", "prefixItems", "type")
    )
    targets = [target for _, target in _targets(root, schema.get("$ref"))]
    if not all(map(ends, all_of)) or not all(any(map(ends, union)) for union in (targets, any_of, one_of) if union):
        return False
    types = types or [schema.get("type")]
    if any(kind not in ("object", "array") for kind in types):
        return True
    known = dict(_children("properties", schema.get("properties")))
    if "object" in types and all(ends(known.get(("properties", str(name)))) for name in required):
        return True
    return "array" in types and (not schema.get("minItems") or ends((first or [schema.get("items")])[0]))


def _dots(*path) -> str:
    return ".".join(part for step in path for part in ([step] if isinstance(step, str) else step))


# What goes wrong between keywords


def _settle(root: dict, error: str) -> tuple[dict, list[Dropped]]:
    """(`root` as llguidance takes it, what went): all keywords of a kind in conflict go, each comes back if it can."""
    text = json.dumps(root)
    schemas = list(_reachable(root))
    gone: dict[Path, str] = {}

    def without(places: dict[Path, str]) -> dict:
        copy = json.loads(text)
        for path, keyword in sorted(places.items(), key=lambda place: -len(place[0])):
            holder = _at(copy, path[:-1])
            value = holder.pop(path[-1])
            if keyword == "oneOf":
                holder["allOf"] = [*holder.get("allOf", ()), {"anyOf": value}]
        return copy

    while error:
        keywords = next((keywords for sign, keywords in CONFLICTS if sign in error), ())
        more = {path: keyword for path, keyword in _places(schemas, keywords) if path not in gone}
        if not more:
            raise _Fault(_located(without(gone), error))
        gone |= more
        error = error_of(without(gone))
    for place in list(gone)[:MAX_TRIALS]:
        fewer = {path: keyword for path, keyword in gone.items() if path != place}
        if not error_of(without(fewer)):
            gone = fewer
    why = "it cannot be held beside the others"
    return without(gone), [Dropped(_dots(path), word, REASONS.get(word, why)) for path, word in gone.items()]


def _places(schemas: list[tuple[Path, dict]], keywords: Path) -> Iterator[tuple[Path, str]]:
    for path, schema in schemas:
        for keyword in keywords:
            if keyword == "patternProperties":
                yield from (((*path, keyword, name), keyword) for name in schema.get(keyword, ()))
            elif keyword in schema:
                yield (*path, keyword), keyword


def _located(root: dict, error: str) -> str:
    """The reason, and the path of the innermost schema or keyword that gives it alone."""
    shared = {key: root[key] for key in ("$schema", "$id", "$defs", "definitions") if key in root}
    schemas = list(_reachable(root))
    for path, schema in [] if len(schemas) > MAX_LOCATED or TOO_COMPLEX.search(error) else reversed(schemas):
        if error_of({**shared, **schema}) == error:
            alone = [key for key in schema if error_of({**shared, key: schema[key]}) == error]
            place = _dots(path, *alone[:1])
            return f"{place}: {short(error)}" if place else short(error)
    return short(error)
