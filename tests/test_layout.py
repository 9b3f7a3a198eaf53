"""The house stands: a card on every patch, a place on the map and a page for every room, small files, clean lint."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [ROOT / "mlx_patched_server.py", ROOT / "localServerCommon.py", *sorted((ROOT / "mlx_patches").glob("*.py"))]
ROOMS = [path for path in PRODUCT if path.parent.name == "mlx_patches" and path.name != "__init__.py"]
PLAIN = {
    "argument_values",
    "demo_model",
    "early_calls",
    "gemma_grammars",
    "grammar_rules",
    "harmony_headers",
    "json_schemas",
    "mistral_grammars",
    "reply_format",
    "schema_keywords",
    "seams",
    "tag_dialects",
    "tag_grammars",
    "token_masks",
    "tool_dialects",
    "tool_formats",
    "tool_grammars",
    "tool_rules",
}
"""Rooms that stand in for nothing of mlx_lm's: no card."""
PURE = [
    "access",
    "argument_values",
    "call_reader",
    "chat_messages",
    "chat_wire",
    "context_window",
    "early_calls",
    "gemma_grammars",
    "grammar_rules",
    "harmony_headers",
    "image_urls",
    "json_schemas",
    "mistral_grammars",
    "reply_events",
    "reply_format",
    "reply_limits",
    "request_bodies",
    "schema_keywords",
    "seams",
    "stop_strings",
    "tag_dialects",
    "tag_grammars",
    "tool_arguments",
    "tool_dialects",
    "tool_formats",
    "tool_grammars",
    "tool_rules",
]
TOP = {"pyproject.toml", "mlx_patched_server.py", "localServerCommon.py", "mlx_patches", "tests", "docs", "README.md"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_nothing_else_stands_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split("/")[0] for name in tracked if not name.startswith(".")} == TOP


@pytest.mark.parametrize("room", [path for path in ROOMS if path.stem not in PLAIN], ids=lambda path: path.stem)
def test_every_patch_opens_with_a_card(room):
    text = ast.get_docstring(ast.parse(room.read_text()))
    for line in ("Replaces", "Why", "Upstream", "Delete when", "Test"):
        assert re.search(rf"^{line} +\S", text, re.MULTILINE), f"{room.name}: the card has no {line!r}"
    for test in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / test).exists(), f"{room.name} names {test}, which does not exist"


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.stem)
def test_every_room_is_on_the_map_and_has_a_page(room):
    assert re.search(rf"^{room.name} ", (ROOT / "mlx_patches" / "__init__.py").read_text(), re.MULTILINE)
    assert (ROOT / "docs" / f"{room.stem}.md").exists()


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_files_are_small(path):
    assert len(path.read_text().splitlines()) <= (200 if path.name == "mlx_patched_server.py" else 400)


def test_the_imports_go_one_way():
    for path in PRODUCT:
        assert "mlx_patched_server" not in imports(path)
    assert not any(name.startswith("mlx") for name in imports(ROOT / "localServerCommon.py"))
    for stem in ("seams", "token_masks"):
        assert not any(name.startswith("mlx_patches") for name in imports(ROOT / "mlx_patches" / f"{stem}.py"))


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_content(arguments):
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pure_parts_are_typed():
    pure = [f"mlx_patches/{stem}.py" for stem in PURE]
    done = subprocess.run([sys.executable, "-m", "mypy", *pure], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
