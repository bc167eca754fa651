"""karpathy/llm.c: `train_gpt2.py`, the reference in PyTorch, with two ranks on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, of_tokens, on_gpus
from tests.field.usual import STEPS_AT_NAN


def _instead(line: str, instead: str) -> Edit:
    return Edit("train_gpt2.py", line, instead=instead)


# Its tokenizer would be downloaded, and its smallest model has 124 million parameters.
_SMALL = (
    _instead('enc = tiktoken.get_encoding("gpt2")', "enc = None"),
    _instead(
        '"d12": GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768),',
        '"d12": GPTConfig(block_size=16, vocab_size=128, n_layer=2, n_head=2, n_embd=16),',
    ),
)
# With torchrun the script insists on GPUs.
_ON_CPU = (
    *_SMALL,
    _instead('assert torch.cuda.is_available(), "for now i think we need CUDA for DDP"', "pass"),
    _instead("init_process_group(backend='nccl')", "init_process_group(backend='gloo')"),
    _instead("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
    _instead("torch.cuda.set_device(device)", "pass"),
    _instead("model = DDP(model, device_ids=[ddp_local_rank])", "model = DDP(model)"),
)
_COMMAND = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "train_gpt2.py"),
    *("--model=d12", "--input_bin=tokens.bin", "--write_tensors=0", "--overfit_single_batch=0"),
    *("--sequence_length=16", "--total_batch_size=128", "--num_iterations={steps}"),
    *("--weight_decay=0.1", "--learning_rate=1e-3", "--batch_size={share:8}"),
)


def tokens(folder: Path) -> None:
    """Write what dev/data makes: a header of 256 words, and tokens of 16 bits."""
    import numpy as np

    drawn = random.Random(0).choices(range(128), k=4097)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(drawn)
    body = np.array(drawn, dtype=np.uint16).tobytes()
    (folder / "tokens.bin").write_bytes(header.tobytes() + body)


_AUTO = Trial(
    name="auto",
    command=(*_COMMAND, "--grad_clip={clip}", "--output_dir=out{accumulation}"),
    edits=_ON_CPU,
    options=("--steps", "4"),
    expected=(STEPS_AT_NAN,),
)

RECIPES = (
    Recipe(
        name="llm.c",
        title="llm.c, train_gpt2.py",
        repository="karpathy/llm.c",
        commit="f1e2ace651495b74ae22d45d1723443fd00ecd3a",
        needs=("tiktoken",),
        data=tokens,
        trials=(
            _AUTO,
            Trial(
                name="auto, zero stage 1",
                command=(*_COMMAND, "--zero_stage=1"),
                edits=_ON_CPU,
                options=("--steps", "4"),
                expected=(STEPS_AT_NAN,),
            ),
            of_tokens(_AUTO),
            on_gpus(_AUTO, 2, edits=_SMALL),
        ),
    ),
)
