"""A prompt must fit into the model's context window, and the reply into what is left of it.

Replaces   server.load_processor (learns the window), ResponseGenerator._tokenize (derived)
Why        mlx_lm 0.32.2 reads prompts of any length, beyond what the model was trained for and until memory ends, and
           dies of a prompt without tokens
Upstream   server.py ModelProvider._load, ResponseGenerator._tokenize
Delete when mlx_lm's server refuses such prompts
Test       tests/test_context_window.py

The window is what the checkpoint's config.json names, times the factor of its rope scaling where that is not in the
number yet, as vLLM derives it. mlx_lm's own defaults for what a config leaves out are not a model's window, so a config
that names none has none. Checked as soon as the prompt's tokens are counted, before anything is computed.
"""

from __future__ import annotations

from localServerCommon import Refused

NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "n_positions",
    "n_ctx",
)
AS_IT_STANDS = ("default", "mrope", "llama3", "su", "longrope")
"""Kinds of rope scaling after which the config's number needs no factor."""


def window_of(config: dict) -> int | None:
    """Tokens that a prompt and its reply may have together, by a checkpoint's config.json."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    named = [value for name in NAMES if isinstance(value := config.get(name), int) and value > 0]
    if not named:
        return None
    window = min(named)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if kind in AS_IT_STANDS or not factor or "gemma3" in str(config.get("model_type")):
        return window
    if kind == "yarn":
        window = rope.get("original_max_position_embeddings") or window
    return int(window * factor)


def note_window(upstream):
    """mlx_lm hands this function the model and its config, once for each load."""

    def load_processor(model, config):
        model.context_window = window_of(config)
        return upstream(model, config)

    return load_processor


class HoldsContextWindow:
    """Mixin for ResponseGenerator. What is made of `args.max_tokens` must come outside of it."""

    def _tokenize(self, tokenizer, request, args):
        found = super()._tokenize(tokenizer, request, args)
        length, window = len(found[0]), self.model_provider.model.context_window
        param = "messages" if request.request_type == "chat" else "prompt"
        if length == 0:
            raise Refused(f"{param} makes a prompt without tokens", param=param)
        if window is not None:
            if length >= window:
                # Clients look for these words too.
                message = f"This model's maximum context length is {window} tokens, and the prompt has {length} tokens"
                raise Refused(message, param=param, code="context_length_exceeded")
            args.max_tokens = min(args.max_tokens, window - length)
        return found
