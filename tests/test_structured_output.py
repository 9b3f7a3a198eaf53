"""Structured output over HTTP: a reply fits what its request asks for, or the request is refused, never with prose.

Random weights at temperature 1 try whatever a grammar allows; scripts say exactly what a rule is about (a token that is
not allowed gives way to the best that is). The schemas here have finitely many replies, so each ends by itself.
"""

import functools
import json
import re

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import load as load_tokenizer

from tests.client import both, chat, chat_stream, complete, get, strict_loads, together
from tests.conftest import server_env
from tests.test_reply_format import FALLBACK, FUSE, REPLACE, STRIP, spm_folder

OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
TEXT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
AGE = {"type": "integer", "minimum": 0, "maximum": 150}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": AGE,
        "mood": {"enum": ["glad", "sad", None, 3]},
        "tags": {"type": "array", "items": {"const": "x"}, "maxItems": 3},
        "home": {"$ref": "#/$defs/home"},
        "extra": {"anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "pattern": "^[a-c]{2}$"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "home": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo", "東京"]}, "no": AGE},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
LARK = 'start: greeting " " NAME\ngreeting: "Hello" | "Hi"\nNAME: /[A-Z][a-z]{1,5}/\n'
GBNF = 'root ::= "move " [a-h] [1-8] ("-" [a-h] [1-8])?\n'
CHOICES = ["red", "green blue", "", 'quoted "x"\n', "赤"]


def schema_format(schema, **envelope):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **envelope}}}


def fits(schema, text):
    jsonschema.Draft202012Validator(schema).validate(strict_loads(text))
    return True


person, ok = functools.partial(fits, PERSON), functools.partial(fits, OK)
regex = re.compile(r"[0-9]{3}-(ab|cd)+\.").fullmatch
FIELDS = {  # name: what a body says, what fits it
    "response_format.json_schema": (schema_format(PERSON), person),
    "strict": (schema_format(OK, strict=True), ok),
    "structured_outputs.json": ({"structured_outputs": {"json": PERSON}}, person),
    "structured_outputs.json as text": ({"structured_outputs": {"json": json.dumps(OK)}}, ok),
    "structured_outputs.regex": ({"structured_outputs": {"regex": regex.__self__.pattern}}, regex),
    "structured_outputs.choice": ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    "structured_outputs.grammar, Lark": (
        {"structured_outputs": {"grammar": LARK}},
        re.compile("(Hello|Hi) [A-Z][a-z]{1,5}").fullmatch,
    ),
    "structured_outputs.grammar, GBNF": (
        {"structured_outputs": {"grammar": GBNF}},
        re.compile("move [a-h][1-8](-[a-h][1-8])?").fullmatch,
    ),
    "guided_json": ({"guided_json": PERSON}, person),
    "guided_regex": ({"guided_regex": regex.__self__.pattern}, regex),
    "guided_choice": ({"guided_choice": CHOICES[:2]}, CHOICES[:2].__contains__),
    "guided_grammar": ({"guided_grammar": LARK}, re.compile("(Hello|Hi) [A-Z][a-z]{1,5}").fullmatch),
}


SINGLE = pytest.mark.parametrize("single", [{}, {"seed": 1}], ids=["batch", "single"])

# Every field


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_the_field_the_reply_fits(serve, tiny, field):
    server = serve(tiny("llama"))
    body, fit = FIELDS[field]
    calls = [{"stream": n % 2 == 0, "call": (chat, chat_stream, chat, chat_stream)[n]} for n in range(4)]
    for n, call in enumerate(calls):
        call |= {"prompt": f"Say it, {n}.", "temperature": 1, "max_tokens": 600, **body}
    singles = [chat(server, f"Say it, {n}.", temperature=1, seed=n, max_tokens=600, **body) for n in range(2)]
    for reply in [*together(server, calls), *singles]:
        assert (reply.status, reply.finish_reason) == (200, "stop"), reply.raw
        assert fit(reply.content), reply.content
        assert "Warning" not in reply.headers


def test_a_schema_without_a_type_at_its_top_works(serve, tiny):
    untyped = {key: value for key, value in PERSON.items() if key != "type"}
    calls = [{"prompt": f"{n}", "temperature": 1, "max_tokens": 200, **schema_format(untyped)} for n in range(6)]
    for reply in together(serve(tiny("llama")), calls):
        assert reply.status == 200 and (reply.finish_reason == "length" or fits(untyped, reply.content))
    text = json.dumps({"name": "Anna", "age": 30, "home": {"city": "Oslo"}})
    assert both(serve(tiny("scripted")), text, **schema_format(untyped)).content == text


def test_json_object_is_an_object(serve, tiny):
    server = serve(tiny("llama"))
    body = {"response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": 150}
    calls = [{"prompt": f"{n}", "stream": n % 2 == 0, **body} for n in range(10)]
    for reply in together(server, calls):
        assert reply.content.startswith("{")
        if reply.finish_reason == "stop":
            assert isinstance(strict_loads(reply.content), dict)
    for text in ("[1]", '"x"', "3", "true"):
        reply = chat(serve(tiny("scripted")), text, max_tokens=5, response_format={"type": "json_object"})
        assert reply.content.startswith("{")


@pytest.mark.parametrize(
    "free",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None, "guided_json": None, "guided_regex": None},
        {"guided_choice": None, "guided_grammar": None},
    ],
    ids=str,
)
def test_free_text_is_left_alone(serve, tiny, free):
    server = serve(tiny("scripted"))
    assert both(server, "Not JSON at all.", **free).content == "Not JSON at all."


def test_schemas_on_the_completions_endpoint(serve, tiny):
    server = serve(tiny("llama"))
    for n in range(3):
        reply = complete(server, "Say it", temperature=1, max_tokens=600, **FIELDS["guided_json"][0])
        assert reply.finish_reason == "stop" and person(reply.content), n


def test_sampling_cannot_undo_a_grammar(serve, tiny):
    server = serve(tiny("llama"))
    biased = [{"logit_bias": {str(token): 100 for token in range(300, 400)}}, {"logit_bias": {"90": -1e9}}]
    others = [{"repetition_penalty": 2.0}, {"presence_penalty": 50.0}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}]
    for extra in (*biased, *others, {"xtc_probability": 1.0, "xtc_threshold": 0.001}):
        reply = chat(server, "Say it", temperature=1, max_tokens=600, **schema_format(OK), **extra)
        assert reply.finish_reason == "stop" and ok(reply.content), (extra, reply.raw)


@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
def test_other_architectures_are_held_too(serve, tiny, kind):
    server = serve(tiny(kind))
    body = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 1, "max_tokens": 600}
    calls = [{"prompt": f"{n}" * 40 * n, "stream": n == 1, **body, **schema_format(PERSON)} for n in range(3)]
    for reply in [*together(server, calls), chat(server, "x", seed=1, **body, **schema_format(PERSON))]:
        assert reply.finish_reason == "stop" and person(reply.content)


@pytest.mark.parametrize("decoder", [[REPLACE, FALLBACK, FUSE, STRIP], [FALLBACK, FUSE, REPLACE, STRIP]], ids=[1, 2])
def test_tokenizers_in_sentencepiece_style(serve, tiny, tmp_path_factory, decoder):
    folder = spm_folder(tmp_path_factory.mktemp("spm"), decoder)
    server = serve(tiny("llama", tokenizer=str(folder)))
    schema = {"type": "object", "properties": {"a": {"const": "東 京 ü"}, "b": AGE}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    for n in range(2):
        reply = both(server, "x", temperature=1, seed=n, max_tokens=300, **schema_format(schema))
        assert reply.finish_reason == "stop" and fits(schema, reply.content)


def test_mlx_lm_itself_replies_with_prose(serve, tiny):
    server = serve(tiny("scripted"), module="mlx_lm.server")
    reply = both(server, "Just prose.", **schema_format(OK))
    assert (reply.status, reply.content) == (200, "Just prose.")


# White space


def test_a_model_that_prefers_white_space_ends_with_valid_json(serve, tiny):
    server = serve(tiny("scripted", strength=5.0, prefer={"\n": 60.0, " ": 50.0}))
    pair = {"type": "array", "items": OK, "minItems": 2, "maxItems": 2}
    reply = both(server, "x", max_tokens=1000, **schema_format(pair))
    assert reply.finish_reason == "stop" and fits(pair, reply.content)
    assert reply.content.count("\n" + " " * 32) > 5 and " " * 33 not in reply.content


def test_llguidance_itself_takes_white_space_for_ever(tiny):
    tokenizer = load_tokenizer(tiny("llama"))
    vocabulary = from_tokenizer(tokenizer._tokenizer, n_vocab=len(tokenizer), eos_token=list(tokenizer.eos_token_ids))
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(OK)), log_level=0)
    tokens = [tokenizer.convert_tokens_to_ids("{")] + tokenizer.encode("\n") * 500
    assert len(tokens) == 501 and matcher.try_consume_tokens(tokens) == 501


def nested(depth):
    return functools.reduce(lambda inner, n: {f"k{n}": inner, "l": [n, True]}, range(depth), {"end": "deep"})


@pytest.mark.parametrize(
    "text, body",
    [
        (json.dumps(nested(7), indent=4), schema_format({"type": "object"})),
        (json.dumps(nested(7), indent=2), {"guided_json": {"type": "object"}}),
        (json.dumps(nested(3)), {"response_format": {"type": "json_object"}}),
        (json.dumps(nested(3), separators=(",", ":")), {"response_format": {"type": "json_object"}}),
        (json.dumps({"a": "x" + " " * 200 + "y", " " * 40: [" "]}), schema_format({"type": "object"})),
    ],
    ids=["indented by 4", "indented by 2", "Python", "compact", "blanks in strings"],
)
def test_usual_spellings_of_json_pass_unchanged(serve, tiny, text, body):
    server = serve(tiny("scripted"))
    for reply in (both(server, text, max_tokens=2000, **body), chat(server, text, max_tokens=2000, seed=1, **body)):
        assert (reply.content, reply.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "blanks, held", [("\n" + " " * 32, True), ("\n" + " " * 33, False), ("  ", False), ("\n\n", False)]
)
def test_white_space_has_a_limit(serve, tiny, blanks, held):
    server = serve(tiny("scripted"))
    said = f'{{"ok":{"<|cut|>".join(blanks)}<|cut|>true}}'
    reply = both(server, said, max_tokens=60, **schema_format(OK))
    assert ok(reply.content) and (reply.content == said.replace("<|cut|>", "")) == held


# Drafts

NO_CACHE = ("--prompt-cache-size", 0)  # with a draft mlx_lm stores caches that are shorter than their keys
TEN = [
    OK,
    PERSON,
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": -9}, "minItems": 2, "maxItems": 6},
    {"type": "string", "maxLength": 20},
    {"type": "number"},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"enum": ["one", "two", 3, None, [4]]},
    {"anyOf": [OK, TEXT]},
    {"type": "string", "pattern": "^(ab|cd){3,9}$"},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}},
]


def test_replies_with_a_draft_equal_those_without(serve, tiny):
    alone, drafted = serve(tiny("llama")), serve(tiny("llama"), "--draft-model", tiny("draft"), *NO_CACHE)
    for n, schema in enumerate(TEN):
        body = {"temperature": 0, "max_tokens": 80, **schema_format(schema)}
        a = chat(alone, f"Say {n}", seed=1, **body)
        b = chat(drafted, f"Say {n}", num_draft_tokens=1 + n % 4, **body)
        assert (a.content, a.finish_reason) == (b.content, b.finish_reason)
        reply = chat_stream(drafted, f"Say {n}", **{**body, "temperature": 1, "max_tokens": 300})
        assert reply.finish_reason == "length" or fits(schema, reply.content)


# Many at once


def test_twelve_at_once_each_get_their_own(serve, tiny):
    server = serve(tiny("llama"))
    plain = [{"prompt": f"Tell me {n} of these" * (n + 1), "temperature": 0, "max_tokens": 60} for n in range(6)]
    alone = [chat(server, **call).content for call in plain]
    kinds = list(FIELDS)[:6]
    held = [{"prompt": f"Say {k}", "temperature": 1, "max_tokens": 600, **FIELDS[k][0]} for k in kinds]
    calls = [call | {"stream": n % 3 == 0} for n, pair in enumerate(zip(plain, held, strict=True)) for call in pair]
    for stagger in (0.0, 0.02):
        replies = together(server, calls, stagger=stagger)
        assert [reply.content for reply in replies[::2]] == alone
        for kind, reply in zip(kinds, replies[1::2], strict=True):
            assert reply.finish_reason == "stop" and FIELDS[kind][1](reply.content)


@SINGLE
@pytest.mark.parametrize(
    "text, body",
    [
        (json.dumps({"name": "Anna", "age": 30, "home": {"city": "Paris"}}), schema_format(PERSON)),
        ('{\n  "a": "one\\ntwo \\u00e9"\n}', {"guided_json": TEXT}),
        ("123-abcdab.", FIELDS["guided_regex"][0]),
        (CHOICES[3], FIELDS["structured_outputs.choice"][0]),
        ("move e2-e4", FIELDS["structured_outputs.grammar, GBNF"][0]),
    ],
)
def test_an_answer_that_fits_is_left_as_it_is(serve, tiny, text, body, single):
    server = serve(tiny("scripted"))
    free, held = both(server, text, **single), both(server, text, **single, **body)
    assert (free.content, free.finish_reason) == (held.content, held.finish_reason) == (text, "stop")


# A token that the grammar refuses

REFUSING = '''
"""mlx_patched_server whose sampler picks a masked token (top_k 777) or an end token (778) as a reply's twelfth."""
import mlx.core as mx
import mlx_patched_server as launcher


def pick_wrongly(upstream):
    def make_sampler(args, tokenizer):
        right, calls = upstream(args, tokenizer), 0

        def sampler(scores):
            nonlocal calls
            calls += 1
            if calls != 12:
                return right(scores)
            end = args.sampling.top_k == 778
            return mx.array([min(tokenizer.eos_token_ids)]) if end else mx.argmin(scores, axis=-1)

        return sampler if args.sampling.top_k in (777, 778) else right

    return make_sampler


launcher.SWAPS = (*launcher.SWAPS, ("server._make_sampler", pick_wrongly))
launcher.main()
'''
LONG = {"type": "array", "items": AGE, "minItems": 15, "maxItems": 20}


@pytest.fixture(scope="module")
def refusing(serve, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusing")
    (folder / "wrong_sampler.py").write_text(REFUSING)
    env = {"PYTHONPATH": f"{folder}:{server_env()['PYTHONPATH']}"}
    return lambda: serve(tiny("llama"), module="wrong_sampler", env=env)


@SINGLE
@pytest.mark.parametrize("wrong", [777, 778], ids=["a token", "an end token"])
def test_a_token_that_the_grammar_refuses_ends_that_reply_alone(refusing, wrong, single):
    server = refusing()
    body = {"temperature": 1, "max_tokens": 900, **single, **schema_format(LONG)}
    other = {"prompt": "Tell me all", "temperature": 0, "max_tokens": 120, **single}
    alone = chat(server, **other).content
    calls = [other, {"prompt": "x", "top_k": wrong, **body}, {"prompt": "x", "top_k": wrong, "stream": True, **body}]
    calls += [{"prompt": "x", **body}]
    plain, whole, streamed, fine = together(server, calls)
    assert (plain.content, plain.status) == (alone, 200)
    assert fits(LONG, fine.content)
    assert (whole.status, whole.error["type"]) == (500, "server_error")
    assert (streamed.status, streamed.error["type"], streamed.finish_reason) == (200, "server_error", None)
    assert streamed.content.startswith("[")
    assert "refused token" in server.log()
    assert fits(LONG, chat(server, "x", **body).content)
    assert get(server, "/health").status == 200
