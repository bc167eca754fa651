"""Real bugs in scripts of `examples/user_trainers` that use accelerate, Trainer or Lightning.

`make integrations` tests that each one is found.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

TWINS = (
    Twin(
        name="ranks share out permutations of their own",
        script="accelerate_loop.py",
        source="accelerate #2694",
        changes=(
            ("use_seedable_sampler=True", "use_seedable_sampler=False"),
            ("accelerator = Accelerator(\n", "accelerator = Accelerator(\n    rng_types=[],\n"),
            (
                "loader = DataLoader(",
                "torch.manual_seed(accelerator.process_index)\nloader = DataLoader(",
            ),
        ),
        check="coverage",
        step=0,
        rank=1,
        words="samples drawn again in epoch 0 by rank 1",
    ),
    Twin(
        name="a prepared schedule moves once for every worker",
        script="accelerate_loop.py",
        source="accelerate #662, #1398",
        changes=(
            ("split_batches=True, use_seed", "split_batches=False, use_seed"),
            ("batch_size=MICRO_BATCH,", "batch_size=MICRO_BATCH // accelerator.num_processes,"),
        ),
        check="parity",
        step=1,
        words="learning rate is not the single device's",
    ),
    Twin(
        name="the logged loss is looked at for a NaN, which is filtered out of it",
        script="trainer.py",
        source="transformers #13619, trl #6702",
        changes=(
            (
                "on_pre_optimizer_step(self, args, state, control, model",
                "on_log(self, args, state, control, logs",
            ),
            (
                "not all(parameter.grad.isfinite().all() for parameter in model.parameters())",
                "not torch.tensor(logs.get('loss', 0.0)).isfinite()",
            ),
        ),
        check="finiteness",
        step=4,
        rank=1,
    ),
    Twin(
        name="a mean of means over micro-batches",
        script="trainer.py",
        source="transformers #34191",
        changes=(
            (
                "return total / num_items_in_batch",
                "return total / count / MICRO_BATCHES / world_size",
            ),
        ),
        check="parity",
        step=0,
        tensor="embedding.weight",
    ),
    Twin(
        name="the sampler that Lightning puts in pads",
        script="lightning_module.py",
        source="Lightning #2398",
        changes=(("torch.randn(36, 4)", "torch.randn(35, 4)"),),
        check="coverage",
        step=2,
        rank=1,
        words="samples drawn again in epoch 0 by rank 1",
    ),
    Twin(
        name="gradients are cleared between micro-batches",
        script="lightning_module.py",
        source="DeepSpeed #6550",
        changes=(
            (
                "        inputs, targets = batch\n",
                "        self.zero_grad()\n        inputs, targets = batch\n",
            ),
        ),
        check="weighting",
        step=0,
        tensor="layers.0.weight",
        words="of a micro-batch was cleared before the optimizer stepped",
    ),
)
