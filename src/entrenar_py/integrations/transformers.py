"""The callback that observes Hugging Face's `Trainer`. Needs the extra `integrations`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from entrenar_py.observing import Observation, observe
from entrenar_py.observing.samplers import InOrder


class ObserveCallback(TrainerCallback):
    """`Trainer(..., callbacks=[ObserveCallback()])`: what `observe` does, as long as it trains.

    `options` are those of `observe`. What no hook can see is told to `observation`, from
    `compute_loss_func` say, where the loss and its weight are known.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.observation = Observation()

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        """Model, optimizer and loader are there, and a checkpoint is loaded."""
        self.observation = observe(
            made["model"],
            made["optimizer"],
            # All micro-batches of a step are fetched before the first is used.
            sampler=InOrder(made["train_dataloader"]),
            step=state.global_step,
            **self._options,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        """What comes after it is not training."""
        self.observation.close()
