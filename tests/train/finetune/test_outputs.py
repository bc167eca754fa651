"""`infer`, `eval` and `merge` use what a run wrote with the model and tokenizer that it had."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import RowsError, SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.train.finetune import outputs, settings_file
from entrenar_py.train.finetune.outputs import Sampling
from entrenar_py.train.model import decoding, model_folder, preparation, samples, stock
from entrenar_py.train.model.settings import Lora
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs


def test_folders_within_are_replaced(tmp_path: Path) -> None:
    """As tokenizers with several chat templates write them; the second export is as the first."""
    for text in ("first", "second"):
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            inner = partial / "additional_chat_templates"
            inner.mkdir()
            (inner / f"{text}.jinja").write_text(text)
            (partial / "config.json").write_text(text)
    (inner,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.read_text() for path in inner.iterdir()] == ["second"]
    assert inner.stat().st_mode & 0o100, "it can be entered"


class Sudden(BaseException):
    """An interrupt, which no library's handler of errors takes."""


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, FULL), ValueError(f"I/O error: {FULL}")])
def test_a_disk_that_fills_in_the_middle(tmp_path: Path, error: Exception) -> None:
    """The message names the file and what is free; the earlier output stays, and a later one comes.

    safetensors and tokenizers have exceptions of their own.
    """

    def export(content: str, problem: BaseException | None) -> None:
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            (partial / "model.safetensors").write_text(content)
            if problem is not None:
                raise problem
            (partial / "config.json").write_text(content)

    export("first", None)
    told = rf"\(model\.safetensors: {FULL}: [\d,]+ bytes are free there\); try again"
    with pytest.raises(SystemFailure, match=told):
        export("second", error)
    with pytest.raises(Sudden):
        export("second", Sudden())
    names = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_text() for name in names] == ["first", "first"]
    export("third", None)
    assert [(tmp_path / name).read_text() for name in names] == ["third", "third"]


def test_a_state_that_is_moved_in_part_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed then, and resumed, keeps the state of that step again."""
    names = ("adapter_model.safetensors", "adapter_config.json", "run.json")

    def fill(folder: Path, *_: object, **__: object) -> None:
        for name in names:
            (folder / name).write_text("{}")

    def keep() -> None:
        given = cast("Any", None)
        kept = outputs.Kept("plan", 3, 0.5, None)
        outputs.keep(tmp_path, given, given, given, kept, model_digest="")

    monkeypatch.setattr(outputs, "_fill", fill)
    keep()
    assert outputs.Kept.of(tmp_path) is not None
    move = Path.replace

    def moved(path: Path, target: Path) -> Path:
        if target.name == names[-1]:
            raise Sudden
        return move(path, target)

    monkeypatch.setattr(Path, "replace", moved)
    with pytest.raises(Sudden):
        keep()
    assert outputs.Kept.of(tmp_path) is None


# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def written(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and adapters in `out` as a run of no step writes them."""
    return write(tmp_path_factory.mktemp("written"), small)


def write(
    folder: Path,
    small: Path,
    *,
    method: str = "lora",
    generation: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a checkpoint to `folder`, and to `out` the adapters of a run of no step.

    With `method` full, it is the whole model. `generation` replaces the checkpoint's generation
    configuration.
    """
    shutil.copytree(small / "model", folder / "model")
    if generation is not None:
        path = folder / "model" / "generation_config.json"
        path.write_text(json.dumps(generation), "utf-8")
    config = runs.configured(folder, small, model=str(folder / "model"), **changes)
    settings = settings_file.load(config)
    if method == "full":
        settings = replace(settings, method="full", lora=Lora())
    prepared = preparation.prepare(settings, folder / "cache")
    workload = prepared.workload()
    draw = np.random.default_rng(0)
    tensors = workload.initial(draw)
    if settings.task == "text":  # so that adapters change what is said
        tensors = {n: draw.normal(size=v.shape).astype(v.dtype) for n, v in tensors.items()}
    digest = preparation.model_digest(preparation.plan_of(settings, workload))
    outputs.write(prepared, workload, tensors, model_digest=digest)
    return folder


@pytest.fixture(scope="module")
def texts(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that has learned texts."""
    folder = tmp_path_factory.mktemp("texts")
    return write(folder, small, task="text") / "out"


SAMPLED = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "3", "--new-tokens", "6")


def test_a_file_of_prompts_is_answered_as_stock_libraries_sample(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt has the same answer alone, in a file, and by transformers from the same seed."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    path, told = tmp_path / "prompts.jsonl", ["ls", "sudo rm", "ls"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in told), "utf-8")
    assert cli.main(["infer", str(texts), "--prompts", str(path), *SAMPLED]) == exit_codes.DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["place"] for line in lines] == [f"{path}:{number}" for number in (1, 2, 3)]
    assert cli.main(["infer", str(texts), "--prompt", "sudo rm", *SAMPLED]) == exit_codes.DONE
    alone = capsys.readouterr().out.removesuffix("\n")
    assert alone == escaping.text(lines[1]["answer"])
    assert lines[0]["answer"] == lines[2]["answer"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(texts)
    stock = peft.AutoPeftModelForCausalLM.from_pretrained(texts).eval()
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    for text, line in zip(told, lines, strict=True):
        batch = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            tokens = stock.generate(**batch, max_new_tokens=6, pad_token_id=0, **sampled)
        new = tokens[0, batch["input_ids"].shape[1] :]
        assert line["answer"] == tokenizer.decode(new, skip_special_tokens=True)


def test_prompts_that_are_skipped_are_named(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's `on_error: skip`, on standard error: the output has a line for each answer."""
    output = outputs.load(texts, trusts=False)
    data = replace(output.settings.data, on_error="skip")
    output = replace(output, settings=replace(output.settings, data=data))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "ls"}\n{"text": ""}\n', "utf-8")
    assert len(list(outputs.answers(output, path, FEW))) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[-2] == "entrenar: warning: skipped: 1 row (data.on_error: skip)"
    assert told[-1] == f"  {path}:2: text='': use a text that is not empty"


def test_rows_that_cannot_be_answered_are_found_before_the_first_answer(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that are too long for the model, or that its chat template refuses."""
    output = outputs.load(texts, trusts=False)
    limit = model_folder.longest(output.module)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": "ls " * n}) + "\n" for n in (1, 9999)), "utf-8")
    with pytest.raises(RowsError, match=r"1 of 2 rows can't be used") as raised:
        next(outputs.answers(output, path, FEW))
    told = rf":2: has \d+ tokens and --new-tokens 4: the model takes {limit} tokens in all"
    assert re.search(told, str(raised.value))
    assert "--prompt of" not in str(raised.value)
    skipping = replace(output.settings, data=replace(output.settings.data, on_error="skip"))
    assert len(list(outputs.answers(replace(output, settings=skipping), path, FEW))) == 1
    assert re.search(told, capsys.readouterr().err)

    output.tokenizer.chat_template = "{{ raise_exception('no system') }}"
    chats = replace(output, settings=replace(skipping, task="instruct"))
    path.write_text(json.dumps({"messages": LIST}), "utf-8")
    assert list(outputs.answers(chats, path, FEW)) == []
    assert "prompts.jsonl:1: the chat template refuses it: no system" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--prompt: the chat template refuses it: no system"):
        list(outputs.answer(chats, "ls", FEW))


LIST = [{"role": "user", "content": "ls"}]
SIDES = {side: [*LIST, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
FEW = Sampling(new_tokens=4)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ls"},
        {"text": "ls"},
        {"messages": [*LIST, {"role": "assistant", "content": "no"}]},
        {"prompt": "ls", "chosen": "a", "rejected": "b"},
        {"chosen": "ls a", "rejected": "ls b"},
        {"prompt": LIST},
        {"prompt": LIST, **{side: turns[1:] for side, turns in SIDES.items()}},
        {"prompt": "repeated", **SIDES},
        SIDES,
    ],
)
def test_a_prompt_of_a_pair_is_answered_alone_and_in_a_file(
    row: dict[str, Any], texts: Path, tmp_path: Path
) -> None:
    """With `task: preference`, any form of a row is asked in the chat template, like --prompt."""
    output = outputs.load(texts, trusts=False)
    output = replace(output, settings=replace(output.settings, task="preference"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    (alone,) = outputs.answer(output, "ls", FEW)
    (line,) = outputs.answers(output, path, FEW)
    assert json.loads(line)["answer"] == alone
    (as_text,) = outputs.answer(outputs.load(texts, trusts=False), "ls", FEW)
    assert as_text != alone


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chosen": "yes", "rejected": "no"}, "its prompt is ''"),
        ({"prompt": " "}, "its prompt is ' '"),
        ({"chosen": SIDES["chosen"]}, "has no field 'messages'"),
    ],
)
def test_a_row_without_a_prompt_of_a_pair(
    row: dict[str, Any], told: str, texts: Path, tmp_path: Path
) -> None:
    output = outputs.load(texts, trusts=False)
    output = replace(output, settings=replace(output.settings, task="preference"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    with pytest.raises(RowsError, match=re.escape(told)):
        list(outputs.answers(output, path, FEW))


def test_an_answer_ends_with_either_end_token_and_nothing_else_of_the_checkpoint_counts(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's penalties and beams are ignored, as the options promise."""
    output = outputs.load(texts, trusts=False)
    tokenizer, module = output.tokenizer, cast("Any", output.module)
    config = module.get_base_model().generation_config
    config.eos_token_id = None
    answers = list[list[int]]()

    def whole(new: list[int], *_: Any) -> list[int]:
        answers.append(new)
        return new

    monkeypatch.setattr(decoding, "whole", whole)

    def answer() -> list[int]:
        list(outputs.answer(output, "ls", Sampling(new_tokens=8)))
        return answers[-1]

    plain = answer()
    first = plain[0]
    place = next(place for place, token in enumerate(plain) if token != first)
    config.repetition_penalty, config.num_beams, config.min_p = 5.0, 3, 0.5
    assert answer() == plain
    assert module.get_base_model().generation_config is config
    config.eos_token_id = plain[place]
    assert answer() == plain[: place + 1]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    assert answer() == [first]


def test_no_end_token_that_the_tokenizer_adds_stands_after_a_prompt(texts: Path) -> None:
    """The answer continues the text, as if the tokenizer added nothing."""
    from tokenizers.processors import TemplateProcessing

    output = outputs.load(texts, trusts=False)
    plain = list(outputs.answer(output, "ls", FEW))
    end = output.tokenizer.eos_token
    output.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, output.tokenizer.eos_token_id)]
    )
    assert list(outputs.answer(output, "ls", FEW)) == plain


def test_exports_name_the_end_token_that_was_trained_with(small: Path, tmp_path: Path) -> None:
    """Whole models and merged ones stop where stock transformers' trainer would let them stop."""
    generation = {"eos_token_id": [7, 9], "top_k": 5, "do_sample": True}
    full, lora = tmp_path / "full", tmp_path / "lora"
    for folder in (full, lora):
        folder.mkdir()
        write(folder, small, generation=generation, task="text", method=folder.name)
    outputs.merge(outputs.load(lora / "out", trusts=False), lora / "merged")
    for folder in (full / "out", lora / "merged"):
        noted = json.loads((folder / "generation_config.json").read_text("utf-8"))
        assert noted["eos_token_id"] == [7, 9, 1]
        assert noted["top_k"] == 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "give either --prompt TEXT or --prompts FILE"),
        (("--prompt", "ls", "--prompts", "rows.jsonl"), "give either --prompt TEXT or --prompts"),
        (("--prompt", "ls", "--seed", "1"), "--seed 1: nothing is sampled; give --temperature"),
        (("--prompt", "ls", "--temperature", "1e-9"), "or at least 0.001"),
    ],
)
def test_options_of_sampling_that_make_no_sense(
    options: tuple[str, ...], told: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["infer", str(texts), *options]) == exit_codes.INVALID
    assert told in capsys.readouterr().err


def test_a_model_is_merged_in_16_bits(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are those of the merge in float32, rounded once."""
    safetensors = pytest.importorskip("safetensors.torch")
    merged = {}
    for name in ("float32", "bfloat16"):
        command = ["merge", str(texts), str(tmp_path / name), "--precision", name]
        assert cli.main(command) == exit_codes.DONE
        merged[name] = safetensors.load_file(tmp_path / name / "model.safetensors")
    told = capsys.readouterr().out
    assert "weights were rounded to bfloat16, which may undo small changes" in told
    assert f"answers with those of `entrenar infer {texts}`" in told, "`eval` takes no merged model"
    assert merged["float32"].keys() == merged["bfloat16"].keys()
    for name, weight in merged["float32"].items():
        assert torch.equal(merged["bfloat16"][name], weight.bfloat16()), name


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of `written` that may be changed."""
    shutil.copytree(written, tmp_path / "copy")
    change(tmp_path / "copy", "model", str(tmp_path / "copy" / "model"))
    return tmp_path / "copy"


def change(folder: Path, key: str, value: object) -> None:
    """Set a key of `run.json`; None leaves it out."""
    path = folder / "out" / "run.json"
    record = json.loads(path.read_text("utf-8")) | {key: value}
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}), "utf-8")


def another_weight(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_configuration(folder: Path) -> None:
    path = folder / "model" / "config.json"
    record = json.loads(path.read_text("utf-8"))
    record["rms_norm_eps"] = 1e-5
    path.write_text(json.dumps(record), "utf-8")


def another_template(folder: Path) -> None:
    (folder / "out" / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")


def other_words(folder: Path) -> None:
    path = folder / "out" / "tokenizer.json"
    text = path.read_text("utf-8")
    path.write_text(text.replace('"sudo"', '"odus"'), "utf-8")


MODEL, TOKENIZER = (
    "its adapters were trained on a different model from",
    "its tokenizer is not the run",
)
ARGUMENTS = {"infer": ["--prompt", "ls"], "eval": ["--data", "rows.jsonl"], "merge": ["merged"]}


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (another_weight, MODEL),
        (another_configuration, MODEL),
        (another_template, TOKENIZER),
        (other_words, TOKENIZER),
    ],
)
def test_adapters_are_not_used_with_what_they_were_not_trained_on(
    damage: Callable[[Path], None],
    told: str,
    command: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both digests are told, and no answer, score or file is made."""
    noted = outputs.read_settings(folder / "out")[1]
    assert noted is not None
    damage(folder)
    assert cli.main([command, str(folder / "out"), *ARGUMENTS[command]]) == exit_codes.INVALID
    problem = capsys.readouterr()
    assert told in problem.err
    assert not problem.out
    due = noted.model if told is MODEL else noted.tokenizer
    found = model_folder.digest(folder / "model")
    if told is TOKENIZER:
        found = outputs.tokenizer_digest(folder / "out")
    assert found != due
    assert found in problem.err
    assert due in problem.err


def test_a_run_does_not_begin_with_adapters_of_a_different_model(folder: Path) -> None:
    """As long as the folder notes the digest of theirs, which peft's own does not."""
    settings, _ = outputs.read_settings(folder / "out")
    lora = replace(settings.lora, start_from=folder / "out")
    settings = replace(settings, lora=lora, output=folder / "next")
    workload = preparation.prepare(settings, folder / "cache").workload()
    preparation.plan_of(settings, workload)
    another_weight(folder)
    with pytest.raises(UsageError, match=r"lora\.start_from=.* trained on a different model from"):
        preparation.plan_of(settings, workload)
    change(folder, "digests", None)
    preparation.plan_of(settings, workload)
    (folder / "out" / "run.json").unlink()
    preparation.plan_of(settings, workload)


def test_classes_of_a_file_of_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of JSON for each row has the probability of each class."""
    path = folder / "two.jsonl"
    path.write_text('{"text": "ls"}\n{"text": "rm -rf /"}\n', "utf-8")
    assert cli.main(["infer", str(folder / "out"), "--prompts", str(path)]) == exit_codes.DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["place"] for line in lines] == [f"{path}:1", f"{path}:2"]
    for line in lines:
        assert set(line["classes"]) == {"safe", "unsafe"}
        assert sum(line["classes"].values()) == pytest.approx(1)


def test_a_long_text_has_the_class_that_eval_gives_it(folder: Path) -> None:
    """With `on_long: truncate` it is cut in both, and the tokenizer's last token stays."""
    from tokenizers.processors import TemplateProcessing

    output = outputs.load(folder / "out", trusts=False)
    data = replace(output.settings.data, on_long="truncate", max_tokens=8)
    output = replace(output, settings=replace(output.settings, data=data))
    end = output.tokenizer.eos_token
    output.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, output.tokenizer.eos_token_id)]
    )
    row = {"text": "sudo rm -rf / " * 9, "label": "safe"}
    path = folder / "one.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    found = samples.load(output.settings, path, output.tokenizer, cache=folder / "cache")
    assert (len(found.tokens), found.tokens[-1]) == (8, output.tokenizer.eos_token_id)
    with torch.no_grad():
        tokens = torch.from_numpy(found.tokens).long()[None]
        safe, unsafe = output.module(input_ids=tokens).logits[0].softmax(-1).tolist()
    (line,) = outputs.answers(output, path, Sampling())
    assert json.loads(line)["classes"] == {"safe": safe, "unsafe": unsafe}


def test_the_run_s_own_model_may_be_moved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What counts is the content, wherever it stands; nothing is said then."""
    (folder / "model").rename(folder / "moved")
    change(folder, "model", str(folder / "moved"))
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.DONE
    told = capsys.readouterr()
    assert "safe" in told.out
    assert "digest" not in told.err


def test_an_output_of_a_release_that_wrote_no_digests_is_used_with_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "digests", None)
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.DONE
    assert "an older release wrote no digests" in capsys.readouterr().err


@pytest.mark.parametrize("noted", [7, {}, {"model": 1, "tokenizer": "a"}, {"model": "a"}])
def test_digests_that_no_run_wrote(
    noted: object, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "digests", noted)
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.INVALID
    assert "run.json: digests=" in capsys.readouterr().err


def test_an_export_that_stock_libraries_read_otherwise_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are kept."""
    save = stock.save

    def forget_alpha(module: Any, tensors: Any, tokenizer: Any, folder: Path) -> None:
        save(module, tensors, tokenizer, folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"lora_alpha": 999}))

    monkeypatch.setattr(stock, "save", forget_alpha)
    settings, _ = outputs.read_settings(folder / "out")
    settings = replace(settings, output=folder / "again")
    prepared = preparation.prepare(settings, folder / "cache")
    workload = prepared.workload()
    ones = {spec.name: np.ones(spec.shape, np.float32) for spec in workload.specs}
    with pytest.raises(SystemFailure, match="stock libraries read there is not the model of this"):
        outputs.write(prepared, workload, ones, model_digest="")
    assert (folder / "again" / "adapter_model.safetensors").is_file()
