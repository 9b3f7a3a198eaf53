"""Reply limits: a reply that has stopped making progress is cut short.

Replaces   nothing: mlx_lm 0.32.2 has no such limits, a model that talks in circles runs to `max_tokens`
Why        small models think in circles for minutes, and `max_tokens` is the only brake
Upstream   —
Delete when mlx_lm's server limits thinking and loops
Test       tests/test_reply_limits.py

Pure machines that know neither mlx nor HTTP; the watcher feeds them one token's text at a time and takes tokens back.
A budget counts tokens of thinking. A `LoopJudge` looks at one text (the thinking, or the answer), every 16 tokens, over
its newest 2,048 tokens: a loop says the same thing every few lines, while an honest long reply says "wait" a dozen
times over thousands of tokens; a window tells them apart, a total cannot. A limit of N allows N: one more is a cut.
What was found is kept by where it ended in the text, so a judgement looks only at what is new, and taking tokens back
forgets what lay beyond them.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from localServerCommon import Refused

EVERY = 16  # tokens between two judgements
WINDOW = 2048  # tokens that are judged
BLOCK = 24  # characters of the shortest block whose copies are a loop
LEAST_WORDS = 6  # of a sentence that counts
LEAST_RESERVE = 256  # tokens kept for the answer

HEDGE = re.compile(
    r"\b(?:But wait|Wait)(?=[^\w\s])|\b[Hh]mm+\b|\bHold on\b|\bActually, wait\b"
    r"|\bLet me (?:reconsider|re-?check|double[- ]?check|re-?examine|re-?read|verify|think again)\b"
)
LONGEST_HEDGE = 32  # characters, with the one after it
SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")
NUMBERING = re.compile(r"\s*\d+\.")  # "12. " begins an item: items that differ in their number are not the same
WORD = re.compile(r"\S*\w\S*")  # a table's bars and dashes are no words


COUNTS = ("reasoning_budget", "hedge_limit", "repeat_limit")


def whole(text: str) -> int:
    """A flag's count. Raises ValueError, which argparse reports."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


FLAGS = (
    (
        "--reasoning-budget",
        {"type": whole, "metavar": "N", "help": "Tokens of thinking (default: half of max_tokens; 0: no limit)"},
    ),
    (
        "--hedge-limit",
        {"type": whole, "default": 12, "metavar": "N", "help": "Phrases of second-guessing (default: 12; 0: no limit)"},
    ),
    (
        "--repeat-limit",
        {"type": whole, "default": 3, "metavar": "N", "help": "Times a sentence may occur (default: 3; 0: no limit)"},
    ),
    ("--limit-answers", {"action": "store_true", "help": "Watch answers for hedges and repeats too"}),
)


@dataclass(frozen=True)
class Limits:
    """One request's limits; 0 means none. `reasoning_budget` None means half of `max_tokens`."""

    reasoning_budget: int | None = None
    hedge_limit: int = 12
    repeat_limit: int = 3
    limit_answers: bool = False

    def budget(self, max_tokens: int) -> int:
        """Tokens of thinking, held to `max_tokens` less the answer's reserve; 0 for no budget."""
        if self.reasoning_budget == 0:
            return 0
        reserve = min(max(max_tokens // 8, LEAST_RESERVE), max_tokens // 2)
        wanted = max_tokens // 2 if self.reasoning_budget is None else self.reasoning_budget
        held = max(1, min(wanted, max_tokens - reserve))
        if self.reasoning_budget is not None and held < wanted:
            logging.info("reasoning_budget lowered from %d to %d: max_tokens is %d", wanted, held, max_tokens)
        return held

    def machine(self, max_tokens: int, thinks: bool) -> ReplyLimits | None:
        """What watches one reply, or None where there is nothing to watch."""
        loops = self.hedge_limit or self.repeat_limit
        budget = self.budget(max_tokens) if thinks else 0
        answers = bool(self.limit_answers and loops)
        return ReplyLimits(self, budget, answers) if answers or (thinks and (loops or budget)) else None


class ReplyLimits:
    """The limits of one reply: a budget and a judge for its thinking, and one for its answer where that is watched."""

    def __init__(self, limits: Limits, budget: int, answers: bool):
        self.budget = budget
        self.thinking = LoopJudge(limits.hedge_limit, limits.repeat_limit)
        self.answer = LoopJudge(limits.hedge_limit, limits.repeat_limit) if answers else None

    def think(self, text: str, undecided: int) -> str | None:
        """Why the thinking is to be closed after one more token of it; `undecided` of them may yet be the marker."""
        self.thinking.take(text)
        if self.budget and self.thinking.tokens - undecided >= self.budget:
            return "reasoning_budget"
        return self.thinking.judge() if self.thinking.tokens % EVERY == 0 else None

    def say(self, text: str) -> str | None:
        """Why the answer is to end after one more token of it."""
        if self.answer is None:
            return None
        self.answer.take(text)
        return self.answer.judge() if self.answer.tokens % EVERY == 0 else None

    def go_back(self, thought: int, answered: int) -> None:
        self.thinking.go_back(thought)
        if self.answer is not None:
            self.answer.go_back(answered)


class JsonPlace(NamedTuple):
    """Where in a JSON text one stands: in a string, after a backslash of one, or after `last`."""

    string: bool = False
    escape: bool = False
    last: str = ""

    def after(self, text: str) -> JsonPlace:
        string, escape, last = self
        for letter in text:
            if escape:
                escape = False
            elif string and letter == "\\":
                escape = True
            elif letter == '"':
                string = not string
            last = letter
        return JsonPlace(string, escape, last)

    @property
    def ways_out(self) -> tuple[str, ...]:
        """The classes of tokens (reply_format.CLASSES) that lead out from here, the shortest way first."""
        if self.string:
            return ("closes string",)
        number = ("goes on",) if self.last.isdigit() else ()
        return ("closes value", *number, "is simple", "opens")


def read_limits(body: dict, flags: Any) -> Limits:
    """The request's limits: its fields, else the flags. Raises Refused (400) naming the field."""
    values: dict[str, Any] = {name: _count(name, body.get(name)) for name in COUNTS}
    for name, value in _other_budgets(body):
        if values["reasoning_budget"] not in (None, value):
            raise Refused(f"{name} and reasoning_budget or its like name different budgets", param=name)
        values["reasoning_budget"] = value
    values["limit_answers"] = body.get("limit_answers")
    if not isinstance(values["limit_answers"], bool | None):
        raise Refused("limit_answers must be a boolean", param="limit_answers")
    return Limits(**{name: getattr(flags, name) if value is None else value for name, value in values.items()})


def _other_budgets(body: dict) -> list[tuple[str, int]]:
    """The budgets that a body names as other servers do."""
    found = [(name, _count(name, body.get(name))) for name in ("thinking_budget", "thinking_token_budget")]
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        name = "thinking.budget_tokens"
        found.append((name, _count(name, thinking.get("budget_tokens"))))
    return [(name, value) for name, value in found if value is not None]


def _count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise Refused(f"{name} must be a whole number, 0 or more", param=name)
    return value


class LoopJudge:
    """Judges one text for hedges and repeats. `take` each token's text, `judge` when it is time, `go_back` at will."""

    def __init__(self, hedge_limit: int, repeat_limit: int):
        self._hedge_limit, self._repeat_limit = hedge_limit, repeat_limit
        self._ends = [0]  # characters of the text after each token
        self._new: list[str] = []
        self._text, self._from = "", 0  # the kept part of the text, and where it begins
        self._scanned = 0
        self._hedges: list[int] = []  # where each ended
        self._stops: list[int] = []  # where each sentence ended
        self._sentences: list[str] = []  # and what it said, "" where it is too short to count

    @property
    def tokens(self) -> int:
        return len(self._ends) - 1

    def take(self, text: str) -> None:
        self._ends.append(self._ends[-1] + len(text))
        self._new.append(text)

    def go_back(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens."""
        if tokens >= self.tokens:
            return
        self._join()
        del self._ends[tokens + 1 :]
        length = self._ends[-1]
        self._text = self._text[: max(length - self._from, 0)]
        self._scanned = min(self._scanned, length)
        # What ended just there was known by the letter after it.
        del self._hedges[bisect_left(self._hedges, length) :]
        kept = bisect_left(self._stops, length)
        del self._stops[kept:], self._sentences[kept:]

    def judge(self) -> str | None:
        """ "hedges" or "repeats" where the newest window exceeds that limit."""
        self._join()
        begin = self._ends[max(self.tokens - WINDOW, 0)]
        self._scan()
        if self._hedge_limit and len(self._hedges) - bisect_right(self._hedges, begin) > self._hedge_limit:
            return "hedges"
        if self._repeat_limit and (self._repeats(begin) or self._loops(begin)):
            return "repeats"
        self._trim(begin)
        return None

    def _join(self) -> None:
        self._text += "".join(self._new)
        self._new.clear()

    def _scan(self) -> None:
        """Find what the text since the last judgement completed. A last character waits for the one after it."""
        text, origin = self._text, self._from
        for found in HEDGE.finditer(text, max(self._scanned - LONGEST_HEDGE - origin, 0)):
            end = origin + found.end()
            if end > (self._hedges[-1] if self._hedges else 0) and end >= self._scanned and found.end() < len(text):
                self._hedges.append(end)
        for found in SENTENCE_END.finditer(text, max(self._scanned - 1 - origin, 0)):
            begin, end = (self._stops[-1] if self._stops else 0), origin + found.end()
            said = text[max(begin - origin, 0) : found.end()]
            if end > begin and not NUMBERING.fullmatch(said):
                words = said.split()
                self._stops.append(end)
                self._sentences.append(" ".join(words) if len(WORD.findall(said)) >= LEAST_WORDS else "")
        self._scanned = origin + len(text)

    def _repeats(self, begin: int) -> bool:
        window = self._sentences[bisect_right(self._stops, begin) :]
        # New since the last judgement; one that was taken back may have seen some of them.
        first_new = bisect_left(self._stops, self._ends[max(self.tokens - EVERY, 0)])
        new = {sentence for sentence in self._sentences[first_new:] if sentence}
        return any(window.count(sentence) > self._repeat_limit for sentence in new)

    def _loops(self, begin: int) -> bool:
        """Whether the text ends in `2 × repeat_limit` copies of a block, back to back."""
        copies, text = 2 * self._repeat_limit, self._text[max(begin - self._from, 0) :]
        tail, last = text[-BLOCK:], len(text) - BLOCK
        if last < 0:
            return False
        at = last
        while (at := text.rfind(tail, max(last - len(text) // copies, 0), at + BLOCK - 1)) >= 0:
            period = last - at
            reach = period * -(-BLOCK // period) * copies
            if reach <= len(text) and text[-reach:-period] == text[period - reach :]:
                return True
        return False

    def _trim(self, begin: int) -> None:
        """Let go of text before the window, with room for tokens that are taken back."""
        spare = begin - 1024 - self._from
        if spare > 8192:
            self._text, self._from = self._text[spare:], self._from + spare
