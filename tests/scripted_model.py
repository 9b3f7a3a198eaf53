"""An mlx_lm architecture that replies with the text of the last user message, token by token, then an end token.

    tiny("scripted")  # a folder; tests/site makes mlx_lm find this file as mlx_lm.models.scripted
    chat(server, "a </<|cut|>think<|cut|>> b")  # <|cut|> splits tokens there and is not replied
    complete(server, "<|script|>hello<|script_end|>")  # a prompt may hold the script's markers itself

The theory. The only layer keeps the token ids as the keys of an ordinary KV cache, so batching, trimming, the prompt
cache, and speculative decoding as main or as draft all work. The chat template writes every user message between
<|script|> and <|script_end|>, and before each assistant header one of the reply markers, whose id says how many prompt
tokens come before the reply. The logits at reply position n are `base` (fixed random numbers: what comes when the
script's token is masked) plus `strength` on the n-th script token; they depend on n only, not on what was sampled
before. Nothing is evaluated inside the forward pass. A quantized KV cache cannot hold it (one key a token). A script
that ends in a single space loses it in mlx_lm's detokenizer, which holds a space back and drops it at the end token.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache


@dataclass
class ModelArgs(BaseModelArgs):
    """`reply_skips` is [[marker id, prompt tokens between marker and reply], ...]; `wrong_at` and `wrong_every` (every
    k-th, counted from 1) name the reply positions, from 0, where another token than the script's is preferred."""

    model_type: str
    vocab_size: int
    script_id: int
    script_end_id: int
    cut_id: int
    end_id: int
    reply_skips: list
    strength: float = 30.0
    wrong_at: list = field(default_factory=list)
    wrong_every: int = 0


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.base = mx.zeros((args.vocab_size,))

    def __call__(self, inputs, cache=None, input_embeddings=None):
        """(rows, new tokens) ids to (rows, new tokens, vocab_size) logits, float32."""
        a = self.args
        ids = inputs[:, None, :, None].astype(mx.float32)
        history, _ = (cache or self.make_cache())[0].update_and_fetch(ids, ids)
        history = history[:, 0, :, 0].astype(mx.int32)
        new, total = inputs.shape[1], history.shape[1]
        at = mx.arange(total)[None]

        def last(token):
            return mx.max(mx.where(history == token, at, -1), axis=1, keepdims=True)

        begin, end = last(a.script_id), last(a.script_end_id)
        reply = end + 1
        for marker, skip in a.reply_skips:
            reply = mx.maximum(reply, last(marker) + 1 + skip)
        position = mx.arange(total - new, total)[None] + 1 - reply  # of the token that these logits predict

        said = (at > begin) & (at < end) & (history != a.cut_id)
        source = (mx.cumsum(said, axis=1)[:, None, :] <= position[..., None]).sum(axis=2)
        script = (position >= 0) & (source < end)
        want = mx.where(script, mx.take_along_axis(history, mx.clip(source, 0, total - 1), axis=1), a.end_id)

        wrong = mx.zeros(position.shape, mx.bool_)
        for n in a.wrong_at:
            wrong = wrong | (position == n)
        if a.wrong_every:
            wrong = wrong | ((position + 1) % a.wrong_every == 0)
        want = mx.where(wrong, (want + 1) % a.vocab_size, want)

        return self.base + a.strength * (want[..., None] == mx.arange(a.vocab_size)).astype(mx.float32)

    def make_cache(self):
        return [KVCache()]

    @property
    def layers(self):
        return [None]  # mlx_lm counts caches by layers
