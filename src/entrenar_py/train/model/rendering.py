"""Renders conversations with a tokenizer's chat template: the only place where templates run.

A template is a program by the author of the checkpoint. It runs in transformers' own sandbox, which
gives it no access to files or to the network. Four things are changed before it is compiled. Only
the clock changes what the template writes.

- Each round of a loop and each call of a macro counts as a step, and steps are limited. The sandbox
  limits a range, but not nested loops. Counting gives the same verdict on every machine. A single
  step may be long (a sum over a range), so the thread's CPU time is limited, too, generously.
- Operations that lengthen a text or a list are limited, since one could take all memory. Such an
  operation is refused before it runs.
- A template that asks for the time gets the given day, or by default the present time.
- Around text that the template marks as generated, two characters are written that no text has.
  Transformers instead counts what was written so far, which is wrong inside macros.
"""

from __future__ import annotations

import copy
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from entrenar_py.train.model.conversations import BadConversationError, Message

Range: TypeAlias = tuple[int, int]  # of characters: from the first up to, not including, the second


class TokenRanges:
    """Tokenises texts with one tokenizer, and says which characters each token stands for.

    The offsets of a tokenizer leave out white space if its post-processor trims them. Then a token
    of white space has an empty range, and text that is learned by offsets loses its indentation. So
    ranges here come from before the post-processor, which adds nothing if no special tokens are
    requested. An added token may absorb the white space around it, which doesn't belong to its
    range.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._untrimmed: Any = None
        if self._has_offsets and _trims(tokenizer.backend_tokenizer.post_processor):
            self._untrimmed = copy.deepcopy(tokenizer.backend_tokenizer)
            self._untrimmed.post_processor = None
            self._untrimmed.no_truncation()
            self._untrimmed.no_padding()
        added = tokenizer.added_tokens_decoder
        self._own = {number: token.content for number, token in added.items()}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of `text`, without tokens that the tokenizer would add."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def targets(self, text: str, parts: Sequence[Range]) -> tuple[list[int], list[bool]] | None:
        """Return the tokens of `text`, and for each whether its last character is in `parts`.

        None if the tokenizer doesn't say enough about the places of its tokens.
        """
        if not self._has_offsets:
            return self._by_beginnings(text, parts)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = list(found["input_ids"]), found["offset_mapping"]
        if self._untrimmed is not None:
            untrimmed = self._untrimmed.encode(text, add_special_tokens=False)
            if untrimmed.ids != tokens:
                return self._by_beginnings(text, parts)
            offsets = untrimmed.offsets
        pairs = zip(tokens, offsets, strict=True)
        ends = [self._end(text, number, *offset) for number, offset in pairs]
        return tokens, [any(begin < end <= last for begin, last in parts) for end in ends]

    def _end(self, text: str, number: int, first: int, last: int) -> int:
        own = self._own.get(number)
        place = text.find(own, first, last) if own else -1
        return last if own is None or place < 0 else place + len(own)

    def _by_beginnings(
        self, text: str, parts: Sequence[Range]
    ) -> tuple[list[int], list[bool]] | None:
        """Find the tokens of parts by counting the tokens before them, without offsets.

        None if the text up to the beginning or end of a part has other tokens than the same piece
        of the whole text.
        """
        tokens = self.tokens(text)
        is_target = [False] * len(tokens)
        for part in parts:
            before, after = (self.tokens(text[:place]) for place in part)
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                return None
            is_target[len(before) : len(after)] = [True] * (len(after) - len(before))
        return tokens, is_target


def _trims(post_processor: Any) -> bool:
    return post_processor is not None and b'"trim_offsets":true' in post_processor.__getstate__()


STEPS_MAX = 300_000  # a conversation of a hundred turns takes a few thousand
CPU_MAX_S = 20.0
_CLOCK_EVERY = 64  # steps
LENGTH_MAX = 2**26  # characters or items in the result of one operation
# In a format: a width or a precision that an argument gives, or that has six digits.
_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*\d*\.?(?:\*|\d{6})|\{[^{}]*:[^{}]*(?:\{|\d{6})")
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
_FIRST, _LAST = "\ufdd0", "\ufdd1"  # around text that is marked as generated
_CLOCK = "strftime_now"  # the name of the clock in transformers
_GENERATION = "_generation_support"  # the name of {% generation %} in transformers
# Keys of the reasoning before an answer; templates know one of the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class TemplateRefusalError(BadConversationError):
    """Raised when a chat template raises an error, such as by calling raise_exception."""


class EndlessTemplateError(BadConversationError):
    """Raised when a chat template takes too many steps or too long, or writes too much."""


def has_clock(tokenizer: Any) -> bool:
    """Return whether a tokenizer's chat template asks for the time."""
    return _CLOCK in str(getattr(tokenizer, "chat_template", None))


class ChatTemplate:
    """A tokenizer's chat template. Not safe for use by two threads at once."""

    def __init__(self, tokenizer: Any, day: str | None) -> None:
        """`day` is a date such as 2026-11-28; None stands for the present time."""
        self._tokenizer = tokenizer
        now = None if day is None else datetime.fromisoformat(day)
        self._globals = {} if now is None else {_CLOCK: now.strftime}
        self._compiled: dict[tuple[str, bool], Any] = {}
        self._steps, self._start_s = 0, 0.0

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> str:
        """Return messages as the template writes them; with `prompt`, up to the start of an answer.

        Raises BadConversationError if the template refuses them, and EndlessTemplateError.
        """
        return self._rendered(messages, tools, prompt=prompt, is_marked=False)

    def marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[Range] | None:
        """Return the ranges of characters that the template marks as generated.

        No range is empty, and there is text between any two. None if the template has no marks.
        Raises BadConversationError as `text` does.
        """
        if not _MARKED.search(self._source(tools)):
            return None
        rendered = self._rendered(messages, tools, prompt=False, is_marked=True)
        runs, length, begin = list[Range](), 0, 0
        for piece in re.split(f"([{_FIRST}{_LAST}])", rendered):
            if piece == _FIRST:
                begin = length
            elif piece == _LAST and begin < length:
                if runs and runs[-1][1] == begin:
                    begin, _ = runs.pop()  # nothing is between them
                runs.append((begin, length))
            elif piece != _LAST:
                length += len(piece)
        plain = rendered.replace(_FIRST, "").replace(_LAST, "")
        if plain != self.text(messages, tools):
            raise BadConversationError(
                "the chat template writes a different text if its marks ({% generation %}) are "
                "read; use a template that writes the same text with and without marks"
            )
        return runs

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
        is_marked: bool,
    ) -> str:
        shown = [_stock(message) for message in messages]
        options = {"prompt": prompt, "is_marked": is_marked}
        try:
            return self._once(shown, tools, **options)
        except TemplateRefusalError as error:
            # A turn with only calls has null as its content. Some templates check for that.
            nulls = [message.get("content", "") is None for message in messages]
            if not any(nulls):
                raise
            pairs = zip(shown, nulls, strict=True)
            kept = [message | {"content": None} if null else message for message, null in pairs]
            try:
                return self._once(kept, tools, **options)
            except TemplateRefusalError:
                raise error from None

    def _once(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
        is_marked: bool,
    ) -> str:
        key = (self._source(tools), is_marked)
        self._steps, self._start_s = 0, time.thread_time()
        try:
            template = self._compiled.get(key)
            if template is None:
                template = self._compiled[key] = self._compile(*key)
            rendered = template.render(
                messages=messages,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except EndlessTemplateError:
            raise
        except Exception as error:  # a template may raise anything
            raise TemplateRefusalError(f"the chat template refuses it: {error}") from error
        return str(rendered)

    def _source(self, tools: Sequence[Any] | None) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, tools))
        except ValueError as error:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise BadConversationError(
                f"the tokenizer has several chat templates ({names}), and none for such a row is "
                "named default; give one of the checkpoint's templates that name"
            ) from error

    def _compile(self, source: str, is_marked: bool) -> Any:
        """Return the template of `source`. It counts its steps, and writes marks if `is_marked`."""
        from jinja2 import nodes
        from transformers.utils import chat_template_utils

        stock = chat_template_utils._compile_jinja_template("").environment
        environment = stock.overlay()
        environment.extend(count_step=self._count)
        _bound(environment)
        tree = environment.parse(source)
        if tree.find(nodes.Pow):  # one power can take forever, even during compilation
            raise BadConversationError("it computes a power, and no text needs one")
        for node in tree.find_all(nodes.Concat):  # becomes a filter, which is limited
            values = nodes.List(node.nodes)
            node.nodes = [nodes.Filter(values, "join", [], [], None, None)]
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            step = nodes.EnvironmentAttribute("count_step")
            node.body.insert(0, nodes.ExprStmt(nodes.Call(step, [], [], None, None)))
            if is_marked and isinstance(node, nodes.CallBlock) and _generates(node):
                node.body.insert(0, nodes.Output([nodes.TemplateData(_FIRST)]))
                node.body.append(nodes.Output([nodes.TemplateData(_LAST)]))
        tree.set_lineno(1)  # the added nodes have none
        code = environment.compile(tree)
        return environment.template_class.from_code(
            environment, code, environment.make_globals(self._globals)
        )

    def _count(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX or (
            self._steps % _CLOCK_EVERY == 0 and time.thread_time() - self._start_s > CPU_MAX_S
        ):
            raise EndlessTemplateError(
                f"the chat template takes more than {STEPS_MAX:,} steps, or {CPU_MAX_S:g} s; use "
                "a shorter conversation, or the template of another checkpoint"
            )


def _bound(environment: Any) -> None:
    """Make a sandbox refuse results longer than LENGTH_MAX, with tables of its own."""
    plain, call = environment.binop_table, environment.call

    def operated(_: Any, operator: str, left: Any, right: Any) -> Any:
        _require_length(_LONGEST_OF[operator](left, right))
        return plain[operator](left, right)

    def called(context: Any, function: Any, *values: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        own, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(own, str) and name in _LONGEST:
            values = _measured(name, own, *values, **named)[1:]
        return call(context, function, *values, **named)

    def filtered(name: str) -> Callable[..., Any]:
        function = environment.filters[name]

        @functools.wraps(function)  # keeps the mark of filters that take the environment
        def bounded(*values: Any, **named: Any) -> Any:
            own = len(values) and hasattr(function, "jinja_pass_arg")
            return function(*values[:own], *_measured(name, *values[own:], **named), **named)

        return bounded

    environment.intercepted_binops = frozenset(_LONGEST_OF)
    environment.call_binop, environment.call = operated, called
    environment.filters = environment.filters | {
        name: filtered(name) for name in _LONGEST if name in environment.filters
    }


def _measured(name: str, *values: Any, **named: Any) -> tuple[Any, ...]:
    """Return the arguments of a filter or method, with iterables as lists.

    Raises EndlessTemplateError if the result would be too long.
    """
    read = tuple(
        [*one] if isinstance(one, Iterable) and not isinstance(one, str) else one for one in values
    )
    _require_length(_LONGEST[name](*read, *named.values()))
    return read


def _require_length(length: int) -> None:
    if length > LENGTH_MAX:
        raise EndlessTemplateError(
            f"the chat template makes a text or a list of more than {LENGTH_MAX:,}; use the "
            "template of another checkpoint"
        )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _whole(*values: Any) -> int:
    return max((one for one in values if isinstance(one, int)), default=0)


def _of_format(text: Any, *_: Any) -> int:
    return LENGTH_MAX + 1 if isinstance(text, str) and _WIDTH.search(text) else 0


def _of_joined(*values: Any) -> int:
    lists = [one for one in values if isinstance(one, list)]
    between = max((_length(one) for one in values if isinstance(one, str)), default=0)
    return sum(len(str(item)) + between for one in lists for item in one)


def _of_replaced(text: Any, old: Any, new: Any, *_: Any) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


# Operator, or filter or method of a text -> the maximal length of its result.
_LONGEST_OF: Mapping[str, Callable[[Any, Any], int]] = {
    "*": lambda left, right: max(_length(left), _length(right)) * _whole(left, right),
    "+": lambda left, right: _length(left) + _length(right),
    "%": _of_format,
}
_LONGEST: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _whole),
    "indent": lambda text, *more: (len(text) + 1) * (1 + _whole(*more)),
    "format": _of_format,
    "join": _of_joined,
    "replace": _of_replaced,
}


def _generates(node: Any) -> bool:
    return getattr(node.call.node, "name", None) == _GENERATION


def _stock(message: Mapping[str, Any]) -> Message:
    """Return a message with its reasoning under all names that templates know, and without nulls.

    transformers does the same from 5.23 on. Templates would write null as a word.
    """
    known = {name: value for name, value in message.items() if value is not None}
    thoughts = [known[name] for name in THOUGHTS if name in known]
    if not thoughts:
        return known
    return {"thinking": thoughts[0], **known, "reasoning_content": thoughts[0]}
