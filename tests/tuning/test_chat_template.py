"""What is learned of a conversation, by templates as they are in the wild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrenar_py.tuning import chat_template, conversations, model
from entrenar_py.tuning.conversations import BadConversationError
from tests.tuning.test_samples import settings

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "list"}, {"role": "assistant", "content": "ls"}
THOUGHT = {"role": "assistant", "content": "<think>hm</think>ls"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
}
ASKED = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    + ASKED
)
# Only the last turn shows a thought, be it an empty one.
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}"
    "</think>{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}" + ASKED
)
# A text ends with one more token, which no later turn follows.
ENDED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<|pad|>{% endif %}"
)
# Only the last turn ends with this token, as gpt-oss writes them.
RETURNED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|pad|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}" + ASKED
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|end|>{%- endgeneration -%}"
    "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}" + ASKED
)
# The prompt of an answer opens a thought, which answers in a conversation don't have.
OPENED = PLAIN.replace(ASKED, ASKED.replace("\n", "\n<think>"))
# Arguments are texts, joined to others.
JOINED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    "<|end|>\n{% endfor %}" + ASKED
)
NO_USER = (
    "{% if 'user' not in messages | map(attribute='role') | list %}"
    "{{ raise_exception('no user') }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def learned(small: Path, template: str, *messages: Any) -> tuple[str, str]:
    """Return the conversation as the model reads it, and of it what is learned."""
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    tokenizer.chat_template = template
    conversation = conversations.read({"messages": list(messages)}, "messages")
    tokens, is_target = chat_template.encode(tokenizer, conversation)
    targets = [token for token, flag in zip(tokens, is_target, strict=True) if flag]
    return tokenizer.decode(tokens), tokenizer.decode(targets)


@pytest.mark.parametrize(
    ("template", "predicted"),
    [
        (PLAIN, "ls<|end|>\nls<|end|>\n"),
        (THINKING, "ls<|end|>\n<think></think>ls<|end|>\n"),
        (ENDED, "ls<|end|>ls<|end|><|pad|>"),
        (MARKED, "ls<|end|>ls<|end|>"),
        (OPENED, "ls<|end|>\nls<|end|>\n"),
        (RETURNED, "ls<|end|>ls<|pad|>"),
    ],
    ids=["plain", "thinking", "ended", "marked", "opened", "returned"],
)
def test_both_turns_are_learned_in_a_text_as_stock_renders_it(
    small: Path, template: str, predicted: str
) -> None:
    messages = (USER, ANSWER, USER, ANSWER)
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)
    assert learned(small, template, *messages) == (text, predicted)


@pytest.mark.parametrize(
    ("template", "predicted"),
    [
        (PLAIN, "ls<|end|>\nls<|end|>\n"),
        (THINKING, "ls<|end|>\n<think></think>ls<|end|>\n"),
        (MARKED, "ls<|end|>ls<|end|>"),
        (NO_USER + PLAIN, "ls<|end|>ls<|end|>\n"),
        (RETURNED, "ls<|end|>ls<|pad|>"),
    ],
    ids=["plain", "thinking", "marked", "no user", "returned"],
)
def test_the_assistant_may_speak_first(small: Path, template: str, predicted: str) -> None:
    assert learned(small, template, ANSWER, USER, ANSWER)[1] == predicted


def test_a_template_that_wants_a_user_first_refuses_an_assistant_by_its_own_words(
    small: Path,
) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(BadConversationError, match="user first"):
        learned(small, strict + PLAIN, ANSWER, USER, ANSWER)


@pytest.mark.parametrize("template", [PLAIN, THINKING, ENDED, MARKED, OPENED])
def test_a_turn_of_weight_0_is_not_learned(small: Path, template: str) -> None:
    """Its content is another one, which would be seen."""
    first = {"role": "assistant", "content": "wrong", "weight": 0}
    text, predicted = learned(small, template, USER, first, USER, ANSWER)
    assert "wrong" in text
    assert "wrong" not in predicted
    assert "ls<|end|>" in predicted


def test_the_last_thought_is_learned(small: Path) -> None:
    text, predicted = learned(small, THINKING, USER, THOUGHT, USER, THOUGHT)
    assert text.count("hm") == 1
    assert predicted == "ls<|end|>\n<think>hm</think>ls<|end|>\n"


def test_arguments_of_calls_are_texts_where_a_template_needs_them_so(small: Path) -> None:
    _, predicted = learned(small, JOINED, USER, CALL)
    assert predicted == 'weather{"city": "Rome"}<|end|>\n'


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (NO_SYSTEM + PLAIN, (SYSTEM, USER, ANSWER), "the chat template refuses it: no system"),
        (
            PLAIN.replace("{% for m in messages %}", "{% for m in messages[-2:] %}"),
            (SYSTEM, USER, ANSWER),
            "leaves out a part of message 1 (system)",
        ),
        (
            PLAIN.replace("m.content | trim", "m.content.split('</think>')[-1]"),
            (USER, THOUGHT),
            "leaves out a part of message 2 (assistant)",
        ),
        (
            PLAIN,
            (USER, {**ANSWER, "reasoning_content": "hm"}),
            "leaves out a part of message 2 (assistant)",
        ),
        (PLAIN, (USER, {**CALL, "content": ""}), "leaves out the call in message 2"),
    ],
    ids=["refuses", "without a system", "without thoughts", "nor in their field", "without calls"],
)
def test_nothing_is_left_out_unsaid(
    small: Path, template: str, messages: tuple[Any, ...], problem: str
) -> None:
    with pytest.raises(BadConversationError) as raised:
        learned(small, template, *messages)
    assert problem in str(raised.value)


def test_no_tool_is_left_out_unsaid(small: Path) -> None:
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    row = {"messages": [USER, ANSWER], "tools": [{"name": "weather", "parameters": {}}]}
    conversation = conversations.read(row, "messages")
    tokenizer.chat_template = "{{ tools | tojson }}" + PLAIN
    assert any(chat_template.encode(tokenizer, conversation)[1])
    tokenizer.chat_template = PLAIN
    with pytest.raises(BadConversationError, match="leaves out the tool 'weather'; take tools out"):
        chat_template.encode(tokenizer, conversation)
