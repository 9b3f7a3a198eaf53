"""From the fields of a body to a matcher: what is read, what is refused and how, what a grammar then lets through."""

import json
import logging
import pickle
import random
import threading

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from localServerCommon import Refused
from mlx_patches.reply_format import ReplyFormat
from mlx_patches.structured_output import Grammar, GrammarCompiler, build_tokenizer, read_grammar
from tests.test_json_schemas import ENDS, accepts, allowed, bpe, vocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = 'start: "yes" | "no" " " /[0-9]+/'
GBNF = 'root ::= "yes" | "no" [0-9]+'
EMAIL = {"type": "object", "properties": {"email": {"type": "string", "pattern": "^(?!x)a"}}}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(vocabulary())


def enveloped(schema, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


def matcher_of(compiler, body) -> LLMatcher:
    grammar = read_grammar(body)
    assert grammar is not None and pickle.loads(pickle.dumps(grammar)) == grammar
    return compiler.matcher(grammar)


def refusal(compiler, body) -> Refused:
    with pytest.raises(Refused) as caught:
        matcher_of(compiler, body)
    assert caught.value.status == 400 and caught.value.param in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("body", "kind", "good", "bad"),
    [
        (enveloped(SCHEMA), "json_schema", '{"a": 1}', '{"a": "1"}'),
        (enveloped(SCHEMA, strict=True), "json_schema", '{"a": 1, "b": null}', "{}"),
        (enveloped({"properties": {"a": {"type": "null"}}}), "json_schema", '{"a": null}', '{"a": 1}'),
        (enveloped(True), "json_schema", '[1, {"a": null}]', "maybe"),
        ({"response_format": {"type": "json_object"}}, "json_object", '{"a": [1]}', "[1]"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", '{"a": 1}', "{}"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '{"a": 1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", '{"a": 1}', "{}"),
        ({"guided_json": SCHEMA}, "json_schema", '{"a": 1}', "{}"),
        ({"structured_outputs": {"regex": "[a-c]{2}"}}, "regex", "ab", "abc"),
        ({"guided_regex": r"^\d{3}-x$"}, "regex", "123-x", "123-x "),
        ({"guided_regex": "^a$|^b$"}, "regex", "b", "ab"),
        ({"guided_regex": r"a\$/\n\""}, "regex", 'a$/\n"', "a"),
        ({"guided_regex": ""}, "regex", "", "a"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", "no", "nope"),
        ({"guided_choice": ["one"]}, "choice", "one", "on"),
        ({"structured_outputs": {"grammar": LARK}}, "grammar", "no 42", "no"),
        ({"guided_grammar": LARK}, "grammar", "yes", "yes "),
        ({"guided_grammar": GBNF}, "grammar", "no42", "no"),
        ({"guided_grammar": "\n\n# words\n\n" + GBNF + "\n"}, "grammar", "yes", "no"),
        ({"guided_grammar": 'start: %json {"type": "integer"}'}, "grammar", "12", '"12"'),
    ],
    ids=lambda part: str(part)[:60],
)
def test_what_a_body_may_ask_for(compiler, body, kind, good, bad):
    grammar = read_grammar(body)
    assert grammar.kind == kind and grammar.not_enforced == ()
    assert accepts(compiler.matcher(grammar), good) and not accepts(compiler.matcher(grammar), bad)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "regex": None, "whitespace_pattern": None, "disable_fallback": False}},
    ],
    ids=json.dumps,
)
def test_null_and_text_ask_for_nothing(body):
    assert read_grammar(body) is None


ENVELOPE = "response_format.json_schema"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": "json"}, "response_format", None),
        ({"response_format": {}}, "response_format.type", None),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {"type": ["json_object"]}}, "response_format.type", None),
        ({"response_format": {"type": "json_schema"}}, ENVELOPE, None),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, ENVELOPE, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, f"{ENVELOPE}.schema", None),
        (enveloped(None), f"{ENVELOPE}.schema", None),
        (enveloped(SCHEMA, strict="yes"), f"{ENVELOPE}.strict", None),
        (enveloped(SCHEMA, name=1), f"{ENVELOPE}.name", None),
        (enveloped([]), f"{ENVELOPE}.schema", "invalid_json_schema"),
        (enveloped(False), f"{ENVELOPE}.schema", "invalid_json_schema"),
        (enveloped({"type": "strin"}), f"{ENVELOPE}.schema", "invalid_json_schema"),
        (enveloped({"$ref": "#"}), f"{ENVELOPE}.schema", "invalid_json_schema"),
        (enveloped(EMAIL, strict=True), f"{ENVELOPE}.schema", "invalid_json_schema"),
        ({"structured_outputs": []}, "structured_outputs", None),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", None),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_json_schema"),
        ({"structured_outputs": {"json": "[" * 9999}}, "structured_outputs.json", "invalid_json_schema"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "invalid_json_schema"),
        ({"guided_json": {"type": 1}}, "guided_json", "invalid_json_schema"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", None),
        ({"guided_regex": "("}, "guided_regex", "invalid_grammar"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "invalid_grammar"),
        ({"guided_regex": "\ud800"}, "guided_regex", "invalid_grammar"),
        ({"guided_regex": "a" * 200_001}, "guided_regex", "invalid_grammar"),
        ({"guided_choice": []}, "guided_choice", None),
        ({"guided_choice": "a"}, "guided_choice", None),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", None),
        ({"guided_choice": ["\udfff"]}, "guided_choice", "invalid_grammar"),
        ({"structured_outputs": {"grammar": {}}}, "structured_outputs.grammar", None),
        ({"guided_grammar": ""}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "root ::= foo"}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "start: start"}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "\n" * 199_999}, "guided_grammar", "invalid_grammar"),
        ({"guided_grammar": "start: a\n" + 'a: "b"\n' * 2000}, "guided_grammar", "invalid_grammar"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", None),
        ({"structured_outputs": {"json": SCHEMA, "choice": ["a"]}}, "structured_outputs.choice", None),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json", None),
    ],
    ids=lambda part: str(part)[:60],
)
@pytest.mark.timeout(20)
def test_what_is_refused_names_its_field(compiler, body, param, code):
    refused = refusal(compiler, body)
    assert (refused.param, refused.code) == (param, code)
    assert len(refused.message) < 500 and "\n" not in refused.message


def spell(tokens: LLTokenizer, text: str) -> list[int]:
    """`text` in tokens of one byte, so that a special token's name is plain text."""
    single = {tokens.decode_bytes([token]): token for token in range(300) if not tokens.is_special_token(token)}
    return [single[bytes([byte])] for byte in text.encode()]


def test_choices_are_exact(compiler):
    choices = [
        "a",
        "ab",
        "a b",
        'say "x"',
        "two\nlines",
        "tab\t",
        "é",
        "日本",
        "😀",
        "\u2028",
        "\x00\x7f",
        "a/b\\",
        " a",
    ]
    matcher = matcher_of(compiler, {"guided_choice": [*choices, "<|end|>"]})
    assert all(accepts(matcher, choice) for choice in choices)
    assert not any(accepts(matcher, text) for text in ("", "abc", "b", "A", "say", "two lines", "a/b", "a b "))
    assert not set(ENDS) & set(allowed(matcher))
    name = matcher.deep_copy()
    assert name.consume_tokens(spell(vocabulary(), "<|end|>")) and name.is_accepting()
    matcher.consume_tokens(spell(vocabulary(), "a"))
    assert set(ENDS) < set(allowed(matcher)) and matcher.is_accepting()


def test_the_empty_choice_may_end_at_once(compiler):
    matcher = matcher_of(compiler, {"guided_choice": ["", "a"]})
    assert accepts(matcher, "") and accepts(matcher, "a") and not accepts(matcher, "aa")
    assert set(allowed(matcher_of(compiler, {"guided_choice": [""]}))) == set(ENDS)


def test_what_is_left_out_travels_and_is_logged(compiler, caplog):
    with caplog.at_level(logging.WARNING):
        grammar = read_grammar(enveloped(EMAIL))
    assert grammar.not_enforced == ("properties.email.pattern",) and grammar.param == f"{ENVELOPE}.schema"
    assert "properties.email.pattern" in caplog.text
    assert accepts(compiler.matcher(grammar), '{"email": "xa"}')


def test_the_end_tokens_are_legal_just_where_a_reply_may_end(compiler):
    matcher = matcher_of(compiler, {"guided_json": {"type": "array", "items": {"type": "integer"}}})
    for token in vocabulary().tokenize_str("[1,2]"):
        assert not set(ENDS) & set(allowed(matcher))
        assert matcher.consume_token(token)
    assert set(allowed(matcher)) == set(ENDS)


# The compiler


def test_a_grammar_is_compiled_once_and_each_caller_has_a_copy(compiler, monkeypatch):
    fresh = GrammarCompiler(vocabulary())
    times = []
    compile_once = fresh._compile
    monkeypatch.setattr(fresh, "_compile", lambda grammar: times.append(grammar) or compile_once(grammar))
    grammar = read_grammar({"guided_json": {"enum": [f"v{n}" for n in range(800)]}})
    got: list[LLMatcher] = []
    threads = [threading.Thread(target=lambda: got.append(fresh.matcher(grammar))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and times == [grammar]
    assert got[0].consume_tokens(vocabulary().tokenize_str('"v1"'))
    assert not got[1].is_accepting() and accepts(got[1], '"v2"')


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    fresh = GrammarCompiler(vocabulary(), capacity=2)
    first, second, third = (Grammar(LLMatcher.grammar_from_regex(letter), "guided_regex", "regex") for letter in "abc")
    for grammar in (first, second, first, third):
        assert fresh.matcher(grammar)
    assert list(fresh._kept) == [first, third]


def test_a_refusal_is_not_kept_and_the_next_one_says_the_same(compiler):
    body = {"guided_regex": "(?=a)b"}
    assert refusal(compiler, body).message == refusal(compiler, body).message
    assert read_grammar(body) not in compiler._kept


def test_a_grammar_whose_lexer_ran_into_a_limit_is_compiled_anew():
    """llguidance's copies share a lexer, and what one of them exhausts is gone for all."""
    fresh = GrammarCompiler(vocabulary())
    grammar = read_grammar({"guided_json": {"type": "string", "maxLength": 500, "pattern": r"^(?:\S+\s+){0,49}\S+$"}})
    text = '"' + " ".join("abcdefghij"[: 1 + n % 9] for n in range(48)) + '"'
    tokens = vocabulary().tokenize_str(text)
    assert fresh.matcher(grammar)
    pristine = fresh._kept[grammar].result()[0]
    assert not pristine.deep_copy().consume_tokens(tokens)  # no mask between them: the lexer's fuel runs out
    assert not pristine.deep_copy().consume_token(tokens[0])
    assert accepts(fresh.matcher(grammar), text)


# The vocabulary


class Wrapped:
    """What mlx_lm's TokenizerWrapper shows of a tokenizer."""

    def __init__(self, plain, ends):
        self._tokenizer, self.eos_token_ids, self.get_vocab = plain, ends, plain.get_vocab


def read(plain, width: int, ends) -> LLTokenizer:
    return build_tokenizer(ReplyFormat(Wrapped(plain, ends), width))


def fast() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="<|end|>")


class Slow:
    """A tokenizer of Python's, with a vocabulary as SentencePiece writes it."""

    all_special_ids = (0, 1)

    def __init__(self):
        special = {"</s>": True, "<end>": True, "<tool>": False}
        self.added_tokens_decoder = {n: AddedToken(name, special=special[name]) for n, name in enumerate(special)}
        self.names = [
            "</s>",
            "<end>",
            "<tool>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            "▁ja",
            "é",
            "ne",
            "▁▁",
        ]

    def get_vocab(self):
        return {name: token for token, name in enumerate(self.names)}

    def encode(self, text, add_special_tokens=True):
        return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("width", [1000, 1024, 1333])
def test_a_fast_tokenizer_is_read_whole_and_padded_ids_never_come(width):
    tokens = read(fast(), width, {1, 0, 5000})
    assert tokens.vocab_size == width and tokens.eos_tokens == [0, 1]
    matcher = GrammarCompiler(tokens).matcher(read_grammar({"guided_regex": "(.|\n)*"}))
    mask = matcher.compute_bitmask()
    ids = [token for token in range(width) if mask[token >> 3] >> (token & 7) & 1]
    assert max(ids) < bpe().get_vocab_size() and set(ENDS) <= set(ids) and len(mask) * 8 >= width


@pytest.mark.parametrize(
    "body",
    [
        {
            "guided_json": {
                "properties": {"naïve 日本": {"const": "a\n"}, "n": {"type": "integer"}},
                "required": ["n"],
            }
        },
        {"guided_choice": ["the name is", "the number", "<|end| >"]},
        {"guided_grammar": 'start: "type: object, required: " /[a-z]+/ " properties"'},
        {"guided_regex": r"\d{4}-[a-z é]{3} end"},
    ],
    ids=json.dumps,
)
def test_the_masks_are_those_of_llguidance_reading_the_tokenizer_itself(body):
    """Also where text is forced: it is tokenised alike."""
    grammar = read_grammar(body)
    ours, theirs = (GrammarCompiler(tokens).matcher(grammar) for tokens in (read(fast(), 1000, ENDS), vocabulary()))
    chosen, forced = random.Random(7), 0
    for _ in range(80):
        mask = ours.compute_bitmask()
        assert mask == theirs.compute_bitmask() and ours.compute_ff_tokens() == theirs.compute_ff_tokens()
        may = [token for token in range(1000) if mask[token >> 3] >> (token & 7) & 1]
        forced += len(may) == 1
        token = chosen.choice(may)
        if token in ENDS:
            break
        assert ours.consume_token(token) and theirs.consume_token(token)
    assert forced


@pytest.mark.parametrize("text", ["a <|end|> b", "<|end|>", "x" * 40 + "<|im_end|><|end|>é"])
def test_what_is_forced_is_spelled_without_special_tokens(text):
    tokens = read(fast(), 1000, ENDS)
    matcher = GrammarCompiler(tokens).matcher(read_grammar({"guided_choice": [text]}))
    reply = []
    while not matcher.is_accepting():
        reply += matcher.compute_ff_tokens()
        assert reply and not set(ENDS) & set(reply) and matcher.consume_tokens(reply)
    assert tokens.decode_bytes(reply) == text.encode()


def test_names_beyond_the_row_are_left_out():
    narrow = read(fast(), 700, ENDS)
    assert narrow.vocab_size == 700 and narrow.is_special_token(0)
    own = [narrow.decode_bytes([token]) != vocabulary().decode_bytes([token]) for token in range(700)]
    assert own.index(False) == len(ENDS) and sum(own) == len(ENDS)  # special tokens have names that no text has
    matcher = GrammarCompiler(narrow).matcher(read_grammar({"guided_choice": ["naïve <|end|>"]}))
    assert narrow.tokenize_str("naïve") and matcher.consume_tokens(spell(narrow, "naïve <|end|>"))
    assert matcher.is_accepting()


def test_a_slow_tokenizer_gives_exact_bytes():
    slow = Slow()
    tokens = read(slow, 300, [1, 0])
    spelled = {name: tokens.decode_bytes([token]) for token, name in enumerate(slow.names)}
    assert [spelled[name] for name in ("<0x0A>", "<0xC3>", "▁", "▁ja", "é", "▁▁")] == [
        b"\n",
        b"\xc3",
        b" ",
        b" ja",
        "é".encode(),
        b"  ",
    ]
    matcher = GrammarCompiler(tokens).matcher(read_grammar({"guided_choice": [" jané<tool>"]}))
    ja, ne = slow.names.index("▁ja"), slow.names.index("ne")
    assert matcher.consume_token(ja) and not matcher.validate_tokens([ne])
    for byte in "né<tool>".encode():
        mask = matcher.compute_bitmask()
        assert not any(mask[token >> 3] >> (token & 7) & 1 for token in (0, 1, 2))
        assert matcher.consume_token(3 + byte)
    assert matcher.is_accepting()


def test_a_tokenizer_that_cannot_be_read_is_a_refusal():
    slow = Slow()
    slow.names = [name.replace("▁", "##") for name in slow.names]
    with pytest.raises(Refused, match="tokenizer"):
        read(slow, 300, [0])
    with pytest.raises(Refused, match="end token"):
        read(fast(), 1000, [5000])
