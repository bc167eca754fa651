"""The learning rates of two updates, tensor by tensor, to be compared. Judges nothing."""

from __future__ import annotations

from entrenar_py.trace import Update

Rates = dict[str | None, tuple[float, float]]


def of(model: Update, update: Update) -> Rates:
    """Return the rates of both updates: under None the first parameter group's, then by tensor.

    Tensors are those in other groups than the first. A tensor that a rank's own optimizer does not
    step (another rank's does) has no rate there, and is left out.
    """
    rates: Rates = {None: (model.learning_rate, update.learning_rate)}
    names = dict.fromkeys((*model.rates, *update.rates))
    stepped = [_stepped(one) for one in (model, update)] if names else []
    for name in names:
        own = (model.rates, stepped[0]), (update.rates, stepped[1])
        if all(name in given or not held or name in held for given, held in own):
            rates[name] = model.rate_of(name), update.rate_of(name)
    return rates


def differ(model: Update, update: Update) -> tuple[str | None, float, float] | None:
    """Return the first tensor (or None) whose rates differ, with both; None if none does."""
    return next((((n, *pair)) for n, pair in of(model, update).items() if pair[0] != pair[1]), None)


def _stepped(update: Update) -> set[str]:
    """Return the tensors of which the rank's optimizer has state."""
    return {key.rpartition("/")[0] for key in update.optimizer}
