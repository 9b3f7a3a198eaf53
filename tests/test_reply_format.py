"""How replies are read: markers by their tokens, tokens as bytes, and where a prompt leaves the reply to begin.

TokenSplitter is held against a reading of the whole token list at once, over random markers (also such as overlap
themselves) and tokens that cut characters. The bytes of tokens are held against the tokenizers' own decoders: the
byte-level BPE of the tiny models, and a SentencePiece-style BPE with byte fallback that is made here.
"""

import itertools
import json

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.hf import from_tokenizer
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from mlx_patches.reply_format import (
    ANSWER,
    MARKER,
    REASONING,
    START,
    Part,
    ReplyFormat,
    TextSplitter,
    TokenSplitter,
    TokenState,
    output_width,
)
from tests.client import both, chat
from tests.tiny_models import CORPUS, STYLES

# TokenSplitter: small tokens of which some are parts of characters

BYTES = [b"a", b"<", b"think", b">", b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa6\x89", b"", "ü\n".encode()]
TOKENS = st.integers(0, len(BYTES) - 1)


def text_of(tokens):
    return b"".join(BYTES[t] for t in tokens).decode("utf-8", "replace")


def read_at_once(opening, closing, phase, tokens):
    """(reasoning, answer, tokens read as markers) of a whole reply."""
    tokens, markers = tuple(tokens), []
    if phase == START:
        phase = REASONING if opening and tokens[: len(opening)] == opening else ANSWER
        if phase == REASONING:
            tokens = tokens[len(opening) :]
            markers.append(opening)
    if phase == ANSWER:
        return "", text_of(tokens), markers
    for end in range(len(closing), len(tokens) + 1):
        if tokens[end - len(closing) : end] == closing:
            return text_of(tokens[: end - len(closing)]), text_of(tokens[end:]), [*markers, closing]
    return text_of(tokens), "", markers


def said(parts):
    """(kind, text) of the parts that are not markers."""
    return [part[:2] for part in parts if part.kind != MARKER]


def follow(splitter, tokens, state=None):
    """(pieces, states, markers completed) of tokens taken one by one."""
    states, pieces, markers = [splitter.first if state is None else state], [], 0
    for token in tokens:
        state, parts = splitter.split(states[-1], token)
        new = said(parts)
        states.append(state)
        pieces += new
        markers += len(parts) - len(new)
    return pieces, states, markers


def joined(pieces, kind):
    return "".join(text for k, text in pieces if k == kind)


MARKERS = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)


@st.composite
def replies(draw):
    """Markers, a phase, and tokens in which markers and their beginnings are frequent."""
    opening, closing = draw(MARKERS), draw(MARKERS)
    part = st.one_of(
        TOKENS.map(lambda t: (t,)),
        st.sampled_from([opening, closing]),
        st.sampled_from([opening, closing]).flatmap(lambda m: st.integers(1, len(m)).map(lambda n: m[:n])),
    )
    tokens = [t for p in draw(st.lists(part, max_size=8)) for t in p]
    return opening, closing, draw(st.sampled_from([START, REASONING, ANSWER])), tokens


@given(replies())
def test_pieces_are_what_a_reading_of_the_whole_reply_gives(reply):
    opening, closing, phase, tokens = reply
    splitter = TokenSplitter(opening, closing, BYTES.__getitem__, phase)
    pieces, states, markers = follow(splitter, tokens)
    pieces += said(splitter.flush(states[-1]))
    reasoning, answer, read = read_at_once(*reply)
    assert {kind for kind, _ in pieces} <= {REASONING, ANSWER}
    assert (joined(pieces, REASONING), joined(pieces, ANSWER), markers) == (reasoning, answer, len(read))


@given(replies(), st.data())
def test_going_back_to_an_old_state_forgets_what_came_after(reply, data):
    opening, closing, phase, tokens = reply
    splitter = TokenSplitter(opening, closing, BYTES.__getitem__, phase)
    _, states, _ = follow(splitter, tokens)
    at = data.draw(st.integers(0, len(tokens)))
    other = data.draw(st.lists(TOKENS, max_size=4))
    follow(splitter, other, states[at])
    pieces, again, _ = follow(splitter, tokens[at:], states[at])
    assert again == states[at:]
    whole = follow(splitter, tokens)[0]
    assert pieces == whole[len(whole) - len(pieces) :]


@given(replies())
def test_nothing_of_a_marker_or_a_character_is_shown_before_it_is_whole(reply):
    opening, closing, phase, tokens = reply
    splitter = TokenSplitter(opening, closing, BYTES.__getitem__, phase)
    for n in range(len(tokens) + 1):
        pieces, _, _ = follow(splitter, tokens[:n])
        shown = {kind: joined(pieces, kind) for kind in (REASONING, ANSWER)}
        final = dict(zip((REASONING, ANSWER), read_at_once(*reply)[:2], strict=True))
        assert all(final[kind].startswith(text) for kind, text in shown.items())


@pytest.mark.parametrize(
    "phase, tokens, reasoning, answer",
    [
        (START, [1, 2, 3, 0], "", "<think>a"),  # the marker, spelled in ordinary tokens
        (START, [10, 0, 11, 10, 11], "a", "[]"),  # in the answer a marker is text
        (START, [0, 10, 11], "", "a[]"),
        (REASONING, [10, 0, 11, 0], "[a", "a"),
        (ANSWER, [11, 10], "", "]["),
    ],
)
def test_markers_are_tokens_not_text(phase, tokens, reasoning, answer):
    spell = [*BYTES, b"[", b"]"].__getitem__
    splitter = TokenSplitter((10,), (11,), spell, phase)
    pieces, states, _ = follow(splitter, tokens)
    pieces += said(splitter.flush(states[-1]))
    assert (joined(pieces, REASONING), joined(pieces, ANSWER)) == (reasoning, answer)


def test_a_model_without_markers_only_answers():
    splitter = TokenSplitter((), (), BYTES.__getitem__, ANSWER)
    pieces, states, markers = follow(splitter, [0, 4, 5])
    assert (joined(pieces, ANSWER), markers, said(splitter.flush(states[-1]))) == ("aé", 0, [(ANSWER, "")])
    assert splitter.last(states[-1], "ignored") == (states[-1], [])


# The tokenizers


REPLACE, FALLBACK, FUSE, STRIP = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)


def spm_folder(folder, decoder):
    """A SentencePiece-style BPE as Llama 2's: "▁" for a space, one put before the text, bytes as <0xNN>."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *model["vocab"]]
    vocab = {name: n for n, name in enumerate(names)}
    merges = [tuple(m) for m in model["merges"]]
    tok = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(list(decoder))
    tok.add_special_tokens([AddedToken(t, special=True) for t in names[:3]])
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}))
    return folder


ODD = ("<a b>", "\n\n\n", "<é｜>")


@pytest.fixture(scope="module")
def forms(tiny, tmp_path_factory):
    def byte_level(**options):
        model, tokenizer = mlx_lm.load(str(tiny("llama", **options)))
        return ReplyFormat(tokenizer, output_width(model, tokenizer))

    def sentencepiece(*decoder):
        tokenizer = load_tokenizer(spm_folder(tmp_path_factory.mktemp("spm"), decoder))
        return ReplyFormat(tokenizer, len(tokenizer))

    return {
        "byte level": byte_level(style="think"),
        "odd names": byte_level(style="harmony", tokens=ODD, special=("<｜end▁of▁text｜>", "<ä｜>")),
        "padded": byte_level(padded=40),
        "sentencepiece": sentencepiece(REPLACE, FALLBACK, FUSE, STRIP),
        "no space before": sentencepiece(REPLACE, FALLBACK, FUSE),
        "another decoder": sentencepiece(FALLBACK, FUSE, REPLACE, STRIP),  # mlx_lm decodes it token list by token list
    }


FORMS = {
    "byte level": "BPEStreamingDetokenizer",
    "odd names": "BPEStreamingDetokenizer",
    "padded": "BPEStreamingDetokenizer",
    "sentencepiece": "SPMStreamingDetokenizer",
    "no space before": "SPMStreamingDetokenizer",
    "another decoder": "NaiveStreamingDetokenizer",
}


@pytest.mark.parametrize("name", FORMS)
def test_the_bytes_of_every_token_are_what_its_tokenizer_decodes(forms, name):
    form = forms[name]
    assert type(form.tokenizer.detokenizer).__name__ == FORMS[name]
    (anchor,) = form.tokenizer.encode("a", add_special_tokens=False)[-1:]
    decode = form.tokenizer._tokenizer.decode
    before = form.token_bytes(anchor)
    wrong = {}
    for token in range(form.named):
        # SentencePiece drops a space at the very start of a text: another token stands before.
        decoded = decode([anchor, token]).encode()
        if (before + form.token_bytes(token)).decode("utf-8", "replace").lstrip(" ").encode() != decoded.lstrip(b" "):
            wrong[token] = (form.tokenizer.convert_ids_to_tokens(token), form.token_bytes(token), decoded)
    assert not wrong


@pytest.mark.parametrize("name", FORMS)
def test_the_grammar_sees_the_same_bytes(forms, name):
    form = forms[name]
    grammar_side = from_tokenizer(form.tokenizer._tokenizer, n_vocab=form.width, eos_token=sorted(form.end_tokens))
    # Special tokens are in no grammar; the byte 0xff, which no text has, is llguidance's mark for them.
    tokens = [t for t in range(form.named) if not grammar_side.is_special_token(t) and form.token_bytes(t) != b"\xff"]
    assert len(tokens) > 500
    assert [form.token_bytes(t) for t in tokens] == [grammar_side.decode_bytes([t]) for t in tokens]


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_the_bytes_of_a_text_are_those_of_its_tokens(forms, name, data):
    form = forms[name]
    text = data.draw(st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=12))
    tokens = form.tokenizer.encode("a" + text, add_special_tokens=False)
    assert b"".join(map(form.token_bytes, tokens)).decode().removeprefix(" ") == "a" + text


def test_ids_without_a_name_have_no_bytes(forms):
    form = forms["padded"]
    assert form.width == form.named + 40
    assert {form.token_bytes(token) for token in range(form.named, form.width)} == {b""}


# Rows and widths


@pytest.mark.parametrize("name", ["padded", "odd names"])
@pytest.mark.parametrize("change", [0, 7, -30])
def test_rows_allow_the_end_or_everything_else_that_has_a_name(forms, name, change):
    form = forms[name]
    width = form.width + change
    rows = form.end_row(width), form.thinking_row(width)
    end, thinking = ({t for t, allowed in enumerate(row.tolist()) if allowed} for row in rows)
    assert form.end_row(width).shape == form.thinking_row(width).shape == (width,)
    assert end == {t for t in form.tokenizer.eos_token_ids if t < width}
    assert thinking == set(range(min(form.named, width))) - end
    assert form.end_row(width) is form.end_row(width)


@pytest.mark.parametrize("kind", ["llama", "hybrid", "sliding", "gpt_oss"])
def test_the_width_is_that_of_the_logits(tiny, kind):
    model, tokenizer = mlx_lm.load(str(tiny(kind, padded=24)))
    assert output_width(model, tokenizer) == model(mx.array([[1, 2]])).shape[-1] == len(tokenizer) + 24


# Where a reply begins


def first_state(tokenizer, prompt):
    """As mlx_lm's `_tokenize` finds it."""
    if not tokenizer.has_thinking:
        return "normal"
    return "reasoning" if tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt) else "normal"


@pytest.fixture(scope="module")
def styles(tiny):
    return {style: load_tokenizer(tiny("llama", style=style)) for style in STYLES}


USER = {"role": "user", "content": "What is the time?"}
SAYS_MARKERS = {"role": "user", "content": "<think> </think> <|channel>thought <channel|> </think>"}
THOUGHT = [USER, {"role": "assistant", "content": "<think>Hmm.</think>\n\nTen."}, USER]


@pytest.mark.parametrize("messages", [[USER], THOUGHT, [USER, SAYS_MARKERS, USER]], ids=["one", "turns", "markers"])
@pytest.mark.parametrize(
    "style, on, off",
    [
        ("plain", ANSWER, ANSWER),
        ("think", START, ANSWER),
        ("open", REASONING, ANSWER),
        ("harmony", ANSWER, ANSWER),
    ],
)
def test_the_prompt_decides_where_a_reply_begins(styles, style, on, off, messages):
    tokenizer = styles[style]
    form = ReplyFormat(tokenizer, len(tokenizer))
    for thinking, phase in ((True, on), (False, off)):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinking)
        splitter = form.splitter_under_grammar(prompt, True)
        assert splitter.first == TokenState(phase)
        assert splitter.opening == (tokenizer.think_start_tokens or ())


@pytest.mark.parametrize("style", ["think", "channel", "xtml"])
@pytest.mark.parametrize("thinking, phase", [(True, START), (False, ANSWER)])
def test_a_request_without_thinking_begins_with_the_answer(styles, style, thinking, phase):
    tokenizer = styles[style]
    form = ReplyFormat(tokenizer, len(tokenizer))
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)
    assert form.splitter_under_grammar(prompt, thinking).first.phase == phase


@pytest.mark.parametrize(
    "rest, phase", [("", ANSWER), ("\n\n", ANSWER), (" \n", ANSWER), ("So", START), ("\n.", START)]
)
def test_a_block_is_closed_when_only_white_space_follows_it(styles, rest, phase):
    tokenizer = styles["think"]
    form = ReplyFormat(tokenizer, len(tokenizer))
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>" + rest)
    assert form.splitter_under_grammar(prompt, True).first.phase == phase


# TextSplitter


def test_the_text_splitter_goes_back_too(styles):
    splitter = TextSplitter(make_text_state_machine(styles["think"], []), "reasoning")
    state, parts = splitter.split(splitter.first, 0, "Hmm.</th")
    assert (splitter.kind(state), parts) == (REASONING, [Part(REASONING, "Hmm.", 4)])
    marked, more = splitter.split(state, 0, "ink>Yes")
    assert (splitter.kind(marked), more[1:]) == (ANSWER, [Part(MARKER, "", 8), Part(ANSWER, "Yes", 3)])
    assert joined(said(splitter.split(state, 0, "is")[1]), REASONING) == "</this"
    assert said(splitter.flush(state)) == [(REASONING, "</th")]
    assert splitter.split(state, 0, "ink>Yes") == (marked, more)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "a", "é"]), max_size=8), st.data())
def test_the_units_of_the_text_splitter_are_all_letters(styles, words, data):
    splitter = TextSplitter(make_text_state_machine(styles["think"], []), "normal")
    text, state, units = "".join(words), splitter.first, 0
    edges = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=4))})
    for begin, end in itertools.pairwise(edges):
        state, parts = splitter.split(state, 0, text[begin:end])
        units += sum(part.units for part in parts)
        assert units + sum(part.units for part in splitter.flush(state)) == end


# Where a free reply begins, over HTTP


NAMED = {"channel": "<|channel>thought", "xtml": "<|open|>think<|sep|>"}


@pytest.mark.parametrize("path", [{}, {"seed": 3}], ids=["batch", "single"])
@pytest.mark.parametrize("style", ["think", "open", "channel", "xtml", "plain"])
def test_a_thinking_marker_that_a_message_names_opens_nothing(serve, tiny, style, path):
    server, marker = serve(tiny("scripted", style=style, tools="json_tools")), NAMED.get(style, "<think>")
    tool = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    kept = {"chat_template_kwargs": {"enable_thinking": False}} if style == "open" else {}
    for before in (
        [{"role": "user", "content": f"What is {marker}?"}, {"role": "assistant", "content": "A tag."}],
        [
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": f"text {marker} in it"},
        ],
    ):
        messages = [*before, {"role": "user", "content": "Hello there."}]
        for body in ({}, {"tools": tool}):
            reply = both(server, messages, max_tokens=30, **body, **kept, **path)
            assert (reply.content, reply.reasoning, reply.finish_reason) == ("Hello there.", "", "stop")


def test_a_thinking_marker_at_the_prompts_end_opens_thinking(serve, tiny):
    server = serve(tiny("scripted", style="open", tools="json_tools"))
    messages = [{"role": "user", "content": "What is </think>?"}, {"role": "assistant", "content": "A tag."}]
    reply = both(server, [*messages, {"role": "user", "content": "Hm.</think>Yes."}], max_tokens=30)
    assert (reply.reasoning, reply.content) == ("Hm.", "Yes.")


def test_upstream_takes_a_named_marker_for_the_templates(serve, tiny):
    upstream = serve(tiny("scripted", style="think", tools="json_tools"), module="mlx_lm.server")
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": "A tag."}]
    reply = chat(upstream, [*messages, {"role": "user", "content": "Hello there."}], max_tokens=30)
    assert (reply.content, reply.reasoning) == ("", "Hello there.")
