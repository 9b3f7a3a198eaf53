"""The tokenizer is loaded, and its vocabulary read, beside the weights.

Replaces   mlx_lm.utils.load_model and load_tokenizer (swapped)
Why        mlx_lm 0.32.2 loads the tokenizer after the weights: with 200,000 tokens that is 2.5 s until the first reply,
           and another until llguidance knows the vocabulary, while reading weights needs no interpreter
Upstream   utils.py load
Delete when mlx_lm loads both at once
Test       tests/test_early_tokenizer.py

When a load of the provider's comes to the weights, a thread loads the tokenizer of that folder as mlx_lm is going to,
and reads its vocabulary if the weights take longer still. Whoever then asks for just that tokenizer, or for a reply
format of just that width, gets the one in the making. What always holds: everything else, and what failed in the
thread, is done when and as mlx_lm does it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mlx_lm import utils

from mlx_patches.reply_format import ReplyFormat


class EarlyLoad:
    """What is made beside the weights of one load. `form`: the reply format, `words`: its vocabulary as a Future."""

    def __init__(self, options: dict, form_of: Callable[[Any, int], ReplyFormat], words_of: Callable):
        self._options, self._form_of, self._words_of = options, form_of, words_of
        self._asked: tuple | None = None
        self._tokenizer: Future = Future()
        self.weights_read = threading.Event()
        self.form: ReplyFormat | None = None
        self.words: Future = Future()

    def begin(self, path: Path, load_tokenizer: Callable) -> None:
        """The first weights of this load are about to be read, from the folder `path`."""
        if self._asked is None:
            config = utils.load_config(path)
            try:
                utils._get_classes(config)
            except Exception:
                return  # a load that cannot succeed; mlx_lm says why
            self._asked = (path, self._options, config.get("eos_token_id"))
            width = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
            threading.Thread(target=self._run, args=(load_tokenizer, width), daemon=True).start()

    def _run(self, load_tokenizer: Callable, width: int | None) -> None:
        path, options, ends = self._asked
        try:
            self._tokenizer.set_result(tokenizer := load_tokenizer(path, options, eos_token_ids=ends))
        except BaseException as fault:  # a panic in a tokenizer's Rust is no Exception
            self._tokenizer.set_exception(fault)
            return
        if width is None or self.weights_read.is_set():
            return
        self.form = form = self._form_of(tokenizer, width)
        try:
            self.words.set_result(self._words_of(form))
        except BaseException as fault:
            self.words.set_exception(fault)
        form.scan_vocabulary()

    def tokenizer(self, *asked: Any) -> Any:
        """The tokenizer of (folder, options, end tokens), or None where it is not this one or could not be loaded."""
        made = self._asked == asked and self._tokenizer.exception() is None
        return self._tokenizer.result() if made else None


_now: EarlyLoad | None = None


def begin_at_weights(upstream: Callable) -> Callable:
    """Wrap mlx_lm's `load_model`."""
    load_tokenizer = utils.load_tokenizer

    def load_model(model_path, *given, **named):
        if _now is None:
            return upstream(model_path, *given, **named)
        _now.begin(model_path, load_tokenizer)
        try:
            return upstream(model_path, *given, **named)
        finally:
            _now.weights_read.set()

    return load_model


def hand_over(upstream: Callable) -> Callable:
    """Wrap mlx_lm's `load_tokenizer`."""

    def load_tokenizer(model_path, tokenizer_config_extra=None, eos_token_ids=None):
        made = _now and _now.tokenizer(model_path, tokenizer_config_extra, eos_token_ids)
        return made or upstream(model_path, tokenizer_config_extra, eos_token_ids)

    return load_tokenizer


class LoadsTokenizerEarly:
    """Mixin for ModelProvider, in front of those that make a reply format and read its vocabulary."""

    _early: EarlyLoad | None = None

    def _load(self, *model_key: Any) -> None:
        global _now
        _now = self._early = EarlyLoad(self._tokenizer_config, super().reply_format_of, super().words_of)
        try:
            super()._load(*model_key)
        finally:
            _now = None

    def reply_format_of(self, tokenizer: Any, width: int) -> ReplyFormat:
        form = self._early and self._early.form
        if form is not None and form.tokenizer is tokenizer and form.width == width:
            return form
        return super().reply_format_of(tokenizer, width)

    def words_of(self, form: ReplyFormat) -> Any:
        early, self._early = self._early, None
        return early.words.result() if early is not None and early.form is form else super().words_of(form)
