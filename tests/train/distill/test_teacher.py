"""`entrenar distill text` with a teacher on this machine."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.train.distill import prompts
from entrenar_py.train.distill.prompts import Answer, Failed, Prompt
from entrenar_py.train.distill.teacher import Generation
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model.conversations import Conversation
from entrenar_py.train.service import exit_codes
from tests.train.distill.configured import chats, config, said, written

PROMPTS = ["ls -la", "rm -rf /", "cat notes"]


@pytest.fixture(scope="module")
def teacher(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with random weights, of whose tokens a ninth end an answer."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(small / "model", folder)
    path = folder / "generation_config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"eos_token_id": [1, *range(5, 512, 9)], "top_p": 0.5, "do_sample": True}
    record |= {"repetition_penalty": 1.8, "num_beams": 2}  # not followed
    path.write_text(json.dumps(record), encoding="utf-8")
    return folder


def ask(path: Path, *more: str) -> int:
    """Return the exit code of the command."""
    return cli.main(["distill", "text", str(path), *more])


def made(folder: Path, teacher: Path, **changes: Any) -> Path:
    """Write a configuration of three prompts for `teacher`."""
    text = {"new_tokens": 48, "synthetic_share": 1.0, **changes}
    distill = {"teacher": str(teacher), "precision": "float32"}
    return config(folder, chats(PROMPTS), distill=distill, **text)


def test_greedy_answers_are_those_of_transformers(teacher: Path, tmp_path: Path) -> None:
    """Without a temperature an answer has the most likely tokens, up to one that ends it."""
    path = made(tmp_path, teacher)
    assert ask(path) in (exit_codes.DONE, exit_codes.WRONG)
    records = [
        json.loads(line)
        for line in (tmp_path / "answers.jsonl.journal").read_text(encoding="utf-8").splitlines()
    ]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    tokenizer = transformers.AutoTokenizer.from_pretrained(teacher)
    assert len(records) == len(PROMPTS)
    for prompt, record in zip(PROMPTS, records, strict=True):
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        given.pop("token_type_ids", None)
        how: dict[str, Any] = {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
        how |= {"repetition_penalty": 1.0, "num_beams": 1}
        tokens = model.generate(**given, max_new_tokens=48, pad_token_id=0, **how)
        new = tokens[0, given["input_ids"].shape[1] :].tolist()
        is_ended = new[-1] in model.generation_config.eos_token_id
        expected = tokenizer.decode(new[:-1] if is_ended else new, skip_special_tokens=True)
        assert record["content"] == expected
        wanted = ("whole" if expected.strip() else "refused") if is_ended else "truncated"
        assert record["outcome"] == wanted


OPENED = "{{ messages[0].content }}\n{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "answer", "result"),
    [
        (None, "ls<|end|>", Answer("whole", "ls")),
        (None, "ls<|start|>rm<|end|>", Failed("the answer has <|start|>, which the teacher's")),
        (None, "ls<|start|>rm", Answer("truncated", "ls<|start|>rm")),
        (OPENED, "hm\n</think>\nls<|end|>", Answer("whole", "<think>\nhm\n</think>\nls")),
        (OPENED, "<|end|>", Answer("refused", "")),
    ],
)
def test_an_answer_keeps_what_a_template_reads(
    template: str | None,
    answer: str,
    result: Answer | Failed,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thought that the prompt opened is there, and no special token lacks its brackets."""
    settings = settings_file.load(made(tmp_path, teacher))
    assert settings.distill is not None
    assert settings.distill.text is not None
    generation = Generation(settings, settings.distill, settings.distill.text, "cpu")
    if template is not None:
        generation._tokenizer.chat_template = template
    tokens = generation._tokenizer(answer, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(Generation, "_generated", lambda *_: tokens)
    asked = Conversation(messages=[{"role": "user", "content": "a"}], tools=None, learned=())
    ((_, found),) = generation.answers([Prompt("x:1", asked)], threading.Event())
    if isinstance(result, Failed):
        assert isinstance(found, Failed)
        assert found.reason.startswith(result.reason)
    else:
        assert found == result


def test_sampling_follows_from_the_seed(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run draws what an unbroken one does; another seed draws something else."""
    path = made(tmp_path, teacher, temperature=1.0)
    assert ask(path) == exit_codes.DONE
    first = said(tmp_path)
    assert len(first) >= 2
    journal = tmp_path / "answers.jsonl.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0])

    answer, asked = Generation._answer, list[str]()

    def stopped(self: Any, prompt: Any, *more: Any) -> Any:
        asked.append(prompt.place)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return answer(self, prompt, *more)

    monkeypatch.setattr(Generation, "_answer", stopped)
    assert ask(path) == exit_codes.STOPPED
    monkeypatch.undo()
    assert len(journal.read_bytes().splitlines()) == 2
    assert ask(path) == exit_codes.DONE
    assert journal.read_bytes() == b"".join(lines)
    assert said(tmp_path) == first
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**record, "seed": 1}), encoding="utf-8")
    ask(path)
    assert said(tmp_path) != first


def test_a_teacher_in_int8_answers(teacher: Path, tmp_path: Path) -> None:
    """The formats of a teacher's weights are those of `entrenar distill logits`."""
    pytest.importorskip("bitsandbytes")
    distill = {"teacher": str(teacher), "precision": "int8"}
    path = config(tmp_path, chats(PROMPTS), distill=distill, new_tokens=4)
    assert ask(path) in (exit_codes.DONE, exit_codes.WRONG)
    assert len((tmp_path / "answers.jsonl.journal").read_bytes().splitlines()) == len(PROMPTS)


def test_prompts_that_do_not_fit(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt without room for an answer fails alone."""
    distill = {"teacher": str(teacher), "precision": "float32"}
    rows = [{"text": text} for text in ("ls " * 900, "cat ", "rm ", "mv ")]
    path = config(tmp_path, rows, task="text", distill=distill, synthetic_share=1.0, temperature=1)
    assert ask(path) == exit_codes.WRONG
    assert "tokens; prompt and answer together may have at most 512" in capsys.readouterr().out
    texts = [row["text"] for row in written(tmp_path)]
    assert texts
    assert all(text.startswith(("cat ", "rm ", "mv ")) and len(text) > 4 for text in texts)


# peft asks for what a later transformers will lack.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("task", ["instruct", "text"])
def test_finetune_takes_the_rows(
    task: str, teacher: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student is trained on what was written, original rows among it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    distill = {"teacher": str(teacher), "precision": "float32"}
    rows = chats(PROMPTS) if task == "instruct" else [{"text": text} for text in PROMPTS]
    path = config(
        tmp_path, rows, task=task, distill=distill, model=str(small / "model"), temperature=1
    )
    assert ask(path) == exit_codes.DONE
    num_rows = len(written(tmp_path))
    assert num_rows >= 3
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["distill"]
    record["data"] = {"train": "answers.jsonl", "max_tokens": 512}
    record["training"] = {"batch_size": 4, "num_shards": 1}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert cli.main(["finetune", str(path)]) == exit_codes.DONE


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sampling_on_cuda_is_the_same_again(teacher: Path, tmp_path: Path) -> None:
    """A GPU draws the same answers from the same seed, and leaves the process's own draws alone."""
    path, answers = made(tmp_path, teacher, temperature=1.0), tmp_path / "answers.jsonl"
    journal = answers.with_name("answers.jsonl.journal")
    found = list[bytes]()
    for _ in range(2):
        for old in (answers, journal):
            old.unlink(missing_ok=True)
        before = torch.cuda.get_rng_state()
        assert ask(path, "--backend", "cuda") in (exit_codes.DONE, exit_codes.WRONG)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        found.append(journal.read_bytes())
    assert found[0] == found[1]


def test_a_template_with_a_clock_is_told_one_day_in_a_run(teacher: Path, tmp_path: Path) -> None:
    """What is resumed on another day goes on with the first; data.date says which."""
    folder = tmp_path / "dated"
    shutil.copytree(teacher, folder)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = made(tmp_path, folder)
    record = json.loads(path.read_text(encoding="utf-8"))
    dated = {**record, "data": {**record["data"], "date": "2024-02-29"}}
    path.write_text(json.dumps(dated), encoding="utf-8")
    assert ask(path) in (exit_codes.DONE, exit_codes.WRONG)
    journal = tmp_path / "answers.jsonl.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["day"] for line in lines] == ["2024-02-29"] * len(PROMPTS)
    path.write_text(json.dumps(record), encoding="utf-8")
    journal.write_bytes(lines[0])
    assert ask(path) in (exit_codes.DONE, exit_codes.WRONG)
    assert journal.read_bytes() == b"".join(lines)


def test_an_endpoints_answers_have_no_day(tmp_path: Path) -> None:
    """A checkpoint that goes on with the journal has the first day that is noted."""
    path = tmp_path / "answers.jsonl.journal"
    path.write_text('{"prompt": "a"}\ndamaged\n{"day": "2024-02-29"}\n{"day": "2024-03-01"}\n')
    assert prompts.day_of(path) == "2024-02-29"
    path.write_text('{"prompt": "a"}\n')
    assert prompts.day_of(path) is None
