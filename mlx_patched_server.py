"""mlx_lm.server with what agents need from it: `python -m mlx_patched_server`, with mlx_lm.server's flags.

A table of contents: which rooms each class is made of, in order, and which of mlx_lm's names are swapped. What a room
does stands in its file under mlx_patches/.
"""

import sys

from localServerCommon import start_process
from mlx_patches import seams

if complaint := start_process(sys.argv[1:]) or seams.check():
    sys.exit(complaint)

import argparse
import functools
import logging
import time
import uuid
from urllib.parse import unquote

from mlx_lm import server

import localServerCommon
from localServerCommon import JsonHandler, Refused
from mlx_patches import (
    access,
    cancellation,
    image_urls,
    keepalive,
    model_names,
    padded_rows,
    process,
    reply_limits,
    survival,
    watched_replies,
)
from mlx_patches.access import ChecksCallers
from mlx_patches.cache_leak import CutsCounters
from mlx_patches.cancellation import LeavesEarly, RowBatch, while_connected
from mlx_patches.chat_messages import ReadsMessages
from mlx_patches.chat_wire import ChatEncoder, CompletionEncoder, Head
from mlx_patches.context_window import HoldsContextWindow, note_window
from mlx_patches.draft_models import RefusesDrafts, draft_complaint
from mlx_patches.early_tokenizer import LoadsTokenizerEarly, begin_at_weights, hand_over
from mlx_patches.harmony import RendersHarmony, SpeaksHarmony
from mlx_patches.keepalive import KeepsAlive
from mlx_patches.model_names import ServesOneModel
from mlx_patches.padded_rows import KeepsToVocabulary
from mlx_patches.prompt_cache import PromptCache, SegmentsPrompts, store_points
from mlx_patches.reply_events import Finished, StreamsReplies
from mlx_patches.reply_format import LearnsReplyFormat
from mlx_patches.request_bodies import read_request
from mlx_patches.structured_output import CompilesGrammars, warning_header
from mlx_patches.survival import SurvivesFaults
from mlx_patches.tool_choice import ChoosesTools
from mlx_patches.watched_replies import WatchesReplies


class Provider(
    ServesOneModel,
    RefusesDrafts,
    LoadsTokenizerEarly,
    CompilesGrammars,
    SpeaksHarmony,
    LearnsReplyFormat,
    server.ModelProvider,
):
    """The loaded model, and what belongs to it."""


class Generator(
    CutsCounters,
    SurvivesFaults,
    LeavesEarly,
    ChoosesTools,
    StreamsReplies,
    WatchesReplies,
    HoldsContextWindow,
    KeepsToVocabulary,
    ReadsMessages,
    RendersHarmony,
    SegmentsPrompts,
    server.ResponseGenerator,
):
    """mlx_lm's generation loop and the way into it."""


SWAPS = (
    ("server.ModelProvider", lambda upstream: Provider),
    ("server.run", lambda upstream: run),
    ("server.load_processor", note_window),
    ("utils.load_model", begin_at_weights),
    ("utils.load_tokenizer", hand_over),
    ("server._make_logits_processors", watched_replies.add_watcher),
    ("server._make_logits_processors", survival.guard_processors),
    ("server._make_sampler", padded_rows.sample_named_tokens),
    ("server._make_sampler", survival.guard_sampler),
    ("server._format_top_logprobs", padded_rows.list_named_tokens),
    ("server.BatchGenerator", lambda upstream: RowBatch),
    ("server.stream_generate", store_points),
    ("server.stream_generate", cancellation.stop_between_chunks),
    ("generate.PromptProcessingBatch.prompt", survival.guard_prompts),
    ("generate.GenerationBatch._step", watched_replies.note_step_tokens),
)


ENCODERS = {"/v1/chat/completions": ChatEncoder, "/chat/completions": ChatEncoder, "/v1/completions": CompletionEncoder}


class Handler(KeepsAlive, ChecksCallers, JsonHandler, server.APIHandler):
    """One client's connection: a body becomes a request, the reply's events become the client's protocol."""

    @property
    def flags(self):
        return self.response_generator.cli_args

    def do_GET(self):
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            self.send_json(*process.health(self.response_generator))
        elif f"{path}/".startswith("/v1/models/"):
            wanted = unquote(path.removeprefix("/v1/models").removeprefix("/")) or None
            self.answer(lambda: self.send_json(200, model_names.model_list(self.flags, self.created, wanted)))
        else:
            self.send_refused(Refused(f"there is nothing at {path}", status=404, code="not_found"))

    do_HEAD = do_GET

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
        events = while_connected(self.connection, self.response_generator.events(request, args))
        headers = functools.partial(warning_header, args.ask)
        try:
            end = (self.stream_reply if values["stream"] else self.send_reply)(encoder, events, headers)
        finally:
            events.close()
        self.log_reply(end)

    def send_reply(self, encoder, events, headers):
        seen = [event for event in events if event is not None]
        self.send_json(200, encoder.body(seen), headers())
        return seen[-1]

    def log_reply(self, end: Finished):
        counts = f"{end.prompt_tokens} -> {end.completion_tokens} tokens, {max(end.cached_tokens, 0)} cached"
        reason = end.reason if end.cut is None else f"{end.reason}, cut: {end.cut}"
        self.log_line(f"{counts}, {end.completion_tokens / (time.monotonic() - self.begun):.1f} tokens/s, {reason}")


def run(host: str, port: int, provider: Provider) -> None:
    make_handler = functools.partial(Handler, system_fingerprint=server.get_system_fingerprint())
    process.serve(host, port, provider, lambda: Generator(provider, PromptCache(provider.cli_args)), make_handler)


class Parser(process.LineParser):
    """mlx_lm.server's parser, with our flags in a group of their own."""

    def add_argument(self, *names, **options):
        return super().add_argument(*names, **options | access.CHANGED_FLAGS.get(names[0], {}))

    def parse_args(self, *args, **kwargs):
        own = self.add_argument_group("mlx-patched-server")
        for room in (localServerCommon, access, image_urls, keepalive, model_names, reply_limits, survival):
            for name, options in room.FLAGS:
                own.add_argument(name, **options)
        flags = super().parse_args(*args, **kwargs)
        if complaint := access.unsafe_address(flags) or draft_complaint(flags):
            self.exit(2, f"{complaint}\n")
        return flags


def main() -> None:
    for name, make in SWAPS:
        seams.replace(name, make)
    server.argparse = argparse.Namespace(**{**vars(argparse), "ArgumentParser": Parser})
    server.main()


if __name__ == "__main__":
    main()
