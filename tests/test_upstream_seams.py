"""The pin: another mlx-lm, or a changed seam, ends the process before anything is loaded, with one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest

from mlx_patches import seams

ROOT = Path(__file__).parent.parent


def start(path: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mlx_patched_server", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_installed_version_is_the_pinned_one():
    assert seams.check() is None
    assert mlx_lm.__version__ == seams.PIN
    assert seams.source_hash() == seams.SOURCE


def test_every_seam_has_the_fingerprint_of_the_pinned_version():
    assert seams.changed_seam() is None


def test_every_seam_belongs_to_a_room():
    for seam in seams.SEAMS:
        assert (ROOT / f"{seam.room}.py").exists() or (ROOT / "mlx_patches" / f"{seam.room}.py").exists(), seam


def test_another_version_is_refused(tmp_path):
    found = tmp_path / "mlx_lm-0.31.3.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-lm\nVersion: 0.31.3\n")
    done = start(str(tmp_path), "--model", "nowhere")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "mlx-lm 0.31.3 is installed, and this server is written for 0.32.2: pip install mlx-lm==0.32.2\n"
    )


@pytest.fixture
def copied(tmp_path):
    """mlx_lm's modules in a folder of their own, to be changed: `copied(old, new, file)` gives the folder."""

    def change(old: str, new: str, file: str = "server.py") -> str:
        source = Path(mlx_lm.__file__).parent
        target = tmp_path / "mlx_lm"
        target.mkdir()
        for entry in source.iterdir():
            if entry.name != file and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
        text = (source / file).read_text()
        assert text.count(old) >= 1
        (target / file).write_text(text.replace(old, new, 1))
        return str(tmp_path)

    return change


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        (
            "initial_state = tokenizer.response_initial_state or initial_state",
            "initial_state = initial_state",
            "the source of mlx_lm.server.ResponseGenerator._tokenize is not that of mlx-lm 0.32.2; "
            "reinstall mlx-lm==0.32.2\n",
        ),
        (
            "def _make_sampler(args, tokenizer):",
            "def _make_sampler(args, tokenizer, more=None):",
            "the signature of mlx_lm.server._make_sampler is not that of mlx-lm 0.32.2; reinstall mlx-lm==0.32.2\n",
        ),
        (
            "def _make_logits_processors(args):",
            "def _make_processors(args):",
            "mlx_lm.server._make_logits_processors is missing from the installed mlx-lm 0.32.2; "
            "reinstall mlx-lm==0.32.2\n",
        ),
    ],
    ids=["source", "signature", "missing"],
)
def test_a_changed_seam_is_refused(copied, old, new, sentence):
    done = start(copied(old, new), "--model", "nowhere")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


def test_a_change_that_is_at_no_seam_does_not_matter(copied):
    done = start(copied("import argparse\n", "import argparse  # as ever\n"), "--model", "/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "cannot load /nowhere: there is no such folder"
