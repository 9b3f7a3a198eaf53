"""How chat templates write past calls, by mlx_lm's parser: Jinja for one `tool_call` (its `name`, `arguments`, `id`).

They carry the real markers, by which mlx_lm finds the parser. laguna is found by the tokenizer's config, kimi_k3 by its
vocabulary.
"""

TAGS = (
    "{{{{ '{head}' }}}}{{% for k, v in tool_call.arguments.items() %}}{{{{ '{before}' + k + '{middle}' }}}}"
    "{{{{ v if v is string else v | tojson }}}}{{{{ '{after}' }}}}{{% endfor %}}{{{{ '{tail}' }}}}"
)


def tags(head, before, middle, after, tail):
    head = head.replace("NAME", "' + tool_call.name + '")
    return TAGS.format(head=head, before=before, middle=middle, after=after, tail=tail)


def keyed(prefix):
    p = prefix
    return tags(
        f"<{p}tool_call>NAME\n",
        f"<{p}arg_key>",
        f"</{p}arg_key>\n<{p}arg_value>",
        f"</{p}arg_value>\n",
        f"</{p}tool_call>",
    )


def gemma(start, end, quote):
    return (
        f"{{{{ '{start}call:' + tool_call.name + '{{' }}}}{{% for k, v in tool_call.arguments.items() %}}"
        f"{{{{ k + ':' }}}}{{{{ '{quote}' + v + '{quote}' if v is string else v | tojson }}}}"
        f"{{{{ ',' if not loop.last }}}}{{% endfor %}}{{{{ '}}{end}' }}}}"
    )


JSON = "tool_call.arguments | tojson"
CALLS = {
    "json_tools": (
        '{{ \'<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
        f"{{{{ {JSON} }}}}{{{{ '}}\n</tool_call>' }}}}"
    ),
    "qwen3_coder": tags(
        "<tool_call>\n<function=NAME>\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "glm47": keyed(""),
    "laguna": keyed(""),
    "longcat": keyed("longcat_"),
    "kimi_k2": (
        "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}"
        f"{{{{ {JSON} }}}}{{{{ '<|tool_call_end|><|tool_calls_section_end|>' }}}}"
    ),
    "kimi_k3": tags(
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        '<|open|>argument key="',
        '" type="string"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "minimax_m2": tags(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="',
        '">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
    "minicpm5": tags('<function name="NAME">', '<param name="', '">', "</param>", "</function>"),
    "mistral": f"{{{{ '[TOOL_CALLS]' + tool_call.name + '[ARGS]' }}}}{{{{ {JSON} }}}}",
    "muse_spark": tags(
        '<atem:function_calls>\n<atem:invoke name="NAME">\n',
        '<atem:parameter name="',
        '">',
        "</atem:parameter>\n",
        "</atem:invoke>\n</atem:function_calls>",
    ),
    "pythonic": (
        "{{ '<|tool_call_start|>[' + tool_call.name + '(' }}{% for k, v in tool_call.arguments.items() %}"
        "{{ k + '=' }}{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')]<|tool_call_end|>' }}"
    ),
}
TOKENS = {"kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "gemma4": ('<|"|>',)}
CONFIGURED = {"laguna"}


def with_calls(template, form):
    """CHATML, writing past calls as `form` does."""
    old = "{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}"
    assert old in template, "only CHATML is known to write calls"
    return template.replace(old, "{% set tool_call = c.function %}" + CALLS[form])
