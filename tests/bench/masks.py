"""What a mask costs: to make one, to apply one, and to compile the grammar it comes from; two peers beside.

    python -m tests.bench.masks [--short]

The valid instances of JSONSchemaBench's sample (shared/data, else a small built-in set), as `json.dumps` writes them,
are the replies: at each token the server's own path makes the mask, then takes the token. One whose properties stand in
another order than its schema's ends where no grammar takes it. One process, one thread, no model. Vocabularies: the
demo model's (49k), Tekken (131k) and o200k_harmony (200k), each reply tokenised with its own.

- *mask*: the token before taken and `TokenMask.fill`, µs. *row*: `TokenMask.row`, the mask as an array of MLX's.
  Side by side, eight replies under eight schemas take a step in turn: a row's share of the step's eight masks.
- *apply*: a new mask's row and the scores kept by it, evaluated; *host*: the part before evaluation.
- *compile*: what stands between a request and its first mask. No schema is met twice but in "seen before".
- *peers*: the same schemas, replies and loop in a Python of their own, MASK_PEERS_PYTHON or the one in the cache folder
  (docs/performance.md tells how to make it): mask_comparison.py and, for that Python, mask_peers.py.
"""

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from localServerCommon import Refused
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.structured_output import Grammar, GrammarCompiler, build_tokenizer, read_grammar
from mlx_patches.token_masks import TokenMask, keep
from tests.bench.mask_comparison import Followed, Found, Reply, figures, masks_of, peer_results, peer_table, taken_of
from tests.bench.mask_peers import PEERS, follow
from tests.test_json_schemas import SAMPLE, built_in
from tests.vocabularies import Vocabulary, vocabulary

SIZES, SHORT_SIZES = ("49k", "131k", "200k"), ("49k",)
COMPARED, SHORT_COMPARED = "131k", "49k"
SHORT_CASES = 8
COMPARED_CASES = 40  # of the sample, evenly spread: a peer may take seconds to compile one
PEER_SECONDS, SHORT_PEER_SECONDS = 15, 1  # to compile a schema and follow its replies
SIDE_BY_SIDE = 8
WIDTHS = (49_152, 131_072, 201_088, 248_320)
MASK_TARGET = {"131k": "mean ≤ 64, p99 ≤ 500"}
APPLY_TARGET = {248_320: "≤ 0.4"}


def cases(short: bool) -> list[dict]:
    """In the sample's form. `short`: a few, evenly spread."""
    found = [json.loads(line) for line in SAMPLE.read_text().splitlines()] if SAMPLE.exists() else built_in()
    return found[:: max(1, len(found) // SHORT_CASES)] if short else found


def replies(case: dict, words: Vocabulary) -> list[Reply]:
    texts = [(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in case["tests"]]
    encode = words.tokenizer.encode
    return [Reply([*encode(text, add_special_tokens=False), words.end], valid) for text, valid in texts]


def grammar_of(case: dict) -> Grammar | None:
    """None where the server refuses the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "case", "schema": case["schema"]}}
    try:
        return read_grammar({"response_format": form})
    except Refused:
        return None


def matcher_of(compiler: GrammarCompiler, grammar: Grammar | None) -> LLMatcher | None:
    try:
        return compiler.matcher(grammar) if grammar else None
    except Refused:
        return None


def timed(times: list[int], call: Callable, *args):
    began = perf_counter_ns()
    result = call(*args)
    times.append(perf_counter_ns() - began)
    return result


# Applying


def apply_table(short: bool) -> Iterator[str]:
    yield "| apply: width | ms: mean | p50 | p99 | max | host, ms: mean | target: mean |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for width in WIDTHS:
        mask, logits = TokenMask(width), mx.random.normal((1, width))
        mx.eval(logits)
        host: list[int] = []
        whole: list[int] = []
        for token in range(30 if short else 1000):
            mask.add(token)  # another mask than before
            began = perf_counter_ns()
            kept = keep(mask.row(width), logits)
            host.append(perf_counter_ns() - began)
            mx.eval(kept)
            whole.append(perf_counter_ns() - began)
        host_mean, target = np.mean(host) / 1e6, APPLY_TARGET.get(width, "")
        yield f"| {width:,} | {figures(whole, 10**6, 3, 0, 50, 99)} | {host_mean:.3f} | {target} |"


# Making


def follow_each(
    tokenizer: LLTokenizer, grammars: list[Grammar | None], given: list[list[Reply]]
) -> tuple[Found, dict[str, list[int]]]:
    """(what came of each schema, None where it was refused; the ns of each stage of a request, and of `row`s)."""
    compiler, width = GrammarCompiler(tokenizer), tokenizer.vocab_size
    stages: dict[str, list[int]] = {"compiled": [], "seen before": [], "first mask": [], "row": []}
    found: Found = []
    for grammar, ones in zip(grammars, given, strict=True):
        matcher = timed(stages["compiled"], matcher_of, compiler, grammar)
        if grammar is None or matcher is None:
            stages["compiled"].pop()
            found.append(None)
            continue
        followed = Followed(stages["compiled"][-1])
        matcher = timed(stages["seen before"], compiler.matcher, grammar)
        timed(stages["first mask"], TokenMask(width).fill, matcher)
        for reply in ones:
            matcher, mask = compiler.matcher(grammar), TokenMask(width)
            times: list[int] = []
            rows = stages["row"] if reply.valid else []
            followed.taken.append(
                follow(
                    lambda mask=mask, matcher=matcher: mask.fill(matcher),
                    matcher.consume_token,
                    reply.tokens,
                    times,
                    lambda mask=mask, rows=rows: timed(rows, mask.row, width),
                )
            )
            followed.times.append(times)
        found.append(followed)
    return found, stages


def follow_together(
    tokenizer: LLTokenizer, grammars: list, given: list[list[Reply]], taken: list[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """(a row's share of the ns of each step's masks, of each step's `row`s), while there are enough replies.

    `taken`: the replies that the server takes, as (schema, reply).
    """
    compiler, width = GrammarCompiler(tokenizer), tokenizer.vocab_size
    pristine = {n: compiler.matcher(grammars[n]) for n, _ in taken}
    # The first reply under each schema, then the second of each, so that those side by side are of different schemas.
    ordered = sorted(taken, key=lambda pair: pair[::-1])
    waiting = ((pristine[n].deep_copy(), iter(given[n][k].tokens[:-1])) for n, k in ordered)
    side = [TokenMask(width) for _ in range(SIDE_BY_SIDE)]
    running: list[tuple[Any, Iterator[int]]] = [(None, iter(())) for _ in side]
    masks: list[int] = []
    rows: list[int] = []
    while True:
        last = []
        for n, (_, tokens) in enumerate(running):
            last.append(next(tokens, None))
            if last[n] is None:
                following = next(waiting, None)
                if following is None:
                    return masks, rows
                running[n] = following
        began = perf_counter_ns()
        for mask, (matcher, _), token in zip(side, running, last, strict=True):
            if token is not None:
                matcher.consume_token(token)
            mask.fill(matcher)
        masks.append((perf_counter_ns() - began) // SIDE_BY_SIDE)
        began = perf_counter_ns()
        for mask in side:
            mask.row(width)
        rows.append((perf_counter_ns() - began) // SIDE_BY_SIDE)


def table(short: bool) -> Iterator[str]:
    """The Markdown lines of the four tables, each as it is measured. `short`: some seconds, one vocabulary."""
    logging.disable(logging.WARNING)  # what is not enforced, once a schema
    gc.disable()
    try:
        yield from _tables(short)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def _tables(short: bool) -> Iterator[str]:
    yield from apply_table(short)
    sample = cases(short)
    step = max(1, len(sample) // COMPARED_CASES)
    stages: dict[tuple[str, str], list[int]] = {("schema made ready", "any"): []}
    grammars = [timed(stages["schema made ready", "any"], grammar_of, case) for case in sample]
    numbers = "mean | p50 | p99 | max"
    yield f"\n| mask: vocabulary | replies | masks | µs: {numbers} | row, µs: {numbers} | target |"
    yield "| --- " * 12 + "|"
    for size in SHORT_SIZES if short else SIZES:
        words = vocabulary(size)
        tokenizer = build_tokenizer(ReplyFormat(words.tokenizer, words.width))
        given = [replies(case, words) for case in sample]
        found, of_size = follow_each(tokenizer, grammars, given)
        rows = of_size.pop("row")
        stages |= {(stage, size): times for stage, times in of_size.items()}
        if size == (SHORT_COMPARED if short else COMPARED):
            engines: dict[str, Found | str] = {"this server": found[::step]}
            compared = given[::step]
        single = masks_of(found, given), rows
        taken = taken_of(found, given)
        together = follow_together(tokenizer, grammars, given, taken)
        for how, (masks, rows) in (("one", single), (f"{SIDE_BY_SIDE} side by side", together)):
            cells = f"{figures(masks, 1000, 1, 0, 50, 99)} | {figures(rows, 1000, 1, 0, 50, 99)}"
            yield f"| {size} | {how} | {len(masks):,} | {cells} | {MASK_TARGET.get(size, '')} |"
    yield "\n| compile: stage | vocabulary | schemas | ms: median | p99 | max |\n| --- | --- | --- | --- | --- | --- |"
    for (stage, size), times in stages.items():
        yield f"| {stage} | {size} | {len(times)} | {figures(times, 10**6, 3, 50, 99)} |"
    size, seconds = (SHORT_COMPARED, SHORT_PEER_SECONDS) if short else (COMPARED, PEER_SECONDS)
    for name in PEERS:
        engines[name] = peer_results(name, sample[::step], compared, vocabulary(size), seconds)
    yield ""
    yield from peer_table(engines, compared, size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="A few seconds: does it run at all")
    for line in table(parser.parse_args().short):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
