"""The forward and backward passes of one stage, on torch's devices or on wgpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from entrenar_py.compute import draws
from entrenar_py.compute.wgpu.resident import Body, Programs, Resident, Shapes, shapes_of
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Tensors
from entrenar_py.train.stages.stage_model import Received, StageWorkload


@dataclass(frozen=True)
class Hidden:
    """Hidden states of a shard, [n, t, d] on the host; the next stage draws from `draws` on."""

    tensor: Tensor
    draws: int


@dataclass(frozen=True)
class Backward:
    """The gradients of one shard in a stage.

    `gradients` has the gradients of the trainable tensors in the specs' order, on the host and
    multiplied by the scale. `hidden` is the gradient of the received hidden states, None in the
    first stage. `loss` is the summed loss, 0 except in the last stage.
    """

    gradients: list[Array]
    hidden: Tensor | None
    loss: float = 0.0


class StageStep(Protocol):
    """The passes of a stage. Shards are identified by number; `begin` forgets all of them."""

    def begin(self) -> None:
        """Begin or restart a step; weights may have changed."""
        ...

    def forward(
        self, shard: int, ids: Sequence[int], received: Received | None, drop: DropFunction
    ) -> Hidden | Backward:
        """Return the result of the forward pass of `shard`; in the last stage, of both passes."""
        ...

    def backward(self, shard: int, gradient: Tensor) -> Backward:
        """Return the result of the backward pass.

        `gradient` is the gradient of the hidden states that were sent on.
        """
        ...


class TorchStage:
    """A `StageStep` by autograd, on the CPU or a CUDA device."""

    def __init__(
        self,
        workload: StageWorkload,
        tensors: Mapping[str, Tensor],
        *,
        place: torch.device,
        scale: float,
    ) -> None:
        self._workload, self._place, self._scale = workload, place, scale
        self._host = dict(tensors)
        self._names = [spec.name for spec in workload.specs]
        self._tensors = self._host
        # shard -> input and output of its forward pass
        self._kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        if place.type != "cpu":
            workload.objective.to(place)
            self._tensors = {
                name: one.detach().to(place).requires_grad_() for name, one in tensors.items()
            }

    def begin(self) -> None:
        """See `StageStep`."""
        self._kept.clear()
        if self._tensors is not self._host:
            with torch.no_grad():
                for name, one in self._tensors.items():
                    one.copy_(self._host[name])

    def forward(
        self, shard: int, ids: Sequence[int], received: Received | None, drop: DropFunction
    ) -> Hidden | Backward:
        """See `StageStep`."""
        came = None
        if received is not None:
            hidden = received.hidden.to(self._place).detach().requires_grad_()
            came = Received(hidden, received.draws)
        output, draws = self._workload.output_of(
            self._tensors, self._workload.batch(ids), came, drop=drop, place=self._place
        )
        into = None if came is None else came.hidden
        if not self._workload.stage.is_last:
            self._kept[shard] = into, output
            return Hidden(output.detach().contiguous().cpu(), draws)
        # In one process, the scale multiplies the loss. Scaling here gives the same bits.
        scaled = output * torch.tensor(self._scale, device=output.device)
        return self._through(scaled, None, into, loss=output.item())

    def backward(self, shard: int, gradient: Tensor) -> Backward:
        """See `StageStep`."""
        into, out = self._kept.pop(shard)
        return self._through(out, gradient.to(self._place), into)

    def _through(
        self, out: Tensor, gradient: Tensor | None, into: Tensor | None, *, loss: float = 0.0
    ) -> Backward:
        leaves: list[Tensor] = [self._tensors[name] for name in self._names]
        wanted: list[Any] = leaves if into is None else [*leaves, into]
        found = torch.autograd.grad(out, wanted, gradient)
        of_hidden = None if into is None else found[-1].contiguous().cpu()
        gradients = [one.cpu().numpy() for one in found[: len(leaves)]]
        return Backward(gradients, of_hidden, loss)


_HOST = torch.device("cpu")  # the device of all tensors while a graph is captured


@dataclass(frozen=True)
class Pass:
    """The properties of a pass that determine its graph, besides the stage.

    `shapes` has the shapes of the batch. `is_keyed` is true if dropout has a key; `draws` is the
    number of the first draw. `is_forward` is false if the graph returns gradients.
    """

    shapes: Shapes
    is_keyed: bool
    draws: int
    is_forward: bool
    scale: float


@dataclass(frozen=True)
class Shard:
    """The inputs of a stage's passes of one shard, kept from the forward to the backward pass.

    `hidden` is float32 [n, t, d], or None in the first stage; `dtype` is the dtype in which it was
    received. `key` is dropout's key, int32 [2], or None without dropout.
    """

    batch: tuple[Tensor, ...]
    hidden: Tensor | None
    dtype: torch.dtype
    draws: int
    key: Tensor | None

    @classmethod
    def of(cls, batch: tuple[Tensor, ...], received: Received | None, drop: DropFunction) -> Shard:
        """Return the inputs of a shard, with a newly drawn key."""
        key = draws.key_of(drop)
        if received is None:
            return cls(batch, None, torch.float32, 0, key)
        hidden = received.hidden.detach().float().requires_grad_()
        return cls(batch, hidden, received.hidden.dtype, received.draws, key)

    def inputs(self) -> list[Tensor]:
        """Return the inputs of the graph, in order."""
        return [*self.batch, *(one for one in (self.hidden, self.key) if one is not None)]

    def again(self, given: Sequence[Tensor]) -> Shard:
        """Return the shard with `given` instead of `inputs`."""
        rest = iter(given)
        batch = tuple(next(rest) for _ in self.batch)
        hidden = None if self.hidden is None else next(rest)
        return Shard(
            batch, hidden, self.dtype, self.draws, None if self.key is None else next(rest)
        )


class WgpuStage:
    """A `StageStep` on a wgpu device, which holds one copy of the frozen weights for all passes.

    Trainable tensors, the batch, and tensors from other stages are uploaded for each pass.
    """

    def __init__(
        self,
        programs: Programs,
        workload: StageWorkload,
        tensors: Mapping[str, Tensor],
        *,
        scale: float,
    ) -> None:
        self._resident = Resident(programs, workload, tensors)
        self._workload, self._scale = workload, scale
        self._names = [spec.name for spec in workload.specs]
        self._kept: dict[int, Shard] = {}

    def begin(self) -> None:
        """See `StageStep`."""
        self._kept.clear()

    def forward(
        self, shard: int, ids: Sequence[int], received: Received | None, drop: DropFunction
    ) -> Hidden | Backward:
        """See `StageStep`."""
        inputs = Shard.of(self._workload.batch(ids), received, drop)
        if self._workload.stage.is_last:
            loss, *gradients = self._run(inputs, self._whole(inputs), is_forward=False)
            return _backward(inputs, gradients, float(loss))
        hidden, number = self._run(inputs, self._onward(inputs), is_forward=True)
        self._kept[shard] = inputs
        return Hidden(torch.from_numpy(hidden), int(number))

    def backward(self, shard: int, gradient: Tensor) -> Backward:
        """See `StageStep`."""
        inputs = self._kept.pop(shard)
        body = self._back(inputs)
        return _backward(inputs, self._run(inputs, body, gradient.float(), is_forward=False))

    def _run(self, inputs: Shard, body: Body, *more: Tensor, is_forward: bool) -> list[Array]:
        key = Pass(
            shapes=shapes_of(inputs.batch),
            is_keyed=inputs.key is not None,
            draws=inputs.draws,
            is_forward=is_forward,
            scale=self._scale,
        )
        return self._resident.run(key, body, [*inputs.inputs(), *more])

    def _onward(self, like: Shard) -> Body:
        """Return the forward pass as a function of `like.inputs()`: (hidden states, next draw)."""

        def compute(tensors: Tensors, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            hidden, number = self._output(tensors, like.again(given))
            return hidden.detach(), torch.tensor(number)

        return compute

    def _back(self, like: Shard) -> Body:
        """Return the backward pass as a function of `like.inputs()` and the output's gradient.

        The function returns the gradients of the trainable tensors and of the received hidden
        states.
        """

        def compute(tensors: Tensors, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            *inputs, gradient = given
            shard = like.again(inputs)
            hidden, _ = self._output(tensors, shard)
            return torch.autograd.grad(hidden, self._leaves(tensors, shard), gradient)

        return compute

    def _whole(self, like: Shard) -> Body:
        """Return both passes of the last stage as a function: (loss, gradients as in `_back`)."""

        def compute(tensors: Tensors, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shard = like.again(given)
            loss, _ = self._output(tensors, shard)
            scale = torch.tensor(self._scale)
            return loss.detach(), *torch.autograd.grad(loss, self._leaves(tensors, shard), scale)

        return compute

    def _output(self, tensors: Tensors, shard: Shard) -> tuple[Tensor, int]:
        received = None if shard.hidden is None else Received(shard.hidden, shard.draws)
        drop = engine.no_dropout if shard.key is None else draws.Keyed(shard.key)
        return self._workload.output_of(tensors, shard.batch, received, drop=drop, place=_HOST)

    def _leaves(self, tensors: Tensors, shard: Shard) -> list[Tensor]:
        leaves = [tensors[name] for name in self._names]
        return leaves if shard.hidden is None else [*leaves, shard.hidden]


def _backward(shard: Shard, gradients: Sequence[Array], loss: float = 0.0) -> Backward:
    """Return the gradients of `shard`; the hidden states' gradient has their received dtype."""
    if shard.hidden is None:
        return Backward(list(gradients), None, loss)
    *of_weights, of_hidden = gradients
    return Backward(of_weights, torch.from_numpy(of_hidden).to(shard.dtype), loss)
