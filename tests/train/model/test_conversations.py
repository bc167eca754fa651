"""Conversations in the forms that people have them in, and rows that have none to learn from."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.train.model import conversations
from entrenar_py.train.model.conversations import BadConversationError

USER, ANSWER = {"role": "user", "content": "list"}, {"role": "assistant", "content": "ls"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TEXT = '{"name": "weather", "arguments": {"city": "Rome"}}'

DEEP = '{"name": "f", "arguments": ' + "[" * 33 + "]" * 33 + "}"


def read(row: Mapping[str, Any], field: str = "messages") -> list[dict[str, Any]]:
    return list(conversations.read(row, field).messages)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [{**USER, "name": None, "tool_calls": None}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "list"}]}, ANSWER]},
        {"messages": [USER, ANSWER, {"role": "user", "content": "a question without an answer"}]},
        {"conversations": [{"from": "human", "value": "list"}, {"from": "gpt", "value": "ls"}]},
        {"conversations": [USER, ANSWER]},
        {"instruction": "list", "input": "", "output": "ls"},
        {"instruction": "list", "input": None, "output": "ls"},
        {"instruction": "list", "output": "ls"},
        {"instruction": "list", "context": "", "response": "ls", "category": "open_qa"},
        {"prompt": "list", "completion": "ls"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {}},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"thinks": None}},
        {"question": "list", "answer": "ls"},
        {"question": "list", "response": "ls"},
    ],
)
def test_forms_of_the_same_conversation(row: Mapping[str, Any]) -> None:
    assert read(row) == [USER, ANSWER]


@pytest.mark.parametrize(
    ("prompt", "answer"), [("instruction", "response"), ("question", "answer")]
)
@pytest.mark.parametrize("more", ["input", "context"])
def test_no_field_of_a_pair_is_left_out(prompt: str, answer: str, more: str) -> None:
    found = read({"system_prompt": "Be brief.", prompt: "count", more: "a b", answer: "2"})
    assert [one["content"] for one in found] == ["Be brief.", "count\n\na b", "2"]


def test_what_comes_with_a_pair() -> None:
    row = {
        "system": "Be brief.",
        "history": [["list", "ls"]],
        "instruction": "count",
        "input": "a b",
        "output": "2",
    }
    assert read(row) == [
        {"role": "system", "content": "Be brief."},
        USER,
        ANSWER,
        {"role": "user", "content": "count\n\na b"},
        {"role": "assistant", "content": "2"},
    ]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"from": "function_call", "value": TEXT},
        {"role": "assistant", "content": [{"type": "tool_call", "value": TEXT}]},
        {
            "role": "assistant",
            "tool_calls": {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        },
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'},
        },
    ],
)
@pytest.mark.parametrize("tools", ["tools", "functions"])
def test_calls_of_functions(turn: Mapping[str, Any], tools: str) -> None:
    row = {"messages": [USER, turn], tools: '[{"name": "weather"}]'}
    found = conversations.read(row, "messages")
    assert found.messages[1]["tool_calls"] == [CALL]
    assert "function_call" not in found.messages[1]
    assert found.tools == [{"type": "function", "function": {"name": "weather"}}]


def test_an_empty_text_of_arguments_is_none() -> None:
    """Many data sets have it for a call without arguments."""
    for empty in ("", " ", "{}"):
        call = {"function": {"name": "now", "arguments": empty}}
        (_, turn) = read({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
        assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_an_empty_list_of_calls_is_none() -> None:
    """Some templates refuse such a turn, or write it as one that calls."""
    assert read({"messages": [USER, {**ANSWER, "tool_calls": []}]}) == [USER, ANSWER]


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_what_a_row_has_as_system_comes_before_its_messages(field: str) -> None:
    own = {"role": "developer", "content": "Be kind."}
    said = {"role": "system", "content": "Be brief."}
    assert read({"system": "Be brief.", field: [USER, ANSWER]}) == [said, USER, ANSWER]
    assert read({"system": "", field: [USER, ANSWER]}) == [USER, ANSWER]
    assert read({"system": "Be brief.", field: [own, USER, ANSWER]}) == [
        {**own, "role": "system"},
        USER,
        ANSWER,
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("weight", "loss_weight", "train", "training", "trainable", "train_on_turn"),
        *("loss", "loss_scale", "loss_mask", "masked"),
    ],
)
@pytest.mark.parametrize("no", [0, False, 0.0])
def test_turns_that_are_marked_so_are_not_learned(key: str, no: float) -> None:
    """By each name that OpenAI, axolotl, LLaMA-Factory, ms-swift and verl have for it."""
    weights = (1 - no, no) if key == "masked" else (no, 1)
    first, last = ({**ANSWER, key: weight} for weight in weights)
    found = conversations.read({"messages": [USER, first, USER, last]}, "messages")
    assert list(found.learned) == [3]
    assert found.messages[1] == ANSWER


@pytest.mark.parametrize(
    "marks", [{}, {"weight": 1}, {"weight": None}, {"train": True}, {"masked": False}]
)
def test_the_answers_in_a_prompt_are_not_learned(marks: dict[str, Any]) -> None:
    """As TRL reads them: the completion alone is, whatever an answer says of itself."""
    row = {"prompt": [USER, {**ANSWER, **marks}, USER], "completion": [ANSWER]}
    assert list(conversations.read(row, "messages").learned) == [3]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "ls"}, "has no field 'messages'; it has text; use messages, conversations, inst"),
        ({"messages": None}, "has no field 'messages'; it has none"),
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "a weight of 0 in each turn"),
        (
            {"messages": [USER, {**ANSWER, "no_loss": True}]},
            "message 2 has no_loss=True; if it means that the turn is not learned, name it weight",
        ),
        (
            {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "train": False}]}]},
            "message 2 has train_detail=[",
        ),
        (
            {"messages": [USER, {**ANSWER, "train": True, "weight": 0}]},
            "message 2 has one key that says to learn it, and one that says not",
        ),
        (
            {"messages": [USER, {**ANSWER, "content": [{"text": "ls", "train": False}]}]},
            "message 2 has a part with train=False, but a turn is trained on as a whole or",
        ),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "message 2 has train 'no'; use 0 or 1"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2 has weight 0.5; use 0 or 1"),
        ({"messages": [USER, {**ANSWER, "content": "\n"}]}, "the assistant's message 2 is empty"),
        ({"instruction": "list", "output": ""}, "the assistant's message 2 is empty"),
        ({"prompt": 3, "completion": "ls"}, "prompt=3: use a text"),
        ({"system": 3, "messages": [USER, ANSWER]}, "system=3: use a text"),
        (
            {"prompt": "list", "completion": "ls", "history": 3},
            "history is not a list of [prompt, ",
        ),
        ({"messages": [{**USER, "content": 3}, ANSWER]}, "no text as its content (3)"),
        ({"messages": [USER, ANSWER], "images": ["a.jpg"]}, "has images; only text is learned"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "message 1 has a part of type 'image_url'; only text is learned",
        ),
        (
            {"prompt": "list", "chosen": "ls", "rejected": "rm"},
            "this task doesn't learn preferences",
        ),
        ({"messages": [USER, ANSWER], "label": False}, "marks a bad answer"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"thinks": False, "x": None}},
            "has chat_template_kwargs={'thinks': False}, but templates get no arguments here; lea",
        ),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": '{"x": 1}'}, "templates get no arg"),
        ({"messages": [USER, {"from": "function_call", "value": "w("}]}, "a call that is not JSON"),
        (
            {"messages": [USER, {"from": "function_call", "value": "[" * 10**5}]},
            "a call that is not JSON (nested more than 64",
        ),
        (
            {"messages": [USER, {"from": "function_call", "value": DEEP}]},
            "a call with arguments that are nested more than 32 levels deep",
        ),
        ({"messages": [USER, ANSWER], "tools": f"[{DEEP}]"}, "tools are not JSON (nested more th"),
        ({"messages": [USER, ANSWER], "tools": "["}, "tools are not JSON"),
        (
            {"messages": [USER, {"from": "function_call", "value": r'{"a": "\ud800"}'}]},
            r"a call that is not JSON (has half of a character (\ud800))",
        ),
        ({"messages": [USER, ANSWER], "tools": '[{"a": 1, "a": 2}]'}, "'a' appears 2 times"),
        ({"messages": [USER, ANSWER], "tools": "[" * 10**5}, "tools are not JSON (nested"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "tools are not a list of objects"),
    ],
)
def test_rows_without_a_conversation_to_learn(row: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(BadConversationError) as raised:
        read(row)
    assert problem in str(raised.value)


def test_a_named_field_is_the_only_one_looked_at() -> None:
    assert read({"chosen": [USER, ANSWER], "rejected": [USER]}, "chosen") == [USER, ANSWER]
    with pytest.raises(BadConversationError, match="has no field 'chat'; it has prompt, compl"):
        read({"prompt": "list", "completion": "ls"}, "chat")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, ANSWER, ANSWER]},
        {"conversations": [{"from": "human", "value": "list"}, {"from": "gpt", "value": "ls"}]},
        {"instruction": "list", "output": "ls"},
        {"instruction": "list", "input": ""},
        {"prompt": "list"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER]},
    ],
)
def test_prompts(row: Mapping[str, Any]) -> None:
    """A prompt is the conversation without its last answer, which a row may lack."""
    found = conversations.prompt(row, "messages")
    assert (found.messages, found.learned) == ([USER], ())


def test_a_prompt_keeps_earlier_answers() -> None:
    """Only the last turn is left out, and only if it is the assistant's."""
    said = {"role": "system", "content": "be brief"}
    found = conversations.prompt(
        {"system": "be brief", "messages": [USER, ANSWER, USER]}, "messages"
    )
    assert found.messages == [said, USER, ANSWER, USER]
    for result in ("7", ""):
        calls = [USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": result}]
        assert len(conversations.prompt({"messages": calls}, "messages").messages) == len(calls)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ANSWER]},
        {"messages": [{"role": "system", "content": "be brief"}, ANSWER]},
        {"messages": [{**USER, "content": " "}, ANSWER]},
        {"instruction": 7},
        {"output": "ls"},
        {"messages": [USER], "images": ["a.png"]},
        {"messages": [USER], "chat_template_kwargs": {"thinks": False}},
    ],
)
def test_rows_without_a_prompt(row: Mapping[str, Any]) -> None:
    """A row that asks nothing, or more than text, is refused."""
    with pytest.raises(BadConversationError):
        conversations.prompt(row, "messages")


_KEYS = (
    *("messages", "conversations", "instruction", "output", "prompt", "completion", "history"),
    *("role", "from", "content", "value", "weight", "tool_calls", "function_call", "system"),
    *("tools", "function", "name", "arguments", "type", "text", "images", "label", "input"),
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((0, 1, -1.5, 10**400, math.nan, "", "user", "assistant", "tool", "reasoning"))
    | st.sampled_from(("x", "tool_call", "[" * 10**5, '{"name": "a"}', "{", b"\xff")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


_OBJECTS = st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4)
_CHATS = st.lists(
    st.builds(
        lambda role, content, more: {**more, "role": role, "content": content},
        st.sampled_from(("user", "assistant", "function_call")),
        st.just("x") | _VALUES,
        _OBJECTS | st.builds(lambda calls: {"tool_calls": [calls]}, _OBJECTS),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(_OBJECTS | st.builds(lambda chat, more: {**more, "messages": chat}, _CHATS, _OBJECTS))
def test_any_row_is_a_conversation_or_says_why_not(row: dict[str, Any]) -> None:
    """Wrong types anywhere are a BadConversationError, for a row to learn and for a prompt."""
    for ask in (conversations.read, conversations.prompt):
        with suppress(BadConversationError):
            copy.deepcopy(ask(row, "messages").messages)
