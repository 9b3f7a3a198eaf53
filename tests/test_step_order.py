"""The order of things in a step, traced: what is launched, read and made, by mlx_lm's own loops with watchers in them.

The trace holds what touches the device from inside a watcher, and the launches of the loop itself. `read` names whose
tokens came to the host: those that the step before launched. A slice that a watcher takes of tokens is an operation: it
may only be launched before the forward pass, or it would queue behind it.
"""

import json

import mlx.core as mx
import pytest
from llguidance import LLMatcher
from mlx_lm.generate import BatchGenerator, GenerationBatch, generate_step

from mlx_patches.token_masks import TokenMask
from mlx_patches.watched_replies import note_step_tokens
from mlx_patches.watcher import Watcher
from tests.client import chat
from tests.test_watcher import Model

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ENDLESS = LLMatcher.grammar_from_regex("[a-z ]{1000,}")


@pytest.fixture(scope="module")
def model(tiny):
    return Model(tiny("llama", style="plain"))


@pytest.fixture
def trace(monkeypatch):
    """What happens, in order; `launched` holds the token arrays of the last launch of the loop."""
    events, launched, inside = [], [], []

    def note(owner, name, said):
        upstream = getattr(owner, name)

        def wrapped(*given, **named):
            if (event := said(*given)) is not None:
                events.append(event)
            return upstream(*given, **named)

        monkeypatch.setattr(owner, name, wrapped)

    def launch(*arrays):
        if inside:
            return "launch scores" if arrays[0].shape[-1] > 1000 else "launch tokens"
        launched[:] = [arrays[0]]
        return "launch step" if len(arrays) > 1 else "launch tokens"

    def read(array):
        return ("read the step before" if array is before[0] else "read others") if inside else None

    before = [None]
    note(mx, "async_eval", launch)
    note(mx, "eval", lambda *arrays: "wait" if inside else None)
    note(mx.array, "tolist", read)
    note(mx.array, "item", lambda array: "read others" if inside else None)
    note(mx.array, "__getitem__", lambda array, at: "slice" if inside else None)
    note(TokenMask, "fill", lambda mask, matcher: "mask")
    call = Watcher.__call__

    def watch(watcher, tokens, logits):
        inside.append(watcher)
        before[0] = launched[0] if launched else None
        events.append("row")
        try:
            return call(watcher, tokens, logits)
        finally:
            inside.clear()
            assert watcher.fault is None

    monkeypatch.setattr(Watcher, "__call__", watch)
    return events


def watcher(model):
    return model.watcher(LLMatcher(model.grammar_side, ENDLESS))


def steps(events):
    """The trace cut at each launch of a whole step, after the first, which takes the prompt."""
    text = ", ".join(events)
    return [part.strip(", ") for part in text.split("launch step")][1:-1]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_batch_launches_first_and_reads_once(model, trace, monkeypatch, rows):
    monkeypatch.setattr(GenerationBatch, "_step", note_step_tokens(GenerationBatch._step))
    generator = BatchGenerator(model.model, max_tokens=8, completion_batch_size=rows)
    prompts = [model.ids("The model") for _ in range(rows)]
    generator.insert(prompts, logits_processors=[[watcher(model)] for _ in prompts])
    while generator.next()[1] or not trace.count("launch step") > 4:
        pass
    generator.close()
    first = "launch scores, read the step before, mask"
    whole = [step for step in steps(trace) if step.count("row") == rows]
    assert len(whole) > 2
    for step in whole[1:]:
        assert step == "launch tokens, " + ", ".join([f"row, {first}", *["row, mask"] * (rows - 1)])


def test_the_single_path_slices_before_it_launches(model, trace):
    prompt = mx.array(model.ids("The model"))
    for n, _ in enumerate(generate_step(prompt, model.model, logits_processors=[watcher(model)])):
        if n == 5:
            break
    for step in steps(trace)[1:]:
        assert step == "row, slice, launch tokens, launch scores, read others, mask"


def test_without_anything_to_watch_there_is_no_processor(serve_private, tiny, tmp_path):
    times = tmp_path / "times"
    server = serve_private(tiny("llama"), module="timed_server", env={"TIMES": str(times)})
    plain = {"max_tokens": 3, "reasoning_budget": 0, "hedge_limit": 0, "repeat_limit": 0}
    for body in (plain, plain | {"tools": [TOOL]}, plain | {"hedge_limit": 3, "limit_answers": True}):
        assert chat(server, "Hello", **body).status == 200
    lines = map(json.loads, times.read_text().splitlines())
    assert [line["processors"] for line in lines if line["what"] == "inserted"] == [0, 0, 1]
