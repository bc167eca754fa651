"""A coordinator and stages as processes of their own, on loopback: the bits of one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.check import cli as checking
from entrenar_py.train.service import exit_codes
from tests import command_line
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster

TEXT: dict[str, Any] = {
    "task": "text",
    "classes": {},
    "data": {"train": "rows.jsonl", "max_tokens": 64},
    "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.1},
}


def configured(folder: Path, small: Path, model: Path, **changes: Any) -> Path:
    """Write a configuration that trains `model` on texts; return its path."""
    path = runs.configured(folder, small, **changes)
    record = {**json.loads(path.read_text("utf-8")), "model": str(model), **TEXT}
    record["lora"] = {**TEXT["lora"], **changes.get("lora", {})}
    del record["classes"]
    path.write_text(json.dumps(record), "utf-8")
    return path


def judged(ledger: Path, contract: str) -> dict[str, str]:
    """Return the verdict of each clause of `contract` on a stored run."""
    report = ledger.with_name("judged.json")
    checking.main(["--contract", contract, "--judge", str(ledger), "--json", str(report)])
    return command_line.verdicts(report)


@pytest.mark.parametrize(
    ("name", "num_stages", "more"),
    [
        ("llama", 4, {}),
        ("small", 2, {"method": "qlora"}),
        # A head that is the table of tokens, whose weights no coordinator has.
        ("small", 2, {"lora": {"targets": ["q_proj", "lm_head"]}}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_stages_train_what_one_process_does(
    machines: Cluster,
    small: Path,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    num_stages: int,
    more: dict[str, Any],
) -> None:
    """Its ledger has the same weights, and raises no alarm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    section = {"listen": machines.address, "secret_file": "secret"}
    staged = {"workers": num_stages, "strategy": "layer_pipeline", "coordinator": section}
    model = llama if name == "llama" else small / "model"
    configured(tmp_path, small, model, **staged, **more)
    serving = machines.coordinator(cache=tmp_path / "own")
    stages = [machines.worker(cache=tmp_path / "theirs") for _ in range(num_stages)]
    codes = [one.code() for one in (*stages, serving)]
    assert codes == [exit_codes.DONE] * (num_stages + 1), serving.text + stages[0].text
    configured(tmp_path, small, model, output="alone", workers=1, **more)
    assert cli.main(["finetune", str(tmp_path / "run.yaml")]) == exit_codes.DONE
    assert runs.adapters(tmp_path / "out") == runs.adapters(tmp_path / "alone")
    ledgers = [tmp_path / folder / "ledger.jsonl" for folder in ("out", "alone")]
    told = []
    for ledger in ledgers:
        capsys.readouterr()
        assert cli.main(["ledger", "verify", str(ledger)]) == exit_codes.DONE
        told.append(re.findall(r"weights (\w+) after step (\d+)", capsys.readouterr().out))
    assert told[0] == told[1] != []
    for contract in ("distributed-training-v1.yaml", "training-integrity-v1.yaml"):
        by_stages, alone = (judged(one, contract) for one in ledgers)
        assert "falsified" not in by_stages.values()
        assert {one for one in alone if alone[one] == "held"} <= {
            one for one in by_stages if by_stages[one] == "held"
        }
