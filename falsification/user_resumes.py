"""Scripts that stop and resume, in other people's styles: correct ones, and real bugs in them.

`make twins` tries all of them.
"""

from __future__ import annotations

from functools import partial

from falsification.user_resume_scripts import FOLDERS, NANOGPT, SNAPSHOT
from falsification.user_trainers import Twin

_nanogpt = partial(
    Twin, script="nanogpt.py", text=NANOGPT, arguments=("{steps}", "{workdir}"), check="resume"
)
_snapshot = partial(
    Twin,
    script="snapshot.py",
    text=SNAPSHOT,
    arguments=("--total-steps", "{steps}", "--snapshot-dir", "{workdir}"),
    check="resume",
)
_folders = partial(
    Twin, script="folders.py", text=FOLDERS, arguments=("{steps}", "{workdir}"), check="resume"
)
_OPTIMIZER = ('        self.optimizer.load_state_dict(snapshot["OPTIM"])\n', "")
_ADAM_STEP = 'self.optimizer.load_state_dict(snapshot["OPTIM"])'

_AS_LONG = ("0.8**step", "1 - step / args.total_steps")
_CUT_OFF = ("--total-steps", "9", "--snapshot-dir", "{workdir}")

BUGS = (
    _snapshot(
        name="a snapshot's optimizer is not loaded",
        changes=(_OPTIMIZER,),
        step=2,
        rank=0,
        tensor="body.weight/step",
        words="it has none, so none was loaded",
    ),
    _snapshot(
        name="what a resume restores of the optimizer: nothing",
        changes=(_OPTIMIZER,),
        check="optimizer_state",
        step=2,
        rank=0,
        tensor="body.weight/step",
        words="it has none, so none was loaded",
    ),
    _snapshot(
        name="SCHED-LOST: the second group's schedule begins anew",
        source="torchtitan #275, nanotron 4cc62ae8",
        changes=(('        self.scheduler.load_state_dict(snapshot["SCHED"])\n', ""),),
        step=3,
        rank=0,
        words="that of step 1, as if the schedule began anew",
    ),
    _snapshot(
        name="only the second group's rate is lost",
        changes=(
            (
                '        self.global_step = snapshot["STEP"]',
                "        self.scheduler.base_lrs[1] = 0.004\n"
                '        self.optimizer.param_groups[1]["lr"] *= 2\n'
                '        self.global_step = snapshot["STEP"]',
            ),
        ),
        step=2,
        rank=0,
        tensor="head.weight",
        words="another learning rate, 0.00256 and not 0.00128",
    ),
    _snapshot(
        name="the loss scale is not restored",
        source="composer #1376",
        changes=(('        self.scaler.load_state_dict(snapshot["SCALER"])\n', ""),),
        step=2,
        words="the loss scale was not restored",
    ),
    _snapshot(
        name="Adam's count of steps begins anew",
        changes=(
            (
                _ADAM_STEP,
                _ADAM_STEP + "\n        for state in self.optimizer.state.values():\n"
                '            state["step"].zero_()',
            ),
        ),
        step=2,
        rank=0,
        tensor="body.weight/step",
        words="is zero: it was not restored",
    ),
    _snapshot(
        name="moments are kept in bfloat16",
        changes=(
            (
                _ADAM_STEP,
                _ADAM_STEP + "\n        for state in self.optimizer.state.values():\n"
                '            state["exp_avg"] = state["exp_avg"].bfloat16().float()',
            ),
        ),
        check="optimizer_state",
        step=2,
        rank=0,
        tensor="body.weight/exp_avg",
        words="was rounded to bfloat16",
    ),
    _snapshot(
        name="a snapshot one step behind its weights",
        changes=(
            ('self.global_step = snapshot["STEP"]', 'self.global_step = snapshot["STEP"] - 1'),
        ),
        step=1,
        rank=0,
        words="its count of steps is 1, and 2 were made",
    ),
    _snapshot(
        name="a resume at the head of the epoch",
        changes=(("            if index < skip:\n                continue\n", ""),),
        step=2,
        words="the data starts over",
    ),
    _snapshot(
        name="a schedule as long as {steps}, and without the optimizer",
        changes=(_AS_LONG, _OPTIMIZER),
        step=2,
        rank=0,
        tensor="body.weight/step",
        words="it has none, so none was loaded",
    ),
    _snapshot(
        name="cut off from inside, and without the optimizer",
        changes=(_OPTIMIZER,),
        arguments=_CUT_OFF,
        rank=0,
        tensor="body.weight/step",
        words="it has none, so none was loaded",
    ),
    _nanogpt(
        name="a resume that draws the data from the seed again",
        source="nanoGPT, picotron",
        changes=(
            ('    torch.set_rng_state(checkpoint["rng"][ddp_rank])\n', ""),
            ("replacement = True", "replacement = False"),
        ),
        step=3,
        rank=0,
        words="the data starts over, step 3 has the samples of step 0",
    ),
    _folders(
        name="moments are restored in another order",
        changes=(
            (
                "optimizer = torch.optim.SGD(whole.parameters(), lr",
                "own = [*whole.parameters()]\n"
                '    if (ROOT / "latest").exists():\n'
                "        own = [*own[2:4], *own[:2], *own[4:]]\n"
                "    optimizer = torch.optim.SGD(own, lr",
            ),
        ),
        step=2,
        rank=0,
        tensor="net.first.weight/momentum_buffer",
        words="has what net.second.weight/momentum_buffer had",
    ),
    _folders(
        name="RNG-RESTORE: every rank restores the first one's generator",
        source="Megatron-LM #6858",
        changes=(
            (
                'torch.set_rng_state(state["torch"])',
                'torch.set_rng_state(torch.load(folder / "rank0.pt", weights_only=False)["torch"])',
            ),
        ),
        step=2,
        rank=1,
        words="other random numbers are drawn: rank 1 has rank 0's",
    ),
    _folders(
        name="GAS-RESUME: the position counts micro-batches as steps",
        source="gpt-neox d6f571b2",
        changes=(
            ("divmod(step, per_epoch)", "divmod(step // ACCUMULATE if first else step, per_epoch)"),
            ("    per_epoch = N // BATCH\n", "    per_epoch = N // BATCH\n    first = step > 0\n"),
            ("            step += 1\n", "            step += 1\n            first = False\n"),
        ),
        step=2,
        words="step 2 has the samples of step 1",
    ),
    _folders(
        name="an average of the weights that is not restored",
        source="pytorch #117742",
        changes=(
            (
                'whole.load_state_dict(state["net"])',
                'state["net"].pop("net.ema")\n'
                '    whole.load_state_dict(state["net"], strict=False)',
            ),
        ),
        step=2,
        rank=0,
        tensor="net.ema",
        words="net.ema is zero: it was not restored",
    ),
)

# Correct, or not to be told: nothing is falsified, and the reason names what would settle it.
OPEN = (
    _snapshot(
        name="step= is forgotten, and the weights show it",
        changes=((", step=self.global_step\n", "\n"),),
        verdict="held",
    ),
    _snapshot(
        name="a snapshot every third step: the steps since are repeated",
        changes=(('"--save-every", type=int, default=1', '"--save-every", type=int, default=3'),),
        verdict="held",
    ),
    _snapshot(
        name="weights are clamped after each step",
        changes=(
            (
                "        self.scheduler.step()\n",
                "        with torch.no_grad():\n"
                "            self.raw.head.weight.clamp_(-0.1, 0.1)\n"
                "        self.scheduler.step()\n",
            ),
        ),
        verdict="held",
    ),
    _snapshot(
        name="a schedule as long as {steps}",
        changes=(_AS_LONG,),
        verdict="held",
    ),
    _snapshot(
        name="a command without {steps}, cut off from inside",
        changes=(),
        arguments=_CUT_OFF,
        verdict="held",
    ),
    _snapshot(
        name="an unseeded script",
        changes=(("torch.manual_seed(0)", "torch.seed()"),),
        verdict="held",
    ),
    _snapshot(
        name="no snapshot before the stop",
        changes=(('"--save-every", type=int, default=1', '"--save-every", type=int, default=9'),),
        verdict="inconclusive",
        words="the script began anew, with its initial weights",
    ),
    _folders(
        name="step= counts micro-batches",
        changes=(("optimizer, step=step)", "optimizer, step=step * ACCUMULATE)"),),
        verdict="inconclusive",
        words="observe(..., step=2)",
    ),
    _folders(
        name="a folder every third step",
        changes=(("else 1\n", "else 3\n"),),
        verdict="held",
    ),
    _nanogpt(
        name="positions are drawn with replacement, from the seed again",
        changes=(('    torch.set_rng_state(checkpoint["rng"][ddp_rank])\n', ""),),
        verdict="inconclusive",
        words="(those of step 0 again)",
    ),
    _nanogpt(
        name="a checkpoint at the end alone",
        changes=(("    if master_process:", "    if master_process and iter_num == max_iters:"),),
        verdict="held",
    ),
)
