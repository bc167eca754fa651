"""`entrenar plan`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.finetune import staffing
from entrenar_py.train.plan import devices
from entrenar_py.train.plan.devices import Device
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.plan.qwen3 import TINY

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
extras.require("peft", "transformers")
CONFIG = """\
model: .
task: instruct
output: out
data: {{train: rows.jsonl}}
lora: {{targets: [q_proj, v_proj]}}
training: {{batch_size: 4, num_shards: 4}}
{more}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration for a model of which only config.json is there."""
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(more=""), encoding="utf-8")
    return path


def test_a_plan_needs_no_weights_and_no_rows(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = config.parent / "plan.json"
    arguments = ["plan", str(config), "--device", "2 x gpu:8GB:25GB/s", "--json", str(record)]
    assert cli.main(arguments) == exit_codes.DONE
    told = capsys.readouterr().out
    assert "trained  14,336 by lora, 57.3 kB a gradient" in told
    assert "\ncompile  auto: on CUDA, if all steps have 1,000 shards or more\n" in told
    assert "use: ddp\nwhy: With ddp a worker needs" in told
    assert json.loads(record.read_text(encoding="utf-8"))["strategy"] == "ddp"


def test_a_plan_that_does_not_fit_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(config), "--device", "cpu:100MB"]) == exit_codes.INVALID
    assert "use: none\nwhy: Nothing fits: star" in capsys.readouterr().out


def test_devices_of_the_configuration_are_planned_for(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.format(more="devices: [cpu-box:8GB, gpu:9GB]"), encoding="utf-8")
    assert cli.main(["plan", str(config)]) == exit_codes.DONE
    told = capsys.readouterr().out
    assert "device   cpu-box: 8.00 GB\ndevice   gpu: 9.00 GB\n" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "gpu"], "device 'gpu': use name:memory[:bandwidth]"),
        (["--device", "gpu:8GB", "--bandwidth", "1"], "bandwidth '1': use a number with its unit"),
        (["--device", "gpu:8GB", "--json", "no/such/plan.json"], "does not exist; create it first"),
    ],
)
def test_wrong_arguments(
    config: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(config), *arguments]) == exit_codes.INVALID
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "memory", "workers"), [("", 10**10, 4), ("devices: [cpu:8GB]", 0, 1)]
)
def test_a_plan_for_the_cpu_counts_the_workers_that_a_run_starts(
    more: str, memory: int | None, workers: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker computes on one thread, so a run has one for each core and shard."""
    monkeypatch.setattr(staffing, "num_cores", lambda: 6)
    found = [Device(name="cpu", kind="cpu", memory=memory)]
    monkeypatch.setattr(devices, "found", lambda: found)
    monkeypatch.setattr(devices, "of_backend", lambda _: found[0])
    config.write_text(CONFIG.format(more=more), encoding="utf-8")
    record = config.parent / "plan.json"
    assert cli.main(["plan", str(config), "--json", str(record)]) == exit_codes.DONE
    assert json.loads(record.read_text(encoding="utf-8"))["workers"] == workers
