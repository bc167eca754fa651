"""From rows to tokens and what is predicted of them, once, and what a run makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py.shared.errors import RowsError, UsageError
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.model import model, rendering, samples
from entrenar_py.train.model.rows import BadRow, Row
from entrenar_py.train.model.samples import Encoder, Samples
from entrenar_py.train.model.settings import Classes, Data, Settings

CHAT = [
    {"role": "user", "content": "list"},
    {"role": "assistant", "content": "ls"},
    {"role": "user", "content": "all of it"},
    {"role": "assistant", "content": "ls -la"},
]


def settings(small: Path, rows: Path, task: str, **data: Any) -> Settings:
    """Return settings for a task on the file `rows`."""
    labels = ("safe", "unsafe") if task == "classify" else ()
    return Settings(
        model=small / "model",
        task=task,
        output=small / "out",
        data=Data(train=rows, **data),
        classes=Classes(labels=labels),
    )


def load(small: Path, folder: Path, task: str, rows: Sequence[object], **data: Any) -> Samples:
    """Return the samples of `rows`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    chosen = settings(small, path, task, **data)
    return samples.load(chosen, path, model.tokenizer(chosen), cache=folder / "cache")


def texts(small: Path, found: Samples) -> list[tuple[str, str]]:
    """Return each sample's text, and of it what is predicted."""
    chosen = settings(small, small, "text")
    tokenizer = model.tokenizer(chosen)
    parts = [found.part(index) for index in range(len(found))]
    return [
        (
            tokenizer.decode(found.tokens[part]),
            tokenizer.decode(found.tokens[part][found.is_target[part]]),
        )
        for part in parts
    ]


def test_of_a_text_all_but_the_first_token_are_predicted(small: Path, tmp_path: Path) -> None:
    found = load(small, tmp_path, "text", [{"text": "ls -la docs"}])
    ((whole, predicted),) = texts(small, found)
    assert whole == "ls -la docs<|end|>"
    assert whole.endswith(predicted)
    assert found.num_targets.tolist() == [found.length(0) - 1]


LONG_ROW = {"text": "ls " * 40}


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({}, "2 of 3 rows can't be used; fix them, or set data.on_error: skip"),
        ({"on_long": "skip"}, "1 of 3 rows can't be used; fix them, or set data.on_error: skip"),
        ({"on_long": "stop", "on_error": "skip"}, "fix them, or set data.on_long: skip"),
        ({"on_long": "stop"}, "2 of 3 rows .* set data.on_error: skip and data.on_long: skip"),
    ],
)
def test_long_rows_have_a_key_of_their_own(
    choices: dict[str, str], told: str, small: Path, tmp_path: Path
) -> None:
    """Without it they are treated as other rows that can't be used."""
    rows = [{"text": "ls"}, LONG_ROW, {"text": ""}]
    with pytest.raises(RowsError, match=told):
        load(small, tmp_path, "text", rows, max_tokens=16, **choices)
    both = {"on_long": "skip", "on_error": "skip"}
    found = load(small, tmp_path, "text", rows, max_tokens=16, **both)
    assert (len(found), len(found.skipped)) == (1, 2)


def test_long_rows_are_cut_as_stock_tokenizers_cut_them(small: Path, tmp_path: Path) -> None:
    """The first tokens stay, what is learned of them as well, and the number is kept."""
    rows = [{"text": "ls"}, LONG_ROW]
    for _ in range(2):  # the second time from the cache
        found = load(small, tmp_path, "text", rows, max_tokens=16, on_long="truncate")
        assert (len(found), found.length(1), found.num_cut, found.skipped) == (2, 16, 1, ())
    tokenizer = model.tokenizer(settings(small, small, "text"))
    theirs = tokenizer(LONG_ROW["text"], truncation=True, max_length=16)["input_ids"]
    assert found.tokens[found.part(1)].tolist() == theirs
    assert found.num_targets.tolist() == [found.length(0) - 1, 15]
    chat = {"messages": [{"role": "user", "content": "ls " * 40}, *CHAT[1:2]]}
    with pytest.raises(RowsError, match="has nothing to predict in 16 of its"):
        load(small, tmp_path, "instruct", [chat], max_tokens=16, on_long="truncate")
    row = {**LONG_ROW, "label": "safe"}
    assert load(
        small, tmp_path, "classify", [row], max_tokens=16, on_long="truncate"
    ).labels.tolist() == [0]


@pytest.mark.parametrize("task", ["text", "classify"])
def test_of_a_row_that_is_cut_only_the_beginning_is_tokenised(small: Path, task: str) -> None:
    """It has the tokens of a row that is just longer than `max_tokens`."""
    tokenizer = model.tokenizer(settings(small, small, task))
    num_chars = list[int]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            num_chars.append(len(text))
            return tokenizer(text, **options)

    encoder = Encoder(settings(small, small, task, max_tokens=16, on_long="truncate"), Counting())
    long, short = (
        encoder.encode(Row("f", 7, {"text": "ls " * number, "label": "safe"}))
        for number in (2**16, 40)
    )
    assert isinstance(long, samples.Sample)
    assert isinstance(short, samples.Sample)
    assert (list(long.tokens), long.label) == (list(short.tokens), short.label)
    assert encoder.num_cut == 2
    assert max(num_chars) == samples.SHORT_CHARS


def test_a_chat_is_cut_up_to_a_length(small: Path) -> None:
    """Beyond it the row is refused as it is without `truncate`, and told why."""
    chosen = settings(small, small, "instruct", max_tokens=512, on_long="truncate")
    row = {"messages": [*CHAT[:2], {"role": "user", "content": LONG}, CHAT[3]]}
    bad = Encoder(chosen, Untouched()).encode(Row("f", 7, row))
    assert str(bad).endswith("data.on_long: truncate cuts no row that is so long")


@pytest.mark.parametrize("added", ["$A <|end|>", "<|start|> $A <|end|> <|end|>", "<|start|> $A"])
def test_a_cut_text_keeps_the_tokens_that_the_tokenizer_adds(added: str, small: Path) -> None:
    """A classifier sees its end token, as with stock tokenizers. A token in the text is no end."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = model.tokenizer(settings(small, small, "classify"))
    named = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|start|>", "<|end|>")]
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=added, special_tokens=named)
    before = backend.to_str()
    text = 5 * "ls -la <|end|>"
    lengths = range(4, len(tokenizer(text)["input_ids"]) + 2)
    cut = [samples.first_tokens(tokenizer, text, most) for most in lengths]
    assert backend.to_str() == before
    for most, tokens in zip(lengths, cut, strict=True):
        assert tokens == tokenizer(text, truncation=True, max_length=most)["input_ids"]


def test_a_text_that_was_rendered_already_begins_once(small: Path, tmp_path: Path) -> None:
    """What a chat template wrote begins with the first token, which the tokenizer adds as well."""
    from tokenizers.processors import TemplateProcessing

    chosen = settings(small, tmp_path / "rows.jsonl", "text")
    tokenizer = model.tokenizer(chosen)
    first = tokenizer.convert_tokens_to_ids("<|start|>")
    tokenizer.bos_token = "<|start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", first)]
    )
    chosen.data.train.write_text('{"text": "<|start|>ls"}\n{"text": "ls"}\n', encoding="utf-8")
    found = samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path / "cache")
    one, other = (found.tokens[found.part(index)].tolist() for index in range(2))
    assert one == other
    assert one.count(first) == 1


def test_a_template_that_never_ends_ends_the_run(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are skipped for it, but not by thousands: each takes a second."""
    monkeypatch.setattr(rendering, "STEPS_MAX", 10)
    chosen = settings(small, tmp_path / "rows.jsonl", "instruct", on_error="skip")
    tokenizer = model.tokenizer(chosen)
    tokenizer.chat_template = "{% for i in range(99) %}{% endfor %}"
    chosen.data.train.write_text((json.dumps({"messages": CHAT}) + "\n") * 20, encoding="utf-8")
    with pytest.raises(UsageError, match=r"more than 10 steps.*in 10 rows, the last at .*:10"):
        samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path / "cache")


def test_of_a_chat_the_assistants_turns_alone_are_predicted(small: Path, tmp_path: Path) -> None:
    found = load(small, tmp_path, "instruct", [{"messages": CHAT}])
    ((whole, predicted),) = texts(small, found)
    assert whole.count("<|start|>") == 4
    assert predicted == "ls<|end|>\nls -la<|end|>\n"


def test_of_a_class_no_token_is_predicted(small: Path, tmp_path: Path) -> None:
    rows = [{"text": "ls", "label": "safe"}, {"text": "rm -rf /", "label": "unsafe"}]
    found = load(small, tmp_path, "classify", rows)
    assert not found.is_target.any()
    assert found.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("task", "row", "problem"),
    [
        ("text", {"body": "ls"}, "has no field 'text'; it has body"),
        ("text", {"text": " "}, "text=' ': use a text that is not empty"),
        ("text", {"text": 3}, "text=3: use a text that is not empty"),
        ("text", {"text": "ls " * 40}, "data.max_tokens allows 16"),
        ("classify", {"text": "ls", "label": "fine"}, "label='fine': classes.labels has safe,"),
        ("classify", {"text": "ls", "label": None}, "label=None: classes.labels has safe,"),
        ("instruct", {"messages": "ls"}, "messages is not a list of messages"),
        (
            "instruct",
            {"messages": [{"role": "boss", "content": ""}]},
            "message 1 has role 'boss'; use",
        ),
        ("instruct", {"messages": [{"role": "user"}]}, "message 1 has no text as its content"),
        ("instruct", {"messages": CHAT[:1]}, "no turn of the assistant"),
    ],
)
def test_a_row_that_cannot_be_used(
    small: Path, tmp_path: Path, task: str, row: object, problem: str
) -> None:
    with pytest.raises(UsageError) as raised:
        load(small, tmp_path, task, [row], max_tokens=16)
    assert f"rows.jsonl:1: {problem}" in str(raised.value) or problem in str(raised.value)
    assert "1 of 1 row can't be used" in str(raised.value)
    with pytest.raises(UsageError, match="has no row that can be used; the first is"):
        load(small, tmp_path, task, [row], max_tokens=16, on_error="skip")


def _nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def _called(arguments: str) -> str:
    """Return a row as a line: a chat whose answer calls a function with `arguments`, as JSON."""
    call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
    answer = f'{{"role": "assistant", "content": "x", "tool_calls": [{call}]}}'
    return f'{{"messages": [{{"role": "user", "content": "list"}}, {answer}]}}'


ATTACKS = {
    "deep": _called(_nested(450)),
    "deep in a text": _called(json.dumps(_nested(450))),
    "too deep to be parsed": _called(_nested(10**5)),
    "digits": _called("9" * 5000),
    "half a character": _called('"\\ud800"'),
    "a name twice": _called('{"a": 1, "a": 2}'),
    "not UTF-8": _called('"\udcff"'),
    "wrong types": '{"messages": {"role": []}}',
    "NaN": _called("NaN"),  # which the template of this model leaves out
    "long": _called(json.dumps({"a": "ab " * 2**15})),
}


def test_rows_of_an_attacker_are_skipped_and_the_others_learned(
    small: Path, tmp_path: Path
) -> None:
    """No row ends the command: each is listed with its line, and why it can't be used."""
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": CHAT})
    text = "".join(f"{line}\n" for line in (good, *ATTACKS.values(), good))
    path.write_bytes(text.encode(errors="surrogateescape"))
    chosen = settings(small, path, "instruct", on_error="skip")
    found = samples.load(chosen, path, model.tokenizer(chosen), cache=tmp_path / "cache")
    assert len(found) == 2
    places = [one.place for one in found.skipped]
    assert places == [f"{path}:{number}" for number in range(2, 2 + len(ATTACKS))]
    strict = settings(small, path, "instruct")
    with pytest.raises(RowsError, match="10 of 12 rows can't be used"):
        samples.load(strict, path, model.tokenizer(strict), cache=tmp_path / "cache")


class Untouched:
    """A tokenizer that must not be asked for the tokens of anything."""

    chat_template = "{{ messages }}"

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"{name} was asked for")

    def __call__(self, text: str) -> Any:
        pytest.fail(f"{len(text)} characters were tokenised")


LONG = "ab " * 2**15


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("text", {"text": LONG}),
        ("classify", {"text": LONG, "label": "safe"}),
        ("instruct", {"messages": [{"role": "user", "content": LONG}, CHAT[1]]}),
        ("instruct", {"messages": CHAT, "tools": [{"name": "a", "description": LONG}]}),
    ],
)
def test_a_row_that_must_be_too_long_is_not_tokenised(
    small: Path, task: str, row: dict[str, Any]
) -> None:
    """Its tokens would take four hundred times its bytes, only to be refused."""
    encoder = Encoder(settings(small, small, task, max_tokens=512), Untouched())
    bad = encoder.encode(Row("f", 7, row))
    assert isinstance(bad, BadRow)
    assert re.match(
        r"f:7: has 98\d{3} characters, too many for data.max_tokens=512 \(64 a", str(bad)
    )


@pytest.mark.parametrize(
    ("labels", "given", "expected"),
    [(("0", "1"), [0, 1, 1.0, "1"], [0, 1, 1, 1]), (("false", "true"), [True, False], [1, 0])],
)
def test_labels_that_are_no_texts(
    small: Path, tmp_path: Path, labels: tuple[str, ...], given: list[object], expected: list[int]
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": "ls", "label": label}) + "\n" for label in given]
    path.write_text("".join(lines), encoding="utf-8")
    chosen = replace(settings(small, path, "classify"), classes=Classes(labels=labels))
    found = samples.load(chosen, path, model.tokenizer(chosen), cache=tmp_path / "cache")
    assert found.labels.tolist() == expected


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (1, r"a number is a class name, not an index: use labels: \[0, 1\]"),
        (1.0, r"a number is a class name, not an index: use labels: \[0, 1\]"),
        (True, r"a truth value is a class name, not an index: use labels: \[false, true\]"),
    ],
)
def test_a_label_that_is_a_place(small: Path, tmp_path: Path, label: object, problem: str) -> None:
    with pytest.raises(UsageError, match=f"label={label}: .*{problem}"):
        load(small, tmp_path, "classify", [{"text": "ls", "label": label}])


@pytest.mark.parametrize("label", ["x" * 10**5, ["safe"] * 10**5])
def test_a_long_value_is_told_shortened(small: Path, tmp_path: Path, label: object) -> None:
    with pytest.raises(UsageError, match=r"characters left out .*: classes.labels has s") as told:
        load(small, tmp_path, "classify", [{"text": "ls", "label": label}])
    assert len(str(told.value)) < 1000


def test_rows_of_several_files(small: Path, tmp_path: Path) -> None:
    """Another file among them, or another content of one, has another cache."""
    chosen = settings(small, tmp_path / "part-*.jsonl", "text")
    tokenizer, digests = model.tokenizer(chosen), []
    for number in (1, 2):
        (tmp_path / f"part-{number}.jsonl").write_text('{"text": "ls"}\n', encoding="utf-8")
        found = samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path / "cache")
        assert len(found) == number
        digests.append(found.digest)
    assert len(set(digests)) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_skipped_rows_are_kept_in_the_cache_too(small: Path, tmp_path: Path) -> None:
    rows = [{"text": "ls"}, {"text": ""}, {"text": "cat notes"}]
    fresh = load(small, tmp_path, "text", rows, on_error="skip")
    (kept,) = (tmp_path / "cache").iterdir()
    again = load(small, tmp_path, "text", rows, on_error="skip")
    assert [str(one) for one in again.skipped] == [str(one) for one in fresh.skipped]
    assert len(fresh) == 2
    assert again.digest == fresh.digest
    kept.write_bytes(kept.read_bytes()[:-1])  # a damaged one is made anew
    assert load(small, tmp_path, "text", rows, on_error="skip").digest == fresh.digest


def test_another_tokenizer_has_another_cache(small: Path) -> None:
    first = model.tokenizer(settings(small, small, "text"))
    other = model.tokenizer(settings(small, small, "text"))
    assert samples.tokenizer_digest(first) == samples.tokenizer_digest(other)
    other.chat_template = "{{ messages }}"
    assert samples.tokenizer_digest(first) != samples.tokenizer_digest(other)


def test_nothing_predicts_a_first_token(small: Path, tmp_path: Path) -> None:
    """Of an assistant that speaks first, by a template that begins with its words."""
    row = {"messages": [{"role": "assistant", "content": "ls -la"}]}
    chosen = settings(small, tmp_path / "rows.jsonl", "instruct")
    chosen.data.train.write_text(json.dumps(row), encoding="utf-8")
    tokenizer = model.tokenizer(chosen)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path / "cache")
    assert not found.is_target[0]
    assert found.is_target[1:].all()


def test_two_processes_may_fill_the_cache_at_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes a file of its own before it gives it the name; here the other one is first."""
    path = tmp_path / "cache" / "rows.samples"
    save = checkpoint.save

    def slow(own: Path, *rest: Any) -> None:
        monkeypatch.setattr(checkpoint, "save", save)
        save(own, *rest)
        samples._keep(path, made([0, 1]))

    monkeypatch.setattr(checkpoint, "save", slow)
    samples._keep(path, made([0, 1]))
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_chat_needs_a_template(small: Path, tmp_path: Path) -> None:
    chosen = settings(small, tmp_path / "rows.jsonl", "instruct")
    tokenizer = model.tokenizer(chosen)
    tokenizer.chat_template = None
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(UsageError, match="its tokenizer has no chat template"):
        samples.load(chosen, chosen.data.train, tokenizer, cache=tmp_path)


def made(labels: Sequence[int]) -> Samples:
    """Return samples with these labels; sample i is the token i, once for each class before it."""
    lengths = [1 + label for label in labels]
    return Samples(
        tokens=np.repeat(np.arange(len(labels)), lengths).astype(np.int32),
        is_target=np.zeros(sum(lengths), np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.array(labels, np.int32),
    )


def test_oversampling_copies_rare_classes_behind_all_others() -> None:
    found = samples.oversampled(made([0, 0, 1, 0, 2, 0, 2]))
    assert np.bincount(found.labels).tolist() == [4, 4, 4]
    assert found.labels[:7].tolist() == [0, 0, 1, 0, 2, 0, 2]
    copies = [found.tokens[found.part(index)].tolist() for index in range(7, len(found))]
    assert copies == [[2, 2], [2, 2], [2, 2], [4, 4, 4], [6, 6, 6]]


def test_a_class_without_rows_is_neither_weighed_nor_copied() -> None:
    with pytest.raises(UsageError, match=r"oversample=true: class 'b' has no row to train on"):
        samples.require_rows([3, 0], ["a", "b"], "classes.oversample=true", "use false")
    samples.require_rows([3, 1], ["a", "b"], "classes.oversample=true", "use false")


@pytest.mark.parametrize("kind", ["none", "inverse", "sqrt_inverse"])
def test_class_weights(kind: str) -> None:
    found = made([0, 0, 0, 0, 1])
    zero, one = samples.class_weights(found, kind, "ab")
    assert 4 * zero + one == pytest.approx(5)
    assert one / zero == pytest.approx({"none": 1, "inverse": 4, "sqrt_inverse": 2}[kind])
    if kind != "none":
        with pytest.raises(UsageError, match="class 'c' has no row"):
            samples.class_weights(found, kind, "abc")


def test_a_split_loses_and_repeats_nothing() -> None:
    found = made([0] * 10)
    rest, kept = samples.split(found, 0.3, np.random.default_rng(0))
    assert (len(rest), len(kept)) == (7, 3)
    assert sorted([*rest.tokens.tolist(), *kept.tokens.tolist()]) == list(range(10))


def test_the_digest_tells_samples_apart() -> None:
    found = made([0, 1])
    other = replace(found, is_target=~found.is_target)
    assert len({found.digest, other.digest, found.chosen([1, 0]).digest}) == 3
