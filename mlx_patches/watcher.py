"""The watcher: one logits processor a request, which decides at each step what the reply may say next.

Replaces   nothing: its hold on mlx_lm is watched_replies.py
Why        mlx_lm 0.32.2 has no structured output, no limits, and no tool choice
Upstream   —
Delete when mlx_lm constrains replies itself
Test       tests/test_watcher.py, tests/test_structured_output.py, tests/test_reply_limits.py, tests/test_tool_choice.py

It follows the reply token by token in immutable states, one kept for each token, so that a draft model's rejected
guesses are taken back by going back to an earlier one. What always holds: the matcher has consumed exactly the tokens
that the newest state says are the grammar's; an end token is never fed to it; nothing raises out of a call: a fault is
noted, only end tokens are allowed from there on, and the handler tells that client.

The history that a call is handed starts, on its first call, with the prompt or its uncached end: that length is the
baseline. Later calls show one token more, or with a draft model fewer or other ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_patches.reply_format import ANSWER, HEADER, REASONING, START, ReplyFormat, decode
from mlx_patches.reply_limits import JsonPlace, ReplyLimits
from mlx_patches.stop_strings import StopStrings
from mlx_patches.token_masks import TokenMask, keep, row_of

HELD = (ANSWER, "tool")  # phases of a reading by tokens that a grammar holds


class Mark(NamedTuple):
    """What is known after a token.

    `reading`: the splitter's state. `begin`, `fed`: index of the grammar's first token, and how many of them it has.
    `tail`, `stopped`: the end of the answer's text, and whether a stop string is complete. `pending`: bytes of a
    character that is not. `blind`: the scores that choose the next token had none that the grammar allows. `thought`,
    `answered`: tokens of either. `cut`: the limit that cut the reply; `shut`: its thinking was closed and stays so;
    `closed`: something else came after it; `ending`: its answer is to come to an end; `json`: where in a JSON text it
    stands. `lead`: tokens that the grammar has before its first, counted in `fed`. `calling`: in a block of calls that
    the matcher holds; `late`: where one begins that may be prose; `called`: blocks of calls that have ended.
    """

    reading: tuple
    begin: int = 0
    fed: int = 0
    tail: str = ""
    stopped: bool = False
    pending: bytes = b""
    ended: bool = False
    blind: bool = False
    thought: int = 0
    answered: int = 0
    cut: str | None = None
    shut: bool = False
    closed: bool = False
    ending: bool = False
    json: JsonPlace = JsonPlace()
    lead: tuple[int, ...] = ()
    calling: bool = False
    late: int = 0
    called: int = 0


class Watcher:
    """A logits processor: `(tokens of shape (n,), logits of shape (1, width)) -> logits`. It never raises."""

    def __init__(
        self,
        form: ReplyFormat,
        splitter,
        *,
        matcher=None,
        is_json: bool = False,
        blocks: Callable[[], Any] | None = None,
        is_call: Callable[[str], bool] = bool,
        one_call: bool = False,
        stops: StopStrings | None = None,
        limits: ReplyLimits | None = None,
        guesses: int = 0,
    ):
        """`matcher`: a fresh LLMatcher for the answer, or None; `is_json`: what it holds to is JSON.

        `blocks`: the text is free instead, but for blocks of calls: it gives the matcher that holds them, or None, when
        the first one begins; `is_call`: whether what follows a marker is a call's. `one_call`: the reply ends after it.
        `guesses`: how far a draft model may run ahead.
        """
        self.fault: Exception | None = None
        self._form, self._splitter, self._stops = form, splitter, stops
        self._limits, self._is_json = limits, is_json
        self._blocks, self._is_call = blocks, is_call
        self._one_call, self._free = one_call, matcher is None
        by_tokens, tokenizer = splitter.by_tokens, form.tokenizer
        self._opening = splitter.opening if by_tokens else tokenizer.think_start_tokens or ()
        self._closing = splitter.closing if by_tokens else tokenizer.think_end_tokens or ()
        self._hold(matcher)
        self._fed: list[int] = []
        self._earlier: dict[int, Any] = {}  # with guesses: the matcher before each of the last tokens fed
        self._taken: list[int] = []
        self._marks = [Mark(splitter.first)]
        self._reach = guesses + 2 if guesses else 1
        self._baseline: int | None = None
        self._step: Any = None
        self._at = 0

    def _hold(self, matcher: Any) -> None:
        self._matcher = matcher
        self._pristine = matcher.deep_copy() if matcher is not None else None
        self._mask = TokenMask(self._form.width) if matcher is not None else None

    def cut_of(self, tokens: int) -> tuple[str | None, bool]:
        """(the limit that cut a reply of so many tokens: "hedges", "repeats", "reasoning_budget"; if of its answer).

        Its last token, a stop string's or the last of `max_tokens`, may complete what would have been cut after it.
        """
        mark = self._marks[:tokens][-1]
        return mark.cut, mark.ending

    def enter(self, step: Any, row: int) -> None:
        """The next call is for `row` of a batch whose tokens `step` (StepTokens) reads."""
        self._step, self._at = step, row

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            if self.fault is None:
                self._follow(tokens, logits)
                return self._allow(logits)
        except Exception as fault:
            logging.exception("The watcher of a reply failed; the reply ends here")
            self.fault = fault
        finally:
            self._step = None
        return self._only_end(logits)

    def _follow(self, tokens: mx.array, logits: mx.array) -> None:
        """Take the history's newest tokens, after taking back what is no longer in it."""
        if self._baseline is None:
            self._baseline = tokens.shape[0]
        length = tokens.shape[0] - self._baseline
        if length == 0:
            self._go_back(0)
            return
        if self._step is not None:
            newest = [self._step.read(logits)[self._at]]
        else:
            newest = tokens[-min(length, self._reach) :]
            mx.async_eval(newest)
            mx.async_eval(logits)
            newest = newest.tolist()
        first = length - len(newest)
        if first > len(self._taken):
            raise RuntimeError(f"the history jumped from {len(self._taken)} to {length} tokens")
        same = 0
        while same < len(newest) and self._taken[first + same : first + same + 1] == [newest[same]]:
            same += 1
        self._go_back(first + same)
        for token in newest[same:]:
            self._take(token)

    def _go_back(self, length: int) -> None:
        if length < len(self._taken):
            del self._taken[length:], self._marks[length + 1 :]
            if self._limits is not None:
                self._limits.go_back(self._marks[-1].thought, self._marks[-1].answered)
            self._feed_up_to(self._marks[-1])

    def _take(self, token: int) -> None:
        mark = self._marks[-1]
        self._taken.append(token)
        self._marks.append(mark if mark.ended or mark.blind else self._judge(mark, token))

    def _judge(self, mark: Mark, token: int) -> Mark:
        if token in self._form.end_tokens:
            if self._matcher is not None and not mark.stopped and not self._may_end(mark):
                raise RuntimeError(f"the reply ended with token {token} before the grammar did")
            return mark._replace(ended=True)
        if self._free:
            return self._judge_free(mark, token)
        before = mark.reading.phase
        mark = self._scan(mark, token)
        phase = mark.reading.phase
        if phase in HELD and before in (phase, START):
            self._feed(token)
            return mark._replace(fed=len(self._fed))
        if phase == START and len(self._fed) == len(self._taken) - 1 and self._matcher.validate_tokens([token]):
            # The marker's first tokens may also be an answer's; once they are not, only the marker can go on.
            self._feed(token)
            return mark._replace(fed=len(self._fed))
        if phase != before:
            # A marker is complete: what it made the grammar take is taken back, and an answer begins after it.
            mark = self._begin(mark)
        return mark

    def _begin(self, mark: Mark) -> Mark:
        """The grammar begins with the next token."""
        lead = self._splitter.lead(mark.reading) or ()
        mark = mark._replace(begin=len(self._taken), lead=lead, fed=len(lead))
        self._feed_up_to(mark)
        return mark

    def _judge_free(self, mark: Mark, token: int) -> Mark:
        """Free text, but for blocks of calls, which the matcher follows from their opening marker to their end."""
        reading, before = mark.reading, self._splitter.kind(mark.reading)
        mark = self._scan(mark, token)
        kind = self._splitter.kind(mark.reading)
        if mark.calling:
            self._feed(token)
            over = self._matcher.is_stopped()
            # A call that is told by its header has no marker after it in the grammar: the reply ends with it.
            calling = not over or self._splitter.by_tokens
            return mark._replace(fed=len(self._fed), calling=calling, called=mark.called + over)
        if self._blocks and self._splitter.begins(reading, mark.reading):
            if self._may_hold(mark):
                return self._begin(mark._replace(calling=True, late=0))
            return mark._replace(late=len(self._taken))
        if kind == "tool" and mark.late and self._is_call(self._splitter.said_after_marker(mark.reading)):
            return self._hold_late(mark)
        if before == "tool" != kind:
            blocks = 1 if self._splitter.by_tokens else mark.reading.blocks - reading.blocks
            mark = mark._replace(late=0, called=mark.called + blocks)
        return mark

    def _hold_late(self, mark: Mark) -> Mark:
        """What follows the marker is no prose: the grammar takes it up, if it could have begun so."""
        begun = self._taken[mark.late :]
        if self._matcher is None:
            self._hold(self._blocks())
        if self._matcher is None or self._pristine.deep_copy().validate_tokens(begun) < len(begun):
            return mark._replace(late=0)
        mark = mark._replace(calling=True, begin=mark.late, late=0, lead=(), fed=len(begun))
        self._feed_up_to(mark)
        return mark

    def _may_hold(self, mark: Mark) -> bool:
        """Whether the grammar sees all of a block that begins."""
        if self._splitter.lead(mark.reading) is None:
            return False
        if self._matcher is None:
            self._hold(self._blocks())
        return self._matcher is not None

    def _may_end(self, mark: Mark) -> bool:
        if self._blocks and not mark.calling:
            return True
        phase = ANSWER if self._blocks else mark.reading.phase
        whole = phase in (START, *HELD) and len(self._fed) - len(mark.lead) == len(self._taken) - 1 - mark.begin
        return whole and self._matcher.is_accepting()

    def _scan(self, mark: Mark, token: int) -> Mark:
        text, pending = "", b""
        if not self._splitter.by_tokens:
            text, pending = decode(mark.pending + self._form.token_bytes(token))
        reading, parts = self._splitter.split(mark.reading, token, text)
        self._parts = parts
        tail, stopped = mark.tail, mark.stopped
        if self._stops is not None:
            for part in parts:
                if part.kind == ANSWER and not stopped:
                    tail, stopped = self._stops.scan(tail, part.text)
        before = self._splitter.kind(mark.reading)
        mark = mark._replace(reading=reading, tail=tail, pending=pending, stopped=stopped)
        return mark if self._limits is None else self._limit(mark, before, parts)

    def _limit(self, mark: Mark, before: str, parts: list) -> Mark:
        """Count the token where it belongs, and judge."""
        kind, limits = self._splitter.kind(mark.reading), self._limits
        if kind == REASONING and before == REASONING:
            mark = mark._replace(thought=mark.thought + 1)
            cut = limits.think("".join(part.text for part in parts), self._in_marker(self._closing))
            if cut and not mark.shut:
                mark = mark._replace(cut=cut, shut=True)
        if mark.shut and kind not in (REASONING, HEADER):
            mark = mark._replace(closed=True)
        if kind == ANSWER and limits.answer is not None:
            text = "".join(part.text for part in parts if part.kind == ANSWER)
            mark = mark._replace(answered=mark.answered + 1, json=mark.json.after(text))
            cut = limits.say(text)
            if cut and not mark.ending:
                mark = mark._replace(cut=cut, ending=True)
        return mark

    def _in_marker(self, marker: tuple[int, ...]) -> int:
        """How many of the newest tokens are the beginning of `marker`."""
        most = range(min(len(marker) - 1, len(self._taken)), 0, -1)
        return next((n for n in most if tuple(self._taken[-n:]) == marker[:n]), 0)

    def _feed(self, token: int) -> None:
        if self._reach > 1:
            self._earlier[len(self._fed)] = self._matcher.deep_copy()
            self._earlier.pop(len(self._fed) - 2 * self._reach, None)
        if not self._matcher.consume_token(token):
            reason = self._matcher.get_error() or "it had ended"
            raise RuntimeError(f"the grammar refused token {token}, which its mask had allowed: {reason}")
        self._fed.append(token)

    def _feed_up_to(self, mark: Mark) -> None:
        """Bring the matcher to the state it had at `mark`."""
        if self._matcher is None:
            return
        wanted = [*mark.lead, *self._taken[mark.begin : mark.begin + mark.fed - len(mark.lead)]]
        both = zip(wanted, self._fed, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), min(len(wanted), len(self._fed)))
        if same < len(self._fed):
            # Not llguidance's rollback: after a mask behind a special token it is silently wrong.
            self._earlier = {length: matcher for length, matcher in self._earlier.items() if length <= same}
            if same not in self._earlier:
                same = 0
            self._matcher = self._earlier.get(same, self._pristine).deep_copy()
        self._fed = self._fed[:same]
        for token in wanted[same:]:
            # A mask between tokens: without one, llguidance's lexer can run out of its budget for good.
            self._mask.fill(self._matcher)
            self._feed(token)

    def _allow(self, logits: mx.array) -> mx.array:
        mark = self._marks[-1]
        if mark.stopped or (self._one_call and (mark.called or getattr(mark.reading, "blocks", 0))):
            return self._only_end(logits)
        width = logits.shape[-1]
        if mark.ended:
            return logits
        if self._blocks and not mark.calling and (row := self._splitter.name_row(mark.reading, width)) is not None:
            logits = keep(row, logits)
        if self._limits is not None and (row := self._limit_row(mark, width)) is not None:
            return keep(row, logits)
        if self._free and not mark.calling:
            return logits
        phase = ANSWER if self._blocks else mark.reading.phase
        if phase == REASONING:
            return keep(self._form.thinking_row(width), logits)
        markers = self._splitter.header_tokens(mark.reading) if phase in (START, HEADER) else ()
        if phase == HEADER or (phase == START and (self._splitter.leads or len(self._fed) < len(self._taken))):
            return keep(row_of(markers, width), logits)
        self._mask.fill(self._matcher)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar failed: {self._matcher.get_error()}")
        for marker in markers:
            self._mask.add(marker)
        if mark.ending and not self._blocks:
            self._bring_to_an_end(mark)
        if width < self._form.width:
            # A draft model's row may be too narrow for all that is allowed: its guess is then one to be rejected.
            blind = not self._mask.reaches(width)
            self._marks[-1] = mark._replace(blind=blind)
            if blind:
                return logits
        elif mark.blind:
            self._marks[-1] = mark._replace(blind=False)
        return keep(self._mask.row(width), logits)

    def _limit_row(self, mark: Mark, width: int) -> mx.array | None:
        """The mask that a limit asks for at `mark`, if any."""
        kind = self._splitter.kind(mark.reading)
        if kind == REASONING:
            begun = self._in_marker(self._closing)
            pending = self._pending(mark)
            # At the budget a marker that is begun is finished: what else came now would be thinking beyond it.
            full = begun and 0 < self._limits.budget <= mark.thought
            if (mark.shut or full) and not pending:
                return row_of([self._closing[begun]], width)
            left = self._limits.budget - (mark.thought - begun) if self._limits.budget else len(self._closing) + 3
            if mark.shut or left <= 3:
                # A character that is begun is finished, and none is begun that the budget could not hold.
                if pending:
                    return self._form.continuing_row(width)
                return self._form.tidy_row(width, max(left - 1, 0), self._free)
        elif kind == ANSWER and mark.ending and self._free:
            return self._form.continuing_row(width) if self._pending(mark) else self._form.end_row(width)
        elif kind == ANSWER and mark.shut and self._free and self._opening:
            # The first token that tells the marker from another that begins like it.
            committing = min(1, len(self._opening) - 1)
            if committing == 0 or self._taken[-1:] == [self._opening[0]]:
                return self._form.row_without([self._opening[committing]], width)
        elif kind == HEADER and mark.shut:
            if not mark.closed and (closing := self._splitter.closing_tokens(mark.reading)):
                return row_of(closing, width)
            if self._free and (reopening := self._splitter.reopening_tokens(mark.reading)):
                return self._form.row_without(reopening, width)
        return None

    def _pending(self, mark: Mark) -> bytes:
        return mark.reading.pending if self._splitter.by_tokens else mark.pending

    def _bring_to_an_end(self, mark: Mark) -> None:
        """Leave of the mask what ends the answer soonest."""
        if self._matcher.is_accepting() and self._mask.narrow(self._form.words("end")):
            return
        if not self._is_json or mark.json.escape:
            return
        for name in (*mark.json.ways_out, "says little", "says something"):
            if self._mask.narrow(self._form.words(name)):
                return

    def _only_end(self, logits: mx.array) -> mx.array:
        if not self._form.end_tokens:
            return logits  # the handler ends the reply instead
        return keep(self._form.end_row(logits.shape[-1]), logits)
