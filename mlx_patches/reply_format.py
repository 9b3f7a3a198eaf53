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
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_patches.token_masks import row_of, words_of

START, HEADER, REASONING, ANSWER = "start", "message header", "reasoning", "normal"

MARKER = "marker"


class Part(NamedTuple):
    """A stretch of a reply that is decided. `kind`: "reasoning", "normal", "tool", MARKER, or a state of mlx_lm's whose
    text is dropped. `units`: how much of the tokens it took, as the splitter's `units` counts them. `steps`: what it
    says of calls (call_reader.py)."""

    kind: str
    text: str
    units: int
    steps: tuple = ()


Parts = list[Part]


class TokenState(NamedTuple):
    """Where a token-level reading stands. `matched`: tokens of the next marker seen; `pending`: part of a character."""

    phase: str
    matched: int = 0
    pending: bytes = b""


class TokenSplitter:
    """start → reasoning → answer by marker tokens. In `start` the marker may open, or the answer begins."""

    leads = ()  # no body has anything of its header in the grammar
    exact = True  # what it calls an answer is all of it, also when that is nothing
    by_tokens = True

    def __init__(self, opening: Sequence[int], closing: Sequence[int], token_bytes, phase: str):
        self.opening, self.closing = tuple(opening), tuple(closing)
        self._bytes = token_bytes
        self.first = TokenState(phase)

    def units(self, text: str) -> int:
        return 1

    def split(self, state: TokenState, token: int, text: str = "") -> tuple[TokenState, Parts]:
        """(state after `token`, the parts it decided). `text` is not used."""
        phase, matched, pending = state
        if phase == ANSWER:
            text, pending = decode(pending + self._bytes(token))
            return TokenState(ANSWER, 0, pending), [Part(ANSWER, text, 1)]
        if phase == START:
            if token != self.opening[matched]:
                text, pending = decode(b"".join(map(self._bytes, (*self.opening[:matched], token))))
                return TokenState(ANSWER, 0, pending), [Part(ANSWER, text, matched + 1)]
            if matched + 1 == len(self.opening):
                return TokenState(REASONING), [Part(MARKER, "", len(self.opening))]
            return TokenState(START, matched + 1), []
        seen = (*self.closing[:matched], token)
        matched = next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == self.closing[:n])
        released = len(seen) - matched
        pending += b"".join(map(self._bytes, seen[:released]))
        if matched == len(self.closing):
            text = pending.decode("utf-8", "replace")
            return TokenState(ANSWER), [Part(REASONING, text, released), Part(MARKER, "", matched)]
        text, pending = decode(pending)
        return TokenState(REASONING, matched, pending), [Part(REASONING, text, released)]

    def last(self, state: TokenState, text: str) -> tuple[TokenState, Parts]:
        """(`state`, parts) for text that came with the end token; here it was read from its own token before."""
        return state, []

    def flush(self, state: TokenState, cut: bool = False) -> Parts:
        """What is still held back when the reply ends at `state`."""
        marker = {START: self.opening, REASONING: self.closing}.get(state.phase, ())[: state.matched]
        data = state.pending + b"".join(map(self._bytes, marker))
        return [Part(self.kind(state), data.decode("utf-8", "replace"), len(marker))]

    def lead(self, state: TokenState) -> tuple[int, ...]:
        """What the grammar has before an answer that begins."""
        return ()

    def header_tokens(self, state: TokenState) -> tuple[int, ...]:
        """The tokens by which the opening marker goes on."""
        return self.opening[state.matched : state.matched + 1]

    @staticmethod
    def kind(state: TokenState) -> str:
        return REASONING if state.phase == REASONING else ANSWER


class TextSplitter:
    """mlx_lm's TextStateMachine behind the same calls; its units are characters."""

    exact = by_tokens = False

    def __init__(self, machine, initial: str):
        self._machine = machine
        self.first = self.state(initial)

    def state(self, name: str) -> tuple:
        """Where a reading begins that stands in mlx_lm's state `name`."""
        return self._machine.make_state(name)

    def units(self, text: str) -> int:
        return len(text)

    def split(self, state: tuple, token: int, text: str) -> tuple[tuple, Parts]:
        after, pieces = self._machine.split(state, text)
        if len(pieces) > 2:  # several markers in one token: letter by letter there is one at a time
            parts: Parts = []
            for letter in text:
                state, more = self.split(state, token, letter)
                parts += more
            return state, parts
        parts = [Part(kind, piece, len(piece)) for kind, piece in pieces]
        if len(parts) == 2:
            marker = len(state[3]) + len(text) - len(after[3]) - parts[0].units - parts[1].units
            parts.insert(1, Part(MARKER, "", marker))
        return after, parts

    def last(self, state: tuple, text: str) -> tuple[tuple, Parts]:
        return self.split(state, 0, text)

    def flush(self, state: tuple, cut: bool = False) -> Parts:
        return [Part(state[0], state[3], len(state[3]))]

    @staticmethod
    def kind(state: tuple) -> str:
        return state[0]


def decode(data: bytes) -> tuple[str, bytes]:
    """(the whole characters of `data`, the bytes of one that is not complete)."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


def missing_bytes(data: bytes) -> int:
    """How many bytes the character at the end of `data` still lacks: 0 to 3."""
    for back in range(1, min(len(data), 3) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return max((4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2) - back, 0)
        if byte < 0x80:
            return 0
    return 0


def continues(data: bytes) -> bool:
    """Whether `data` begins inside a character."""
    return 0x80 <= data[:1].ljust(1)[0] < 0xC0


SIMPLE = {letter.encode() for letter in '"-0123456789tfn'}
CLASSES = {
    "closes string": lambda data: data[:1] == b'"' and not data[1:].strip(b":]} \n"),
    "closes value": lambda data: data[:1] in (b"]", b"}") and not data.strip(b"]} \n"),
    "goes on": lambda data: data[:1] == b",",
    # What holds no further values; else an object or a list of which nothing is said yet, so that it may end at once.
    "is simple": lambda data: data.strip()[:1] in SIMPLE or data.strip() == b":",
    "opens": lambda data: data.strip() in (b"{", b"[", b"{}", b"[]"),
    "says little": lambda data: bool(data.strip()) and b"," not in data,
    "says something": lambda data: bool(data.strip()),
}
"""Tokens by how they begin, for an answer in JSON that is to come to its end."""


class ReplyFormat:
    """One loaded model's way of writing: built once from its tokenizer (mlx_lm's TokenizerWrapper)."""

    def __init__(self, tokenizer: Any, width: int):
        """`width`: scores in the model's output row, which may be more than the tokenizer has tokens."""
        self.tokenizer = tokenizer
        self.width = width
        vocabulary = vocabulary_of(tokenizer)
        self.named = min(width, named_tokens(tokenizer))
        self.end_tokens = frozenset(token for token in tokenizer.eos_token_ids if token < width)
        self.messages: Any = None  # how it writes several messages in a reply, where it does: a HarmonyFormat
        self._pieces: list = [None] * self.named
        for piece, token in vocabulary.items():
            if token < width:
                self._pieces[token] = piece
        spell = spelling(tokenizer._tokenizer, vocabulary)
        self.exact_bytes = spell is not None  # else those of what a token decodes to by itself
        self._spell = spell or (lambda token, piece: tokenizer.decode([token]).encode())
        self._bytes: dict[int, bytes] = {}
        self._rows: dict[tuple[str, int], mx.array] = {}
        self._words: dict[str, np.ndarray] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; a special token's are those of its name."""
        data = self._bytes.get(token)
        if data is None:
            piece = self._pieces[token] if token < self.named else None
            data = self._bytes[token] = b"" if piece is None else self._spell(token, piece)
        return data

    def end_row(self, width: int) -> mx.array:
        """A mask, shape (width,), that allows only the end of the reply."""
        return self._row("end", width, lambda: self.end_tokens)

    def thinking_row(self, width: int) -> mx.array:
        """A mask, shape (width,), that allows every token with a name but the end tokens."""
        return self._row("thinking", width, lambda: set(range(min(width, self.named))) - self.end_tokens)

    def _row(self, name: str, width: int, tokens: Callable[[], Iterable[int]]) -> mx.array:
        if (name, width) not in self._rows:
            self._rows[name, width] = row_of(tokens(), width)
        return self._rows[name, width]

    def tidy_row(self, width: int, missing: int, may_end: bool) -> mx.array:
        """A mask, shape (width,): tokens that begin a character and lack at most `missing` bytes of their last.

        `may_end`: end tokens too.
        """

        def tidy():
            continuing, lacking = self._edges
            tokens = set(np.flatnonzero(~continuing & (lacking <= missing)).tolist())
            return tokens if may_end else tokens - self.end_tokens

        return self._row(f"tidy {missing} {may_end}", width, tidy)

    def continuing_row(self, width: int) -> mx.array:
        """A mask, shape (width,): tokens that go on with a character that is begun, and begin none they do not end."""

        def tokens():
            continuing, lacking = self._edges
            return np.flatnonzero(continuing & (lacking == 0)).tolist()

        return self._row("continuing", width, tokens)

    @functools.cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each token with a name: whether it begins inside a character, and the bytes that its last one lacks."""
        spelled = [self.token_bytes(token) for token in range(self.named)]
        return np.array([continues(data) for data in spelled]), np.array([missing_bytes(data) for data in spelled])

    def row_without(self, tokens: Iterable[int], width: int) -> mx.array:
        """A mask, shape (width,), that allows everything but `tokens`."""
        left_out = sorted(tokens)
        return self._row(f"without {left_out}", width, lambda: set(range(width)).difference(left_out))

    def words(self, name: str) -> np.ndarray:
        """The tokens of a class of CLASSES, as the words of a TokenMask as wide as the output row."""
        if name not in self._words:
            named = set(range(self.named)) - self.end_tokens
            chosen = (token for token in named if CLASSES[name](self.token_bytes(token)))
            self._words[name] = words_of(self.end_tokens if name == "end" else chosen, self.width)
        return self._words[name]

    def scan_vocabulary(self) -> None:
        """Make what takes a look at every token, so that no request waits for it."""
        self.continuing_row(self.width)
        for missing in range(3):
            for may_end in (False, True):
                self.tidy_row(self.width, missing, may_end)
        for name in CLASSES:
            self.words(name)

    def opened_by_template(self, prompt: list[int]) -> bool:
        """Whether the prompt leaves thinking open: nothing but white space follows an opening marker.

        mlx_lm's `_tokenize` looks for the last marker anywhere, so a user who names one opens it there.
        """
        return self._ends_with(prompt, self.tokenizer.rfind_think_start, self.tokenizer.think_start_tokens)

    def splitter_under_grammar(self, prompt: list[int], thinking: bool) -> TokenSplitter:
        """The reading of a reply that is held to a grammar after its thinking.

        `thinking` is false where the request or the endpoint rules it out.
        """
        opening, closing = self.tokenizer.think_start_tokens, self.tokenizer.think_end_tokens
        phase = ANSWER
        if opening and thinking and self.opened_by_template(prompt):
            phase = REASONING
        elif opening and thinking and not self._ends_with(prompt, self.tokenizer.rfind_think_end, closing):
            phase = START
        return TokenSplitter(opening or (), closing or (), self.token_bytes, phase)

    def _ends_with(self, prompt: list[int], rfind, marker: tuple[int, ...]) -> bool:
        """Whether nothing but white space (of a few tokens) follows the last `marker` of the prompt."""
        at = rfind(prompt)
        rest = prompt[at + len(marker) :]
        return at >= 0 and len(rest) <= 8 and not b"".join(map(self.token_bytes, rest)).strip()


def spelling(plain: Any, vocabulary: Collection[str]) -> Callable[[int, str], bytes] | None:
    """How a transformers tokenizer spells (a token, its name), or None where nothing tells."""
    encoding: Any = getattr(plain, "model", None) or getattr(plain, "tokenizer", None)
    if hasattr(encoding, "decode_single_token_bytes"):  # tiktoken
        return lambda token, piece: encoding.decode_single_token_bytes(token)
    if "\u2581" in vocabulary:
        return sentencepiece
    return byte_level if "\u0120" in vocabulary else None


def sentencepiece(token: int, piece: str) -> bytes:
    """SentencePiece has a bar for a blank, and <0x0A> for a byte."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


def byte_level(token: int, piece: str) -> bytes:
    """Byte-level BPE has a letter for each byte; a name with any other character stands for itself."""
    from mlx_lm.tokenizer_utils import _byte_decoder

    table = _byte_decoder()
    try:
        return bytes([table[letter] for letter in piece])
    except KeyError:
        return piece.encode()


@functools.lru_cache(maxsize=1)
def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """The names of the tokens, and their ids: kept while a model is loaded, for it takes 0.15 s for 200,000."""
    return tokenizer.get_vocab()


@functools.lru_cache(maxsize=1)
def named_tokens(tokenizer: Any) -> int:
    """One more than the highest token id that `tokenizer` has a name for."""
    return 1 + max(vocabulary_of(tokenizer).values())


class LearnsReplyFormat:
    """Mixin for ModelProvider: `reply_format` belongs to the loaded model and goes with it."""

    reply_format: ReplyFormat | None = None

    def reset(self) -> None:
        super().reset()
        self.reply_format = None

    def _load(self, *model_key) -> None:
        super()._load(*model_key)
        self.reply_format = self.reply_format_of(self.tokenizer, output_width(self.model, self.tokenizer))

    def reply_format_of(self, tokenizer: Any, width: int) -> ReplyFormat:
        return ReplyFormat(tokenizer, width)


def output_width(model, tokenizer) -> int:
    """The number of scores a step gives: the model's own answer to a one-token prompt, which is never computed."""
    return model(mx.array([[0]])).shape[-1]
