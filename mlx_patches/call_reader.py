"""Calls read out of a reply as it comes: none vanishes, and text that only talks about tools is never taken for one.

Replaces   what APIHandler.handle_completion does between call markers
Why        mlx_lm 0.32.2 ends a call at the first closing marker, also inside a string; takes a tag that is named in
           prose or in thinking for a call; sends a call's arguments only when they are whole
Upstream   server.py APIHandler.handle_completion, generate.py make_text_state_machine
Delete when mlx_lm's server loses no call and streams arguments
Test       tests/test_call_reader.py, tests/test_tool_arguments.py

`CallReader` stands around the splitter of a free reply. From an opening marker on it holds the text until that is
decided: at a closing marker the block is read whole (then it is calls), or ends inside a value (then a later marker may
close it), or cannot be a call (then it is text again, and read as if the marker were none). What always holds: each
letter of a reply comes out once, as text or in a call; what comes out is the same wherever the tokens are cut. Where
the arguments are JSON they are sent while they are written, always a beginning of what the whole call has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlx_patches import early_calls
from mlx_patches.early_calls import Dropped, Early, Unread, before_end
from mlx_patches.reply_format import ANSWER, MARKER, REASONING, Part, Parts, TextSplitter
from mlx_patches.tool_arguments import Calls
from mlx_patches.tool_dialects import Broken, Call, Open

CALL = "call"
"""The kind of a part that is a call's: what it says is in its steps."""
CLOSING = ".!?:;,)]\u2026\u3002\uff01\uff1f\uff1a"
TRIED = 8
"""Opening markers in a text that is no call of which each may yet begin one; of more, only the last of them."""


class Held(NamedTuple):
    """A text after an opening marker. `origin`: the state it stood in; `tried`: up to where closing markers are.

    `unseen`: a grammar that holds blocks may not have seen what comes after the marker. `quoted`: it is text.
    """

    origin: str
    marker: str
    unseen: bool = False
    quoted: bool = False
    body: str = ""
    tried: int = 0
    early: Early = Early()

    @property
    def sent(self) -> Early:
        """What is said of its calls: nothing, as long as they may not be any."""
        return Early() if self.unseen or self.origin == REASONING else self.early


class State(NamedTuple):
    """`inner`: the wrapped splitter's. `held`: the newest text of the answer: white space, which is dropped if a call
    follows, or while `bare` the whole answer, which may yet be calls in JSON. `owed`: its letters that are in no part.
    `call`: the text that may be a call; `called`: one was the last that came of the answer. `last`: its last letters.
    `markers`: how many of them texts were held after; `blocks`: how many of those were calls.
    """

    inner: tuple
    held: str = ""
    owed: int = 0
    bare: bool = False
    call: Held | None = None
    called: bool = False
    last: str = ""
    markers: int = 0
    blocks: int = 0


class CallReader:
    """A splitter of free replies that also reads the calls. Its units are the wrapped one's: characters."""

    exact = by_tokens = False

    def __init__(self, inner: TextSplitter, calls: Calls, marker: tuple[int, ...] | None = None):
        """`marker`: the tokens of the opening marker, where a grammar is entered behind it."""
        self._inner, self._calls, self._marker = inner, calls, marker
        self.first = State(inner.first, bare=bool(calls.tools))

    def units(self, text: str) -> int:
        return len(text)

    def kind(self, state: State) -> str:
        return "tool" if state.call is not None else self._inner.kind(state.inner)

    def lead(self, state: State) -> tuple[int, ...] | None:
        """What the grammar has before a block that begins; None where it is not to hold it."""
        return None if state.call is not None and state.call.unseen else ()

    def begins(self, before: State, state: State) -> bool:
        """Whether a block of the answer's calls begins with the token between them."""
        return state.markers > before.markers and state.call is not None and state.call.origin != REASONING

    def name_row(self, state: State, width: int) -> None:
        """No mask: a name stands in the block."""

    def said_after_marker(self, state: State) -> str:
        """What the newest token says beyond the opening marker that it completes."""
        return state.call.body if state.call is not None else ""

    def split(self, state: State, token: int, text: str) -> tuple[State, Parts]:
        """(state after `token`, the parts it decided)."""
        parts: Parts = []
        return self._take(state, text, parts, token), parts

    def last(self, state: State, text: str) -> tuple[State, Parts]:
        return self.split(state, 0, text)

    def flush(self, state: State, cut: bool = False) -> Parts:
        """What is still held back when the reply ends at `state`. `cut`: it was not the model that ended it."""
        parts: Parts = []
        while state.call is not None:
            state = self._end_call(state, state.call, cut, parts)
        for part in self._inner.flush(state.inner):
            state = self._say(state, part, parts)
        if state.held.strip() and not cut:
            try:
                calls = self._calls.read_bare(state.held)
            except Broken:
                pass
            else:
                return [*parts, Part(CALL, "", state.owed, early_calls.rest_of(calls, Early(), self._calls))]
        if state.called and not state.held.strip():
            return [*parts, Part(MARKER, "", state.owed)]
        return [*parts, Part(ANSWER, state.held, state.owed)]

    def _take(self, state: State, text: str, parts: Parts, token: int | None = None) -> State:
        """The state after `text`, whose parts are added to `parts`. `token`: the newest, which its end is of."""
        while text:
            if state.call is not None:
                held = state.call._replace(body=state.call.body + text)
                state, text = self._judge(state._replace(call=held), held, parts)
                continue
            after, found = self._inner.split(state.inner, 0, text)
            if not any(part.kind == "tool" for part in found):
                for part in found:
                    state = self._say(state, part, parts)
                return state._replace(inner=after)
            # Letter by letter up to where the marker ends.
            for at, letter in enumerate(text):
                origin, before = self._inner.kind(state.inner), state.inner[3] + letter
                after, found = self._inner.split(state.inner, 0, letter)
                marker = next((part.units for part in found if part.kind == MARKER), 0)
                if self._inner.kind(after) == "tool":
                    for part in found[:1]:
                        state = self._say(state, part, parts)
                    text, marker_text = text[at + 1 :], before[len(before) - marker :]
                    spelled = self._marker is not None and len(self._marker) == 1 and self._marker[0] != token
                    state = self._hold(state, origin, marker_text, spelled or text.strip("\n") != "", parts)
                    break
                for part in found:
                    state = self._say(state, part, parts)
                state = state._replace(inner=after)
            if not text and state.call is not None:
                return self._judge(state, state.call, parts)[0]
        return state

    def _hold(self, state: State, origin: str, marker: str, inside: bool, parts: Parts) -> State:
        """The marker of a call is complete. `inside`: it does not end with a token of its own."""
        if origin != REASONING:
            state = self._answer(state._replace(bare=False), "", parts)
        # In a line of prose it may be named; behind a call, at a line's start or right behind a sentence it hardly is.
        apart = state.called or "\n" in state.held or not state.last
        named = not apart and (bool(state.held) or state.last[-1] not in CLOSING)
        quoted = not apart and not state.held and state.last.endswith("`") and state.last != "```"
        over = 0 < (self._calls.most or 0) <= state.blocks
        unseen = self._marker is not None and (named or inside)
        return state._replace(call=Held(origin, marker, unseen, quoted or over), markers=state.markers + 1)

    def _judge(self, state: State, held: Held, parts: Parts) -> tuple[State, str]:
        """(the state after what is known of a held text, what of it is still to be read)."""
        thinking, body, end = held.origin == REASONING, held.body, self._calls.end
        if held.quoted or not self._calls.may_begin(body[: before_end(body, end)]):
            return self._release(state, held, parts, unread=not thinking and not held.quoted)
        if not end or not (thinking or held.unseen):
            early, steps = early_calls.go_on(held.early, body, self._calls)
            held = held._replace(early=early)
            if steps and held.sent is early:
                parts.append(Part(CALL, "", 0, tuple(steps)))
        if not end:
            return self._judge_unmarked(state, held, parts)
        close = body.find(end, held.tried)
        while close >= 0:
            try:
                calls, rest = self._calls.read(body[:close], known=thinking, unseen=held.unseen)
            except Open:
                held = held._replace(tried=close + len(end))
                close = body.find(end, held.tried)
                continue
            except Broken:
                return self._release(state, held, parts, unread=True)
            state = self._found(state, held, calls, close - len(rest), parts)
            if self._calls.start in rest:
                return state, body[close - len(rest) :]  # its closing marker was missing
            state = self._say(state, Part(self._kind(held), rest, len(rest)), parts)
            parts.append(Part(MARKER, "", len(end)))
            return state, body[close + len(end) :]
        # A closing marker may be cut anywhere.
        return state._replace(call=held._replace(tried=max(held.tried, len(body) - len(end) + 1))), ""

    def _judge_unmarked(self, state: State, held: Held, parts: Parts) -> tuple[State, str]:
        """As `_judge`, where no marker closes a block: it is over with a call's arguments, or a list's bracket."""
        body, thinking = held.body, held.origin == REASONING
        stop = held.early.at if held.early.done else body.find("]", held.tried) + 1
        while stop and (held.early.done or body.lstrip()[:1] == "["):
            try:
                calls, rest = self._calls.read(body[:stop], known=thinking, unseen=held.unseen)
            except (Broken, Open):
                if held.early.done:
                    return self._release(state, held, parts, unread=True)
                stop = body.find("]", stop) + 1
                continue
            return self._found(state, held, calls, stop - len(rest), parts), body[stop - len(rest) :]
        return state._replace(call=held._replace(tried=len(body))), ""

    def _end_call(self, state: State, held: Held, cut: bool, parts: Parts) -> State:
        """The reply ended in a held text."""
        thinking, body, end = held.origin == REASONING, held.body, self._calls.end
        for stop, closed, loose in self._ends(body, cut):
            try:
                how = {"known": thinking, "unseen": held.unseen, "loose": loose and not thinking, "ended": not cut}
                calls, rest = self._calls.read(body[:stop], **how)
            except (Broken, Open):
                continue
            state = self._found(state, held, calls, stop - len(rest), parts)
            if self._calls.start and self._calls.start in rest:
                return self._take(state, rest + body[stop:], parts)
            if cut and rest:
                return self._drop(state, held, calls, rest + body[stop:], parts)
            state = self._say(state, Part(self._kind(held), rest, len(rest)), parts)
            if closed:
                parts.append(Part(MARKER, "", len(end)))
            return self._take(state, body[stop + len(end) * closed :], parts)
        if cut and held.sent.name is not None:
            return self._drop(state, held, [], held.marker + body, parts)
        state, rest = self._release(state, held, parts, unread=not cut)
        return self._take(state, rest, parts)

    def _ends(self, body: str, cut: bool) -> Iterator[tuple[int, bool, bool]]:
        """(where the block may end, whether a closing marker stands there, whether to read loosely), best first."""
        end = self._calls.end
        if cut:
            # Where nothing of it is sent, what the grammar had not ended is no call.
            yield before_end(body, end, closed=False), False, not self._calls.held or self._calls.sends
            return
        yield len(body), False, False
        at = body.find(end) if end else -1
        while at >= 0:
            yield at, True, True
            at = body.find(end, at + len(end))
        yield len(body), False, True

    def _found(self, state: State, held: Held, calls: list[Call], used: int, parts: Parts) -> State:
        """The first `used` characters of the held text are `calls`."""
        steps = early_calls.rest_of(calls, held.sent, self._calls)
        parts += [Part(MARKER, "", state.owed), Part(CALL, "", len(held.marker) + used, steps)]
        return self._back(state, held)._replace(held="", owed=0, called=True, blocks=state.blocks + 1)

    def _drop(self, state: State, held: Held, calls: list[Call], text: str, parts: Parts) -> State:
        """The reply was cut in a call: `text` is what is left of it."""
        if held.sent.name is None or len(calls) > held.sent.done:
            return self._say(self._back(state, held), Part(self._kind(held), text, len(text)), parts)
        steps = early_calls.cut(held.sent, held.body, self._calls)
        parts.append(Part(ANSWER, state.held + text, state.owed + len(text), steps))
        return self._back(state, held)._replace(held="", owed=0)

    def _release(self, state: State, held: Held, parts: Parts, unread: bool = False) -> tuple[State, str]:
        """The marker was text: what follows it is read as if it were none, but for all its markers except the last."""
        steps: tuple = (Dropped(cut=False),) if held.sent.name is not None else ()
        if unread and self._calls.tools:
            steps += (Unread(held.marker + held.body),)
        if steps:
            parts.append(Part(CALL, "", 0, steps))
        markers = self._calls.start and held.body.count(self._calls.start)
        text = held.marker
        if markers and markers > TRIED:
            text += held.body.rsplit(self._calls.start, TRIED)[0]
        state = self._back(state, held)
        rest = held.body[len(text) - len(held.marker) :]
        return self._say(state, Part(self._kind(held), text, len(text)), parts), rest

    def _back(self, state: State, held: Held) -> State:
        return state._replace(inner=self._inner.state(self._kind(held)), call=None)

    @staticmethod
    def _kind(held: Held) -> str:
        return REASONING if held.origin == REASONING else ANSWER

    def _say(self, state: State, part: Part, parts: Parts) -> State:
        """Add a part that is no call's."""
        if part.kind == ANSWER and self._calls.tools:
            return self._answer(state, part.text, parts)
        if state.owed and part.units:
            # What is held comes before this part, and no call will follow it.
            parts.append(Part(ANSWER, state.held, state.owed))
            state = state._replace(held="", owed=0, bare=False)
        if state.held and part.kind == REASONING and part.text:
            parts.append(Part(ANSWER, state.held, 0))
            state = state._replace(held="")
        parts.append(part)
        return state

    def _answer(self, state: State, text: str, parts: Parts) -> State:
        """Text of the answer: what may yet be calls, or white space before one, waits."""
        held, owed = state.held + text, state.owed + len(text)
        if state.bare and self._calls.may_be_bare(held):
            return state._replace(held=held, owed=owed)
        said = held.rstrip()
        blank = held[len(said) :]
        left = min(len(blank), owed)
        if said:
            parts.append(Part(ANSWER, said, owed - left))
            state = state._replace(called=False, last=(state.last + said)[-3:])
        return state._replace(bare=False, held=blank, owed=left)
