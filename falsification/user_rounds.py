"""Workers that step alone, and stages of a pipeline, by hand: correct scripts, and bugs in them.

`make twins` tries all of them.
"""

from __future__ import annotations

from functools import partial

from falsification.user_round_scripts import DILOCO, STAGES
from falsification.user_trainers import Twin

_diloco = partial(Twin, script="diloco.py", text=DILOCO, arguments=("{steps}",))
_stages = partial(Twin, script="stages.py", text=STAGES)
_ONE_F_ONE_B = ('"SCHEDULE", "gpipe"', '"SCHEDULE", "1f1b"')
_MEET = "if (step + 1) % H == 0:"
_ROUNDS_OF_3 = ("H, BATCH, SIZE = 2", "H, BATCH, SIZE = 3")
_GUARD = (
    "    if not torch.isfinite(norm):\n"
    '        raise RuntimeError(f"worker {rank}: gradient norm {norm} in step {step}")\n'
    "    inner.step()\n"
)
# The changes by which each worker writes all its state after every step, and goes on from there.
_RESUMED = (
    (
        "obs = entrenar_py.observe(net, inner)\n",
        'path, begun = f"{HOME}/worker{rank}.pt", 0\n'
        "if os.path.exists(path):\n"
        "    kept = torch.load(path)\n"
        '    net.load_state_dict(kept["net"])\n'
        '    inner.load_state_dict(kept["inner"])\n'
        '    outer.load_state_dict(kept["outer"])\n'
        "    for name, tensor in shared.items():\n"
        '        tensor.copy_(kept["shared"][name])\n'
        '    begun = kept["step"]\n'
        "obs = entrenar_py.observe(net, inner, step=begun)\n",
    ),
    ("import sys\n", "import os\nimport sys\n"),
    (
        "    obs.samples(ids, epoch=epoch)\n",
        "    if step < begun:\n        continue\n    obs.samples(ids, epoch=epoch)\n",
    ),
    (
        "    dist.barrier()\n",
        '    kept = {"net": net.state_dict(), "inner": inner.state_dict(), "step": step + 1}\n'
        '    torch.save({**kept, "outer": outer.state_dict(), "shared": shared}, path)\n',
    ),
)


def _resumed(before: str, after: str) -> tuple[tuple[str, str], ...]:
    """Return the changes of `_RESUMED`, with `after` in place of `before` in the first of them."""
    assert before in _RESUMED[0][1], before
    return ((_RESUMED[0][0], _RESUMED[0][1].replace(before, after)), *_RESUMED[1:])


_stopped = partial(
    Twin, script="diloco.py", text=DILOCO, arguments=("{steps}", "{workdir}"), check="resume"
)
_MEAN = "        shared[name].grad = delta / world\n"

BUGS = (
    _diloco(
        name="the pseudo-gradient has the wrong sign",
        changes=(("shared[name] - p.data", "p.data - shared[name]"),),
        check="outer_step",
        step=1,
        rank=0,
        words="the wrong sign",
    ),
    _diloco(
        name="pseudo-gradients are added and not divided",
        changes=((_MEAN, "        shared[name].grad = delta\n"),),
        check="outer_step",
        step=1,
        words="added, and not divided",
    ),
    _diloco(
        name="the mean of workers with unequal samples, as if they were equal",
        changes=(
            (
                "order[at : at + BATCH][rank::world]",
                "order[at : at + BATCH][4 * rank :][: 4 + BATCH * (world == 1)]",
            ),
        ),
        check="outer_step",
        step=1,
        words="workers count alike",
    ),
    _diloco(
        name="workers go on from their own weights",
        changes=(("        p.data.copy_(shared[name])\n", "        pass\n"),),
        check="outer_agreement",
        step=1,
        rank=1,
        tensor="0.weight",
    ),
    _diloco(
        name="one tensor is left out of the copy on one worker",
        changes=(
            (
                "        p.data.copy_(shared[name])\n",
                '        if rank == 0 or name != "2.bias":\n'
                "            p.data.copy_(shared[name])\n",
            ),
        ),
        check="outer_agreement",
        step=1,
        rank=1,
        tensor="2.bias",
    ),
    _diloco(
        name="gradients are averaged within rounds, too",
        changes=(
            (
                "    loss.backward()\n",
                "    loss.backward()\n"
                "    for p in net.parameters():\n"
                "        dist.all_reduce(p.grad)\n"
                "        p.grad /= world\n",
            ),
        ),
        check="outer_schedule",
        step=0,
        rank=0,
        words="the mean of all ranks' gradients",
    ),
    _diloco(
        name="the last round is left out although the length of a round is declared",
        changes=(
            (
                "        obs.synchronised(outer, shared)",
                "        obs.synchronised(outer, shared, inner_steps=H)",
            ),
            (_MEET, "if (step + 1) % H == 0 and step + 1 < STEPS:"),
        ),
        check="outer_schedule",
        step=7,
        rank=0,
    ),
    _diloco(
        name="a NaN moves the weights of its worker",
        changes=((_GUARD, "    inner.step()\n"),),
        check="outer_finiteness",
        step=4,
        rank=1,
        tensor="0.weight",
    ),
    _stopped(
        name="a worker resumes without the outer momentum",
        changes=_resumed('    outer.load_state_dict(kept["outer"])\n', ""),
        step=3,
        rank=0,
        words="(outer weights)",
    ),
    _stopped(
        name="a worker resumes from its own weights as the outer ones",
        changes=_resumed('kept["shared"][name]', 'kept["net"][name]'),
        step=3,
        rank=0,
        words="(outer weights)",
    ),
    _stopped(
        name="a worker resumes without its own moments",
        changes=_resumed('    inner.load_state_dict(kept["inner"])\n', ""),
        step=3,
        rank=0,
        tensor="0.weight/step",
        words="it has none, so none was loaded",
    ),
    _stages(
        name="TIED-PP: the copies of the embedding are not reduced",
        source="Megatron-LM #844",
        changes=(("    reduce_tied()\n", ""),),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="embedding.weight",
    ),
    _stages(
        name="the gradients of the tied copies are averaged",
        changes=(
            (
                "        dist.all_reduce(shared.grad)\n",
                "        dist.all_reduce(shared.grad)\n        shared.grad /= 2\n",
            ),
        ),
        check="parity",
        step=0,
        tensor="embedding.weight",
    ),
    _stages(
        name="PP-GAS-POW: the first stage divides by the micro-batches again",
        source="DeepSpeed #8154",
        changes=(("        y.backward(gradient)\n", "        y.backward(gradient / MICRO)\n"),),
        check="parity",
        step=0,
        tensor="embedding.weight",
    ),
    _stages(
        name="the first stage takes gradients in the wrong order",
        changes=(
            (
                "        for _ in parts:\n            backward(saved)\n",
                "        if first:\n            saved.reverse()\n"
                "        for _ in parts:\n            backward(saved)\n",
            ),
        ),
        check="parity",
        step=0,
        tensor="embedding.weight",
    ),
    _stages(
        name="1F1B: the first stage drops the micro-batch of its warm-up",
        changes=(
            _ONE_F_ONE_B,
            (
                "        for _ in range(warm):\n            backward(saved)\n",
                "        for _ in range(warm):\n"
                "            held = [p.grad.clone() for p in stage.parameters()]\n"
                "            backward(saved)\n"
                "            for p, kept in zip(stage.parameters(), held):\n"
                "                p.grad.copy_(kept)\n",
            ),
        ),
        check="parity",
        step=0,
        tensor="embedding.weight",
    ),
)

# Correct, or not to be told.
OPEN = (
    *(
        _diloco(name=f"local SGD by hand: {check}", changes=(), check=check, verdict="held")
        for check in (
            *("outer_agreement", "outer_schedule", "outer_step", "outer_finiteness"),
            *("coverage", "step_rule"),
        )
    ),
    _stopped(name="local SGD by hand, stopped and resumed", changes=_RESUMED, verdict="held"),
    _diloco(
        name="momentum without a look ahead",
        changes=(("nesterov=True", "nesterov=False"),),
        check="outer_step",
        verdict="held",
    ),
    _diloco(
        name="a plain mean of the weights, without an optimizer",
        changes=(
            ("        obs.synchronised(outer, shared)", "        obs.synchronised()"),
            ("lr=0.7, momentum=0.9, nesterov=True", "lr=1.0"),
        ),
        check="outer_step",
        verdict="held",
    ),
    _diloco(
        name="rounds of one step of plain SGD are training on one worker",
        changes=(
            ("H, BATCH, SIZE = 2", "H, BATCH, SIZE = 1"),
            (
                "torch.optim.AdamW(net.parameters(), lr=5e-3)",
                "torch.optim.SGD(net.parameters(), lr=0.1)",
            ),
            ("lr=0.7, momentum=0.9, nesterov=True", "lr=1.0"),
            ("net.parameters(), 1.0)", "net.parameters(), 1e9)"),
        ),
        check="outer_parity",
        verdict="held",
    ),
    _diloco(
        name="weights are broadcast within a round, to a worker that came back",
        changes=(
            (
                "    dist.barrier()\n",
                "    dist.barrier()\n"
                "    if step == 2:\n"
                "        for tensor in shared.values():\n"
                "            dist.broadcast(tensor, src=0)\n",
            ),
        ),
        check="outer_schedule",
        verdict="held",
    ),
    _diloco(
        name="a worker leaves out its own step with a NaN",
        changes=(
            (
                _GUARD,
                "    if torch.isfinite(norm):\n        inner.step()\n"
                "    else:\n        net.zero_grad()\n",
            ),
        ),
        check="outer_finiteness",
        verdict="held",
    ),
    _diloco(
        name="the number of steps cuts the last round short",
        changes=(_ROUNDS_OF_3,),
        check="outer_schedule",
        verdict="inconclusive",
        words="the run ends in the middle of a round",
    ),
    _diloco(
        name="the last round is short, and brought together",
        changes=(_ROUNDS_OF_3, (_MEET, "if (step + 1) % H == 0 or step + 1 == STEPS:")),
        check="outer_schedule",
        verdict="held",
    ),
    _diloco(
        name="the first round is shorter",
        changes=((_MEET, "if step % H == 0:"),),
        check="outer_schedule",
        verdict="inconclusive",
        words="obs.synchronised(..., inner_steps=k)",
    ),
    _diloco(
        name="pseudo-gradients are sent in bfloat16",
        changes=(
            (
                "        dist.all_reduce(delta)\n",
                "        sent = delta.bfloat16()\n"
                "        dist.all_reduce(sent)\n"
                "        delta = sent.float()\n",
            ),
        ),
        check="outer_step",
        verdict="inconclusive",
        words="rounded to 16 bits",
    ),
    _stages(name="a pipeline by hand, as GPipe", changes=()),
    _stages(name="a pipeline by hand, as 1F1B", changes=(_ONE_F_ONE_B,)),
)
