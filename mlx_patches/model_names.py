"""One process serves one model, under the names its user knows.

Replaces   ModelProvider.load_default, APIHandler.handle_models_request
Why        mlx_lm 0.32.2 throws the loaded model out and asks a hub for whatever name a request brings; its model list
           needs a Hugging Face cache folder and does not name a model served from one
Upstream   server.py ModelProvider.load, APIHandler.handle_models_request
Delete when mlx_lm's server can be told to serve one model only
Test       tests/test_model_names.py

The names of the served model are the one it was started with, its folder's name, its path, and `default_model`.
"""

import threading
from pathlib import Path
from typing import Any

from localServerCommon import Refused
from mlx_patches import demo_model

DEMO = "demo"
NOT_FOUND = "model_not_found"
FLAGS = (
    ("--any-model-name", {"action": "store_true", "help": "Serve the loaded model whatever name a request uses"}),
    (
        "--load-on-request",
        {"action": "store_true", "help": "Load the model that a request names, as mlx_lm.server does"},
    ),
)


def served_names(started_with: str | None) -> list[str]:
    """The names that a client is told of, the one the server was started with first."""
    if started_with is None:
        return []
    return list(dict.fromkeys([started_with, Path(started_with).name, "default_model"]))


def name_to_load(asked: str, flags: Any) -> str:
    """What mlx_lm should load for a request that names `asked`. Raises Refused (404, `model_not_found`)."""
    names = served_names(flags.model)
    if names and (asked in names or flags.any_model_name or Path(asked).resolve() == Path(flags.model).resolve()):
        return "default_model"
    if flags.load_on_request or not names:
        return asked
    raise Refused(
        f"model {asked!r} is not served here; served: {', '.join(names)}",
        param="model",
        code=NOT_FOUND,
        status=404,
    )


def choose(model: Any, flags: Any) -> None:
    """Turn the names in `model` (mlx_lm's ModelDescription) into what it should load. Raises Refused (404)."""
    model.model = name_to_load(model.model, flags)
    if not flags.load_on_request and model.draft not in ("default_model", flags.draft_model):
        raise Refused(
            f"draft_model {model.draft!r} is not served here", param="draft_model", code=NOT_FOUND, status=404
        )


def model_list(flags: Any, created: int, wanted: str | None = None) -> dict:
    """The body of /v1/models, or of /v1/models/{wanted}. Raises Refused (404)."""
    names = served_names(flags.model)
    if wanted is not None:
        name_to_load(wanted, flags)
        return {"id": wanted, "object": "model", "created": created, "owned_by": "mlx-patched-server"}
    data = [model_list(flags, created, name) for name in names[:1]]
    return {"object": "list", "data": data}


class ServesOneModel:
    """Mixin for ModelProvider. `settled` is set when the start's load is over; `load_error` says how it failed."""

    def __init__(self, cli_args: Any):
        self.settled = threading.Event()
        self.load_error: BaseException | None = None
        super().__init__(cli_args)

    def load_default(self) -> None:
        try:
            if self.cli_args.model == DEMO:
                self._model_map["default_model"] = str(demo_model.folder())
            super().load_default()
        except BaseException as fault:  # a panic in a tokenizer's Rust is no Exception
            # The launcher says so in one line; mlx_lm's loop would log a traceback of anything but this.
            self.load_error = fault
            raise SystemExit from fault
        finally:
            self.settled.set()
