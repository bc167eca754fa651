"""What is learned of a conversation, by templates as they are in the wild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrenar_py.train.model import conversations, model, rendering
from entrenar_py.train.model.chat_template import ChatEncoder
from entrenar_py.train.model.conversations import BadConversationError
from tests.train.model.test_samples import settings

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
OPEN = ASKED.replace("\n", "\n<think>")
OPENED = PLAIN.replace(ASKED, OPEN)
# Arguments are texts, joined to others.
JOINED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    "<|end|>\n{% endfor %}" + ASKED
)
PLAIN_CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }} {{ value }}{% endfor %}"
    "{% endfor %}<|end|>\n{% endfor %}" + ASKED
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
    tokens, is_target, _ = ChatEncoder(tokenizer).encode(conversation)
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


@pytest.mark.parametrize("template", [PLAIN, NO_USER + PLAIN])
def test_the_assistant_may_speak_after_the_system(small: Path, template: str) -> None:
    """Qwen3.5's template refuses messages without a user, such as those before the first answer."""
    _, predicted = learned(small, template, SYSTEM, ANSWER, USER, ANSWER)
    assert predicted.replace("\n", "") == "ls<|end|>ls<|end|>"


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
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    turn = {**CALL, "tool_calls": [call]}
    text, predicted = learned(small, JOINED, USER, turn)
    assert predicted == 'weather{"city": "Zürich"}<|end|>\n'
    asked = conversations.prompt({"messages": [USER, turn, TOOL]}, "messages")
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    tokenizer.chat_template = JOINED
    prompt = tokenizer.decode(ChatEncoder(tokenizer).prompt(asked))
    assert prompt == text + "<|start|>tool\n4<|end|>\n<|start|>assistant\n"


def test_a_turn_of_calls_alone_is_null_for_a_template_that_looks_for_that(small: Path) -> None:
    """As DeepSeek's do; others would write the word None."""
    looking = JOINED.replace("m.content or ''", "m.content + '.' if m.content is not none")
    _, predicted = learned(small, looking, USER, {**CALL, "content": None}, USER, ANSWER)
    assert predicted == 'weather{"city": "Rome"}<|end|>\nls.<|end|>\n'
    _, predicted = learned(small, PLAIN_CALLS, USER, {**CALL, "content": None})
    assert predicted == "weather city Rome<|end|>\n"


def test_a_thought_before_an_earlier_call_may_be_left_out(small: Path) -> None:
    """As gpt-oss's template does, which refuses a tool's result without a call before it."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}<|start|>{{ m.role }}\n"
        "{{ '>' if m.role == 'assistant' }}"
        "{% if m.thinking and (loop.last or messages[-1].role == 'tool') %}"
        "<think>{{ m.thinking }}</think>{% endif %}"
        "{{ m.content or '' }}{% for call in m.tool_calls %}{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}" + ASKED
    )
    call, result = {**CALL, "thinking": "hm"}, {"role": "tool", "content": "rain"}
    _, predicted = learned(small, template, USER, call, result, {**ANSWER, "thinking": "so"})
    assert predicted == '>weather {"city": "Rome"}<|end|>\n><think>so</think>ls<|end|>\n'


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
        (
            PLAIN,
            (USER, {**CALL, "content": ""}),
            "leaves out a part of message 2 (assistant), the call of weather; use the",
        ),
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
    assert any(ChatEncoder(tokenizer).encode(conversation)[1])
    tokenizer.chat_template = PLAIN
    with pytest.raises(BadConversationError, match="leaves out the tool 'weather'; take tools out"):
        ChatEncoder(tokenizer).encode(conversation)


def test_named_templates_without_a_default_refuse_a_row(small: Path) -> None:
    """Rows with tools have a name of their own in transformers."""
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    tokenizer.chat_template = {"rag": PLAIN, "tool_use": ALL}
    row = {"messages": [USER, ANSWER], "tools": [{"name": "weather", "parameters": {}}]}
    assert any(ChatEncoder(tokenizer).encode(conversations.read(row, "messages"))[1])
    del row["tools"]
    with pytest.raises(BadConversationError, match=r"several chat templates \(rag, tool_use\)"):
        ChatEncoder(tokenizer).encode(conversations.read(row, "messages"))


# --- what the last answer follows ---

# Answers without a thought have a closed one, but the prompt leaves it open, as with Nemotron 3.
CLOSED = PLAIN.replace(ASKED, OPEN.replace("<think>", "<think>\n")).replace(
    "{{ m.content", "{{ '<think>%s</think>' % m.thinking if m.role == 'assistant' }}{{ m.content"
)
# Earlier thoughts are in the text of a prompt alone.
FORGOTTEN = PLAIN.replace(
    "{{ m.content", "{{ m.thinking if messages[-1].role == 'user' }}{{ m.content"
)


@pytest.mark.parametrize(
    ("template", "last", "is_aligned"),
    [
        (PLAIN, ANSWER, True),
        (THINKING, THOUGHT, True),
        (ENDED, ANSWER, True),
        (MARKED, ANSWER, True),
        (RETURNED, ANSWER, True),
        (FORGOTTEN, ANSWER, True),
        (PLAIN.replace(ASKED, ""), ANSWER, True),
        (OPENED, ANSWER, False),
        (OPENED, THOUGHT, True),
        (CLOSED, ANSWER, False),
        (CLOSED, {**ANSWER, "thinking": "\nhm\n"}, True),
        (MARKED.replace(ASKED, OPEN), ANSWER, False),
    ],
    ids=[
        *("plain", "thinking", "ended", "marked", "returned", "forgotten", "no prompt"),
        *("opened", "opened, with a thought", "closed", "closed, with a thought", "marked, opened"),
    ],
)
def test_an_answer_that_does_not_follow_the_generation_prompt_is_noted(
    small: Path, template: str, last: dict[str, Any], is_aligned: bool
) -> None:
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    tokenizer.chat_template = template
    row = {"messages": [USER, {**ANSWER, "thinking": "so"}, USER, last]}
    *_, found = ChatEncoder(tokenizer).encode(conversations.read(row, "messages"))
    assert found is is_aligned


# --- marks ---


def test_a_first_turn_of_one_token_leaves_the_users_turns_alone(small: Path) -> None:
    """Transformers takes a last token at place 0 for none, and learns all that follows."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    first, again = {"role": "assistant", "content": "l"}, {"role": "assistant", "content": "s"}
    assert learned(small, template, first, USER, again) == ("l<|end|>list<|end|>s<|end|>", "ls")


def marking(of: str, said: str = "{{ m.content }}") -> str:
    """Return a template that marks what is said where the condition `of` holds."""
    return (
        f"{{% for m in messages %}}<|start|>{{{{ m.role }}}}\n{{% if {of} %}}{{% generation %}}"
        f"{said}<|end|>{{% endgeneration %}}{{% else %}}{said}<|end|>{{% endif %}}\n{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (marking("loop.last"), "marks 1 run of text as generated ({% generation %}), but the row "),
        (marking("m.role == 'nobody'"), "marks 0 runs of text as generated"),
        (marking("true"), "marks a part of message 1 (user) as generated"),
        (
            "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ said(m)|trim if m.role == 'assistant' else m.content }}"
            "{% endfor %}",
            "writes a different text if its marks ({% generation %}) are read",
        ),
    ],
    ids=["the last turn alone", "no turn", "all turns", "and trims"],
)
def test_a_row_whose_turns_are_not_all_marked_is_refused(
    small: Path, template: str, problem: str
) -> None:
    with pytest.raises(BadConversationError) as raised:
        learned(small, template, USER, {**ANSWER, "content": "ls "}, USER, ANSWER)
    assert problem in str(raised.value)


def test_marks_in_macros_and_several_of_a_turn_are_read(small: Path) -> None:
    """Transformers places marks within a macro wrongly: by what was written when it was called."""
    template = (
        "{% macro said(m) %}{% generation %}<think>{{ m.thinking }}</think>{% endgeneration %}"
        "{{ '\\n' }}{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|end|>"
        "{% endgeneration %}{% endmacro %}{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ said(m) if m.role == 'assistant' else m.content + '<|end|>' }}\n{% endfor %}"
    )
    turn = {**ANSWER, "reasoning": "hm"}
    first = {**turn, "loss": False}
    text, predicted = learned(small, template, USER, first, USER, turn)
    assert text.count("<think>hm</think>\nls<|end|>") == 2
    assert predicted == "<think>hm</think>ls<|end|>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_end_token_that_takes_the_white_space_after_it_is_learned(
    small: Path, template: str
) -> None:
    from tokenizers import AddedToken

    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    tokenizer.add_tokens(
        [AddedToken("<|stop|>", special=True, rstrip=True, lstrip=True)], special_tokens=True
    )
    tokenizer.chat_template = template.replace("<|end|>", "<|stop|>")
    row = {"messages": [USER, {**ANSWER, "content": "ls  "}, USER, ANSWER]}
    tokens, is_target, _ = ChatEncoder(tokenizer).encode(conversations.read(row, "messages"))
    targets = [token for token, flag in zip(tokens, is_target, strict=True) if flag]
    assert targets.count(tokenizer.convert_tokens_to_ids("<|stop|>")) == 2


# --- parts of rows ---

ALL = (  # writes all that a row may have
    "{{ tools | tojson if tools }}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>\n"
    "{% endfor %}" + ASKED
)
FORECAST = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "function": {
                "name": "forecast",
                "arguments": {
                    "city": 'Zür"ich',
                    "days": 3,
                    "at": {"hours": [6, "noon"]},
                    "x": True,
                },
            }
        }
    ],
}
TOOL = {"role": "tool", "content": "4"}
WHOLE = (SYSTEM, USER, FORECAST, TOOL, {**ANSWER, "content": "4", "reasoning": "hm"})


def test_a_template_that_writes_all_parts_is_no_alarm(small: Path) -> None:
    _, predicted = learned(small, ALL, *WHOLE)
    assert "hm" in predicted
    assert '"noon"' in predicted
    in_python = ALL.replace("call.function | tojson", "call.function")
    assert "'noon'" in learned(small, in_python, *WHOLE)[0]


@pytest.mark.parametrize(
    ("written", "instead", "problem"),
    [
        ("m.thinking", "m.thoughts", "message 5 (assistant), reasoning; take it out"),
        ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}", "message 4 (tool), content"),
        (
            "{% for m in messages %}",
            "{% for m in messages if not m.tool_calls %}",
            "message 3 (assistant), the call of forecast; use the checkpoint of a model that",
        ),
        ("call.function | tojson", "call.function.name", "the argument city"),
        (
            "call.function | tojson",
            "call.function.name ~ call.function.arguments.keys() | list",
            "the argument city='Zür\"ich'",
        ),
        (
            "call.function | tojson",
            "call.function.name ~ call.function.arguments | tojson | replace('3', '')",
            "the argument days",
        ),
        (
            "call.function | tojson",
            "call.function | tojson | replace('true', '')",
            "the argument x",
        ),
        ("m.content }}", "m.content[:2] }}", "message 1 (system), content"),
    ],
    ids=["thought", "tool", "turn", "keys", "values", "number", "truth value", "end"],
)
def test_no_part_of_a_row_is_left_out_unsaid(
    small: Path, written: str, instead: str, problem: str
) -> None:
    """Not even one whose words stand elsewhere: the tool's result is the answer, too."""
    assert written in ALL
    with pytest.raises(BadConversationError) as raised:
        learned(small, ALL.replace(written, instead), *WHOLE)
    assert problem in str(raised.value)


def test_a_turn_that_a_template_skips_is_told(small: Path) -> None:
    template = PLAIN.replace("in messages", "in messages if m.content != 'x'")
    messages = (USER, {**ANSWER, "content": "x"}, USER, ANSWER)
    with pytest.raises(BadConversationError, match=r"a part of message 2 \(assistant\), content"):
        learned(small, template, *messages)


def test_earlier_thoughts_may_be_left_out_whatever_closes_them(small: Path) -> None:
    template = PLAIN.replace("m.content", "m.content.split('[/THINK]')[-1]")
    said = {"role": "assistant", "content": "[THINK]so[/THINK]ls"}
    assert learned(small, template, USER, said, USER, ANSWER)[1] == "ls<|end|>\nls<|end|>\n"


# --- templates that do not end ---


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
        "{{ 10 ** 10 ** 10 }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(
    small: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "STEPS_MAX", 20_000)
    with pytest.raises(BadConversationError, match=r"20,000 steps|computes a power"):
        learned(small, PLAIN + template, USER, ANSWER)


@pytest.mark.parametrize(
    "operation",
    [
        "'x' * 10**10",
        "('x' * 10000000000) | length",
        "10000000000 * [1]",
        "'%10000000000d' % 1",
        "'%*d' % (10000000000, 1)",
        "'%10000000000d' | format(1)",
        "'{:10000000000}'.format(1)",
        "'{:{}}'.format(1, 10000000000)",
        "'x' | center(10000000000)",
        "'x'.ljust(10000000000)",
        "'x' | indent(10000000000, true)",
        "'x'.zfill(width=10000000000)",
    ],
)
def test_an_operation_that_would_take_all_memory_is_refused(small: Path, operation: str) -> None:
    with pytest.raises(BadConversationError, match=r"makes a text or a list of more|a power"):
        learned(small, f"{PLAIN}{{{{ {operation} }}}}", USER, ANSWER)


@pytest.mark.parametrize(
    "grown", ["n.x + n.x", "n.x ~ n.x", "n.x | replace('x', 'xx')", "[n.x, n.x] | join('x')"]
)
def test_a_text_that_doubles_is_bounded(
    small: Path, grown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "LENGTH_MAX", 10_000)
    doubled = (
        "{% set n = namespace(x='x') %}{% for _ in range(20) %}"
        f"{{% set n.x = {grown} %}}{{% endfor %}}{{{{ n.x | length }}}}"
    )
    with pytest.raises(BadConversationError, match="makes a text or a list of more than 10,000"):
        learned(small, PLAIN + doubled, USER, ANSWER)


def test_usual_operations_are_what_stock_makes_of_them(small: Path) -> None:
    """Formats, stars, joined lists, and an undefined name write the same as in transformers."""
    template = PLAIN + (
        "{{ '**%s** %5d%%' % ('x', 3) }}{{ '{:>4}|{}'.format('a', '*') }}{{ 'a' ~ 1 ~ nothing }}"
        "{{ messages | map(attribute='role') | join(', ') }}{{ '-'.join(['a', 'b']) }}"
        "{{ 'a\nb' | indent(2) }}{{ 'ab' | replace('a', 'c') }}{{ 'a'.replace('a', 'd') }}"
        "{{ [1] * 2 + [3] }}{{ 'x' | center(5) }}{{ 'x'.ljust(3, '.') }}{{ '=' * 3 }}"
        "{{ 2 * 3 + 1 }}"
    )
    tokenizer = model.tokenizer(settings(small, small, "instruct"))
    text = tokenizer.apply_chat_template([USER, ANSWER], chat_template=template, tokenize=False)
    tokenizer.chat_template = template
    written = rendering.ChatTemplate(tokenizer, None).text([USER, ANSWER], None)
    assert written == text


def test_an_end_that_is_no_token_is_learned_without_what_follows_it(small: Path) -> None:
    """Phi-3 ends a turn by <|end|>, and the text by </s>, which begins like <|user|>."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|halt|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|pad|>{% endif %}"
    )
    text, predicted = learned(small, template, USER, ANSWER, USER, ANSWER)
    assert text.endswith("<|halt|>\n<|pad|>")
    assert predicted == "ls<|halt|>\nls<|halt|>\n<|pad|>"
