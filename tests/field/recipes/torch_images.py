"""pytorch/examples, imagenet: under torchrun, without a GPU, on its own dummy data."""

from __future__ import annotations

from tests.field.recipe import Recipe, Trial, default, defect
from tests.field.recipes.torch_ddp_tutorial import COMMIT, EXAMPLES

RECIPES = (
    Recipe(
        name="torch-imagenet",
        title="imagenet, main.py",
        repository=EXAMPLES,
        commit=COMMIT,
        folder="imagenet",
        needs=("torchvision",),
        trials=(
            Trial(
                name="auto",
                command=(
                    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "main.py"),
                    *("--dummy", "--dist-url", "env://", "--dist-backend", "gloo"),
                    *("--seed", "{seed}", "-b", "{share:4}", "-j", "0"),
                ),
                contracts=("distributed-training-v1.yaml",),
                options=("--steps", "2", "--exclude", "F-DP-003,F-DP-006"),
                expected=(
                    defect(
                        clause="F-DP-001",
                        words="each rank applied the gradient of its own samples alone",
                        because="The script wraps the model in `DistributedDataParallel` only if "
                        "there is a GPU. Without a GPU it joins the process group and divides the "
                        "data, but each process trains its own model.",
                        reproduction="imagenet_without_ddp.py",
                    ),
                    default(
                        clause="F-DP-002",
                        words="samples drawn again in epoch 0 by rank 1: [",
                        because="ImageNet has 1281167 pictures, which two ranks can't share "
                        "evenly. torch's `DistributedSampler` gives the last rank the first "
                        "picture of the epoch again, by default.",
                        reproduction="distributed_sampler_pads.py",
                    ),
                ),
            ),
        ),
    ),
)
