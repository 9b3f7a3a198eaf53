"""Comment lines in a stream while nothing comes, by the clock.

Replaces   the keepalive callback of APIHandler.handle_completion
Why        mlx_lm 0.32.2 sends one comment for each chunk of a prompt and none while a request is queued or the model
           loads, so clients and proxies give up; and it sends the headers of a stream before or after errors at random
Upstream   server.py APIHandler.handle_completion
Delete when mlx_lm's server keeps its streams alive by the clock
Test       tests/test_keepalive.py

The headers wait for the first event, so that an error before it has a status of its own, but no longer than the first
interval: after that a client needs a sign of life more than a status.
"""

import time

from mlx_patches.reply_events import Started

FLAGS = (
    (
        "--keepalive-seconds",
        {
            "type": float,
            "default": 10.0,
            "metavar": "N",
            "help": "Send a comment line after N seconds without an event in a stream (default: 10; 0: never)",
        },
    ),
)


class KeepsAlive:
    """Mixin for the handler: writes a stream of events."""

    def stream_reply(self, encoder, events, headers):
        """Write `events` as `encoder` spells them, after `headers()`; the last one is returned."""
        interval, written = self.flags.keepalive_seconds, time.monotonic()
        for event in events:
            silent = event is None and interval and time.monotonic() - written >= interval
            if event is None and not silent:
                continue
            if not self.status:
                self.start_stream(headers())
                self.send_frames(encoder.opening())
            if silent:
                self.send_text(": keepalive\n\n")
            elif not isinstance(event, Started):
                self.send_frames(encoder.frames(event))
            written = time.monotonic()
        self.end_stream("data: [DONE]\n\n")
        return event
