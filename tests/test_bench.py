"""Each section of the benchmark runs, in its short form: figures are for quiet machines, see docs/performance.md."""

import subprocess
import sys

import pytest

from tests.bench.__main__ import PAGE, SECTIONS
from tests.conftest import ROOT, server_env


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs(section):
    command = [sys.executable, "-m", "tests.bench", "--short", section]
    done = subprocess.run(command, cwd=ROOT, env=server_env(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    without_peer = section == "peer" and "llama-server" in done.stdout
    assert (len(lines) > 2 and all(line.endswith("|") for line in lines)) or without_peer, done.stdout


def test_the_page_has_a_place_for_each_section():
    page = PAGE.read_text()
    assert all(f"<!-- {name} -->" in page and f"<!-- end of {name} -->" in page for name in SECTIONS)
