"""An agent's conversation pays for its new tokens only, and what is stored is what its key says.

Replaces   server.LRUPromptCache (run() builds ours), ResponseGenerator._tokenize (derived), server.stream_generate
Why        mlx_lm 0.32.2 dies of a prompt that is wholly cached; keys of replies with a draft model, or cancelled while
           the prompt is read, are longer than what is cached; the byte limit is forgotten on the single path and counts
           less than is held; turns that end in a tool result get no point that hybrid models could start from, and
           the single path none at all; the search for a stored prompt takes time quadratic in its length
Upstream   models/cache.py LRUPromptCache, PromptTrie.search; server.py _tokenize, _serve_single, run
Delete when mlx_lm stores what is true and its own, leaves a token to compute, and segments every turn
Test       tests/test_prompt_cache.py

A stored prompt is a key (token ids) and the model's caches after reading exactly these; `insert_cache` makes that true
or stores nothing. A prompt can start from a stored one that is its prefix, or that can be cut back to a prefix. Which
one is taken is one rule: the longest usable prefix that leaves at least one token, for a reply needs the logits of one.
Stored buffers belong to their entry alone and hold no more than is used, so bytes counted are bytes held.
Recurrent caches cannot be cut back, nor windows that are full: there a prompt is stored at points on the way too, where
the next turn's prompt will still agree with it. Where that is, a rendering of the template tells.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import server
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, KVCache, can_trim_prompt_cache, make_prompt_cache

SHOWN = 8  # tokens on each side of the place where a prompt parts from a stored one
READING = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")  # of stream_generate's arguments
SLACK = 1 << 20  # bytes; mx.contiguous may keep a buffer that is up to 16 KiB larger: from here on, under 2 %


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def byte_limit(asked: int | None, device: dict) -> int:
    """Bytes that stored prompts may hold: `--prompt-cache-bytes`, else a quarter of the recommended working set."""
    known = device.get("max_recommended_working_set_size")
    return asked if asked is not None else known // 4 if known else 1 << 63


def parting(prompt: list[int], shared: int, key: list[int], text: Any) -> str:
    """Where `prompt` leaves the stored `key`; `text` makes a string of token ids."""

    def around(tokens: Iterable[int]) -> str:
        return repr(text([token for token in tokens if token >= 0]))  # an image's key is a negative id

    if shared == len(key):
        return f"the prompt's first {shared} of {len(prompt)} tokens are a stored prompt"
    before, now, stored = prompt[max(0, shared - SHOWN) : shared], prompt[shared:], key[shared:]
    return (
        f"the prompt parts from the nearest stored one at token {shared} of {len(prompt)}: "
        f"after {around(before)} comes {around(now[:SHOWN])}, stored is {around(stored[:SHOWN])}"
    )


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, those in lists too."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def is_plain(caches: Iterable[Any]) -> bool:
    """Whether any number of tokens can be taken back from all of them at any time."""
    return all(type(leaf) is KVCache for leaf in leaves(caches))


def lengths(caches: Iterable[Any]) -> set[int]:
    """How many tokens the caches say that they have read: one number where they agree, none where none can tell."""
    return {leaf.offset for leaf in leaves(caches) if hasattr(leaf, "offset") and not leaf.empty()}


def held(leaf: Any) -> int:
    """Positions of the buffers that are used; a full window uses all."""
    return leaf.offset - getattr(leaf, "start_position", 0)


def cut(caches: list[Any], length: int) -> bool:
    """Take tokens back from the end until `length` are left. False, and the caches are of no use, where that fails."""
    if lengths(caches) == {length}:
        return True
    full = [leaf for leaf in leaves(caches) if not leaf.empty()]
    if not full or not all(leaf.is_trimmable() for leaf in full):
        return False
    for leaf in full:
        leaf.trim(leaf.offset - length)
        shrink(leaf)  # ConcatenateKVCache would append after what was taken back
    # A chunked cache drops what is before its chunk: taken back into an older one, it lacks the beginning.
    torn = any(getattr(leaf, "start_position", 0) and held(leaf) < leaf.chunk_size for leaf in full)
    return lengths(caches) == {length} and not torn


def shrink(leaf: Any) -> None:
    """Leave out the buffers' unused ends (a KVCache grows in steps of 256)."""
    if getattr(leaf, "keys", None) is not None:
        end = held(leaf)
        leaf.keys, leaf.values = tree_map(lambda x: x[..., :end, :], (leaf.keys, leaf.values))


def own(value: Any) -> Any:
    """An array with a buffer of its own, of its own size; anything else as it is."""
    if not isinstance(value, mx.array):
        return value
    large = value.nbytes >= SLACK or value.ndim == 0
    return mx.contiguous(value) if large else mx.take(value, mx.arange(value.shape[0]), axis=0)


def make_own(caches: list[Any]) -> None:
    """Copy what is used out of the buffers of a batch, or of steps of 256, so that these can be freed."""
    for leaf in leaves(caches):
        shrink(leaf)
        vars(leaf).update({name: tree_map(own, value) for name, value in vars(leaf).items()})
    mx.eval([vars(leaf) for leaf in leaves(caches)])


class PromptCache(server.LRUPromptCache):
    """Prompts with the caches that reading them made. Belongs to the generation thread."""

    def __init__(self, flags: Any):
        super().__init__(flags.prompt_cache_size, byte_limit(flags.prompt_cache_bytes, mx.device_info()))
        self._total = flags.prompt_cache_bytes
        self._asked: list[int] = []

    def nearest(self, model: Any, tokens: list[int]) -> list[tuple[int, list[int]]]:
        """(how many tokens it shares, key) of each stored prompt, the nearest first, of equals the shortest."""
        keys = [key for lru in self._lru._lrus.values() for name, key in lru if name == model]
        return sorted(((common_prefix(key, tokens), key) for key in keys), key=lambda it: (-it[0], len(it[1])))

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """(a copy of the caches to start from, or None; the tokens that are left to read, at least one)."""
        self._asked = list(tokens)
        for shared, key in self.nearest(model, tokens[:-1]):
            if shared == 0:
                break
            stored = self._trie.get(model, key).prompt_cache
            if shared < len(key) and not can_trim_prompt_cache(stored):
                continue
            found = copy.deepcopy(stored)
            if shared == len(key) or cut(found, shared):
                if self._total is not None:
                    # As mlx_lm does for a batch: what is handed out counts too.
                    self.trim_to(n_bytes=self._total - sum(cache.nbytes for cache in found))
                return found, tokens[shared:]
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Store what key and caches agree on, if that is sure and fits. `prompt_cache` is the entry's from then on."""
        known = lengths(prompt_cache)
        length = min(known | {len(tokens)})
        # Recurrent caches do not tell how much they have read. A key without a token of the reply is that of a request
        # on the single path that ended while its prompt was read.
        sure = cut(prompt_cache, length) if known else tokens != self._asked
        if not sure or length == 0 or self.max_size == 0:
            return
        make_own(prompt_cache)
        if sum(cache.nbytes for cache in prompt_cache) <= self.max_bytes:
            super().insert_cache(model, tokens[:length], prompt_cache, cache_type=cache_type)


class Points(NamedTuple):
    """Where to store a prompt that is read on the single path: (tokens, kind) of each, in order; what stores them."""

    prompt: list[int]
    ends: list[tuple[int, str]]
    store: Callable[..., None]


class SegmentsPrompts:
    """Mixin for ResponseGenerator: points to start from at the end of every turn, not of the user's only."""

    def _tokenize(self, tokenizer, request, args):
        prompt, segments, kinds, initial_state, vision = super()._tokenize(tokenizer, request, args)
        provider = self.model_provider
        args.points = None
        if request.request_type == "chat" and vision is None and not is_plain(make_prompt_cache(provider.model)):
            if request.messages[-1]["role"] != "user" and tokenizer.has_chat_template:
                segments, kinds = self._segments(tokenizer, request, args, prompt)
            if not self._is_batchable(args):
                ends = [*list(accumulate(map(len, segments)))[:-1], len(prompt) - 1]
                store = partial(self.prompt_cache.insert_cache, provider.model_key)
                args.points = Points(prompt, list(zip(ends, kinds, strict=False)), store)
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            for shared, key in self.prompt_cache.nearest(provider.model_key, prompt)[:1]:
                logging.debug("%s", parting(prompt, shared, key, tokenizer.decode))
        return prompt, segments, kinds, initial_state, vision

    def _segments(self, tokenizer, request, args, prompt) -> tuple[list[list[int]], list[str]]:
        """(segments, kinds) of a turn that is not the user's; mlx_lm stores a point at an end for each kind, in order.

        The prompt ends by opening the reply, which the next turn's prompt may write in another way, most likely without
        an opened thinking phase: there is a point before the opening, and one before the thinking.
        """
        kwargs = {**self.model_provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        try:
            turn = tokenizer.apply_chat_template(
                request.messages, tools=request.tools, tokenize=True, **{**kwargs, "add_generation_prompt": False}
            )
        except Exception as fault:
            logging.debug("no end of the turn to store: %s", fault)
            turn = []
        end = common_prefix(turn, prompt)
        if not 0 < end < len(prompt):
            return [prompt], ["assistant"]
        thinking = tokenizer.rfind_think_start(prompt, start=end) if tokenizer.has_thinking else -1
        ends = [0, end, *([thinking] if thinking > end else []), len(prompt)]
        return [prompt[a:b] for a, b in pairwise(ends)], ["user", "assistant"]


def store_points(upstream):
    """On the single path too, a prompt is stored at the ends of its segments, as mlx_lm does for a batch."""

    def stream_generate(*, model, stream, prompt, prompt_cache, logits_processors, prompt_progress_callback, **named):
        points = logits_processors.args.points
        reading = {name: named[name] for name in READING}
        begun, total = len(points.prompt) - len(prompt) if points else 0, len(prompt)
        read = begun
        for end, kind in points.ends if points else ():
            if end <= read:
                continue
            before = read - begun
            steps = generate_step(
                mx.array(points.prompt[read:end]),
                model,
                stream,
                max_tokens=0,  # reads all of it, and no token of a reply
                prompt_cache=prompt_cache,
                prompt_progress_callback=lambda done, _, before=before: prompt_progress_callback(before + done, total),
                **reading,
            )
            deque(steps, maxlen=0)
            read = end
            points.store(points.prompt[:end], copy.deepcopy(prompt_cache), cache_type=kind)
        yield from upstream(
            model=model,
            stream=stream,
            prompt=prompt[read - begun :],
            prompt_cache=prompt_cache,
            logits_processors=logits_processors,
            prompt_progress_callback=lambda done, _: prompt_progress_callback(read - begun + done, total),
            **named,
        )

    return stream_generate
