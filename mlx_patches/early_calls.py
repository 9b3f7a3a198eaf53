"""What is said of a call before it is whole: its id and name once they are known, its arguments as they come.

What always holds: what is sent is a beginning of what the whole call has; nothing is sent that may yet be a marker.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mlx_patches.argument_values import JsonValue
from mlx_patches.tool_arguments import Calls
from mlx_patches.tool_dialects import Call

ARGUMENTS_BEGIN = re.compile(r'\s*(?:,\s*(?:"\w*"?\s*:?\s*)?)?')


class Opened(NamedTuple):
    """A call begins. `known`: its tool is declared."""

    id: str | None
    name: str
    known: bool


class Arguments(NamedTuple):
    text: str


class Closed(NamedTuple):
    """The call that was opened is whole."""


class Dropped(NamedTuple):
    """The call that was opened is none. `cut`: the reply ended in it, and all of the part's text is said."""

    cut: bool


class Unread(NamedTuple):
    """A text between call markers that is no call."""

    text: str


class Early(NamedTuple):
    """What of a block of calls is sent before it is whole.

    `at`: up to where it is read; `name`: of the call that is open; `value`: its arguments; `sent`: their characters.
    `done`: calls that are closed.
    """

    at: int = 0
    name: str | None = None
    value: JsonValue | None = None
    sent: int = 0
    done: int = 0


def go_on(early: Early, body: str, calls: Calls) -> tuple[Early, list]:
    """(what is sent with what is known of a block's text, the steps that send it)."""
    head = calls.form.head if calls.form is not None else None
    # Not beyond what may be a closing marker, but in a string: what it is there is decided later.
    limit = before_end(body, calls.end, early.at)
    steps: list[Any] = []
    while head is not None:
        if early.value is None:
            found = head.match(body, early.at, limit) if early.done != calls.most else None
            if found is None:
                break
            known = found["name"] in calls.tools
            if not (known or found["open"] == "{"):
                break
            if early.name is None:
                steps.append(Opened(found.groupdict().get("id"), found["name"], known))
                early = early._replace(name=found["name"])
            if found["open"] != "{":
                break
            early = early._replace(value=JsonValue(), at=found.start("open"), sent=0)
        value = early.value.copy()  # type: ignore[union-attr]
        piece = value.feed(body[early.at : limit])
        while value.in_string and limit < len(body):
            at, limit = limit, before_end(body, calls.end, limit + 1)
            piece += value.feed(body[at:limit])
        if piece:
            steps.append(Arguments(piece))
        early = early._replace(value=value, at=limit, sent=early.sent + len(piece))
        if not value.done:
            break
        steps.append(Closed())
        early = Early(limit - len(value.rest), done=early.done + 1)
        if not calls.end:
            break  # the block is over
    return early, steps


def before_end(body: str, end: str, start: int = 0, closed: bool = True) -> int:
    """Where in `body`, from `start` on, a closing marker begins (if `closed`), or what may become one."""
    at = body.find(end, start) if end and closed else -1
    partial = next((n for n in range(len(end) - 1, 0, -1) if body.endswith(end[:n])), 0)
    return at if at >= 0 else max(start, len(body) - partial)


def cut(early: Early, body: str, calls: Calls) -> tuple:
    """The steps of the call that is open where the reply was cut in `body`."""
    if early.value is None:
        found = calls.form.head.match(body, early.at)  # type: ignore[union-attr]
        return (Dropped(cut=ARGUMENTS_BEGIN.fullmatch(body, found.end()) is not None),)  # type: ignore[union-attr]
    value = early.value.copy()
    piece = value.feed(body[early.at :], final=True)
    return Arguments(piece), Dropped(cut=not value.broken)


def rest_of(found: list[Call], early: Early, calls: Calls) -> tuple:
    """The steps of the calls that a block was `found` to have, but for those that are sent."""
    steps: list[Any] = []
    for number, call in enumerate(found[early.done :]):
        sent = 0
        if number == 0 and early.name is not None:
            sent = early.sent
        else:
            steps.append(Opened(call.id, call.name, call.name in calls.tools))
        if call.arguments[sent:]:
            steps.append(Arguments(call.arguments[sent:]))
        steps.append(Closed())
    if early.name is not None and len(found) <= early.done:
        steps.append(Dropped(cut=False))
    return tuple(steps)
