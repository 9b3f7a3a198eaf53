"""What the documentation says is what the code says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_patches import seams
from tests.client import post

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_seams_is_the_table():
    assert seams.table() in (ROOT / "docs" / "seams.md").read_text()


def test_every_flag_of_ours_is_documented():
    done = subprocess.run(
        [sys.executable, "-m", "mlx_patched_server", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours = done.stdout.partition("\nmlx-patched-server:")[2]
    flags = re.findall(r"^  (--[a-z-]+)", ours, re.MULTILINE)
    assert flags
    pages = "".join(page.read_text() for page in PAGES)
    assert [flag for flag in flags if f"`{flag}" not in pages] == []


def test_upstream_flags_are_still_there():
    ours, theirs = (
        subprocess.run([sys.executable, "-m", *module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
        for module in (["mlx_patched_server"], ["mlx_lm", "server"])
    )
    flags = set(re.findall(r"--[a-z-]+", theirs.stdout))
    assert len(flags) > 20 and flags <= set(re.findall(r"--[a-z-]+", ours.stdout))


def test_the_readme_request_gets_the_readme_reply(serve):
    page = (ROOT / "README.md").read_text()
    body = json.loads(re.search(r"curl .* -d '(.*?)'$", page, re.MULTILINE | re.DOTALL)[1])
    shown = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    reply = post(serve("demo"), "/v1/chat/completions", body, timeout=120)
    assert json.loads(reply.content) == json.loads(shown["choices"][0]["message"]["content"])
    assert json.loads(reply.content) == {"name": "Ada Lovelace", "age": 36}
    assert reply.finish_reason == shown["choices"][0]["finish_reason"] == "stop"


def test_ci_runs_the_readme_command():
    commands = re.findall(r"^    (.*-m pytest)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 1 and "-m venv" in commands[0] and "[test]" in commands[0]
