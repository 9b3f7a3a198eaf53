"""Harmony on the way in: past turns in gpt-oss's template, a round of tools over OpenAI's SDK, `reasoning_effort`.

The judge of a prompt is openai-harmony's rendering of the same conversation; docs/harmony.md lists where gpt-oss's own
template says it otherwise, and `as_the_template` says the same here.
"""

import json
import re

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from mlx_patches.harmony import past_turns
from tests.client import chat
from tests.harmony_template import TEMPLATE
from tests.harmony_vocabulary import encoding

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CALLS = "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary "
CALLS += 'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
SCRIPT = re.compile(r"<\|script(_end)?\|>|<\|reply\+\d+\|>")


@pytest.fixture
def model(tiny):
    return tiny("scripted", style="harmony", template=TEMPLATE)


def call(name, arguments, number="c1"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def judged(*messages):
    """What openai-harmony renders for (role or author, channel, recipient, text) each, and for the reply to come."""
    from openai_harmony import Author, Conversation, Message, Role

    rendered = []
    for role, channel, recipient, text in messages:
        author = Author(role=Role(role)) if role in list(Role) else Author(role=Role.TOOL, name=role)
        message = Message.from_author_and_content(author, text)
        message.channel, message.recipient = channel, recipient
        if recipient and recipient.startswith("functions."):
            message.content_type = "json"
        rendered.append(message)
    tokens = encoding().render_conversation_for_completion(Conversation.from_messages(rendered), Role.ASSISTANT)
    return encoding().decode_utf8(tokens)


def as_the_template(text):
    """The two differences: a call's recipient stands in its role, and a tool's result is a JSON string."""
    text = re.sub(
        r"<\|start\|>assistant<\|channel\|>commentary to=(\S+) json",
        r"<|start|>assistant to=\1<|channel|>commentary json",
        text,
    )
    return re.sub(
        r"(<\|start\|>functions\.\S+ to=assistant<\|channel\|>commentary<\|message\|>)(.*?)(<\|end\|>)",
        lambda found: found[1] + json.dumps(found[2]) + found[3],
        text,
        flags=re.DOTALL,
    )


def rendered(model, messages, **kwargs):
    """The template's prompt for messages as they come from a client, from the first user's on."""
    for message in messages:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"content": "", **message} for message in past_turns(messages)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    text = SCRIPT.sub("", text)
    return text[text.index("<|start|>user") :]


WEATHER = ("user", None, None, "Weather in Paris?")
SUN = ("functions.get_weather", "commentary", "assistant", "sunny")
RAIN = ("functions.get_weather", "commentary", "assistant", "rain")
PARIS, ROME = (
    ("assistant", "commentary", "functions.get_weather", f'{{"city": "{city}"}}') for city in ("Paris", "Rome")
)
ASKED = {"role": "user", "content": "Weather in Paris?"}


@pytest.mark.parametrize(
    "messages, turns",
    [
        (  # the reasoning of a round of tools stays
            [
                ASKED,
                {
                    "role": "assistant",
                    "reasoning_content": "I need it.",
                    "tool_calls": [call("get_weather", '{"city": "Paris"}')],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
            [WEATHER, ("assistant", "analysis", None, "I need it."), PARIS, SUN],
        ),
        (  # two calls in one message, and their results in another order
            [
                ASKED,
                {
                    "role": "assistant",
                    "reasoning_content": "Both.",
                    "tool_calls": [
                        call("get_weather", '{"city": "Paris"}', "a"),
                        call("get_weather", '{"city": "Rome"}', "b"),
                    ],
                },
                {"role": "tool", "tool_call_id": "b", "content": "rain"},
                {"role": "tool", "tool_call_id": "a", "content": "sunny"},
            ],
            [WEATHER, ("assistant", "analysis", None, "Both."), PARIS, SUN, ROME, RAIN],
        ),
        (  # two rounds
            [
                ASKED,
                {"role": "assistant", "tool_calls": [call("get_weather", '{"city": "Paris"}')]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {
                    "role": "assistant",
                    "reasoning_content": "And Rome.",
                    "tool_calls": [call("get_weather", '{"city": "Rome"}', "c2")],
                },
                {"role": "tool", "tool_call_id": "c2", "content": "rain"},
            ],
            [WEATHER, PARIS, SUN, ("assistant", "analysis", None, "And Rome."), ROME, RAIN],
        ),
        (  # what was thought before a final answer is dropped, as the format has it
            [ASKED, {"role": "assistant", "reasoning_content": "Hm.", "content": "Sunny."}, ASKED],
            [WEATHER, ("assistant", "analysis", None, "Hm."), ("assistant", "final", None, "Sunny."), WEATHER],
        ),
        (  # a preamble goes with the reasoning
            [
                ASKED,
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "reasoning_content": "Look.",
                    "tool_calls": [call("get_weather", '{"city": "Paris"}')],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
            [WEATHER, ("assistant", "analysis", None, "Look.\n\nLet me look."), PARIS, SUN],
        ),
    ],
    ids=["round", "parallel", "two rounds", "final", "preamble"],
)
def test_past_turns_read_as_openai_harmony_has_them(model, messages, turns):
    assert rendered(model, messages) == as_the_template(judged(*turns))


def test_a_round_of_tools_over_the_sdk(serve, model):
    """Call out, result in, answer out; the second prompt holds the first reply's reasoning."""
    client = OpenAI(base_url=f"{serve(model).url}/v1", api_key="none", max_retries=0, timeout=120)
    messages = [{"role": "user", "content": CALLS}]
    first = client.chat.completions.create(model="default_model", messages=messages, tools=TOOLS)
    (choice,) = first.choices
    (asked,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (asked.function.name, json.loads(asked.function.arguments)) == ("get_weather", {"city": "Paris"})
    answer = "<|script|><|channel|>final<|message|>It is sunny.<|script_end|>"
    said = choice.message.to_dict()
    assert said["reasoning_content"] == "I need the weather."
    messages += [said, {"role": "tool", "tool_call_id": asked.id, "content": answer}]
    counts = {}
    for thought in ("I need the weather.", None):
        said["reasoning_content"] = said["reasoning"] = thought
        second = client.chat.completions.create(model="default_model", messages=messages, tools=TOOLS)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is sunny.", "stop")
        counts[thought] = second.usage.prompt_tokens
    analysis = "<|start|>assistant<|channel|>analysis<|message|>I need the weather.<|end|>"
    more = AutoTokenizer.from_pretrained(model).encode(analysis, add_special_tokens=False)
    assert counts["I need the weather."] - counts[None] == len(more)


# reasoning_effort, for every model

EFFORT = "{{ '<|im_start|>user\n' + script }}{{ reasoning_effort | default('unset') }} "
EFFORT += "{{ enable_thinking | default('unset') }}{{ script_end + reply + header + tail }}"


@pytest.mark.parametrize(
    "body, effort, thinking",
    [
        ({}, "unset", "True"),
        ({"reasoning_effort": None}, "unset", "True"),
        ({"reasoning_effort": "none"}, "low", "False"),
        ({"reasoning_effort": "minimal"}, "low", "True"),
        ({"reasoning_effort": "low"}, "low", "True"),
        ({"reasoning_effort": "medium"}, "medium", "True"),
        ({"reasoning_effort": "high"}, "high", "True"),
        ({"reasoning_effort": "xhigh"}, "high", "True"),
        ({"reasoning_effort": "max"}, "high", "True"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "low", "True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high", "True"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "low", "False"),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "medium"}}, "medium", "False"),
        ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, "high", "False"),
    ],
)
def test_an_effort_reaches_the_template(serve, tiny, body, effort, thinking):
    server = serve(tiny("scripted", style="think", template=EFFORT))
    assert chat(server, "Hello", **body).content == f"{effort} {thinking}"


@pytest.mark.parametrize("word", ["enormous", "", "LOW", 3, True, ["low"]])
def test_an_unknown_effort_is_refused(serve, tiny, word):
    reply = chat(serve(tiny("scripted", style="think", template=EFFORT)), "Hello", reasoning_effort=word)
    assert (reply.status, reply.error["param"]) == (400, "reasoning_effort")
