"""A configuration of an earlier framework is converted whole, or refused with one line for each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.plan import old_configuration
from entrenar_py.train.service import exit_codes
from tests.train.plan.qwen3 import TINY

OLD: dict[str, Any] = {
    "version": 1,
    "coordinator": {"host": "10.0.0.1", "port": 7411},
    "workers": [
        {"id": 1, "hostname": "rig", "ip": "10.0.0.2", "port": 9001, "device": "cuda:0"},
        {"id": 7, "hostname": "mac", "port": 9001, "device": "cpu"},
    ],
    "shard_plan": [
        {"id": "local", "start": 0, "end": 1, "is_last": False},
        {"id": 7, "start": 1, "end": 2, "is_last": False},
        {"id": 1, "start": 2, "end": 4, "is_last": True},
    ],
}


def written(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """Write the configuration, after `change`, and return its path."""
    record = copy.deepcopy(OLD)
    change(record)
    path = folder / "hetero_config.json"
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path


def test_every_field_is_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    assert cli.main(["pipeline", "import", str(path), "--data", "r.jsonl"]) == exit_codes.DONE
    told = capsys.readouterr()
    settings = settings_file.of_text(told.out, "run.yaml")
    assert settings.stages == (
        StagePlan(layers=(0, 1), worker=("local",)),
        StagePlan(layers=(1, 2), worker=("worker-7",), backend="cpu"),
        StagePlan(layers=(2, 4), worker=("worker-1",), backend="cuda"),
    )
    assert settings.coordinator is not None
    assert settings.coordinator.listen == "10.0.0.1:7411"
    assert (
        "#   entrenar worker --coordinator 10.0.0.1:7411 --secret-file secret --id worker-1 "
        "--backend cuda:0 --listen-port 9001   (on rig 10.0.0.2)\n"
    ) in told.out
    assert "no --model: its number of blocks is not compared" in told.err


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_blocks_are_counted_in_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    path = written(tmp_path)
    command = ["pipeline", "import", str(path), "--model", str(tmp_path)]
    assert cli.main(command) == exit_codes.DONE
    capsys.readouterr()
    written(tmp_path, lambda old: old["shard_plan"][2].update(end=5))
    assert cli.main(command) == exit_codes.INVALID
    assert capsys.readouterr().err == (
        f"{path}:38:11: error: shard_plan[2]: end=5: the model has 4 blocks; `end` is exclusive, "
        "so use 4\n"
    )


def stage(index: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of a stage."""
    return lambda old: old["shard_plan"][index].update(fields)


def worker(index: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of a worker."""
    return lambda old: old["workers"][index].update(fields)


def top(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of the whole."""
    return lambda old: old.update(fields)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda old: (stage(1, start=2, end=3)(old), stage(2, start=3)(old)),
            "31:13: error: shard_plan[1]: start=2, end=3: no stage has block 1",
        ),
        (stage(1, start=0), "31:13: error: shard_plan[1]: start=0, end=2: block 0 is in a stage"),
        (stage(1, end=1), "31:13: error: shard_plan[1]: start=1, end=1: it has no block; `end` is"),
        (stage(0, start=-1), "25:13: error: shard_plan[0]: start=-1, end=1: blocks are counted"),
        (
            stage(1, is_last=True),
            "39:15: error: shard_plan[2]: is_last: true: shard_plan[1] is the",
        ),
        (stage(2, is_last=False), "22:16: error: hetero_config: shard_plan: no stage has"),
        (
            lambda old: (stage(1, is_last=True)(old), stage(2, is_last=False)(old)),
            "33:15: error: shard_plan[1]: is_last: true: stages come after it; mark shard_plan[2]",
        ),
        (
            worker(0, device="tpu"),
            "13:14: error: workers[0]: device='tpu': unknown; use cuda, wgpu",
        ),
        (
            worker(1, hostname="rig"),
            "18:12: error: workers[1]: port=9001 on rig: workers[0] has it",
        ),
        (
            worker(1, hostname="10.0.0.1", port=7411),
            "18:12: error: workers[1]: port=7411 on 10.0.0.1",
        ),
        (worker(1, id=1), "16:10: error: workers[1]: id=1: workers[0] has it, too"),
        (stage(1, id=3), "30:10: error: shard_plan[1]: id=3: no worker has it; workers are 1, 7"),
        (stage(1, id="local"), "30:10: error: shard_plan[1]: id=local: shard_plan[0] has it, too"),
        (stage(0, id="remote"), "24:10: error: shard_plan[0]: id='remote': use a whole number or"),
        (stage(0, start="0"), "25:13: error: shard_plan[0]: start='0': use a whole number"),
        (stage(0, end=1.0), "26:11: error: shard_plan[0]: end=1.0: use a whole number"),
        (stage(0, is_last=0), "27:15: error: shard_plan[0]: is_last=0: use true or false"),
        (worker(0, id=True), "9:10: error: workers[0]: id=True: use a whole number"),
        (worker(0, port=0), "12:12: error: workers[0]: port=0: use 1 to 65535"),
        (worker(0, ip=[1]), "11:10: error: workers[0]: ip: use a text"),
        (worker(0, gpus=2), "14:4: error: workers[0]: gpus is not known here; leave it out"),
        (top(version=2), "2:13: error: hetero_config: version='2': unknown; use 1"),
        (top(version=[]), "2:13: error: hetero_config: version: unknown; use 1"),
        (top(coordinator="a:1"), "3:17: error: hetero_config: coordinator is a mapping of host"),
        (top(shard_plan=[]), "22:16: error: hetero_config: shard_plan is empty; give a stage"),
        (top(workers={}), "7:13: error: hetero_config: workers is a list of mappings"),
        (lambda old: old["coordinator"].pop("port"), "3:17: error: coordinator: port is missing"),
        (lambda old: old["coordinator"].pop("host"), "3:17: error: coordinator: ip and host are"),
        (lambda old: old.pop("version"), "1:1: error: hetero_config: version is missing; use 1"),
        (lambda old: old["workers"][1].pop("device"), "15:3: error: workers[1]: device is missing"),
        (
            top(tokenizer="t"),
            "42:2: error: hetero_config: tokenizer is not known here; leave it out",
        ),
    ],
)
def test_each_problem_is_told_once(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    path = written(tmp_path, change)
    with pytest.raises(ContractError) as raised:
        old_configuration.load(path, 4)
    assert len(raised.value.problems) == 1, raised.value.problems
    shown = raised.value.problems[0].removeprefix(f"{path}:")
    assert shown.startswith(told)


def test_no_json_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"version": 1', encoding="utf-8")
    assert cli.main(["pipeline", "import", str(path)]) == exit_codes.INVALID
    assert f"{path}:2:1: error: invalid YAML" in capsys.readouterr().err
