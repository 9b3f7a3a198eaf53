"""A server that writes down what it does and when: `serve_private(..., module="timed_server", env={"TIMES": file})`.

One JSON object a line, `at` in seconds of time.monotonic(), which all processes share. `what` is: tokenized (`prompt`),
inserted (into the batch, with so many logits `processors`), chunk or step (a call of the model with several tokens a
row, or with one; `rows`), left (rows that left their batch
before their end), over (a reply on the single path has ended), line (`text`, one of the log's lines of our own).
STEP, CHUNK and LOAD in the environment are seconds that a step, a chunk and loading the model take longer than they do;
UPSTREAM runs mlx_lm's own server.
"""

import json
import os
import time

TIMES = open(os.environ["TIMES"], "a", buffering=1)  # noqa: SIM115
STEP, CHUNK, LOAD = (float(os.environ.get(name, 0)) for name in ("STEP", "CHUNK", "LOAD"))


def note(what: str, **named) -> None:
    TIMES.write(json.dumps({"what": what, "at": time.monotonic(), **named}) + "\n")


def load(*given, upstream, **named):
    time.sleep(LOAD)
    loaded = upstream(*given, **named)
    kind = type(loaded[0])
    if kind not in slowed:
        slowed.add(kind)
        forward = kind.__call__

        def call(model, inputs, *more, **options):
            rows, tokens = inputs.shape
            note("chunk" if tokens > 1 else "step", rows=rows)
            time.sleep(CHUNK if tokens > 1 else STEP)
            return forward(model, inputs, *more, **options)

        kind.__call__ = call
    return loaded


def remove(batch, uids, *given, upstream, **named):
    known = len(batch._find_uids(uids))
    found = upstream(batch, uids, *given, **named)
    if known:
        note("left", rows=known)
    return found


def insert(batch, *given, upstream, **named):
    if processors := named.get("logits_processors"):
        note("inserted", processors=len(processors[0]))
    return upstream(batch, *given, **named)


def tokenize(generator, tokenizer, request, *given, upstream):
    prompt = request.prompt if request.request_type == "text" else request.messages[-1]["content"]
    note("tokenized", prompt=prompt)
    return upstream(generator, tokenizer, request, *given)


def serve_single(generator, request, stream, *, upstream):
    upstream(generator, request, stream)
    note("over")


def log_line(handler, what, *given, upstream):
    upstream(handler, what, *given)
    note("line", text=what)


def wrap(owner, name: str, wrapper) -> None:
    upstream = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: wrapper(*given, upstream=upstream, **named))


slowed: set = set()

if __name__ == "__main__":
    import mlx_patched_server  # first: it checks mlx_lm's names, which are then wrapped

    server, batch_generator = mlx_patched_server.server, mlx_patched_server.cancellation.BatchGenerator

    wrap(server, "load", load)
    wrap(batch_generator, "remove", remove)
    wrap(batch_generator, "insert_segments", insert)
    wrap(server.ResponseGenerator, "_tokenize", tokenize)
    wrap(server.ResponseGenerator, "_serve_single", serve_single)
    wrap(mlx_patched_server.Handler, "log_line", log_line)
    (server if "UPSTREAM" in os.environ else mlx_patched_server).main()
