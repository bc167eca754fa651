"""The callback that observes Hugging Face's `Trainer`; it needs the extra `integrations`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from entrenar_py.check.observing import Observation, observe
from entrenar_py.check.observing.sources import InOrder


class ObserveCallback(TrainerCallback):
    """A callback that observes a model in training: `Trainer(..., callbacks=[ObserveCallback()])`.

    `options` are passed to `observe`. Use `observation` to report what no hook can see, such as the
    loss and its weight from `compute_loss_func`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.observation = Observation()

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start to observe: model, optimizer and loader exist now, and a checkpoint is loaded."""
        self.observation = observe(
            objects["model"],
            objects["optimizer"],
            # All micro-batches of a step are fetched before the first one is used.
            sampler=InOrder(objects["train_dataloader"]),
            step=state.global_step,
            **self._options,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Report the end of training."""
        self.observation.close()
