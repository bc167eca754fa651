"""More bugs in otherwise correct scripts, most of them real ones.

`make twins` tests that the named check finds each one at its place. That takes some minutes, so it
is no part of the tests. The bugs in `user_trainers.py` are.
"""

from __future__ import annotations

from falsification.user_benign import AVERAGED, RESUMED_IN_MICRO_BATCHES
from falsification.user_trainers import Twin

BUGS = (
    Twin(
        name="DDP-BYPASS in a part of the model: a tensor that is not synchronised",
        script="ddp.py",
        changes=(
            (
                "ddp = Dist",
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
                'model, ["0.bias"])\nddp = Dist',
            ),
            ("model.parameters(), 1.0", "model.parameters(), 1e9"),
        ),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="0.bias",
    ),
    Twin(
        name="OPT-STALE: the optimizer holds copies of the parameters",
        script="ddp.py",
        world_size=1,
        changes=(
            ("SGD(model.parameters()", "SGD([p.detach().clone() for p in model.parameters()]"),
        ),
        check="liveness",
        tensor="0.weight",
        words="the optimizer steps other tensors than the model's",
    ),
    Twin(
        name="the optimizer was given all tensors but one",
        script="ddp.py",
        world_size=1,
        changes=(("SGD(model.parameters()", "SGD([*model.parameters()][:-1]"),),
        check="liveness",
        tensor="2.bias",
    ),
    Twin(
        name="gradients are cleared between backward and step",
        script="ddp.py",
        world_size=1,
        changes=(
            ("        optimizer.step()", "        optimizer.zero_grad()\n        optimizer.step()"),
        ),
        check="liveness",
        tensor="0.weight",
    ),
    Twin(
        name="BUFFER-ALIAS: gradients are never cleared",
        script="ddp.py",
        world_size=1,
        changes=(("        optimizer.zero_grad()\n", ""),),
        check="weighting",
        step=1,
    ),
    Twin(
        name="MASTER-HALF: weights in bfloat16, and steps below half of their last bit",
        script="ddp.py",
        world_size=1,
        changes=(
            ("model.to(device)", "model.to(device, torch.bfloat16)"),
            ("lr=0.05, momentum=0.9", "lr=1e-5"),
            (
                "ddp(inputs.to(device)), targets.to(device))",
                "ddp(inputs.bfloat16()), targets.bfloat16())",
            ),
        ),
        check="liveness",
        words="in bfloat16, where a step below half",
    ),
    Twin(
        name="SHUFFLE-UNSYNC: ranks shuffle by seeds of their own",
        script="ddp.py",
        changes=(("DistributedSampler(data)", "DistributedSampler(data, seed=dist.get_rank())"),),
        check="coverage",
        words="samples drawn again",
    ),
    Twin(
        name="SAMPLER-PAD: the sampler repeats samples until they divide",
        script="ddp.py",
        changes=(("torch.randn(32, 4)", "torch.randn(31, 4)"),),
        check="coverage",
        step=3,
        words="samples drawn again",
    ),
    Twin(
        name="SPLIT-CEIL: shares are rounded up, and overlap",
        script="plain_loop.py",
        changes=(
            (
                "batch[rank::world_size]",
                "batch[rank * 3 : rank * 3 + -(-len(batch) // world_size)]",
            ),
        ),
        check="coverage",
        step=0,
        rank=1,
    ),
    Twin(
        name="SPLIT-FLOOR: shares are rounded down, and leave samples out",
        script="plain_loop.py",
        changes=(
            (
                "batch[rank::world_size]",
                "batch[rank * (len(batch) // world_size) :][: len(batch) // world_size]",
            ),
        ),
        check="coverage",
        step=0,
        words="step 0 leaves out samples [13], which the run on one worker draws",
    ),
    Twin(
        name="batches overlap by a sample",
        script="plain_loop.py",
        changes=(
            ("each[at : at + GLOBAL_BATCH]", "each[max(0, at - 1) : at + GLOBAL_BATCH - 1]"),
            ("observe(model, optimizer)", "observe(model, optimizer, dataset=data)"),
        ),
        check="coverage",
        words="epoch 0 ended without samples",
    ),
    Twin(
        name="the learning rate grows with the number of workers",
        script="ddp.py",
        changes=(("lr=0.05", "lr=0.05 * dist.get_world_size()"),),
        check="parity",
        step=0,
        words="twice as large (world_size)",
    ),
    Twin(
        name="AVG-TAIL: the last element of an odd tensor is not averaged",
        script="plain_loop.py",
        changes=(
            (
                "        parameter.grad /= count\n",
                "        parameter.grad.view(-1)[: parameter.numel() // 2 * 2] /= count\n",
            ),
        ),
        check="weighting",
        step=0,
        tensor="2.bias",
    ),
    Twin(
        name="reduced in bfloat16",
        script="plain_loop.py",
        changes=(
            (
                "        dist.all_reduce(parameter.grad)\n",
                "        half = parameter.grad.bfloat16()\n        dist.all_reduce(half)\n"
                "        parameter.grad = half.float()\n",
            ),
        ),
        check="parity",
        verdict="held",
    ),
    Twin(
        name="a sum over ranks on top of the wrapper's mean",
        script="ddp.py",
        changes=(
            (
                "        loss.backward()\n",
                "        loss.backward()\n"
                "        [dist.all_reduce(p.grad) for p in model.parameters()]\n",
            ),
            ("model.parameters(), 1.0", "model.parameters(), 1e9"),
        ),
        check="parity",
        step=0,
        tensor="0.weight",
    ),
    Twin(
        name="a step with the gradient of the step before",
        script="plain_loop.py",
        changes=(
            (
                "    optimizer.step()\n",
                "    fresh = [p.grad.clone() for p in model.parameters()]\n"
                "    late = iter(held if step else fresh)\n"
                "    for parameter in model.parameters():\n"
                "        parameter.grad = next(late)\n"
                "    held = fresh\n"
                "    optimizer.step()\n",
            ),
        ),
        check="weighting",
        step=1,
    ),
    Twin(
        name="SDC-FLIP: a bit of a weight of one rank",
        script="ddp.py",
        changes=(
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n"
                "        if dist.get_rank() == 1 and epoch == 1:\n"
                "            model[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 20\n",
            ),
        ),
        check="replica_identity",
        step=5,
        rank=1,
        tensor="2.weight",
    ),
    Twin(
        name="INF-ONE-RANK: who has the NaN leaves the step out",
        script="plain_loop.py",
        changes=(
            (
                "    optimizer.step()\n",
                "    if finite:\n        optimizer.step()\n",
            ),
            (
                "    loss.backward()\n",
                "    loss.backward()\n"
                "    finite = all(p.grad.isfinite().all() for p in model.parameters())\n"
                "    [p.grad.nan_to_num_() for p in model.parameters()]\n",
            ),
        ),
        check="finiteness",
        step=3,
    ),
    Twin(
        name="nan_to_num before the guard",
        script="plain_loop.py",
        changes=(
            (
                "    loss.backward()\n",
                "    loss.backward()\n    [p.grad.nan_to_num_() for p in model.parameters()]\n",
            ),
        ),
        check="finiteness",
        step=3,
    ),
    Twin(
        name="every rank drops the same units",
        script="ddp.py",
        changes=(
            ("torch.nn.Tanh()", "torch.nn.Dropout(0.5)"),
            ("for epoch in", "torch.manual_seed(1)\nfor epoch in"),
        ),
        check="randomness",
        step=0,
        rank=1,
    ),
    Twin(
        name="a resume with another permutation (RESUME-RNG)",
        script="resume.py",
        world_size=1,
        changes=(("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + 7 * bool(done))"),),
        check="resume",
        step=2,
        words="again, which this epoch had in steps 0, 1",
    ),
    Twin(
        name="a resume one step behind its weights",
        script="resume.py",
        world_size=1,
        changes=(('step = saved["step"]', 'step = saved["step"] - 1'),),
        check="resume",
        step=1,
        words="its count of steps is 1, and 2 were made",
    ),
    Twin(
        name="a resume without weights",
        script="resume.py",
        world_size=1,
        changes=(('    model.load_state_dict(saved["model"])\n', ""),),
        check="resume",
        step=2,
        tensor="0.weight",
        words="is as it was before the first step: it was not restored",
    ),
    Twin(
        name="GAS-RESUME: the place to resume at is counted in steps, not in micro-batches",
        script="resume.py",
        world_size=1,
        turned=("accumulation",),
        changes=(
            *RESUMED_IN_MICRO_BATCHES[:2],
            ("divmod(step, len(loader))", "divmod(step, len(loader) // given.accumulation)"),
            *RESUMED_IN_MICRO_BATCHES[3:],
        ),
        check="resume",
        step=2,
        words="step 2 has the samples of step 1",
    ),
    Twin(
        name="an average of the weights that no checkpoint has",
        script="resume.py",
        world_size=1,
        changes=(
            AVERAGED[0],
            (AVERAGED[1][0], AVERAGED[1][1].replace("clone()", "clone(), persistent=False")),
        ),
        check="resume",
        step=2,
        rank=0,
        tensor="average",
        words="is as it was before the first step: it was not restored",
    ),
)
