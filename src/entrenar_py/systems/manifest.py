"""One real gradient of a workload on every backend that opens, and what it consists of."""

from __future__ import annotations

from entrenar_py import backends, trace
from entrenar_py.backends import Backend
from entrenar_py.errors import BackendUnavailable, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.systems.recorder import Recorder
from entrenar_py.training import dropout, engine, workload

ORDER = ("cpu", "wgpu", "cuda")


def run(scenario: Scenario) -> trace.Trace:
    """A Manifest event per backend, or a failed Attempt that says why one was skipped.

    Every backend starts from the same weights and sees the same batch. Raises UsageError for
    faults and options: this system has none.
    """
    if scenario.faults or scenario.options:
        raise UsageError(
            f"faults={[fault.kind for fault in scenario.faults]} "
            f"options={sorted(scenario.options)} on system manifest: it takes none"
        )
    model = workload.build(
        scenario.workload,
        num_samples=scenario.num_samples,
        width=scenario.width,
        data=scenario.rng("data"),
    )
    recorder = Recorder(scenario)
    for name in ORDER:
        try:
            backend = backends.open_backend(name)
            entries = gradient_entries(scenario, model, backend)
        except BackendUnavailable as error:
            recorder.emit(trace.Attempt(backend=name, served=False, reason=str(error)))
            continue
        recorder.emit(
            trace.Manifest(
                backend=name, entries=entries, device=backend.device, software=backend.software
            )
        )
    return recorder.finish(status="completed")


def gradient_entries(
    scenario: Scenario, model: workload.Workload, backend: Backend
) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """(name, shape, dtype) of each gradient that autograd left on a replica, in replica order.

    The order in which autograd reaches the leaves is not recorded: it depends on the scheduling of
    threads as soon as a GPU takes part, and no trainer here sends gradients by it.
    """
    replica = engine.Engine(
        model, backend.linear, model.initial(scenario.rng("initial")), scale=1.0
    )
    ids = range(scenario.batch_size)
    loss = model.loss_sum(replica.tensors, ids, linear=backend.linear, drop=dropout.none)
    loss.backward()  # type: ignore[no-untyped-call]
    return tuple(
        (name, tuple(tensor.grad.shape), str(tensor.grad.dtype).removeprefix("torch."))
        for name, tensor in replica.tensors.items()
        if tensor.grad is not None
    )
