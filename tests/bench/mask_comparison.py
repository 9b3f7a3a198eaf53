"""The peers' side of masks.py: what is known of a schema under any engine, and the table of all engines.

The engines get the same schemas and replies. An engine may take a schema and not hold to all of it, so the instances
that are invalid and were taken are counted too; and each takes other schemas, so the last columns are of the valid
instances that all took.
"""

import base64
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_patches import demo_model
from mlx_patches.reply_format import ReplyFormat
from tests.bench import mask_peers
from tests.vocabularies import Vocabulary


class Reply(NamedTuple):
    """An instance as token ids, the end token last; `valid`: what the sample says of it."""

    tokens: list[int]
    valid: bool


@dataclass
class Followed:
    """What came of a schema: ns to compile it, and of each reply whether it was taken and the ns of its masks."""

    compile: int = 0
    taken: list[bool] = field(default_factory=list)
    times: list[list[int]] = field(default_factory=list)


Found = list[Followed | None]  # a schema each; None where the engine does not take it


def figures(times: list[int], unit: int, digits: int, *percentiles: int) -> str:
    """`times`, in ns, as cells in units of `unit` ns: each percentile and the maximum; the mean before, where 0."""
    if not times:
        return " | ".join("-" for _ in (*percentiles, 100))
    values = [np.percentile(times, p) if p else np.mean(times) for p in (*percentiles, 100)]
    return " | ".join(f"{value / unit:,.{digits}f}" for value in values)


def masks_of(found: Found, given: list[list[Reply]], wanted: Iterable[tuple[int, int]] | None = None) -> list[int]:
    """The ns of all masks of valid replies; of those of `wanted`, (schema, reply), where it is given."""
    pairs = replies_of(found, given) if wanted is None else wanted
    return [time for n, k in pairs if (one := found[n]) for time in one.times[k]]


def taken_of(found: Found, given: list[list[Reply]], valid: bool = True) -> list[tuple[int, int]]:
    """Those of `replies_of` that the engine took."""
    return [(n, k) for n, k in replies_of(found, given, valid) if (one := found[n]) and one.taken[k]]


def replies_of(found: Found, given: list[list[Reply]], valid: bool = True) -> list[tuple[int, int]]:
    """Which replies there are, as (schema, reply), under the schemas that the engine took."""
    return [(n, k) for n, one in enumerate(found) if one for k, reply in enumerate(given[n]) if reply.valid == valid]


def peer_results(
    name: str, sample: list[dict], given: list[list[Reply]], words: Vocabulary, seconds: float
) -> Found | str:
    """What came of each of `sample`, its replies `given`, under the peer `name`; why there is nothing, as a string.

    `seconds`: the longest that the peer may take for a schema and its replies.
    """
    python = os.environ.get("MASK_PEERS_PYTHON") or str(demo_model.cache_folder() / "peers" / "bin" / "python")
    if not Path(python).exists():
        return "not installed"
    form = ReplyFormat(words.tokenizer, words.width)
    special = {*words.tokenizer.all_special_ids, words.end}
    tokens = [b"" if token in special else form.token_bytes(token) for token in range(words.width)]
    asked = {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "end": words.end,
        "seconds": seconds,
        "cases": [
            {"schema": case["schema"], "replies": [reply.tokens for reply in ones]}
            for case, ones in zip(sample, given, strict=True)
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        # Without it xgrammar's binding tries to build an extension for torch, which masks in numpy's arrays do not use.
        env = os.environ | {"TVM_FFI_DISABLE_TORCH_C_DLPACK": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run([python, mask_peers.__file__, name, file.name], capture_output=True, text=True, env=env)
    if done.returncode == mask_peers.NOT_INSTALLED:
        return "not installed"
    if done.returncode:
        return f"failed: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}"
    return [one and Followed(**one) for one in json.loads(done.stdout)]


def peer_table(engines: dict[str, Found | str], given: list[list[Reply]], size: str) -> Iterator[str]:
    yield (
        f"| peers, {size} | schemas taken | valid instances refused | invalid ones taken "
        "| compile, ms: median | p99 | max | mask, µs: mean | p50 | p99 | max | all took, µs: mean | p50 | p99 | max |"
    )
    yield "| --- " * 15 + "|"
    there = [found for found in engines.values() if not isinstance(found, str)]
    common = sorted(set.intersection(*(set(taken_of(found, given)) for found in there)))
    for name, found in engines.items():
        if isinstance(found, str):
            yield f"| {name} | {found} |" + " |" * 13
            continue
        valid, invalid = replies_of(found, given), replies_of(found, given, False)
        refused, passed = len(valid) - len(taken_of(found, given)), len(taken_of(found, given, False))
        yield (
            f"| {name} | {sum(map(bool, found))} of {len(found)} | {refused} of {len(valid)} "
            f"| {passed} of {len(invalid)} "
            f"| {figures([one.compile for one in found if one], 10**6, 1, 50, 99)} "
            f"| {figures(masks_of(found, given), 1000, 1, 0, 50, 99)} "
            f"| {figures(masks_of(found, given, common), 1000, 1, 0, 50, 99)} |"
        )
    masks = len(masks_of(there[0], given, common))
    yield f"\nAll took {len(common)} valid instances of {len({n for n, _ in common})} schemas: {masks:,} masks."
