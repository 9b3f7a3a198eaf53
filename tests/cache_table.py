"""What an agent's conversation reuses, turn by turn, ours beside mlx_lm's: `python -m tests.cache_table`.

Eight tool rounds. What the model said is not sent back as it was (a client that keeps no reasoning): after each reply
comes a tool call that the client wrote, and its result. Prints the Markdown table of docs/prompt_cache.md.
"""

import copy
from itertools import pairwise

from tests.client import chat
from tests.conftest import Server
from tests.tiny_models import model_folder

ROUNDS = 8
KINDS = ("llama", "hybrid", "sliding")
STYLE = "open"  # the prompt ends by opening the thinking phase, which no later prompt repeats
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}


def opening(question: str = "What is the weather in Paris?") -> list[dict]:
    return [{"role": "system", "content": "You can find the weather."}, {"role": "user", "content": question}]


def tool_round(n: int) -> list[dict]:
    """The assistant's call and the tool's result."""
    call = {"id": f"call{n}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"days": {n}}}'}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"It is {n} degrees in the city and the sky is blue."},
    ]


def turns(rounds: int = ROUNDS) -> list[list[dict]]:
    """The messages of each turn; each begins with those of the turn before."""
    found = [opening()]
    for n in range(1, rounds):
        found.append([*found[-1], *tool_round(n)])
    return found


def ask(server, messages, **body):
    return chat(server, messages, tools=[TOOL], **{"max_tokens": 6, "temperature": 0, **body})


def cached(reply) -> int:
    return reply.usage["prompt_tokens_details"]["cached_tokens"]


def tokens(folder, messages) -> list[int]:
    """The prompt of a turn, from mlx_lm's own tokenizer."""
    from mlx_lm.server import process_message_content
    from mlx_lm.utils import load_tokenizer

    messages = copy.deepcopy(messages)
    process_message_content(messages)
    return load_tokenizer(folder).apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=True)


def shared(folder) -> list[int]:
    """How many of each turn's tokens begin the prompt of the turn before, too."""
    from mlx_patches.prompt_cache import common_prefix

    prompts = [tokens(folder, messages) for messages in turns()]
    return [0, *(common_prefix(a, b) for a, b in pairwise(prompts))]


def main() -> None:
    head, rows = ["turn"], [[n + 1] for n in range(ROUNDS)]
    for kind in KINDS:
        folder = model_folder(kind, style=STYLE)
        columns = {"seen": shared(folder)}
        for name, module in (("ours", "mlx_patched_server"), ("mlx_lm", "mlx_lm.server")):
            server = Server(folder, module=module)
            try:
                replies = [ask(server, messages) for messages in turns()]
            finally:
                server.stop()
            columns["prompt"] = [reply.usage["prompt_tokens"] for reply in replies]
            columns[name] = [cached(reply) for reply in replies]
        for name in ("prompt", "seen", "ours", "mlx_lm"):
            head.append(f"{kind}: {name}")
            for row, value in zip(rows, columns[name], strict=True):
                row.append(value)
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
