"""One peer's masks on the schemas of a file, for masks.py: a script of its own, in a Python that has the peer.

    PEERS_PYTHON mask_peers.py xgrammar|outlines-core FILE

FILE is JSON: `tokens` (base64, empty for special ones), `end`, `seconds` and `cases`, each a `schema` and its
`replies` (lists of token ids, the end token last). What is printed is JSON, a list with null for each schema that the
peer did not take, else `compile` (ns) and, a reply each, `taken` and `times` (ns a mask). It imports nothing of the
server's.

A worker process takes one schema after another, as a server would. Where it dies, or gives no answer in `seconds`, the
schema counts as not taken and a new one goes on with the next: some automata of outlines-core outgrow any memory.
"""

import base64
import gc
import json
import logging
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns

import numpy as np

MEMORY = 8 << 30
NOT_INSTALLED = 3

Begin = Callable[[], tuple[Callable, Callable]]  # a new reply's fill and take
Compile = Callable[[str], Begin]


def follow(
    fill: Callable, take: Callable, tokens: Iterable[int], times: list[int], show: Callable | None = None
) -> bool:
    """Whether `take` takes each of `tokens`; before each, `fill` makes the mask.

    `times` gets the ns of each mask, those of taking the token before it included. `show` is called after each mask.
    """
    taking = 0
    for token in tokens:
        began = perf_counter_ns()
        fill()
        times.append(taking + perf_counter_ns() - began)
        if show:
            show()
        began = perf_counter_ns()
        taken = take(token)
        taking = perf_counter_ns() - began
        if not taken:
            return False
    return True


def xgrammar(tokens: list[bytes], end: int) -> Compile:
    import xgrammar

    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[end])
    words = np.zeros((1, (len(tokens) + 31) // 32), dtype=np.int32)
    compilers: list[xgrammar.GrammarCompiler] = []

    def compiled(schema: str) -> Begin:
        if not compilers:  # one to a worker
            compilers.append(xgrammar.GrammarCompiler(info, max_threads=1))
        # Not strict: its strict mode allows no property that the schema does not name, which JSON schemas do.
        grammar = compilers[0].compile_json_schema(schema, strict_mode=False)

        def begin() -> tuple[Callable, Callable]:
            matcher = xgrammar.GrammarMatcher(grammar)
            return lambda: matcher.fill_next_token_bitmask(words), matcher.accept_token

        return begin

    return compiled


def outlines_core(tokens: list[bytes], end: int) -> Compile:
    from outlines_core import Guide, Index, Vocabulary, json_schema

    ids: dict[bytes, list[int]] = {}
    for token, text in enumerate(tokens):
        if text:
            ids.setdefault(text, []).append(token)
    vocabulary = Vocabulary(end, ids)
    words = np.zeros((len(tokens) + 31) // 32, dtype=np.int32)

    def compiled(schema: str) -> Begin:
        index = Index(json_schema.build_regex_from_schema(schema), vocabulary)

        def begin() -> tuple[Callable, Callable]:
            guide = Guide(index)

            def take(token: int) -> bool:
                if token == end:  # which has no state to go to
                    return guide.is_finished()
                try:
                    guide.advance(token, return_tokens=False)
                except ValueError:
                    return False
                return True

            return lambda: guide.write_mask_into(words.ctypes.data, words.size, words.itemsize), take

        return begin

    return compiled


PEERS = {"xgrammar": xgrammar, "outlines-core": outlines_core}


def results(compiled: Compile, cases: list[dict]) -> Iterator[dict | None]:
    for case in cases:
        began = perf_counter_ns()
        try:
            begin = compiled(json.dumps(case["schema"]))
        except Exception:  # each peer has its own kinds, and a schema that is refused is what all of them say
            yield None
            continue
        spent = perf_counter_ns() - began
        times: list[list[int]] = [[] for _ in case["replies"]]
        taken = [follow(*begin(), tokens, into) for tokens, into in zip(case["replies"], times, strict=True)]
        yield {"compile": spent, "taken": taken, "times": times}


def _work(pipe, compiled: Compile, cases: list[dict]) -> None:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    gc.disable()
    for result in results(compiled, cases):
        pipe.send(result)


def guarded(compiled: Compile, cases: list[dict], seconds: float) -> list[dict | None]:
    """`results`, with None too for a schema that kills its worker or takes it longer than `seconds`."""
    fork = multiprocessing.get_context("fork")
    found: list[dict | None] = []
    while len(found) < len(cases):
        ours, theirs = fork.Pipe(duplex=False)
        worker = fork.Process(target=_work, args=(theirs, compiled, cases[len(found) :]), daemon=True)
        worker.start()
        theirs.close()
        try:
            while len(found) < len(cases) and ours.poll(seconds):
                found.append(ours.recv())
            found += [None] if len(found) < len(cases) else []
        except EOFError:
            found.append(None)
        worker.kill()
        worker.join()
    return found


def main(peer: str, file: str) -> int:
    logging.disable()
    with open(file) as text:
        given = json.load(text)
    try:
        compiled = PEERS[peer]([base64.b64decode(token) for token in given["tokens"]], given["end"])
    except ImportError as fault:
        print(fault, file=sys.stderr)
        return NOT_INSTALLED
    json.dump(guarded(compiled, given["cases"], given["seconds"]), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
