"""A coordinator's workload: what is trained, and its samples, without the model's weights."""

from __future__ import annotations

from torch import Tensor

from entrenar_py.train.arithmetic.tensors import Batch, DropFunction, LinearFunction, Tensors
from entrenar_py.train.model import model, model_folder
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.workload import Tuned


class Coordinated(Tuned):
    """The trainable tensors of a model whose stages are elsewhere."""

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        """Raise AssertionError: there are no weights here."""
        raise AssertionError("a coordinator of stages computes no loss")


def workload(prepared: Prepared) -> Coordinated:
    """Return the workload of a run, with the values that training begins with.

    Adapters are drawn as in one process. With `method: full` all weights are read, since all are
    trained. Raises UsageError for a checkpoint that can't be used.
    """
    settings = prepared.settings
    if settings.adapts:
        module = model.without_weights(settings, prepared.pad_token)
    else:
        module = model.load(settings, prepared.pad_token)
    both = (prepared.train, prepared.validation)
    model_folder.require_samples(settings, module, both, prepared.pad_token)
    model_folder.require_own_loss(settings, module)
    return Coordinated(
        module,
        prepared.train,
        pad_token=prepared.pad_token,
        class_weights=prepared.class_weights,
    )
