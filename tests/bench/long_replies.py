"""Replies of 32,000 tokens: what a watcher adds to a token at the start and at the end, in microseconds.

Without a model, whose steps themselves take longer as a reply grows: the watcher is shown the tokens of a text one by
one, as mlx_lm's batch shows them. The prose has no loops; the array is one without an end. Time is the thread's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import make_text_state_machine

from mlx_patches import demo_model
from mlx_patches.reply_format import ANSWER, ReplyFormat, TextSplitter, TokenSplitter, output_width
from mlx_patches.reply_limits import Limits
from mlx_patches.structured_output import GrammarCompiler, build_tokenizer, read_grammar
from mlx_patches.watched_replies import StepTokens
from mlx_patches.watcher import Watcher
from tests.bench.replies import LIMITS, SMALL
from tests.tiny_models import CORPUS

TOKENS = 32_000
SOME = 2_000


def words(random_: random.Random, count: int) -> str:
    return " ".join(random_.choices([word for word in CORPUS.split() if word.isalpha()], k=count))


def prose(tokens: int) -> str:
    random_, sentences = random.Random(1), []
    while sum(len(s.split()) for s in sentences) < tokens:
        sentences.append(words(random_, random_.randint(5, 15)) + ".")
    return "\n\n".join(sentences)


def array(tokens: int) -> str:
    random_ = random.Random(2)
    items = (f'{{"name": "{words(random_, 10)}", "age": {random_.randint(1, 99)}}}' for _ in range(tokens // 15))
    return f"[{', '.join(items)}]"


def table(short: bool) -> Iterator[str]:
    tokens, some = (400, 100) if short else (TOKENS, SOME)
    alone = Alone()
    cases = [("prose, all limits", prose, False, True), ("array, schema", array, True, False)]
    cases.append(("array, schema and all limits", array, True, True))
    yield f"| reply | first {some:,} tokens | last {some:,} tokens | last / first |"
    yield "| --- | --- | --- | --- |"
    for what, text, held, limited in cases:
        ids = alone.tokenizer.encode(text(2 * tokens), add_special_tokens=False)[:tokens]
        if len(ids) < tokens:
            raise RuntimeError(f"{what} has {len(ids)} tokens")
        times = alone.times(ids, held, limited)
        first, last = (1e6 * sum(part) / some for part in (times[1 : some + 1], times[-some:]))
        yield f"| {what} | {first:.0f} | {last:.0f} | {last / first:.2f} |"


class Alone:
    """Watchers of the demo model's vocabulary."""

    def __init__(self):
        model, self.tokenizer = mlx_lm.load(str(demo_model.folder()))
        self.form = ReplyFormat(self.tokenizer, output_width(model, self.tokenizer))
        self.grammars = GrammarCompiler(build_tokenizer(self.form))

    def watcher(self, held: bool, limited: bool) -> Watcher:
        schema = {"type": "array", "items": SMALL}
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        limits = Limits(**LIMITS)
        splitter = TokenSplitter((), (), self.form.token_bytes, ANSWER)
        return Watcher(
            self.form,
            splitter if held else TextSplitter(make_text_state_machine(self.tokenizer), ANSWER),
            matcher=self.grammars.matcher(read_grammar(form)) if held else None,
            is_json=held,
            limits=limits.machine(TOKENS, True) if limited else None,
        )

    def times(self, ids: list[int], held: bool, limited: bool) -> list[float]:
        """Seconds of this thread for each token, its mask made and put on a row of scores."""
        watcher, scores, times = self.watcher(held, limited), mx.zeros((1, self.form.width)), []
        for length in range(len(ids) + 1):
            begun = time.thread_time()
            watcher.enter(StepTokens(mx.array(ids[length - 1 : length], mx.uint32)), 0)
            mx.eval(watcher(mx.zeros((length + 1,), mx.uint32), scores))
            times.append(time.thread_time() - begun)
        if watcher.fault is not None:
            raise watcher.fault
        return times
