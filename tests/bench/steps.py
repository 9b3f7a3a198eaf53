"""Rates of mlx_lm's own batch loop with different processors in it, as ratios to none: what reading the tokens costs.

`none`: nothing. `naive`: each row reads `tokens[-1]` and makes its mask, as processors elsewhere do. `slice`: it
launches the scores first, then slices its token, a new operation that queues behind them. `ours`: the watcher. All but
`none` hold an endless array of small objects. `device` stands for an asynchronous device: a graph of one matrix product
that keeps one core, not Python's, busy for 13 ms a step, so that what is done meanwhile is free and waiting is not.
SmolLM2's graph is big, and MLX's CPU back end blocks while it launches one, which hides most of the difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.conftest import OPENBLAS, ROOT, server_env

ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
SCHEMA = json.dumps({"type": "array", "items": ITEM, "minItems": 10_000})
STEP = 0.013
WAYS = ("none", "naive", "slice", "ours")


def table(short: bool) -> Iterator[str]:
    yield "| BLAS | model | rows | naive / none | slice / none | ours / none |"
    yield "| --- | --- | --- | --- | --- | --- |"
    kinds = [("device", 1), ("device", 4), ("device", 8), ("SmolLM2", 1)]
    libraries = {"MLX's own": {"LD_PRELOAD": ""}} | ({"OpenBLAS": {}} if OPENBLAS.exists() else {})
    for library, env in libraries.items():
        several = [("SmolLM2", 8)] if env == {} else []  # whose prompts take minutes without OpenBLAS
        for kind, rows in kinds[:1] if short else kinds + several:
            rounds, steps = (1, 5) if short else (15, 60) if kind == "device" else (5, 16)
            command = [sys.executable, "-m", "tests.bench.steps", kind, *map(str, (rows, rounds, steps))]
            done = subprocess.run(command, env=server_env(env), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            yield f"| {library} | {kind} | {rows} | {done.stdout.strip()} |"


def measure(kind: str, rows: int, rounds: int, steps: int) -> str:
    """The cells of a row. In a process of its own, for what BLAS is loaded is set by its environment."""
    from tests.bench.replies import spread

    loop = Loop(kind)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for n in range(rounds):
        for way in WAYS[:: -1 if n % 2 else 1]:
            rates[way].append(loop.rate(way, rows, steps))
    ratios = {way: [a / b for a, b in zip(rates[way], rates["none"], strict=True)] for way in WAYS}
    return " | ".join(spread(ratios[way]) for way in WAYS[1:])


class Loop:
    """mlx_lm's BatchGenerator on the demo model, or on the device that has its vocabulary."""

    def __init__(self, kind: str):
        import mlx_lm
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer
        from mlx_lm.generate import GenerationBatch

        from mlx_patches import demo_model
        from mlx_patches.reply_format import ReplyFormat, output_width
        from mlx_patches.watched_replies import note_step_tokens

        model, self.tokenizer = mlx_lm.load(str(demo_model.folder()))
        self.form = ReplyFormat(self.tokenizer, output_width(model, self.tokenizer))
        self.model = device(self.form.width) if kind == "device" else model
        ends = sorted(self.form.end_tokens)
        side = from_tokenizer(self.tokenizer._tokenizer, n_vocab=self.form.width, eos_token=ends)
        self.matcher = LLMatcher(side, LLMatcher.grammar_from_json_schema(SCHEMA))
        GenerationBatch._step = note_step_tokens(GenerationBatch._step)

    def processors(self, way: str) -> list:
        from mlx_patches.reply_format import ANSWER, TokenSplitter
        from mlx_patches.watcher import Watcher

        if way == "none":
            return []
        if way == "ours":
            splitter = TokenSplitter((), (), self.form.token_bytes, ANSWER)
            return [Watcher(self.form, splitter, matcher=self.matcher.deep_copy(), is_json=True)]
        return [reading_tokens(self.matcher.deep_copy(), self.form.width, launch_first=way == "slice")]

    def rate(self, way: str, rows: int, steps: int) -> float:
        """Tokens a second of each row."""
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(self.model, max_tokens=100_000)
        prompts = [self.tokenizer.encode(f"Story {n}:") for n in range(rows)]
        generator.insert(prompts, logits_processors=[self.processors(way) for _ in prompts])
        took, begun = 0, 0.0
        while took < steps:
            _, responses = generator.next()
            if begun:
                took += 1
            elif len(responses) == rows:
                begun = time.perf_counter()
        seconds = time.perf_counter() - begun
        generator.close()
        return steps / seconds


def device(width: int):
    """A model whose step is one matrix product of STEP seconds on one core, and scores that do not depend on it."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import KVCache

    def seconds(side: int) -> float:
        a = mx.random.normal((side, side))
        mx.eval(a)
        begun = time.perf_counter()
        mx.eval(a @ a)
        return time.perf_counter() - begun

    side = 100
    while seconds(side) < STEP:
        side += 10
    matrix, base = mx.random.normal((side, side)), mx.random.normal((width,))
    mx.eval(matrix, base)

    class Device(nn.Module):
        layers = (None,)

        def __call__(self, inputs, cache=None):
            keys = inputs[:, None, :, None].astype(mx.float32)
            cache[0].update_and_fetch(keys, keys)
            worked = (matrix + 0 * keys.sum()) @ matrix
            return base + 0 * (keys[:, 0] + worked[0, 0])

        def make_cache(self):
            return [KVCache()]

    return Device()


def reading_tokens(matcher, width: int, launch_first: bool):
    """A processor that reads its row's newest token from the history that it is handed."""
    import mlx.core as mx

    from mlx_patches.token_masks import TokenMask, keep

    mask, begun = TokenMask(width), False

    def process(tokens, logits):
        nonlocal begun
        if begun:
            if launch_first:
                mx.async_eval(logits)
            matcher.consume_token(tokens[-1:].item())
        begun = True
        mask.fill(matcher)
        return keep(mask.row(logits.shape[-1]), logits)

    return process


if __name__ == "__main__":
    print(measure(sys.argv[1], *map(int, sys.argv[2:])))
