"""The formats of tool calls: which shapes each of mlx_lm's formats has, by the name of its parser.

What always holds: a block of calls is read whole or is Broken, or it is Open where it ends inside a value; a format's
own shapes come first. The second chance is every shape there is, for calls of known tools only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from mlx_patches.argument_values import quoted
from mlx_patches.tag_dialects import Tags
from mlx_patches.tool_dialects import (
    NAME,
    Broken,
    Call,
    Headed,
    Open,
    Reader,
    Scope,
    json_call,
    python_call,
)

GEMMA = re.compile(
    r'(?P<quote><\|"\|>|<escape>)(?P<text>.*?)(?P=quote)|"(?:[^"\\]|\\.)*"'
    r'|(?<=[{,])(?P<before>\s*)(?P<key>[\w.$-]+)(?P<colon>\s*:\s*)(?P<bare>[^\s"{\[,}<][^,{}\[\]"<]*)?',
    re.DOTALL,
)


QUOTED = re.compile(r'(<\|"\|>|<escape>).*?\1', re.DOTALL)


def from_gemma(text: str, loose: bool) -> str:
    """Gemma's objects as JSON: strings between quotes of its own, bare keys."""

    def mend(match: re.Match) -> str:
        if match["quote"]:
            return quoted(match["text"])
        if match["key"] is None:
            return match[0]
        bare = match["bare"] or ""
        if len(bare.split()) > 1:
            bare = quoted(bare.strip())
        return f"{match['before']}{quoted(match['key'])}{match['colon']}{bare}"

    unquoted = QUOTED.sub("", text)  # either quote may stand inside the other
    if any(quote in unquoted for quote in ('<|"|>', "<escape>")):
        raise Broken if loose else Open
    return GEMMA.sub(mend, text)


class Format(NamedTuple):
    """`dialects`: readers in order. `head`: of a call whose arguments may be sent while they are written.

    `between`: what may stand between two calls. `translate`: makes JSON of the text first.
    """

    dialects: tuple[Reader, ...]
    head: re.Pattern | None = None
    between: str = ""
    translate: Callable[[str, bool], str] | None = None


def pattern(text: str) -> re.Pattern:
    return re.compile(text, re.DOTALL)


WORD = r"[^\s\x1c-\x1f<>\"']+"
JSON_HEAD = pattern(
    r'[\s,;\[\]}]*\{\s*(?:"id"\s*:\s*"(?P<id>[^"\\]+)"\s*,\s*)?(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]+)"(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<open>[^\s]))?'
)
MISTRAL = Headed(
    pattern(rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?\[ARGS\]\s*(?P<open>[{{\[\"])?"), pattern("")
)
KIMI_K2 = Headed(
    pattern(
        r"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}]+?):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?P<open>[^\s<])?"
    ),
    pattern(r"\s*<\|tool_call_end\|>"),
)
KIMI_K3_CALL = r'<\|open\|>call[^<]*?\btool="(?P<name>[^"]+)"[^<]*<\|sep\|>'
KIMI_K3_JSON = Headed(
    pattern(KIMI_K3_CALL + r"\s*<\|open\|>json[^<]*<\|sep\|>\s*(?P<open>[^\s<])?"),
    pattern(r"\s*<\|close\|>json<\|sep\|>(?:\s*<\|close\|>call<\|sep\|>)?"),
)
KIMI_K3 = Tags(
    pattern(KIMI_K3_CALL),
    pattern(r"<\|close\|>call<\|sep\|>"),
    pattern(
        r'<\|open\|>argument(?=[^<]*?\bkey="(?P<name>[^"]*)")'
        r'(?=[^<]*?\btype="(?P<type>[^"]*)"|)[^<]*<\|sep\|>'
    ),
    pattern(r"<\|close\|>argument<\|sep\|>"),
    before="",
)
QWEN = Tags(
    pattern(r"<function=\s*(?P<name>[^\s<>]+)\s*>?"),
    pattern(r"</function>"),
    pattern(r"<parameter=\s*(?P<name>[^\s<>]+)\s*?>"),
    pattern(r"</parameter>"),
    trim=True,
    head=pattern(f"<function={WORD}>"),
    tag=pattern(f"<parameter={WORD}>"),
)
MINIMAX = Tags(
    pattern(r"""<invoke\s+name\s*=\s*["']?(?P<name>[^\s"'<>]+)["']?\s*>"""),
    pattern(r"</invoke>"),
    pattern(r"""<parameter\s+name\s*=\s*["']?(?P<name>[^"'<>]+)["']?\s*>"""),
    pattern(r"</parameter>"),
    head=pattern(f'<invoke name="{WORD}">'),
    tag=pattern(f'<parameter name="{WORD}">'),
)
MINICPM = Tags(
    pattern(r"""(?:<function\s+name\s*=\s*)?["']?(?P<name>[^\s"'<>]+)["']?\s*>"""),
    pattern(r"</function>"),
    pattern(r"""<param\s+name\s*=\s*["']?(?P<name>[^"'<>]+)["']?\s*>"""),
    pattern(r"</param>"),
    cdata=True,
    before=None,
)
MUSE = Tags(
    pattern(r"<atem:invoke\b[^>]*?\bname=\"(?P<name>[^\">]+)\"[^>]*>"),
    pattern(r"</atem:invoke>"),
    pattern(r"<atem:parameter\b[^>]*?\bname=\"(?P<name>[^\">]+)\"[^>]*?>"),
    pattern(r"</atem:parameter>"),
    untyped='[{"-0123456789tfn',
    head=pattern(f'<atem:invoke name="{WORD}">'),
    tag=pattern(f'<atem:parameter name="{WORD}">'),
)


def keyed(prefix: str = "") -> Tags:
    """GLM's: the name alone, then keys and values in tags of their own."""
    return Tags(
        pattern(rf"(?P<name>{NAME})\s*(?=<{prefix}arg_key>|\Z)"),
        None,
        pattern(rf"<{prefix}arg_key>(?P<name>[^<>]*)</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"),
        pattern(rf"</{prefix}arg_value>"),
        untyped='[{"-0123456789tfn',
        head=pattern(f"(?:<{prefix}tool_call>)?{WORD}"),
        tag=pattern(rf"<{prefix}arg_key>{WORD}</{prefix}arg_key>\n?<{prefix}arg_value>"),
    )


GLM, LONGCAT = keyed(), keyed("longcat_")
GLM_PLAIN = Headed(pattern(rf"(?P<name>{NAME})\s+(?P<open>\{{)"), pattern(""))
GEMMA_CALL = Headed(pattern(rf"(?:call:)?\s*(?P<name>{NAME})\s*(?P<open>\{{)"), pattern(""), typed=False)


def begun(form: Headed) -> re.Pattern:
    """The header where arguments begin after it: without them it is no call."""
    return pattern(form.head.pattern + r"""(?<=[{\["])""")


FORMATS = {
    "json_tools": Format((json_call,), JSON_HEAD),
    "mistral": Format((MISTRAL, json_call), begun(MISTRAL), r"\[TOOL_CALLS\]"),
    "kimi_k2": Format((KIMI_K2,), begun(KIMI_K2)),
    "kimi_k3": Format((KIMI_K3_JSON, KIMI_K3), begun(KIMI_K3_JSON)),
    "qwen3_coder": Format((QWEN,)),
    "minimax_m2": Format((MINIMAX,)),
    "minicpm5": Format((MINICPM,)),
    "muse_spark": Format((MUSE,)),
    "glm47": Format((GLM, json_call, GLM_PLAIN)),
    "longcat": Format((json_call, LONGCAT)),
    "pythonic": Format((python_call,)),
    "gemma4": Format((GEMMA_CALL,), translate=from_gemma),
    "function_gemma": Format((GEMMA_CALL,), translate=from_gemma),
}
"""By the name of mlx_lm's parser module; laguna's parser is glm47's."""

SECOND_CHANCE = (
    Format((json_call, QWEN, MINIMAX, MUSE, KIMI_K3_JSON, KIMI_K3, KIMI_K2, MISTRAL, python_call)),
    Format((GLM, LONGCAT)),
    Format((GEMMA_CALL,), translate=from_gemma),
)


def read_all(text: str, form: Format, scope: Scope) -> tuple[list[Call], str]:
    """(the calls that `text` begins with, what of it follows them). Raises Broken, or Open if it is not `loose`."""
    if form.translate is not None:
        text = form.translate(text, scope.loose)
    gap = re.compile(rf"(?:[\s,;]|{form.between})+" if form.between else r"[\s,;]+")
    calls: list[Call] = []
    at = 0
    while True:
        blank = gap.match(text, at)
        begin = blank.end() if blank else at
        if begin == len(text) or (calls and not text[begin:].strip("}] \n")):
            return _judged(calls, scope), ""
        try:
            more, at = _one(text, begin, form, scope)
        except (Broken, Open) as fault:
            if isinstance(fault, Open) and scope.ended and not scope.loose:
                raise
            if calls and form.translate is None and not scope.known:
                return calls, text[at:]
            raise Broken from None
        calls += more


def _one(text: str, at: int, form: Format, scope: Scope) -> tuple[list[Call], int]:
    is_open = False
    for dialect in form.dialects:
        try:
            return dialect(text, at, scope)
        except Open:
            is_open = True
        except Broken:
            continue
    raise Open if is_open else Broken


def _judged(calls: list[Call], scope: Scope) -> list[Call]:
    if not calls or (scope.known and not all(c.name in scope.tools and c.arguments[:1] == "{" for c in calls)):
        raise Broken
    return calls
