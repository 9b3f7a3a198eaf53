"""How each tool format of mlx_lm 0.32.2 writes calls, and a reply of it read without a model.

written("qwen3_coder", [("f", {"a": 1, "s": "text"})])  # the reply's text, markers and all; Raw("1e400") as it is
read("qwen3_coder", ["<tool_", "call>", ...], tools=TOOLS)  # a Sent: content, reasoning, calls, reason
"""

import json
from dataclasses import dataclass, field
from importlib import import_module

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import Response

from mlx_patches.call_reader import CallReader
from mlx_patches.reply_events import CallArguments, CallOpened, Content, Reasoning, ReplyReader
from mlx_patches.reply_format import TextSplitter
from mlx_patches.tool_arguments import Calls


class Raw(str):
    """A value as a model writes it where it is no JSON."""


def as_json(value):
    return str(value) if isinstance(value, Raw) else json.dumps(value, ensure_ascii=False)


def json_object(arguments):
    return "{" + ", ".join(f"{json.dumps(key)}: {as_json(value)}" for key, value in arguments.items()) + "}"


def as_text(value):
    """As templates write a value between tags: a string as it is, anything else as JSON."""
    return str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tagged(before, after, head, tail, arguments):
    return head + "".join(before.format(k) + as_text(v) + after for k, v in arguments.items()) + tail


def minicpm(name, arguments):
    def text(value):
        written = as_text(value)
        return f"<![CDATA[{written}]]>" if any(c in written for c in "<&\n") else written

    params = "".join(f'<param name="{k}">{text(v)}</param>' for k, v in arguments.items())
    return f'"{name}">{params}'


def kimi_k3(name, arguments):
    kinds = {str: "string", Raw: "number", int: "number", float: "number", bool: "boolean", type(None): "null"}
    text = f'<|open|>call tool="{name}" index="1"<|sep|>'
    for key, value in arguments.items():
        kind = kinds.get(type(value), "object")
        text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{as_text(value)}<|close|>argument<|sep|>'
    return text + "<|close|>call<|sep|>"


def gemma_value(value, quote):
    match value:
        case Raw():
            return str(value)
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(gemma_value(v, quote) for v in value) + "]"
    return json.dumps(value)


def gemma(quote):
    return lambda name, arguments: f"call:{name}{gemma_value(arguments, quote)}"


def python_call(name, arguments):
    pairs = (f"{k}={v if isinstance(v, Raw) else repr(v)}" for k, v in arguments.items())
    return f"{name}({', '.join(pairs)})"


def keyed(prefix):
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return lambda name, arguments: tagged(
        f"<{key}>{{}}</{key}>\n<{value}>", f"</{value}>\n", f"{name}\n", "", arguments
    )


WRITERS = {
    "json_tools": lambda n, a: f'\n{{"name": "{n}", "arguments": {json_object(a)}}}\n',
    "qwen3_coder": lambda n, a: tagged(
        "<parameter={}>\n", "\n</parameter>\n", f"\n<function={n}>\n", "</function>\n", a
    ),
    "gemma4": gemma('<|"|>'),
    "function_gemma": gemma("<escape>"),
    "glm47": keyed(""),
    "kimi_k2": lambda n, a: (
        f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{json_object(a)}<|tool_call_end|>"
    ),
    "kimi_k3": kimi_k3,
    "minimax_m2": lambda n, a: tagged(
        '<parameter name="{}">', "</parameter>\n", f'\n<invoke name="{n}">\n', "</invoke>\n", a
    ),
    "minicpm5": minicpm,
    "mistral": lambda n, a: f"{n}[ARGS]{json_object(a)}",
    "muse_spark": lambda n, a: tagged(
        '<atem:parameter name="{}">', "</atem:parameter>\n", f'\n<atem:invoke name="{n}">\n', "</atem:invoke>\n", a
    ),
    "pythonic": lambda n, a: f"[{python_call(n, a)}]",
    "longcat": keyed("longcat_"),
    "laguna": keyed(""),
}
FORMATS = tuple(WRITERS)
JSON_FORMATS = ("json_tools", "kimi_k2", "mistral")
IN_ONE_BLOCK = {"kimi_k2": "", "kimi_k3": "\n", "minimax_m2": "\n", "muse_spark": "\n"}


def markers(form):
    module = import_module(f"mlx_lm.tool_parsers.{form}")
    return module.tool_call_start, module.tool_call_end


def block(form, calls):
    """Several calls between one pair of markers."""
    if form == "pythonic":
        return "[" + ", ".join(python_call(*call) for call in calls) + "]"
    between = {**IN_ONE_BLOCK, "mistral": "[TOOL_CALLS]"}.get(form, "\n")
    return between.join(WRITERS[form](*call) for call in calls)


def written(form, calls):
    """`calls`, each (name, arguments), as this format has several."""
    start, end = markers(form)
    if form in IN_ONE_BLOCK or form in ("pythonic", "mistral"):
        return start + block(form, calls) + end
    return "\n".join(start + WRITERS[form](*call) + end for call in calls)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "n": {"type": "number"},
                    "s": {"type": "string"},
                    "t": {"type": "string"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "l": {"type": "array"},
                    "u": {"type": ["number", "null"]},
                    "v": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "w": {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/size"}]},
                    "x": {"type": ["integer", "string"]},
                },
                "$defs": {"size": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g", "parameters": None}},
]


@dataclass
class Sent:
    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    ids: list = field(default_factory=list)
    reason: str | None = None
    events: list = field(default_factory=list)

    @property
    def said(self):
        return self.content, self.reasoning, self.calls, self.reason

    @property
    def values(self):
        return [(name, json.loads(text)) for name, text in self.calls]


def splitter(form, tools=TOOLS, initial="normal", held=False):
    """A CallReader of the format (None: a model without one), its thinking between <think> and </think>.

    `held`: as if a grammar saw each block of calls.
    """
    start, end = markers(form) if form else ("", "")
    edges = {"normal": [("<think>", "reasoning")], "reasoning": [("</think>", "normal")]}
    if form:
        edges["normal"].append((start, "tool"))
        edges["reasoning"].append((start, "tool"))
        edges["tool"] = [(end, "normal")] if end else []
    module = import_module(f"mlx_lm.tool_parsers.{form}") if form else None
    parser = module.parse_tool_call if form else None
    name = parser.__module__.rpartition(".")[2] if form else None
    return CallReader(TextSplitter(TextStateMachine(edges), initial), Calls(name, parser, start, end, tools, held=held))


def reader(form, tools=TOOLS, *, streamed=True, initial="normal", logprobs=False, held=False):
    """A ReplyReader of the format's CallReader."""
    read_by = splitter(form, tools, initial, held)
    return ReplyReader(read_by, None, lambda n: b"x", streamed=streamed, logprobs=logprobs)


def read(form, tokens, tools=TOOLS, *, end="stop", **options):
    """The events of a reply of these tokens, folded. `end`: as mlx_lm ends it."""
    replies = reader(form, tools, **options)
    responses = [Response(text, n, -0.5, None, ()) for n, text in enumerate(tokens)]
    if end == "stop":
        responses.append(Response("", -1, -0.5, "stop", ()))
    else:
        responses[-1].finish_reason = end
    sent = Sent()
    for response in responses:
        for event in replies.read(response):
            sent.events.append(event)
            match event:
                case Reasoning(text):
                    sent.reasoning += text
                case Content(text):
                    sent.content += text
                case CallOpened(number, call_id, name):
                    assert number == len(sent.calls)
                    sent.calls.append([name, ""])
                    sent.ids.append(call_id)
                case CallArguments(number, text):
                    assert number == len(sent.calls) - 1
                    sent.calls[number][1] += text
    sent.calls = [tuple(call) for call in sent.calls]
    sent.reason = replies.finish_reason
    return sent
