"""Tool rounds as applications make them: OpenAI's SDK and pydantic-ai from PyPI, unmodified, on the scripted model.

The model says the newest script of its prompt: the user's, then the one that the tool returns.
"""

import json

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ANSWER = "It is sunny in Paris."
RESULT = f"<|script|>{ANSWER}<|script_end|>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
PATHS = {"batch": {}, "single": {"seed": 3}}


class GetWeather(BaseModel):
    city: str
    days: int


TOOLS = [pydantic_function_tool(GetWeather, name="get_weather"), pydantic_function_tool(GetWeather, name="get_wind")]


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def server(serve, tiny):
    return serve(tiny("scripted", tools="json_tools"))


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(text: str, path: str, **body) -> dict:
    return {
        "model": "default_model",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        **PATHS[path],
        **body,
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_round(client, path):
    body = asked(CALL, path)
    message = client.chat.completions.create(**body).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris", "days": 2})
    body["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    assert client.chat.completions.create(**body).choices[0].message.content == ANSWER


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", ["auto", "required", named("get_weather"), named("get_wind"), "none"], ids=str)
def test_each_choice_created_and_streamed(client, path, choice):
    body = asked(f"{CALL}\n{CALL}", path, tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == ("stop" if choice == "none" else "tool_calls")
    calls = [
        [(c.function.name, c.function.arguments) for c in each.message.tool_calls or ()] for each in (whole, streamed)
    ]
    assert calls[0] == calls[1]
    wanted = choice["function"]["name"] if isinstance(choice, dict) else "get_weather"
    assert [name for name, _ in calls[0]] == ([] if choice == "none" else [wanted])


@pytest.mark.parametrize("path", PATHS)
def test_parse(client, path):
    call = client.chat.completions.parse(**asked(CALL, path)).choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == GetWeather(city="Paris", days=2)
    # strict: what the model writes otherwise is held to the schema
    odd = CALL.replace("2}", '"two", "x": 1}')
    call = client.chat.completions.parse(**asked(odd, path, max_tokens=300)).choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_name_that_is_no_tool(client):
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**asked("Hello", "batch", tool_choice=named("get_tide")))
    assert caught.value.param == "tool_choice"


class Answer(BaseModel):
    text: str


def test_pydantic_ai_completes_a_round(server):
    """It gives its answer by a call of its own, beside that of a tool: a tool's result may hold no script with it."""
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel("default_model", provider=provider), output_type=Answer, end_strategy="exhaustive")
    asked_for = []

    @agent.tool_plain
    def get_weather(city: str, days: int) -> str:
        asked_for.append((city, days))
        return ANSWER

    final = f'<tool_call>\n{{"name": "final_result", "arguments": {{"text": "{ANSWER}"}}}}\n</tool_call>'
    assert agent.run_sync(f"{CALL}\n{final}").output == Answer(text=ANSWER)
    assert asked_for == [("Paris", 2)]
