"""Models in `FullyShardedDataParallel`: right scripts, and broken ones.

`make twins` tests that each bug is found, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_flat_scripts import LOOP, TRAINER
from falsification.user_trainers import Twin

_TEXTS = {"flat_loop.py": LOOP, "flat_trainer.py": TRAINER}

# All checks but that of NaNs: these scripts look for none.
_WANTED = (
    *("coverage", "determinism", "liveness", "optimizer_state", "parity", "randomness"),
    *("replica_identity", "resume", "step_rule", "weighting"),
)


def _twin(script: str, name: str, *changes: tuple[str, str], check: str = "") -> Twin:
    return Twin(
        name=f"flat parameters: {name}",
        script=script,
        text=_TEXTS[script],
        changes=changes,
        check=check,
        arguments=("{steps}", "{workdir}") if script == "flat_trainer.py" else (),
        wanted=() if check else _WANTED,
    )


_FLAT = ("kept = True", "kept = False")
_PARTS = ("PARTS = 1", "PARTS = 2")
_STRATEGY = "ShardingStrategy.FULL_SHARD"
_CLIP = "            model.clip_grad_norm_(0.5)\n"
_SHORT = (
    "MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)",
    "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
)

VARIANTS = (
    _twin("flat_loop.py", "a loop whose optimizer has the parameters"),
    _twin("flat_loop.py", "a loop whose optimizer has the flat ones", _FLAT),
    _twin(
        "flat_loop.py",
        "accumulation without a reduction",
        _PARTS,
        (_STRATEGY, "ShardingStrategy.SHARD_GRAD_OP"),
    ),
    _twin("flat_loop.py", "accumulation of flat gradients", _FLAT, _PARTS),
    _twin("flat_loop.py", "whole copies", (_STRATEGY, "ShardingStrategy.NO_SHARD")),
    _twin("flat_trainer.py", "a trainer with sharded checkpoints"),
    _twin("flat_trainer.py", "a trainer that computes in bfloat16", _SHORT),
)

_LOCAL = (_CLIP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n")

BUGS = (
    _twin("flat_loop.py", "each rank clips its pieces by their norm", _LOCAL, check="parity"),
    _twin("flat_loop.py", "each rank clips its flat ones", _FLAT, _LOCAL, check="parity"),
    _twin(
        "flat_loop.py",
        "an ignored layer is trained, and never reduced",
        ("    use_orig_params=kept,", "    use_orig_params=kept,\n    ignored_modules=[net[3]],"),
        check="replica_identity",
    ),
    _twin(
        "flat_loop.py",
        "the loss is multiplied by the workers",
        ("(loss / PARTS).backward()", "(loss * world).backward()"),
        ("clip_grad_norm_(0.5)", "clip_grad_norm_(1e3)"),
        check="parity",
    ),
    _twin(
        "flat_loop.py",
        "the optimizer was built before the model was sharded",
        _FLAT,
        ("kept = False", "kept = False\nopt = torch.optim.AdamW(net.parameters(), lr=1e-2)"),
        ("opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n", ""),
        check="liveness",
    ),
    _twin(
        "flat_loop.py",
        "ranks draw the same samples",
        ("DistributedSampler(data, seed=1)", "DistributedSampler(data, 1, 0, seed=1)"),
        check="coverage",
    ),
    _twin(
        "flat_trainer.py",
        "a resume that restores no moments",
        (
            "        set_state_dict(\n            self.model, self.optimizer,\n"
            '            model_state_dict=state["model"], optim_state_dict=state["optimizer"],\n'
            "        )\n",
            '        set_model_state_dict(self.model, state["model"])\n',
        ),
        ("import get_state_dict, set_state_dict", "import get_state_dict, set_model_state_dict"),
        check="resume",
    ),
    _twin(
        "flat_trainer.py",
        "each rank resumes with the moments of rank 0",
        (
            'return {"model": model, "optimizer": optimizer}',
            'return {"model": model, "optimizer": self.optimizer.state_dict()}',
        ),
        (
            "        set_state_dict(\n            self.model, self.optimizer,\n",
            '        self.optimizer.load_state_dict(state["optimizer"])\n'
            "        set_model_state_dict(\n            self.model,\n",
        ),
        (
            '            model_state_dict=state["model"], optim_state_dict=state["optimizer"],',
            '            model_state_dict=state["model"],',
        ),
        ("import get_state_dict, set_state_dict", "import get_state_dict, set_model_state_dict"),
        check="resume",
    ),
)
