"""A server whose parts raise on demand: `serve_private(..., module="faulty_server", env={"FAULTS": folder})`.

A file in that folder arms one fault: its name says where, its number how many calls go well before. It is raised once
and the file is gone. sampler, processor: a call of one request's; make_sampler, make_processors: while it is set up;
tokenizer: while its prompt is rendered; prefill, decode: a call of the model with several tokens a row, or with one.
UPSTREAM in the environment runs mlx_lm's own server.
"""

import os
from pathlib import Path

from mlx_lm import server
from mlx_lm.tokenizer_utils import TokenizerWrapper

FAULTS = Path(os.environ["FAULTS"])


def check(name: str) -> None:
    armed = FAULTS / name
    if armed.exists():
        left = int(armed.read_text() or 0)
        if left:
            armed.write_text(str(left - 1))
            return
        armed.unlink()
        raise RuntimeError(f"armed fault: {name}")


def checked(name: str, act):
    def call(*given, **named):
        check(name)
        return act(*given, **named)

    return call


def make_sampler(*given, upstream=server.make_sampler, **named):
    check("make_sampler")
    return checked("sampler", upstream(*given, **named))


def make_logits_processors(*given, upstream=server.make_logits_processors, **named):
    check("make_processors")
    return [checked("processor", each) for each in upstream(*given, **named)]


def load(*given, upstream=server.load, **named):
    loaded = upstream(*given, **named)
    kind = type(loaded[0])
    forward = kind.__call__

    def call(model, inputs, *more, **options):
        check("prefill" if inputs.shape[1] > 1 else "decode")
        return forward(model, inputs, *more, **options)

    kind.__call__ = call
    return loaded


server.make_sampler, server.make_logits_processors, server.load = make_sampler, make_logits_processors, load
TokenizerWrapper.apply_chat_template = checked("tokenizer", TokenizerWrapper.apply_chat_template)

if __name__ == "__main__":
    if "UPSTREAM" in os.environ:
        server.main()
    else:
        import mlx_patched_server

        mlx_patched_server.main()
