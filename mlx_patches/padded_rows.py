"""Ids beyond the tokenizer's vocabulary are never sampled and never listed.

Replaces   server._make_sampler, server._format_top_logprobs, ResponseGenerator._tokenize (derived)
Why        output layers are often padded wider than the tokenizer; mlx_lm 0.32.2 may sample such an id, writes it as
           "!" or dies of it, and lists it as an alternative; it dies of a `top_k` beyond the vocabulary and writes
           beyond its rows for a `logit_bias` there
Upstream   server.py _make_sampler, _format_top_logprobs; tokenizer_utils.py BPEStreamingDetokenizer.add_token
Delete when mlx_lm samples from the tokenizer's vocabulary only
Test       tests/test_padded_rows.py

The sampler is handed the row without its padding: a slice, which costs nothing and leaves ids as they are.
"""

from functools import lru_cache

from mlx_lm.sample_utils import greedy_sampler

from localServerCommon import Refused
from mlx_patches.reply_format import named_tokens, output_width


@lru_cache
def _greedy(named):
    """One for all rows: mlx_lm samples those that share a sampler in one call."""
    return lambda logprobs: greedy_sampler(logprobs[..., :named])


def sample_named_tokens(upstream):
    def make_sampler(args, tokenizer):
        sampler, named = upstream(args, tokenizer), named_tokens(tokenizer)
        return _greedy(named) if sampler is greedy_sampler else lambda logprobs: sampler(logprobs[..., :named])

    return make_sampler


def list_named_tokens(upstream):
    def format_top_logprobs(logprobs, top_n, tokenizer):
        named = named_tokens(tokenizer)
        return upstream(logprobs[:named], min(top_n, named, logprobs.size), tokenizer)

    return format_top_logprobs


class KeepsToVocabulary:
    """Mixin for ResponseGenerator: a request names tokens of this model, and `top_k` of all of them is no limit."""

    def _tokenize(self, tokenizer, request, args):
        provider, bias = self.model_provider, args.logits.logit_bias or {}
        tokens = provider.reply_format.named
        if provider.draft_model is not None and (bias or args.sampling.top_k):
            tokens = min(tokens, output_width(provider.draft_model, tokenizer))
        if beyond := [token for token in bias if token >= tokens]:
            message = f"logit_bias: {beyond[0]} is not a token of this model, which has {tokens}"
            raise Refused(message, param="logit_bias")
        if args.sampling.top_k >= tokens:
            args.sampling.top_k = 0
        return super()._tokenize(tokenizer, request, args)
