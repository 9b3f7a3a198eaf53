"""How a model writes a reply: thinking markers, end tokens, and the text of each token.

A reply is read by a *splitter*, which turns tokens into pieces of reasoning, answer ("normal") and tool text. Its
states are values: whoever holds an old one can go back to it, which is how rejected draft guesses are taken back.
There are two. `TextSplitter` is mlx_lm's TextStateMachine, for free replies: markers are matched on text. A reply held
to a grammar is read by `TokenSplitter`, which knows markers by their tokens: the answer is exactly what the grammar
saw, so a `<think>` inside a JSON string is text. The watcher and the event stream use the same splitter, so they
cannot disagree about where the answer begins.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_patches.token_masks import row_of

START, REASONING, ANSWER = "start", "reasoning", "normal"

Pieces = list[tuple[str, str]]
"""(kind, text) in order; kind is "reasoning", "normal", "tool", or a state of mlx_lm's whose text is dropped."""


class TokenState(NamedTuple):
    """Where a token-level reading stands. `matched`: tokens of the next marker seen; `pending`: part of a character."""

    phase: str
    matched: int = 0
    pending: bytes = b""


class TokenSplitter:
    """start → reasoning → answer by marker tokens. In `start` the marker may open, or the answer begins."""

    def __init__(self, opening: Sequence[int], closing: Sequence[int], token_bytes, phase: str):
        self.opening, self.closing = tuple(opening), tuple(closing)
        self._bytes = token_bytes
        self.first = TokenState(phase)

    def split(self, state: TokenState, token: int, text: str = "") -> tuple[TokenState, Pieces, bool]:
        """(state after `token`, pieces it made final, whether it completed a marker). `text` is not used."""
        phase, matched, pending = state
        if phase == ANSWER:
            text, pending = decode(pending + self._bytes(token))
            return TokenState(ANSWER, 0, pending), [(ANSWER, text)], False
        if phase == START:
            if token != self.opening[matched]:
                data = b"".join(map(self._bytes, (*self.opening[:matched], token)))
                text, pending = decode(data)
                return TokenState(ANSWER, 0, pending), [(ANSWER, text)], False
            if matched + 1 == len(self.opening):
                return TokenState(REASONING), [], True
            return TokenState(START, matched + 1), [], False
        seen = (*self.closing[:matched], token)
        matched = next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == self.closing[:n])
        pending += b"".join(map(self._bytes, seen[: len(seen) - matched]))
        if matched == len(self.closing):
            return TokenState(ANSWER), [(REASONING, pending.decode("utf-8", "replace"))], True
        text, pending = decode(pending)
        return TokenState(REASONING, matched, pending), [(REASONING, text)], False

    def last(self, state: TokenState, text: str) -> tuple[TokenState, Pieces]:
        """(`state`, pieces) for text that came with the end token; here it was read from its own token before."""
        return state, []

    def flush(self, state: TokenState) -> Pieces:
        """What is still held back when the reply ends at `state`."""
        marker = {START: self.opening, REASONING: self.closing}.get(state.phase, ())[: state.matched]
        data = state.pending + b"".join(map(self._bytes, marker))
        return [(self.kind(state), data.decode("utf-8", "replace"))]

    @staticmethod
    def kind(state: TokenState) -> str:
        return REASONING if state.phase == REASONING else ANSWER

    @staticmethod
    def undecided(state: TokenState) -> bool:
        """Whether the newest tokens may yet turn out to be a marker."""
        return state.matched > 0


class TextSplitter:
    """mlx_lm's TextStateMachine behind the same calls."""

    def __init__(self, machine, initial: str):
        self._machine = machine
        self.first = machine.make_state(initial)

    def split(self, state: tuple, token: int, text: str) -> tuple[tuple, Pieces, bool]:
        if state[0] is None:
            return state, [], False
        state, pieces = self._machine.split(state, text)
        return state, pieces, len(pieces) > 1

    def last(self, state: tuple, text: str) -> tuple[tuple, Pieces]:
        state, pieces, _ = self.split(state, 0, text)
        return state, pieces

    def flush(self, state: tuple) -> Pieces:
        return [(state[0], state[3])]

    @staticmethod
    def kind(state: tuple) -> str:
        return state[0]

    @staticmethod
    def undecided(state: tuple) -> bool:
        return bool(state[3])


def decode(data: bytes) -> tuple[str, bytes]:
    """(the whole characters of `data`, the bytes of one that is not complete)."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


class ReplyFormat:
    """One loaded model's way of writing: built once from its tokenizer (mlx_lm's TokenizerWrapper)."""

    def __init__(self, tokenizer: Any, width: int):
        """`width`: scores in the model's output row, which may be more than the tokenizer has tokens."""
        self.tokenizer = tokenizer
        self.width = width
        self.named = min(width, named_tokens(tokenizer))
        self.end_tokens = frozenset(token for token in tokenizer.eos_token_ids if token < width)
        self._bytes: dict[int, bytes] = {}
        self._rows: dict[tuple[str, int], mx.array] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; a special token's are those of its name."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._spell(token)
        return data

    def _spell(self, token: int) -> bytes:
        # The detokenizer mlx_lm chose knows how this vocabulary is written: byte-level BPE, SentencePiece, or neither.
        detokenizer = self.tokenizer.detokenizer
        pieces = getattr(detokenizer, "tokenmap", None)
        if pieces is None:
            return self.tokenizer.decode([token]).encode()
        piece = pieces[token] if token < len(pieces) else None
        if piece is None:
            return b""
        if isinstance(piece, bytes):
            return piece.replace(detokenizer._sep, b" ")
        return detokenizer_bytes(piece)

    def end_row(self, width: int) -> mx.array:
        """A mask, shape (width,), that allows only the end of the reply."""
        return self._row("end", width, self.end_tokens)

    def thinking_row(self, width: int) -> mx.array:
        """A mask, shape (width,), that allows every token with a name but the end tokens."""
        return self._row("thinking", width, set(range(min(width, self.named))) - self.end_tokens)

    def _row(self, name: str, width: int, tokens) -> mx.array:
        if (name, width) not in self._rows:
            self._rows[name, width] = row_of(tokens, width)
        return self._rows[name, width]

    def splitter_under_grammar(self, prompt: list[int], initial_state: str, thinking: bool) -> TokenSplitter:
        """The reading of a reply that is held to a grammar after its thinking.

        `initial_state` is what mlx_lm's `_tokenize` found ("reasoning": the template opened the block); `thinking` is
        false where the request or the endpoint rules it out.
        """
        opening, closing = self.tokenizer.think_start_tokens, self.tokenizer.think_end_tokens
        if not opening:
            phase = ANSWER
        elif initial_state == "reasoning":
            phase = REASONING
        else:
            phase = START if thinking and not self._closed_by_template(prompt) else ANSWER
        return TokenSplitter(opening or (), closing or (), self.token_bytes, phase)

    def _closed_by_template(self, prompt: list[int]) -> bool:
        """Whether the prompt ends with a closed thinking block and nothing but white space after it."""
        end = self.tokenizer.rfind_think_end(prompt)
        if end < 0:
            return False
        rest = prompt[end + len(self.tokenizer.think_end_tokens) :]
        return len(rest) <= 8 and not b"".join(map(self.token_bytes, rest)).strip()


def detokenizer_bytes(piece: str) -> bytes:
    """The bytes of a token of a byte-level BPE vocabulary; a name with any other character stands for itself."""
    from mlx_lm.tokenizer_utils import _byte_decoder

    table = _byte_decoder()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


@functools.lru_cache(maxsize=2)
def named_tokens(tokenizer: Any) -> int:
    """One more than the highest token id that `tokenizer` has a name for."""
    return 1 + max(tokenizer.get_vocab().values())


class LearnsReplyFormat:
    """Mixin for ModelProvider: `reply_format` belongs to the loaded model and goes with it."""

    reply_format: ReplyFormat | None = None

    def reset(self) -> None:
        super().reset()
        self.reply_format = None

    def _load(self, *model_key) -> None:
        super()._load(*model_key)
        self.reply_format = ReplyFormat(self.tokenizer, output_width(self.model, self.tokenizer))


def output_width(model, tokenizer) -> int:
    """The number of scores a step gives: the model's own answer to a one-token prompt, which is never computed."""
    return model(mx.array([[0]])).shape[-1]
