"""The harshest judge over HTTP: random weights at temperature 1, held to the schemas of JSONSchemaBench's sample.

Each schema that is taken gets a streamed reply and one that is not, eight requests at a time. Every reply that ends in
"stop" must be strict JSON and validate (jsonschema, format assertions off); under a schema with a `Warning` it must
parse. A bias to characters that close JSON makes replies end at all. `python -m tests.test_schema_sample` takes
the whole sample and prints the counts that docs/structured_output.md quotes; pytest takes a slice.
"""

import collections
import json
import sys

import jsonschema
import pytest
from jsonschema.validators import validator_for
from tokenizers import Tokenizer

from tests.client import chat, chat_stream, together
from tests.conftest import Server
from tests.test_json_schemas import SAMPLE, built_in
from tests.tiny_models import model_folder

SLICE = 24
CLOSERS = ['"', "}", "]", ",", "0", '",', '"}', "]}", "}}"]
MAX_TOKENS = 300


def cases() -> list[dict]:
    return [json.loads(line) for line in SAMPLE.read_text().splitlines()] if SAMPLE.exists() else built_in()


def closing_bias(folder) -> dict[str, float]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = (tokenizer.token_to_id(text) for text in CLOSERS)
    return {str(token): 4.0 for token in ids if token is not None}


def refuse(name: str):
    raise ValueError(f"{name} is not JSON")


def fits(reply, schema) -> bool:
    try:
        # A free name written twice is JSON, and no grammar can tell; NaN and Infinity are not.
        value = json.loads(reply.content, parse_constant=refuse)
        if "Warning" not in reply.headers:
            validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(value)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def run(server, folder, sample) -> tuple[collections.Counter, list]:
    """Counts of what came of each schema and each reply, and the replies that do not fit."""
    counts, wrong = collections.Counter(), []
    calls = []
    for case in sample:
        schema = {"type": "json_schema", "json_schema": {"name": "case", "schema": case["schema"]}}
        calls += [
            {
                "call": call,
                "prompt": f"Reply as {case['name']}.",
                "response_format": schema,
                "temperature": 1,
                "max_tokens": MAX_TOKENS,
                "logit_bias": closing_bias(folder),
            }
            for call in (chat, chat_stream)
        ]
    for at in range(0, len(calls), 8):
        for case, reply in zip(sample[at // 2 : at // 2 + 4], pairs(together(server, calls[at : at + 8])), strict=True):
            if reply[0].status == 400:
                counts["schemas refused"] += 1
                counts[f"refused: {reply[0].error['message'].partition(': ')[2][:60]}"] += 1
                continue
            counts["schemas compiled" + (", not all enforced" if "Warning" in reply[0].headers else "")] += 1
            for one in reply:
                if one.status != 200 or one.finish_reason not in ("stop", "length"):
                    wrong.append((case, one))
                elif one.finish_reason == "length":
                    counts["replies cut"] += 1
                else:
                    counts["replies stopped"] += 1
                    if not fits(one, case["schema"]):
                        counts["replies invalid"] += 1
                        wrong.append((case, one))
    return counts, wrong


def pairs(replies: list) -> list[tuple]:
    return list(zip(replies[::2], replies[1::2], strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_reply_that_stops_fits(serve, tiny, kind):
    folder, sample = tiny(kind), cases()
    step = max(1, len(sample) // SLICE)
    counts, wrong = run(serve(folder), folder, sample[::step][:SLICE])
    print(dict(counts))
    assert counts["replies stopped"] >= SLICE / 2
    assert not wrong, [(case["name"], one.status, one.content or one.error) for case, one in wrong]


def main() -> int:
    folder = model_folder("llama")
    server = Server(folder)
    try:
        counts, wrong = run(server, folder, cases())
    finally:
        server.stop()
    for what, count in sorted(counts.items(), key=lambda pair: (pair[0].startswith("refused:"), -pair[1])):
        print(f"{count:5} {what}")
    for case, one in wrong:
        print(case["name"], one.status, one.finish_reason, one.content or one.error)
    print(f"{counts['replies invalid']:5} replies invalid")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
