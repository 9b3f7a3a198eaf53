"""A draft model is accepted only where it cannot change what the main model says.

Replaces   ModelProvider._load (derived)
Why        speculative decoding takes rejected guesses back from the caches. Recurrent caches cannot: every request
           fails. Windows that are full keep them: the text is silently wrong. Models whose layers share caches raise
Upstream   generate.py speculative_generate_step; models/cache.py RotatingKVCache.is_trimmable
Delete when mlx_lm refuses such drafts itself
Test       tests/test_draft_models.py

The caches of main model and draft must all be plain, one for each layer: mlx_lm parts their common list by the number
of layers. What caches a model makes stands in its class, which is built from the configuration alone (mlx makes random
weights only when they are looked at): the answer comes before the port opens, and before a load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache

from localServerCommon import Refused
from mlx_patches import demo_model
from mlx_patches.model_names import DEMO
from mlx_patches.prompt_cache import is_plain, leaves


def objection(caches: Iterable[Any], layers: int) -> str | None:
    """Why these caches rule speculative decoding out, or None."""
    caches = list(caches)
    if not is_plain(caches):
        others = dict.fromkeys(type(leaf).__name__ for leaf in leaves(caches) if not is_plain([leaf]))
        return f"{', '.join(others)} cannot take rejected guesses back (only KVCache can)"
    if len(caches) != layers:
        return f"its {layers} layers share {len(caches)} caches of class KVCache (each needs its own)"
    return None


def skeleton(name: str) -> Any:
    """The model of this name with random weights that are never made. Raises what loading its configuration raises."""
    path = demo_model.folder() if name == DEMO else utils._download(name, allow_patterns=["*.json"])
    config = utils.load_config(path)
    if "model_file" in config:
        raise ValueError("its class is in a file of its own, which only a load may run")
    model_class, args_class = utils._get_classes(config)
    return model_class(args_class.from_dict(config))


def refusal(model: str | None, draft: str | None) -> str | None:
    """One sentence on why `draft` cannot draft for `model`, or None; None too for what cannot be looked at unloaded."""
    if model is None or draft is None:
        return None
    for role, name in (("main", model), ("draft", draft)):
        try:
            found = skeleton(name)
            reason = objection(make_prompt_cache(found), len(found.layers))
        except Exception:
            continue  # loading it says why, in its own words
        if reason is not None:
            return f"draft model {draft} cannot be used with {model}: the {role} model's caches: {reason}"
    return None


def draft_complaint(flags: Any) -> str | None:
    """Why the server must not start with this `--draft-model`, or None."""
    return refusal(flags.model, flags.draft_model)


class RefusesDrafts:
    """Mixin for ModelProvider: a draft that a request names (--load-on-request) is refused before anything is loaded.

    A model whose class cannot be looked at before (a file of its own) is looked at loaded.
    """

    def _load(self, model_path, adapter_path=None, draft_model_path=None):
        if reason := refusal(model_path, draft_model_path):
            raise Refused(reason, param="draft_model")
        super()._load(model_path, adapter_path, draft_model_path)
        models = () if self.draft_model is None else (self.model, self.draft_model)
        if reason := next(filter(None, (objection(make_prompt_cache(it), len(it.layers)) for it in models)), None):
            self.reset()
            raise Refused(f"draft model {draft_model_path} cannot be used: {reason}", param="draft_model")
