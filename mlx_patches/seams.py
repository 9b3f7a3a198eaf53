"""The pin: the one mlx-lm this layer is written against, every name of it that is touched, and how names are replaced.

A seam is a name in mlx_lm that we derive from, swap, or stand in for. Each has a fingerprint: a hash of its signature
and one of its source, taken from the pinned version. `check()` compares them before anything loads, so a changed
mlx_lm ends the process with one sentence instead of a reply that is subtly wrong. Where every byte of mlx_lm is the
pin's there is nothing to compare, and that is 20 ms instead of 300. `python -m mlx_patches.seams` prints the hash and
the table of what is installed; docs/upgrading_mlx_lm.md says when to copy them here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PIN = "0.32.2"
SOURCE = "1ff8c91f56b4c3ad006b98bd0b71317628e0182c0a6a67ecb5f441f15e59c8a4"  # of `source_hash`


class Seam(NamedTuple):
    """`name` is below `mlx_lm`; `how` is derived, swapped, rewritten, called or read; `print` its fingerprint."""

    name: str
    how: str
    room: str
    print: str


SEAMS = (
    Seam("server.main", "called", "mlx_patched_server", "2e38e77b:747b1f39"),
    Seam("server.run", "rewritten", "process", "afccbd0d:8f50bb2c"),
    Seam("server._run_http_server", "rewritten", "process", "cdaf3246:a95fdf1d"),
    Seam("server.ModelProvider.__init__", "derived", "model_names", "c4122d53:ce004e49"),
    Seam("server.ModelProvider.load_default", "derived", "model_names", "f4ca892d:b7746bd4"),
    Seam("server.ModelProvider.load", "read", "model_names", "193754ea:815a086c"),
    Seam("server.ModelProvider._load", "derived", "reply_format", "193754ea:24ae8377"),
    Seam("server.ModelProvider.reset", "derived", "reply_format", "c3b6ad8b:bad91742"),
    Seam("server.ResponseGenerator.__init__", "derived", "survival", "068a9042:bc2b6580"),
    Seam("server.ResponseGenerator._run_generate", "rewritten", "survival", "f4ca892d:b75d390f"),
    Seam("server.ResponseGenerator._next_request", "derived", "survival", "a31d8a7b:3d336154"),
    Seam("server.ResponseGenerator._generate", "read", "watcher", "f4ca892d:3a425935"),
    Seam("server.ResponseGenerator._serve_single", "read", "watcher", "834ca774:90f0dd09"),
    Seam("server.ResponseGenerator._tokenize", "derived", "watched_replies", "8ce3c5ea:85879c0b"),
    Seam("server.ResponseGenerator._make_state_machine", "called", "watched_replies", "af400f18:659a2f7b"),
    Seam("server.ResponseGenerator._await_response", "rewritten", "reply_events", "920585cc:1c7d2351"),
    Seam("server.ResponseGenerator.generate", "rewritten", "reply_events", "3bff28ac:b16df1fd"),
    Seam("server.GenerationContext.stop", "called", "reply_events", "f4ca892d:5d5cf37b"),
    Seam("server.ResponseGenerator.generation_available", "called", "reply_events", "f4ca892d:953a613d"),
    Seam("server._make_logits_processors", "swapped", "watched_replies", "d97ace99:174c15ca"),
    Seam("server._make_sampler", "swapped", "padded_rows", "5a32fdeb:ca4092d8"),
    Seam("server._format_top_logprobs", "swapped", "padded_rows", "ba7a00bd:a0da6777"),
    Seam("server.ToolCallFormatter.__call__", "rewritten", "tool_arguments", "f4677cbf:17100a6a"),
    Seam("tool_parsers.json_tools.parse_tool_call", "rewritten", "tool_arguments", "d945d862:d4d6d9ff"),
    Seam("tool_parsers.qwen3_coder.parse_tool_call", "rewritten", "tool_arguments", "554d357a:11b66a18"),
    Seam("tool_parsers.gemma4.parse_tool_call", "rewritten", "tool_arguments", "b6f55e82:e17cb918"),
    Seam("tool_parsers.function_gemma.parse_tool_call", "rewritten", "tool_arguments", "b6f55e82:ac756aa5"),
    Seam("tool_parsers.glm47.parse_tool_call", "called", "tool_arguments", "47ec94fd:55b98475"),
    Seam("tool_parsers.kimi_k2.parse_tool_call", "called", "tool_arguments", "d58884b8:e0071991"),
    Seam("tool_parsers.kimi_k3.parse_tool_call", "rewritten", "tool_arguments", "d58884b8:11c01835"),
    Seam("tool_parsers.minimax_m2.parse_tool_call", "rewritten", "tool_arguments", "4019b5f5:5fbaa47c"),
    Seam("tool_parsers.minicpm5.parse_tool_call", "rewritten", "tool_arguments", "554d357a:98b86b43"),
    Seam("tool_parsers.mistral.parse_tool_call", "rewritten", "tool_arguments", "d58884b8:82a9f61b"),
    Seam("tool_parsers.muse_spark.parse_tool_call", "rewritten", "tool_arguments", "9d7b00ce:530c012e"),
    Seam("tool_parsers.pythonic.parse_tool_call", "rewritten", "tool_arguments", "44bd33ef:eeba2f01"),
    Seam("tool_parsers.longcat.parse_tool_call", "called", "tool_arguments", "47ec94fd:5e259472"),
    Seam("tokenizer_utils._infer_tool_parser", "read", "tool_arguments", "b6e894e8:f4c0c068"),
    Seam("server._inline_image_urls", "rewritten", "image_urls", "ba04dfd6:3148c6dc"),
    Seam("server._image_url", "read", "image_urls", "3799b6c0:75b8860c"),
    Seam("server._decode_image", "read", "chat_messages", "e7ead576:684dfe68"),
    Seam("server.process_message_content", "read", "chat_messages", "4df00f98:dc3e7f1d"),
    Seam("server.load_processor", "swapped", "context_window", "cafeee16:05d01201"),
    Seam("server.GenerationArguments", "derived", "request_bodies", "61a0ef9c:29cd69dc"),
    Seam("server.APIHandler.__init__", "derived", "mlx_patched_server", "d376eb76:e9d59ffe"),
    Seam("server.APIHandler.do_POST", "rewritten", "request_bodies", "f4ca892d:8bd4d305"),
    Seam("server.APIHandler.do_GET", "rewritten", "mlx_patched_server", "f4ca892d:6112bfed"),
    Seam("server.APIHandler.validate_model_parameters", "rewritten", "request_bodies", "c3b6ad8b:34cd1bb4"),
    Seam("server.APIHandler.handle_completion", "rewritten", "reply_events", "6d1b70ff:90c9f5f6"),
    Seam("server.APIHandler.generate_response", "rewritten", "chat_wire", "41519b5d:81c7a883"),
    Seam("server.APIHandler.completion_usage_response", "rewritten", "chat_wire", "2348c6d8:177eb813"),
    Seam("server.APIHandler.handle_models_request", "rewritten", "model_names", "f4ca892d:03dd87cb"),
    Seam("server.APIHandler._set_cors_headers", "rewritten", "access", "f4ca892d:316ac465"),
    Seam("generate.GenerationBatch._step", "swapped", "watched_replies", "951e60fd:d7513c50"),
    Seam("generate.BatchGenerator.insert_segments", "derived", "cancellation", "cd5a63e1:509f9596"),
    Seam("generate.BatchGenerator.next", "derived", "cancellation", "f4ca892d:b4579c11"),
    Seam("generate.BatchGenerator._next", "read", "cancellation", "f4ca892d:eb3a4e36"),
    Seam("generate.BatchGenerator.extract_cache", "called", "cancellation", "372826a5:24457434"),
    Seam("generate.BatchGenerator.remove", "derived", "cancellation", "817025ee:705e7de0"),
    Seam("generate.PromptProcessingBatch.prompt", "swapped", "survival", "c2aafc9c:91194fe0"),
    Seam("server.stream_generate", "swapped", "cancellation", "d2b31559:0a7c19bf"),
    Seam("generate.speculative_generate_step", "read", "watcher", "6904ae16:84bed200"),
    Seam("generate.generate_step", "read", "watcher", "66dc6e21:f5dd8df9"),
    Seam("generate.make_stop_sequences", "read", "stop_strings", "581fe2ab:c3896165"),
    Seam("generate.TextStateMachine.split", "called", "reply_format", "4901ed81:36cd9901"),
    Seam("generate.BatchGenerator.__init__", "called", "cache_leak", "3c45bd56:80fdd7d3"),
    Seam("generate.BatchGenerator.insert", "called", "cache_leak", "4b067aa0:acfc9d80"),
    Seam("models.cache.ArraysCache", "read", "cache_leak", "bb7d02b2:57f70ab4"),
    Seam("models.cache.BatchKVCache", "read", "cache_leak", "aa65c7b6:474e6fe4"),
    Seam("server.LRUPromptCache.__init__", "derived", "prompt_cache", "98d9399d:dad40f4e"),
    Seam("server.LRUPromptCache.fetch_nearest_cache", "rewritten", "prompt_cache", "b33cae95:7ac872d0"),
    Seam("server.LRUPromptCache.insert_cache", "derived", "prompt_cache", "d869984e:49c194f3"),
    Seam("server.LRUPromptCache.trim_to", "called", "prompt_cache", "7e4d6e6e:cc498b9d"),
    Seam("models.cache.LRUPromptCache.CacheOrder", "read", "prompt_cache", "8cb5832d:bbff9dec"),
    Seam("models.cache.PromptTrie.get", "called", "prompt_cache", "b33cae95:acd06179"),
    Seam("models.cache.make_prompt_cache", "called", "prompt_cache", "8de82d6b:ae8ee8ce"),
    Seam("models.cache.KVCache", "read", "prompt_cache", "2e38e77b:9e33b162"),
    Seam("models.cache.QuantizedKVCache", "read", "prompt_cache", "c7fb3a0c:d24f51c8"),
    Seam("models.cache.RotatingKVCache", "read", "prompt_cache", "6a0de32f:0ccede17"),
    Seam("models.cache.ChunkedKVCache", "read", "prompt_cache", "e824700f:f8850fad"),
    Seam("models.cache.CacheList", "read", "prompt_cache", "94d179e4:ccf928f2"),
    Seam("utils.load", "read", "early_tokenizer", "349d8504:3ecfb3a0"),
    Seam("utils.load_model", "swapped", "early_tokenizer", "8878434a:7ee59ae1"),
    Seam("utils.load_tokenizer", "swapped", "early_tokenizer", "07d1c9d5:a1832454"),
    Seam("utils._download", "called", "draft_models", "4e59516d:89796073"),
    Seam("utils.load_config", "called", "draft_models", "f7969898:897bfcc2"),
    Seam("utils._get_classes", "called", "draft_models", "69775980:c5f60582"),
    Seam("tokenizer_utils._byte_decoder", "called", "reply_format", "2e38e77b:6817232c"),
    Seam("tokenizer_utils._infer_thinking", "read", "reply_format", "b6e894e8:b8139091"),
    Seam("tokenizer_utils.TokenizerWrapper.__init__", "read", "harmony", "19147cce:79f9e556"),
    Seam("tokenizer_utils.TokenizerWrapper.eos_token_ids", "called", "harmony", "f4ca892d:3f265193"),
)


def find(name: str) -> tuple[Any, str, Any]:
    """(owner, attribute, value) of a name below mlx_lm, such as "server.APIHandler.do_POST". Raises AttributeError."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(["mlx_lm", *parts[:split]]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1], getattr(owner, parts[-1])
    raise AttributeError(name)


def fingerprint(value: Any) -> str:
    """Eight hexadecimal digits for the signature and eight for the source."""
    if isinstance(value, property):
        value = value.fget
    # A function that is a default has an address, which is another each time.
    parts = re.sub(" at 0x[0-9a-f]+", "", str(inspect.signature(value))), inspect.getsource(value)
    return ":".join(hashlib.sha256(part.encode()).hexdigest()[:8] for part in parts)


def source_hash() -> str:
    """The SHA-256 of all Python files of mlx_lm, one after the other; none of them is imported."""
    spec = find_spec("mlx_lm")
    files = sorted(Path(spec.origin).parent.rglob("*.py")) if spec and spec.origin else []
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def check() -> str | None:
    """One sentence on what is not as it was when this version was written, or None."""
    try:
        found = importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        return f"mlx-lm is not installed; this server needs mlx-lm {PIN}: pip install mlx-lm=={PIN}"
    if found != PIN:
        return f"mlx-lm {found} is installed, and this server is written for {PIN}: pip install mlx-lm=={PIN}"
    return None if source_hash() == SOURCE else changed_seam()


def changed_seam() -> str | None:
    """One sentence on the first seam that is not the pin's, or None."""
    for seam in SEAMS:
        try:
            now = fingerprint(find(seam.name)[2])
        except AttributeError:
            return f"mlx_lm.{seam.name} is missing from the installed mlx-lm {PIN}; reinstall mlx-lm=={PIN}"
        if now != seam.print:
            part = "signature" if now[:8] != seam.print[:8] else "source"
            return f"the {part} of mlx_lm.{seam.name} is not that of mlx-lm {PIN}; reinstall mlx-lm=={PIN}"
    return None


def replace(name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what stood there)` in the place of `name`."""
    owner, attribute, upstream = find(name)
    setattr(owner, attribute, make(upstream))


def table() -> str:
    """The seams as a Markdown table, which docs/seams.md holds."""
    rows = [f"| `mlx_lm.{seam.name}` | {seam.how} | `{seam.room}` | `{seam.print}` |" for seam in SEAMS]
    return "\n".join(["| name | how | room | fingerprint |", "| --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        print(table())
    else:
        print(f'SOURCE = "{source_hash()}"')
        for seam in SEAMS:
            print(f"    Seam{tuple(seam._replace(print=fingerprint(find(seam.name)[2])))},".replace("'", '"'))
