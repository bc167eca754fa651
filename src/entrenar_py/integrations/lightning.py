"""The callback that observes Lightning's `Trainer`. Needs the extra `integrations`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from entrenar_py.observing import Observation, observe


class ObserveCallback(Callback):
    """`Trainer(..., callbacks=[ObserveCallback()])`: what `observe` does, as long as it trains.

    `options` are those of `observe`. What no hook can see is told to `observation`, from
    `training_step` say, where the loss and its weight are known.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.observation = Observation()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers are there. The loader is made next, and gone through for the first
        time before any callback is told: so it is caught where the strategy is given it.
        """
        strategy = trainer.strategy
        process = strategy.process_dataloader

        def observed(loader: Any) -> Any:
            made = process(loader)
            if trainer.training:  # not those of the sanity check before it
                del strategy.process_dataloader  # the instance's: the class's is there again
                optimizers = trainer.optimizers
                self.observation = observe(
                    pl_module,
                    optimizers[0] if len(optimizers) == 1 else optimizers,
                    sampler=made,
                    step=trainer.global_step,
                    **self._options,
                )
            return made

        strategy.process_dataloader = observed

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What comes after it is not training."""
        self.observation.close()
