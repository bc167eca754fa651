"""What is learned of chats, to the token, beside a mask that is made without Jinja and offsets.

Ten templates are written twice: in Jinja, and as a function of Python that says piece by piece what
the assistant writes. Tokens are put to characters by the bytes or letters of their names.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.systems.finetuned import records
from entrenar_py.train.model.rows import Row
from entrenar_py.train.model.samples import Encoder, Sample
from entrenar_py.train.model.settings import Data, Settings

# A piece of a text: never learned (""), learned ("a"), or learned without marks alone ("u").
Piece = tuple[str, str]
Message = dict[str, Any]

CODE = "def f(x):\n    if x:\n\n        return  x\n"
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 3, "tomorrow": True}}


def chat(*said: str | Message) -> list[Message]:
    """Return turns of a user and an assistant by turns; "!" begins one that is not learned."""
    turns = list[Message]()
    for number, content in enumerate(said):
        if isinstance(content, dict):
            turns.append(content)
            continue
        turn: Message = {"role": ("user", "assistant")[number % 2], "content": content}
        if content.startswith("!"):
            turn |= {"content": content[1:], "weight": 0}
        turns.append(turn)
    return turns


def kind_of(message: Message, kind: str = "a") -> str:
    """Return the kind of what belongs to a message."""
    return kind if message["role"] == "assistant" and message.get("weight") != 0 else ""


def thinking(thought: str, content: str) -> Message:
    return {"role": "assistant", "content": content, "reasoning_content": thought}


# Three for each template, in their order.
CHATS = [
    chat("list", " ls -la"),
    chat("count", "2", "and now", "  3  ", "more", "4"),
    [
        {"role": "system", "content": "Be brief."},
        *chat("code", CODE, "again", "!wrong", "so", CODE),
    ],
    chat("list", "ls"),
    [
        {"role": "system", "content": "Be kind."},
        *chat("hi", "\tcafé\t", "hi", "!no", "hi", "naïve"),
    ],
    chat("日本", "日本語 日", "so", "!日", "so", "本"),
    chat("list", "ls"),
    chat("a", " b ", "c", "  d", "e", "!f", "g", "h "),
    chat("code", CODE, "x", "x"),
    chat("list", "ls  "),
    chat("e\u0301", "cafe\u0301", "u", "!u", "e", "e\u0301"),
    chat("smile", "😀", "more", "😀😀 😀"),
    chat("list", "ls"),
    [{"role": "system", "content": "Be brief."}, *chat("code", CODE + "    ", "x", "    x")],
    chat("a", "!b", "c", "d"),
    chat("list", "  ls  "),
    chat("x", "<b>bold</b>", "y", "!<i>", "z", "[z]"),
    chat("one\n\ntwo", "three\n\nfour\n", "five", "six"),
    chat("list", "ls", "all", thinking("hm", "ls -a")),
    chat("list", "<think>so</think>ls", "all", "!ls", "x", "<think>\nhm \n</think>\n\n  x"),
    chat(
        "weather?",
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": " It rains. "},
    ),
    chat("list", "ls", "all", " ls -a"),
    chat("x", "!y", "x", CODE),
    chat("a", "日", "b", "2"),
    chat("list", "ls"),
    chat("x", " y ", "y", "é e\u0301 日本 😀"),
    chat("x", "!" + CODE, "y", CODE),
    chat("list", "ls"),
    chat("USER: x", "ASSISTANT: y", "a", "!b", "c", "d"),
    chat("x", " " + CODE, "y", "y"),
]


def headed(
    messages: Sequence[Message],
    *,
    head: str,
    end: str,
    tail: str = "",
    names: Mapping[str, str] = {},
    trims: bool = False,
) -> Iterator[Piece]:
    """Yield a head that names the role, what is said, how it ends, and what follows it."""
    for message in messages:
        role = message["role"]
        said = message["content"].strip() if trims else message["content"]
        yield head.format(names.get(role, role)), ""
        yield said + end, kind_of(message)
        yield tail, kind_of(message, "u")


def mistral(messages: Sequence[Message]) -> Iterator[Piece]:
    yield "<s>", ""
    for message in messages:
        if message["role"] == "user":
            yield f"[INST] {message['content']} [/INST]", ""
        else:
            yield " ", kind_of(message, "u")
            yield message["content"] + "</s>", kind_of(message)


def qwen3(messages: Sequence[Message]) -> Iterator[Piece]:
    """The last turn alone has its thought."""
    for message in messages:
        role = "user" if message["role"] == "tool" else message["role"]
        yield f"<|im_start|>{role}\n", ""
        *thought, said = message["content"].replace("<think>", "").split("</think>")
        thought = [message.get("reasoning_content", "".join(thought))]
        if message is messages[-1]:
            yield f"<think>\n{thought[0].strip()}\n</think>\n\n{said.lstrip()}", kind_of(message)
        elif message["role"] == "tool":
            yield f"<tool_response>\n{said}\n</tool_response>", ""
        else:
            yield said, kind_of(message)
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
            yield text, kind_of(message)
        yield "<|im_end|>", kind_of(message)
        yield "\n", kind_of(message, "u")


def deepseek(messages: Sequence[Message]) -> Iterator[Piece]:
    """A prompt opens a thought, which the turns don't have."""
    yield "<s>", ""
    for message in messages:
        is_user = message["role"] == "user"
        yield ("<|User|>" if is_user else "<|Assistant|>"), ""
        yield message["content"] + ("" if is_user else "</s>"), kind_of(message)


def vicuna(messages: Sequence[Message]) -> Iterator[Piece]:
    yield "A chat.", ""
    for message in messages:
        if message["role"] == "user":
            yield f" USER: {message['content']} ASSISTANT:", ""
        else:
            yield " ", kind_of(message, "u")
            yield message["content"] + "</s>", kind_of(message)


def looped(head: str, said: str, tail: str = "", *, first: str = "", prompt: str) -> str:
    """Return a template that writes each message alike; [[ and ]] are marks."""
    return (
        f"{first}{{% for m in messages %}}{head}{{% if m.role == 'assistant' %}}[[{said}]]"
        f"{{% else %}}{said}{{% endif %}}{tail}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def paired(user: str, before: str, *, first: str = "", prompt: str = "") -> str:
    return (
        f"{first}{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% else %}}"
        f"{before}[[{{{{ m.content }}}}</s>]]{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


QWEN3 = """\
{%- for m in messages %}
    {%- set c = m.content or '' %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[[
        {%- if loop.last %}
            {%- set thought = m.reasoning_content or '' %}
            {%- if '</think>' in c %}
                {%- set thought = c.split('</think>')[0].split('<think>')[-1] %}
                {%- set c = c.split('</think>')[-1] %}
            {%- endif %}
            {{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' + c.lstrip() }}
        {%- else %}
            {{- c.split('</think>')[-1] }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]
        {{- '\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + c + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SAID = "{{ m.content }}"
TRIMMED = "{{ m.content | trim }}"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TURN = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
ROLE = "{{ m.role }}"
GEMMA = "{{ 'model' if m.role == 'assistant' else m.role }}"
COHERE = "{{ {'assistant': 'CHATBOT'}.get(m.role, m.role | upper) }}"

Pieces = Callable[[Sequence[Message]], Iterator[Piece]]


def with_first(first: str, pieces: Pieces) -> Pieces:
    return lambda messages: itertools.chain([(first, "")], pieces(messages))


TEMPLATES: dict[str, tuple[str, Pieces]] = {
    "chatml": (
        looped(
            f"<|im_start|>{ROLE}\n",
            SAID + "<|im_end|>",
            "{{ '\\n' }}",
            prompt="<|im_start|>assistant\n",
        ),
        lambda m: headed(m, head="<|im_start|>{}\n", end="<|im_end|>", tail="\n"),
    ),
    "llama3": (
        looped(
            HEADER.format(ROLE),
            TRIMMED + "<|eot_id|>",
            first="{{ bos_token }}",
            prompt=HEADER.format("assistant") + "{{ '' }}",
        ),
        with_first("<s>", lambda m: headed(m, head=HEADER, end="<|eot_id|>", trims=True)),
    ),
    "mistral": (
        paired("[INST] {{ m.content }} [/INST]", "{{ ' ' }}", first="{{ bos_token }}"),
        mistral,
    ),
    "gemma": (
        looped(
            f"<start_of_turn>{GEMMA}\n",
            TRIMMED + "<end_of_turn>",
            "{{ '\\n' }}",
            first="<s>",
            prompt="<start_of_turn>model\n",
        ),
        with_first(
            "<s>",
            lambda m: headed(
                m,
                head="<start_of_turn>{}\n",
                end="<end_of_turn>",
                tail="\n",
                names={"assistant": "model"},
                trims=True,
            ),
        ),
    ),
    "phi": (
        looped(f"<|{ROLE}|>\n", SAID + "<|end|>", "{{ '\\n' }}", prompt="<|assistant|>\n"),
        lambda m: headed(m, head="<|{}|>\n", end="<|end|>", tail="\n"),
    ),
    "zephyr": (
        looped(f"<|{ROLE}|>\n", SAID + "{{ eos_token }}", "{{ '\\n' }}", prompt="<|assistant|>\n"),
        lambda m: headed(m, head="<|{}|>\n", end="</s>", tail="\n"),
    ),
    "qwen3": (QWEN3, qwen3),
    "deepseek": (
        paired(
            "<|User|>{{ m.content }}",
            "<|Assistant|>",
            first="{{ bos_token }}",
            prompt="<|Assistant|><think>\n",
        ),
        deepseek,
    ),
    "command-r": (
        looped(
            TURN.format(COHERE),
            SAID + "<|END_OF_TURN_TOKEN|>",
            first="{{ bos_token }}",
            prompt=TURN.format("CHATBOT"),
        ),
        with_first(
            "<s>",
            lambda m: headed(
                m,
                head=TURN,
                end="<|END_OF_TURN_TOKEN|>",
                names={"assistant": "CHATBOT", "user": "USER", "system": "SYSTEM"},
            ),
        ),
    ),
    "vicuna": (
        paired(" USER: {{ m.content }} ASSISTANT:", "{{ ' ' }}", first="A chat."),
        vicuna,
    ),
}
SPECIAL = (
    *("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|User|>", "<|Assistant|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    "<|SYSTEM_TOKEN|>",
)


def pieces_of(number: int) -> list[Piece]:
    """Return the pieces of a chat in its template."""
    _, pieces = list(TEMPLATES.values())[number // 3]
    return list(pieces(CHATS[number]))


@cache
def tokenizer_of(name: str) -> Any:
    """Return a tokenizer that was trained on the chats."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    transformers: Any = pytest.importorskip("transformers")
    models, before, normal = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.normalizers
    texts = ["".join(text for text, _ in pieces_of(number)) for number in range(len(CHATS))]
    texts += [unicodedata.normalize("NFC", text) for text in texts]
    special = list(SPECIAL)
    after: Any = None
    kind, options = "Bpe", dict[str, Any](vocab_size=420)
    if name.startswith("bytes"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = before.ByteLevel(add_prefix_space=False)
        options |= {"initial_alphabet": before.ByteLevel.alphabet()}
        after = tokenizers.processors.ByteLevel(trim_offsets=name == "bytes-trimmed")
    elif name == "metaspace":
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = before.Metaspace(prepend_scheme="always")
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        options = {"vocab_size": 500, "limit_alphabet": 60}
    elif name == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normal.BertNormalizer(lowercase=True)
        made.pre_tokenizer = before.BertPreTokenizer()
        kind, options = "WordPiece", {"vocab_size": 300}
    elif name == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.normalizer = normal.Sequence(
            [normal.NFKC(), normal.Replace(tokenizers.Regex(" {2,}"), " ")]
        )
        made.pre_tokenizer = before.Metaspace(prepend_scheme="first")
        kind, options = "Unigram", {"vocab_size": 200, "unk_token": "<unk>"}
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        made.normalizer = normal.NFC()
        made.pre_tokenizer = before.Split(tokenizers.Regex(r"\s+|\w+|[^\s\w]+"), "isolated")
    trainer = getattr(tokenizers.trainers, f"{kind}Trainer")
    made.train_from_iterator(texts, trainer(special_tokens=special, show_progress=False, **options))
    if after is not None:
        made.post_processor = after
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def ends_by_bytes(names: Sequence[str], text: str) -> Iterator[int]:
    """Yield for each token the number of characters that begin before its last byte ends."""
    table, num_bytes = records.byte_of_character(), 0
    begins = [len(text[:place].encode()) for place in range(len(text))]
    for name in names:
        own = name.encode() if name in SPECIAL else bytes(table[letter] for letter in name)
        assert text.encode()[num_bytes : num_bytes + len(own)] == own
        num_bytes += len(own)
        yield sum(begin < num_bytes for begin in begins)


def letter(one: str) -> str:
    return unicodedata.normalize("NFD", one).lower()[0]


def ends_by_letters(names: Sequence[str], text: str, *, collapses: bool) -> Iterator[int]:
    """Yield where each token ends: letters are looked for in turn, white space may be left out.

    A space that was put before a word stands for nothing, so it goes with the word's first letter.
    If a tokenizer `collapses` spaces, what they become stands for all of them.
    """
    place, pending = 0, b""
    for name in names:
        if name in SPECIAL:
            place = text.index(name, place) + len(name)
            yield place
            continue
        if name.startswith("<0x"):
            pending += bytes([int(name[3:5], 16)])
            size = len(text[place].encode())
            yield place + 1
            if len(pending) == size:
                assert text[place].encode() == pending
                place, pending = place + 1, b""
            continue
        begin = place
        for sign in name.removeprefix("##").replace("\u2581", " "):
            if sign == " ":
                place += text[place : place + 1] == " "
                while collapses and text[place : place + 1] == " ":
                    place += 1
                continue
            while letter(text[place]) != letter(sign):
                assert text[place].isspace() or unicodedata.combining(text[place]), text[place:]
                place += 1
            place += 1
        yield place if place > begin else place + 1


def encoded(tokenizer: Any, template: str, messages: Sequence[Message]) -> tuple[Sample, bool]:
    """Return the sample of a row with a chat, and whether it follows the generation prompt."""
    tokenizer.chat_template = template
    settings = Settings(
        model=Path("model"),
        task="instruct",
        output=Path("out"),
        data=Data(train=Path("rows.jsonl"), max_tokens=10**4),
    )
    encoder = Encoder(settings, tokenizer)
    found = encoder.encode(Row("rows.jsonl", 1, {"messages": messages}))
    assert isinstance(found, Sample), found
    return found, not encoder.num_unaligned


KINDS = ("bytes", "bytes-trimmed", "metaspace", "wordpiece", "unigram", "composed")


@pytest.mark.parametrize("is_marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_those_of_a_mask_made_by_hand(kind: str, is_marked: bool) -> None:
    """Thirty chats in ten templates: the last characters of targets are what the assistant says."""
    tokenizer = tokenizer_of(kind)
    signs = ("{% generation %}", "{% endgeneration %}") if is_marked else ("", "")
    for number, messages in enumerate(CHATS):
        name, (source, _) = list(TEMPLATES.items())[number // 3]
        template = source.replace("[[", signs[0]).replace("]]", signs[1])
        pieces = pieces_of(number)
        text = "".join(text for text, _ in pieces)
        learned = [
            kind == "a" or (kind == "u" and not is_marked) for text, kind in pieces for _ in text
        ]
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        names = tokenizer.convert_ids_to_tokens(tokens)
        if kind.startswith("bytes"):
            ends = ends_by_bytes(names, text)
        else:
            ends = ends_by_letters(names, text, collapses=kind == "unigram")
        due = [learned[end - 1] for end in ends]
        due[0] = False
        sample, is_aligned = encoded(tokenizer, template, messages)
        assert is_aligned is (name != "deepseek"), "its prompt alone opens a thought"
        told = (number, text)
        assert tokenizer.convert_ids_to_tokens(list(sample.tokens)) == names, told
        got = [name for name, flag in zip(names, sample.is_target, strict=True) if flag]
        assert got == [name for name, flag in zip(names, due, strict=True) if flag], told
        assert list(sample.is_target) == due, told
