"""Tiny models: their configurations, the reference trainer's run, and what stock peft infers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from entrenar_py.shared import trace
from entrenar_py.shared.trace import ledger
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator.replicas import Replicas
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import preparation

NUM_VALIDATED = 70  # three batches: one of two ranks has one more
VALIDATION = "validation.jsonl"
LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj", "o_proj", "down_proj"]}


def llama(small: Path, folder: Path) -> Path:
    """Write a Llama with untied embeddings, biases and four blocks to `folder`, and return it."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / name, folder / name)
    return folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration in `folder`, but for its strategy."""

    folder: Path
    model: Path
    small: Path
    num_rows: int = 12  # a step of 8 and one of 4
    method: str = "lora"
    task: str = "text"
    training: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def write(self, name: str, strategy: str | None) -> Path:
        """Write the configuration whose output is the folder `name`, and return its path."""
        rows = self.folder / "rows.jsonl"
        lines = (self.small / "test.jsonl").read_text("utf-8").splitlines()
        half = self.num_rows // 2
        lines = sorted(lines, key=lambda line: "unsafe" not in line)[:half] + lines[:half]
        shown = (self.small / "test.jsonl").read_text("utf-8").splitlines()[:NUM_VALIDATED]
        if self.task == "preference":
            lines, shown = pairs(lines), pairs(shown)
        rows.write_text("\n".join(lines) + "\n", "utf-8")
        (self.folder / VALIDATION).write_text("\n".join(shown) + "\n", "utf-8")
        record: dict[str, Any] = {
            "model": str(self.model),
            "task": self.task,
            "output": name,
            "method": self.method,
            "data": {"train": "rows.jsonl", "max_tokens": 64, **self.data},
            "training": {
                "batch_size": 8,
                "num_shards": 4,
                "learning_rate": 1e-2,
                "epochs": 2,
                "weight_decay": 0.01,
                **self.training,
            },
            **self.more,
        }
        if self.method != "full":
            record["lora"] = {**LORA, **self.lora}
        if self.task == "classify":
            record["classes"] = {"labels": ["safe", "unsafe"], "weights": "sqrt_inverse"}
        if strategy is not None:
            record["strategy"] = strategy
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(record), "utf-8")
        return path

    def alone(self, *, fill_up: int = 1) -> tuple[list[trace.Update], dict[str, Array]]:
        """Return steps and tensors of the reference trainer, one worker in this process.

        Rows are filled up to a multiple of `fill_up` tokens.
        """
        settings = settings_file.load(self.write("alone", None))
        workload = preparation.prepare(settings).workload()
        workload.fill_up(fill_up)
        scenario = preparation.plan_of(settings, workload)
        trainer = Replicas(scenario, workload=workload)
        worker = trainer.workers[0] = trainer.new_worker(0, trainer.initial())
        for step in range(scenario.num_steps):
            ids = trainer.batch()
            shards = enumerate(sharding.cut(ids, scenario.num_shards))
            leaves = [trainer.compute(worker, step, shard, part) for shard, part in shards]
            trainer.apply(step, reduction.root(leaves, scenario.num_shards))
            trainer.advance(len(ids))
        steps = trainer.recorder.of(trace.Update)
        return steps, {name: array.copy() for name, array in worker.replica.arrays.items()}


def pairs(lines: Sequence[str]) -> list[str]:
    """Return a pair for each row of a text: the text is better than the next row's."""
    texts = [json.loads(line)["text"] for line in lines]
    others = zip(texts, [*texts[1:], texts[0] + " again"], strict=True)
    return [
        json.dumps({"prompt": "do: ", "chosen": chosen, "rejected": f"{rejected} -x"})
        for chosen, rejected in others
    ]


def noted(output: Path, what: str) -> list[dict[str, Any]]:
    """Return the lines of the metrics that are of the kind `what`."""
    lines = (output / "metrics.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["what"] == what]


def steps(output: Path) -> list[trace.Update]:
    """Return the steps in a run's ledger."""
    return ledger.load(output / "ledger.jsonl").of(trace.Update)


def digest(output: Path) -> str:
    """Return the digest of what was trained."""
    name = "adapter_model.safetensors"
    path = output / name if (output / name).exists() else output / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def logits(case: Case, output: Path) -> torch.Tensor:
    """Return logits on a few tokens, of the output as stock peft and transformers load it."""
    import peft
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    options = {}
    if case.task == "classify":
        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 2}
    if case.method == "full":
        module = kind.from_pretrained(output)
    else:
        module = kind.from_pretrained(case.model, **options)
        module.config.pad_token_id = 0
        module = peft.PeftModel.from_pretrained(module, str(output))
    with torch.no_grad():
        found: torch.Tensor = module.eval()(input_ids=torch.tensor([[5, 9, 200, 31, 8]])).logits
    return found
