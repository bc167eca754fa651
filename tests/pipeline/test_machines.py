"""A coordinator and stages as processes of their own, on loopback: the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrenar_py.service import cli, exit_codes
from tests.finetune import runs
from tests.service.cluster import Cluster

TEXT: dict[str, Any] = {
    "task": "text",
    "classes": {},
    "data": {"train": "rows.jsonl", "max_tokens": 64},
    "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.1},
}


def configured(folder: Path, small: Path, model: Path, **changes: Any) -> Path:
    path = runs.configured(folder, small, **changes)
    import json

    record = json.loads(path.read_text("utf-8"))
    record |= {"model": str(model), **TEXT}
    del record["classes"]
    path.write_text(json.dumps(record), "utf-8")
    return path


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_train_what_one_process_does(
    machines: Cluster,
    small: Path,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    section = {"listen": machines.address, "secret_file": "secret"}
    configured(
        tmp_path, small, llama, workers=num_stages, strategy="layer_pipeline", coordinator=section
    )
    serving = machines.coordinator(cache=tmp_path / "own")
    stages = [machines.worker(cache=tmp_path / "theirs") for _ in range(num_stages)]
    codes = [one.code() for one in (*stages, serving)]
    assert codes == [exit_codes.DONE] * (num_stages + 1), serving.text + stages[0].text
    by_stages = runs.adapters(tmp_path / "out")
    configured(tmp_path, small, llama, output="alone", workers=1)
    assert cli.main(["finetune", str(tmp_path / "run.yaml")]) == exit_codes.DONE
    assert by_stages == runs.adapters(tmp_path / "alone")
