"""pytorch/torchtitan: `torchtitan.train` on its debug model, on the CPU with gloo.

Later commits need FlexAttention, which has no backward pass on CPUs, and a torch after 2.13.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from tests.field.recipe import Edit, Recipe, Trial, by_design, defect, limit
from tests.field.usual import SAVES_LATER, STEPS_AT_NAN

_SEQUENCE = 32
_ON_CPU = (
    Edit(
        "torchtitan/tools/utils.py",
        'device_type = _get_available_device_type() or "cuda"',
        instead='device_type = _get_available_device_type() or "cpu"',
    ),
    # torch.cpu has no memory to report.
    Edit(
        "torchtitan/tools/utils.py",
        "device_type, device_module = get_device_info()",
        add="from unittest.mock import Mock\n"
        "device_module = Mock(current_device=lambda: 0, memory_stats=lambda device: {})\n"
        'device_module.get_device_name.return_value = "CPU"\n'
        "device_module.get_device_properties.return_value.total_memory = 1",
    ),
    # gloo has no PREMUL_SUM, which FSDP takes for a factor of one's own.
    Edit(
        "torchtitan/models/llama3/infra/parallelize.py",
        "module.set_gradient_divide_factor(1.0)",
        add="module.set_force_sum_reduction_for_comms(True)",
    ),
    # Streamed as c4 is: ranks take rows in turn, as one worker does alone.
    Edit(
        "torchtitan/hf_datasets/text_datasets.py",
        'loader=lambda path: load_dataset(path, split="train"),',
        instead='loader=lambda path: load_dataset(path, split="train", streaming=True),',
    ),
)
_LAUNCH = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "-m", "torchtitan.train"),
    "--job.config_file=torchtitan/models/llama3/train_configs/debug_model.toml",
    *(f"--training.seq_len={_SEQUENCE}", "--training.mixed_precision_param=float32"),
    "--debug.seed={seed}",
)
_COMMAND = (*_LAUNCH, "--training.local_batch_size={share:4}", "--training.max_norm={clip}")
_RESUMED = (
    *("--checkpoint.enable", "--checkpoint.interval=1", "--job.dump_folder={workdir}"),
    *("--training.steps={steps}", "--lr_scheduler.min_lr_factor=1.0"),
)


_OTHER_WEIGHTS = tuple(
    by_design(
        clause=clause,
        words="the run on 1 worker (tok_embeddings.weight)",
        because="On a CPU, the random first weights of DTensors depend on the rank, so one "
        "worker begins with different ones. A seed checkpoint "
        "(`--checkpoint.create_seed_checkpoint`) would give both the same.",
    )
    for clause in ("F-DP-005", "F-TI-001")
)
_HALVED = tuple(
    defect(
        clause=clause,
        words="it is half as large (1/world_size)",
        because="The loss is divided by the tokens of all ranks, and `replicate` then "
        "takes the mean over ranks. So with R replicas gradients are R times too "
        "small. Sharded gradients are summed, which is right.",
        reproduction="torchtitan_replicas_divide_twice.py",
        known="https://github.com/pytorch/torchtitan/pull/2323",
    )
    for clause in ("F-DP-005", "F-TI-001")
)
_TERMS = limit(
    clause="F-TI-008",
    words="can't be recomputed",
    because="With sequence parallelism, the gradients of norms are partial sums on "
    "each rank until the optimizer adds them up. They are not recorded, so "
    "their steps aren't recomputed.",
)


def documents(folder: Path) -> None:
    """Write c4_test: documents that fill a sequence each, by torchtitan's own tokenizer."""
    drawn = random.Random(0)
    home = folder / "tests/assets/c4_test"
    home.mkdir(parents=True)
    # The tokens of a document, one that begins and one that ends it are inputs and a last label.
    rows = [{"text": " ".join(drawn.choices(ascii_lowercase, k=_SEQUENCE - 1))} for _ in range(400)]
    (home / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


_AUTO = Trial(
    name="auto",
    command=_COMMAND,
    edits=_ON_CPU,
    options=("--steps", "4"),
    expected=(STEPS_AT_NAN, SAVES_LATER, *_OTHER_WEIGHTS),
)
_REPLICATED = replace(
    _AUTO,
    name="auto, replicated",
    command=(*_COMMAND, "--parallelism.data_parallel_replicate_degree={world_size}"),
    expected=(STEPS_AT_NAN, SAVES_LATER, *_HALVED),
)
_TENSOR_PARALLEL = replace(
    _AUTO,
    name="auto, tensor parallel",
    command=(
        *_LAUNCH,
        "--training.local_batch_size=4",
        "--parallelism.tensor_parallel_degree={world_size}",
    ),
    expected=(STEPS_AT_NAN, SAVES_LATER, *_OTHER_WEIGHTS, _TERMS),
)
_GOES_ON = replace(
    _AUTO,
    name="auto, resumed",
    command=(*_COMMAND, *_RESUMED),
    options=("--only", "F-TI-002,F-TI-003", "--steps", "4"),
    contracts=("training-integrity-v1.yaml",),
    expected=(),
)
RECIPES = (
    Recipe(
        name="torchtitan",
        title="torchtitan 0.2.2, llama3 debugmodel",
        repository="pytorch/torchtitan",
        commit="73a0e6979dd10b6b1904098eb3c8f62c18ab87ce",
        paths=("torchtitan", "tests/assets/tokenizer"),
        needs=("torchdata", "datasets", "tokenizers", "tyro", "tomli", "einops", "triton"),
        environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": "datasets-cache"},
        data=documents,
        trials=(_AUTO, _REPLICATED, _TENSOR_PARALLEL, _GOES_ON),
    ),
)
