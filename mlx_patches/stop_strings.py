"""Stop strings, matched on the text of the answer.

Replaces   `args.stop_words`: mlx_lm gets none, so neither its token-level match nor its text self-transition runs
Why        mlx_lm 0.32.2 encodes a stop string and compares tokens: one that begins or ends inside a token is cut out
           of the text, but the reply runs on; it also stops on text inside thinking and tool arguments
Upstream   generate.py make_stop_sequences, make_text_state_machine
Delete when mlx_lm matches stop strings on text, in the answer only
Test       tests/test_stop_strings.py

A match is the one that ends first (of two that end together, the longer), so what is sent does not depend on how the
text was cut into pieces. The watcher scans each token as it comes and then allows only an end token; the event stream
cuts the text, and holds back a tail that may yet become a stop string.
"""


class StopStrings:
    """Scans text for any of `stops` (non-empty strings). Holds no state: the caller keeps the tail."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._longest = max(map(len, stops))

    def scan(self, tail: str, text: str) -> tuple[str, bool]:
        """(new tail, whether a stop string is complete), given the tail of the text before `text`."""
        window = tail + text
        return window[max(0, len(window) - self._longest + 1) :] if self._longest > 1 else "", any(
            stop in window for stop in self._stops
        )

    def cut(self, held: str, text: str) -> tuple[str, str, bool]:
        """(text to send, text to hold back, whether a stop string was met), given what was `held` before `text`."""
        window = held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := window.find(stop)) >= 0]
        if found:
            return window[: min(found)[1]], "", True
        keep = next(
            (n for n in range(min(len(window), self._longest - 1), 0, -1) if self._begins(window[-n:])),
            0,
        )
        return window[: len(window) - keep], window[len(window) - keep :], False

    def _begins(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)
