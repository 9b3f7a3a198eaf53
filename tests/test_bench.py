"""The benchmark runs; what it measures means nothing on a machine that does other things."""

import subprocess
import sys
from pathlib import Path


def test_the_benchmark_runs(tiny):
    command = [sys.executable, "-m", "tests.bench", "--model", str(tiny("llama")), "--rounds", "1", "--tokens", "20"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") == 5
