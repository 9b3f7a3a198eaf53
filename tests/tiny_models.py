"""Model folders that mlx_lm loads in well under a second: real architectures with tiny random weights, or the script.

    tiny("llama")  # kinds: llama, draft, qwen3, hybrid, sliding, gpt_oss, scripted
    tiny("scripted", style="open", tools="json_tools")  # styles, for any kind: STYLES below
    tiny("scripted", prefer={"\\n": 25})  # by token text or id; strength=, wrong_at=, wrong_every= as in scripted_model
    tiny("llama", padded=64, prefer_padded=True)  # logits wider than the tokenizer, and a padded id always wins
    tiny("qwen3", tokens=("<a>",), special=("<|b|>",), template=TEXT, tokenizer=FOLDER, seed=1)

`tiny` is a fixture; outside pytest it is `model_folder`, which keeps each folder in .cache/tiny under a hash of what
made it. The tokenizer is a byte-level BPE trained on CORPUS, the same on every machine: each word of CORPUS is one
token with and without a space before it, and so are JSON's usual runs such as '":' and '{"'.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import tool_templates
from tests.kept_folders import made_once
from tests.tool_templates import CALLS, CONFIGURED, with_calls
from tests.tool_templates import TOKENS as CALL_TOKENS

CACHE = Path(__file__).parent.parent / ".cache" / "tiny"

CORPUS = """
The model reads the prompt once and then writes one token at a time until it says that it is done. First it thinks about
the question, then it gives an answer in plain words. Every reply must be true, short and easy to read. If a tool can
find the weather, the time or the price of something, call it with the right arguments and wait for the result. Hello
world, hello again, this is a test of a server that many people use at the same time. You can ask me what is new in
the city, how far it is from here to there, who wrote that book, when the next train leaves and why the sky is blue. Yes
and no are answers too. Please return a list of names with their ages. Let me think step by step: two plus three makes
five, five times four is twenty, so the sum of all numbers from zero to ten equals fifty five. Wait, let me check this.
However, I should also consider another way, because the first idea may be wrong. Thinking is cheap but not free.
A good plan has a start, a middle and an end. Open the file, look for the function, change the line, run the tests and
report what happened. Nothing else was changed. Red, green, blue, black, white. Monday, Tuesday, Friday. Paris, London,
Berlin, Tokyo. Anna, Peter, Maria, John. Apples, bread, milk, water, coffee. We would like some more of these, not less.
They have seen him with her after the long day before we could go back home; she made only those which are over now.
system user assistant developer analysis commentary final message channel thought response tools function parameter
{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}}
{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius", "days": 3, "exact": true}}
{"id": 12, "items": [{"title": "a", "price": 1.5, "tags": ["x", "y"]}, {"title": "b", "price": -20, "tags": []}],
 "ok": false, "error": null, "status": "done", "count": 100, "values": [1, 2, 3, 4, 5], "color": "red", "city": ""}
{"name":"add","arguments":{"a":1,"b":2}} {"answer":"yes","steps":["one","two"],"score":0.25,"nested":{"list":[[],{}]}}
"""

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ reply }}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'user' %}{{ script + m.content + script_end }}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ reply + header + tail }}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|># Tools\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ reply + header }}"
    "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' + header }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<|channel|>commentary to=functions.' + c.function.name + ' <|constrain|>json"
    "<|message|>' + (c.function.arguments | tojson) + '<|call|>' }}{% endfor %}"
    "{% if m.content %}{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + script + m.content + script_end + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ reply + header + tail }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """How a model writes: its template, the assistant header, what follows the header with thinking on and off.

    A template is given the strings script, script_end and reply (empty but for the scripted kind), header and tail.
    The first of `ends` is the tokenizer's eos, all are in the config's eos_token_id. `tokens` are single tokens that
    are not special, as Qwen has them.
    """

    template: str = CHATML
    header: str = "<|im_start|>assistant\n"
    on: str = ""
    off: str = ""
    tokens: tuple = ()
    special: tuple = ("<|im_start|>",)
    ends: tuple = ("<|im_end|>", "<|endoftext|>")


THINK = {"tokens": ("<think>", "</think>"), "off": "<think>\n\n</think>\n\n"}
STYLES = {
    "plain": Style(),
    "think": Style(**THINK),  # Qwen3: the model opens its thinking itself
    "open": Style(**THINK, on="<think>\n"),  # Qwen3.5: the prompt opens it
    "channel": Style(tokens=("<|channel>", "<channel|>")),  # Gemma 4: <|channel>thought ... <channel|>
    "xtml": Style(tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),  # <|open|>think<|sep|> ...
    "harmony": Style(
        template=HARMONY,
        header="<|start|>assistant",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
}

DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,  # one attention layer, three with an ArraysCache
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# Windows are short so that a test's prompt crosses them.
GPT_OSS = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
GEMMA3 = {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
KINDS = {  # kind: (config, usual style)
    "llama": ({**DENSE, "model_type": "llama"}, "plain"),
    "draft": ({**DENSE, "model_type": "llama", "num_hidden_layers": 1}, "plain"),
    "qwen3": ({**DENSE, "model_type": "qwen3"}, "think"),
    "hybrid": ({**DENSE, **GATED_DELTA, "model_type": "qwen3_5"}, "open"),
    "sliding": ({**DENSE, **GEMMA3, "model_type": "gemma3_text"}, "plain"),
    "gpt_oss": ({**DENSE, **GPT_OSS, "model_type": "gpt_oss"}, "harmony"),
    "scripted": ({"model_type": "scripted"}, "think"),
}


def train_tokenizer() -> Tokenizer:
    """The byte-level BPE of CORPUS: 256 bytes and some 1,000 merges. Training breaks ties by id, so ids are stable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = CORPUS.split()
    tokenizer.train_from_iterator([CORPUS, *words, *(" " + word for word in words)], trainer)
    return tokenizer


def write_model(
    out,
    kind,
    *,
    style=None,
    template=None,
    tools=None,
    tokens=(),
    special=(),
    tokenizer=None,
    seed=0,
    padded=0,
    prefer_padded=False,
    prefer=None,
    **script,
):
    """Writes a model folder. `tools` names a parser of mlx_lm.tool_parsers, whose markers become tokens (tool_markers)
    and by whose markers CHATML writes past calls, which is how mlx_lm then finds the parser;
    `tokenizer` is a folder whose tokenizer.json is taken instead; `template` stands in for the style's; `script` is
    the scripted kind's strength, wrong_at, wrong_every."""
    config, usual = KINDS[kind]
    style = style if isinstance(style, Style) else STYLES[style or usual]
    if tools in CALLS and template is None and style.template == CHATML:
        template, tokens = with_calls(CHATML, tools), (*tokens, *CALL_TOKENS.get(tools, ()))
        parser = tools if tools in CONFIGURED else None
    else:
        parser = tools
    style = replace(style, template=template or style.template)
    scripted = kind == "scripted"

    tok = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json")) if tokenizer else train_tokenizer()
    tok.add_special_tokens([AddedToken(t, special=True) for t in (*style.ends, *style.special, *special)])
    ordinary = (*style.tokens, *tokens, *(tool_markers(tools) if tools else ()))
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in ordinary])
    ends = [tok.token_to_id(t) for t in style.ends]

    variables = {"script": "", "script_end": "", "header": style.header}
    on = {"tail": style.on, "reply": ""}
    off = {"tail": style.off, "reply": ""}
    if scripted:
        variables |= {"script": "<|script|>", "script_end": "<|script_end|>"}
        skips = {}
        for turn in (on, off):
            skip = len(tok.encode(style.header + turn["tail"]).ids)
            turn["reply"] = f"<|reply+{skip}|>"
            skips[turn["reply"]] = skip
        markers = ("<|script|>", "<|script_end|>", "<|cut|>", *skips)
        tok.add_special_tokens([AddedToken(t, special=True) for t in markers])
        config = config | {
            "script_id": tok.token_to_id("<|script|>"),
            "script_end_id": tok.token_to_id("<|script_end|>"),
            "cut_id": tok.token_to_id("<|cut|>"),
            "end_id": ends[0],
            "reply_skips": [[tok.token_to_id(t), n] for t, n in skips.items()],
            **script,
        }

    config = config | {"vocab_size": tok.get_vocab_size() + padded, "eos_token_id": ends}
    weights = make_weights(config, seed)
    if prefer_padded:
        lean_to_padded(weights, padded)
    for token, bonus in (prefer or {}).items():
        weights["base"][tok.encode(token).ids[0] if isinstance(token, str) else token] += bonus
    save_folder(Path(out), config, weights, tok, prelude(variables, on, off) + style.template, style, parser)


def prelude(always, on, off):
    """Jinja that sets the template's variables by enable_thinking."""

    def assign(variables):
        return "".join(f"{{% set {name} = {json.dumps(text)} %}}" for name, text in variables.items())

    thinking_off = "enable_thinking is defined and not enable_thinking"
    return assign(always) + f"{{% if {thinking_off} %}}{assign(off)}{{% else %}}{assign(on)}{{% endif %}}"


def tool_markers(parser):
    """The parser's markers where each is one bracketed word, else none: those others are several tokens."""
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    markers = [m for m in (module.tool_call_start, module.tool_call_end) if m]
    return markers if all(re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", m) for m in markers) else []


def make_weights(config, seed):
    """The architecture's own random initial weights (or the scripted kind's base logits), float32."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(seed)
    if config["model_type"] == "scripted":
        return {"base": mx.random.normal((config["vocab_size"],))}
    cls, args = _get_classes(config)
    weights = dict(tree_flatten(cls(args.from_dict(config)).parameters()))
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)  # Gemma makes one and drops it when a checkpoint has none
    mx.eval(weights)
    return weights


def lean_to_padded(weights, padded):
    """Gives every token a large first component, padded rows twice as large, so that these always win."""
    import mlx.core as mx

    for name in [n for n in weights if n.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        rows = weights[name]
        lean = mx.where(mx.arange(rows.shape[0]) < rows.shape[0] - padded, 4.0, 8.0)
        weights[name] = mx.concatenate([lean[:, None], rows[:, 1:]], axis=1)


def save_folder(out, config, weights, tok, template, style, parser):
    import mlx.core as mx

    end, pad = style.ends[0], style.ends[-1]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    } | ({"tool_parser_type": parser} if parser else {})
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    tok.save(str(out / "tokenizer.json"))
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})


def model_folder(kind: str, **options) -> Path:
    """The folder of this kind and these options (write_model's keywords), made if it is not there yet."""
    made_of = (kind, *sorted((k, asdict(v) if isinstance(v, Style) else v) for k, v in options.items()))
    source = (
        Path(__file__).read_bytes()
        + Path(tool_templates.__file__).read_bytes()
        + version("mlx-lm").encode()
        + version("tokenizers").encode()
    )
    folder = CACHE / f"{kind}-{hashlib.sha256(source + repr(made_of).encode()).hexdigest()[:12]}"
    return made_once(folder, lambda new: write_model(new, kind, **options))
