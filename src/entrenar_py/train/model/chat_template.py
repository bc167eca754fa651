"""Finds the tokens of a conversation that are learned, with a tokenizer's chat template.

The rendered text shows which characters belong to the assistant. If the template has marks (`{%
generation %}`), these decide. Otherwise a turn begins where the generation prompt ends. A template
may render an earlier turn differently once later turns follow, such as one that leaves out earlier
reasoning. Then the conversation is rendered with a different answer, and the turn is where the two
texts differ.

A token is learned if its last character is the assistant's. So a token that begins before an answer
and ends in it is learned, and a token that ends after it is not.
"""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from entrenar_py.shared.untrusted import json_text
from entrenar_py.shared.wording import counted
from entrenar_py.train.model import pairs
from entrenar_py.train.model.conversations import BadConversationError, Conversation, Message
from entrenar_py.train.model.pairs import Chats, Encoded
from entrenar_py.train.model.rendering import (
    THOUGHTS,
    ChatTemplate,
    EndlessTemplateError,
    Range,
    TemplateRefusalError,
    TokenRanges,
)

Rows = TypeVar("Rows", Conversation, Chats)
Found = TypeVar("Found")

# Tags before and after a part, next to the part's number. They are Unicode's noncharacters, which
# no text contains.
_OPEN, _CLOSE, _END = "\ufdd2", "\ufdd3", "\ufdd4"
_TAG = re.compile(f"[{_OPEN}{_CLOSE}]([0-9]+){_END}")
_THINK = re.compile(r"(</?think>)")
_WITHOUT_CALLS = "use the checkpoint of a model that calls functions"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A text in a conversation, perhaps with numbers or truth values that follow it.

    `message` is its index, None for a tool. A template may leave out an optional part. Of a part
    that is `shortened`, it may leave out everything up to a closing mark: some templates remove
    earlier reasoning by design.
    """

    message: int | None
    name: str
    value: str
    is_optional: bool = False
    is_shortened: bool = False
    advice: str = "take it out of the row, or use another template"
    literals: tuple[object, ...] = ()  # numbers and truth values that follow it


class Parts:
    """The parts of one conversation, in the text that a chat template renders from it.

    Templates silently leave out what they don't know: reasoning, calls, whole turns. So each part
    is put between two tags, the conversation is rendered again, and the tags are searched for.
    Searching for a part's words would prove little: an answer "4" occurs in many texts. If the text
    differs once the tags are removed (say, because a template checks how a content begins), the
    tags prove nothing. Then each part must at least occur in the text.

    `places` has the message's index and the range of each part of a message that was located. It is
    empty if the tags prove nothing.
    """

    def __init__(self, template: ChatTemplate, conversation: Conversation, written: str) -> None:
        """`written` is the rendered text. Raises BadConversationError if it lacks a part."""
        self._messages = conversation.messages
        self._written = written
        self._parts = list[_Part]()
        messages = [self._message(index) for index in range(len(self._messages))]
        tools = None if conversation.tools is None else list(map(self._tool, conversation.tools))
        try:
            ranges = self._found(template.text(messages, tools))
        except BadConversationError:
            ranges = None
        self.places = list[tuple[int, Range]]()
        if ranges is None:
            self._require_words()
        else:
            self._require(ranges)

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
        tagged = dict[str, str]()  # the same reasoning may have several names
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
        name = self._tagged(part)
        if isinstance(arguments, str):
            tagged: Any = _within_json(arguments, partial(self._argument, index))
        else:
            tagged = self._argument(index, arguments)
        return {**call, "function": {**function, "name": name, "arguments": tagged}}

    def _argument(self, index: int, value: Any, name: str = "") -> Any:
        """Return an argument, or all arguments, with tags around each key and each text."""
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

    # --- the rendered text ------------------------------------------------------------------------

    def _found(self, tagged: str) -> dict[int, list[Range]] | None:
        """Return the places of the parts in the text, by their numbers.

        A range begins at -1 if only its end is known. None if the text differs once the tags are
        removed.
        """
        ranges, opened = dict[int, list[Range]](), dict[int, int]()
        length, last = 0, 0
        for tag in _TAG.finditer(tagged):
            length, last = length + tag.start() - last, tag.end()
            number = int(tag[1])
            if tag[0][0] == _OPEN:
                opened[number] = length
            else:
                ranges.setdefault(number, []).append((opened.pop(number, -1), length))
        return ranges if _TAG.sub("", tagged) == self._written else None

    def _require(self, ranges: Mapping[int, list[Range]]) -> None:
        """Note the places of the parts. Raises BadConversationError if one was not found."""
        for number, part in enumerate(self._parts):
            places = list(self._whole(part, ranges.get(number, ())))
            if part.message is not None:
                self.places += [(part.message, place) for place in places]
            if not (places or part.is_optional):
                raise self._left_out(part)
            if places and not _has_all(self._written[places[-1][1] :], part.literals):
                raise self._left_out(part)

    def _whole(self, part: _Part, places: Sequence[Range]) -> Iterator[Range]:
        core = part.value.strip()
        for begin, end in places:
            if begin >= 0 and _is_same(core, self._written[begin:end]):
                yield begin, end
            elif part.is_shortened and self._written[:end].endswith(_rest(core) or "\0"):
                yield end - len(_rest(core)), end

    def _require_words(self) -> None:
        """Raise BadConversationError if a part occurs nowhere in the text."""
        text = _bare(self._written)
        for part in self._parts:
            core = part.value.strip()
            words = map(_bare, _spellings(_rest(core) if part.is_shortened else core))
            has_words = part.is_optional or any(word in text for word in words)
            if not has_words or not _has_all(text, part.literals):
                raise self._left_out(part)

    def _left_out(self, part: _Part) -> BadConversationError:
        if part.message is None:
            name = f"the tool {part.name}"
        else:
            role = self._messages[part.message]["role"]
            name = f"a part of message {part.message + 1} ({role}), {part.name}"
        return BadConversationError(f"the chat template leaves out {name}; {part.advice}")


def _within_json(text: str, change: Callable[[Any], Any]) -> str:
    """Return a text of JSON with `change` applied to its value. Some templates need such arguments.

    If the text is not JSON, `change` is applied to the text itself.
    """
    try:
        value = json_text.load(text)
    except ValueError:
        return str(change(text))
    return json.dumps(change(value), ensure_ascii=False)


def _rest(content: str) -> str:
    return re.split(r"[>\]]", content)[-1].strip()


def _has_all(text: str, literals: Sequence[object]) -> bool:
    return all(str(one) in text or json.dumps(one) in text for one in literals)


def _spellings(text: str) -> Iterator[str]:
    yield text
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]
    yield html.escape(text)


def _is_same(text: str, written: str) -> bool:
    """Return whether `written` is `text`, apart from white space, case and escaping."""
    return text == written or _bare(written) in map(_bare, _spellings(text))


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()


# Two texts that replace a turn. They have different first and last characters, so whatever a
# conversation has in common with both versions lies around the turn.
_OTHERS = ("\u00a7 other", "\u00b6 another \u00a4")


class ChatEncoder:
    """Encodes conversations with one tokenizer. Not safe for use by two threads at once."""

    def __init__(self, tokenizer: Any, day: str | None = None) -> None:
        """`day` is the date that a template with a clock gets; None stands for the present time."""
        self._template = ChatTemplate(tokenizer, day)
        self._ranges = TokenRanges(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation up to the point where an answer begins.

        Raises BadConversationError if the template refuses it.
        """
        return _with_either(self._prompt, conversation, _texts_of)

    def _prompt(self, conversation: Conversation) -> list[int]:
        messages, tools = conversation.messages, conversation.tools
        return self._ranges.tokens(self._template.text(messages, tools, prompt=True))

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool], bool]:
        """Return the tokens of a conversation, and for each whether it is to be predicted.

        Also returns whether the last turn follows the text with which the template asks for it:
        some ask with an open thought (`<think>`) that answers without a thought don't have.

        Raises BadConversationError if the template refuses it or leaves out a part of it, or if the
        beginning of a turn can't be found.
        """
        return _with_either(self._encode, conversation, _texts_of)

    def pair(self, pair: Chats) -> Encoded:
        """Return the tokens of both sides of a pair: a completion begins after their prompt.

        As in TRL, the prompt ends at the first token in which a side differs from the prompt alone,
        rendered with the generation prompt. Raises BadConversationError as `encode` does.
        """
        return _with_either(self._pair, pair, _pair_of_texts)

    def _pair(self, pair: Chats) -> Encoded:
        prompt = self._prompt(Conversation(messages=pair.prompt, tools=pair.tools, learned=()))
        chosen, rejected = (
            self._whole(Conversation(messages=messages, tools=pair.tools, learned=()))
            for messages in ([*pair.prompt, *pair.chosen], [*pair.prompt, *pair.rejected])
        )
        return pairs.encoded(prompt, chosen, rejected)

    def _whole(self, conversation: Conversation) -> list[int]:
        text = self._template.text(conversation.messages, conversation.tools)
        Parts(self._template, conversation, text)  # raises if one is left out
        return self._ranges.tokens(text)

    def _encode(self, conversation: Conversation) -> tuple[list[int], list[bool], bool]:
        text = self._template.text(conversation.messages, conversation.tools)
        places = Parts(self._template, conversation, text).places
        runs = self._template.marked(conversation.messages, conversation.tools)
        if runs is not None:
            learned = _of_turns(conversation, runs, places)
        else:
            learned = [self._part(conversation, text, index) for index in conversation.learned]
            _require_own(conversation, learned, places)
        targets = self._ranges.targets(text, learned)
        if targets is None:
            raise BadConversationError(
                "this tokenizer does not give the positions of its tokens, and its tokens "
                "change if the text ends after a turn; use a checkpoint with a "
                "tokenizer.json"
            )
        if not any(targets[1]):
            raise BadConversationError(
                "the chat template leaves out everything that the assistant says"
            )
        return *targets, self._is_aligned(conversation, text, places)

    def _is_aligned(
        self, conversation: Conversation, text: str, places: Sequence[tuple[int, Range]]
    ) -> bool:
        """Return whether the last turn in the whole `text` follows the generation prompt.

        Earlier turns may differ from those of a prompt, in which some templates keep reasoning. So
        if the text doesn't begin with the prompt, only what a prompt adds to its messages is looked
        for, after them.
        """
        messages, tools = conversation.messages[:-1], conversation.tools
        if not messages or messages[-1]["role"] == "assistant":
            return True  # nobody asks so
        prompt = self._template_text(messages, tools, prompt=True)
        if prompt is None or text.startswith(prompt):
            return True
        plain = self._template_text(messages, tools)
        if plain is None:
            return True
        ends = [end for index, (_, end) in places if index < len(messages)]
        return text.find(prompt[_shared(prompt, plain) :], max(ends, default=0)) >= 0

    def _part(self, conversation: Conversation, text: str, index: int) -> Range:
        """Return where the turn of message `index` begins and ends in the whole `text`."""
        messages, tools = conversation.messages, conversation.tools
        prompt = ""
        if index:  # some templates refuse a conversation without a turn of a user
            prompt = self._template_text(messages[:index], tools, prompt=True) or ""
        if not text.startswith(prompt):
            bare = [_without_thoughts(message) for message in messages[:index]]
            prompt = self._template_text(bare, tools, prompt=True) or ""
        turn = self._template_text(messages[: index + 1], tools)
        begins = bool(prompt) and text.startswith(prompt)
        ends = turn is not None and text.startswith(turn)
        if begins and turn is not None and ends:
            return len(prompt), len(turn)
        # Earlier reasoning is left out. A turn with calls can't be replaced by a text: some
        # templates refuse results without their calls.
        bare = [*messages[:index], _without_thoughts(messages[index])]
        short = self._template_text(bare, tools) if begins and bare[-1] != messages[index] else None
        if short is not None and text.startswith(short):
            return len(prompt), len(short)
        begin, rest = self._around(conversation, index, text)
        end = len(text) - rest
        if turn is not None and ends:
            end = len(turn)
        else:
            so_far = replace(conversation, messages=messages[: index + 1])
            end += self._closing(text[end:], so_far, turn)
        return len(prompt) if begins else begin, end

    def _template_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> str | None:
        try:
            return self._template.text(messages, tools, prompt=prompt)
        except EndlessTemplateError:
            raise
        except BadConversationError:
            return None

    def _closing(self, rest: str, so_far: Conversation, turn: str | None) -> int:
        """Return how many characters at the beginning of `rest` close the last turn of `so_far`.

        `turn` is the rendered conversation `so_far`, in which the turn is the last one: `rest`
        should begin with the characters that close it there. If it doesn't, because the template
        closes earlier turns with a different token, or if the template refuses to end there (`turn`
        is None), the closing is one special token.
        """
        try:
            if turn is None:
                return self._leading_special(rest)
            _, length = self._around(so_far, len(so_far.messages) - 1, turn)
        except BadConversationError:
            return self._leading_special(rest)
        closing = turn[len(turn) - length :]
        shared = _shared(rest, closing)
        if shared < self._leading_special(closing):
            return self._leading_special(rest)
        return self._before_special(closing, shared)

    def _before_special(self, text: str, place: int) -> int:
        """Return `place`; if it is inside a special token of `text`, where that token begins.

        A place can be inside a special token if two such tokens begin alike: `</s>` and `<|user|>`.
        """
        begins = [
            begin
            for name in self._special
            for begin in range(max(0, place - len(name) + 1), place)
            if text.startswith(name, begin)
        ]
        return min(begins, default=place)

    def _leading_special(self, text: str) -> int:
        return max((len(name) for name in self._special if text.startswith(name)), default=0)

    def _around(self, conversation: Conversation, index: int, text: str) -> tuple[int, int]:
        """Return how many characters of `text` come before and after the message `index`."""
        messages = conversation.messages
        before, after = len(text), len(text)
        for other in _OTHERS:
            replaced = [*messages[:index], {"role": "assistant", "content": other}]
            changed = self._template.text([*replaced, *messages[index + 1 :]], conversation.tools)
            before = min(before, _shared(text, changed))
            after = min(after, _shared(text[::-1], changed[::-1]))
        return before, after


def _of_turns(
    conversation: Conversation, runs: Sequence[Range], places: Sequence[tuple[int, Range]]
) -> list[Range]:
    """Return the marked ranges of the turns that are learned.

    A turn may have several, such as one for its reasoning and one for its answer. Raises
    BadConversationError unless each turn has one, and each range belongs to one turn.
    """
    roles = [message["role"] for message in conversation.messages]
    turns = [index for index, role in enumerate(roles) if role == "assistant"]
    if places:
        owners = [_owner(run, roles, places) for run in runs]
        turns = [turn for turn in turns if turn in {index for index, _ in places}]
    else:
        owners = turns if len(runs) == len(turns) else []
    num_marked = len(set(owners)) if owners else len(runs)
    if num_marked != len(turns) or not owners:
        raise BadConversationError(
            f"the chat template marks {counted(num_marked, 'run')} of text as generated "
            f"({{% generation %}}), but the row has {counted(len(turns), 'turn')} of the "
            "assistant; use a template that marks each turn, or none"
        )
    pairs = zip(owners, runs, strict=True)
    return [run for owner, run in pairs if owner in conversation.learned]


def _owner(run: Range, roles: Sequence[str], places: Sequence[tuple[int, Range]]) -> int:
    """Return the index of the assistant's message to which a marked range belongs.

    A range without a part of a message, such as an end token, belongs to the assistant's turn
    before it, or else after it. Raises BadConversationError for any other range.
    """
    within = {index for index, (begin, end) in places if begin < run[1] and run[0] < end}
    others = [index for index in sorted(within) if roles[index] != "assistant"]
    if others:
        raise BadConversationError(
            f"the chat template marks a part of message {others[0] + 1} ({roles[others[0]]}) as "
            "generated ({% generation %}); use a template that marks the assistant's turns alone"
        )
    if len(within) > 1:
        one, other, *_ = sorted(within)
        raise BadConversationError(
            f"the chat template marks messages {one + 1} and {other + 1} as one run of generated "
            "text ({% generation %}); use a template that marks each turn"
        )
    if within:
        return within.pop()
    before = max(((end, index) for index, (_, end) in places if end <= run[0]), default=None)
    after = min(((begin, index) for index, (begin, _) in places if begin >= run[1]), default=None)
    for near in (before, after):
        if near is not None and roles[near[1]] == "assistant":
            return near[1]
    raise BadConversationError(
        "the chat template marks a text as generated ({% generation %}) that is "
        "not a turn of the assistant; use a template that marks the assistant's "
        "turns alone"
    )


def _require_own(
    conversation: Conversation, learned: Sequence[Range], places: Sequence[tuple[int, Range]]
) -> None:
    """Raise BadConversationError if a learned range has a part of a message that is not learned."""
    for index, (begin, end) in places:
        if index in conversation.learned:
            continue
        if any(first < end and begin < last for first, last in learned):
            role = conversation.messages[index]["role"]
            raise BadConversationError(
                "where the assistant's turns begin and end can't be told: a part of message "
                f"{index + 1} ({role}) is inside such a turn, in the text that the chat template "
                "writes; use a template with marks ({% generation %})"
            )


def _without_thoughts(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in THOUGHTS}


def _with_either(
    encode: Callable[[Rows], Found], row: Rows, texts: Callable[[Rows], Rows]
) -> Found:
    """Return `encode` of `row`; if it raises, of `row` with texts as arguments of calls.

    Some templates need such arguments.
    """
    try:
        return encode(row)
    except EndlessTemplateError:
        raise
    except BadConversationError as error:
        as_texts = texts(row)
        if as_texts == row:
            raise
        try:
            return encode(as_texts)
        except BadConversationError as other:  # report the problem that isn't about arguments
            raise (other if isinstance(error, TemplateRefusalError) else error) from None


def _texts_of(conversation: Conversation) -> Conversation:
    return replace(conversation, messages=_with_texts(conversation.messages))


def _pair_of_texts(pair: Chats) -> Chats:
    parts = (pair.prompt, pair.chosen, pair.rejected)
    prompt, chosen, rejected = map(_with_texts, parts)
    return replace(pair, prompt=prompt, chosen=chosen, rejected=rejected)


def _with_texts(messages: Sequence[Message]) -> list[Message]:
    changed = copy.deepcopy(list(messages))
    for call in (call for message in changed for call in message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return changed


def _shared(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
