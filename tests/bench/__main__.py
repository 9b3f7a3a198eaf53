"""Ratios in one run, never absolute times: each is the median of interleaved pairs, with the quartiles.

    python -m tests.bench [--model demo] [--rounds 9] [--tokens 100] [--only WORD]

Both servers run on the same model at once; a pair is two streamed replies one after the other, and its ratio that of
their rates from the first token to the last (or of their times to the first token).
"""

import argparse
import statistics
import sys

from mlx_patches import demo_model
from tests.client import chat_stream
from tests.conftest import Server

PLAIN = {"reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
LIMITS = {"reasoning_budget": 0, "limit_answers": True, "hedge_limit": 1000, "repeat_limit": 1000}
STRING = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": STRING}}}
CASES = [  # what, (server, body) measured, (server, body) beside it
    ("plain reply, ours / mlx_lm.server", ("ours", PLAIN), ("mlx_lm", {})),
    ("limits on, answer watched / off", ("ours", PLAIN | LIMITS), ("ours", PLAIN)),
    ("schema / plain", ("ours", PLAIN | SCHEMA), ("ours", PLAIN)),
    ("the same twice (noise)", ("ours", PLAIN), ("ours", PLAIN)),
]


def measure(server, body, tokens) -> tuple[float, float]:
    """(tokens a second after the first, seconds to the first)."""
    prompt = "Write a long story about a lighthouse keeper, his dog and the sea."
    reply = chat_stream(server, prompt, max_tokens=tokens, timeout=600, **body)
    times = [
        t for t, c in zip(reply.times, reply.chunks, strict=True) if any("content" in x["delta"] for x in c["choices"])
    ]
    times = times[1:] if len(times) > 1 else times
    return (len(times) - 1) / max(times[-1] - times[0], 1e-9), times[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--only", default="", metavar="WORD", help="Only the rows whose name has this in it")
    options = parser.parse_args()
    folder = demo_model.folder() if options.model == "demo" else options.model
    servers = {"ours": Server(folder), "mlx_lm": Server(folder, module="mlx_lm.server")}
    try:
        for name, server in servers.items():
            measure(server, PLAIN if name == "ours" else {}, 8)
        measure(servers["ours"], SCHEMA, 8)
        print("| what | rate: median (quartiles) | first token: median |\n| --- | --- | --- |")
        for what, (one, body), (other, beside) in (case for case in CASES if options.only in case[0]):
            rates, firsts = [], []
            for n in range(options.rounds):
                runs = [(servers[one], body), (servers[other], beside)]
                got = [measure(server, b, options.tokens) for server, b in (runs if n % 2 else runs[::-1])]
                (rate, first), (rate_beside, first_beside) = got if n % 2 else got[::-1]
                rates.append(rate / rate_beside)
                firsts.append(first / first_beside)
            low, middle, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
            print(f"| {what} | {middle:.3f} ({low:.3f} to {high:.3f}) | {statistics.median(firsts):.2f} |", flush=True)
    finally:
        for server in servers.values():
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
