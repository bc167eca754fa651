"""Training steps on a wgpu adapter: the device calls and the results of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.compute.wgpu.bounds.sensitivity import Deviation
from entrenar_py.compute.wgpu.resident import ResidentStep
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import device_meter
from entrenar_py.systems.probes.device_meter import Meter, open_adapter
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.engine import Engine
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Workload
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.recorder import Recorder


class Oracle:
    """One step of `workload` from the values `tensors`, with the dropout masks that `drop` draws.

    `inputs` are the weights and buffers that change between steps, then `batch`, then `masks`.
    """

    def __init__(
        self,
        workload: Workload,
        tensors: Mapping[str, Tensor],
        ids: Sequence[int],
        drop: DropFunction,
        scale: float,
    ) -> None:
        self._workload, self._ids, self._scale = workload, ids, scale
        self._held = {name: tensor.detach() for name, tensor in tensors.items()}
        self.batch = list(workload.batch(ids))
        self.masks: list[Tensor] = []
        self._draw(drop)
        moving = {spec.name for spec in workload.specs if spec.role != "frozen"}
        self._names = [*self._held]
        weights = [tensor for name, tensor in self._held.items() if name in moving]
        self.inputs = [*weights, *self.batch, *self.masks]

    def on_cpu(self) -> list[Array]:
        """Return loss and gradients computed by torch on the CPU in float32."""
        loss, gradients = self._workload.gradients(
            {
                spec.name: self._held[spec.name].clone().requires_grad_(spec.role == "trainable")
                for spec in self._workload.specs
            },
            self._ids,
            drop=self._dropping(self.masks),
            scale=self._scale,
        )
        return [np.array(loss, np.float32), *gradients]

    def explain(
        self, results: Sequence[Tensor], graph: GraphModule, inputs: Sequence[Tensor]
    ) -> list[Deviation]:
        """Return the error of each of `results`, and its rounding bound.

        `graph` is the captured step, and `inputs` its inputs, in the graph's order. The error is
        the larger of two: against torch's step in float64, and against the graph in float64. This
        detects mistakes in the capture and in the evaluation of the graph.
        """
        deviations = sensitivity.deviations(results, graph, inputs)
        exact = self._step(*(_double(deviation) for deviation in self._given()))
        together = []
        for deviation, got, right in zip(deviations, results, exact, strict=True):
            errors = (got.double() - right).abs().nan_to_num(torch.inf).reshape(-1)
            together.append(
                replace(
                    deviation,
                    error=max(deviation.error, float(errors.sum())),
                    element_error=max(deviation.element_error, float(errors.max())),
                )
            )
        return together

    def _given(self) -> list[Tensor]:
        return [*self._held.values(), *self.batch, *self.masks]

    def _step(self, *given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        trained = {spec.name for spec in self._workload.specs if spec.role == "trainable"}
        values = {name: next(rest).detach().requires_grad_(name in trained) for name in self._names}
        batch = [next(rest) for _ in self.batch]
        drop = self._dropping(list(rest))
        loss = self._workload.loss_of(values, batch, linear=F.linear, drop=drop)
        leaves = [values[spec.name] for spec in self._workload.specs if spec.name in trained]
        scale = torch.tensor(self._scale, dtype=loss.dtype)
        return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

    def _draw(self, drop: DropFunction) -> None:
        """Keep the masks that `drop` draws, in the order in which the model uses them."""
        if drop is engine.no_dropout:
            return

        def keep(x: Tensor) -> Tensor:
            self.masks.append(drop(torch.ones(x.shape)))
            return x * self.masks[-1]

        with torch.no_grad():
            self._workload.loss_of(self._held, self.batch, linear=F.linear, drop=keep)

    def _dropping(self, masks: Sequence[Tensor]) -> DropFunction:
        if not masks:
            return engine.no_dropout
        rest = iter(masks)
        return lambda x: x * next(rest)


def _double(one: Tensor) -> Tensor:
    return one.double() if one.is_floating_point() else one


SCALE = 2.0**-3  # not 1, so that a missing or doubled scale shows
ELEMENT_BYTES = 4
NOISE = 0.1  # added so that no tensor is 0, as the B matrices of adapters are initially
NUM_SAMPLES = (3, 7)


@dataclass(frozen=True)
class Call:
    """A step of `replica` with weights `version`, on `num_samples` samples from `first` on.

    If `explained`, its results are compared with float64. If `poisoned`, one weight is NaN.
    """

    replica: int
    num_samples: int
    first: int = 0
    version: int = 0
    explained: bool = False
    poisoned: bool = False

    @property
    def given(self) -> str:
        """A name for the step's inputs: equal names mean equal inputs."""
        return f"replica {self.replica}, weights {self.version}, {self.first}+{self.num_samples}"


def calls(few: int, *more: int) -> list[Call]:
    """Return the steps of a run, in an order that shows any value left over from an earlier step.

    The first step, on `few` samples, runs twice. Then come other samples and weights of the same
    sizes, other sizes (`more`), repetitions, a replica with other frozen weights, and a NaN.
    """
    again = Call(0, few)
    return [
        again,
        again,
        Call(0, few, first=few, version=1, explained=True),
        *(Call(0, number, explained=True) for number in more),
        again,
        *(Call(0, number) for number in more),
        Call(1, few, explained=True),
        Call(1, few),
        again,
        Call(0, few, version=2, poisoned=True),
        again,
    ]


def run(scenario: Scenario) -> trace.Trace:
    """Record a Stepped event for each step, and for some also Explained or Poisoned events.

    Without an adapter the run ends `failed`, with the reason.
    """
    recorder = Recorder(scenario)
    sizes = sizes_of(scenario)
    try:
        backend = open_adapter(scenario)
        bench = Bench(scenario, backend)
        for number, call in enumerate(calls(*sizes)):
            for event in bench.step(number, call):
                recorder.emit(event)
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    return recorder.finish(status="completed")


def sizes_of(scenario: Scenario) -> list[int]:
    """Return the batch sizes of the run's steps; two different batches have the first size.

    Raises UsageError unless the sizes are distinct and positive, and the data set is large enough.
    """
    sizes = scenario.options.get("samples", NUM_SAMPLES)
    whole = isinstance(sizes, list | tuple) and all(type(one) is int and one > 0 for one in sizes)
    if not whole or not sizes or len(set(sizes)) < len(sizes):
        raise UsageError(f"options samples={sizes!r}: use a list of different whole numbers >= 1")
    least = max(2 * sizes[0], *sizes)
    if least > scenario.num_samples:
        raise UsageError(
            f"options samples={sizes!r} with num_samples={scenario.num_samples}: "
            f"use num_samples>={least}"
        )
    return list(sizes)


class Bench:
    """Two replicas of a workload on one backend, and the number of steps of each."""

    def __init__(self, scenario: Scenario, backend: WgpuBackend) -> None:
        self._scenario, self._backend = scenario, backend
        self._model = models.model_of(scenario)
        self._replicas: list[Engine] = []
        self._steppers: list[ResidentStep] = []
        for index in range(2):
            initial = self._model.initial(scenario.rng(f"initial {index}"))
            replica = Engine(self._model, backend, initial, scale=SCALE)
            self._replicas.append(replica)
            self._steppers.append(backend.stepper(self._model, replica.tensors, scale=SCALE))
        self._made: dict[tuple[int, int], int] = {}  # (replica, number of samples) -> steps

    def step(self, number: int, call: Call) -> Iterator[trace.Event]:
        """Yield the events of step `number`: its device calls and its results."""
        replica = self._replicas[call.replica]
        self._set_weights(replica, call)
        ids = range(call.first, call.first + call.num_samples)
        with device_meter.watching() as meter:
            drop = self._dropout(call)
            chosen = drop if drop is engine.no_dropout else meter.leaving_out(drop)
            # Masks and samples come from the CPU; creating them does not count.
            with patch.object(self._model, "batch", meter.leaving_out(self._model.batch)):
                loss, gradients = self._steppers[call.replica](ids, chosen)
        names = ["loss", *replica.layout.trainable]
        results = dict(zip(names, [np.array(loss, np.float32), *gradients], strict=True))
        yield self._stepped(number, call, meter, results)
        if call.explained:
            yield from self._explained(number, call, results)
        if call.poisoned:
            yield from self._poisoned(number, call, results)

    def _set_weights(self, replica: Engine, call: Call) -> None:
        rng = self._scenario.rng(f"weights {call.replica} {call.version}")
        initial = self._model.initial(self._scenario.rng(f"initial {call.replica}"))
        for name, part in replica.layout.trainable.items():
            noise = rng.normal(0, NOISE, initial[name].shape).astype(np.float32)
            replica.parameters[part] = (initial[name] + noise).reshape(-1)
        for array in replica.buffers.values():
            array[...] = rng.uniform(0, 1, array.shape)
        if call.poisoned:
            replica.parameters[0] = np.nan

    def _dropout(self, call: Call) -> DropFunction:
        """Return dropout with masks that depend only on the inputs of `call`."""
        if not self._scenario.dropout:
            return engine.no_dropout
        return engine.Dropout(self._scenario.dropout, self._scenario.rng(f"masks {call.given}"))

    def _stepped(
        self, number: int, call: Call, meter: Meter, results: Mapping[str, Array]
    ) -> trace.Stepped:
        earlier = self._made.get((call.replica, call.num_samples), 0)
        self._made[call.replica, call.num_samples] = earlier + 1
        inputs = self._oracle(call).inputs
        return trace.Stepped(
            step=number,
            backend=self._backend.name,
            device=self._backend.device,
            software=self._backend.software,
            num_samples=call.num_samples,
            given=call.given,
            earlier=earlier,
            submissions=meter.submissions,
            read_backs=meter.read_backs,
            uploads=meter.uploads,
            upload_bytes=meter.upload_bytes,
            declared_bytes=ELEMENT_BYTES * sum(one.numel() for one in inputs),
            num_inputs=len(inputs),
            dispatches=meter.dispatches,
            compiled=meter.compiled,
            traced=meter.traced,
            on_host=tuple(dict.fromkeys(meter.on_host)),
            results={name: trace.record_tensor(array) for name, array in results.items()},
        )

    def _oracle(self, call: Call) -> Oracle:
        return Oracle(
            self._model,
            self._replicas[call.replica].tensors,
            range(call.first, call.first + call.num_samples),
            self._dropout(call),
            SCALE,
        )

    def _explained(
        self, number: int, call: Call, results: Mapping[str, Array]
    ) -> Iterator[trace.Explained]:
        oracle = self._oracle(call)
        stepper = self._steppers[call.replica]
        graph, inputs = stepper.captured(oracle.batch, oracle.masks)
        tensors = [torch.from_numpy(deviation) for deviation in results.values()]
        deviations = oracle.explain(tensors, graph, inputs)
        for name, deviation in zip(results, deviations, strict=True):
            yield trace.Explained(
                of=self._scenario.workload,
                tensor=name,
                step=number,
                device=self._backend.device,
                software=self._backend.software,
                finite=bool(np.isfinite(results[name]).all()),
                num_elements=deviation.num_elements,
                num_bounded=deviation.num_elements,
                element=deviation.element,
                error=deviation.element_error,
                bound=deviation.element_bound,
                total_error=deviation.error,
                total_bound=deviation.bound,
            )

    def _poisoned(
        self, number: int, call: Call, results: Mapping[str, Array]
    ) -> Iterator[trace.Poisoned]:
        expected = self._oracle(call).on_cpu()
        for (name, array), right in zip(results.items(), expected, strict=True):
            lost = np.isnan(right) & ~np.isnan(array)
            yield trace.Poisoned(
                of=self._scenario.workload,
                tensor=name,
                step=number,
                device=self._backend.device,
                software=self._backend.software,
                reached=int(np.isnan(right).sum()),
                lost=int(lost.sum()),
                element=int(lost.argmax()) if lost.any() else None,
            )
