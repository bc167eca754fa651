"""A run is looked at before it begins: rules at their places, and memory that must suffice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.finetune import foresight, outputs, settings_file
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.finetune import runs

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
EXAMPLE = Path(__file__).parents[3] / "examples" / "finetune" / "small.yaml"
CONFIG = """\
model: {small}/model
task: classify
output: out
workers: 2
data: {{train: {small}/train.jsonl, max_tokens: 64}}
classes:
  labels: [safe, unsafe]
lora: {{rank: 64, alpha: 2}}
training:
  epochs: 2
  learning_rate: 5e-2
  weight_decay: {decay}
{more}
"""


@pytest.fixture
def config(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a place for a configuration; rows are tokenised into a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "run.yaml"


def test_a_plan_tells_rules_at_their_places_and_takes_the_longest_row(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.format(small=small, decay=0.5, more=""), encoding="utf-8")
    record = config.parent / "plan.json"
    arguments = ["plan", str(config), "--device", "cpu:16GB", "--json", str(record)]
    assert cli.main(arguments) == exit_codes.DONE
    printed = capsys.readouterr()
    assert "tokens (the longest row)" in printed.out
    assert json.loads(record.read_text(encoding="utf-8"))["micro_batch"]["tokens"] < 64
    told = [
        line.removeprefix(f"{config}:").partition(" warning: ") for line in printed.err.splitlines()
    ]
    assert [(place, message.partition("=")[0]) for place, _, message in told] == [
        ("7:3:", "weights"),
        ("8:25:", "alpha"),
        ("11:18:", "learning_rate"),
        ("12:17:", "weight_decay"),
    ]
    assert told[0][2].endswith("[C-HP-008]")


def test_the_example_breaks_no_rule(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("../../small", str(small))
    config.write_text(text.replace("../../out", "out"), encoding="utf-8")
    foresight.remark(config, preparation.prepare(settings_file.load(config)))
    assert capsys.readouterr().err == ""


def test_what_can_train_nothing_is_an_error(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.format(small=small, decay=20, more=""), encoding="utf-8")
    # A plan for this machine would first open its devices.
    for command in (["plan", "--device", "cpu:16GB"], ["finetune"]):
        assert cli.main([*command, str(config)]) == exit_codes.INVALID
        told = capsys.readouterr().err
        assert (
            f"{config}:12:17: error: weight_decay=20 with learning_rate=0.05: a step would" in told
        )
    assert not (config.parent / "out").exists()


def test_a_run_that_does_not_fit_is_refused_before_it_begins(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers and a coordinator, each with an interpreter of its own, in 1.2 GB."""
    text = CONFIG.format(small=small, decay=0, more="devices: [cpu:1.2GB]")
    config.write_text(text, encoding="utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.INVALID
    told = capsys.readouterr().err
    assert "entrenar: F-HET-002: 2 workers need " in told
    assert " and the coordinator " in told
    assert ", but cpu has 1.20 GB; what would fit, with a worker's peak: workers: 1 (" in told
    assert not (config.parent / "out").exists()


def test_only_so_many_workers_are_started_as_fit(small: Path, config: Path) -> None:
    """Without a number in the configuration, memory bounds them as cores do."""
    for memory, number in (("16GB", 4), ("1.9GB", 3), ("300MB", 1)):
        text = CONFIG.format(small=small, decay=0, more=f"devices: [cpu:{memory}]")
        config.write_text(text.replace("workers: 2\n", ""), encoding="utf-8")
        run = preparation.prepare(settings_file.load(config))
        assert foresight.workers_that_fit(run, 4) == number, memory


def test_devices_must_be_of_the_backends_kinds(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.format(small=small, decay=0, more="devices: [rtx4090:24GB]")
    config.write_text(text, encoding="utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.INVALID
    assert "devices: none is described for backend cpu; describe one" in capsys.readouterr().err


def test_a_coordinator_is_told_rules_alone(small: Path, config: Path) -> None:
    """Described devices are workers', on other machines, and need not be of this one's kind."""
    text = CONFIG.format(small=small, decay=0, more="devices: [2 x h100:80GB]")
    config.write_text(text, encoding="utf-8")
    foresight.remark(config, preparation.prepare(settings_file.load(config)))


def test_ranks_share_the_memory_of_their_own_host(small: Path, config: Path) -> None:
    """Two ranks fit on two hosts, and not on one."""
    text = CONFIG.format(small=small, decay=0, more="devices: [cpu:700MB]\nstrategy: ddp")
    config.write_text(text.replace("workers: 2\n", ""), encoding="utf-8")
    run = preparation.prepare(settings_file.load(config))
    foresight.look_as_ranks(config, run, names=["cpu"], num_ranks=2, num_hosts=2)
    with pytest.raises(UsageError, match="F-HET-002: 2 workers need"):
        foresight.look_as_ranks(config, run, names=["cpu"], num_ranks=2, num_hosts=1)


def test_each_rank_has_its_own_gpu(small: Path, config: Path) -> None:
    """The one with too little left is named."""
    text = CONFIG.format(small=small, decay=0, more="strategy: ddp").replace("workers: 2\n", "")
    config.write_text(text, encoding="utf-8")
    run = preparation.prepare(settings_file.load(config))
    names, free = ["cuda:0", "cuda:1"], [10**10, 10**7]
    with pytest.raises(UsageError, match=r"F-HET-002: a worker needs .*, but cuda:1 has 10"):
        foresight.look_as_ranks(config, run, names=names, num_ranks=2, num_hosts=1, free=free)
    foresight.look_as_ranks(config, run, names=names, num_ranks=2, num_hosts=1, free=[10**10] * 2)


def test_rows_that_cannot_be_read_are_said_to_be_so(
    small: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.format(small=small, decay=0, more="").replace("train.jsonl", "none.jsonl")
    config.write_text(text, encoding="utf-8")
    assert cli.main(["plan", str(config), "--device", "cpu:16GB"]) == exit_codes.DONE
    told = capsys.readouterr()
    assert "rows are not checked, but assumed to be data.max_tokens long: data " in told.err
    assert "4 x 64 tokens (data.max_tokens)" in told.out


extras.require("peft", "transformers")
NUM_BAD = 30


def prepared(small: Path, folder: Path, *, num_bad: int) -> Prepared:
    """Return a run whose file ends with rows of no class."""
    path = runs.configured(folder, small, data={"on_error": "skip"})
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"text": "ls", "label": "fine"}\n' * num_bad)
    return preparation.prepare(settings_file.load(path), folder / "cache")


def test_skipped_rows_are_told_and_listed(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each once, though both parts of the file know of it; the file has all of them."""
    found = prepared(small, tmp_path, num_bad=NUM_BAD)
    foresight.say_rows(found)
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "train: 36 samples",
        "validation: 12 samples",
        "skipped: 30 rows (data.on_error: skip)",
    ]
    assert told[3] == f"  {tmp_path}/rows.jsonl:49: label='fine': classes.labels has safe, unsafe"
    assert told[-1] == "  and 10 more"
    listed = outputs.make_folder(found) / foresight.SKIPPED
    lines = listed.read_text(encoding="utf-8").splitlines()
    places = [line.partition(": ")[0] for line in lines]
    assert places == [f"{tmp_path}/rows.jsonl:{49 + index}" for index in range(NUM_BAD)]


def test_cut_rows_are_counted_once_for_each_file(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of one file both know of all its cut rows; a file for validation has its own."""
    cutting = {"on_long": "truncate"}
    path = runs.configured(tmp_path, small, data=cutting)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write(json.dumps({"text": "ls " * 90, "label": "safe"}) + "\n")
    foresight.say_rows(preparation.prepare(settings_file.load(path), tmp_path / "cache"))
    assert capsys.readouterr().out.splitlines() == [
        *("train: 37 samples", "validation: 12 samples"),
        "cut: 1 row (data.on_long: truncate)",
    ]
    own = cutting | {"validation": "rows.jsonl", "validation_share": 0.0}
    record = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**record, "data": {**record["data"], **own}}), "utf-8")
    foresight.say_rows(preparation.prepare(settings_file.load(path), tmp_path / "cache"))
    assert "cut: 2 rows (data.on_long: truncate)" in capsys.readouterr().out.splitlines()


def test_answers_that_do_not_follow_the_generation_prompt_are_counted_once(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both parts of a file know of all of its rows."""
    copy = tmp_path / "model"
    shutil.copytree(small / "model", copy)
    template = copy / "chat_template.jinja"
    path = runs.configured(tmp_path, small, task="instruct", model=str(copy))
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    rows = [json.dumps({"question": json.loads(line)["text"], "answer": "ls"}) for line in lines]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    for opening, number in (("", 0), ("<think>", 1)):
        text = template.read_text("utf-8")
        template.write_text(text.replace("assistant\n", f"assistant\n{opening}"), "utf-8")
        found = preparation.prepare(settings_file.load(path), tmp_path / "cache")
        foresight.say_rows(found)
        told = capsys.readouterr()
        assert told.out.startswith("train: 36 samples\nvalidation: 12 samples")
        assert told.err.count("in 48 rows, the chat template doesn't write before") == number


def test_a_list_of_an_earlier_run_goes(small: Path, tmp_path: Path) -> None:
    found = prepared(small, tmp_path, num_bad=0)
    listed = found.settings.output / foresight.SKIPPED
    listed.parent.mkdir()
    listed.write_text("rows.jsonl:1: bad", encoding="utf-8")
    outputs.make_folder(found)
    assert not listed.exists()
