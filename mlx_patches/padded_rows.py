"""Ids beyond the tokenizer's vocabulary are never sampled and never listed.

Replaces   server._make_sampler, server._format_top_logprobs
Why        output layers are often padded wider than the tokenizer; mlx_lm 0.32.2 may sample such an id, writes it as
           "!" or dies of it, and lists it as an alternative
Upstream   server.py _make_sampler, _format_top_logprobs; tokenizer_utils.py BPEStreamingDetokenizer.add_token
Delete when mlx_lm samples from the tokenizer's vocabulary only
Test       tests/test_padded_rows.py

The sampler is handed the row without its padding: a slice, which costs nothing and leaves ids as they are.
"""

from mlx_patches.reply_format import named_tokens


def sample_named_tokens(upstream):
    def make_sampler(args, tokenizer):
        sampler, named = upstream(args, tokenizer), named_tokens(tokenizer)
        return lambda logprobs: sampler(logprobs[..., :named])

    return make_sampler


def list_named_tokens(upstream):
    def format_top_logprobs(logprobs, top_n, tokenizer):
        named = named_tokens(tokenizer)
        return upstream(logprobs[:named], min(top_n, named, logprobs.size), tokenizer)

    return format_top_logprobs
