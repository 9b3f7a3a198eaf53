"""Masks against a plain Python reading of the same bits: any width, any dtype, any row they meet.

The bits come from llguidance itself, with a vocabulary padded to the width in question, and from a writer that puts
down bits of the test's choosing, so that every word and every last bit is met.
"""

import ctypes

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from mlx_patches.token_masks import TokenMask, keep, row_of
from tests.tiny_models import STYLES

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
WIDTHS = [1, 7, 8, 9, 31, 32, 33, 63, 65, 255, 257, 1000]


class Writer:
    """What TokenMask needs of an LLMatcher: it writes one bit a token into the buffer it is pointed to, and ones into
    the bits of the last word that stand for no token."""

    def __init__(self, allowed, width):
        self.allowed, self.width = allowed, width

    def unsafe_compute_mask_ptr(self, address, size):
        words = [0] * (size // 4)
        for token in (*self.allowed, *range(self.width, 32 * len(words))):
            words[token // 32] |= 1 << (token % 32)
        ctypes.memmove(address, (ctypes.c_uint32 * len(words))(*words), size)


def filled(width, allowed):
    mask = TokenMask(width)
    mask.fill(Writer(allowed, width))
    return mask


def tokens_of(row):
    assert row.dtype == mx.bool_ and row.ndim == 1
    return [token for token, allowed in enumerate(row.tolist()) if allowed]


def sets_below(width):
    return st.sets(st.integers(0, width - 1))


@given(st.data())
def test_a_row_is_the_bits_cut_or_padded_to_its_width(data):
    width, wanted = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 300))
    allowed = data.draw(sets_below(width))
    mask = filled(width, allowed)
    row = mask.row(wanted)
    assert row.shape == (wanted,)
    assert tokens_of(row) == sorted(token for token in allowed if token < wanted)
    assert mask.reaches(wanted) == any(token < wanted for token in allowed)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_token_alone_and_every_token_at_once(width):
    for token in range(width):
        assert tokens_of(filled(width, {token}).row(width)) == [token]
    assert tokens_of(filled(width, set(range(width))).row(width)) == list(range(width))
    assert tokens_of(filled(width, set()).row(width)) == []


@given(st.data())
def test_an_added_token_joins_what_was_filled(data):
    width = data.draw(st.integers(1, 100))
    allowed, added = data.draw(sets_below(width)), data.draw(st.lists(st.integers(0, width - 1), max_size=4))
    mask = filled(width, allowed)
    mask.row(width)
    for token in added:
        mask.add(token)
    assert tokens_of(mask.row(width)) == sorted(allowed | set(added))
    mask.fill(Writer(allowed, width))
    assert tokens_of(mask.row(width)) == sorted(allowed)


def test_an_equal_mask_keeps_its_array_and_another_does_not_change_it():
    mask = filled(40, {1, 39})
    first = mask.row(40)
    mask.fill(Writer({1, 39}, 40))
    assert mask.row(40) is first
    assert mask.row(41) is not first and tokens_of(mask.row(41)) == [1, 39]
    mask.fill(Writer({2}, 40))
    assert tokens_of(mask.row(40)) == [2]
    assert tokens_of(first) == [1, 39]


@pytest.mark.parametrize("extra", [0, 1, 9, 31, 32, 33, 66])
def test_masks_that_llguidance_writes(tiny, extra):
    file = tiny("llama") / "tokenizer.json"
    names = Tokenizer.from_file(str(file))
    width, ends = names.get_vocab_size() + extra, [names.token_to_id(end) for end in STYLES["plain"].ends]
    tokenizer = LLTokenizer(str(file), n_vocab=width, eos_token=ends)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("[a-c]xyz?|0"), log_level=0)
    mask = TokenMask(width)
    for text in ("", "b", "x", "y", "z"):
        assert all(matcher.consume_token(token) for token in tokenizer.tokenize_str(text))
        mask.fill(matcher)
        allowed = {token for token in range(width) if token not in ends and matcher.validate_tokens([token])}
        allowed |= set(ends) if text in ("y", "z") else set()
        assert tokens_of(mask.row(width)) == sorted(allowed) != []


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_a_row_of_tokens(tokens, width):
    assert tokens_of(row_of(tokens, width)) == sorted({token for token in tokens if token < width})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 33])
def test_kept_scores_are_untouched_and_all_others_minus_infinity(dtype, width):
    logits = mx.random.normal((1, width)).astype(dtype)
    allowed = {0, width - 1}
    kept = keep(row_of(allowed, width), logits)
    assert (kept.dtype, kept.shape) == (dtype, logits.shape)
    expected = [x if token in allowed else -float("inf") for token, x in enumerate(logits[0].tolist())]
    assert kept[0].tolist() == expected
