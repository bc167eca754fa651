"""A run with NF4 weights: the same adapters for any workers, and the losses of stock libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import model
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.finetune import runs

extras.require("bitsandbytes")

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
NUM_STEPS = 12
BFLOAT16 = 2.0**-8  # stock libraries answer so on CPUs that have it
CONFIG = """\
model: {small}/model
task: classify
method: qlora
output: out{workers}
workers: {workers}
data: {{train: rows.jsonl, max_tokens: 64}}
classes: {{labels: [safe, unsafe]}}
lora: {{rank: 4, alpha: 8, targets: [q_proj, v_proj]}}
training:
  {{batch_size: 16, num_shards: 4, learning_rate: 1e-3, epochs: {steps}, schedule: constant,
   warmup_share: 0}}
"""


def trained(folder: Path, small: Path, *, workers: int) -> Path:
    """Train on 16 rows, all of them in each step, and return the output folder."""
    lines = (small / "train.jsonl").read_text(encoding="utf-8").splitlines()
    lines = sorted(lines, key=lambda line: "unsafe" not in line)[:6] + lines[:10]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = folder / "run.yaml"
    text = CONFIG.format(small=small, workers=workers, steps=NUM_STEPS)
    config.write_text(text, encoding="utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    return folder / f"out{workers}"


def stock_base(small: Path) -> Any:
    """Return the checkpoint as stock libraries quantise it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        small / "model",
        dtype=torch.float32,
        quantization_config=config,
        device_map={"": "cpu"},
        num_labels=2,
        pad_token_id=0,
    )


def test_the_same_adapters_and_the_losses_of_the_trainer(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = trained(tmp_path, small, workers=1)
    runs.kill_one(monkeypatch)
    three = trained(tmp_path, small, workers=3)
    assert "worker 1 died (SIGKILL)" in capsys.readouterr().out
    assert runs.adapters(one) == runs.adapters(three)
    losses = [line["loss"] for line in runs.told(one, "step")]
    assert losses == pytest.approx(losses_of_the_trainer(small, one, tmp_path), rel=1e-5)
    assert losses[-1] < losses[0]

    capsys.readouterr()
    assert cli.main(["infer", str(three), "--prompt", "rm -rf /"]) == exit_codes.DONE
    told = dict(line.split() for line in capsys.readouterr().out.splitlines())
    shares = [float(told[label]) for label in ("safe", "unsafe")]
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    stock = peft.PeftModel.from_pretrained(stock_base(small), str(one))
    assert answer(stock, one) == pytest.approx(shares, abs=BFLOAT16)

    assert cli.main(["merge", str(one), str(tmp_path / "merged")]) == exit_codes.DONE
    assert "NF4 weights became float32" in capsys.readouterr().out
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert answer(merged, one) == pytest.approx(shares, abs=1e-4)

    plain = transformers.AutoModelForSequenceClassification.from_pretrained(small / "model")
    loaded = peft.PeftModel.from_pretrained(plain, str(one))
    assert answer(loaded, one) == pytest.approx(shares, abs=0.05)


def answer(module: Any, output: Path) -> list[float]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        logits = module.eval()(**tokenizer("rm -rf /", return_tensors="pt")).logits[0]
    shares: list[float] = logits.softmax(-1).tolist()
    return shares


def losses_of_the_trainer(small: Path, output: Path, folder: Path) -> list[float]:
    """Return the losses of `transformers.Trainer` on the same batches, from the same adapters."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]
    data = [
        {"input_ids": tokenizer(row["text"])["input_ids"], "labels": int(row["label"] == "unsafe")}
        for row in rows
    ]
    start = model.load(settings_file.load(folder / "run.yaml"), model.padding(tokenizer))
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"
    )
    module = peft.get_peft_model(stock_base(small), config)
    own = dict(start.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(own[name])
            elif "original_module" not in name:  # a drawn head, whose copy is what is used
                assert torch.equal(parameter, own[name]), name
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=len(data),
        max_steps=NUM_STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=module,
        args=arguments,
        train_dataset=data,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
