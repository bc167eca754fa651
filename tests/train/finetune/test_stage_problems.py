"""What is wrong with the stages of a layer pipeline is told at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.train.finetune import serving
from entrenar_py.train.finetune.strategies import launch
from entrenar_py.train.model import model
from entrenar_py.train.service import exit_codes
from tests.train.finetune.test_settings_file import load, problems
from tests.train.plan.qwen3 import TINY, settings

SMALL = """\
model: model
task: text
output: out
data: {train: rows.jsonl}
strategy: layer_pipeline
"""


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            "{layers: [0, 2]}\n- {layers: [3, 4]}",
            "8:12: error: stages[1] layers=[3, 4]: no stage has block 2; let it begin at 2",
        ),
        (
            "{layers: [2, 4]}",
            "7:12: error: stages[0] layers=[2, 4]: no stage has blocks 0 to 1; let it begin at 0",
        ),
        (
            "{layers: [0, 2]}\n- {layers: [1, 4]}",
            "8:12: error: stages[1] layers=[1, 4]: block 1 is in stages[0] or before, too; let it "
            "begin at 2",
        ),
        (
            "{layers: [0, 3]}\n- {layers: [1, 4]}",
            "8:12: error: stages[1] layers=[1, 4]: blocks 1 to 2 are in stages[0] or before, too; "
            "let it begin at 3",
        ),
        (
            "{layers: [2, 4]}\n- {layers: [0, 2]}",
            "7:12: error: stages[0] layers=[2, 4]: stages stand in the order of their blocks; put "
            "the one with layers: [0, 2] here",
        ),
        (
            "{layers: [0, 0]}\n- {layers: [0, 2]}",
            "7:12: error: stages[0] layers=[0, 0]: it has no block; use [first, last + 1]",
        ),
        (
            "{layers: [-1, 2]}",
            "7:12: error: stages[0] layers=[-1, 2]: blocks are counted from 0",
        ),
        (
            "{layers: [0, 1], worker: a}\n- {layers: [1, 2], worker: [b, a]}",
            "8:28: error: stages[1] worker=a: stages[0] has it, too; a worker has one stage",
        ),
        (
            "{layers: [0, 1], worker: [a, a]}",
            "7:28: error: stages[0] worker=a: it is there twice; a worker has one stage",
        ),
        (
            "{layers: [0, 1], worker: [a, b, c, d, e]}",
            "7:28: error: stages[0] has 5 workers, and training.num_shards=4: one would have no "
            "shard; use num_shards >= 5, or fewer workers",
        ),
        (
            "{layers: [0, 1], backend: tpu}",
            "7:29: error: stages[0]: backend='tpu': use cpu or cuda or wgpu",
        ),
        (
            "{layers: [0, 1, 2]}",
            "7:12: error: stages[0]: layers=[0, 1, 2]: use a list of two whole numbers",
        ),
        (
            "{layer: [0, 1]}",
            "7:3: error: stages[0]: layers is missing: its first block, and the one after its last",
        ),
    ],
)
def test_stages(tmp_path: Path, stages: str, told: str) -> None:
    found = problems(tmp_path, f"{SMALL}stages:\n- {stages}\n")
    assert f"run.yaml:{told}" in found
    assert len(found) == (2 if "layer:" in stages else 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SMALL + "stages: [{layers: [0, 1]}]\nworkers: 2\n",
            "7:10: error: workers=2 with stages: each stage names its own; leave it out",
        ),
        (
            SMALL.replace("rows.jsonl", "rows.jsonl, packing: true"),
            "4:36: error: strategy: layer_pipeline does not read data.packing; leave it out",
        ),
        (
            SMALL.replace("rows.jsonl", "rows.jsonl, validation: v.jsonl"),
            "4:39: error: strategy: layer_pipeline does not read rows to evaluate on; leave it out",
        ),
        (
            SMALL.replace("rows.jsonl", "rows.jsonl, validation_share: 0.1"),
            "4:45: error: strategy: layer_pipeline does not read rows to evaluate on; leave it out",
        ),
        (
            SMALL + "trust_remote_code: true\n",
            "6:20: error: strategy: layer_pipeline does not read trust_remote_code; leave it out",
        ),
        (
            SMALL + "compile: false\n",
            "6:10: error: strategy: layer_pipeline does not read compile: a stage runs its blocks "
            "as they are; leave it out",
        ),
        (
            SMALL + "coordinator: {secret_file: s, wait_for: 1}\n",
            "6:41: error: strategy: layer_pipeline does not read wait_for: a step needs all "
            "stages; leave it out",
        ),
        (
            SMALL.replace("layer_pipeline", "ddp") + "stages: [{layers: [0, 1]}]\n",
            "6:9: error: stages: they are for strategy: layer_pipeline; leave them out",
        ),
    ],
)
def test_keys_beside_stages(tmp_path: Path, text: str, told: str) -> None:
    assert problems(tmp_path, text) == [f"run.yaml:{told}"]


def test_problems_of_several_stages_are_told_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        f"{SMALL}stages:\n- {{layers: [1, 2], worker: a}}\n- {{layers: [3, 4], worker: a}}\n",
    )
    assert [line.partition(" error")[0] for line in found] == [
        "run.yaml:7:12:",
        "run.yaml:8:12:",
        "run.yaml:8:28:",
    ]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            "{layers: [0, 3]}",
            "7:12: error: stages[0] layers=[0, 3]: the model has 4 blocks, 0 to 3; use layers: "
            "[0, 4]",
        ),
        (
            "{layers: [0, 5]}\n- {layers: [5, 6]}",
            "7:12: error: stages[0] layers=[0, 5]: the model has 4 blocks, 0 to 3; use layers: "
            "[0, 4], and leave out what comes after it",
        ),
        (
            "{layers: [0, 4]}\n- {layers: [4, 6]}",
            "8:12: error: stages[1] layers=[4, 6]: the model has 4 blocks, 0 to 3; leave it out",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_stages_that_do_not_fit_the_model(tmp_path: Path, stages: str, told: str) -> None:
    pytest.importorskip("peft")
    module = model.shape(settings(tmp_path, TINY))
    path = tmp_path / "run.yaml"
    with pytest.raises(ContractError) as raised:
        serving.cut_of(path, load(tmp_path, f"{SMALL}stages:\n- {stages}\n"), module)
    assert raised.value.problems == [f"{path}:{told}"]


@pytest.mark.parametrize("command", ["plan", "finetune"])
def test_commands_that_run_no_pipeline(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path, SMALL)
    path = tmp_path / "run.yaml"
    assert cli.main([command, str(path)]) == exit_codes.INVALID
    assert (
        f"{path}: entrenar {command} does not run strategy: layer_pipeline; `entrenar pipeline "
        f"plan {path}` shows its stages, `entrenar coordinator {path}` trains"
    ) in capsys.readouterr().err


def test_ranks_of_torchrun_run_no_pipeline(tmp_path: Path) -> None:
    load(tmp_path, SMALL)
    with pytest.raises(UsageError, match="torchrun does not run strategy: layer_pipeline; `entr"):
        launch.settings_of(tmp_path / "run.yaml")
