"""The tokenizer beside the weights: who gets the one in the making, and that a start does not change what is loaded.

A load whose weights take long is a process of its own, whose reading of weights waits (tests/bench/processes.py).
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm import utils

from mlx_patches import early_tokenizer
from mlx_patches.early_tokenizer import EarlyLoad, LoadsTokenizerEarly, begin_at_weights, hand_over
from tests.bench.processes import start
from tests.client import both, chat
from tests.tiny_models import model_folder

OPTIONS = {"trust_remote_code": False}


class Form(SimpleNamespace):
    def scan_vocabulary(self):
        self.scanned = True


class Provider:
    """What stands behind the mixin: `load` runs mlx_lm's own, with these two of its functions wrapped."""

    _tokenizer_config = OPTIONS

    def _load(self, path):
        self.model, self.tokenizer = utils.load(path, tokenizer_config=self._tokenizer_config)

    def reply_format_of(self, tokenizer, width):
        return Form(tokenizer=tokenizer, width=width)

    def words_of(self, form):
        return "words", form


class Early(LoadsTokenizerEarly, Provider):
    pass


@pytest.fixture
def loading(monkeypatch):
    """mlx_lm's loader with the two wrapped; `tokenizer` and `weights` hold each up; `calls` are those that came."""
    seen = SimpleNamespace(calls=[], tokenizer=threading.Event(), weights=threading.Event())
    seen.tokenizer.set(), seen.weights.set()
    load_model, load_tokenizer = utils.load_model, utils.load_tokenizer

    def slow_tokenizer(path, options=None, eos_token_ids=None):
        seen.calls.append((threading.current_thread() is threading.main_thread(), options))
        assert seen.tokenizer.wait(20)
        if getattr(seen, "fault", None) and not seen.calls[-1][0]:
            raise seen.fault
        return load_tokenizer(path, options, eos_token_ids)

    def slow_weights(path, *given, **named):
        loaded = load_model(path, *given, **named)
        assert seen.weights.wait(20)
        return loaded

    monkeypatch.setattr(utils, "load_tokenizer", slow_tokenizer)
    monkeypatch.setattr(utils, "load_model", begin_at_weights(slow_weights))
    monkeypatch.setattr(utils, "load_tokenizer", hand_over(slow_tokenizer))
    return seen


def test_the_tokenizer_is_made_once_and_beside(loading):
    provider = Early()
    provider._load(str(model_folder("llama")))
    assert loading.calls == [(False, OPTIONS)]
    assert provider.tokenizer.encode("a") and early_tokenizer._now is None


def test_its_vocabulary_is_read_while_the_weights_take_long(loading):
    loading.weights.clear()
    provider = Early()
    load = threading.Thread(target=provider._load, args=(str(model_folder("llama")),))
    load.start()
    try:
        words, form = provider_words(provider)
    finally:
        loading.weights.set()
        load.join(20)
    assert words == "words" and form.scanned
    assert provider.reply_format_of(provider.tokenizer, form.width) is form
    assert provider.reply_format_of(provider.tokenizer, form.width + 1) is not form
    assert provider.words_of(form)[1] is form


def provider_words(provider):
    while (early := getattr(provider, "_early", None)) is None:
        pass
    return early.words.result(20)


def test_it_is_not_read_once_the_weights_are_there(loading):
    loading.tokenizer.clear()
    provider = Early()
    load = threading.Thread(target=provider._load, args=(str(model_folder("llama")),))
    load.start()
    while getattr(provider, "_early", None) is None or not provider._early.weights_read.wait(0.01):
        pass
    loading.tokenizer.set()
    load.join(20)
    assert provider._early.form is None
    assert provider.words_of(Form(width=3))[0] == "words"


def test_what_fails_beside_is_done_as_ever(loading):
    loading.fault = RuntimeError("beside")
    provider = Early()
    provider._load(str(model_folder("llama")))
    assert [main for main, _ in loading.calls] == [False, True] and provider.tokenizer.encode("a")


def test_another_tokenizer_is_loaded_as_ever(loading):
    folder = model_folder("llama")
    load = EarlyLoad({}, Provider().reply_format_of, Provider().words_of)
    load.begin(folder, utils.load_tokenizer)
    load.begin(Path("/another"), utils.load_tokenizer)  # a draft model's
    ends = utils.load_config(folder).get("eos_token_id")
    assert load.tokenizer(folder, {}, ends) is load.tokenizer(folder, {}, ends) is not None
    for asked in ((folder, None, ends), (folder, {}, [77]), (model_folder("qwen3"), {}, ends)):
        assert load.tokenizer(*asked) is None


def test_without_a_provider_mlx_lm_loads_as_ever(loading):
    utils.load(str(model_folder("llama")))
    assert loading.calls == [(True, None)]


@pytest.mark.parametrize("draft", [False, True])
def test_a_start_loads_what_it_loaded(serve, draft):
    main, other = model_folder("scripted"), model_folder("scripted", wrong_every=3)
    flags = ("--draft-model", other, "--prompt-cache-size", 0) if draft else ()
    server = serve(main, *flags)
    assert both(server, "One two three.").content == "One two three."
    form = {"response_format": {"type": "json_object"}}
    assert chat(server, '{"a": 1}', **form).content == '{"a": 1}'


def test_a_slow_load_is_ready_before_mlx_lms():
    """Weights that take 3 s: the tokenizer and its vocabulary are there when they are. Only the order is held to."""
    folder = model_folder("llama")
    ours = start("ours", folder, weights_seconds=3)
    assert ours.ready is not None and ours.ready > 3 and ours.second - ours.first < 3
