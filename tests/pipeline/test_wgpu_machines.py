"""Stages on wgpu as processes of their own: but for rounding, the adapters of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from entrenar_py.backends import open_backend
from entrenar_py.errors import BackendUnavailable
from entrenar_py.finetune import settings_file
from entrenar_py.service import cli, exit_codes
from entrenar_py.tuning import model
from tests.finetune import runs
from tests.service.cluster import Cluster

pytestmark = [
    pytest.mark.wgpu,
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

# Of the distance that the adapters move in training. A gradient is off by some 1e-6 of its norm
# (docs/numerics.md), but AdamW takes steps of the learning rate's size where it is rounding noise,
# too. 1e-5 was seen.
APART = 1e-3
LOSS = 2e-5  # relative, of the first steps: n u (docs/numerics.md, "Training")


@pytest.fixture(autouse=True)
def needs_an_adapter() -> None:
    """Skip without an adapter."""
    try:
        open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


def configured(folder: Path, small: Path, **changes: Any) -> Path:
    """Write a configuration of three steps, with shards of one row; the last one has none.

    Rows have 9 to 15 tokens and an end, so that one shape is compiled.
    """
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(small / "model")

    def num_tokens(line: str) -> int:
        return len(tokenizer(json.loads(line)["text"]).input_ids)

    path = runs.configured(folder, small)
    lines = (folder / "rows.jsonl").read_text("utf-8").splitlines()
    lines = [one for one in lines if 8 < num_tokens(one) < 16]
    (folder / "rows.jsonl").write_text("\n".join(lines[:11]) + "\n", "utf-8")
    assert len(lines) >= 11
    record = json.loads(path.read_text("utf-8"))
    del record["classes"]
    record |= {
        "task": "text",
        "data": {"train": "rows.jsonl", "max_tokens": 24},
        "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.1},
        "training": {**record["training"], "batch_size": 4},
        **changes,
    }
    path.write_text(json.dumps(record), "utf-8")
    return path


def by_stages(machines: Cluster, small: Path, folder: Path, names: Sequence[str]) -> list[float]:
    """Train with a stage on each backend of `names`, as processes; return the losses of steps."""
    blocks = ([0, 1], [1, 2])
    stages = [
        {"layers": layers, "worker": f"worker{number}", "backend": name}
        for number, (layers, name) in enumerate(zip(blocks, names, strict=True))
    ]
    section = {"listen": machines.address, "secret_file": "secret"}
    configured(folder, small, strategy="layer_pipeline", stages=stages, coordinator=section)
    serving = machines.coordinator(cache=folder / "own")
    workers = [
        machines.worker("--backend", name, "--id", f"worker{number}", cache=folder / "theirs")
        for number, name in enumerate(names)
    ]
    codes = [one.code() for one in (*workers, serving)]
    told = "\n".join(one.text for one in (serving, *workers))
    assert codes == [exit_codes.DONE] * 3, told
    return [one["loss"] for one in runs.told(folder / "out", "step")]


@pytest.mark.parametrize(("names", "alone"), [(("cpu", "wgpu"), "cpu"), (("wgpu", "wgpu"), "wgpu")])
def test_stages_train_the_adapters_of_one_process(
    machines: Cluster,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str],
    alone: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    losses = by_stages(machines, small, tmp_path, names)
    config = configured(tmp_path, small, output="alone", workers=1)
    assert cli.main(["finetune", str(config), "--backend", alone]) == exit_codes.DONE
    right = [one["loss"] for one in runs.told(tmp_path / "alone", "step")]
    assert len(losses) == 3
    assert losses == pytest.approx(right, rel=LOSS)
    start = model.load(settings_file.load(config), 0).state_dict()
    moved = apart = 0.0
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "alone")
    )
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        before = start[name.replace(".weight", ".default.weight")].numpy()
        moved += float(np.square(one - before).sum())
        apart += float(np.square(one - ours[name]).sum())
    assert moved > 0
    assert apart <= APART**2 * moved
