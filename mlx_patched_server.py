"""mlx_lm.server with what agents need from it: `python -m mlx_patched_server`, with mlx_lm.server's flags.

A table of contents: which rooms each class is made of, in order, and which of mlx_lm's names are swapped. What a room
does stands in its file under mlx_patches/.
"""

import sys

from mlx_patches import seams

if complaint := seams.check():
    sys.exit(complaint)

import argparse
import json
import logging
import os
import threading
import time
import uuid
from urllib.parse import unquote

from mlx_lm import server

from localServerCommon import JsonHandler, Listener, Refused
from mlx_patches import keepalive, model_names, padded_rows, reply_limits, watcher
from mlx_patches.chat_wire import ChatEncoder, CompletionEncoder, Head
from mlx_patches.keepalive import KeepsAlive
from mlx_patches.model_names import ServesOneModel
from mlx_patches.reply_events import Finished, StreamsReplies
from mlx_patches.reply_format import LearnsReplyFormat
from mlx_patches.request_bodies import read_request
from mlx_patches.structured_output import CompilesGrammars, warning_header
from mlx_patches.watcher import WatchesReplies


class Provider(ServesOneModel, CompilesGrammars, LearnsReplyFormat, server.ModelProvider):
    """The loaded model, and what belongs to it."""


class Generator(StreamsReplies, WatchesReplies, server.ResponseGenerator):
    """mlx_lm's generation loop and the way into it."""


SWAPS = (
    ("server.ModelProvider", lambda upstream: Provider),
    ("server.run", lambda upstream: run),
    ("server._make_logits_processors", watcher.add_watcher),
    ("server._make_sampler", padded_rows.sample_named_tokens),
    ("server._format_top_logprobs", padded_rows.list_named_tokens),
    ("generate.GenerationBatch._step", watcher.note_step_tokens),
)


ENCODERS = {
    "/v1/chat/completions": ChatEncoder,
    "/chat/completions": ChatEncoder,
    "/v1/completions": CompletionEncoder,
}


class Handler(KeepsAlive, JsonHandler, server.APIHandler):
    """One client's connection: a body becomes a request, the reply's events become the client's protocol."""

    @property
    def flags(self):
        return self.response_generator.cli_args

    def do_GET(self):
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            self.send_health()
        elif path == "/v1/models":
            self.send_json(200, model_names.model_list(self.flags, self.created))
        elif path.startswith("/v1/models/"):
            wanted = unquote(path.removeprefix("/v1/models/"))
            self.answer(lambda: self.send_json(200, model_names.model_list(self.flags, self.created, wanted)))
        else:
            self.send_refused(Refused(f"there is nothing at {path}", status=404, code="not_found"))

    do_HEAD = do_GET

    def send_health(self):
        provider = self.response_generator.model_provider
        if not provider.settled.is_set():
            self.send_json(503, {"status": "loading"})
        elif self.response_generator.is_healthy:
            self.send_json(200, {"status": "ok"})
        else:
            self.send_json(503, {"status": "unavailable", "reason": "the generation thread has ended"})

    def do_POST(self):
        self.answer(self.reply)

    def refusal(self, fault):
        """A template's or tokenizer's complaint about the request is the client's; anything else is ours."""
        if isinstance(fault, ValueError) or type(fault).__module__.partition(".")[0] == "jinja2":
            return Refused(str(fault))
        logging.error("a request failed", exc_info=fault)
        return Refused(f"internal error ({type(fault).__name__})", status=500)

    def reply(self):
        encoder_class = ENCODERS.get(self.path.partition("?")[0].rstrip("/"))
        body = self.read_json()
        if encoder_class is None:
            raise Refused(f"there is nothing at {self.path}", status=404, code="not_found")
        chat = encoder_class is ChatEncoder
        request, args, values = read_request(body, chat, self.flags)
        model_names.choose(args.model, self.flags)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4()}"
        head = Head(name, values["model"], int(time.time()), self.system_fingerprint)
        encoder = encoder_class(head, include_usage=args.ask.include_usage, logprobs=args.logprobs)
        events = self.response_generator.events(request, args)
        headers = warning_header(args.ask.grammar)
        try:
            end = (self.stream_reply if values["stream"] else self.send_reply)(encoder, events, headers)
        finally:
            events.close()
        self.log_reply(end)

    def send_reply(self, encoder, events, headers):
        seen = [event for event in events if event is not None]
        self.send_json(200, encoder.body(seen), headers)
        return seen[-1]

    def log_reply(self, end: Finished):
        seconds = time.monotonic() - self.begun
        counts = f"{end.prompt_tokens} -> {end.completion_tokens} tokens, {max(end.cached_tokens, 0)} cached"
        reason = end.reason if end.cut is None else f"{end.reason}, cut: {end.cut}"
        self.log_line(f"{counts}, {end.completion_tokens / seconds:.1f} tokens/s, {reason}")


def run(host: str, port: int, provider: Provider) -> None:
    """Bind, then load, then serve: a port in use ends the process before the model is in memory."""
    fingerprint = server.get_system_fingerprint()
    try:
        listener = Listener(host, port, lambda *args: Handler(generator, *args, system_fingerprint=fingerprint))
    except OSError as fault:
        sys.exit(f"cannot listen on {host}:{port}: {fault.strerror}")
    generator = Generator(provider, server.LRUPromptCache(provider.cli_args.prompt_cache_size))
    if server.mx.distributed.init().rank() > 0:
        generator.join()
        return
    threading.Thread(target=announce, args=(listener, provider), daemon=True).start()
    try:
        listener.serve_forever()
    except KeyboardInterrupt:
        generator.stop_and_join()


def announce(listener: Listener, provider: Provider) -> None:
    """Say on standard output that the server is ready, or on standard error why it never will be."""
    provider.settled.wait()
    if provider.load_error is not None:
        print(f"cannot load {provider.cli_args.model}: {provider.load_error}", file=sys.stderr, flush=True)
        os._exit(1)
    host, port = listener.server_address[:2]
    ready = {"event": "ready", "host": host, "port": port, "model": provider.cli_args.model, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)


class Parser(argparse.ArgumentParser):
    """mlx_lm.server's parser, with our flags in a group of their own."""

    def parse_args(self, *args, **kwargs):
        own = self.add_argument_group("mlx-patched-server")
        for name, options in (*keepalive.FLAGS, *model_names.FLAGS, *reply_limits.FLAGS):
            own.add_argument(name, **options)
        return super().parse_args(*args, **kwargs)


def main() -> None:
    for name, make in SWAPS:
        seams.replace(name, make)
    server.argparse = argparse.Namespace(**{**vars(argparse), "ArgumentParser": Parser})
    server.main()


if __name__ == "__main__":
    main()
