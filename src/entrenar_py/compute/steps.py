"""The interface between a backend and the workload whose steps it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Array: TypeAlias = "NDArray[np.float32]"

# (x [rows, in], weight [out, in], bias [out] or None) -> [rows, out], as `F.linear`.
LinearFunction: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"
# x of any shape -> the same shape: dropout, or the identity.
DropFunction: TypeAlias = "Callable[[Tensor], Tensor]"
# All tensors of a model by name, on one device.
Tensors: TypeAlias = "Mapping[str, Tensor]"
Batch: TypeAlias = "Sequence[Tensor]"  # the samples of a step

# (sample ids, at least one; drop) -> the summed loss, and the scaled gradient of each trainable
# tensor, in the order and with the shapes of the specs, float32 on the host.
Stepper: TypeAlias = "Callable[[Sequence[int], DropFunction], tuple[float, list[Array]]]"


class Spec(Protocol):
    """A tensor of a model: `role` is trainable, frozen, or buffer."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...


class Model(Protocol):
    """The part of a `training.workload.Workload` that a backend uses."""

    @property
    def specs(self) -> Sequence[Spec]: ...

    @property
    def draws(self) -> bool:
        """True if the model draws by itself, by the key that `drop` has (`draws.key_of`)."""

    @property
    def is_static(self) -> bool:
        """True if `loss_of` runs the same operations on all batches of the same shapes."""

    @property
    def constants(self) -> Tensors:
        """Tensors that are no replica's: they never change, and `loss_of` knows them by itself.

        A backend that keeps them in its own memory passes them to `loss_of` by name.
        """

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the tensors of the samples `ids`, on the CPU."""

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        """Return the loss summed over a batch, 0-d."""

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        """Return the loss, and `scale` times its gradient for each trainable tensor, on the CPU."""
