"""The callback that observes Lightning's `Trainer`; it needs the extra `integrations`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from entrenar_py.check.observing import Observation, observe


class ObserveCallback(Callback):
    """A callback that observes a model in training: `Trainer(..., callbacks=[ObserveCallback()])`.

    `options` are passed to `observe`. Use `observation` to report what no hook can see, such as the
    loss and its weight from `training_step`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.observation = Observation()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Observe from the creation of the training loader: model and optimizers exist by then.

        The loader is created after this call, and iterated before any other callback is called.
        """
        strategy = trainer.strategy
        process = strategy.process_dataloader

        def observed(loader: Any) -> Any:
            processed = process(loader)
            if trainer.training:  # not the loaders of the earlier sanity check
                del strategy.process_dataloader  # restores the method of the class
                optimizers = trainer.optimizers
                # By hand, Lightning counts the step of each optimizer.
                counted = 1 if pl_module.automatic_optimization else len(optimizers)
                is_replaced = trainer.reload_dataloaders_every_n_epochs > 0
                self.observation = observe(
                    pl_module,
                    optimizers[0] if len(optimizers) == 1 else optimizers,
                    sampler=None if is_replaced else processed,
                    step=trainer.global_step // counted,
                    **self._options,
                )
            return processed

        strategy.process_dataloader = observed

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the end of training."""
        self.observation.close()
