"""Proves that a chat template writes each part of a conversation, and says where.

Templates leave out what they don't know, without a word: thoughts, calls, whole turns. So each part
is put between two tags, the conversation is written once more, and the tags are looked for. That a
part's words stand somewhere in the text would prove little: an answer "4" stands in many texts.

Where the text with the tags taken out again is another one (a template that looks at how a content
begins, say), the tags prove nothing. Then each part must at least stand in the text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.model.conversations import BadConversationError, Conversation, Message
from entrenar_py.train.model.rendering import THOUGHTS, ChatTemplate
from entrenar_py.train.model.token_ranges import Range

# Before and after a part, each with the part's number. No text has these: they are no characters.
_OPEN, _CLOSE, _END = "\ufdd2", "\ufdd3", "\ufdd4"
_TAG = re.compile(f"[{_OPEN}{_CLOSE}]([0-9]+){_END}")
_THINK = re.compile(r"(</?think>)")
_WITHOUT_CALLS = "use the checkpoint of a model that calls functions"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A text in a conversation, or a number or truth value that follows such a text.

    `message` is its index, None for a tool. A template may leave out an optional part, and of one
    that is `shortened` all up to a closing mark: earlier thoughts are left out by design.
    """

    message: int | None
    name: str
    value: str
    is_optional: bool = False
    is_shortened: bool = False
    advice: str = "take it out of the row, or use another template"
    literals: tuple[object, ...] = ()  # what follows it


class Parts:
    """The parts of one conversation, in the text that a chat template makes of it.

    `places` are those of the messages' parts, each with the index of its message, as far as they
    are known. Without any, none is.
    """

    def __init__(self, template: ChatTemplate, conversation: Conversation, written: str) -> None:
        """`written` is the text. Raises BadConversationError if it lacks a part."""
        self._messages = conversation.messages
        self._written = written
        self._parts = list[_Part]()
        messages = [self._message(index) for index in range(len(self._messages))]
        tools = None if conversation.tools is None else list(map(self._tool, conversation.tools))
        try:
            found = self._found(template.text(messages, tools))
        except BadConversationError:
            found = None
        self.places = list[tuple[int, Range]]()
        if found is None:
            self._require_words()
        else:
            self._require(found)

    # --- the conversation with tags ---------------------------------------------------------------

    def _tagged(self, part: _Part) -> str:
        """Return a part's value between tags, which have no white space on their inner side."""
        core = part.value.strip()
        if not core:
            return part.value
        begin, number = part.value.index(core), len(self._parts)
        self._parts.append(part)
        end = begin + len(core)
        opened, closed = f"{_OPEN}{number}{_END}", f"{_CLOSE}{number}{_END}"
        return f"{part.value[:begin]}{opened}{core}{closed}{part.value[end:]}"

    def _message(self, index: int) -> Message:
        message = dict(self._messages[index])
        is_earlier = message["role"] == "assistant" and index < len(self._messages) - 1
        if message["content"] is not None:
            *thoughts, rest = _THINK.split(message["content"])
            pieces = [
                piece
                if _THINK.fullmatch(piece)
                else self._tagged(
                    _Part(message=index, name="a thought", value=piece, is_optional=is_earlier)
                )
                for piece in thoughts
            ]
            content = _Part(message=index, name="content", value=rest, is_shortened=is_earlier)
            message["content"] = "".join([*pieces, self._tagged(content)])
        tagged = dict[str, str]()  # one thought may have several names
        for name in THOUGHTS:
            thought = message.get(name)
            if isinstance(thought, str):
                if thought not in tagged:
                    part = _Part(message=index, name=name, value=thought, is_optional=is_earlier)
                    tagged[thought] = self._tagged(part)
                message[name] = tagged[thought]
        if "tool_calls" in message:
            message["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return message

    def _call(self, index: int, call: Message) -> Message:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        part = _Part(message=index, name=f"the call of {name}", value=name, advice=_WITHOUT_CALLS)
        told = self._tagged(part)
        if isinstance(arguments, str):
            tagged: Any = _within_json(arguments, partial(self._argument, index))
        else:
            tagged = self._argument(index, arguments)
        return {**call, "function": {**function, "name": told, "arguments": tagged}}

    def _argument(self, index: int, value: Any, name: str = "") -> Any:
        """Return an argument, or all of them, with tags around each key and each text in it."""
        if isinstance(value, str):
            told = f"the argument {name}={value!r}"
            part = _Part(message=index, name=told, value=value, advice=_WITHOUT_CALLS)
            return self._tagged(part)
        if isinstance(value, list):
            return [self._argument(index, inner, name) for inner in value]
        if not isinstance(value, Mapping):
            return value
        tagged = dict[str, Any]()
        for key, inner in value.items():
            values = inner if isinstance(inner, list) else [inner]
            part = _Part(
                message=index,
                name=f"the argument {key}",
                value=key,
                is_optional=inner is None,
                advice=_WITHOUT_CALLS,
                literals=tuple(one for one in values if isinstance(one, int | float)),
            )
            tagged[self._tagged(part)] = self._argument(index, inner, key)
        return tagged

    def _tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        function = tool["function"]
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            return tool
        advice = f"take tools out of the row, or {_WITHOUT_CALLS}"
        tagged = self._tagged(_Part(message=None, name=f"{name!r}", value=name, advice=advice))
        return {**tool, "function": {**function, "name": tagged}}

    # --- what the template made of it -------------------------------------------------------------

    def _found(self, tagged: str) -> dict[int, list[Range]] | None:
        """Return where the parts are in the text, by their numbers.

        A range of which only the end is known begins at -1. None if the text is another one when
        the tags are taken out.
        """
        found, opened = dict[int, list[Range]](), dict[int, int]()
        length, last = 0, 0
        for tag in _TAG.finditer(tagged):
            length, last = length + tag.start() - last, tag.end()
            number = int(tag[1])
            if tag[0][0] == _OPEN:
                opened[number] = length
            else:
                found.setdefault(number, []).append((opened.pop(number, -1), length))
        return found if _TAG.sub("", tagged) == self._written else None

    def _require(self, found: Mapping[int, list[Range]]) -> None:
        """Note the places of the parts that were found; refuse a row with one that was not."""
        for number, part in enumerate(self._parts):
            places = list(self._whole(part, found.get(number, ())))
            if part.message is not None:
                self.places += [(part.message, place) for place in places]
            if not (places or part.is_optional):
                raise self._left_out(part)
            if places and not _has_all(self._written[places[-1][1] :], part.literals):
                raise self._left_out(part)

    def _whole(self, part: _Part, places: Sequence[Range]) -> Iterator[Range]:
        """Yield the places in which all of a part is written."""
        core = part.value.strip()
        for begin, end in places:
            if begin >= 0 and _is_same(core, self._written[begin:end]):
                yield begin, end
            elif part.is_shortened and self._written[:end].endswith(_rest(core) or "\0"):
                yield end - len(_rest(core)), end

    def _require_words(self) -> None:
        """Refuse a row with a part that is nowhere in the text."""
        text = _bare(self._written)
        for part in self._parts:
            core = part.value.strip()
            words = map(_bare, _spellings(_rest(core) if part.is_shortened else core))
            has_words = part.is_optional or any(word in text for word in words)
            if not has_words or not _has_all(text, part.literals):
                raise self._left_out(part)

    def _left_out(self, part: _Part) -> BadConversationError:
        if part.message is None:
            told = f"the tool {part.name}"
        else:
            role = self._messages[part.message]["role"]
            told = f"a part of message {part.message + 1} ({role}), {part.name}"
        return BadConversationError(f"the chat template leaves out {told}; {part.advice}")


def _within_json(text: str, change: Callable[[Any], Any]) -> str:
    """Return a text of JSON, as some templates need arguments, with `change` applied to its value.

    Another text is changed as it is.
    """
    try:
        value = json_text.load(text)
    except ValueError:
        return str(change(text))
    return json.dumps(change(value), ensure_ascii=False)


def _rest(content: str) -> str:
    """Return what a content has after its last mark that may close a thought."""
    return re.split(r"[>\]]", content)[-1].strip()


def _has_all(text: str, literals: Sequence[object]) -> bool:
    """Return whether a text has numbers and truth values, as Python or JSON writes them."""
    return all(str(one) in text or json.dumps(one) in text for one in literals)


def _spellings(text: str) -> Iterator[str]:
    """Yield a text as templates may write it: as it is, or within JSON, Python, or HTML."""
    yield text
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]
    yield html.escape(text)


def _is_same(text: str, written: str) -> bool:
    """Return whether `written` is `text`, but for white space, cases, and how it is escaped."""
    return text == written or _bare(written) in map(_bare, _spellings(text))


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()
