"""Replies of 32,000 tokens: time per token at the start and at the end, in microseconds.

The scripted model replies with the prompt's own text, so a plain reply, one under all limits and one under a schema
with an endless array are of the same words. Its step reads the whole history, and so takes longer at the end in every
row; what a watcher adds is the difference to the plain row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.bench.replies import FLAGS, LIMITS, PLAIN, SMALL, ask
from tests.conftest import Server
from tests.tiny_models import CORPUS, model_folder

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
    schema = {"type": "array", "items": SMALL}
    held = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    cases = [
        ("prose, plain", prose, PLAIN),
        ("prose, all limits", prose, LIMITS),
        ("array, plain", array, PLAIN),
        ("array, schema", array, PLAIN | held),
        ("array, schema and all limits", array, LIMITS | held),
    ]
    yield f"| reply | first {some:,} tokens | last {some:,} tokens | last / first |"
    yield "| --- | --- | --- | --- |"
    server = Server(model_folder("scripted", style="plain"), *FLAGS)
    try:
        for what, text, body in cases:
            reply = ask(server, text(tokens), max_tokens=tokens, temperature=0, **body)
            if reply.tokens != tokens:
                raise RuntimeError(f"{what} ended after {reply.tokens} tokens")
            each = 1e6 * len(reply.times) / reply.tokens / some
            first = each * (reply.times[some] - reply.times[0])
            last = each * (reply.times[-1] - reply.times[-1 - some])
            yield f"| {what} | {first:.0f} | {last:.0f} | {last / first:.2f} |"
    finally:
        server.stop()
