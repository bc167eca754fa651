"""Real bugs in otherwise correct scripts: scripts of `examples/user_trainers` with changed lines.

They are no mutants of the catalogue, because the text of a script is changed, not a function at a
dotted path. `tests/check/command/test_user_trainers.py` tests that the named check finds each one
at its place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Twin:
    """`script` with `changes`, pairs of old and new text. `text` is a script that is no example.

    `check` must find the bug with `world_size` workers, at `step` (-1: before the first one),
    `rank` and `tensor`, as far as these are given. `turned` are the knobs of the script that are
    turned. Without a check, nothing may be found, by the checks `wanted` if these are given.
    `verdict` is what the check finds, if that isn't a bug, and `arguments` follow the script in its
    command. `source` tells where the bug was seen.
    """

    name: str
    script: str
    text: str = ""
    source: str = ""
    changes: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...] = ()
    check: str = ""
    wanted: tuple[str, ...] = ()
    verdict: str = "falsified"
    world_size: int = 2
    turned: tuple[str, ...] = ()
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    words: str = ""


TWINS = (
    Twin(
        name="the wrapper is bypassed, so nothing is synchronised",
        script="ddp.py",
        source="minimind #853, Lightning #17424",
        changes=(("mse_loss(ddp(inputs", "mse_loss(model(inputs"),),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="0.weight",
    ),
    Twin(
        name="every epoch has the order of the first",
        script="ddp.py",
        source="pytorch DistributedSampler, set_epoch as documented",
        changes=(("    sampler.set_epoch(epoch)\n", ""),),
        check="randomness",
        step=4,
        words="in the order of epoch 0",
    ),
    Twin(
        name="a NaN is clipped into the weights",
        script="ddp.py",
        source="classic (no look at what is applied)",
        changes=((", error_if_nonfinite=True", ""),),
        check="finiteness",
        step=4,
        rank=1,
    ),
    Twin(
        name="each rank starts from weights of its own",
        script="plain_loop.py",
        source="litgpt #269",
        changes=(("    dist.broadcast(parameter.data, src=0)", "    pass"),),
        check="replica_identity",
        step=-1,
        rank=1,
        tensor="0.weight",
    ),
    Twin(
        name="a mean over ranks of unequal shares",
        script="plain_loop.py",
        source="pytorch DistributedDataParallel, averaging as documented",
        changes=(
            ('targets, reduction="sum")', "targets)"),
            ("loss / len(ids)", "loss"),
            ("parameter.grad /= count", "parameter.grad /= world_size"),
        ),
        check="parity",
        step=0,
        tensor="0.weight",
    ),
    Twin(
        name="the sum over ranks is not divided",
        script="plain_loop.py",
        source="classic",
        changes=(("parameter.grad /= count", "parameter.grad /= len(ids)"),),
        check="parity",
        step=0,
        tensor="0.weight",
    ),
    Twin(
        name="batches are padded until they divide",
        script="plain_loop.py",
        source="pytorch #25162",
        changes=(("batch[rank::world_size]", "(batch + batch[:1])[rank:8:world_size]"),),
        check="coverage",
        step=0,
        words="samples drawn again",
    ),
    Twin(
        name="the last micro-batch is not synchronised",
        script="accumulation.py",
        source="classic (no_sync around the whole loop)",
        changes=(("nullcontext() if last", "nullcontext() if not last"),),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="0.weight",
    ),
    Twin(
        name="the schedule moves once for every worker",
        script="resume.py",
        source="accelerate #662, transformers #23986",
        changes=(
            (
                "        schedule.step()\n",
                "        [schedule.step() for _ in range(dist.get_world_size())]\n",
            ),
        ),
        check="parity",
        step=1,
        words="it is that of step 2, as if the schedule moved once for each worker",
    ),
    Twin(
        name="a resume without the optimizer's moments",
        script="resume.py",
        source="classic (a state that is not restored)",
        world_size=1,
        changes=(('    optimizer.load_state_dict(saved["optimizer"])\n', ""),),
        check="resume",
        rank=0,
        tensor="0.weight/step",
        words="it has none, so none was loaded",
    ),
    Twin(
        name="a resume at the head of the epoch",
        script="resume.py",
        source="classic (a position that is not restored)",
        world_size=1,
        changes=(("index < done or ", ""),),
        check="resume",
        words="other samples are drawn",
    ),
    Twin(
        name="a resume with the schedule's beginning",
        script="resume.py",
        source="torchtitan #275, nanotron 4cc62ae8",
        world_size=1,
        changes=(('    schedule.load_state_dict(saved["schedule"])\n', ""),),
        check="resume",
        step=3,
        words="that of step 1, as if the schedule began anew",
    ),
    Twin(
        name="the optimizer holds the parameters of before the wrapping",
        script="fsdp.py",
        source="accelerate #2665",
        changes=(
            (
                "for block in (model[0], model[2], model):",
                "stale = list(map(torch.clone, model.parameters()))\n"
                "for block in (model[0], model[2], model):",
            ),
            ("AdamW(model.parameters()", "AdamW(map(torch.nn.Parameter, stale)"),
        ),
        check="liveness",
        step=2,
        rank=0,
        tensor="0.weight",
        words="steps other tensors than the model",
    ),
    Twin(
        name="one rank of a pair clips by the norm of its pieces alone",
        script="tensor_parallel.py",
        source="DeepSpeed #1801 (BLOOM-176B)",
        changes=(
            (
                "squares[int(shared)] += held.square().sum()",
                'squares[int(shared)] += (not shared or mesh.get_local_rank("tp") == 0) * '
                "held.square().sum()",
            ),
        ),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="0.weight",
    ),
    Twin(
        name="a pair whose ranks draw different samples",
        script="tensor_parallel.py",
        source="verl #4697",
        changes=(("DistributedSampler(data, dp_size, dp_rank)", "DistributedSampler(data)"),),
        check="coverage",
        step=0,
        rank=1,
        words="drew other samples for shard 0 than rank 0",
    ),
    Twin(
        name="a sampler that pads ten samples for three ranks",
        script="ddp.py",
        source="pytorch #25162, rf-detr #1507",
        changes=(
            ("GLOBAL_BATCH = 8", "GLOBAL_BATCH = 6"),
            ("torch.randn(32, 4)", "torch.randn(10, 4)"),
        ),
        check="coverage",
        world_size=3,
        step=1,
        rank=1,
        words="samples drawn again in epoch 0 by rank 1: [4]",
    ),
    Twin(
        name="a mean of means over ranks with different numbers of samples",
        script="uneven.py",
        source="pytorch DistributedDataParallel, averaging as documented",
        changes=(("(total * world_size / len(batch))", "(total / max(len(inputs), 1))"),),
        check="parity",
        step=0,
        tensor="0.weight",
    ),
    Twin(
        name="adapters that each rank draws for itself",
        script="lora.py",
        source="Megatron-Bridge #5396",
        changes=(("DataParallel(model)", "DataParallel(model, init_sync=False)"),),
        check="replica_identity",
        step=-1,
        rank=1,
        tensor="0.a",
    ),
    Twin(
        name="adapters are merged into the frozen weights and not taken out again",
        script="lora.py",
        source="classic",
        changes=(("[layer.merged() for", "[layer.base.weight.data.copy_(layer.merged()) for"),),
        check="liveness",
        step=3,
        rank=0,
        tensor="0.base.weight",
        words="a frozen tensor changed",
    ),
    Twin(
        name="the optimizer holds copies of the adapters",
        script="lora.py",
        source="accelerate #2665",
        changes=(("live = [parameter for", "live = [torch.nn.Parameter(parameter.clone()) for"),),
        check="liveness",
        step=2,
        rank=0,
        tensor="0.b",
        words="did not move in 3 steps",
    ),
    Twin(
        name="EMA-SHARD: the first rank alone moves its pieces of the average",
        script="ema.py",
        source="miles-credit #414",
        changes=(
            (
                "        move_averages()\n",
                "        if dist.get_rank() == 0:\n            move_averages()\n",
            ),
        ),
        check="parity",
        step=1,
        rank=0,
        tensor="0.average_weight",
        words="buffers after the step are not the single device's",
    ),
    Twin(
        name="EP-SCALE: an expert's gradient is divided by the number of all ranks",
        script="experts.py",
        source="DeepSpeed #5618, Megatron-LM !2564",
        changes=(
            (
                "parameter.grad /= num_pairs",
                "parameter.grad /= "
                "world_size if parameter in {*model.experts.parameters()} else num_pairs",
            ),
        ),
        check="parity",
        step=0,
        tensor="experts.0.weight",
        words="averaged gradient is not the single device's",
    ),
)
