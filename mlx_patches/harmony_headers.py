"""The words of a Harmony header: which channel, which recipient, and where they stop being header.

Between two markers stand a role, a channel, a recipient (`to=functions.NAME`) and a content type, in the orders that
models write them and with the damage that they do to them. What always holds: a word that no header can have ends the
header there, and from there on it is text. Where calls are held, `Names` says by which tokens a recipient goes on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import mlx.core as mx

from mlx_patches.reply_format import ANSWER, REASONING
from mlx_patches.token_masks import row_of

TOOL = "tool"
ANALYSIS, FINAL = "analysis", "final"

WORD = re.compile(r"\S+")
ROLE = re.compile(r"assistant|(?:user|system|developer|tool)(?!\w)")
CHANNEL = re.compile(r"(analysis|commentary|final)(?!\w)[?!.:,;]*")
RECIPIENT = re.compile(r'(?:to=|(?=functions\.))([^\s{"]*)')
BEGUN = re.compile(r"(?<!\S)(?:to=|functions\.)")
TYPE = re.compile(r"(?:json|code|text)$", re.IGNORECASE)
LOOSE = re.compile(r"[^\s{}\[\]\"'<>]+")  # a channel or content type that nobody knows
KNOWN = ("assistant", "analysis", "commentary", "final", "to=", "functions.")
BUILT_IN = ("python", "browser.search", "browser.open", "browser.find")  # gpt-oss's own, declared or not
KINDS = ("", " ", " json", " code")
AFTER = {
    "<|channel|>": [channel + kind for channel in ("commentary", "analysis") for kind in KINDS],
    "<|constrain|>": ["json"],
}
NOBODY = ("", "assistant", "user", "all")  # recipients that are no tools


class Words(NamedTuple):
    """What a header's words say. `used`: characters that are header for sure; `fits`: the rest may be header too."""

    channel: str | None
    recipient: str | None
    used: int
    fits: bool


def read_words(
    text: str, after: str, channel: str | None, recipient: str | None, *, whole: bool, typed: bool = False
) -> Words:
    """Read the words between two markers of a header. `whole`: the last is complete; `typed`: they may be a type."""
    used, known = 0, False
    for number, word in enumerate(WORD.finditer(text)):
        name, goes_on = word[0], not whole and word.end() == len(text)
        found = None
        if number == 0 and after in ("", "<|start|>", "<|end|>"):
            found = ROLE.match(name)
        if found is None and channel is None and (found := CHANNEL.match(name)):
            channel = found[1]
        if found is None and (found := RECIPIENT.match(name)):
            recipient = found[1]
        if found is None and (channel or recipient or typed or after == "<|constrain|>"):
            found = TYPE.match(name)
        if found is None:
            known = goes_on and any(begins.startswith(name) for begins in KNOWN)
            loose = channel or recipient or (number == 0 and after in ("<|channel|>", "<|constrain|>"))
            alone = not text[word.end() :].strip()
            return Words(channel, recipient, used, alone and bool(known or (loose and LOOSE.fullmatch(name))))
        used = word.start() + found.end()
        if found.end() < len(name):
            return Words(channel, recipient, used, False)
    return Words(channel, recipient, used, True)


def body_kind(channel: str | None, recipient: str | None) -> str:
    if recipient is not None and recipient not in NOBODY:
        return TOOL
    return REASONING if channel == ANALYSIS else ANSWER


class Names:
    """The tokens by which a header may go on that names who is called: one of some tools, or a built-in that is none of
    `declared`. From the recipient on only what `<|message|>` can follow may come, so no damage leaves a call unheld."""

    def __init__(self, tokens: Tokens, names: Iterable[str], declared: Collection[str]):
        self._tokens = tokens
        to = [f"functions.{name}" for name in names]
        to += [f"to={name}" for name in (*to, *(name for name in BUILT_IN if name not in declared))]
        self._texts = [name + kind for name in to for kind in KINDS]

    def row(self, text: str, after: str, words: Words, width: int) -> mx.array | None:
        """A mask, shape (width,), for the token after a header's newest words `text`; None where all may come."""
        begun = max(BEGUN.finditer(text), key=re.Match.start, default=None)
        said, texts, wrong = text, AFTER.get(after, ()), None
        if begun is not None:
            said, texts = text[begun.start() :], self._texts
        elif body_kind(words.channel, words.recipient) != TOOL:
            said, texts = re.split(r"\s", text)[-1], self._texts
            if (wrong := self._tokens.begin.get(said)) is None:
                return None
        rests = [text[len(said) :].replace(" ", "\u0120") for text in texts if text.startswith(said)]
        ids = self._tokens.ids
        right = {ids[rest[:n]] for rest in rests for n in range(1, len(rest) + 1) if rest[:n] in ids}
        if wrong is not None:
            return ~row_of(wrong - right, width)
        if "" in rests:
            ends = ["<|message|>", *["<|constrain|>"] * (after != "<|constrain|>")]
            right.update(ids[name] for name in (*ends, *["<|channel|>"] * (words.channel is None)) if name in ids)
        return row_of(right, width) if right else None


class Tokens:
    """What `Names` asks of a vocabulary: `ids` of texts, and the tokens that `begin` a name after a word.

    A token may begin with punctuation and never has any after a letter: a name begins in a token of `=` or `.`.
    """

    def __init__(self, vocabulary: dict[str, int]):
        self.ids = vocabulary
        self.begin = {
            word: frozenset(token for name, token in vocabulary.items() if name[:1] == mark and name != mark)
            for word, mark in (("to", "="), ("functions", "."))
        }
