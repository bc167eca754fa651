"""facebookresearch/DiT: `train.py`, a diffusion transformer, with two ranks on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial
from tests.field.recipes.images import pictures
from tests.field.usual import ROUNDING_ON_GPUS, STEPS_AT_NAN


def _instead(line: str, instead: str, file: str = "train.py") -> Edit:
    return Edit(file, line, instead=instead)


# The script insists on GPUs, and its smallest model has 33 million parameters.
_ON_CPU = (
    _instead(
        'assert torch.cuda.is_available(), "Training currently requires at least one GPU."', "pass"
    ),
    _instead('dist.init_process_group("nccl")', 'dist.init_process_group("gloo")'),
    _instead("device = rank % torch.cuda.device_count()", 'device = "cpu"'),
    _instead("torch.cuda.set_device(device)", "pass"),
    _instead("model = DDP(model.to(device), device_ids=[rank])", "model = DDP(model.to(device))"),
    _instead(
        "return DiT(depth=12, hidden_size=384, patch_size=8, num_heads=6, **kwargs)",
        "return DiT(depth=2, hidden_size=24, patch_size=8, num_heads=2, **kwargs)",
        "models.py",
    ),
)


def latents(folder: Path) -> None:
    """Write pictures, and a tiny autoencoder under the name of the one that is downloaded."""
    from diffusers.models import AutoencoderKL

    pictures(folder)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
    ).save_pretrained(folder / "stabilityai/sd-vae-ft-ema")


_COMMAND = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "train.py"),
    *("--data-path=images/train", "--model=DiT-S/8", "--num-classes=2"),
    *("--global-batch-size=8", "--num-workers=0", "--epochs=2"),
)
_EXPECTED = (STEPS_AT_NAN,)
RECIPES = (
    Recipe(
        name="dit",
        title="DiT, train.py",
        repository="facebookresearch/DiT",
        commit="ed81ce2229091fd4ecc9a223645f95cf379d582b",
        needs=("timm", "diffusers", "torchvision"),
        environment={"HF_HUB_OFFLINE": "1"},
        data=latents,
        trials=(
            Trial(
                name="auto",
                command=_COMMAND,
                edits=_ON_CPU,
                options=("--steps", "4"),
                expected=_EXPECTED,
            ),
            Trial(
                name="auto on 2 GPUs",
                command=_COMMAND,
                options=("--steps", "4"),
                expected=(*_EXPECTED, ROUNDING_ON_GPUS),
                gpus=2,
            ),
        ),
    ),
)
