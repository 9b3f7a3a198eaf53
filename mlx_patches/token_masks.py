"""Masks over the vocabulary: which tokens may be sampled next.

A mask is a boolean row as wide as the logits it meets; a token outside it gets a score of minus infinity. llguidance
writes a mask as one bit a token into a buffer of 32-bit words exactly as wide as its tokenizer; here it becomes a row
of booleans on any device, with plain mx operations (llguidance's own `apply_token_bitmask` is a Metal kernel).
Logits may be wider than the tokenizer (padded output layers) or, with a draft model, narrower than the main model's:
ids beyond the mask are never allowed.
"""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np


class TokenMask:
    """The bits of one row's mask, and the array they last became (kept while the bits stay the same)."""

    def __init__(self, width: int):
        """`width`: tokens the mask covers, which must be the `n_vocab` of the LLTokenizer whose matchers fill it."""
        self.width = width
        self._words = np.zeros((width + 31) // 32, dtype=np.int32)
        self._shown = b""
        self._row: mx.array | None = None

    def fill(self, matcher) -> None:
        """Take the tokens that `matcher` (an LLMatcher) allows next."""
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)

    def add(self, token: int) -> None:
        self._words.view(np.uint8)[token >> 3] |= 1 << (token & 7)

    def reaches(self, width: int) -> bool:
        """Whether any allowed token is among the first `width`."""
        return bool(np.unpackbits(self._words.view(np.uint8), count=min(width, self.width), bitorder="little").any())

    def narrow(self, words: np.ndarray) -> bool:
        """Keep only the tokens that `words` (of `words_of`) has too, if there are any; whether there were."""
        both = self._words & words
        if both.any():
            self._words[:] = both
            return True
        return False

    def row(self, width: int) -> mx.array:
        """The mask as `width` booleans, shape (width,)."""
        words = self._words.tobytes()
        if self._row is None or self._row.size != width or words != self._shown:
            self._shown = words
            bits = np.unpackbits(self._words.view(np.uint8), count=width, bitorder="little")
            bits[self.width :] = 0
            self._row = mx.array(bits.view(np.bool_))
        return self._row


def words_of(tokens: Iterable[int], width: int) -> np.ndarray:
    """A mask of `width` tokens that allows only `tokens`, as the 32-bit words of a TokenMask."""
    bits = np.zeros((width + 31) // 32 * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def row_of(tokens: Iterable[int], width: int) -> mx.array:
    """A mask of `width` booleans, shape (width,), that allows only `tokens`."""
    bits = np.zeros(width, dtype=np.bool_)
    bits[[token for token in tokens if token < width]] = True
    return mx.array(bits)


def keep(row: mx.array, logits: mx.array) -> mx.array:
    """`logits`, shape (1, width), with minus infinity wherever `row`, shape (width,), is false."""
    return mx.where(row, logits, mx.array(-float("inf"), logits.dtype))
