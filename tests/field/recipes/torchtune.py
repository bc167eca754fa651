"""pytorch/torchtune: the recipe `full_finetune_distributed`, fully sharded, with two ranks."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, of_tokens, undeclared
from tests.field.usual import IN_PIECES, STEPS_AT_NAN

_SIZE = "vocab_size: 2000, num_layers: 2, num_heads: 2, num_kv_heads: 2, embed_dim: 16"
_CONFIG = f"""
output_dir: out
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
  path: tests/assets/m.model
  max_seq_len: 64
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  source: json
  data_files: instructions.json
  split: train
model: {{_component_: torchtune.models.llama2.llama2, {_SIZE}, max_seq_len: 64}}
checkpointer:
  _component_: torchtune.training.FullModelTorchTuneCheckpointer
  checkpoint_dir: base
  checkpoint_files: [model.pt]
  output_dir: ${{output_dir}}
  model_type: LLAMA2
resume_from_checkpoint: False
seed: 0
shuffle: True
batch_size: 8
epochs: 3
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
max_steps_per_epoch: null
gradient_accumulation_steps: 1
device: cpu
dtype: fp32
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_level: INFO
"""


def instructions(folder: Path) -> None:
    """Write a configuration, a tiny Llama in torchtune's format, and instructions."""
    import torch

    sys.path.insert(0, str(folder))
    from torchtune.models.llama2 import llama2

    (folder / "tiny.yaml").write_text(_CONFIG, encoding="utf-8")
    (folder / "base").mkdir()
    torch.manual_seed(0)
    size = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 64}
    torch.save(llama2(vocab_size=2000, **size).state_dict(), folder / "base/model.pt")
    drawn = random.Random(0)
    words = ("ask", "answer", "what", "is", "the", "sum", "of", "two", "red", "green")
    rows = [
        {"instruction": " ".join(drawn.choices(words, k=3)), "input": "", "output": " ".join(row)}
        for row in (drawn.choices(words, k=drawn.randint(3, 8)) for _ in range(40))
    ]
    (folder / "instructions.json").write_text(json.dumps(rows), encoding="utf-8")


_RECIPE = "recipes/full_finetune_distributed.py"
# It can't ask a CPU for its memory, and names a device in a barrier.
_ON_CPU = (
    Edit(
        _RECIPE,
        "memory_stats = training.get_memory_stats(device=self._device)",
        instead="memory_stats = {}",
    ),
    Edit(_RECIPE, "training.log_memory_stats(memory_stats)", instead="pass"),
    Edit(
        _RECIPE,
        "torch.distributed.barrier(device_ids=[self._device.index])",
        instead="torch.distributed.barrier()",
    ),
    Edit(_RECIPE, "training.cleanup_before_training()", instead="pass"),
)
_BEGINS_ANEW = undeclared(
    clause="F-TI-003",
    words="with its initial weights",
    because="Several keys of the recipe's configuration say from which checkpoint it continues.",
)
_AUTO = Trial(
    name="auto",
    command=(
        *("torchrun", "--standalone", "--nproc_per_node={world_size}", _RECIPE),
        *("--config", "tiny.yaml", "batch_size={share:8}"),
        "gradient_accumulation_steps={accumulation}",
    ),
    edits=_ON_CPU,
    options=("--steps", "4"),
    expected=(STEPS_AT_NAN, _BEGINS_ANEW),
)

RECIPES = (
    Recipe(
        name="torchtune",
        title="torchtune, full_finetune_distributed",
        repository="pytorch/torchtune",
        commit="bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
        needs=("torchao", "torchdata", "torchvision", "datasets", "omegaconf", "sentencepiece"),
        data=instructions,
        environment={"HF_HUB_OFFLINE": "1", "HF_HOME": "hf", "PYTHONPATH": "."},
        trials=(_AUTO, of_tokens(_AUTO, *IN_PIECES)),
    ),
)
