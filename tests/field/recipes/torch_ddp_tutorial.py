"""pytorch/examples, distributed/ddp-tutorial-series: one GPU, `mp.spawn`, and torchrun."""

from __future__ import annotations

from tests.field.recipe import Edit, Recipe, Trial

EXAMPLES = "pytorch/examples"
COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
FOLDER = "distributed/ddp-tutorial-series"
_TORCHRUN = "multigpu_torchrun.py"
_ON_CPU = (
    Edit(
        file=_TORCHRUN,
        line='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        instead="pass",
    ),
    Edit(
        file=_TORCHRUN,
        line='init_process_group(backend="nccl")',
        instead='init_process_group(backend="gloo")',
    ),
    Edit(file=_TORCHRUN, line="self.model = model.to(self.gpu_id)", instead="self.model = model"),
    Edit(
        file=_TORCHRUN,
        line="self.model = DDP(self.model, device_ids=[self.gpu_id])",
        instead="self.model = DDP(self.model)",
    ),
    Edit(file=_TORCHRUN, line="source = source.to(self.gpu_id)", instead="pass"),
    Edit(file=_TORCHRUN, line="targets = targets.to(self.gpu_id)", instead="pass"),
    Edit(file=_TORCHRUN, line='loc = f"cuda:{self.gpu_id}"', instead='loc = "cpu"'),
)
_LAUNCH = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
_LINE = (
    Edit(file=_TORCHRUN, line="ddp_setup()", add="torch.manual_seed(0)"),
    Edit(
        file=_TORCHRUN,
        line="self.model = DDP(self.model, device_ids=[self.gpu_id])",
        instead="self.model = DDP(self.model)",
    ),
)


RECIPES = (
    Recipe(
        name="torch-ddp-tutorial-torchrun",
        title="DDP tutorial, multigpu_torchrun.py",
        repository=EXAMPLES,
        commit=COMMIT,
        folder=FOLDER,
        trials=(
            Trial(
                name="auto",
                command=(*_LAUNCH, _TORCHRUN, "2", "1", "--batch_size", "{share:32}"),
                edits=_ON_CPU,
                options=("--steps", "4"),
                expected=(),
            ),
        ),
    ),
)
