"""Trainers of image models: timm's `train.py`, and OpenCLIP."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, default
from tests.field.usual import STEPS_AT_NAN


def pictures(folder: Path, side: int = 40) -> None:
    """Write random pictures of two classes, for training and validation."""
    from PIL import Image

    drawn = random.Random(0)
    for part, count in (("train", 32), ("val", 8)):
        for index in range(count):
            path = folder / "images" / part / f"class{index % 2}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (side, side), drawn.randbytes(side * side * 3)).save(path)


def captions(folder: Path) -> None:
    """Write pictures with captions, and the configuration of a tiny model."""
    pictures(folder, side=32)
    drawn = random.Random(0)
    rows = ["filepath\ttitle"]
    for path in sorted((folder / "images/train").glob("*/*.png")):
        words = " ".join(drawn.choices(("red", "green", "dog", "cat", "tree"), k=4))
        rows.append(f"{path.relative_to(folder)}\tpicture {path.stem}: {words}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
    path = folder / "open_clip/model_configs/tiny.json"
    path.write_text(json.dumps(model), encoding="utf-8")


_TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
_TIMM = Recipe(
    name="timm",
    title="timm, train.py",
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    needs=("torchvision", "huggingface_hub", "safetensors", "pyyaml"),
    data=pictures,
    trials=(
        Trial(
            name="auto",
            command=(
                *_TORCHRUN,
                *("train.py", "--data-dir=images", "--device=cpu", "--model=test_vit"),
                *("--img-size=32", "--num-classes=2", "--batch-size={share:8}", "--workers=1"),
                *("--epochs=2", "--warmup-epochs=0", "--opt=sgd", "--lr=0.1", "--no-aug"),
                "{resume:--resume output/train/*/last.pth.tar}",
            ),
            edits=(
                Edit(
                    "train.py",
                    "task.prepare_distributed(device_ids=[device], "
                    "broadcast_buffers=not args.no_ddp_bb)",
                    instead="task.prepare_distributed(broadcast_buffers=not args.no_ddp_bb)",
                ),
            ),
            options=("--steps", "6"),
            expected=(STEPS_AT_NAN,),
        ),
    ),
)
_CLIP_COMMAND = (
    *_TORCHRUN,
    *("-m", "open_clip_train.main", "--train-data=pairs.csv", "--dataset-type=csv"),
    *("--model=tiny", "--device=cpu", "--precision=fp32", "--batch-size={share:8}"),
    *("--workers=0", "--epochs=2", "--lr=1e-3", "--warmup=2", "--name=run"),
)
_CLIP_ON_CPU = (
    Edit(
        "open_clip_train/main.py",
        "task.prepare_distributed(device_ids=[device], **ddp_args)",
        instead="task.prepare_distributed(**ddp_args)",
    ),
)
# One process draws without a DistributedSampler, and crops are drawn by each rank.
_CLIP_SAME_PAIRS = (
    Edit(
        "open_clip_train/data.py",
        "from torch.utils.data.distributed import DistributedSampler",
        add="class DistributedSampler(DistributedSampler):\n"
        "    def __init__(self, dataset):\n"
        "        world_size, rank = os.environ['WORLD_SIZE'], os.environ['RANK']\n"
        "        super().__init__(dataset, int(world_size), int(rank))",
    ),
    Edit(
        "open_clip_train/data.py",
        "def get_csv_dataset(args, preprocess_fn, is_train, epoch=0, tokenizer=None, "
        "naflex_data_config=None):",
        add="    from open_clip import image_transform\n"
        "    preprocess_fn = image_transform(32, is_train=False)\n"
        "    args = type(args)(**{**vars(args), 'distributed': True})",
    ),
)
_HALF = default(
    clause="F-DP-005",
    words="it is half as large (1/world_size)",
    because="Without `--local-loss --gather-with-grad` each rank computes the loss of the whole "
    "batch, with gradients of its own pairs only, and DDP divides their sum by the number of "
    "ranks. So the gradient shrinks with each rank that is added, except that of the "
    "temperature. Adam hides a factor that all tensors share; clipping and Adam's epsilon don't.",
    reproduction="open_clip_gather.py",
    known="https://github.com/mlfoundations/open_clip/issues/616",
)
_SAME_CROPS = default(
    clause="F-TI-003",
    words="one (gradient of shard 0)",
    because="A checkpoint has no generator's state, and each start sets the seed "
    "again. So the epoch after a resume has its own pairs, but crops their "
    "pictures with the random numbers of the first epoch.",
    reproduction="open_clip_same_crops.py",
)
_OPEN_CLIP = Recipe(
    name="open-clip",
    title="OpenCLIP, open_clip_train.main",
    repository="mlfoundations/open_clip",
    commit="89fb801f1e6087880e951fc8354b8a2077b79c6d",
    folder="src",
    needs=("torchvision", "timm", "ftfy", "regex", "webdataset", "pandas"),
    data=captions,
    trials=(
        Trial(
            name="auto",
            command=(*_CLIP_COMMAND, "{resume:--resume latest}"),
            edits=_CLIP_ON_CPU,
            options=("--steps", "6"),
            expected=(STEPS_AT_NAN, _HALF, replace(_HALF, clause="F-TI-001"), _SAME_CROPS),
        ),
        Trial(
            name="auto, same pairs",
            command=_CLIP_COMMAND,
            edits=_CLIP_ON_CPU + _CLIP_SAME_PAIRS,
            options=("--steps", "3", "--only", "F-DP-001,F-DP-002,F-DP-005"),
            contracts=("distributed-training-v1.yaml",),
            expected=(_HALF,),
        ),
        Trial(
            name="auto, same pairs, local loss",
            command=(*_CLIP_COMMAND, "--local-loss", "--gather-with-grad"),
            edits=_CLIP_ON_CPU + _CLIP_SAME_PAIRS,
            options=("--steps", "3", "--only", "F-DP-001,F-DP-002,F-DP-005"),
            contracts=("distributed-training-v1.yaml",),
            expected=(),
        ),
    ),
)
RECIPES = (_TIMM, _OPEN_CLIP)
