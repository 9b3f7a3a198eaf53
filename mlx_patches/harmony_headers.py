"""The words of a Harmony header: which channel, which recipient, and where they stop being header.

Between two markers stand a role, a channel, a recipient (`to=functions.NAME`) and a content type, in the orders that
models write them and with the damage that they do to them. What always holds: a word that no header can have ends the
header there, and from there on it is text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mlx_patches.reply_format import ANSWER, REASONING

TOOL = "tool"
ANALYSIS, FINAL = "analysis", "final"

WORD = re.compile(r"\S+")
ROLE = re.compile(r"assistant|(?:user|system|developer|tool)(?!\w)")
CHANNEL = re.compile(r"(analysis|commentary|final)(?!\w)[?!.:,;]*")
RECIPIENT = re.compile(r'(?:to=|(?=functions\.))([^\s{"]*)')
TYPE = re.compile(r"(?:json|code|text)$", re.IGNORECASE)
LOOSE = re.compile(r"[^\s{}\[\]\"'<>]+")  # a channel or content type that nobody knows
KNOWN = ("assistant", "analysis", "commentary", "final", "to=", "functions.")
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
