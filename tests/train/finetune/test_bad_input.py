"""Whatever is wrong with checkpoint, rows or disk is told once and clearly, and nothing is lost."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.finetune import cli as finetune_cli
from entrenar_py.train.finetune import outputs
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

UP = "model.layers.1.mlp.up_proj.weight"
ROW = {"text": "ls", "label": "safe"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenised rows out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


# --- the checkpoint -------------------------------------------------------------------------------


def none(model: Path) -> None:
    shutil.rmtree(model)


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def a_shard_less(model: Path) -> None:
    """Store the weights in several files, and lose one."""
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoModelForCausalLM.from_pretrained(model)
    no_weights(model)
    found.save_pretrained(model, max_shard_size="200KB")
    next(model.glob("model-00002-of-*")).unlink()


def half_a_file(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


def quantised_weights(model: Path) -> None:
    """Store a weight as codes, which config.json doesn't say."""
    torch = pytest.importorskip("torch")
    change(model, UP, lambda weight: weight.to(torch.float8_e4m3fn))


def another_shape(model: Path) -> None:
    change(model, UP, lambda weight: weight[:100].clone())


def change(model: Path, name: str, changed: Callable[[Any], Any]) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    tensors = torch_files.load_file(model / "model.safetensors")
    tensors[name] = changed(tensors[name])
    torch_files.save_file(tensors, model / "model.safetensors", {"format": "pt"})


def adapters_beside(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}", encoding="utf-8")


def no_record(model: Path) -> None:
    (model / "config.json").write_text("[]", encoding="utf-8")


def no_words(model: Path) -> None:
    """Lose the tokenizer's files: transformers then makes one of special tokens."""
    for path in model.glob("tokenizer*"):
        path.unlink()


def a_weight_less(model: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    tensors = torch_files.load_file(model / "model.safetensors")
    del tensors[UP]
    torch_files.save_file(tensors, model / "model.safetensors", {"format": "pt"})


def fewer_embeddings(model: Path) -> None:
    """Keep the tokenizer of 512 tokens with a model that knows 300."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model)
    config.vocab_size = 300
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)


def few_positions(model: Path) -> None:
    record = json.loads((model / "config.json").read_text(encoding="utf-8"))
    record["max_position_embeddings"] = 48
    (model / "config.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (none, "no such folder; give one with a checkpoint in Hugging Face's format"),
        (no_weights, "only safetensors are read, so convert weights in another format"),
        (
            a_shard_less,
            "model-00002-of-00003.safetensors is missing, of the 3 files that "
            "model.safetensors.index.json names; copy the whole checkpoint",
        ),
        (
            half_a_file,
            "model.safetensors is not a complete safetensors file (Error while deseriali",
        ),
        (quantised_weights, f"model.safetensors has {UP} in F8_E4M3, so its weights are quantised"),
        (another_shape, f"{UP} has the shape [100, 64] in its files, but [192, 64] by config.json"),
        (
            adapters_beside,
            "it has adapters (adapter_config.json), and only whole models are",
        ),
        (
            no_record,
            "config.json can't be read (it is not a JSON object); copy the checkpoint",
        ),
        (no_words, "its tokenizer has no vocabulary, since its file"),
        (
            a_weight_less,
            "its files lack 1 of the model's weights, model.layers.1.mlp.up_proj.weight is missing",
        ),
        (fewer_embeddings, "but the model has embeddings of tokens 0 to 299; use the tokenizer"),
        (
            few_positions,
            "the model takes rows of 48 tokens at most "
            "(max_position_embeddings in config.json); use max_tokens <= 48",
        ),
    ],
)
def test_a_checkpoint_that_can_not_be_trained(
    damage: Callable[[Path], None],
    told: str,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small / "model", model)
    damage(model)
    assert told in refusal(runs.configured(tmp_path, small, model=str(model)), capsys)


def test_a_tokenizer_without_a_chat_template(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small / "model", model)
    (model / "chat_template.jinja").unlink()
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    config = tmp_path / "run.yaml"
    settings = {
        "model": "model",
        "task": "instruct",
        "output": "out",
        "data": {"train": "rows.jsonl"},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    assert "its tokenizer has no chat template, which task: instruct needs" in refusal(
        config, capsys
    )


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "data", "told"),
    [
        ("", {}, "has no row that can be used; give one that has rows"),
        ("\n \n", {}, "has no row that can be used"),
        (json.dumps({"text": "ls", "label": "fine"}), {}, "rows.jsonl:1: label='fine'"),
        (json.dumps({**ROW, "text": "ls " * 70}), {}, "tokens; data.max_tokens allows 64"),
        (json.dumps(ROW), {"validation_share": 0.1}, "leaves 1 of 1 rows to train on and 0"),
    ],
)
def test_rows_that_can_not_be_used(
    rows: str,
    data: dict[str, Any],
    told: str,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = runs.configured(tmp_path, small, data=data)
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    assert told in refusal(config, capsys)


def test_each_row_that_can_not_be_used_has_its_line(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of fields that have line ends don't look like other rows."""
    config = runs.configured(tmp_path, small)
    rows = [{**ROW, "label": "  fine"}, ROW, {"a\n\x1b[1mrows.jsonl:9": 1}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    told = refusal(config, capsys).splitlines()
    assert [line.partition(" ")[0] for line in told] == ["entrenar:", "", ""]
    assert "2 of 3 rows can't be used" in told[0]
    assert told[1].endswith("rows.jsonl:1: label='  fine': classes.labels has safe, unsafe")
    assert r"rows.jsonl:3: has no field 'text'; it has a\n\x1b[1mrows.jsonl:9; " in told[2]


def refusal(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which `entrenar finetune` refuses a configuration before it runs."""
    assert cli.main(["finetune", str(config)]) == exit_codes.INVALID
    told = capsys.readouterr().err
    assert told.count("entrenar: ") == 1
    assert not (config.parent / "out" / "metrics.jsonl").exists()
    return told


def test_a_prompt_that_is_too_long(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has 512 positions."""
    assert cli.main(["finetune", str(runs.configured(tmp_path, small))]) == exit_codes.DONE
    capsys.readouterr()
    output = str(tmp_path / "out")
    assert cli.main(["infer", output, "--prompt", "ls " * 600]) == exit_codes.INVALID
    assert "tokens: the model takes 512 tokens in all; use fewer" in capsys.readouterr().err


def test_a_prompt_that_is_no_text(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of a command line that are no UTF-8 come as halves of surrogate pairs."""
    assert cli.main(["finetune", str(runs.configured(tmp_path, small))]) == exit_codes.DONE
    capsys.readouterr()
    output = str(tmp_path / "out")
    assert cli.main(["infer", output, "--prompt", "a\udcff"]) == exit_codes.INVALID
    assert "--prompt is not UTF-8" in capsys.readouterr().err


# --- the output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["finetune", "coordinator", "torchrun"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model", "this is the model's folder, and the model's files would be replaced"),
        ("link", "this is the model's folder, and the model's files would be replaced"),
        ("other", "it has a checkpoint that no run of `entrenar` wrote; give another folder"),
    ],
)
def test_a_checkpoint_of_others_is_not_written_over(
    name: str,
    told: str,
    command: str,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in ("model", "other"):
        shutil.copytree(small / "model", tmp_path / folder)
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "secret").write_text("s" * 32, encoding="utf-8")
    changes: dict[str, Any] = {"model": str(tmp_path / "model"), "output": name}
    if command == "coordinator":
        changes["coordinator"] = {"secret_file": "secret"}
    if command == "torchrun":
        changes["strategy"] = "ddp"
    config = runs.configured(tmp_path, small, **changes)
    before = {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
    if command == "torchrun":
        environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        code = finetune_cli.rank([str(config)], environment, f"file://{tmp_path / 'store'}")
    else:
        code = cli.main([command, str(config)])
    assert code == exit_codes.INVALID
    assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


# --- the disk -------------------------------------------------------------------------------------

LIMIT_BYTES = 2**18  # above the ledger of this run, below its adapters
LARGE = {
    "lora": {"rank": 256, "targets": ["q_proj", "v_proj"]},
    "checkpoint_every": 2,
}


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond LIMIT_BYTES: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_from_the_first_checkpoint_on(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That checkpoint stays whole, nothing is exported, and `--resume` ends on the same bits."""
    for name in ("straight", "full"):
        (tmp_path / name).mkdir()
    straight = runs.configured(tmp_path / "straight", small, **LARGE)
    assert cli.main(["finetune", str(straight)]) == exit_codes.DONE
    config, output = runs.configured(tmp_path / "full", small, **LARGE), tmp_path / "full" / "out"
    over, saved = threading.Event(), output / "state.checkpoint"

    def fill() -> None:
        while not over.wait(0.001):
            if saved.exists():
                resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
                return

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    filler = threading.Thread(target=fill)
    filler.start()
    capsys.readouterr()
    try:
        assert cli.main(["finetune", str(config)]) == exit_codes.FAILED
    finally:
        over.set()
        filler.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr()
    assert (
        f"checkpoint {saved}: can't be written (File too large); the checkpoint of step 2 stays"
        in told.out
    )
    problems = [line for line in told.err.splitlines() if "warning:" not in line]
    assert len(problems) == 1
    assert problems[0].startswith(f"entrenar: output {output}: can't be written (")
    assert checkpoint.load(saved)[1]["step"] == 2
    assert {path.name for path in output.iterdir()} == {
        *("ledger.jsonl", "metrics.jsonl", "state.checkpoint"),
    }
    assert cli.main(["infer", str(output), "--prompt", "ls"]) == exit_codes.INVALID
    assert "no run.json there; give the output folder of a complete run" in capsys.readouterr().err
    assert cli.main(["finetune", str(config), "--resume"]) == exit_codes.DONE
    assert runs.adapters(output) == runs.adapters(tmp_path / "straight" / "out")


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a model of these files, which is marked by config.json."""
    with outputs.replacing(folder, marks=["config.json"], advice="make room") as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)


def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": b"old"})
    large = {"config.json": b"new", "model.safetensors": bytes(2 * LIMIT_BYTES)}
    with full_disk(), pytest.raises(SystemFailure, match=r"\(.*File too large.*\); make room"):
        write(tmp_path, large)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"config.json": b"old"}


def test_a_move_that_is_interrupted_leaves_no_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reader finds an old configuration beside new weights, or old weights beside new ones."""
    write(tmp_path, {"config.json": b"old", "model-00001-of-00001.safetensors": b"old"})

    def dies(path: Path, target: Path) -> None:
        raise OSError("the machine lost power")

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(SystemFailure, match="the machine lost power"):
        write(tmp_path, {"config.json": b"new", "model.safetensors": b"new"})
    assert list(tmp_path.iterdir()) == []
