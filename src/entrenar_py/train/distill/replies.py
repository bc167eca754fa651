"""Requests to an OpenAI-compatible server, and what its replies say, without any connection."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from entrenar_py.shared.untrusted import escaping, json_text
from entrenar_py.train.distill.prompts import REFUSED, TRUNCATED, WHOLE, Answer, Prompt
from entrenar_py.train.model.conversations import Conversation, Message

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # others are not OpenAI's
_SHOWN_CHARS = 200
VALUES_MAX = 2**16  # of a reply: an answer has a few, calls of functions some hundred
# How answers end, by OpenAI and by servers that say it in their own words.
_WHOLE = ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn", "stop_sequence")
_TRUNCATED = ("length", "max_tokens", "model_length")


class BadReplyError(ValueError):
    """A reply that holds no answer, and why."""


def request(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Return the path below the base URL, and the part of the body that is the prompt."""
    if not isinstance(prompt.asked, Conversation):
        return "completions", {"prompt": prompt.asked}
    body: dict[str, Any] = {"messages": [_message(one) for one in prompt.asked.messages]}
    if prompt.asked.tools:
        body["tools"] = list(prompt.asked.tools)
    return "chat/completions", body


def _message(message: Message) -> Message:
    """Return a message as OpenAI has it: the arguments of calls are JSON in a text."""
    sent = {key: message[key] for key in _SENT if key in message}
    if "tool_calls" in sent:
        sent["tool_calls"] = [_call(*one) for one in enumerate(sent["tool_calls"])]
    return sent


def _call(number: int, call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], default=str)
    return {"id": f"call_{number}", **call, "function": {**function, "arguments": arguments}}


def answer(body: bytes) -> Answer:
    """Return the answer in a reply's body. Raises BadReplyError."""
    record = _record(body)
    choices = record.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise BadReplyError(f"a reply without choices ({problem(body)})")
    message = choice.get("message")
    said: Mapping[str, Any] = message if isinstance(message, Mapping) else choice
    content = said.get("content") if said is message else said.get("text")
    calls = said.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise BadReplyError(f"a reply whose answer is no text ({problem(body)})")
    content, reason = content or "", choice.get("finish_reason")
    try:
        json.dumps([content, calls], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadReplyError("an answer with half of a character") from error
    ended = reason.lower() if isinstance(reason, str) else None
    if ended in _TRUNCATED:
        return Answer(TRUNCATED, content)
    if said.get("refusal") or ended == "content_filter":
        return Answer(REFUSED, content)
    if ended not in _WHOLE:
        told = "does not say how it ended" if reason is None else f"ended by {reason!r}"
        raise BadReplyError(f"an answer that {escaping.shortened(told)} (finish_reason)")
    if not (content.strip() or calls):
        return Answer(REFUSED, content)
    return Answer(WHOLE, content, calls)


def _record(body: bytes) -> Mapping[str, Any]:
    try:
        record = json_text.load(body, values_max=VALUES_MAX)
    except ValueError as error:
        raise BadReplyError(f"a reply that is not whole JSON ({error})") from error
    if not isinstance(record, Mapping):
        raise BadReplyError(f"a reply that is no object of JSON ({problem(body)})")
    return record


def problem(body: bytes) -> str:
    """Return what a body says of an error, in a few words."""
    try:
        record = json_text.load(body, values_max=VALUES_MAX)
    except ValueError:
        record = body.decode(errors="replace")
    if isinstance(record, Mapping):
        error = record.get("error", record.get("message", record.get("detail", record)))
        record = error.get("message", error) if isinstance(error, Mapping) else error
    text = record if isinstance(record, str) else reprlib.repr(record)
    return escaping.line(escaping.shortened(text, chars_max=_SHOWN_CHARS)) or "nothing"
