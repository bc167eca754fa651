"""pytorch/examples, distributed/minGPT-ddp: a character GPT under DistributedDataParallel."""

from __future__ import annotations

from tests.field.recipe import Edit, Recipe, Trial, defect, of_tokens, on_gpus, undeclared
from tests.field.recipes.torch_ddp_tutorial import COMMIT, EXAMPLES

_ON_CPU = (
    Edit("main.py", "return has_gpu and gpu_count >= min_gpus", instead="return True"),
    Edit("main.py", "acc = torch.accelerator.current_accelerator()", instead="acc = 'cpu'"),
    Edit("main.py", "torch.accelerator.set_device_index(rank)", instead="pass"),
    Edit(
        "trainer.py",
        "self.acc = torch.accelerator.current_accelerator()",
        instead="self.acc = 'cpu'",
    ),
    Edit("trainer.py", "self.model = model.to(self.local_rank)", instead="self.model = model"),
    Edit(
        "trainer.py",
        "self.model = DDP(self.model, device_ids=[self.local_rank])",
        instead="self.model = DDP(self.model)",
    ),
    Edit("trainer.py", "source = source.to(self.local_rank)", instead="pass"),
    Edit("trainer.py", "targets = targets.to(self.local_rank)", instead="pass"),
)
_COMMAND = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "main.py"),
    *("data_config.path=data/input.txt", "data_config.block_size=8", "data_config.truncate=0.0002"),
    *("gpt_config.n_layer=1", "gpt_config.n_head=2", "gpt_config.n_embd=16"),
    *("trainer_config.batch_size={share:16}", "trainer_config.data_loader_workers=0"),
)
_EXPECTED = (
    defect(
        clause="F-DP-002",
        words="samples are in the data of both",
        because="`random_split` is called on each rank without a seed. So each rank has a "
        "different training set, with samples from the test sets of other ranks.",
        reproduction="split_by_every_rank.py",
    ),
    defect(
        clause="F-TI-008",
        words="clipped while it was still scaled",
        because="`clip_grad_norm_` is called before `GradScaler.unscale_`. So the norm is "
        "clipped to 1 divided by the scale, and the gradient of a step has the "
        "norm 1.5e-5. AdamW hides this.",
        reproduction="clipped_while_scaled.py",
        known="https://github.com/pytorch/examples/issues/1196",
    ),
    defect(
        clause="F-DP-005",
        verdict="inconclusive",
        words="give all runs the same data",
        because="Follows from the split: two workers train on more samples than one.",
        reproduction="split_by_every_rank.py",
    ),
    defect(
        clause="F-TI-001",
        verdict="inconclusive",
        words="give all runs the same data",
        because="Follows from the split, too.",
        reproduction="split_by_every_rank.py",
    ),
    undeclared(
        clause="F-TI-003",
        words="the script seeds nothing",
        because="The script sets no seed, and no generator's state is in its snapshot.",
    ),
)

_NOT_CAUSAL = defect(
    clause="F-LM-001",
    words="tokens from position 3 on are replaced",
    because="The script gives `nn.MultiheadAttention` a causal mask with ones on and "
    "below the diagonal. A float mask is added to the scores, so earlier "
    "tokens get more weight, and later tokens are not masked.",
    reproduction="mingpt_float_mask.py",
    known="https://github.com/pytorch/pytorch/issues/21518",
)
_AUTO = Trial(
    name="auto",
    command=_COMMAND,
    edits=_ON_CPU,
    options=("--steps", "4"),
    expected=(*_EXPECTED, _NOT_CAUSAL),
)

RECIPES = (
    Recipe(
        name="torch-mingpt-ddp",
        title="minGPT-ddp",
        repository=EXAMPLES,
        commit=COMMIT,
        folder="distributed/minGPT-ddp/mingpt",
        needs=("hydra-core", "boto3", "fsspec"),
        trials=(_AUTO, of_tokens(_AUTO, _NOT_CAUSAL), on_gpus(_AUTO, 2)),
    ),
)
