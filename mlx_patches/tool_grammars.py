"""A model's own way of writing a tool call → a Lark grammar in which only calls of given tools can be written.

A format is data: what stands around a call, around its arguments, and how a value is written. Three shapes cover them:
arguments as one JSON object; each parameter between tags, a string as raw text and anything else as JSON; Gemma's
objects with bare keys. What always holds: a call that the grammar allows is read by the format's parser as a call of
that tool, and its arguments fit the tool's schema but for the paths listed as not enforced.

Markers that are special tokens in a vocabulary are written as `<[id]>`, for no text may spell a special token.
"""

from __future__ import annotations

from typing import NamedTuple

from mlx_patches.gemma_grammars import GemmaRules
from mlx_patches.grammar_rules import Format, Rules, Specials, Tool
from mlx_patches.mistral_grammars import MistralRules
from mlx_patches.tag_grammars import TagRules
from mlx_patches.tool_formats import FORMATS as READERS

FORMATS = {
    "json_tools": Format('\n{{"name": "{}", "arguments": ', "}\n"),
    "kimi_k2": Format("<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>", "<|tool_call_end|>", between=""),
    "mistral": Format("{}[ARGS]", "", "mistral"),
    "qwen3_coder": Format("\n<function={}>\n", "</function>\n", "tags", "<parameter={}>\n", "\n</parameter>\n"),
    "minimax_m2": Format(
        '\n<invoke name="{}">\n', "</invoke>\n", "tags", '<parameter name="{}">', "</parameter>\n", between=""
    ),
    "glm47": Format("{}", "", "tags", "<arg_key>{}</arg_key>", "</arg_value>", value="<arg_value>"),
    "minicpm5": Format('"{}">', "", "tags", '<param name="{}">', "</param>", cdata=True),
    "muse_spark": Format(
        '\n<atem:invoke name="{}">\n',
        "</atem:invoke>\n",
        "tags",
        '<atem:parameter name="{}">',
        "</atem:parameter>\n",
        between="",
    ),
    "gemma4": Format("call:{}", "", shape="gemma", quote='<|"|>'),
    "function_gemma": Format("call:{}", "", shape="gemma", quote="<escape>"),
}
FORMATS["harmony"] = Format("{}\n", "")  # a call's header is not fed to the grammar: only its name, on a line
FORMATS["laguna"] = FORMATS["glm47"]
KEY, VALUE = "<longcat_arg_key>{}</longcat_arg_key>", "longcat_arg_value>"
FORMATS["longcat"] = Format("{}", "", "tags", KEY, f"</{VALUE}", value=f"<{VALUE}")
"""By the name of mlx_lm's parser. A format that is not here is left free, and cannot be forced."""

SHAPES = {"json": Rules, "tags": TagRules, "gemma": GemmaRules, "mistral": MistralRules}


class Calls(NamedTuple):
    """`rules`: Lark in which `block` is one call, or one block of them, and the marker after it.

    `not_enforced`: paths below the tool's parameters, each with the tool's name in front.
    """

    rules: str
    not_enforced: tuple[str, ...]


def call_rules(form: Format, tools: list[Tool], specials: Specials, several: bool, end: str) -> Calls:
    """The grammar of a block of calls and `end`, the marker after it ("" where the reply ends with it).

    `several`: a block may hold more than one call, where its format allows that.
    """
    readers = (READERS[name] for name, each in FORMATS.items() if each == form and name in READERS)
    writer = SHAPES[form.shape](form, next(readers, READERS["json_tools"]), specials, end, several)
    for tool in tools:
        writer.add(tool)
    return Calls("\n".join(writer.block()), tuple(writer.not_enforced))
