"""The map: one line a room.

seams.py              the pin, every name of mlx_lm that is touched, and how names are replaced
access.py             who may call
request_bodies.py     a request's body, read or refused
chat_messages.py      messages as the chat template takes them
image_urls.py         images from data URLs, or from public addresses
context_window.py     a prompt and its reply fit into the model's window
structured_output.py  response_format and its kin → a llguidance grammar, compiled and cached
json_schemas.py       a JSON schema made such that a grammar holds to it, and what had to be left out
schema_keywords.py    what llguidance holds of one schema's keywords
early_tokenizer.py    the tokenizer is loaded beside the weights
reply_format.py       how a model writes a reply: thinking markers, end tokens, the text of a token
harmony.py            the Harmony reply format (gpt-oss)
harmony_headers.py    the words of its headers
watcher.py            the logits processor: phases, grammar, stop strings; takes tokens back
watched_replies.py    which replies are watched, and the tokens of each step
token_masks.py        masks over the vocabulary, on any device
padded_rows.py        ids beyond the vocabulary are never sampled
reply_limits.py       reasoning budget, hedges, repeats
stop_strings.py       stop strings, matched on text
call_reader.py        calls read out of a reply as it comes
early_calls.py        what is said of a call before it is whole
tool_arguments.py     a text between call markers → calls: mlx_lm's parsers, made total
tool_formats.py       which shapes each of mlx_lm's tool formats has
tool_dialects.py      the shapes of calls: JSON, JSON behind a header, Python
tag_dialects.py       parameters between tags: where a value ends
argument_values.py    values that a model wrote → JSON, by their schema
reply_events.py       generated tokens → one stream of events
chat_wire.py          the events as chat completions and completions write them
keepalive.py          comment lines while nothing comes
cancellation.py       a client that is gone
tool_rules.py         what a request says of its tools
tool_choice.py        which tool calls may come
tool_grammars.py      a model's way of writing a call → a grammar
tag_grammars.py       the same for parameters between tags
gemma_grammars.py     the same for Gemma's objects
mistral_grammars.py   the same for Mistral's two forms
grammar_rules.py      what all of them write their rules with
survival.py           a fault stays with its request, the generation thread comes back
process.py            starting, the ready line, ending
model_names.py        one process serves one model
prompt_cache.py       an agent's conversation pays for its new tokens only
draft_models.py       a draft model only where it is right
cache_leak.py         counters of batched caches that would grow with every step
demo_model.py         a real small model without a hub

To add one: docs/adding_a_patch.md.
"""
