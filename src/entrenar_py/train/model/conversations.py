"""Reads conversations from common formats of rows: messages, ShareGPT's turns, or pairs.

A row's format is recognised by its fields. Rows that can't be learned from directly, such as images
or pairs of a better and a worse answer (`pairs` reads these), are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from entrenar_py.shared.untrusted import json_text

USUAL = "messages"  # the field with messages, unless settings name another
_SHAREGPT = "conversations"
# Pairs of a prompt and an answer, by their fields.
_PAIRS = (
    ("instruction", "output"),  # Alpaca
    ("instruction", "response"),  # Dolly
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),  # OpenOrca
    ("query", "response"),
)
_MORE = ("input", "context")  # the material of a prompt, appended to it
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "ipython"), "tool"),
    "function_call": "assistant",
}
# ShareGPT's role of an assistant that calls a function, and OpenAI's older field with the call.
_CALL = "function_call"
_MEDIA = ("images", "image", "videos", "audios", "audio")
_ARGUMENTS = "chat_template_kwargs"  # TRL passes a row's to the template
_PREFERENCES = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
# Keys of a message, or of a part of its content: 0 or false means that it is not learned. OpenAI
# and OpenPipe use weight, LLaMA-Factory loss_weight, axolotl train and training, ms-swift loss and
# loss_scale, verl loss_mask.
_WEIGHTS = (
    *("weight", "loss_weight", "train", "training", "trainable", "train_on_turn"),
    *("loss", "loss_scale", "loss_mask"),
)
_MASKS = ("masked",)  # 1 or true means that it is not learned
_DETAILS = ("train_detail", "training_detail")  # axolotl: the characters that are learned
_FUNCTION_DEPTH = json_text.DEPTH_MAX // 2  # of arguments and tools, which messages contain
_FORMS = (
    f"{USUAL}, {_SHAREGPT}, instruction and output, instruction and response, prompt and "
    "completion, question and answer (each with input or context)"
)

Message: TypeAlias = dict[str, Any]


class BadConversationError(ValueError):
    """Raised for a row without a conversation to learn from; says what to use instead."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the form that chat templates take, and the functions that may be called.

    `learned` has the indices of the assistant's messages that are learned.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    learned: Sequence[int]


def read(fields: Mapping[str, Any], field: str) -> Conversation:
    """Return the conversation of a row that has messages in `field`.

    If `field` is the usual one, a row without it may have one of the other formats. Raises
    BadConversationError for any other row.
    """
    _require_good(fields, field)
    name, messages = _given(fields, field)
    if not isinstance(messages, list) or not messages:
        raise BadConversationError(
            f"{name} is not a list of messages ({messages!r}); use [{{role, content}}, ...]"
        )
    pairs = [message(name, number, one) for number, one in enumerate(messages, 1)]
    messages = [message for message, _ in pairs]
    turns = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    learned = [index for index in turns if pairs[index][1]]
    if not learned:
        told = "a weight of 0 in each turn" if turns else "no turn"
        raise BadConversationError(f"{name}: {told} of the assistant, so nothing to predict")
    for index in learned:
        if not ((messages[index]["content"] or "").strip() or messages[index].get("tool_calls")):
            raise BadConversationError(f"{name}: the assistant's message {index + 1} is empty")
    before = system(fields, messages)
    return Conversation(
        messages=[*before, *messages[: max(learned) + 1]],
        tools=tools(fields),
        learned=[len(before) + index for index in learned],
    )


def prompt(fields: Mapping[str, Any], field: str) -> Conversation:
    """Return the prompt of a row: its messages without trailing turns of the assistant.

    Nothing of it is learned. The row may lack the answer. Raises BadConversationError as `read`
    does.
    """
    _require_good(fields, field)
    name, values = _given(_answered(fields, field), field)
    if not isinstance(values, list) or not values:
        raise BadConversationError(
            f"{name} is not a list of messages ({values!r}); use [{{role, content}}, ...]"
        )
    messages = [message(name, number, one)[0] for number, one in enumerate(values, 1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        raise BadConversationError(f"{name}: no turn of the user before an answer, so no prompt")
    if messages[-1]["role"] == "user" and not (messages[-1]["content"] or "").strip():
        raise BadConversationError(f"{name}: the last message before the answer is empty")
    before = system(fields, messages)
    return Conversation(messages=[*before, *messages], tools=tools(fields), learned=())


def before(fields: Mapping[str, Any], answer: str) -> list[Message]:
    """Return the messages before the text in the field `answer`, from the forms of pairs.

    They are empty if the row has no question. The row's system message is not among them.
    """
    questions = (prompt for prompt, _ in _PAIRS if prompt != "prompt" and fields.get(prompt))
    prompt = next(questions, None)
    if prompt is None:
        return []
    *turns, _ = _of_pair(fields, prompt, answer)
    return [message(prompt, number, one)[0] for number, one in enumerate(turns, 1)]


def _answered(fields: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the row; if it is a prompt without an answer, with an empty answer."""
    has = [name for name, value in fields.items() if value is not None]
    if field != USUAL or field in has or _SHAREGPT in has:
        return fields
    pairs = [(prompt, answer) for prompt, answer in _PAIRS if prompt in has]
    if not pairs or any(answer in has for _, answer in pairs):
        return fields
    prompt, answer = pairs[0]
    return {**fields, answer: [] if isinstance(fields[prompt], list) else ""}


def _require_good(fields: Mapping[str, Any], field: str) -> None:
    """Raise BadConversationError for images, pairs of answers, and answers marked as bad.

    Also for arguments of the chat template.
    """
    require_text_only(fields)
    require_usual_template(fields)
    for better, worse in _PREFERENCES:
        if field not in (better, worse) and fields.get(better) and fields.get(worse):
            raise BadConversationError(
                f"has {better} and {worse} answers, but this task doesn't learn preferences; use "
                f"task: preference, or to learn only the {better} answers, make each a list of "
                f"messages and set data.messages_field: {better}"
            )
    if fields.get("label") is False:
        raise BadConversationError("label=False marks a bad answer; leave such rows out")


def require_text_only(fields: Mapping[str, Any]) -> None:
    """Raise BadConversationError for a row with images or sounds."""
    media = [name for name in _MEDIA if fields.get(name)]
    if media:
        raise BadConversationError(f"has {media[0]}; only text is learned, leave such rows out")


def require_usual_template(fields: Mapping[str, Any]) -> None:
    """Raise BadConversationError for a row with its own arguments for the chat template."""
    arguments = fields.get(_ARGUMENTS)
    if isinstance(arguments, Mapping):  # Parquet gives every row all keys
        arguments = {name: value for name, value in arguments.items() if value is not None}
    if arguments:
        raise BadConversationError(
            f"has {_ARGUMENTS}={arguments!r}, but templates get no arguments here; leave it out "
            "of the row, or set the same values for all rows at the start of the checkpoint's "
            "template: {% set name = value %}"
        )


def _given(fields: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """Return the name and the value of the field with messages, or the messages of a pair."""
    has = [name for name, value in fields.items() if value is not None]
    if field in has:
        return field, fields[field]
    if field == USUAL and _SHAREGPT in has:
        return _SHAREGPT, fields[_SHAREGPT]
    for prompt, answer in _PAIRS if field == USUAL else ():
        if prompt in has and answer in has:
            return answer, list(_of_pair(fields, prompt, answer))
    told = f"has no field {field!r}; it has {', '.join(has) or 'none'}"
    raise BadConversationError(f"{told}; use {_FORMS}" if field == USUAL else told)


def _of_pair(fields: Mapping[str, Any], prompt: str, answer: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(fields[prompt], list) and isinstance(fields[answer], list):
        # TRL's format: both are messages, and no message of the prompt is learned.
        for message in fields[prompt]:
            yield _unlearned(message) if isinstance(message, Mapping) else message
        yield from fields[answer]
        return
    names = [name for name in (prompt, *_MORE) if fields.get(name) is not None]
    for name in (*names, answer):
        if not isinstance(fields[name], str):
            raise BadConversationError(f"{name}={fields[name]!r}: use a text")
    parts = [fields[name] for name in names if fields[name]]
    history = fields.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != len(("user", "assistant")):
            raise BadConversationError("history is not a list of [prompt, answer]")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
    yield {"role": "user", "content": "\n\n".join(parts)}
    yield {"role": "assistant", "content": fields[answer]}


def _unlearned(message: Mapping[str, Any]) -> Message:
    """Return a message that is not learned, whatever its keys say."""
    marks = (*_WEIGHTS, *_MASKS)
    return {**{key: value for key, value in message.items() if key not in marks}, "weight": 0}


def message(name: str, number: int, entry: Any) -> tuple[Message, bool]:
    """Return a message in the form that templates take, and whether it is learned."""
    place = f"{name}: message {number}"
    if not isinstance(entry, Mapping):
        raise BadConversationError(f"{place} is not an object; use {{role, content}}")
    # Parquet gives every message all keys.
    message = {key: value for key, value in entry.items() if value is not None}
    if not message.get("tool_calls", True):  # many write an empty list, which templates refuse
        del message["tool_calls"]
    said = message.pop("role", None) or message.pop("from", None)
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadConversationError(
            f"{place} has role {said!r}; use one of {', '.join(dict.fromkeys(_ROLES.values()))}"
        )
    is_learned = _is_learned(place, message)
    content = message.pop("content", message.pop("value", None))
    if _CALL in message and "tool_calls" not in message:
        message["tool_calls"] = message.pop(_CALL)
    if said == _CALL:
        message["tool_calls"], content = [_parsed(place, content)], ""
    message |= {"role": role, **_content(place, content, calls="tool_calls" in message)}
    if "tool_calls" in message:
        message["tool_calls"] = [_call(place, one) for one in _listed(message["tool_calls"])]
    return message, is_learned


def _is_learned(place: str, message: Message) -> bool:
    """Remove the keys that say whether a message is learned, and return whether it is.

    A truth value under an unknown name might also say so, and is refused.
    """
    weights = list[bool]()
    for key in (*_WEIGHTS, *_MASKS):
        if key in message:
            value = message.pop(key)
            if value not in (0, 1):
                raise BadConversationError(f"{place} has {key} {value!r}; use 0 or 1")
            weights.append(bool(value) is (key not in _MASKS))
    if len(set(weights)) > 1:
        raise BadConversationError(
            f"{place} has one key that says to learn it, and one that says not to; leave one out"
        )
    _require_no_marks(place, message)
    return all(weights)


def _require_no_marks(place: str, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, bool) or (key in _DETAILS and value):
            raise BadConversationError(
                f"{place} has {key}={value!r}; if it means that the turn is not learned, "
                "name it weight (0 or 1), else remove it from the row"
            )


def _content(place: str, content: object, *, calls: bool) -> Message:
    """Return the content as one text, with the reasoning and the calls that it contains, if any."""
    if content is None and calls:
        return {"content": None}
    if isinstance(content, str):
        return {"content": content}
    if not isinstance(content, list):
        raise BadConversationError(f"{place} has no text as its content ({content!r})")
    texts, extras = list[str](), dict[str, Any]()
    for part in content:
        if isinstance(part, Mapping):
            _require_whole(place, part)
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = next((part[key] for key in ("text", "value") if part.get(key)), "") if kind else part
        if kind == "reasoning":
            extras["reasoning_content"] = text
        elif kind == "tool_call":
            extras.setdefault("tool_calls", []).append(_parsed(place, text))
        elif kind in ("text", None) and isinstance(text, str):
            texts.append(text)
        else:
            raise BadConversationError(
                f"{place} has a part of type {kind!r}; only text is learned, leave such rows out"
            )
    return {"content": "".join(texts), **extras}


def _require_whole(place: str, part: Mapping[str, Any]) -> None:
    if marks := [key for key in (*_WEIGHTS, *_MASKS) if part.get(key) is not None]:
        raise BadConversationError(
            f"{place} has a part with {marks[0]}={part[marks[0]]!r}, but a turn is trained on "
            "as a whole or not at all; set the message's weight to 0 or 1 instead"
        )
    _require_no_marks(place, part)


def _parsed(place: str, text: object) -> Any:
    try:
        return _of_text(text) if isinstance(text, str) else text
    except ValueError as error:
        raise BadConversationError(f"{place} has a call that is not JSON ({error})") from error


def _of_text(text: str) -> Any:
    value = json_text.load(text, names_once=True)
    json_text.require_texts(value)
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(place: str, call: Any) -> Message:
    """Return a function call in the form that templates take: its arguments are an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadConversationError(f"{place} has a call without a function's name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form; often empty if there are no arguments
        arguments = _parsed(place, arguments) if arguments.strip() else {}
    try:
        json_text.require_flat(arguments, _FUNCTION_DEPTH)
    except ValueError as error:
        raise BadConversationError(f"{place} has a call with arguments that are {error}") from error
    about = {} if function is call else dict(call)
    named = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **about, "function": {**function, **named}}


def system(fields: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return the row's system message that comes before `messages`, if they begin with none."""
    if messages[0]["role"] == "system":
        return []
    name = "system" if fields.get("system") else "system_prompt"
    said = fields.get(name)
    if said is not None and not isinstance(said, str):
        raise BadConversationError(f"{name}={said!r}: use a text")
    return [{"role": "system", "content": said}] if said else []


def tools(fields: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the functions that a row offers to the assistant, in the form that templates take."""
    tools = fields.get("tools") or fields.get("functions")  # the latter is OpenAI's older field
    try:
        if isinstance(tools, str):
            tools = _of_text(tools) if tools.strip() else None
        json_text.require_flat(tools, _FUNCTION_DEPTH)
    except ValueError as error:
        raise BadConversationError(f"tools are not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadConversationError("tools are not a list of objects")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
