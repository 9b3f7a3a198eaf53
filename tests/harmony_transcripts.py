"""Replies of gpt-oss, and what they say: (content, reasoning, calls), from openai-harmony's parser or from harmony.md.

A `~` cuts tokens: `<~|end|>` is ordinary characters. TRANSCRIPTS maps each reply, which follows `<|start|>assistant`
in the prompt, to what it says, or to None where openai-harmony's strict parser is the judge.
"""

from tests.harmony_vocabulary import encoding

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
TURN = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
PARIS = '{"location": "Paris", "days": 3}'

TRANSCRIPTS = {
    # The shapes of harmony.md
    f"{ANALYSIS}I think.<|end|>{TURN}{FINAL}Hello there!<|return|>": None,
    f"{CALL}{PARIS}<|call|>": None,
    f"{TURN} to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>": None,
    f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>": None,
    f"<|channel|>commentary<|message|>Let me check.<|end|>{TURN}{CALL}{PARIS}<|call|>": None,
    f"<|channel|>analysis to=functions.get_weather code<|message|>{PARIS}<|call|>": None,
    # Their parts in other ways
    f"{FINAL}Hello there!<|return|>": None,
    f"{FINAL}<|return|>": None,
    f"{ANALYSIS}Only thoughts.<|return|>": None,
    f"{ANALYSIS}<|end|>{TURN}{FINAL}No thoughts.<|return|>": None,
    f"<|channel|>commentary to=functions.get_weather<|message|>{PARIS}<|call|>": None,
    f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{PARIS}<|call|>": None,
    f"<|channel|>commentary to=functions.get_weather json<|message|>{PARIS}<|call|>": None,
    f"<|channel|>commentary to=functions.get_weather code<|message|>{PARIS}<|call|>": None,
    f"<|channel|>final to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>": None,
    f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>": None,
    f" to=functions.get_weather<|channel|>analysis<|message|>{PARIS}<|call|>": None,
    f"<|channel|>commentary functions.get_weather<|message|>{PARIS}<|call|>": None,
    f"{CALL}{PARIS}<|return|>": None,
    f"{CALL}{{}}<|call|>": None,
    '<|channel|>final <|constrain|>json<|message|>{"ok": true}<|return|>': (
        '{"ok": true}',
        "",
        [],
    ),  # openai-harmony takes a lone content type for a recipient
    f"<|channel|>commentary <|constrain|>json<|message|>{{}}<|end|>{TURN}{FINAL}x<|return|>": ("{}x", "", []),
    "<|channel|>commentary to=assistant<|message|>for nobody<|end|>": ("for nobody", "", []),
    # Several messages in a row
    f"{ANALYSIS}One.<|end|>{TURN}{ANALYSIS} Two.<|end|>{TURN}{FINAL}Three.<|return|>": None,
    f"{FINAL}One.<|end|>{TURN}{ANALYSIS}Two.<|end|>{TURN}{FINAL} Three.<|return|>": None,
    f"{ANALYSIS}Look.<|end|>{TURN}<|channel|>commentary<|message|>Calling.<|end|>{TURN}{CALL}{PARIS}<|call|>": None,
    f'{CALL}{PARIS}<|end|>{TURN}<|channel|>commentary to=functions.f<|message|>{{"a":1}}<|call|>': None,
    f"{CALL}{PARIS}<|end|>{TURN}{CALL}{PARIS}<|end|>{TURN}{FINAL}Done.<|return|>": None,
    f"{ANALYSIS}a<|end|>{TURN} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>": None,
    # Built-in tools
    '<|channel|>analysis to=browser.search code<|message|>{"query": "weather"}<|call|>': None,
    f"{ANALYSIS}Compute.<|end|>{TURN}<|channel|>analysis to=python code<|message|>print(2 + 3)\n<|call|>": None,
    # Arguments that are no JSON
    f"{CALL}location is Paris<|call|>": None,
    f'{CALL}{{"location": "Par<|call|>': None,
    f"{CALL}\n  {PARIS}\n<|call|>": None,
    # Characters
    f"{ANALYSIS}👩‍👩‍👧 𝔘𝔫𝔦 é 日本<|end|>{TURN}{FINAL}🏳️‍🌈 São Paulo ‱ 😀😀<|return|>": None,
    f'{CALL}{{"text": "🏴‍☠️ \\u00e9 日本"}}<|call|>': None,
    f"{FINAL}Write <~|end|> and <~|channel|>analysis<~|message|> as they are, <|<~|<<|return|>": None,
    f"{ANALYSIS}The marker <~|start|>assistant ends.<|end|>{TURN}{FINAL}  a\n\n b  <|return|>": None,
    f"{FINAL}final analysis commentary json assistant to=functions.f<|return|>": None,
    f"{ANALYSIS}\nWell,\n\n1. `<think>`\n<|end|>{TURN}{FINAL}</think><tool_call>{{}}</tool_call><|return|>": None,
    # Damaged headers, as openai-harmony reads them
    f"<|channel|>commentary?<|message|>Hello<|end|>{TURN}{FINAL} there<|return|>": None,
    f"<|channel|>comment<|message|>Hello<|end|>{TURN}{FINAL} there<|return|>": None,
    f"<|channel|>commentary? to=functions.get_weather<|message|>{PARIS}<|call|>": None,
    "<|message|>Hello<|return|>": None,
    # and as harmony.md does
    f"{ANALYSIS}a<|end|>\n{TURN}{FINAL}b<|return|>": ("b", "a", []),
    f"{ANALYSIS}a<|end|>But<|start|>assistant{FINAL} b<|return|>": ("But b", "a", []),
    "<|channel|>commentary?… Let me see.<|return|>": ("… Let me see.", "", []),
    f"<|channel|>commentary<|channel|>analysis<|message|>a<|end|>{TURN}{FINAL}b<|return|>": ("b", "a", []),
    "<|channel|>commentary to=functions.f<|channel|>final<|message|>b<|return|>": ("b", "", []),
    f"<|channel|>commentary to=functions.f<|start|>assistant{FINAL}b<|return|>": ("b", "", []),
    f"<|channel|>commentary to=functions.f<|channel|>json<|message|>{PARIS}<|call|>": ("", "", [("f", PARIS)]),
    "<|channel|>final Hello there.<|return|>": ("Hello there.", "", []),
    "<|channel|>final Hello<|return|>": ("Hello", "", []),
    '<|channel|>final{"a": 1}<|return|>': ('{"a": 1}', "", []),
    "<|channel|>The answer is 42.<|return|>": ("The answer is 42.", "", []),
    f"<|channel|>analysis I think so.<|end|>{TURN}{FINAL}Yes.<|return|>": ("Yes.", "I think so.", []),
    f"<|channel|>commentary to=functions.f {PARIS}<|call|>": ("", "", [("f", PARIS)]),
    "<|channel|>commentary to=functions.f json<|call|>": ("", "", [("f", "{}")]),
    f"{FINAL}a<|start|>assistant{FINAL} b<|return|>": ("a b", "", []),
    f"{ANALYSIS}a{FINAL}b<|return|>": ("b", "a", []),
    f"{FINAL}a<|message|> b<|constrain|> c<|return|>": ("a b c", "", []),
    f"{ANALYSIS}a<|end|>assistant{FINAL}b<|return|>": ("b", "a", []),
    f"analysis<|message|>a<|end|>{TURN}{FINAL}b<|return|>": ("b", "a", []),
    f"{ANALYSIS}a<|end|>{TURN}<|message|>b<|return|>": ("b", "a", []),
    f"{ANALYSIS}a<|end|>{TURN}Hello<|return|>": ("Hello", "a", []),
    # Bare answers
    '{"ok": true}<|return|>': ('{"ok": true}', "", []),
    "Hello there, to=functions.f is text.<|return|>": ("Hello there, to=functions.f is text.", "", []),
    "assistant<|return|>": ("assistant", "", []),
    "final words<|return|>": ("final words", "", []),
    " to be or not<|return|>": (" to be or not", "", []),
    "😀<|return|>": ("😀", "", []),
    "<~|channel|>final<~|message|>x<|return|>": ("<|channel|>final<|message|>x", "", []),
    f"Hello<|end|>{TURN}{FINAL} there<|return|>": ("Hello there", "", []),
}


def tokens_of(reply: str) -> list[int]:
    """The o200k_harmony ids of a reply of TRANSCRIPTS, with its end token."""
    return [token for piece in reply.split("~") for token in encoding().encode(piece, allowed_special="all")]


def judge(tokens: list[int]) -> tuple | None:
    """What openai-harmony's parser says of a reply, or None where it accepts none of it."""
    from openai_harmony import HarmonyError, Role

    role = None if tokens[0] == 200006 else Role.ASSISTANT
    try:
        messages = encoding().parse_messages_from_completion_tokens(tokens, role, strict=True)
    except HarmonyError:
        return None
    return said((m.channel, m.recipient, m.content[0].text) for m in messages)


def said(messages) -> tuple:
    """(content, reasoning, calls) of (channel, recipient, text) each."""
    content, reasoning, calls = "", "", []
    for channel, recipient, text in messages:
        if recipient is not None:
            calls.append((recipient.removeprefix("functions."), text))
        elif channel == "analysis":
            reasoning += text
        else:
            content += text
    return content, reasoning, calls
