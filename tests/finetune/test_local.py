"""A run on this machine: real processes, adapters of the same bits, loaded by stock peft."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from entrenar_py.service import cli, exit_codes

CONFIG = """\
model: {small}/model
task: classify
output: out{workers}
workers: {workers}
data: {{train: rows.jsonl, max_tokens: 64, validation_share: 0.25}}
classes: {{labels: [safe, unsafe], weights: sqrt_inverse}}
lora: {{rank: 2, alpha: 4, targets: [q_proj, v_proj], dropout: {dropout}}}
training: {{batch_size: 8, num_shards: 4, learning_rate: 1e-3, epochs: 1}}
"""


def trained(folder: Path, small: Path, *, workers: int, dropout: float) -> Path:
    """Train on a few rows in `folder` and return the output folder."""
    lines = (small / "train.jsonl").read_text(encoding="utf-8").splitlines()
    lines = sorted(lines, key=lambda line: "unsafe" not in line)[:6] + lines[:42]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(small=small, workers=workers, dropout=dropout), "utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    return folder / f"out{workers}"


def digest(output: Path) -> str:
    return hashlib.sha256((output / "adapter_model.safetensors").read_bytes()).hexdigest()


# peft asks for what a later transformers will lack.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_one_worker_and_three_write_the_same_adapters(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = trained(tmp_path, small, workers=1, dropout=0.1)
    three = trained(tmp_path, small, workers=3, dropout=0.1)
    assert digest(one) == digest(three)
    lines = (one / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum("loss" in json.loads(line) for line in lines) == 5  # 36 rows in batches of 8
    assert "validation: loss" in capsys.readouterr().out

    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(small / "model")
    loaded = peft.PeftModel.from_pretrained(base, str(three)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(three)
    shares = loaded(**tokenizer("rm -rf /", return_tensors="pt")).logits[0].softmax(-1).tolist()

    assert cli.main(["infer", str(three), "--prompt", "rm -rf /"]) == exit_codes.DONE
    told = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert [float(told[label]) for label in ("safe", "unsafe")] == pytest.approx(shares, abs=1e-4)

    assert cli.main(["merge", str(three), str(tmp_path / "merged")]) == exit_codes.DONE
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    merged_shares = merged(**tokenizer("rm -rf /", return_tensors="pt")).logits[0].softmax(-1)
    assert merged_shares.tolist() == pytest.approx(shares, abs=1e-5)

    assert cli.main(["eval", str(three), "--data", str(small / "test.jsonl")]) == exit_codes.DONE
    assert "of 400 right" in capsys.readouterr().out
